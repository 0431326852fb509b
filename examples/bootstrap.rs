//! A bootstrap server in a process of its own: `cargo run --example bootstrap -- --addr 127.0.0.1:8998`.
//!
//! The server runs until it is killed. Any number of engines of this library share one server. SGLang's
//! engines have no name: each needs an address of its own, which its prefill ranks register at and its requests
//! carry. The first engine may use `--addr`; `--engine-addr` adds an address for one more, and can be repeated.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use kv_transfer::bootstrap::{KvBootstrapServer, ServerConfig};

/// Runs a bootstrap server: the HTTP registry where decode workers look up the addresses of prefill workers.
#[derive(Parser)]
#[command(name = "bootstrap")]
struct Options {
    /// The address to listen on; port 0 chooses a free port.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8998")]
    addr: String,
    /// One more address, for one more SGLang engine. May be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    engine_addr: Vec<String>,
}

const ROUTES: &str = "\
  GET    /v1/health                                 answers OK
  PUT    /v1/ranks                                  register a rank for the duration of a lease
  POST   /v1/ranks/renew                            renew the lease of a registered rank
  DELETE /v1/ranks                                  withdraw a rank
  GET    /v1/ranks?role=prefill&dp_rank=0           the ranks of a replica (also: &modulo=ROOM, &service=kv, &engine=ID)
At each address, for one SGLang engine:
  PUT    /route                                     register a prefill rank
  GET    /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1
                                                    the sizes of the prefill engine, or one rank
  POST   /register_dp_rank, /query_dp_ranks         store, and look up, which replica serves a room
  GET    /health                                    answers OK, or 503 while a prefill rank is gone";

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let config = ServerConfig::default().with(|config| config.engine_addrs = options.engine_addr);
    let server = KvBootstrapServer::start_with(&options.addr, config)?;
    println!("listening on http://{}", server.local_addr());
    for addr in server.engine_addrs() {
        println!("and for one more SGLang engine on http://{addr}");
    }
    println!("{ROUTES}");
    loop {
        std::thread::park();
    }
}
