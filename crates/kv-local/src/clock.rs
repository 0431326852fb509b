//! The clock that permissions are told in, and the one that work is counted by.

use std::time::Duration;

use kv_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_BOOTTIME`: the time since the host's boot, which goes on while the host is suspended.
pub(crate) fn now() -> Time {
    Time::ZERO + read(ClockId::Boottime)
}

/// `CLOCK_THREAD_CPUTIME_ID`: the processor time that this thread has used.
pub(crate) fn used() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_the_one_that_the_suite_permits_in() {
        let before = kv_conformance::boottime();
        let now = now();
        assert!(before <= now && now <= kv_conformance::boottime());
        assert!(now > Time::ZERO);
    }
}
