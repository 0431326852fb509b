//! The measurements. Within a round a transport and its limit are measured close to each other, so that the ratios hold on a
//! machine whose speed drifts.

use std::time::Duration;

use kv_transfer::prelude::*;

use crate::Error;
use crate::far::Far;
use crate::limits::Memcpy;
use crate::plain::Plain;
use crate::relay::Relay;
use crate::side::{Shape, Side};
use crate::table::{Goal, line, median};
use crate::way::Way;

type Measure = fn(&[Way], &Extent) -> Result<(), Error>;

/// The groups of rows, with their names.
pub(crate) const GROUPS: [(&str, Measure); 3] = [("small", small), ("single", single), ("large", large)];

/// How much is measured.
pub(crate) struct Extent {
    rounds: usize,
    /// Requests of the rows with many small requests.
    requests: u32,
    /// Rounds of the rows with one request at a time, which are short and drift most, and requests of each.
    single_rounds: usize,
    singles: u64,
    /// Pages of 64 KiB of the large request.
    pages: u32,
    /// How long before its first large request a peer is met, for the peer that is met early.
    early: Duration,
}

impl Extent {
    pub(crate) const FULL: Extent = Extent {
        rounds: 7,
        requests: 1000,
        single_rounds: 15,
        singles: 40,
        pages: 8192,
        early: Duration::from_millis(500),
    };
    pub(crate) const TRIAL: Extent = Extent {
        rounds: 1,
        requests: 10,
        single_rounds: 1,
        singles: 2,
        pages: 64,
        early: Duration::from_millis(1),
    };
}

/// One round: how long the sessions took, and how long the limit did, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    pub(crate) took: f64,
    pub(crate) limit: f64,
}

/// A decode worker here and a prefill worker in its own process, which knows no other worker.
struct Pair<'a> {
    near: &'a Side,
    far: Far,
}

