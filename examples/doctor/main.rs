//! Looks at what the NIXL transport would use on this host, for a person, and tries it out.
//!
//! ```text
//! scripts/setup-nixl.sh && source target/nixl/env.sh
//! cargo run --release --features nixl --example doctor
//! ```
//!
//! It prints libraries, plugins, limits and the environment that matters, and ends with a transfer
//! between two processes, whose bytes it checks: the transports that UCX chose for it, and its speed
//! in both directions. Exit status 1 if NIXL cannot be used.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::process::ExitCode;

#[cfg(feature = "nixl")]
mod host;
#[cfg(feature = "nixl")]
mod trial;

#[cfg(feature = "nixl")]
fn main() -> ExitCode {
    use kv_transfer::nixl::{Nixl, Search, guards};

    if let Some(result) = trial::role() {
        return match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        };
    }
    // What the user has set, before anything is added.
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
    println!("  version     {}", nixl.version().unwrap_or("unknown: it is in no Python package"));
    println!("  backends    {}", nixl.plugins().join(", "));
    for (backend, what) in [("UCX", "peers"), ("POSIX", "files"), ("LIBFABRIC", "peers, by name")] {
        let state =
            nixl.why_not(backend).map_or_else(|| "usable".to_owned(), |why| format!("not usable: {why}"));
        println!("  {backend:<10}  for {what}; {state}");
    }
    println!("\nGuards: settings of UCX, read when it starts");
    for guard in guards::guards() {
        let value = std::env::var(guard.name).unwrap_or_default();
        let by = if missing.contains(&guard) { "set by this program" } else { "set by you" };
        println!("  {}={value}  ({by})\n      {}", guard.name, guard.why);
    }
    println!("\nEnvironment of NIXL, UCX and CUDA");
    host::environment(&missing);
    println!("\nHost");
    host::facts();
    println!("\nTrial: two processes, {} MiB in blocks of 64 KiB at random places", trial::REGION >> 20);
    match trial::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: the trial failed: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(feature = "nixl"))]
fn main() -> ExitCode {
    eprintln!("error: this example looks at NIXL, and was built without feature `nixl`. Try");
    eprintln!("  scripts/setup-nixl.sh && source target/nixl/env.sh");
    eprintln!("  cargo run --release --features nixl --example doctor");
    ExitCode::FAILURE
}
