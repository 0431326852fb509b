//! Entries, and what their users hold of them.
//!
//! ```text
//!            reserve              commit            pin
//! (absent) ──────────▶ filling ──────────▶ ready ◀──────▶ pinned (by 1 or more)
//!     ▲                   │                  │     unpin
//!     │      discard      │                  │
//!     ├───────────────────┘  evict, remove   │
//!     └──────────────────────────────────────┘
//! ```
//!
//! A [`Reservation`] owns the blocks of an entry that is filling. From the commit on, the cache owns the
//! blocks; a [`Pin`] names them and owns nothing.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kv_core::{ContentHash, PageList, Pages};

use crate::room::Entries;

/// An entry of the cache.
#[derive(Debug)]
pub(super) enum Entry {
    /// A reservation owns the blocks.
    Filling(Weak<Alive>),
    /// The cache owns the blocks.
    Ready(Ready),
}

/// An entry that was committed.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) pages: Pages,
    pub(super) bytes: u64,
    /// Distinguishes the entry from every other that the cache ever had, those of the same hash included.
    pub(super) generation: u64,
    pub(super) pins: u64,
    /// The place in the order of eviction; while the entry is pinned, the place that it had.
    pub(super) place: u64,
}

/// Blocks for an entry that is being filled, and the right to make the entry ready.
///
/// The reservation owns its blocks as [`Pages`] of the cache. A transfer may take the pages out
/// ([`take_pages`](Reservation::take_pages)) and put them back. The entry becomes ready only when all blocks
/// are back, so that no transfer can write into a committed entry.
///
/// A reservation that is dropped loses its blocks: the cache never uses them again and counts them in
/// [`CacheGauges::lost`](super::CacheGauges::lost). The hash can be reserved again.
#[must_use = "dropping a reservation loses its blocks: commit or discard it"]
pub struct Reservation {
    pub(super) hash: ContentHash,
    pub(super) bytes: u64,
    /// The blocks that were reserved, in order.
    pub(super) list: PageList,
    /// The ownership of those blocks that no transfer has taken.
    pub(super) pages: Pages,
    /// Lives as long as the reservation, which the cache's entry knows by it.
    pub(super) alive: Arc<Alive>,
}

/// Lives as long as a reservation, and counts the blocks of all that live.
#[derive(Debug)]
pub(super) struct Alive {
    blocks: u32,
    reserved: Arc<AtomicU32>,
}

impl Alive {
    pub(super) fn new(blocks: u32, reserved: &Arc<AtomicU32>) -> Alive {
        reserved.fetch_add(blocks, Ordering::Relaxed);
        Alive { blocks, reserved: Arc::clone(reserved) }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.blocks, Ordering::Relaxed);
    }
}

impl Reservation {
    /// The hash of the entry.
    pub fn hash(&self) -> &ContentHash {
        &self.hash
    }

    /// The length of the entry in bytes. The entry may end before its last block does.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The numbers of all reserved blocks, in the order of the entry's bytes, even while a transfer has taken
    /// the blocks.
    pub fn pages(&self) -> &PageList {
        &self.list
    }

    /// Takes the blocks out, for a transfer that fills them. A second call returns no blocks.
    pub fn take_pages(&mut self) -> Pages {
        let none = self.pages.none_of_pool();
        std::mem::replace(&mut self.pages, none)
    }

    /// Puts blocks back that were taken out, behind those that are here. Blocks of another cache are returned
    /// as the error.
    pub fn put_back(&mut self, pages: Pages) -> Result<(), Pages> {
        if !pages.is_empty() && !self.pages.is_of_same_pool(&pages) {
            return Err(pages);
        }
        self.pages.append(pages)
    }

    /// True if no blocks are taken out and the blocks are in their order, as a commit requires.
    pub fn is_whole(&self) -> bool {
        *self.pages.list() == self.list
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({:?}, {} bytes in {:?})", self.hash, self.bytes, self.list)
    }
}

/// The right to read a committed entry: its blocks keep their bytes until
/// [`unpin`](super::EncoderCache::unpin).
///
/// A pin that is dropped without `unpin` is counted in
/// [`CacheGauges::lost_pins`](super::CacheGauges::lost_pins), and its entry stays pinned for good, because a
/// data operation may still read the blocks.
#[must_use = "dropping a pin leaves its entry pinned: give it to `unpin`"]
pub struct Pin {
    pub(super) hash: ContentHash,
    pub(super) bytes: u64,
    pub(super) generation: u64,
    /// The entry's blocks, which the cache owns.
    pub(super) mirror: Pages,
    /// Where the cache counts pins that were dropped; `None` for a pin that was given back.
    pub(super) lost: Option<Arc<LostPins>>,
}

/// The pins that were dropped, and the entries that these pin for good.
#[derive(Debug, Default)]
pub(super) struct LostPins {
    pub(super) count: AtomicU64,
    stuck: Mutex<Entries>,
}

impl LostPins {
    pub(super) fn stuck(&self) -> Entries {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Pin {
    /// The hash of the entry.
    pub fn hash(&self) -> &ContentHash {
        &self.hash
    }

    /// The length of the entry in bytes. The entry may end before its last block does.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The numbers of the entry's blocks, in the order of the entry's bytes.
    pub fn pages(&self) -> &PageList {
        self.mirror.list()
    }

    /// The blocks as [`Pages`] that can be given to a sending session, which reads the blocks. A mirror owns
    /// nothing: the cache keeps the blocks, takes no mirror back, and counts no loss when a mirror is dropped.
    /// The pin must outlive the session.
    pub fn mirror(&self) -> Pages {
        self.mirror.mirror()
    }

    /// The number of the entry's commit in this cache. No other entry of the cache has the same number, even
    /// under the same hash, so two pins with equal numbers have the same bytes.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The same pin; what stays here pins nothing.
    pub(crate) fn take(&mut self) -> Pin {
        let (hash, mirror) = (self.hash.clone(), std::mem::take(&mut self.mirror));
        Pin { hash, mirror, lost: self.lost.take(), ..*self }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(lost) = &self.lost {
            lost.count.fetch_add(1, Ordering::Relaxed);
            let (key, blocks) = ((self.hash.clone(), self.bytes), self.mirror.len() as u64);
            lost.stuck.lock().unwrap_or_else(PoisonError::into_inner).insert(key, blocks);
        }
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pin({:?}, {} bytes in {:?})", self.hash, self.bytes, self.pages())
    }
}
