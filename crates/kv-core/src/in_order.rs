//! A map for keys that are handed out in ascending order, such as the numbers of sessions and of posts, and of which
//! the oldest are mostly the first to go. It is a line: a lookup touches one or two places of it, where one in a tree of
//! a thousand keys touches a dozen, each of which the copy of a page has pushed out of the processor's caches.

use std::collections::VecDeque;
use std::fmt;

use crate::id::{Attempt, PostId, SessionId};

/// A key whose distance to another one tells how far away the other one's place is at most.
pub trait Numbered: Copy + Ord {
    /// The number of the key. Keys compare as their numbers do.
    fn number(self) -> u64;
}

impl Numbered for u64 {
    fn number(self) -> u64 {
        self
    }
}

impl Numbered for SessionId {
    fn number(self) -> u64 {
        self.0
    }
}

impl Numbered for Attempt {
    fn number(self) -> u64 {
        self.0
    }
}

impl Numbered for PostId {
    fn number(self) -> u64 {
        self.0
    }
}

/// So many empty places are kept even in a line that has fewer entries.
const SPARE: usize = 32;

/// A map by ascending keys. A key that is inserted before others moves them: where a peer chooses the keys, the entries
/// are to be few.
#[derive(Clone)]
pub struct InOrder<K, V> {
    /// By key. An entry that was removed leaves an empty place; the first place and the last one are not empty.
    line: VecDeque<(K, Option<V>)>,
    /// How many places are not empty.
    len: usize,
}

impl<K, V> Default for InOrder<K, V> {
    fn default() -> InOrder<K, V> {
        InOrder { line: VecDeque::new(), len: 0 }
    }
}

impl<K: Numbered, V> InOrder<K, V> {
    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value of the key, if the map has one.
    pub fn get(&self, key: K) -> Option<&V> {
        self.line.get(self.find(key).ok()?)?.1.as_ref()
    }

    /// The value of the key, if the map has one, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        let place = self.find(key).ok()?;
        self.line.get_mut(place)?.1.as_mut()
    }

    /// True if the map has a value of the key.
    pub fn contains(&self, key: K) -> bool {
        self.get(key).is_some()
    }

    /// Sets the value of a key. Returns the value that it had.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let before = match self.find(key) {
            Ok(place) => self.line.get_mut(place).and_then(|place| place.1.replace(value)),
            Err(place) if place == self.line.len() => {
                self.line.push_back((key, Some(value)));
                None
            }
            Err(place) => {
                self.line.insert(place, (key, Some(value)));
                None
            }
        };
        self.len += usize::from(before.is_none());
        before
    }

    /// Removes the value of a key, and returns it.
    pub fn remove(&mut self, key: K) -> Option<V> {
        let place = self.find(key).ok()?;
        let value = self.line.get_mut(place)?.1.take()?;
        self.len -= 1;
        self.tidy();
        Some(value)
    }

    /// Removes the first entry, and returns it.
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        let (key, value) = self.line.pop_front()?;
        self.len -= usize::from(value.is_some());
        self.tidy();
        Some((key, value?))
    }

    /// All entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        self.line.iter().filter_map(|(key, value)| Some((*key, value.as_ref()?)))
    }

    /// The key of the first entry.
    pub fn first(&self) -> Option<K> {
        self.line.front().map(|(key, _)| *key)
    }

    /// The last entry.
    pub fn last(&self) -> Option<(K, &V)> {
        self.line.back().and_then(|(key, value)| Some((*key, value.as_ref()?)))
    }

    /// The key of the first entry that is not below this one.
    pub fn first_from(&self, key: K) -> Option<K> {
        let (Ok(place) | Err(place)) = self.find(key);
        self.line.range(place..).find(|(_, value)| value.is_some()).map(|(key, _)| *key)
    }

    /// All values, in the order of their keys.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.line.iter().filter_map(|(_, value)| value.as_ref())
    }

    /// The place of a key; or, if it has none, the place that it would have.
    #[inline]
    fn find(&self, key: K) -> Result<usize, usize> {
        let Some((first, _)) = self.line.front() else { return Err(0) };
        let Some(away) = key.number().checked_sub(first.number()) else { return Err(0) };
        // Keys differ by one at least: the place is no farther away. Where no key is missing, it is there.
        let most = usize::try_from(away).unwrap_or(usize::MAX).min(self.line.len() - 1);
        match self.line.get(most) {
            Some((there, _)) if *there == key => Ok(most),
            Some((there, _)) if *there < key => Err(most + 1),
            _ => self.line.binary_search_by(|(there, _)| there.cmp(&key)),
        }
    }

    /// Gives up empty places at both ends, and all of them once they are more than the entries.
    fn tidy(&mut self) {
        while self.line.front().is_some_and(|(_, value)| value.is_none()) {
            self.line.pop_front();
        }
        while self.line.back().is_some_and(|(_, value)| value.is_none()) {
            self.line.pop_back();
        }
        if self.line.len() > 2 * self.len + SPARE {
            self.line.retain(|(_, value)| value.is_some());
        }
    }
}

