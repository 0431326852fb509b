//! Runs transfers for minutes, compares every byte, and watches what the process keeps.
//!
//! ```text
//! cargo run --release --example soak -- --minutes 10
//! cargo run --release --features nixl --example soak -- --transport nixl --minutes 10   # or tcp, ucx, fabric
//! ```
//!
//! This process is a prefill worker. A decode worker in another process receives its pages and compares every
//! byte. Meanwhile a thread of this process maps and unmaps other memory. At each interval the resident memory is
//! printed, and at the end its slope with a 95 % confidence interval. At the end no session, page, post or file
//! descriptor may be left.
//!
//! `--visitors` adds decode workers that each live for some seconds, of which every second one is killed by
//! SIGKILL, and prints how much memory the process keeps for each: NIXL and UCX keep some hundred bytes, and the
//! NIXL transport keeps a byte count for each of the last 4096 connections.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod churn;
mod peer;
mod side;
mod slope;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use kv_transfer::prelude::*;
use kv_transfer::unstable::random::SplitMix64;

use churn::Churn;
use peer::Peer;
use side::{Error, Side};
use slope::Slope;

/// Runs of at least this many minutes fail if the memory grows.
const JUDGED: f64 = 5.0;

/// Runs transfers for minutes, compares every byte, and checks that no memory, page or file descriptor is lost.
#[derive(Debug, Parser)]
#[command(name = "soak", version)]
struct Options {
    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local")]
    transport: TransportKind,

    /// How many minutes to run.
    #[arg(long, default_value_t = 10.0, value_name = "MINUTES")]
    minutes: f64,

    /// The time between two samples of the resident memory [default: a sixtieth of --minutes].
    #[arg(long, value_name = "SECONDS")]
    interval: Option<f64>,

    /// Also run decode workers that live for some seconds; every second one is killed by SIGKILL.
    #[arg(long)]
    visitors: bool,

    /// The seed of the lifetimes of visitors.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,

    /// For the program's own use: makes this process a decode worker, with the address of the bootstrap server and
    /// the number of the worker.
    #[arg(long, hide = true, num_args = 2)]
    peer: Vec<String>,
}

/// The transport that moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TransportKind {
    /// kv-local: shared memory and copies between processes of one host.
    Local,
    /// kv-tcp: TCP, here within one host.
    Tcp,
    /// NVIDIA NIXL. Needs a build with --features nixl.
    Nixl,
    /// kv-ucx. Needs a build with --features ucx.
    Ucx,
    /// kv-fabric, here over libfabric's TCP. Needs a build with --features fabric.
    Fabric,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let result = side::prepare(options.transport).and_then(|()| match options.peer.as_slice() {
        [addr, number] => number
            .parse()
            .map_err(Error::from)
            .and_then(|number| peer::receive(options.transport, addr, number).map(|()| true)),
        _ => soak(&options),
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the transfers. True if nothing was left behind and the memory did not grow.
fn soak(options: &Options) -> Result<bool, Error> {
    let length = Duration::try_from_secs_f64(options.minutes * 60.0)?;
    let interval = options.interval.map_or(Ok(length / 60), Duration::try_from_secs_f64)?;
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let addr = server.local_addr().to_string();
    let mut side = Side::start(options.transport, WorkerRole::Prefill, &addr)?;
    let churn = Churn::start()?;
    let mut random = SplitMix64::new(options.seed);

    let mut stays = Peer::start(options.transport, &addr, 0, None)?;
    let visitor = |number: u64, random: &mut SplitMix64| {
        options
            .visitors
            .then(|| Peer::start(options.transport, &addr, number, Some(life(random))))
            .transpose()
    };
    let mut comes = visitor(1, &mut random)?;
    let (mut number, mut killed) = (u64::from(comes.is_some()), 0);
    let mut slope = Slope::default();
    let begun = Instant::now();
    // The first tenth fills caches and pools.
    let settled = length / 10;
    let mut sample_at = settled;
    let mut handles = None;
    println!(
        "{:>8} {:>12} {:>10} {:>10} {:>8} {:>8}",
        "seconds", "RSS KiB", "requests", "GB", "peers", "handles"
    );
    while begun.elapsed() < length {
        stays.serve(&mut side)?;
        if let Some(peer) = &mut comes {
            peer.serve(&mut side)?;
        }
        if let Some(peer) = comes.take_if(|peer| peer.is_due()) {
            let kill = number % 2 == 1;
            killed += u64::from(kill);
            peer.end(&mut side, kill)?;
            number += 1;
            comes = visitor(number, &mut random)?;
        }
        side.take_back()?;
        if begun.elapsed() >= sample_at {
            sample_at += interval;
            let rss = churn.at_rest(side::resident)?;
            slope.add(begun.elapsed().as_secs_f64() / 60.0, rss as f64);
            let count = side::handles()?;
            handles.get_or_insert(count);
            println!(
                "{:>8.1} {rss:>12} {:>10} {:>10.2} {number:>8} {count:>8}",
                begun.elapsed().as_secs_f64(),
                side.requests,
                side.bytes as f64 / 1e9,
            );
        }
        side.rest();
    }
    if let Some(peer) = comes {
        peer.end(&mut side, false)?;
    }
    stays.end(&mut side, false)?;
    churn.stop()?;
    side.settle()?;
    println!(
        "\n{} requests, {:.2} GB, every byte compared; {number} visitors, of which {killed} were killed",
        side.requests,
        side.bytes as f64 / 1e9
    );
    let left = side.left()?;
    for (what, count) in &left {
        println!("PROBLEM: {count} {what} left at the end");
    }
    side.stop()?;
    server.stop();
    // In a short run, memory that the process takes only once looks like a slope.
    let flat = slope.report(number) || options.minutes < JUDGED;
    Ok(left.is_empty() && flat)
}

/// How long a visitor lives: one to five seconds.
fn life(random: &mut SplitMix64) -> Duration {
    Duration::from_millis(1000 + random.below(4000))
}
