//! A prefill rank in a terminal of its own. The example `decode` is the decode rank and the router.
//!
//! ```text
//! cargo run --release --example prefill
//! cargo run --release --example decode
//! ```
//!
//! The rank registers with a bootstrap server, which it starts itself unless `--bootstrap` names one. It takes
//! requests on a TCP port from one router at a time, as lines of JSON (see `examples/shared/control.rs`). Only
//! prompts come that way: the KV goes straight from the pages of this process into those of the decode rank.
//!
//! With `--dialect vllm` or `--dialect sglang` the rank speaks the protocol of that engine: its peers are decode
//! workers of a fleet that exists, or the example `decode` with the same option.
#![allow(clippy::print_stderr)] // A program for a terminal.

use std::net::TcpListener;
use std::process::ExitCode;

use clap::Parser;
use kv_transfer::bootstrap::KvBootstrapServer;

use kv_examples::cli::{
    CacheOptions, DEFAULT_BOOTSTRAP, DEFAULT_REQUESTS, HandOver, Parallelism, PrefillOptions,
};
use kv_examples::dialect::{Dialect, DialectOptions, Presence, notes};
use kv_examples::error::ExampleError;
use kv_examples::link::Link;
use kv_examples::loading::ModelOptions;
use kv_examples::prefill::PrefillRank;
use kv_examples::rank::RankSpec;
use kv_examples::router::Side;
use kv_examples::transport::{self, note_of_loopback};

/// Computes prompts and sends their KV to decode ranks.
#[derive(Debug, Parser)]
#[command(name = "prefill", version)]
struct Options {
    /// The bootstrap server to register with [default: this process runs one on 127.0.0.1:8998].
    #[arg(long, value_name = "HOST:PORT")]
    bootstrap: Option<String>,

    /// The address at which the rank takes requests from a router.
    #[arg(long, value_name = "HOST:PORT", default_value = DEFAULT_REQUESTS)]
    listen: String,

    #[command(flatten)]
    cache: CacheOptions,

    #[command(flatten)]
    dialect: DialectOptions,

    #[command(flatten)]
    parallelism: Parallelism,

    #[command(flatten)]
    hand_over: HandOver,

    #[command(flatten)]
    prefill: PrefillOptions,

    #[command(flatten)]
    model: ModelOptions,
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<(), ExampleError> {
    let Options { bootstrap, listen, cache, dialect, parallelism, hand_over, prefill, model } = options;
    dialect.check(Side::Prefill, &cache, &hand_over, parallelism)?;
    transport::prepare(cache.transport)?;
    let registers = dialect.dialect != Dialect::Vllm;
    let (bootstrap, server) = match bootstrap {
        Some(got) if !registers => {
            let (option, dialect, instead) = ("bootstrap", dialect.dialect, "--side-channel");
            return Err(ExampleError::NotInDialect { option, got, dialect, instead });
        }
        Some(bootstrap) => (bootstrap, None),
        None if !registers => (String::new(), None),
        None => {
            let server = KvBootstrapServer::start(DEFAULT_BOOTSTRAP)?;
            (server.local_addr().to_string(), Some(server))
        }
    };
    let listener =
        TcpListener::bind(&listen).map_err(ExampleError::at("--listen: cannot take requests at", &listen))?;
    let listen = listener.local_addr().map_err(ExampleError::io("ask for the address of requests"))?;
    let whose = if server.is_some() { "its own" } else { "the" };
    let (chunk_tokens, layer_wise) = (prefill.chunk_tokens, prefill.layer_wise);
    let side = Side::Prefill;
    let (number, of, watch_pages) = (0, 1, false);
    let peer_page_size = cache.page_size * parallelism.dcp;
    let spec = RankSpec {
        side,
        number,
        of,
        bootstrap,
        model,
        cache,
        parallelism,
        peer_page_size,
        hand_over,
        record: false,
        watch_pages,
        chunk_tokens,
        layer_wise,
        dialect,
    };
    for line in notes(&spec).into_iter().chain(note_of_loopback(spec.cache.transport, &spec.bootstrap)) {
        eprintln!("{line}");
    }
    let mut rank = PrefillRank::start(&spec)?;
    let Presence { engine, addr, .. } = rank.presence();
    match registers {
        true => eprintln!(
            "prefill/0 is registered with {whose} bootstrap server {addr}, and takes requests on {listen}"
        ),
        false => {
            eprintln!("prefill/0 is engine {engine} at side channel {addr}, and takes requests on {listen}")
        }
    }
    loop {
        let (stream, router) = listener.accept().map_err(ExampleError::io("accept a router"))?;
        eprintln!("router {router} has connected");
        let result = Link::tcp(stream).and_then(|mut link| rank.serve(&mut link));
        match result {
            Ok(()) => eprintln!("router {router} has no more requests"),
            // A failure of one router does not end the rank: the next router is served.
            Err(error) => eprintln!("router {router}: {error}"),
        }
        rank.abort_all();
    }
}
