//! [`Latency`]: how long slices to a peer take.

use std::time::Duration;

use kv_core::Time;

/// How long slices to a peer take: an average that follows the latest ones, and that is trusted less as it ages, because a
/// peer that was slow for a while gets no slices that could show it quick again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Latency {
    average: Duration,
    at: Time,
}

impl Latency {
    /// After so long, an average counts half.
    const HALF: Duration = Duration::from_millis(50);

    /// A slice that has ended now took so long.
    pub fn note(&mut self, took: Duration, now: Time) {
        *self = Latency { average: (self.average * 7 + took) / 8, at: now };
    }

    /// How long a slice that is begun now is expected to take, behind those that are under way.
    pub fn expected(self, now: Time) -> Duration {
        self.average.div_f64(1.0 + now.since(self.at).div_duration_f64(Latency::HALF))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_time_is_forgotten_when_no_slices_show_a_better_one() {
        let at = |millis| Time::ZERO + Duration::from_millis(millis);
        let mut latency = Latency::default();
        assert_eq!(latency.expected(at(5)), Duration::ZERO);
        latency.note(Duration::from_millis(800), at(100));
        assert_eq!(latency.expected(at(100)), Duration::from_millis(100));
        assert_eq!(latency.expected(at(150)), Duration::from_millis(50));
        assert!(latency.expected(at(5100)) < Duration::from_millis(1));
    }
}