impl<K: Numbered + fmt::Debug, V: fmt::Debug> fmt::Debug for InOrder<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::random::SplitMix64;

    fn entries(map: &InOrder<u64, u64>) -> Vec<(u64, u64)> {
        map.iter().map(|(key, value)| (key, *value)).collect()
    }

    #[test]
    fn the_map_has_what_a_tree_has_whatever_the_order_of_keys() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = SplitMix64::new(seed);
            let (mut map, mut tree, mut next) = (InOrder::default(), BTreeMap::new(), 1 << 40);
            // One of so many keys comes out of order, and so many entries are kept.
            let (strays, kept) = (1 + random.below(20), random.below(120) as usize);
            for step in 0..600 {
                next += 1 + random.below(2) * random.below(3);
                let stray = random.below(strays) == 0;
                let key = if stray { (1 << 40) + random.below(next + 9 - (1 << 40)) } else { next };
                assert_eq!(map.insert(key, step), tree.insert(key, step));
                while tree.len() > kept {
                    let some = *tree.keys().nth(random.below(tree.len() as u64) as usize).unwrap();
                    if random.below(2) == 0 {
                        assert_eq!(map.pop_first(), tree.pop_first());
                    } else {
                        assert_eq!(map.remove(some), tree.remove(&some));
                        assert_eq!(map.remove(some), None);
                    }
                }
                for key in [key, next + 1, key - 1, 0, u64::MAX, (1 << 40) + random.below(next - (1 << 40))] {
                    assert_eq!(map.get(key), tree.get(&key));
                    assert_eq!(map.get_mut(key), tree.get_mut(&key));
                    assert_eq!(map.contains(key), tree.contains_key(&key));
                    assert_eq!(map.first_from(key), tree.range(key..).next().map(|(key, _)| *key));
                }
                assert_eq!((map.len(), map.is_empty()), (tree.len(), tree.is_empty()));
                assert_eq!(map.first(), tree.keys().next().copied());
                assert_eq!(map.last(), tree.last_key_value().map(|(key, value)| (*key, value)));
                assert!(map.line.len() <= 2 * map.len() + SPARE, "{} places", map.line.len());
            }
            assert!(map.values().eq(tree.values()));
            assert_eq!(entries(&map), tree.clone().into_iter().collect::<Vec<_>>());
            assert_eq!(format!("{map:?}"), format!("{tree:?}"));
        }
    }

    #[test]
    fn one_entry_that_stays_keeps_no_places_of_those_that_went() {
        let mut map = InOrder::default();
        map.insert(7_u64, 7);
        for key in 8..10_000 {
            map.insert(key, key);
            assert_eq!((map.remove(key), map.get(7)), (Some(key), Some(&7)));
            assert_eq!(map.line.len(), 1);
        }
        map.insert(u64::MAX, 9);
        for key in 10_000..20_000 {
            map.insert(key, key);
            assert_eq!((map.remove(key), map.get(7), map.get(u64::MAX)), (Some(key), Some(&7), Some(&9)));
            assert!(map.line.len() <= 2 * map.len() + SPARE);
        }
    }
}
