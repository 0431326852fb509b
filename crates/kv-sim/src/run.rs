//! Runs the world of one seed, or of many.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::ec;
use crate::ec::params::EcParams;
use crate::ec::service::EcWorld;
use crate::ec::stats::EcCounters;
use crate::interop::params::DialectParams;
use crate::interop::stats::DialectCounters;
use crate::interop::{self, Dialect};
use crate::kv::frames::show;
use crate::kv::params::Params;
use crate::kv::service::KvWorld;
use crate::kv::stats::KvCounters;
use crate::net::stats::NetCounters;
use crate::planted::Planted;
use crate::trace::Trace;
use crate::violation::Violation;

/// The service whose worlds seeds draw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Worlds {
    /// Worlds of the KV cache.
    #[default]
    Kv,
    /// Worlds of the encoder cache.
    Ec,
    /// Worlds of a foreign protocol.
    Dialect(Dialect),
}

/// How to run a seed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The service whose world the seed draws. A bug that shows in worlds of the encoder cache only is planted
    /// in such a world, whatever stands here.
    pub worlds: Worlds,
    /// The bug to plant, if any.
    pub planted: Option<Planted>,
    /// Lines of the trace to keep; zero for none.
    pub keep: usize,
    /// The number of events after which to stop; `None` for no limit.
    pub max_events: Option<u64>,
}

/// Counts of what happened in one world, or in many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Counts of what happened in the network.
    pub net: NetCounters,
    /// Counts of what happened to sessions.
    pub kv: KvCounters,
    /// Counts of what happened to entries of the encoder cache.
    pub ec: EcCounters,
    /// Counts of what happened to sessions of foreign protocols.
    pub dialects: DialectCounters,
}

impl Counters {
    /// Adds the counts of another world.
    pub fn merge(&mut self, other: &Counters) {
        self.net.merge(&other.net);
        self.kv.merge(&other.kv);
        self.ec.merge(&other.ec);
        self.dialects.merge(&other.dialects);
    }

    /// Frames sent, by the name of their kind.
    pub fn frames(&self) -> Vec<(String, u64)> {
        self.net.frames_by_kind.named(show)
    }

    /// Every count with its name, of the services whose worlds were run.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        let kv = if self.kv == KvCounters::default() { Vec::new() } else { self.kv.rows() };
        let ec = if self.ec == EcCounters::default() { Vec::new() } else { self.ec.rows() };
        let quiet = self.dialects == DialectCounters::default();
        let dialects = if quiet { Vec::new() } else { self.dialects.rows() };
        [self.net.rows(), kv, ec, dialects].concat()
    }

    /// Failed sessions by the name of their cause.
    pub fn failures(&self) -> impl Iterator<Item = (&str, u64)> {
        self.kv.failures.iter().chain(self.ec.failures.iter()).chain(self.dialects.failures.iter())
    }
}

/// The result of one seed.
#[derive(Debug)]
pub struct Report {
    /// The seed of the world.
    pub seed: u64,
    /// The broken promise, if there is one.
    pub violation: Option<Violation>,
    /// Counts of what happened in the world.
    pub counters: Counters,
    /// The record of what happened, in order.
    pub trace: Trace,
    /// How long the world lasted, in virtual nanoseconds.
    pub virtual_time: u64,
}

/// Runs the world of one seed to its end.
///
/// ```
/// use kv_sim::{Options, run_seed};
/// let report = run_seed(7, Options::default());
/// assert_eq!(report.violation, None);
/// ```
pub fn run_seed(seed: u64, options: Options) -> Report {
    if options.worlds == Worlds::Ec || options.planted.is_some_and(Planted::is_of_entries) {
        return run_entries(seed, options);
    }
    let dialect = match options.worlds {
        Worlds::Dialect(dialect) => Some(dialect),
        _ => options.planted.and_then(Planted::dialect),
    };
    if let Some(dialect) = dialect {
        return run_dialect(seed, dialect, options);
    }
    let mut params = Params::draw(seed);
    if let Some(planted) = options.planted {
        planted.provoke(&mut params);
    }
    let world = KvWorld::drawn(params, options.planted, Trace::keeping(options.keep));
    let outcome = world.run(options.max_events);
    Report {
        seed,
        violation: outcome.violation,
        counters: Counters { net: outcome.counters, kv: outcome.service.counters, ..Counters::default() },
        trace: outcome.trace,
        virtual_time: outcome.ended_at,
    }
}

/// The same for a world of the encoder cache.
fn run_entries(seed: u64, options: Options) -> Report {
    let mut params = EcParams::draw(seed);
    if let Some(planted) = options.planted {
        ec::provoke(planted, &mut params);
    }
    let outcome =
        EcWorld::of_entries(params, options.planted, Trace::keeping(options.keep)).run(options.max_events);
    let (violation, trace, virtual_time) = (outcome.violation, outcome.trace, outcome.ended_at);
    let (net, ec) = (outcome.counters, outcome.service.counters);
    Report { seed, violation, counters: Counters { net, ec, ..Counters::default() }, trace, virtual_time }
}

/// The same for a world of a foreign protocol.
fn run_dialect(seed: u64, dialect: Dialect, options: Options) -> Report {
    let params = DialectParams::draw(seed, dialect);
    let outcome = interop::run(params, options.planted, Trace::keeping(options.keep), options.max_events);
    let interop::Outcome { violation, counters: dialects, trace, ended_at } = outcome;
    let net = NetCounters { seeds: 1, ..NetCounters::default() };
    let counters = Counters { net, dialects, ..Counters::default() };
    Report { seed, violation, counters, trace, virtual_time: ended_at }
}

/// The result of many seeds.
#[derive(Debug, Default)]
pub struct Campaign {
    /// The sums of the counts of all worlds.
    pub counters: Counters,
    /// Sum of the worlds' virtual times, in nanoseconds.
    pub virtual_time: u128,
    /// The violation with the smallest seed, if there is one.
    pub failed: Option<(u64, Violation)>,
}

/// Runs seeds `start .. start + count` on `jobs` threads, until the first violation. `progress` is
/// called now and then with the number of seeds done.
pub fn run_campaign(
    start: u64,
    count: u64,
    jobs: usize,
    options: Options,
    progress: impl Fn(u64) + Sync,
) -> Campaign {
    const BLOCK: u64 = 50;
    let next = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let total = Mutex::new(Campaign::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let block = next.fetch_add(BLOCK, Ordering::Relaxed);
                    if block >= count || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let mut own = Campaign::default();
                    for seed in block..(block + BLOCK).min(count) {
                        let report = run_seed(start + seed, options);
                        own.counters.merge(&report.counters);
                        own.virtual_time += u128::from(report.virtual_time);
                        if let Some(violation) = report.violation {
                            stop.store(true, Ordering::Relaxed);
                            own.failed = Some((report.seed, violation));
                            break;
                        }
                    }
                    let finished =
                        done.fetch_add(own.counters.net.seeds, Ordering::Relaxed) + own.counters.net.seeds;
                    progress(finished);
                    let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    total.counters.merge(&own.counters);
                    total.virtual_time += own.virtual_time;
                    let earlier =
                        |known: &(u64, Violation)| own.failed.as_ref().is_none_or(|own| known.0 < own.0);
                    if !total.failed.as_ref().is_some_and(earlier) {
                        total.failed = own.failed;
                    }
                }
            });
        }
    });
    total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}
