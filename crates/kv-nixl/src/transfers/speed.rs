//! The size of one request: as many bytes as the connection moves in about a millisecond, by measurement.
//!
//! A request has a price of its own, some 20 µs when a copy has just been through the caches: so requests
//! should be large. UCX may copy all of a request inside the call that posts the request: so requests must
//! not be too large. Both depend on the time of one request, and the bytes that are moved in that time differ
//! by a factor of twenty among transports and machines.

use std::time::{Duration, Instant};

use kv_host::clock;

/// Smallest weight of a request that a long post is cut into, where the fixed price is still a small part.
const SMALLEST: u64 = 256 << 10;
/// The weight of a slice before anything is measured: a millisecond at 1 GB/s.
const FIRST: u64 = 1 << 20;
/// A request that weighs at most a slice divided by this number tells little about slices.
const TELLING: u64 = 4;
/// A slice weighs at most this many times the measured request: caches make small requests fast.
const GROWTH: u64 = 4;
/// How many proposals are remembered. Of five, the second largest ignores three requests that the system
/// interrupted, and one that was cached.
const REMEMBERED: usize = 5;
/// How many of the last requests are remembered for the slowest one, whatever has slowed that request.
const SLOW: usize = 16;
/// Picoseconds that a byte takes before anything is measured: 100 MB/s.
const FIRST_SLOW: u64 = 10_000;

/// The load of one whole slice in [`Speed::load`].
pub(crate) const SLICE: u64 = 1024;

/// The measured speed of one direction of a connection.
#[derive(Debug)]
pub(crate) struct Speed {
    /// How long a slice should take, and the most that a slice may weigh.
    time: Duration,
    most: u64,
    /// What a slice should have weighed, by each of the last requests.
    proposals: [u64; REMEMBERED],
    count: usize,
    slice: u64,
    /// Picoseconds that a byte of each of the last requests took, from start to end.
    slow: [u64; SLOW],
    /// When the last request ended: a request that waited for the end began only then.
    ended: Option<Instant>,
}

impl Speed {
    /// A speed whose slices take about `time`, and weigh at most `most`.
    pub(crate) fn new(time: Duration, most: u64) -> Speed {
        let slice = FIRST.min(most);
        let (proposals, slow) = ([slice; REMEMBERED], [FIRST_SLOW; SLOW]);
        Speed { time, most, proposals, count: 0, slice, slow, ended: None }
    }

    /// True if at least one request has shown the speed.
    pub(crate) fn is_known(&self) -> bool {
        self.count >= REMEMBERED
    }

    /// The weight of a slice at the present speed.
    pub(crate) fn slice(&self) -> u64 {
        self.slice
    }

    /// The share of a slice's time that a request of this weight takes, where a whole slice is [`SLICE`].
    pub(crate) fn load(&self, weight: u64) -> u64 {
        (u128::from(weight) * u128::from(SLICE) / u128::from(self.slice)) as u64
    }

    /// Takes note of a request that has ended.
    pub(crate) fn ended(&mut self, weight: u64, started: Instant, now: Instant) {
        let began = self.ended.map_or(started, |ended| ended.max(started));
        self.ended = Some(now);
        let took = now.saturating_duration_since(began);
        self.measured(weight, took, took);
    }

    /// How long this weight takes at the speed of the slowest of the last requests.
    pub(crate) fn at_slowest(&self, weight: u64) -> Duration {
        let slowest = self.slow.iter().max().copied().unwrap_or(FIRST_SLOW);
        let nanos = u128::from(weight) * u128::from(slowest) / 1000;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Takes the measure of a request of this weight: `took` without the time that slices of another size
    /// would not change, `whole` from start to end.
    pub(crate) fn measured(&mut self, weight: u64, took: Duration, whole: Duration) {
        if weight < self.slice / TELLING {
            return;
        }
        let slow = whole.as_nanos() * 1000 / u128::from(weight.max(1));
        if let Some(place) = self.slow.get_mut(self.count % SLOW) {
            *place = u64::try_from(slow).unwrap_or(u64::MAX);
        }
        let took = took.as_nanos().max(1);
        let fitting = u128::from(weight) * self.time.as_nanos() / took;
        let fitting = u64::try_from(fitting).unwrap_or(u64::MAX).min(weight.saturating_mul(GROWTH));
        let at = self.count % REMEMBERED;
        if let Some(proposal) = self.proposals.get_mut(at) {
            *proposal = fitting.clamp(SMALLEST.min(self.most), self.most);
        }
        self.count = self.count.wrapping_add(1).max(1);
        let mut known = self.proposals;
        let known = known.get_mut(..self.count.min(REMEMBERED)).unwrap_or_default();
        known.sort_unstable();
        self.slice = known.get(known.len() * 3 / 4).copied().unwrap_or(self.slice);
    }
}

/// Measures a call that copies on this thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch {
    clock: Instant,
    cpu: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Stopwatch {
        Stopwatch { clock: Instant::now(), cpu: clock::thread_time() }
    }

