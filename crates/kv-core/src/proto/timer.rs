//! All the timers of a node.

use std::collections::{BTreeMap, BTreeSet};

use crate::bootstrap::LookupId;
use crate::id::{Attempt, PeerId, SessionId};
use crate::time::Time;

/// What a timer is for. Each key is armed at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The session's deadline.
    Deadline(SessionId),
    /// A receiver repeats its registrations or aborts.
    Repeat(SessionId),
    /// A receiver's pages are quiet after its peer's death.
    Quiet(SessionId, PeerId),
    /// Hello repetition, keepalive and silence of a peer.
    Peer(PeerId),
    /// A failed lookup is tried again.
    Lookup(LookupId),
    /// A registration at this side outlives its receiver's patience.
    Registration(PeerId, Attempt),
    /// The lease of a sender's pages runs out.
    Lease(SessionId),
    /// Heartbeats for the leases of a peer are due.
    Heartbeat(PeerId),
    /// The permission to write to a peer is to be asked for.
    Permission(PeerId),
    /// The permission of a silent peer, and what it could lead to, are over.
    WriteFence(PeerId),
    /// Attempts of a peer below its low watermark are to be ended.
    Sweep(PeerId),
    /// A peer that others wait for is to be taken for stuck.
    Stuck,
    /// The oldest remembered room is forgotten.
    Rooms,
}

/// Timers by key and by time.
#[derive(Debug, Clone, Default)]
pub(super) struct Timers {
    at: BTreeMap<Timer, Time>,
    order: BTreeSet<(Time, Timer)>,
}

impl Timers {
    /// Sets a timer, in place of the one with the same key.
    pub(super) fn arm(&mut self, timer: Timer, at: Time) {
        if let Some(before) = self.at.insert(timer, at) {
            self.order.remove(&(before, timer));
        }
        self.order.insert((at, timer));
    }

    /// Sets a timer unless one with its key is set.
    pub(super) fn arm_once(&mut self, timer: Timer, at: Time) {
        if !self.at.contains_key(&timer) {
            self.arm(timer, at);
        }
    }

    /// True if the timer is set.
    pub(super) fn is_armed(&self, timer: Timer) -> bool {
        self.at.contains_key(&timer)
    }

    /// Drops a timer.
    pub(super) fn cancel(&mut self, timer: Timer) {
        if let Some(at) = self.at.remove(&timer) {
            self.order.remove(&(at, timer));
        }
    }

    /// When this one is due, if it is set.
    pub(super) fn at(&self, timer: Timer) -> Option<Time> {
        self.at.get(&timer).copied()
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Takes the next one that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.order.first()?;
        if at > now {
            return None;
        }
        self.order.remove(&(at, timer));
        self.at.remove(&timer);
        Some(timer)
    }

    /// How many are set.
    pub(super) fn len(&self) -> usize {
        self.at.len()
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
