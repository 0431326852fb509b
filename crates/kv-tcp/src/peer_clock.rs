//! [`PeerClock`]: this host's times as times of a peer's clock.
//!
//! A slice says until when it may touch memory, by the clock of the host that looks at it, so that bytes that
//! have waited in a socket's buffers for too long are never put in place. The two clocks have nothing in
//! common but their speed. A reading that has travelled from the peer to here is older than its arrival says,
//! so the peer's clock is at least as far ahead as the reading. Times that are translated with that least
//! difference end too early by the travel of one message, and never too late.
//!
//! A clock may lose time against the other: that of a virtual machine stands still while the machine is paused. A reading
//! that answers something also says how far ahead the peer's clock is at most, which shows the loss.

use kv_core::Time;

/// The share of its age by which a reading is trusted less: more than two clocks differ in speed.
const DRIFT: i64 = 1000;

/// The least difference between a peer's clock and this host's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerClock {
    /// Nanoseconds by which the peer's clock was ahead at least, and when.
    ahead: i64,
    at: Time,
}

impl PeerClock {
    /// The peer's clock, of which the reading `theirs` has arrived now.
    pub(crate) fn new(theirs: Time, now: Time) -> PeerClock {
        PeerClock { ahead: nanos(theirs).saturating_sub(nanos(now)), at: now }
    }

    /// Another reading has arrived, which answers what was sent at `sent`.
    pub(crate) fn heard(&mut self, theirs: Time, sent: Time, now: Time) {
        let new = PeerClock::new(theirs, now);
        let most = nanos(theirs).saturating_sub(nanos(sent));
        let least = self.least(now);
        if new.ahead >= least || most < least {
            *self = new;
        }
    }

    /// A time of this host by the peer's clock, or a moment earlier.
    pub(crate) fn theirs(&self, ours: Time, now: Time) -> Time {
        let theirs = nanos(ours).saturating_add(self.least(now));
        Time::from_nanos(u64::try_from(theirs).unwrap_or(0))
    }

    fn least(&self, now: Time) -> i64 {
        self.ahead.saturating_sub(nanos(Time::ZERO + now.since(self.at)) / DRIFT)
    }
}

fn nanos(time: Time) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn a_time_by_the_peers_clock_is_never_later_than_the_time_itself() {
        // The peer's clock is an hour ahead, or behind; readings travel 30, 2 and 9 ms.
        for (ahead, begun) in [(3_600_000, 5_000), (-3_600_000, 3_700_000)] {
            let theirs = |ours: u64| at((ours as i64 + ahead) as u64);
            let mut clock = PeerClock::new(theirs(begun), at(begun + 30));
            let end = begun + 1000;
            assert_eq!(clock.theirs(at(end), at(begun + 30)), theirs(end - 30));
            clock.heard(theirs(begun + 40), at(begun + 39), at(begun + 42));
            clock.heard(theirs(begun + 50), at(begun + 42), at(begun + 59));
            assert!(clock.theirs(at(end), at(begun + 60)) <= theirs(end - 2));
            assert!(clock.theirs(at(end), at(begun + 60)) > theirs(end - 3));
            // After ten seconds without a reading, clocks that drift by 1 in 1000 are still met.
            assert!(clock.theirs(at(end + 10_000), at(begun + 10_042)) <= theirs(end + 10_000 - 12));
        }
        // The peer's clock stands still for three seconds, which the next answer shows.
        let mut clock = PeerClock::new(at(9_000), at(1_000));
        clock.heard(at(9_100), at(3_950), at(4_100));
        assert_eq!(clock.theirs(at(5_000), at(4_100)), at(10_000));
        // An answer that was long under way shows nothing.
        clock.heard(at(9_110), at(4_105), at(5_100));
        assert!(clock.theirs(at(6_000), at(5_100)) > at(10_998));
        let clock = PeerClock::new(at(1), at(500));
        assert_eq!(clock.theirs(at(100), at(500)), Time::ZERO);
        assert!(PeerClock::new(Time::MAX, at(1)).theirs(Time::MAX, at(1)) > at(1));
    }
}
