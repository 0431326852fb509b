//! A bounded table whose entries expire.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::Time;

/// Entries that expire, at most so many and of so many bytes. An entry for which there is no room takes the places
/// of those that would expire first.
#[derive(Debug)]
pub(super) struct Expiring<K, V> {
    entries: BTreeMap<K, Entry<V>>,
    ends: BTreeSet<(Time, K)>,
    /// Most entries.
    limit: usize,
    /// Most bytes of all entries.
    most: usize,
    /// Bytes of all entries.
    bytes: usize,
}

#[derive(Debug)]
struct Entry<V> {
    until: Time,
    bytes: usize,
    value: V,
}

impl<K: Ord + Clone, V> Expiring<K, V> {
    pub(super) fn new(limit: usize, most: usize) -> Expiring<K, V> {
        Expiring { entries: BTreeMap::new(), ends: BTreeSet::new(), limit: limit.max(1), most, bytes: 0 }
    }

    /// Puts an entry of this many bytes in, in the place of the entry with the same key. Returns how many other
    /// entries had to go.
    pub(super) fn insert(&mut self, key: K, until: Time, bytes: usize, value: V) -> usize {
        self.remove(&key);
        let mut gone = 0;
        while self.entries.len() >= self.limit || self.bytes.saturating_add(bytes) > self.most {
            let Some((_, first)) = self.ends.first().cloned() else { break };
            self.remove(&first);
            gone += 1;
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.ends.insert((until, key.clone()));
        self.entries.insert(key, Entry { until, bytes, value });
        gone
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let Entry { until, bytes, value } = self.entries.remove(key)?;
        self.ends.remove(&(until, key.clone()));
        self.bytes = self.bytes.saturating_sub(bytes);
        Some(value)
    }

    /// Lets an entry live until then at least.
    pub(super) fn extend(&mut self, key: &K, until: Time) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        self.ends.remove(&(entry.until, key.clone()));
        entry.until = until.max(entry.until);
        self.ends.insert((entry.until, key.clone()));
    }

    /// Forgets what has expired. Returns how many entries that were.
    pub(super) fn expire(&mut self, now: Time) -> usize {
        let mut expired = 0;
        while let Some((_, key)) = self.ends.first().filter(|(until, _)| *until <= now).cloned() {
            expired += usize::from(self.remove(&key).is_some());
        }
        expired
    }

    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.ends.first().map(|(at, _)| *at)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}
