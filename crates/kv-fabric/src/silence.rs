//! When a peer has been silent for too long, as far as this side has listened ([`Looks`]).

use std::time::Duration;

use kv_core::Time;

/// How many looks must find nothing after the limit has passed.
const LOOKS: usize = 4;
/// Into how many parts looks divide the limit, at most.
const PARTS: u32 = 16;

/// The last looks of this side at what its peers have sent.
///
/// A process that is stopped for a while, or whose owner does not poll, has not listened: its peers' answers lie in its
/// sockets, or were not asked for. So time alone makes no peer silent. The limit must have passed, and then this side must
/// have looked four times, a sixteenth of the limit apart or more. A way that is open or opening greets its peer with each of
/// these looks; guests greet by themselves.
///
/// - While this side looks all the time, a peer is silent when the limit has passed, and a quarter of it more at most.
/// - After a pause that began before the limit had passed, the peer has three sixteenths of the limit to be heard, whenever
///   the pause began and however long it was. A later pause counts as one look.
/// - A side that looks seldom finds the silence with its fourth look after the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looks {
    limit: Duration,
    /// The last one first.
    times: [Time; LOOKS],
}

impl Looks {
    /// This side has not looked yet.
    pub(crate) fn new(limit: Duration) -> Looks {
        Looks { limit, times: [Time::ZERO; LOOKS] }
    }

    /// This side has taken what has arrived.
    pub(crate) fn look(&mut self, now: Time) {
        if now.since(self.times[0]) >= self.apart() {
            self.times.rotate_right(1);
            self.times[0] = now;
        }
    }

    /// How far apart looks are at least.
    fn apart(&self) -> Duration {
        self.limit / PARTS
    }

    /// True if looks have found nothing of a peer that was heard at this time, and the limit had passed at all of them.
    pub(crate) fn found_nothing_since(&self, heard: Time) -> bool {
        self.times.iter().all(|look| look.since(heard) >= self.limit)
    }

    /// When the next look can say something about a peer that was heard at this time.
    pub(crate) fn next(&self, heard: Time) -> Time {
        (heard + self.limit).max(self.times[0] + self.apart())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    /// The first of these moments at which a look finds a peer silent that was heard at 1 s.
    fn found(looks: &mut Looks, moments: impl IntoIterator<Item = u64>) -> Option<u64> {
        moments.into_iter().find(|millis| {
            looks.look(at(*millis));
            looks.found_nothing_since(at(1000))
        })
    }

    #[test]
    fn a_peer_is_silent_after_the_limit_and_a_quarter_more_at_most_however_often_one_looks() {
        for step in [1, 7, 50] {
            for begun in 1000..1250 {
                let found = found(&mut Looks::new(LIMIT), (begun..10_000).step_by(step));
                assert!(
                    (5750..=6000 + 4 * step as u64).contains(&found.unwrap()),
                    "{begun}, {step}: {found:?}"
                );
            }
        }
        // One that sleeps is woken for each look that can count.
        let (mut looks, mut now) = (Looks::new(LIMIT), at(1000));
        while !looks.found_nothing_since(at(1000)) {
            now = looks.next(at(1000));
            looks.look(now);
        }
        assert_eq!(now, at(5750));
    }

    #[test]
    fn after_a_pause_that_began_before_the_limit_a_peer_has_three_sixteenths_of_it_to_be_heard() {
        for begun in (1000..5000).step_by(9).chain([4999]) {
            for resumed in [begun + 1, begun + 500, begun + 4000, 100_000] {
                let mut looks = Looks::new(LIMIT);
                assert_eq!(found(&mut looks, 1000..begun), None);
                let found = found(&mut looks, resumed..200_000).unwrap();
                let fair = resumed.max(5000) + 750;
                assert!((fair..=fair + 250).contains(&found), "{begun} to {resumed}: {found}");
            }
        }
    }

    #[test]
    fn pauses_after_the_limit_and_seldom_looks_do_not_hide_a_silence_for_ever() {
        let mut looks = Looks::new(LIMIT);
        assert_eq!(found(&mut looks, 1000..5300), None);
        assert!(found(&mut looks, 90_000..91_000).is_some());
        assert_eq!(found(&mut Looks::new(LIMIT), (1000..1_000_000).step_by(20_000)), Some(81_000));
    }

    #[test]
    fn the_next_look_is_never_before_it_can_count() {
        let mut looks = Looks::new(LIMIT);
        assert_eq!(looks.next(at(1000)), at(5000));
        for now in [4990, 5000, 5300, 20_000] {
            looks.look(at(now));
            assert!(looks.next(at(1000)) > at(now), "{now}");
            assert!(looks.next(at(1000)) <= at(now) + looks.apart(), "{now}");
        }
    }
}
