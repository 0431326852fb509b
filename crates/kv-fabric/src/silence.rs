//! How long a peer has been silent, as far as this side has listened ([`Silence`]).

use std::time::Duration;

use kv_core::Time;

/// How many looks, an eighth of the limit apart, must find nothing heard until the peer counts as silent.
const LOOKS: u8 = 4;

/// The silence of one peer.
///
/// A process that is stopped for a while, or whose owner does not poll, has not listened: its peer's answers lie in the
/// socket, or were not asked for. So time alone does not make a peer silent; this side must have looked several times,
/// and a look greets the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silence {
    since: Time,
    looked: Time,
    looks: u8,
}

impl Silence {
    /// The peer was heard now.
    pub(crate) fn from(now: Time) -> Silence {
        Silence { since: now, looked: now, looks: 0 }
    }

    /// Looks whether the peer has been silent for `limit`, and in enough looks of this side.
    pub(crate) fn reaches(&mut self, limit: Duration, now: Time) -> bool {
        if now.since(self.looked) >= limit / 8 {
            self.looked = now;
            self.looks = self.looks.saturating_add(1);
        }
        self.looks >= LOOKS && now.since(self.since) >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn a_peer_is_silent_after_the_limit_or_soon_after_however_often_one_looks() {
        for step in [1, 7, 100, 999, 1000] {
            let mut silence = Silence::from(at(0));
            let found = (0..10_000).step_by(step).find(|&millis| silence.reaches(LIMIT, at(millis)));
            assert!((4000..5000).contains(&found.unwrap()), "{step}: {found:?}");
        }
    }

    #[test]
    fn a_pause_of_this_side_makes_nobody_silent_and_one_that_looks_seldom_still_finds_out() {
        for begun in [0, 499, 1499] {
            let mut silence = Silence::from(at(0));
            assert!((0..=begun).all(|millis| !silence.reaches(LIMIT, at(millis))));
            assert!(!silence.reaches(LIMIT, at(begun + 100_000)), "paused after {begun} ms");
        }
        let mut silence = Silence::from(at(0));
        let found = (0..100_000).step_by(20_000).find(|&millis| silence.reaches(LIMIT, at(millis)));
        assert_eq!(found, Some(80_000));
    }
}
