//! Permission to write: a peer says until when, and the clock is read before each slice.

use std::time::Duration;

use kv_core::Time;

/// Until when a peer allows writes to begin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permission {
    until: Time,
    /// The longest time that a slice is expected to take: half of what was left when the permission arrived.
    /// Without this limit, one long stop of either side would be taken for the speed of the way, and would
    /// forbid every write from then on.
    longest: Duration,
}

impl Permission {
    /// A permission that arrived at `now`.
    pub(crate) fn told(until: Time, now: Time) -> Permission {
        Permission { until, longest: until.since(now) / 2 }
    }

    /// True if a write that takes this long ends within the permission.
    pub(crate) fn covers(self, now: Time, takes: Duration) -> bool {
        now + takes.min(self.longest) < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_write_begins_that_may_outlast_its_permission() {
        let second = Duration::from_secs(1);
        let now = Time::ZERO + 100 * second;
        let permission = Permission::told(now + 10 * second, now);
        assert!(permission.covers(now, 4 * second));
        assert!(!permission.covers(now + 6 * second, 4 * second), "it would end with it");
        assert!(!permission.covers(now + 10 * second, Duration::ZERO));
        assert!(!permission.covers(now + 20 * second, Duration::ZERO));
        assert!(permission.covers(now, 60 * second), "a stop is not taken for a speed");
        assert!(!permission.covers(now + 5 * second, 60 * second));
        assert!(!Permission::told(now, now + second).covers(now + second, Duration::ZERO), "it had ended");
        assert!(Permission::told(Time::MAX, now).covers(now, Duration::MAX));
    }
}
