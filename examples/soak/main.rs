//! Runs transfers for minutes, compares every byte, and watches what the process keeps.
//!
//! ```text
//! cargo run --release --example soak -- --minutes 10
//! cargo run --release --features nixl --example soak -- --transport nixl --minutes 10
//! ```
//!
//! This process is a prefill worker. A decode worker in another process receives its pages and compares
//! every byte. Beside it a thread maps and unmaps memory that nobody transfers. At each interval the
//! resident memory is printed, and at the end its slope with its 95 % confidence interval; then
//! everything that was counted must be back at zero.
//!
//! `--visitors` adds decode workers that come and go after seconds, every second one by SIGKILL, and says
//! what is kept of each: by NIXL and UCX some hundred bytes, and by the NIXL transport the count of what each
//! of the last 4096 connections has sent.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod churn;
mod peer;
mod side;
mod slope;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use kv_transfer::prelude::*;
use kv_transfer::random::SplitMix64;

use churn::Churn;
use peer::Peer;
use side::{Error, Side};
use slope::Slope;

/// Minutes of a run from which on growth fails it.
const JUDGED: f64 = 5.0;

/// Runs transfers for minutes, compares every byte, and watches what the process keeps.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local")]
    transport: TransportKind,

    /// How long.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,

    /// Between two samples of the resident memory; a sixtieth of the time by default.
    #[arg(long, value_name = "SECONDS")]
    interval: Option<f64>,

    /// Have other peers come and go beside the one that stays.
    #[arg(long)]
    visitors: bool,

    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Be a decode worker: the bootstrap server and the number of the peer.
    #[arg(long, hide = true, num_args = 2)]
    peer: Vec<String>,
}

/// Which transport moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TransportKind {
    /// The embedded transport.
    Local,
    /// A NIXL agent.
    Nixl,
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

/// True if nothing was left behind and the memory did not grow.
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
        "\n{} requests, {:.2} GB, every byte compared; {number} peers came and went, {killed} of them killed",
        side.requests,
        side.bytes as f64 / 1e9
    );
    let left = side.left()?;
    for (what, count) in &left {
        println!("left behind: {count} {what}");
    }
    side.stop()?;
    server.stop();
    // What a process takes once looks like a slope in a short run.
    let flat = slope.report(number) || options.minutes < JUDGED;
    Ok(left.is_empty() && flat)
}

/// How long a peer lives.
fn life(random: &mut SplitMix64) -> Duration {
    Duration::from_millis(1000 + random.below(4000))
}
