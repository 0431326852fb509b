//! [`Expiry`]: keys by the time at which they end, for tables and connections.

use std::collections::BTreeSet;

use kv_core::Time;

/// Keys by the time at which they end.
#[derive(Debug)]
pub(crate) struct Expiry<K>(BTreeSet<(Time, K)>);

impl<K: Ord> Expiry<K> {
    pub(crate) fn insert(&mut self, at: Time, key: K) {
        self.0.insert((at, key));
    }

    /// Forgets a key that was inserted with the end `at`.
    pub(crate) fn remove(&mut self, at: Time, key: K) {
        self.0.remove(&(at, key));
    }

    /// Takes out the next key whose time has come.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<K> {
        let (at, _) = self.0.first()?;
        if *at > now {
            return None;
        }
        self.0.pop_first().map(|(_, key)| key)
    }

    /// When the next key ends; `None` without keys.
    pub(crate) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl<K> Default for Expiry<K> {
    fn default() -> Expiry<K> {
        Expiry(BTreeSet::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_out_once_at_their_time_and_the_earliest_first() {
        let at = Time::from_nanos;
        let mut expiry = Expiry::default();
        for (time, key) in [(30, 'c'), (10, 'a'), (20, 'b'), (20, 'x')] {
            expiry.insert(at(time), key);
        }
        expiry.remove(at(20), 'x');
        assert_eq!((expiry.next(), expiry.pop_due(at(9))), (Some(at(10)), None));
        assert_eq!(
            [expiry.pop_due(at(20)), expiry.pop_due(at(20)), expiry.pop_due(at(20))],
            [Some('a'), Some('b'), None]
        );
        assert_eq!((expiry.next(), expiry.len()), (Some(at(30)), 1));
    }
}
