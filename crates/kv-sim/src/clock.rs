//! The clocks of simulated hosts: each has an epoch and a rate of its own, and no two need agree.

use kv_core::Time;

/// One microsecond of virtual time.
pub const US: u64 = 1_000;
/// One millisecond of virtual time.
pub const MS: u64 = 1_000_000;
/// One second of virtual time.
pub const SEC: u64 = 1_000_000_000;

const PPM: u128 = 1_000_000;

/// The clock of one life of a host.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: u64,
    epoch: u64,
    rate_ppm: u64,
}

impl Clock {
    /// A clock that shows `epoch` at the global moment `started` and runs at `rate_ppm` parts per
    /// million of global time.
    pub fn new(started: u64, epoch: u64, rate_ppm: u64) -> Clock {
        Clock { started, epoch, rate_ppm: rate_ppm.max(1) }
    }

    /// The same clock, set `ahead` nanoseconds forward at the global moment `now`.
    pub fn jump(&self, now: u64, ahead: u64) -> Clock {
        Clock { started: now, epoch: self.local(now).as_nanos() + ahead, ..*self }
    }

    /// The time that the clock shows at a global moment.
    pub fn local(&self, global: u64) -> Time {
        let elapsed = u128::from(global.saturating_sub(self.started));
        let shown = elapsed * u128::from(self.rate_ppm) / PPM;
        Time::from_nanos(self.epoch + shown as u64)
    }

    /// The first global moment at which the clock shows `local` or later.
    pub fn global(&self, local: Time) -> u64 {
        let shown = u128::from(local.as_nanos().saturating_sub(self.epoch));
        let elapsed = (shown * PPM).div_ceil(u128::from(self.rate_ppm));
        self.started.saturating_add(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_set_in_local_time_is_due_when_it_rings() {
        for rate in [900_000, 999_999, 1_000_000, 1_000_001, 1_234_567] {
            let clock = Clock::new(17, 1_000, rate);
            for nanos in [1_000, 1_001, 5_000_003, 77 * SEC] {
                let local = Time::from_nanos(nanos);
                let global = clock.global(local);
                assert!(clock.local(global) >= local);
                assert!(global == 17 || clock.local(global - 1) < local);
            }
        }
    }
}
