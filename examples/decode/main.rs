//! A decode rank in a terminal of its own, and the router. It gives prompts to the prefill rank in the other
//! terminal, receives their KV, generates tokens, and compares every token with a run of the same model in this
//! process.
//!
//! ```text
//! cargo run --release --example prefill
//! cargo run --release --example decode
//! ```
//!
//! With `--dialect vllm` or `--dialect sglang` both sides speak the protocol of that engine.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use kv_examples::cli::{
    CacheOptions, DEFAULT_BOOTSTRAP, DEFAULT_REQUESTS, HandOver, Parallelism, WorkloadOptions,
};
use kv_examples::decode::DecodeRank;
use kv_examples::dialect::{DialectOptions, notes};
use kv_examples::error::ExampleError;
use kv_examples::link::Link;
use kv_examples::loading::ModelOptions;
use kv_examples::progress::Progress;
use kv_examples::rank::RankSpec;
use kv_examples::report::Report;
use kv_examples::router::{Router, Side};
use kv_examples::transport::{self, note_of_loopback};
use kv_examples::verdict;

/// How long to wait for the prefill rank, whose program may still be compiling.
const PATIENCE: Duration = Duration::from_secs(30);

/// Receives the KV of prompts from a prefill rank, generates tokens, and checks every token.
#[derive(Debug, Parser)]
#[command(name = "decode", version)]
struct Options {
    /// The bootstrap server that the prefill rank is registered with.
    #[arg(long, value_name = "HOST:PORT", default_value = DEFAULT_BOOTSTRAP)]
    bootstrap: String,

    /// The address at which the prefill rank takes requests.
    #[arg(long, value_name = "HOST:PORT", default_value = DEFAULT_REQUESTS)]
    prefill: String,

    #[command(flatten)]
    workload: WorkloadOptions,

    #[command(flatten)]
    cache: CacheOptions,

    #[command(flatten)]
    dialect: DialectOptions,

    #[command(flatten)]
    parallelism: Parallelism,

    #[command(flatten)]
    hand_over: HandOver,

    #[command(flatten)]
    model: ModelOptions,
}

fn main() -> ExitCode {
    run(Options::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(options: Options) -> Result<ExitCode, ExampleError> {
    let Options { bootstrap, prefill, workload, cache, dialect, parallelism, hand_over, model } = options;
    dialect.check(Side::Decode, &cache, &hand_over, parallelism)?;
    transport::prepare(cache.transport)?;
    workload.check(&cache)?;
    let mut plan = workload.plan(&hand_over, bootstrap.clone());
    let model_options = model.clone();
    let spec = RankSpec {
        side: Side::Decode,
        number: 0,
        of: 1,
        peer_page_size: cache.page_size * parallelism.dcp,
        bootstrap,
        model,
        cache,
        parallelism,
        hand_over,
        record: false,
        watch_pages: false,
        chunk_tokens: 0,
        layer_wise: false,
        dialect,
    };
    plan.finish_within = spec.finish_within();
    for line in notes(&spec).into_iter().chain(note_of_loopback(spec.cache.transport, &spec.bootstrap)) {
        eprintln!("{line}");
    }
    let mut router = Router::new();
    let stream = connect(&prefill)?;
    let reader = stream.try_clone().map_err(ExampleError::io("clone the connection to the prefill rank"))?;
    router.add(Side::Prefill, reader, stream, None);
    let (here, there) = UnixStream::pair().map_err(ExampleError::io("make a socket pair"))?;
    let reader = here.try_clone().map_err(ExampleError::io("clone a socket"))?;
    router.add(Side::Decode, reader, here, None);
    std::thread::spawn(move || {
        let served = Link::unix(there).and_then(|link| DecodeRank::start(&spec)?.run(link));
        if let Err(error) = served {
            eprintln!("error: decode/0: {error}");
        }
    });

    let model = model_options.load()?;
    let chats = model_options.prompts(&model, workload.prompts())?;
    let progress = Progress::new(workload.answers(), !workload.json);
    let (run, monolithic) = verdict::compare(router, &model, &chats, &plan, &progress)?;
    let report = Report::new(&run, &monolithic, false);
    print!("{}", report.text(workload.json)?);
    if !workload.json
        && let Some(answer) = model_options.first_answer(&run)?
    {
        println!("the answer to request 0: {answer:?}");
    }
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn connect(prefill: &str) -> Result<TcpStream, ExampleError> {
    let end = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        match TcpStream::connect(prefill) {
            Ok(stream) => return Ok(stream),
            // A text that is no address will not become one.
            Err(error) if Instant::now() >= end || error.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(ExampleError::at("--prefill: cannot connect to", prefill)(error));
            }
            Err(_) => {}
        }
        if !told {
            eprintln!(
                "waiting for the prefill rank at {prefill}; to start it: cargo run --release --example prefill"
            );
            told = true;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
