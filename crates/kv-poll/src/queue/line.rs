//! A waiting line with priorities, which requests can leave at any position.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::consensus::RequestKey;

/// Requests by priority (higher first), then by order of arrival. Every operation costs O(log n).
#[derive(Debug)]
pub(super) struct Line<T> {
    items: BTreeMap<Place, (RequestKey, T)>,
    places: BTreeMap<RequestKey, Place>,
}

type Place = (Reverse<i32>, u64);

impl<T> Line<T> {
    pub(super) fn new() -> Line<T> {
        Line { items: BTreeMap::new(), places: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Enters a request. `order` decides among requests of the same priority, and must be unique in the line.
    pub(super) fn insert(&mut self, key: RequestKey, priority: i32, order: u64, item: T) {
        let place = (Reverse(priority), order);
        self.items.insert(place, (key, item));
        self.places.insert(key, place);
    }

    pub(super) fn front(&self) -> Option<(RequestKey, &T)> {
        self.items.first_key_value().map(|(_, (key, item))| (*key, item))
    }

    pub(super) fn pop(&mut self) -> Option<(RequestKey, T)> {
        let (_, (key, item)) = self.items.pop_first()?;
        self.places.remove(&key);
        Some((key, item))
    }

    pub(super) fn remove(&mut self, key: RequestKey) -> Option<T> {
        let place = self.places.remove(&key)?;
        self.items.remove(&place).map(|(_, item)| item)
    }
}
