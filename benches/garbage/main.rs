//! What a peer that sends garbage at full speed costs the other peers of a worker.
//!
//! `cargo bench --bench garbage`; with `-- prefill` or `-- decode` after it, only the worker of that role.
//!
//! The bench runs three processes over kv-local: a worker that serves, a healthy peer (this process)
//! that makes push requests of 64 KiB one after the other, and a third process. In each round the third process
//! idles, then spins, then sends garbage to the worker over a connection of its own. A process that spins takes a
//! processor from the others, and nothing more. Garbage may cost the healthy peer at most half as much again. The
//! program prints the latencies, and exits with status 1 if garbage costs more than that. With `--test` it makes
//! a few requests and judges nothing. On a machine with fewer than three free processors the scheduler of the
//! system is measured as well: spinning costs more there, and so may garbage.

#![allow(clippy::print_stdout)]

mod frames;
mod side;
mod third;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;

use side::{Served, Side};
use third::{Third, What};

type Error = Box<dyn std::error::Error>;

/// How many times as much as spinning garbage may cost a healthy peer.
const MOST: f64 = 1.5;

fn main() -> Result<ExitCode, Error> {
    if let Some(told) = std::env::var_os(side::SERVE) {
        side::serve(&told.to_string_lossy())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(told) = std::env::var_os(third::THIRD) {
        third::live(&told.to_string_lossy())?;
        return Ok(ExitCode::SUCCESS);
    }
    let has = |wanted: &str| std::env::args().skip(1).any(|arg| arg == wanted);
    let testing = kv_benches::is_trial();
    let extent = if testing {
        Extent { rounds: 1, settle: Duration::from_millis(20), each: Duration::from_millis(50) }
    } else {
        Extent { rounds: 7, settle: Duration::from_millis(200), each: Duration::from_secs(1) }
    };
    let mut fits = true;
    for (name, role) in [("prefill", WorkerRole::Prefill), ("decode", WorkerRole::Decode)] {
        if ["prefill", "decode"].iter().any(|role| has(role)) && !has(name) {
            continue;
        }
        let ratio = measure(name, role, &extent)?;
        fits &= ratio <= MOST;
        if testing {
            continue;
        }
        println!("garbage costs {ratio:.2} times what spinning costs; at most {MOST} is allowed\n");
    }
    Ok(if fits || testing { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How many rounds and requests are measured.
struct Extent {
    rounds: usize,
    settle: Duration,
    each: Duration,
}

/// Measures the latencies of requests at a worker of this role. Returns what garbage costs in units of what
/// spinning costs: the median or the mean of the requests, whichever is more, as the median over all rounds.
fn measure(name: &str, role: WorkerRole, extent: &Extent) -> Result<f64, Error> {
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let addr = server.local_addr().to_string();
    let mut served = Served::start(role, &addr)?;
    let mut third = Third::start(role, &addr)?;
    let mut healthy = Side::start(side::other(role), &addr)?;
    healthy.requests(Duration::ZERO)?;

    let mut rounds: Vec<[Seen; 3]> = Vec::new();
    for round in 0..extent.rounds {
        let mut seen: [Seen; 3] = Default::default();
        for turn in 0..What::ALL.len() {
            let at = (round + turn) % What::ALL.len();
            third.tell(What::ALL[at])?;
            let settled = Instant::now() + extent.settle;
            while Instant::now() < settled {
                healthy.requests(Duration::ZERO)?;
            }
            let (begun, used) = (Instant::now(), served.used()?);
            let latencies = healthy.requests(extent.each)?;
            seen[at] = Seen::new(latencies, (served.used()? - used) / begun.elapsed().as_secs_f64());
        }
        rounds.push(seen);
    }
    third.tell(What::Idle)?;
    served.check()?;

    let over_rounds = |figure: &dyn Fn(&[Seen; 3]) -> f64| {
        let mut figures: Vec<f64> = rounds.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        part(&figures, 0.5)
    };
    println!("push requests of 64 KiB at a {name} worker, {} rounds", rounds.len());
    println!(
        "{:<18} {:>10} {:>10} {:>10} {:>16} {:>16} {:>18}",
        "the third process",
        "median ms",
        "mean ms",
        "p99 ms",
        "median to spin",
        "mean to spin",
        "worker's processor"
    );
    let median = |at: usize| over_rounds(&|round| round[at].median / round[1].median);
    let mean = |at: usize| over_rounds(&|round| round[at].mean / round[1].mean);
    for (at, what) in What::ALL.iter().enumerate() {
        println!(
            "{:<18} {:>10.3} {:>10.3} {:>10.3} {:>16.2} {:>16.2} {:>17.0}%",
            what.name(),
            over_rounds(&|round| round[at].median),
            over_rounds(&|round| round[at].mean),
            over_rounds(&|round| round[at].p99),
            median(at),
            mean(at),
            over_rounds(&|round| round[at].used * 100.0),
        );
    }
    println!("{}", third.sent());
    Ok(median(2).max(mean(2)))
}

/// The latencies while the third process did one thing.
#[derive(Default)]
struct Seen {
    /// The median latency, in milliseconds.
    median: f64,
    mean: f64,
    p99: f64,
    /// Processors that the serving process used.
    used: f64,
}

impl Seen {
    fn new(mut latencies: Vec<f64>, used: f64) -> Seen {
        latencies.sort_by(f64::total_cmp);
        let mean = latencies.iter().sum::<f64>() / latencies.len() as f64;
        Seen { median: part(&latencies, 0.5), mean, p99: part(&latencies, 0.99), used }
    }
}

/// The value that this share of all does not exceed.
fn part(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
