//! The clock from which a worker reads the time.

use kv_core::Time;
use kv_host::clock;

/// A clock for a worker. Tests and simulators bring their own.
pub trait Clock: Send {
    /// The time now, never less than at an earlier reading.
    fn now(&self) -> Time;
}

/// `CLOCK_BOOTTIME` of the host. Transports read the same clock, because the worker compares its times with
/// theirs.
#[derive(Debug, Clone, Copy)]
pub struct BootTime;

impl Clock for BootTime {
    fn now(&self) -> Time {
        clock::now()
    }
}

#[cfg(test)]
mod tests {
    use rustix::time::{ClockId, clock_gettime};

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
