//! The clock that permissions are told in.

use std::time::Duration;

use kv_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_BOOTTIME`: the time since the host's boot, which goes on while the host is suspended.
pub(crate) fn now() -> Time {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Time::ZERO + Duration::new(seconds, nanos)
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
