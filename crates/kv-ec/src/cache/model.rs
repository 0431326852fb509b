//! What a simulator and a model checker need of a cache: a look at every block, and the one mistake that
//! cannot be made from outside.
//!
//! Only with the feature `model`: no server may evict an entry that somebody reads.

use kv_core::{ContentHash, PageList};

use super::entry::Entry;
use super::{EncoderCache, Ready};
use crate::store::SharedStore;

/// A committed entry of an [`EncoderCache`].
#[derive(Debug, Clone, Copy)]
pub struct CommittedEntry<'a> {
    /// The hash of the entry.
    pub hash: &'a ContentHash,
    /// The blocks, in the order of the entry's bytes.
    pub blocks: &'a PageList,
    /// Bytes of the entry.
    pub bytes: u64,
    /// The number that no other entry of the cache has, or will have.
    pub generation: u64,
    /// How many pins there are.
    pub pins: u64,
}

impl EncoderCache {
    /// The committed entries, in no order.
    pub fn committed(&self) -> impl Iterator<Item = CommittedEntry<'_>> {
        self.entries.iter().filter_map(|(hash, entry)| match entry {
            Entry::Ready(Ready { pages, bytes, generation, pins, .. }) => Some(CommittedEntry {
                hash,
                blocks: pages.list(),
                bytes: *bytes,
                generation: *generation,
                pins: *pins,
            }),
            Entry::Filling(_) => None,
        })
    }

    /// True if no entry, no reservation and no transfer has the block.
    pub fn is_free(&self, block: u32) -> bool {
        self.blocks.is_free(block)
    }

    /// Evicts a committed entry although it is pinned: a mistake, to be planted. False if there is no such
    /// entry.
    pub fn evict_pinned(&mut self, hash: &ContentHash) -> bool {
        let Some(Entry::Ready(entry)) = self.entries.get_mut(hash) else { return false };
        if std::mem::take(&mut entry.pins) == 0 {
            self.order.remove(entry.place);
        } else {
            let blocks = entry.blocks();
            self.gauges.pinned -= blocks;
            self.gauges.cached += blocks;
        }
        self.free_entry(hash);
        true
    }
}

impl SharedStore {
    /// Lets a simulator look at the cache, or make a mistake in it.
    pub fn with_cache<R>(&self, look: impl FnOnce(&mut EncoderCache) -> R) -> R {
        look(&mut self.lock())
    }
}
