//! Time as a value: the core never reads a clock.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment on the clock of one worker, in nanoseconds since the clock's epoch.
///
/// The clock of a running worker is the host's `CLOCK_BOOTTIME`, which its transport reads, too. A
/// simulator has a clock of its own. A `Time` never crosses the wire: peers exchange durations,
/// because their clocks share neither epoch nor rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The epoch of the clock.
    pub const ZERO: Time = Time(0);
    /// The end of time, for a deadline that never comes.
    pub const MAX: Time = Time(u64::MAX);

    /// A moment `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Time {
        Time(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The duration from `earlier` to `self`; zero if `earlier` is later.
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    /// The moment `duration` later, at most [`Time::MAX`].
    fn add(self, duration: Duration) -> Time {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Time(self.0.saturating_add(nanos))
    }
}

impl Sub for Time {
    type Output = Duration;

    /// The duration from `earlier` to `self`; zero if `earlier` is later.
    fn sub(self, earlier: Time) -> Duration {
        self.since(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_instead_of_wrapping() {
        assert_eq!(Time::MAX + Duration::from_secs(1), Time::MAX);
        assert_eq!(Time::ZERO + Duration::MAX, Time::MAX);
        assert_eq!(Time::ZERO.since(Time::from_nanos(5)), Duration::ZERO);
        assert_eq!(Time::from_nanos(7) - Time::from_nanos(2), Duration::from_nanos(5));
    }
}
