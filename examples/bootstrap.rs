//! A bootstrap server of its own: `cargo run --example bootstrap -- --addr 127.0.0.1:8998`.
//!
//! Serves until it is killed. Engines of SGLang and workers of this framework may share it.
#![allow(clippy::print_stdout)]

use std::error::Error;

use clap::Parser;
use kv_bootstrap::KvBootstrapServer;

/// Rendezvous of prefill and decode workers over HTTP.
#[derive(Parser)]
struct Options {
    /// Where to listen; port 0 picks a free one.
    #[arg(long, default_value = "127.0.0.1:8998")]
    addr: String,
}

const ROUTES: &str = "\
  GET    /health                                    OK
  PUT    /v1/ranks                                  register a rank, with a lease
  POST   /v1/ranks/renew                            prolong its lease
  DELETE /v1/ranks                                  withdraw it
  GET    /v1/ranks?role=prefill&dp_rank=0           the ranks of a replica (or &modulo=ROOM; &service=kv, &engine=ID)
  PUT    /route                                     SGLang: register a prefill rank
  GET    /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1
  POST   /register_dp_rank, /query_dp_ranks         SGLang: which replica serves a room";

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let server = KvBootstrapServer::start(&options.addr)?;
    println!("listening on http://{}", server.local_addr());
    println!("{ROUTES}");
    loop {
        std::thread::park();
    }
}
