//! The clock of a worker.

use kv_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// What a worker reads the time from.
pub trait Clock: Send {
    /// The time now, never less than at an earlier reading.
    fn now(&self) -> Time;
}

/// `CLOCK_BOOTTIME`, which goes on while the host is suspended.
///
/// Transports read it by themselves, and compare it with the times that the protocol tells them: a
/// [`Time`] of a worker is nanoseconds of this clock, and of no other.
#[derive(Debug, Clone, Copy)]
pub(super) struct BootTime;

impl Clock for BootTime {
    fn now(&self) -> Time {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_reads_the_clock_that_its_transport_reads() {
        let of_host = || {
            let time = clock_gettime(ClockId::Boottime);
            Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
        };
        let (before, read, after) = (of_host(), BootTime.now(), of_host());
        assert!(before <= read && read <= after, "{before:?} {read:?} {after:?}");
    }
}
