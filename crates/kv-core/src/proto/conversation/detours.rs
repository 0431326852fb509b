//! Transports that have failed for a peer, and for how long each of them is left alone.
//!
//! | a way is | from | when |
//! |---|---|---|
//! | left alone | – | it could not be opened, was lost, brought no answer, or led to another incarnation |
//! | due | left alone | its pause is over: a session tries it beside the way that works |
//! | left alone, for twice as long | due | it failed again |
//! | good | left alone, due | the peer has answered a hello of this worker over it; that the peer comes over it changes nothing |
//! | left alone, for twice as long | good | it failed again, sooner after the answer than its pause was long |
//! | left alone, as for the first time | good | it failed after it had worked for longer than its pause |
//!
//! A way of which the transport says that it does not lead to the peer (another host, another user) is
//! never due: the peer's metadata do not change.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::Incarnation;
use crate::meter::each;
use crate::record::TransportOffer;
use crate::time::Time;
use crate::trace::WayFault;
use crate::transport::TransportError;

/// One incarnation of a worker, and one of its transports.
type Way = (Incarnation, TransportOffer);

/// The ways that have failed. Which ones there are is decided by sessions of this worker and their
/// lookups, and their number is bounded.
#[derive(Debug, Clone, Default)]
pub(in crate::proto) struct Detours {
    failed: BTreeMap<Way, Failed>,
}

#[derive(Debug, Clone, Copy)]
struct Failed {
    /// Until when the way is left alone.
    until: Time,
    pause: Duration,
    /// When the peer has answered over the way since.
    answered: Option<Time>,
}

/// How long ways are left alone, and how many are remembered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pauses {
    pub(super) first: Duration,
    pub(super) longest: Duration,
    pub(super) ways: usize,
}

impl Detours {
    /// Notes that a way has failed. Returns for how long the way is left alone; `None` for good.
    pub(super) fn fail(&mut self, way: Way, fault: &WayFault, now: Time, pauses: Pauses) -> Option<Duration> {
        let before = self.failed.get(&way).copied();
        if before.is_none() && self.failed.len() >= pauses.ways.max(1) {
            let soonest = each(self.failed.iter()).min_by_key(|(_, failed)| failed.until);
            if let Some(soonest) = soonest.map(|(way, _)| way.clone()) {
                self.failed.remove(&soonest);
            }
        }
        let again =
            before.filter(|failed| failed.answered.is_none_or(|answered| now.since(answered) < failed.pause));
        let pause = again.map_or(pauses.first, |failed| (failed.pause * 2).min(pauses.longest));
        let leads_elsewhere = leads_elsewhere(fault);
        let until = if leads_elsewhere { Time::MAX } else { now + pause };
        self.failed.insert(way, Failed { until, pause, answered: None });
        (!leads_elsewhere).then_some(pause)
    }

    /// Notes that the peer has answered over a way.
    pub(super) fn answered(&mut self, way: &Way, now: Time) {
        if let Some(failed) = self.failed.get_mut(way) {
            failed.answered.get_or_insert(now);
            failed.until = failed.until.min(now);
        }
    }

    /// Until when the way is left alone; `None` if the way may be tried.
    pub(super) fn left_alone(&self, way: &Way, now: Time) -> Option<Time> {
        self.failed.get(way).map(|failed| failed.until).filter(|until| *until > now)
    }

    /// True if the way has failed, and the peer has not answered over it since.
    pub(super) fn is_unanswered(&self, way: &Way) -> bool {
        self.failed.get(way).is_some_and(|failed| failed.answered.is_none())
    }

    /// Since when the way, which has failed before, may be tried again; `None` if it has not failed, or may not.
    pub(super) fn due_since(&self, way: &Way, now: Time) -> Option<Time> {
        self.failed.get(way).map(|failed| failed.until).filter(|until| *until <= now)
    }

    /// True if the way has failed before, and may be tried again.
    pub(super) fn is_due(&self, way: &Way, now: Time) -> bool {
        self.due_since(way, now).is_some()
    }

    /// How many ways are remembered.
    pub(in crate::proto) fn len(&self) -> usize {
        self.failed.len()
    }
}

/// True for an error that a later attempt would meet as well.
fn leads_elsewhere(fault: &WayFault) -> bool {
    let WayFault::Refused(error) = fault else { return false };
    matches!(
        error,
        TransportError::Metadata(_) | TransportError::OtherUser { .. } | TransportError::Unsupported(_)
    )
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const PAUSES: Pauses = Pauses { first: SECOND, longest: Duration::from_secs(5), ways: 3 };

    fn way(life: u64, name: &str) -> Way {
        (Incarnation::from_random(life), TransportOffer::new(name, Bytes::from_static(b"there")))
    }

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_the_way_has_worked() {
        let (mut detours, near) = (Detours::default(), way(1, "near"));
        let fail = |detours: &mut Detours, now| {
            detours.fail(near.clone(), &WayFault::Lost, at(now), PAUSES).unwrap().as_secs()
        };
        assert_eq!([0, 1, 3, 7, 12].map(|now| fail(&mut detours, now)), [1, 2, 4, 5, 5]);
        assert_eq!(detours.left_alone(&near, at(16)), Some(at(17)));
        assert!(!detours.is_due(&near, at(16)) && detours.is_due(&near, at(17)));
        assert!(detours.is_unanswered(&near) && !detours.is_unanswered(&way(2, "near")));
        detours.answered(&near, at(20));
        detours.answered(&near, at(24));
        assert!(!detours.is_unanswered(&near));
        assert_eq!(detours.left_alone(&near, at(20)), None);
        assert_eq!(fail(&mut detours, 24), 5, "it has worked for less than its pause");
        detours.answered(&near, at(30));
        assert_eq!(fail(&mut detours, 35), 1);
        let far = way(1, "far");
        assert!(detours.left_alone(&far, at(35)).is_none() && !detours.is_due(&far, at(35)));
    }

    #[test]
    fn a_way_to_another_host_is_never_due() {
        let (mut detours, near) = (Detours::default(), way(1, "near"));
        let fault = WayFault::Refused(TransportError::Metadata("the peer is on another host"));
        assert_eq!(detours.fail(near.clone(), &fault, at(0), PAUSES), None);
        assert!(!detours.is_due(&near, at(1 << 30)));
        assert_eq!(detours.left_alone(&near, at(1 << 30)), Some(Time::MAX));
    }

    #[test]
    fn of_too_many_ways_the_one_that_is_due_first_is_forgotten() {
        let mut detours = Detours::default();
        for life in 0..1000 {
            detours.fail(way(life, "near"), &WayFault::Silent, at(life), PAUSES);
            assert!(detours.len() <= 3);
        }
        let left = |life| detours.left_alone(&way(life, "near"), at(0)).is_some();
        assert_eq!([996, 997, 998, 999].map(left), [false, true, true, true]);
    }
}
