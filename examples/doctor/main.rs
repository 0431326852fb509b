//! Prints what the transports would use on this host or in this container, and tries them out.
//!
//! ```text
//! scripts/setup-nixl.sh && source target/nixl/env.sh
//! cargo run --release --features nixl --example doctor
//! ```
//!
//! The program prints namespaces, limits and the speed of the embedded transport; addresses, socket buffers and the speed
//! of TCP; and with `--features ucx` and `--features fabric` the speed of UCX, and of libfabric's providers, in processes of
//! their own, as NIXL brings other copies of them.
//! Without `--features nixl` that is all; with it,
//! it prints libraries, plugins, limits and environment variables. Then it transfers bytes between two
//! processes, checks them, and prints the transports that UCX chose and the speed in both directions. The exit
//! status is 1 if NIXL cannot be used.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::process::ExitCode;

#[cfg(any(feature = "fabric", feature = "ucx"))]
mod apart;
mod fabric;
#[cfg(feature = "nixl")]
mod host;
mod local;
mod speed;
mod tcp;
#[cfg(feature = "nixl")]
mod trial;
mod ucx;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[cfg(feature = "nixl")]
fn main() -> ExitCode {
    use kv_transfer::nixl::{Nixl, Search, guards};

    if let Some(result) = ucx::role().or_else(fabric::role).or_else(trial::role) {
        return match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        };
    }
    // Before NIXL, which must be loaded while there is one thread: the threads of the trial have ended.
    local::report();
    if let Err(error) = tcp::report() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    println!();
    ucx::report();
    println!();
    fabric::report();
    println!();
    // Read before loading NIXL adds variables.
    let missing = guards::missing();
    let nixl = match Nixl::load(&Search::default()) {
        Ok(nixl) => nixl,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("NIXL");
    println!("  library     {}", nixl.library().display());
    println!(
        "  version     {}",
        nixl.version().unwrap_or("unknown, because the library is in no Python package")
    );
    println!("  backends    {}", nixl.plugins().join(", "));
    for (backend, what) in
        [("UCX", "peers"), ("POSIX", "files"), ("LIBFABRIC", "peers, if NixlConfig::backend names it")]
    {
        let state =
            nixl.why_not(backend).map_or_else(|| "usable".to_owned(), |why| format!("not usable: {why}"));
        println!("  {backend:<10}  for {what}; {state}");
    }
    println!("\nSettings of UCX that the transport needs");
    for guard in guards::guards() {
        let value = std::env::var(guard.name).unwrap_or_else(|_| "(see ucx.conf)".to_owned());
        let by = if missing.contains(&guard) { "set by this program" } else { "set by you" };
        println!("  {}={value}  ({by})\n      {}", guard.name, guard.why);
    }
    for warning in nixl.warnings() {
        println!("  WARNING: {warning}");
    }
    println!("\nOther environment variables of NIXL, UCX and CUDA");
    host::environment(&missing);
    println!("\nHost");
    host::facts();
    println!(
        "\nTrial transfer between two processes: {} MiB in blocks of 64 KiB at random places",
        trial::REGION >> 20
    );
    match trial::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: the trial transfer failed: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(feature = "nixl"))]
fn main() -> ExitCode {
    if let Some(result) = ucx::role().or_else(fabric::role) {
        return if result.inspect_err(|error| eprintln!("error: {error}")).is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    local::report();
    if let Err(error) = tcp::report() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    println!();
    ucx::report();
    println!();
    fabric::report();
    println!("\nNIXL: not looked for, because this example was built without `--features nixl`. Try");
    println!("  scripts/setup-nixl.sh && source target/nixl/env.sh");
    println!("  cargo run --release --features nixl --example doctor");
    ExitCode::SUCCESS
}
