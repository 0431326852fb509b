//! The cache as several threads share it.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{ContentHash, Pages};

use crate::cache::{Absent, CacheGauges, EncoderCache, Pin, Reservation, ReserveError};
use crate::claims::Claims;
use crate::traffic::Counters;

/// An [`EncoderCache`] that the threads of a process share: the worker that answers peers, the encoder that
/// saves entries, and the server of the host's ranks. Clones share one cache.
///
/// Every call holds a mutex for one operation of the cache. While the mutex is held, no code of a caller runs,
/// and no bytes of entries are copied.
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
    claims: Claims,
}

impl SharedStore {
    /// Makes a cache that can be cloned and shared.
    pub fn new(cache: EncoderCache) -> SharedStore {
        SharedStore {
            cache: Arc::new(Mutex::new(cache)),
            counters: Arc::default(),
            claims: Claims::default(),
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u32 {
        self.lock().block_bytes()
    }

    /// Reserves blocks for an entry, as [`EncoderCache::reserve`] does.
    pub fn reserve(&self, hash: &ContentHash, bytes: u64) -> Result<Reservation, ReserveError> {
        self.lock().reserve(hash, bytes)
    }

    /// Makes the entry of a reservation ready, as [`EncoderCache::commit`] does.
    pub fn commit(&self, reservation: Reservation) -> Result<(), Reservation> {
        self.lock().commit(reservation)
    }

    /// Gives up a reservation, as [`EncoderCache::discard`] does.
    pub fn discard(&self, reservation: Reservation) {
        self.lock().discard(reservation);
    }

    /// Takes back blocks of a discarded reservation, as [`EncoderCache::give_back`] does.
    pub fn give_back(&self, pages: Pages) -> Result<(), Pages> {
        self.lock().give_back(pages)
    }

    /// Pins a committed entry, as [`EncoderCache::pin`] does. The entry stays pinned until
    /// [`unpin`](SharedStore::unpin), even if the caller returns early;
    /// [`pin_guard`](SharedStore::pin_guard) unpins by itself.
    pub fn pin(&self, hash: &ContentHash) -> Result<Pin, Absent> {
        self.lock().pin(hash)
    }

    /// Takes a pin back, as [`EncoderCache::unpin`] does.
    pub fn unpin(&self, pin: Pin) {
        self.lock().unpin(pin);
    }

    /// Pins a committed entry until the guard is dropped.
    pub fn pin_guard(&self, hash: &ContentHash) -> Result<EntryGuard, Absent> {
        self.pin(hash).map(|pin| EntryGuard { pin, store: self.clone() })
    }

    /// Whether the cache has an entry, as [`EncoderCache::contains`] says.
    pub fn contains(&self, hash: &ContentHash) -> Option<bool> {
        self.lock().contains(hash)
    }

    /// Removes an entry that nobody has pinned, as [`EncoderCache::remove`] does.
    pub fn remove(&self, hash: &ContentHash) -> bool {
        self.lock().remove(hash)
    }

    /// The blocks by state and the counts of [`EncoderCache::gauges`].
    pub fn gauges(&self) -> CacheGauges {
        self.lock().gauges()
    }

    /// What the workers over this cache count.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The room that requests have claimed.
    pub(crate) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Judges the claims of requests by what the cache has now: the numbers of those that were decided.
    pub(crate) fn look_at_claims(&self) -> BTreeSet<u64> {
        let room = self.lock().room();
        self.claims.look(room)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, EncoderCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pin of an entry of a [`SharedStore`], with the methods of [`Pin`]. Dropping the guard unpins the entry.
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
