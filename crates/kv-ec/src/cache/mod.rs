//! The cache: which entry has which blocks of the region, who uses an entry, and which entries make room.
//!
//! The cache moves no bytes, knows no memory, takes no lock and reads no clock.

mod entry;
mod error;
mod gauges;
#[cfg(feature = "model")]
mod model;
mod policy;
mod shape;
#[cfg(test)]
mod tests;

pub use entry::{Pin, Reservation};
pub use error::{Absent, ReserveError};
pub use gauges::CacheGauges;
#[cfg(feature = "model")]
pub use model::CommittedEntry;
pub use policy::{Eviction, UnknownEviction};
pub use shape::Shape;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use kv_core::{ContentHash, Pages};
use kv_poll::allocator::{PageAllocator, RunAllocator};

use entry::{Alive, Entry, LostPins, Ready};
use policy::Order;

use crate::room::Room;

/// The entries of one region, by content hash.
///
/// An entry is filled by one [`Reservation`], read under any number of [`Pin`]s, and evicted as a whole. An
/// entry that is filling or pinned is never evicted.
///
/// Costs: reserving and evicting take O(log n) for each run of neighbouring blocks, with n runs of free blocks;
/// pinning takes time for a copy of the list of runs.
///
/// ```
/// use kv_core::ContentHash;
/// use kv_ec::{Absent, EncoderCache, Eviction, ReserveError};
///
/// // A region of 100 blocks, each as long as one row of an embedding.
/// let mut cache = EncoderCache::new(100, 7168, Eviction::Lru);
/// let (image, other) = (ContentHash::new("3f9a")?, ContentHash::new("77b0")?);
///
/// // An encoder writes 80 rows, and then the entry is ready.
/// let reservation = cache.reserve(&image, 80 * 7168)?;
/// assert_eq!(cache.pin(&image).err(), Some(Absent::NotReady));
/// assert!(cache.commit(reservation).is_ok());
///
/// // A pinned entry is not evicted, even if there is no other room.
/// let pin = cache.pin(&image)?;
/// let full = ReserveError::Full { blocks: 40, free: 20, evictable: 0 };
/// assert_eq!(cache.reserve(&other, 40 * 7168).err(), Some(full));
/// cache.unpin(pin);
/// let reservation = cache.reserve(&other, 40 * 7168)?;
/// assert_eq!((cache.contains(&image), cache.gauges().evictions), (None, 1));
/// cache.discard(reservation);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EncoderCache {
    blocks: RunAllocator,
    block_bytes: u32,
    entries: HashMap<ContentHash, Entry>,
    order: Order,
    generations: u64,
    /// Its `cached` and `pinned`, and its counts of events, are up to date; the others are computed.
    gauges: CacheGauges,
    lost_pins: Arc<LostPins>,
    /// Blocks of the reservations that live.
    reserved: Arc<AtomicU32>,
}

