//! Prints what the transports would use on this host or in this container, and tries them out.
//!
//! ```text
//! cargo run --release --example doctor
//! scripts/setup-nixl.sh && source target/nixl/env.sh       # or ucx, or fabric, or several of them
//! cargo run --release --features nixl --example doctor
//! ```
//!
//! | section | what is printed |
//! |---|---|
//! | kv-local | namespaces, user, limits; the speed within this process |
//! | kv-tcp | addresses, socket buffers; the speed between two threads; whether the examples' settings can be used |
//! | host | locked memory, cards, network devices, GPUs, kernel settings; the environment variables of transports |
//! | UCX (`--features ucx`) | the library, devices, what UCX has chosen; the speed between two threads, in a process of its own |
//! | libfabric (`--features fabric`) | the library, providers; the speed between two threads, in a process of its own |
//! | NIXL (`--features nixl`) | the library, backends, settings of UCX; what UCX has chosen and the speed between two processes, whose bytes are compared |
//!
//! The last line names the transports that `--transport auto` of the other examples takes here, in their order.
//!
//! UCX and libfabric are tried in processes of their own because NIXL brings other copies of them. The exit status is 1
//! if a library for which the program was built cannot be loaded, if its trial fails, or if TCP cannot be used.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::process::ExitCode;

#[cfg(any(feature = "fabric", feature = "ucx"))]
mod apart;
mod fabric;
mod host;
mod local;
mod nixl;
mod speed;
mod tcp;
#[cfg(feature = "nixl")]
mod trial;
mod ucx;

/// Prints what the transports would use on this host or in this container, and tries them out.
#[derive(clap::Parser)]
#[command(name = "doctor", version)]
struct Options {}

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let role = ucx::role().or_else(fabric::role).or_else(nixl::role);
    match role.unwrap_or_else(report) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn report() -> Result<(), Error> {
    let Options {} = clap::Parser::parse();
    let local = local::report();
    println!();
    let tcp = tcp::report();
    println!();
    host::report();
    println!();
    let ucx = ucx::report();
    println!();
    let fabric = fabric::report();
    println!();
    // Last, when the threads of the trials have ended: while there is one thread, NIXL can be given all settings of UCX.
    let nixl = nixl::report();
    let named = std::env::var_os("KV_FABRIC_PROVIDER").is_some();
    let members = [
        ("local", local),
        ("nixl", cfg!(feature = "nixl") && nixl.is_ok()),
        ("ucx", cfg!(feature = "ucx") && ucx.is_ok() && !(cfg!(feature = "nixl") && nixl.is_ok())),
        ("fabric", cfg!(feature = "fabric") && fabric.is_ok() && named),
        ("tcp", tcp.is_ok()),
    ];
    let members: Vec<&str> =
        members.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect();
    println!("\n--transport auto takes here: {}", members.join(", "));
    let failed = [tcp, ucx, fabric, nixl].into_iter().filter_map(Result::err);
    let failed: Vec<String> = failed.map(|error| error.to_string()).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\nerror: ").into()) }
}
