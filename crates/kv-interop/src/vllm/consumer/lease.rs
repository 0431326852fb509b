//! How long the pages of a request can be relied on.
//!
//! A vLLM engine in the prefill role gives a request a lease of 30 seconds (`kv_lease_duration`) when the request
//! is finished there, and extends the lease to 20 seconds from each heartbeat on. The engine neither tells when
//! the lease began nor acknowledges heartbeats, and after the lease the pages get other contents while reads still
//! succeed. So the reader has a rule of its own, stricter than vLLM's readers, who have none:
//!
//! - The transfer parameters are at most a sixth of the lease old when the session is opened.
//! - Of two heartbeats in a row, one arrives. The last heartbeat counts for nothing, the one before it extends the
//!   lease to two thirds of its duration after it was sent.
//! - If a read cannot reach the engine, no heartbeat of the time before counts as arrived, and all sessions of the
//!   engine fail.
//! - A network that carries nothing for a while, and then goes on, delays heartbeats and fails no read. So while reads
//!   are in flight and none ends, no heartbeat counts as arrived. When one ends after more than half of what a
//!   heartbeat adds (10 seconds), the sessions of the engine fail, except those whose first lease still runs.
//!
//! A session begins a read, and succeeds, only while the lease runs by this rule.
//!
//! A vLLM engine in the decode role keeps the pages of a chat's last turn until a moment on its own clock, which
//! the transfer parameters tell. The handshake tells the reading of that clock, and so the moment here. Five
//! seconds, and the time that the handshake's message took, are subtracted.

use std::time::Duration;

use kv_core::Time;

/// How long before the end of a decode engine's pages they count as lost, as in vLLM.
const MARGIN: Duration = Duration::from_secs(5);

/// What is known of the lease of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lease {
    /// A lease that heartbeats extend.
    Renewed {
        /// The end of the lease without any heartbeat.
        first: Time,
        /// How long a heartbeat extends the lease.
        extension: Duration,
        /// When the last heartbeat was sent, and the one before the last.
        sent: [Option<Time>; 2],
    },
    /// A lease to a moment on the holder's clock; `None` if nobody has told the moment.
    Told(Option<Duration>),
}

/// One reading of the clock of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EngineClock {
    /// What the engine's clock showed.
    shown: Duration,
    /// The latest moment here at which the clock can have shown this.
    received: Time,
    /// How long the question and its answer were under way.
    round_trip: Duration,
}

impl Lease {
    pub(super) fn renewed(opened: Time, duration: Duration) -> Lease {
        let first = opened + (duration - duration / 6);
        Lease::Renewed { first, extension: duration * 2 / 3, sent: [None, None] }
    }

    /// How long parameters with this lease are remembered: those that tell a moment for good, because no others tell
    /// the same moment; others until `until`.
    pub(super) fn remembered_until(&self, until: Time) -> Time {
        if matches!(self, Lease::Told(_)) { Time::MAX } else { until }
    }

    /// Counts a heartbeat. True if the lease is one that heartbeats extend.
    pub(super) fn beat(&mut self, now: Time) -> bool {
        match self {
            Lease::Renewed { sent, .. } => {
                *sent = [Some(now), sent[0]];
                true
            }
            Lease::Told(_) => false,
        }
    }

    /// False if the lease may have ended while reads were in flight and none ended, from `since` to `now`. At `since`
    /// the heartbeat before the last was two intervals old at most, and half of what a heartbeat adds was left.
    pub(super) fn outlasts(&self, since: Time, now: Time) -> bool {
        match self {
            Lease::Renewed { first, extension, .. } => now < *first || now - since <= *extension / 2,
            Lease::Told(_) => true,
        }
    }

    /// When the lease may be over. A lease whose end cannot be known counts as over.
    pub(super) fn over_at(&self, clock: Option<EngineClock>) -> Time {
        match self {
            Lease::Renewed { first, extension, sent } => {
                sent[1].map_or(*first, |before_last| (before_last + *extension).max(*first))
            }
            Lease::Told(told) => told.zip(clock).map_or(Time::ZERO, |(told, clock)| clock.earliest(told)),
        }
    }
}

impl EngineClock {
    pub(super) fn new(shown: Duration, sent: Time, received: Time) -> EngineClock {
        EngineClock { shown, received, round_trip: received - sent }
    }

    /// The better of two readings: the one whose messages took less time.
    pub(super) fn better(self, other: Option<EngineClock>) -> EngineClock {
        other.filter(|other| other.round_trip <= self.round_trip).unwrap_or(self)
    }

    /// The earliest moment here at which the engine's clock can show `told`, less the margin.
    fn earliest(self, told: Duration) -> Time {
        // The clock showed `shown` at the time of sending at the earliest.
        let sent = i128::from(self.received.as_nanos()) - nanos(self.round_trip);
        let at = sent + nanos(told) - nanos(self.shown) - nanos(MARGIN);
        Time::from_nanos(u64::try_from(at.max(0)).unwrap_or(u64::MAX))
    }
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn the_last_heartbeat_counts_for_nothing_and_the_one_before_it_extends_the_lease() {
        let mut lease = Lease::renewed(at(100), Duration::from_secs(30));
        assert_eq!(lease.over_at(None), at(125));
        for (sent, over) in [(101, 125), (106, 125), (111, 126), (116, 131)] {
            assert!(lease.beat(at(sent)));
            assert_eq!(lease.over_at(None), at(over), "after the heartbeat at {sent}");
        }
    }

    #[test]
    fn a_silence_of_more_than_half_of_what_a_heartbeat_adds_ends_all_but_first_leases() {
        let mut lease = Lease::renewed(at(100), Duration::from_secs(30));
        for sent in (100..200).step_by(5) {
            lease.beat(at(sent));
        }
        for (since, now, outlasts) in
            [(105, 124, true), (105, 125, false), (190, 200, true), (189, 200, false)]
        {
            assert_eq!(lease.outlasts(at(since), at(now)), outlasts, "from {since} to {now}");
        }
        assert!(Lease::Told(None).outlasts(at(1), at(1000)));
    }

    #[test]
    fn a_decode_engines_moment_is_moved_to_this_clock_and_made_earlier() {
        let second = Duration::from_secs(1);
        let clock = EngineClock::new(1000 * second, at(8), at(10));
        let told = |seconds: u32| Lease::Told(Some(seconds * second)).over_at(Some(clock));
        assert_eq!(told(1480), at(8 + 480 - 5));
        assert_eq!(told(3), Time::ZERO);
        assert_eq!(Lease::Told(None).over_at(Some(clock)), Time::ZERO);
        assert_eq!(Lease::Told(Some(second)).over_at(None), Time::ZERO);
        assert!(!Lease::Told(None).beat(at(1)));
        let slower = EngineClock::new(5 * second, at(0), at(3));
        assert_eq!((slower.better(Some(clock)), clock.better(Some(slower))), (clock, clock));
    }
}
