//! How many bytes of notifications a foreign agent is sent: a foreign agent confirms nothing, and NIXL does
//! not say what became of a notification.

use std::time::{Duration, Instant};

/// The time in which the whole allowance comes back.
const REFILL: Duration = Duration::from_secs(10);

/// A token bucket. If an agent takes nothing, UCX keeps the whole allowance at first, and as much again in
/// every ten seconds in which the owner goes on sending.
#[derive(Debug)]
pub(crate) struct Allowance {
    /// Bytes of the allowance that were used up at that moment.
    used: u64,
    at: Instant,
}

impl Allowance {
    /// An allowance of which nothing is used.
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { used: 0, at: now }
    }

    /// True if this many bytes may be sent now, of an allowance of `most`.
    pub(crate) fn covers(&self, bytes: u64, most: u64, now: Instant) -> bool {
        self.used_at(most, now).saturating_add(bytes) <= most
    }

    /// Counts bytes that are sent.
    pub(crate) fn take(&mut self, bytes: u64, most: u64, now: Instant) {
        self.used = self.used_at(most, now).saturating_add(bytes);
        self.at = now;
    }

    fn used_at(&self, most: u64, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.at).as_micros();
        let back = passed.saturating_mul(u128::from(most)) / REFILL.as_micros();
        self.used.saturating_sub(u64::try_from(back).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_bounded_at_once_and_over_time() {
        let (begun, most, step) = (Instant::now(), 1000, Duration::from_millis(1));
        let mut allowance = Allowance::new(begun);
        let (mut sent, mut now) = (0, begun);
        for _ in 0..20_000 {
            while allowance.covers(7, most, now) {
                allowance.take(7, most, now);
                sent += 7;
            }
            if now == begun {
                assert_eq!(sent, 994, "the whole allowance at once, and nothing more");
            }
            now += step;
        }
        // Twenty seconds: the allowance, and twice its refill.
        assert!(sent <= 3000, "{sent}");
        assert!(!allowance.covers(1001, most, now + REFILL * 100), "a burst is never more than the whole");
        assert!(allowance.covers(1000, most, now + REFILL));
    }
}
