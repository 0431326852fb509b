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
    /// Deadlines that are due in the order of their sessions, as those are that are equally long: they need no other
    /// order.
    deadlines: InOrder<SessionId, Time>,
    /// All other timers.
    others: BTreeMap<Timer, Time>,
    /// The timers of `others`.
    order: BTreeSet<(Time, Timer)>,
}

impl Timers {
    /// Sets a timer. A timer with the same key is replaced.
    pub(super) fn arm(&mut self, timer: Timer, at: Time) {
        self.cancel(timer);
        if let Timer::Deadline(session) = timer
            && self.deadlines.last().is_none_or(|(last, due)| last < session && *due <= at)
        {
            self.deadlines.insert(session, at);
        } else {
            self.others.insert(timer, at);
            self.order.insert((at, timer));
        }
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
        if let Timer::Deadline(session) = timer
            && self.deadlines.remove(session).is_some()
        {
            return;
        }
        if let Some(at) = self.others.remove(&timer) {
            self.order.remove(&(at, timer));
        }
    }

    /// When this timer is due; `None` if it is not set.
    pub(super) fn at(&self, timer: Timer) -> Option<Time> {
        let deadline = match timer {
            Timer::Deadline(session) => self.deadlines.get(session),
            _ => None,
        };
        deadline.or_else(|| self.others.get(&timer)).copied()
    }

    /// When the next timer is due; `None` if no timer is set.
    pub(super) fn next(&self) -> Option<Time> {
        self.first().map(|(at, _)| at)
    }

    /// Takes the next timer that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Timer> {
        let (_, timer) = self.first().filter(|(at, _)| *at <= now)?;
        self.cancel(timer);
        Some(timer)
    }

    /// How many timers are set.
    pub(super) fn len(&self) -> usize {
        self.deadlines.len() + self.order.len()
    }

    /// The next timer, and when it is due.
    fn first(&self) -> Option<(Time, Timer)> {
        let deadline = self.deadlines.iter().next().map(|(session, at)| (*at, Timer::Deadline(session)));
        deadline.into_iter().chain(self.order.first().copied()).min()
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// Deadlines in the order of their sessions and out of it, and timers of other kinds.
    #[test]
    fn timers_come_in_the_order_of_their_times_whatever_they_were_set_for() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = SplitMix64::new(seed);
            let (mut timers, mut wanted) = (Timers::default(), BTreeMap::new());
            // So many deadlines are as long as the one before.
            let equal = 1 + random.below(20);
            let mut now = 0;
            for session in 1..300 {
                now += random.below(3);
                let deadline = if random.below(equal) == 0 { random.below(400) } else { 200 };
                let other = SessionId(1 + random.below(session));
                for (timer, at) in [
                    (Timer::Deadline(SessionId(session)), now + deadline),
                    (Timer::Repeat(other), now + random.below(100)),
                    (Timer::Deadline(other), now + random.below(400)),
                    (Timer::Lease(other), now + 200),
                ] {
                    let at = Time::from_nanos(at);
                    match random.below(4) {
                        0 => timers.arm_once(timer, *wanted.entry(timer).or_insert(at)),
                        1 => {
                            timers.cancel(timer);
                            wanted.remove(&timer);
                        }
                        _ => {
                            timers.arm(timer, at);
                            wanted.insert(timer, at);
                        }
                    }
                    assert_eq!(timers.at(timer), wanted.get(&timer).copied());
                    assert_eq!(timers.len(), wanted.len());
                }
                loop {
                    let first = wanted.iter().map(|(timer, at)| (*at, *timer)).min();
                    assert_eq!(timers.next(), first.map(|(at, _)| at));
                    let due = first.filter(|(at, _)| *at <= Time::from_nanos(now));
                    assert_eq!(timers.pop_due(Time::from_nanos(now)), due.map(|(_, timer)| timer));
                    let Some((_, timer)) = due else { break };
                    wanted.remove(&timer);
                    assert!(!timers.is_armed(timer));
                }
            }
        }
    }

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
