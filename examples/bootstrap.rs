//! A bootstrap server in a process of its own: `cargo run --example bootstrap -- --addr 127.0.0.1:8998`.
//!
//! The server runs until it is killed. SGLang's engines and workers of this framework may share one server.
#![allow(clippy::print_stdout)]

use std::error::Error;

use clap::Parser;
use kv_transfer::bootstrap::KvBootstrapServer;

/// Runs a bootstrap server: the HTTP registry where decode workers look up the addresses of prefill workers.
#[derive(Parser)]
struct Options {
    /// The address to listen on; port 0 chooses a free port.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8998")]
    addr: String,
}

const ROUTES: &str = "\
  GET    /health                                    answers OK
  PUT    /v1/ranks                                  register a rank for the duration of a lease
  POST   /v1/ranks/renew                            renew the lease of a registered rank
  DELETE /v1/ranks                                  withdraw a rank
  GET    /v1/ranks?role=prefill&dp_rank=0           the ranks of a replica (also: &modulo=ROOM, &service=kv, &engine=ID)
  PUT    /route                                     SGLang: register a prefill rank
  GET    /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1
                                                    SGLang: the sizes of the prefill engine, or one rank
  POST   /register_dp_rank, /query_dp_ranks         SGLang: store, and look up, which replica serves a room";

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let server = KvBootstrapServer::start(&options.addr)?;
    println!("listening on http://{}", server.local_addr());
    println!("{ROUTES}");
    loop {
        std::thread::park();
    }
}