impl EncoderCache {
    /// A cache of `blocks` blocks (at most [`MAX_PAGES`](kv_core::MAX_PAGES)) of `block_bytes` bytes, all
    /// free. A block length of zero counts as one byte.
    pub fn new(blocks: u32, block_bytes: u32, eviction: Eviction) -> EncoderCache {
        EncoderCache {
            blocks: RunAllocator::new(blocks),
            block_bytes: block_bytes.max(1),
            entries: HashMap::new(),
            order: Order::new(eviction),
            generations: 0,
            gauges: CacheGauges::default(),
            lost_pins: Arc::default(),
            reserved: Arc::default(),
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Reserves the blocks for an entry of `bytes` bytes. Entries that are not pinned are evicted, in the order
    /// of the [`Eviction`] policy, until enough blocks are free.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]. After an error, no entry was evicted.
    pub fn reserve(&mut self, hash: &ContentHash, bytes: u64) -> Result<Reservation, ReserveError> {
        if let Some(ready) = self.contains(hash) {
            return Err(ReserveError::Known { ready });
        }
        let blocks = self.blocks_of(bytes)?;
        let (free, evictable) = (self.free(), self.gauges.cached);
        let full = ReserveError::Full { blocks, free, evictable };
        if blocks - blocks.min(free) > evictable {
            return Err(full);
        }
        self.make_room(blocks);
        let pages = self.blocks.allocate(blocks as usize).ok_or(full)?;
        let alive = Arc::new(Alive::new(blocks, &self.reserved));
        self.entries.insert(hash.clone(), Entry::Filling(Arc::downgrade(&alive)));
        Ok(Reservation { hash: hash.clone(), bytes, list: pages.list().clone(), pages, alive })
    }

    /// Makes the entry of a reservation ready. The reservation is returned as the error if a transfer still has
    /// blocks of the reservation, if the blocks are not in their order, or if another cache made the
    /// reservation.
    pub fn commit(&mut self, mut reservation: Reservation) -> Result<(), Reservation> {
        let place = match self.entries.get_mut(&reservation.hash) {
            Some(entry) if entry.is_of(&reservation) && reservation.is_whole() => entry,
            _ => return Err(reservation),
        };
        self.generations += 1;
        *place = Entry::Ready(Ready {
            pages: reservation.take_pages(),
            bytes: reservation.bytes,
            generation: self.generations,
            pins: 0,
            place: self.order.add_committed(reservation.hash.clone()),
        });
        self.gauges.cached += reservation.blocks();
        Ok(())
    }

    /// Gives up a reservation: its blocks are free, and the cache no longer knows the hash. Blocks that a
    /// transfer has taken out count as filling until [`give_back`](EncoderCache::give_back) takes them.
    pub fn discard(&mut self, mut reservation: Reservation) {
        if self.entries.get(&reservation.hash).is_some_and(|entry| entry.is_of(&reservation)) {
            self.entries.remove(&reservation.hash);
        }
        // Blocks of another cache are lost there: nothing knows for sure who may touch them.
        drop(self.give_back(reservation.take_pages()));
    }

    /// Frees blocks whose reservation was discarded while a transfer had them. Blocks of another cache are
    /// returned as the error.
    pub fn give_back(&mut self, pages: Pages) -> Result<(), Pages> {
        self.blocks.free(pages).map_err(|error| error.pages)
    }

    /// Pins a committed entry: until [`unpin`](EncoderCache::unpin), its blocks keep their bytes.
    pub fn pin(&mut self, hash: &ContentHash) -> Result<Pin, Absent> {
        let entry = match self.entries.get_mut(hash) {
            Some(Entry::Ready(entry)) => entry,
            other => {
                self.gauges.misses += 1;
                let filling = other.is_some_and(|entry| !entry.is_abandoned());
                return Err(if filling { Absent::NotReady } else { Absent::Missing });
            }
        };
        if entry.pins == 0 {
            self.order.remove(entry.place);
            self.gauges.cached -= entry.blocks();
            self.gauges.pinned += entry.blocks();
        }
        entry.pins += 1;
        self.gauges.hits += 1;
        Ok(Pin {
            hash: hash.clone(),
            bytes: entry.bytes,
            generation: entry.generation,
            mirror: entry.pages.mirror(),
            lost: Some(Arc::clone(&self.lost_pins)),
        })
    }

    /// Takes a pin back. The entry can be evicted when its last pin is back. A pin of another cache has no
    /// effect here, and the other cache counts the pin as lost.
    pub fn unpin(&mut self, mut pin: Pin) {
        let Some(lost) = pin.lost.take_if(|lost| Arc::ptr_eq(lost, &self.lost_pins)) else { return };
        drop(lost);
        let Some(Entry::Ready(entry)) = self.entries.get_mut(&pin.hash) else { return };
        entry.pins -= 1;
        if entry.pins == 0 {
            entry.place = self.order.add_used(pin.hash.clone(), entry.place);
            self.gauges.pinned -= entry.blocks();
            self.gauges.cached += entry.blocks();
        }
    }

    /// Whether the cache has an entry with the hash, and whether the entry is ready (`Some(true)`) or filling
    /// (`Some(false)`). The call does not count as a use of the entry for [`Eviction::Lru`].
    pub fn contains(&self, hash: &ContentHash) -> Option<bool> {
        match self.entries.get(hash)? {
            Entry::Ready(_) => Some(true),
            filling => (!filling.is_abandoned()).then_some(false),
        }
    }

    /// Removes an entry that is committed and not pinned, and returns true. Any other hash has no effect and
    /// returns false.
    pub fn remove(&mut self, hash: &ContentHash) -> bool {
        let Some(Entry::Ready(entry)) = self.entries.get(hash) else { return false };
        if entry.pins > 0 {
            return false;
        }
        self.order.remove(entry.place);
        self.free_entry(hash);
        true
    }

    /// The blocks by state, and counts.
    pub fn gauges(&self) -> CacheGauges {
        let blocks = self.blocks.capacity() as u32;
        let (free, lost) = (self.free(), self.blocks.lost().len() as u32);
        let CacheGauges { cached, pinned, .. } = self.gauges;
        CacheGauges {
            blocks,
            free,
            lost,
            filling: blocks - free - lost - cached - pinned,
            lost_pins: self.lost_pins.count.load(Ordering::Relaxed),
            entries: self.entries.values().filter(|entry| !entry.is_abandoned()).count(),
            ..self.gauges
        }
    }

    /// How much of the region requests can have.
    pub(crate) fn room(&self) -> Room {
        let usable = (self.blocks.capacity() - self.blocks.lost().len()) as u32;
        let CacheGauges { cached, pinned, .. } = self.gauges;
        let filling = usable.saturating_sub(self.free() + cached + pinned);
        let away = filling.saturating_sub(self.reserved.load(Ordering::Relaxed));
        Room { usable, away, stuck: self.lost_pins.stuck() }
    }

    fn free(&self) -> u32 {
        self.blocks.available() as u32
    }

    /// How many blocks an entry takes, if the region could ever hold it.
    fn blocks_of(&self, bytes: u64) -> Result<u32, ReserveError> {
        let blocks = bytes.div_ceil(u64::from(self.block_bytes));
        let region = self.blocks.capacity() as u32;
        match u32::try_from(blocks) {
            Ok(0) => Err(ReserveError::Empty),
            Ok(fitting) if fitting <= region => Ok(fitting),
            _ => Err(ReserveError::TooLarge { blocks, region }),
        }
    }

    /// Evicts entries until so many blocks are free.
    fn make_room(&mut self, blocks: u32) {
        while self.free() < blocks
            && let Some(hash) = self.order.pop()
        {
            self.gauges.evictions += 1;
            self.gauges.evicted_blocks += u64::from(self.free_entry(&hash));
        }
    }

    /// Forgets a committed entry that nobody has pinned and that has no place in the order of eviction any
    /// more. Returns how many blocks that frees.
    fn free_entry(&mut self, hash: &ContentHash) -> u32 {
        let Some(Entry::Ready(entry)) = self.entries.remove(hash) else { return 0 };
        let blocks = entry.blocks();
        self.gauges.cached -= blocks;
        let freed = self.blocks.free(entry.pages);
        debug_assert!(freed.is_ok(), "an entry had blocks of another cache: {freed:?}");
        blocks
    }
}

impl Entry {
    /// True if the reservation is the one that fills this entry.
    fn is_of(&self, reservation: &Reservation) -> bool {
        matches!(self, Entry::Filling(alive) if Weak::as_ptr(alive) == Arc::as_ptr(&reservation.alive))
    }

    /// True if the reservation that was to fill this entry was dropped.
    fn is_abandoned(&self) -> bool {
        matches!(self, Entry::Filling(alive) if alive.strong_count() == 0)
    }
}

impl Ready {
    fn blocks(&self) -> u32 {
        self.pages.len() as u32
    }
}

impl Reservation {
    fn blocks(&self) -> u32 {
        self.list.len() as u32
    }
}
