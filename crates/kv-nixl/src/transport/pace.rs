//! How often to poll: NIXL has no descriptor to wait on, so sleeps are short while something is expected of NIXL and
//! long otherwise.

use std::time::{Duration, Instant};

/// For this long after NIXL was heard or spoken to the owner does not sleep while requests are in flight: transfers over
/// shared memory or RDMA end within this time.
const SPIN: Duration = Duration::from_micros(100);
/// Shortest sleep. The kernel makes a sleep some 50 µs longer, unless the thread says otherwise, as a worker's does.
const SHORTEST: Duration = Duration::from_micros(20);
/// Longest sleep while requests are in flight.
const IN_FLIGHT: Duration = Duration::from_millis(1);

/// The moment at which NIXL was heard or spoken to last, or a peer has rung, from which the next sleep follows.
#[derive(Debug)]
pub(crate) struct Pace {
    last: Instant,
    idle: Duration,
}

impl Pace {
    /// A pace whose longest sleep is `idle`.
    pub(crate) fn new(idle: Duration) -> Pace {
        Pace { last: Instant::now(), idle }
    }

    /// Takes note that something has passed NIXL, which an answer may follow.
    pub(crate) fn stir(&mut self) {
        self.last = Instant::now();
    }

    /// How long to sleep. A sleep grows with the time since then, so that the added delay is a small part of the time
    /// that has passed anyway.
    pub(crate) fn sleep(&self, in_flight: bool) -> Duration {
        pace(self.last.elapsed(), in_flight, self.idle)
    }
}

fn pace(since: Duration, in_flight: bool, idle: Duration) -> Duration {
    if in_flight {
        if since < SPIN { Duration::ZERO } else { (since / 8).clamp(SHORTEST, IN_FLIGHT.min(idle)) }
    } else {
        (since / 8).clamp(SHORTEST, idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_grow_with_the_silence_up_to_their_bound() {
        let idle = Duration::from_millis(5);
        let ms = Duration::from_millis;
        assert_eq!(pace(Duration::ZERO, true, idle), Duration::ZERO);
        assert_eq!(pace(ms(2), true, idle), Duration::from_micros(250));
        assert_eq!(pace(ms(10_000), true, idle), IN_FLIGHT);
        assert_eq!(pace(Duration::ZERO, false, idle), SHORTEST);
        assert_eq!(pace(ms(16), false, idle), ms(2));
        assert_eq!(pace(ms(10_000), false, idle), idle);
    }

    #[test]
    fn an_idle_transport_wakes_two_hundred_times_a_second() {
        let idle = Duration::from_millis(5);
        let (mut at, mut wakes) = (Duration::ZERO, 0);
        while at < Duration::from_secs(10) {
            at += pace(at, false, idle);
            wakes += 1;
        }
        assert!(wakes < 2100, "{wakes}");
    }
}