impl<'a> Pair<'a> {
    fn start(way: &Way, shape: &Shape, near: &'a Side) -> Result<Pair<'a>, Error> {
        Ok(Pair { near, far: Far::start(way, shape)? })
    }

    /// Requests whose senders wait for their receivers: from the first open of a receiver to the last success.
    fn asked(&mut self, count: u64, each: usize) -> Result<f64, Error> {
        let batch = self.near.batch(count, each);
        self.far.open(&batch, false)?;
        let receiving = self.near.receivers(&self.far.addr, &batch)?;
        let begun = receiving.begun;
        let ended = self.near.succeeded(receiving)?;
        self.far.settle()?;
        Ok(ended - begun)
    }

    /// A request whose receiver waits for its sender: from the `send` to the receiver's success.
    fn sent(&mut self) -> Result<f64, Error> {
        let batch = self.near.batch(1, 1);
        self.far.open(&batch, true)?;
        let receiving = self.near.receivers(&self.far.addr, &batch)?;
        self.near.registered(&receiving)?;
        self.far.send()?;
        let ended = self.near.succeeded(receiving)?;
        let begun = self.far.sent()?;
        self.far.settle()?;
        Ok(ended - begun)
    }
}

fn decode(way: &Way, shape: Shape) -> Result<Side, Error> {
    Side::start(way, WorkerRole::Decode, shape, None)
}

fn only_local(way: &Way, goal: Goal) -> Goal {
    if way.name() == "local" { goal } else { Goal::Open }
}

/// Many requests of one page of 256 KiB each.
fn small(ways: &[Way], extent: &Extent) -> Result<(), Error> {
    let requests = extent.requests;
    let layer_major = Shape { pages: requests, regions: 32, item: 8 << 10 };
    let page_major = Shape { pages: requests, regions: 1, item: 256 << 10 };
    for (name, shape) in [("32 layers of 8 KiB", layer_major), ("a page of 256 KiB", page_major)] {
        let copy = Memcpy::new(shape)?;
        let sides: Vec<Side> = ways.iter().map(|way| decode(way, shape)).collect::<Result<_, _>>()?;
        let pairs = ways.iter().zip(&sides).map(|(way, near)| Pair::start(way, &shape, near));
        let mut pairs: Vec<Pair<'_>> = pairs.collect::<Result<_, _>>()?;
        let mut rounds = vec![Vec::new(); ways.len()];
        // The first round warms up.
        for round in 0..=extent.rounds {
            let limit = copy.run(0, requests as usize, 1)?;
            for (pair, rounds) in pairs.iter_mut().zip(&mut rounds) {
                let took = pair.asked(u64::from(requests), 1)?;
                if round > 0 {
                    rounds.push(Measured { took, limit });
                }
            }
        }
        for (way, rounds) in ways.iter().zip(&rounds) {
            let work = format!("{requests} requests of {name}");
            line(&work, way.name(), "memcpy of the same pieces", only_local(way, Goal::AtLeast(0.8)), rounds);
        }
    }
    Ok(())
}

/// One request of 256 KiB at a time, between workers that know each other and sleep.
fn single(ways: &[Way], extent: &Extent) -> Result<(), Error> {
    let shape = Shape { pages: extent.requests, regions: 1, item: 256 << 10 };
    let mut relay = Relay::start(&shape)?;
    let sides: Vec<Side> = ways.iter().map(|way| decode(way, shape)).collect::<Result<_, _>>()?;
    let pairs = ways.iter().zip(&sides).map(|(way, near)| Pair::start(way, &shape, near));
    let mut pairs: Vec<Pair<'_>> = pairs.collect::<Result<_, _>>()?;
    let mut rounds = vec![[Vec::new(), Vec::new()]; ways.len()];
    let plains = ways.iter().map(|way| Plain::start(way, &shape));
    let mut plains: Vec<Option<Plain>> = plains.collect::<Result<_, _>>()?;
    let mut beside = vec![[Vec::new(), Vec::new()]; ways.len()];
    // The first round warms up.
    for round in 0..=extent.single_rounds {
        for (pair, rounds) in pairs.iter_mut().zip(&mut rounds) {
            let measured = [
                amid(extent.singles, &mut || pair.sent(), &mut || relay.three_hops())?,
                amid(extent.singles, &mut || pair.asked(1, 1), &mut || relay.four_hops())?,
            ];
            if round > 0 {
                rounds.iter_mut().zip(measured).for_each(|(rounds, measured)| rounds.push(measured));
            }
        }
        for ((plain, beside), rounds) in plains.iter_mut().zip(&mut beside).zip(&rounds) {
            let Some(plain) = plain else { continue };
            let limits =
                [times(extent.singles, &mut || plain.sent())?, times(extent.singles, &mut || plain.asked())?];
            let limits = limits.map(|limits| median(limits.into_iter()));
            for ((beside, rounds), limit) in beside.iter_mut().zip(rounds).zip(limits) {
                let last = rounds.last().filter(|_| round > 0);
                beside.extend(last.map(|measured| Measured { limit, ..*measured }));
            }
        }
    }
    for (at, hops) in [("receiver first", 3), ("sender first", 4)].into_iter().enumerate() {
        for (way, rounds) in ways.iter().zip(&rounds) {
            let goal = match way.name() {
                "local" => Goal::AtMost(1.3),
                "nixl" => Goal::AtMost(2.0),
                _ => Goal::Open,
            };
            let (work, limit) =
                (format!("256 KiB, warm, {}", hops.0), format!("{} wake-ups and a memcpy", hops.1));
            line(&work, way.name(), &limit, goal, &rounds[at]);
        }
        for (way, beside) in ways.iter().zip(&beside).filter(|(_, beside)| !beside[at].is_empty()) {
            let work = format!("256 KiB, warm, {}", hops.0);
            line(&work, way.name(), "plain calls, no sleep", Goal::Open, &beside[at]);
        }
    }
    Ok(())
}

/// Seconds of each of so many calls, with a pause before each, in which all processors fall asleep.
fn times(count: u64, call: &mut dyn FnMut() -> Result<f64, Error>) -> Result<Vec<f64>, Error> {
    let calls = (0..count).map(|_| {
        std::thread::sleep(Duration::from_millis(2));
        call()
    });
    calls.collect()
}

/// Single requests, amid as many calls of their limit: how quickly a processor wakes changes from one moment to the next.
fn amid(
    count: u64,
    request: &mut dyn FnMut() -> Result<f64, Error>,
    limit: &mut dyn FnMut() -> Result<f64, Error>,
) -> Result<Measured, Error> {
    let before = times(count / 2, limit)?;
    let took = times(count, request)?;
    let after = times(count / 2, limit)?;
    Ok(Measured { took: median(took.into_iter()), limit: median(before.into_iter().chain(after)) })
}

/// One large request: the first one to a peer, and later ones; and the first small request to a peer.
fn large(ways: &[Way], extent: &Extent) -> Result<(), Error> {
    let shape = Shape { pages: extent.pages, regions: 1, item: 64 << 10 };
    let all = extent.pages as usize;
    let copy = Memcpy::new(shape)?;
    let sides: Vec<Side> = ways.iter().map(|way| decode(way, shape)).collect::<Result<_, _>>()?;
    #[derive(Clone, Default)]
    struct Rounds {
        met: Vec<Measured>,
        early: Vec<Measured>,
        just_then: Vec<Measured>,
        warm: Vec<Measured>,
        fresh: Vec<Measured>,
    }
    let mut rounds = vec![Rounds::default(); ways.len()];
    let pages = Shape { pages: 16, regions: 1, item: 256 << 10 };
    let plains = ways.iter().map(|way| Plain::start(way, &pages));
    let mut plains: Vec<Option<Plain>> = plains.collect::<Result<_, _>>()?;
    // All rounds of a transport in a row, and a later request after the same pause beside that to the peer met early: a cache
    // that nobody has touched for half a second is slow at first in a virtual machine, also for a plain copy.
    for (((way, near), rounds), plain) in ways.iter().zip(&sides).zip(&mut rounds).zip(&mut plains) {
        for _ in 0..extent.rounds {
            let memcpy = copy.run(0, 1, all)?;
            let fresh = copy.fresh()?;
            let mut pair = Pair::start(way, &shape, near)?;
            let met = pair.asked(1, 4)?;
            std::thread::sleep(extent.early);
            let early = pair.asked(1, all)?;
            std::thread::sleep(extent.early);
            let paused = pair.asked(1, all)?;
            let warm = median((0..3).map(|_| pair.asked(1, all)).collect::<Result<Vec<_>, _>>()?.into_iter());
            let first = plain.as_mut().map_or(Ok(0.0), Plain::first)?;
            rounds.met.push(Measured { took: met, limit: pair.asked(1, 4)? + first });
            rounds.early.push(Measured { took: early, limit: paused });
            rounds.warm.push(Measured { took: warm, limit: memcpy });
            drop(pair);
            let mut pair = Pair::start(way, &shape, near)?;
            let just_then = pair.asked(1, all)?;
            let warm = median((0..3).map(|_| pair.asked(1, all)).collect::<Result<Vec<_>, _>>()?.into_iter());
            rounds.just_then.push(Measured { took: just_then, limit: warm });
            rounds.fresh.push(Measured { took: just_then, limit: fresh });
        }
    }
    let size = (all * shape.item) >> 20;
    for ((way, rounds), plain) in ways.iter().zip(&rounds).zip(&plains) {
        let late = "a later one";
        let (limit, goal) = match (plain, way.name()) {
            (Some(_), _) => ("a later one, and plain calls' first", Goal::Beyond(0.010)),
            (None, "ucx") => (late, Goal::Open),
            (None, _) => (late, Goal::Beyond(0.010)),
        };
        line("the first 256 KiB to a new peer", way.name(), limit, goal, &rounds.met);
        let line = |work: &str, limit: &str, goal, rounds: &[Measured]| {
            line(work, way.name(), limit, only_local(way, goal), rounds);
        };
        let work = format!("{size} MiB, first, peer met early");
        line(&work, "a later one after a pause", Goal::AtLeast(0.8), &rounds.early);
        line(&format!("{size} MiB, first, peer met just then"), late, Goal::AtLeast(0.5), &rounds.just_then);
        line(
            &format!("{size} MiB, first, peer met just then"),
            "memcpy to fresh memory",
            Goal::Open,
            &rounds.fresh,
        );
        line(&format!("{size} MiB, warm"), "memcpy of the same pages", Goal::Open, &rounds.warm);
    }
    Ok(())
}
