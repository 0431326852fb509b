//! The clock of a worker.

use kv_core::Time;
use kv_host::clock;

/// What a worker reads the time from.
pub trait Clock: Send {
    /// The time now, never less than at an earlier reading.
    fn now(&self) -> Time;
}

/// The clock of the host, which transports read as well: the worker compares its times with theirs.
#[derive(Debug, Clone, Copy)]
pub(super) struct BootTime;

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
