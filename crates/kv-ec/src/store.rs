//! The cache as several threads share it.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{ContentHash, Pages};

use crate::cache::{Absent, CacheGauges, EncoderCache, Pin, Reservation, ReserveError};
use crate::traffic::Counters;

/// An [`EncoderCache`] that the threads of a process share: the worker that answers peers, the encoder that
/// saves entries, and the server of the host's ranks. Clones are the same cache.
///
/// Every call takes a mutex for the time of one operation of the cache. No code of a caller runs under the
/// mutex, and nothing under it copies bytes of entries.
///
/// ```
/// use kv_core::ContentHash;
/// use kv_ec::{EncoderCache, Eviction, SharedStore};
///
/// let store = SharedStore::new(EncoderCache::new(64, 4096, Eviction::Fifo));
/// let image = ContentHash::new("3f9a")?;
/// let reservation = store.reserve(&image, 10_000)?;
/// assert!(store.commit(reservation).is_ok());
///
/// // The guard pins the entry for as long as it lives.
/// let entry = store.pin_guard(&image)?;
/// assert_eq!((entry.bytes(), entry.pages().len(), store.gauges().pinned), (10_000, 3, 3));
/// drop(entry);
/// assert_eq!(store.gauges().pinned, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct SharedStore {
    cache: Arc<Mutex<EncoderCache>>,
    counters: Arc<Counters>,
}

impl SharedStore {
    /// Shares a cache, whose only owner the store then is.
    pub fn new(cache: EncoderCache) -> SharedStore {
        SharedStore { cache: Arc::new(Mutex::new(cache)), counters: Arc::default() }
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u32 {
        self.lock().block_bytes()
    }

    /// Reserves blocks for an entry: [`EncoderCache::reserve`].
    pub fn reserve(&self, hash: &ContentHash, bytes: u64) -> Result<Reservation, ReserveError> {
        self.lock().reserve(hash, bytes)
    }

    /// Makes an entry ready: [`EncoderCache::commit`].
    pub fn commit(&self, reservation: Reservation) -> Result<(), Reservation> {
        self.lock().commit(reservation)
    }

    /// Gives up a reservation: [`EncoderCache::discard`].
    pub fn discard(&self, reservation: Reservation) {
        self.lock().discard(reservation);
    }

    /// Takes blocks of a discarded reservation back: [`EncoderCache::give_back`].
    pub fn give_back(&self, pages: Pages) -> Result<(), Pages> {
        self.lock().give_back(pages)
    }

    /// Pins a committed entry: [`EncoderCache::pin`]. A caller that returns early keeps the entry pinned, unless it
    /// uses [`pin_guard`](SharedStore::pin_guard).
    pub fn pin(&self, hash: &ContentHash) -> Result<Pin, Absent> {
        self.lock().pin(hash)
    }

    /// Takes a pin back: [`EncoderCache::unpin`].
    pub fn unpin(&self, pin: Pin) {
        self.lock().unpin(pin);
    }

    /// Pins an entry until the guard is dropped.
    pub fn pin_guard(&self, hash: &ContentHash) -> Result<EntryGuard, Absent> {
        self.pin(hash).map(|pin| EntryGuard { pin, store: self.clone() })
    }

    /// Whether there is an entry with the hash, and whether the entry is ready: [`EncoderCache::contains`].
    pub fn contains(&self, hash: &ContentHash) -> Option<bool> {
        self.lock().contains(hash)
    }

    /// Removes an entry that nobody has pinned: [`EncoderCache::remove`].
    pub fn remove(&self, hash: &ContentHash) -> bool {
        self.lock().remove(hash)
    }

    /// The blocks by state, and counts: [`EncoderCache::gauges`].
    pub fn gauges(&self) -> CacheGauges {
        self.lock().gauges()
    }

    /// What the workers over this cache count.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    fn lock(&self) -> MutexGuard<'_, EncoderCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pinned entry of a [`SharedStore`], which is read like a [`Pin`]. Dropping the guard unpins the entry.
#[derive(Debug)]
#[must_use = "the entry is pinned only while the guard lives"]
pub struct EntryGuard {
    pin: Pin,
    store: SharedStore,
}

impl Deref for EntryGuard {
    type Target = Pin;

    fn deref(&self) -> &Pin {
        &self.pin
    }
}

impl Drop for EntryGuard {
    fn drop(&mut self) {
        self.store.unpin(self.pin.take());
    }
}
