//! How much of the region requests can have.

use std::collections::BTreeMap;

use kv_core::ContentHash;

/// An entry, by the hash of its content and its length in bytes.
pub(crate) type Key = (ContentHash, u64);

/// Entries, each with its blocks.
pub(crate) type Entries = BTreeMap<Key, u64>;

/// What is gone of a region for longer than its users use entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Blocks of the region that are not lost.
    pub(crate) usable: u32,
    /// How many of those a transfer still has whose reservation was discarded. They come back.
    pub(crate) away: u32,
    /// Entries that are pinned for good, because pins of theirs were lost.
    pub(crate) stuck: Entries,
}

impl Room {
    /// Blocks that certain entries can have together some day.
    pub(crate) fn lasting(&self, entries: impl Fn(&Key) -> bool) -> u32 {
        let others = self.stuck.iter().filter(|(key, _)| !entries(key));
        self.usable.saturating_sub(others.map(|(_, blocks)| *blocks as u32).sum())
    }

    /// Blocks that certain entries can have together now, if nobody uses any other.
    pub(crate) fn now(&self, entries: impl Fn(&Key) -> bool) -> u32 {
        self.lasting(entries).saturating_sub(self.away)
    }
}