    pub(crate) fn started(&self) -> Instant {
        self.clock
    }

    /// How long the call took, without the time in which the system let other threads run: shorter calls
    /// would not shorten that time. A call that mostly slept was no copy of this thread, and counts with all
    /// of its time.
    pub(crate) fn took(&self) -> Duration {
        let (clock, cpu) = (self.clock.elapsed(), clock::thread_time().saturating_sub(self.cpu));
        if cpu < clock / 8 { clock } else { cpu }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Ends requests of a slice each at this speed, one after the other.
    fn run(speed: &mut Speed, now: &mut Instant, requests: usize, bytes_per_second: f64) {
        for _ in 0..requests {
            let started = *now;
            *now += Duration::from_secs_f64(speed.slice() as f64 / bytes_per_second);
            speed.ended(speed.slice(), started, *now);
        }
    }

    #[test]
    fn a_slice_becomes_what_is_moved_in_its_time() {
        let mut now = Instant::now();
        let mut speed = Speed::new(MS, 32 << 20);
        assert_eq!(speed.slice(), FIRST);
        run(&mut speed, &mut now, 20, 6e9);
        assert!((5_900_000..6_100_000).contains(&speed.slice()), "{}", speed.slice());
        run(&mut speed, &mut now, 4, 1e9);
        assert!((990_000..1_010_000).contains(&speed.slice()), "{}", speed.slice());
        run(&mut speed, &mut now, 10, 1e6);
        assert_eq!(speed.slice(), SMALLEST);
        run(&mut speed, &mut now, 40, 1e12);
        assert_eq!(speed.slice(), 32 << 20);
    }

    #[test]
    fn interruptions_and_small_requests_do_not_change_it() {
        let mut now = Instant::now();
        let mut speed = Speed::new(MS, 32 << 20);
        // The first request waits for the connection.
        run(&mut speed, &mut now, 1, 1e7);
        run(&mut speed, &mut now, 20, 6e9);
        for _ in 0..20 {
            run(&mut speed, &mut now, 3, 1e8);
            assert!(speed.slice() > 5_900_000, "{}", speed.slice());
            run(&mut speed, &mut now, 2, 6e9);
            for _ in 0..10 {
                speed.ended(64 << 10, now, now + Duration::from_nanos(1));
            }
            assert!((5_900_000..6_100_000).contains(&speed.slice()), "{}", speed.slice());
        }
        // None at all is no time at all.
        speed.ended(speed.slice(), now, now);
        assert!(speed.slice() <= 32 << 20);
    }

    #[test]
    fn one_slow_request_is_expected_again_until_others_have_followed_it() {
        let mut now = Instant::now();
        let mut speed = Speed::new(MS, 32 << 20);
        assert_eq!(speed.at_slowest(100_000_000), Duration::from_secs(1), "nothing is known");
        run(&mut speed, &mut now, 40, 4e9);
        assert!(speed.at_slowest(4_000_000) < MS * 2);
        run(&mut speed, &mut now, 1, 1e6);
        run(&mut speed, &mut now, SLOW - 1, 4e9);
        assert!(speed.at_slowest(1_000_000) > MS * 900);
        run(&mut speed, &mut now, 1, 4e9);
        assert!(speed.at_slowest(4_000_000) < MS * 2);
    }

    #[test]
    fn requests_behind_one_another_are_not_taken_for_slow_ones() {
        let start = Instant::now();
        let mut speed = Speed::new(MS, 32 << 20);
        for request in 1..=20_u32 {
            // Two on their way at any time, each of 4 MiB and a millisecond.
            let started = start + MS * request.saturating_sub(2);
            speed.ended(4 << 20, started, start + MS * request);
        }
        assert_eq!(speed.slice(), 4 << 20);
        assert_eq!(speed.load(2 << 20), SLICE / 2);
    }
}
