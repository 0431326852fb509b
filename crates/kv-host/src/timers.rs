//! [`Timers`]: when each way to a peer is looked at again.

use std::collections::{BTreeSet, HashMap};

use kv_core::Time;

/// At most one time for each way: the earliest one for which it was asked.
#[derive(Debug, Default)]
pub struct Timers {
    of: HashMap<u64, Time>,
    by_time: BTreeSet<(Time, u64)>,
}

impl Timers {
    /// The way is due at this time, if it is not due before.
    pub fn arm(&mut self, way: u64, at: Time) {
        if self.of.get(&way).is_none_or(|due| at < *due) {
            self.remove(way);
            self.of.insert(way, at);
            self.by_time.insert((at, way));
        }
    }

    /// The way is not due any more.
    pub fn remove(&mut self, way: u64) {
        if let Some(due) = self.of.remove(&way) {
            self.by_time.remove(&(due, way));
        }
    }

    /// When the next way is due.
    pub fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes the ways that are due now, the longest overdue first. All are taken before the first one is looked at, so
    /// that a way that is due again at once does not hold up the others.
    pub fn due(&mut self, now: Time) -> Vec<u64> {
        let mut due = Vec::new();
        while let Some((at, way)) = self.by_time.first().copied()
            && at <= now
        {
            self.remove(way);
            due.push(way);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_way_is_due_once_and_at_the_earliest_time_that_was_asked_for() {
        let mut timers = Timers::default();
        for (way, seconds) in [(1, 5), (2, 3), (1, 2), (3, 4), (1, 9), (2, 3), (4, 1)] {
            timers.arm(way, at(seconds));
        }
        timers.remove(4);
        assert_eq!(timers.next(), Some(at(2)));
        assert_eq!(timers.due(at(1)), []);
        assert_eq!(timers.due(at(3)), [1, 2]);
        timers.arm(1, at(9));
        assert_eq!(timers.next(), Some(at(4)));
        assert_eq!(timers.due(at(9)), [3, 1]);
        assert_eq!((timers.next(), timers.due(Time::MAX)), (None, vec![]));
    }
}
