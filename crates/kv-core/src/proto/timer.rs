//! The timers of a machine.

use std::collections::{BTreeMap, BTreeSet};

use crate::bootstrap::LookupId;
use crate::id::{Attempt, PeerId, SessionId};
use crate::in_order::InOrder;
use crate::time::Time;

/// What a timer is for. Each key is set at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The deadline of the session.
    Deadline(SessionId),
    /// The receiver repeats its registrations or aborts.
    Repeat(SessionId),
    /// The receiver's pages are quiet after the death of its peer.
    Quiet(SessionId, PeerId),
    /// The next hello, the next heartbeat, or the end of patience with a silent peer.
    Peer(PeerId),
    /// A failed lookup is repeated.
    Lookup(LookupId),
    /// A registration that waits here has waited longer than its receiver does.
    Registration(PeerId, Attempt),
    /// The lease on a sender's pages runs out.
    Lease(SessionId),
    /// The heartbeats for the leases of a peer are due.
    Heartbeat(PeerId),
    /// This worker must ask the peer for permission to write again.
    Permission(PeerId),
    /// The permission of a silent peer has ended, and its last writes have arrived.
    WriteFence(PeerId),
    /// More attempts of a peer below its low watermark are ended.
    Sweep(PeerId),
    /// A peer for which others wait is considered stuck.
    Stuck,
    /// The oldest failed room is forgotten.
    Rooms,
}

/// The timers that are set, by key and by time.
#[derive(Debug, Clone, Default)]
pub(super) struct Timers {
    /// The deadlines, of which each session that has not ended has one.
    deadlines: InOrder<SessionId, Time>,
    /// The timers of all other kinds.
    others: BTreeMap<Timer, Time>,
    order: BTreeSet<(Time, Timer)>,
}

impl Timers {
    /// Sets a timer. A timer with the same key is replaced.
    pub(super) fn arm(&mut self, timer: Timer, at: Time) {
        let before = match timer {
            Timer::Deadline(session) => self.deadlines.insert(session, at),
            other => self.others.insert(other, at),
        };
        if let Some(before) = before {
            self.order.remove(&(before, timer));
        }
        self.order.insert((at, timer));
    }

    /// Sets a timer, unless a timer with the same key is set.
    pub(super) fn arm_once(&mut self, timer: Timer, at: Time) {
        if !self.is_armed(timer) {
            self.arm(timer, at);
        }
    }

    /// True if the timer is set.
    pub(super) fn is_armed(&self, timer: Timer) -> bool {
        self.at(timer).is_some()
    }

    /// Removes a timer, if it is set.
    pub(super) fn cancel(&mut self, timer: Timer) {
        if let Some(at) = self.take(timer) {
            self.order.remove(&(at, timer));
        }
    }

    /// When this timer is due; `None` if it is not set.
    pub(super) fn at(&self, timer: Timer) -> Option<Time> {
        match timer {
            Timer::Deadline(session) => self.deadlines.get(session).copied(),
            other => self.others.get(&other).copied(),
        }
    }

    /// When the next timer is due; `None` if no timer is set.
    pub(super) fn next(&self) -> Option<Time> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Takes the next timer that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.order.first()?;
        if at > now {
            return None;
        }
        self.order.remove(&(at, timer));
        self.take(timer);
        Some(timer)
    }

    /// How many timers are set.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Removes a timer from those by key. Returns when it was due.
    fn take(&mut self, timer: Timer) -> Option<Time> {
        match timer {
            Timer::Deadline(session) => self.deadlines.remove(session),
            other => self.others.remove(&other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_setting_of_a_key_counts() {
        let mut timers = Timers::default();
        let key = Timer::Deadline(SessionId(1));
        timers.arm(key, Time::from_nanos(10));
        timers.arm(key, Time::from_nanos(20));
        timers.arm_once(key, Time::from_nanos(5));
        timers.arm(Timer::Rooms, Time::from_nanos(15));
        assert_eq!(timers.next(), Some(Time::from_nanos(15)));
        assert_eq!(timers.pop_due(Time::from_nanos(14)), None);
        assert_eq!(timers.pop_due(Time::from_nanos(30)), Some(Timer::Rooms));
        assert_eq!(timers.pop_due(Time::from_nanos(30)), Some(key));
        assert_eq!(timers.pop_due(Time::from_nanos(30)), None);
        timers.arm(key, Time::from_nanos(10));
        timers.cancel(key);
        assert_eq!(timers.len(), 0);
        assert_eq!(timers.next(), None);
    }
}
