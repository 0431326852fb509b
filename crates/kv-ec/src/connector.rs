//! What a server calls: entries are reserved, written and saved by an encoder, and wanted by a scheduler.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::machine::Submit;
use kv_core::{ContentHash, OpenError, ReadyEvent, SessionId};
use kv_poll::worker::{Failure, Handle, PollSet, Port};

use crate::cache::{Absent, CacheGauges, Reservation, ReserveError};
use crate::machine::{Command, EcMachine, EcPoll, Resource, Want};
use crate::region::{EcRegion, RegionError};
use crate::store::{EntryGuard, SharedStore};
use crate::traffic::Traffic;

/// The way to the encoder cache of this host. Clones lead to the same cache; no method blocks.
///
/// | call | vLLM's connector |
/// |---|---|
/// | [`reserve`](EcConnector::reserve), then [`save`](EcConnector::save) or [`save_after`](EcConnector::save_after) | `save_caches` |
/// | [`ensure_cache_available`](EcConnector::ensure_cache_available) | `ensure_cache_available` |
/// | [`EntryGuard`] | an entry of `_loaded` in `_pending_reload` |
/// | [`read`](EcConnector::read) | `start_load_caches` |
#[derive(Debug, Clone)]
pub struct EcConnector {
    port: Port<EcMachine>,
    store: SharedStore,
    region: EcRegion,
    saves: Arc<Saves>,
}

/// Entries that are saved once their ready events have passed.
#[derive(Debug, Default)]
struct Saves {
    /// Kept until their ends: a handle that is dropped would end its session before the event.
    under_way: Mutex<Vec<Handle<EcMachine>>>,
    failed: AtomicU64,
}

/// Whether a wanted entry is here.
#[derive(Debug)]
pub enum Availability {
    /// The entry is here, and stays while the guard lives.
    Here(EntryGuard),
    /// The entry is being fetched: come back when the poll set reports the session.
    Deferred(Fetch),
}

/// A reservation that was not taken over, and why.
#[derive(Debug, thiserror::Error)]
#[error("the entry was not saved: {why}")]
pub struct NotSaved {
    /// The reservation, as it was given.
    pub reservation: Box<Reservation>,
    /// Why the reservation came back.
    #[source]
    pub why: SaveError,
}

impl NotSaved {
    fn of(reservation: Reservation, why: SaveError) -> NotSaved {
        NotSaved { reservation: Box::new(reservation), why }
    }
}

/// Why an entry was not saved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reservation lacks blocks, or is of another cache.
    #[error("its reservation lacks blocks, or is of another cache")]
    NotWhole,
    /// The worker has stopped, or has as many sessions as it may have.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The worker's command queue is full. Try again.
    #[error("the worker's command queue is full")]
    Busy,
}

/// What the cache and its worker hold and have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EcGauges {
    /// The cache.
    pub cache: CacheGauges,
    /// What was wanted, fetched and given since the start.
    pub traffic: Traffic,
    /// Entries whose ready event has not passed.
    pub saving: usize,
    /// Entries that were given up because their ready event failed or the worker stopped.
    pub failed_saves: u64,
}

impl EcConnector {
    pub(crate) fn new(port: Port<EcMachine>, store: SharedStore, region: EcRegion) -> EcConnector {
        EcConnector { port, store, region, saves: Arc::default() }
    }

    // ---- the producer's side --------------------------------------------------------------------

    /// Reserves blocks for an entry of `bytes` bytes. Entries that nobody uses make room.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; [`ReserveError::Known`] says that the entry is here or is coming already.
    pub fn reserve(&self, hash: &ContentHash, bytes: u64) -> Result<Reservation, ReserveError> {
        self.sweep();
        self.store.reserve(hash, bytes)
    }

    /// Copies bytes into a reserved entry, from `offset` on.
    pub fn write(&self, reservation: &Reservation, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        self.region.write(reservation.pages(), offset, bytes)
    }

    /// Makes an entry ready whose bytes are in place: peers that ask from now on get the entry.
    pub fn save(&self, reservation: Reservation) -> Result<(), NotSaved> {
        let saved = self.store.commit(reservation);
        saved.map_err(|reservation| NotSaved::of(reservation, SaveError::NotWhole))
    }

    /// Makes an entry ready once the event has passed, such as the end of a device's copy into the blocks.
    /// Peers that ask before are told that the entry is not ready. If the event fails, the entry is given up.
    pub fn save_after(
        &self,
        reservation: Reservation,
        event: impl ReadyEvent + 'static,
    ) -> Result<(), NotSaved> {
        self.sweep();
        let mut handle = match self.port.open(|session| Command::Save { session }) {
            Ok(handle) => handle,
            Err(error) => return Err(NotSaved::of(reservation, error.into())),
        };
        let (session, reservation, ready) =
            (handle.id(), Box::new(reservation), Some(Box::new(event) as Box<_>));
        match handle.submit(Command::Commit { session, reservation, ready }) {
            Ok(()) => {
                self.saves.under_way.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                Ok(())
            }
            Err(Command::Commit { reservation, .. }) => Err(NotSaved { reservation, why: SaveError::Busy }),
            // The queue gives back the command that it was given.
            Err(_) => Ok(()),
        }
    }

    /// Gives up a reserved entry.
    pub fn discard(&self, reservation: Reservation) {
        self.store.discard(reservation);
    }

    // ---- the consumer's side --------------------------------------------------------------------

    /// The entry if it is here; otherwise a fetch that has begun, or has joined the one under way for the same
    /// bytes.
    ///
    /// # Errors
    ///
    /// The entry is not here, and the worker has stopped or has as many sessions as it may have.
    pub fn ensure_cache_available(&self, want: Want) -> Result<Availability, OpenError> {
        if let Ok(entry) = self.local(&want.hash)
            && entry.bytes() == want.bytes
        {
            self.store.counters().here.add(1);
            return Ok(Availability::Here(entry));
        }
        self.sweep();
        let want = Box::new(want);
        let handle = self.port.open(|session| Command::Fetch { session, want })?;
        self.store.counters().deferred.add(1);
        Ok(Availability::Deferred(Fetch { handle, entry: None, is_handed_over: false }))
    }

    /// The entry if it is here. Asks nobody.
    pub fn local(&self, hash: &ContentHash) -> Result<EntryGuard, Absent> {
        self.store.pin_guard(hash)
    }

    /// Copies bytes out of an entry, from `offset` on.
    pub fn read(&self, entry: &EntryGuard, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        self.region.read(entry.pages(), offset, out)
    }

    /// The set of sessions that have changed, with a descriptor to sleep on.
    pub fn poll_set(&self) -> &PollSet<EcMachine> {
        self.port.poll_set()
    }

    // ---- both -----------------------------------------------------------------------------------

    /// The memory of the entries.
    pub fn region(&self) -> &EcRegion {
        &self.region
    }

    /// The cache itself, as the server of the host's ranks shares it.
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// What the cache and its worker hold and have done.
    pub fn gauges(&self) -> EcGauges {
        self.sweep();
        let saving = self.saves.under_way.lock().unwrap_or_else(PoisonError::into_inner).len();
        let failed_saves = self.saves.failed.load(Ordering::Relaxed);
        let (cache, traffic) = (self.store.gauges(), self.store.counters().read());
        EcGauges { cache, traffic, saving, failed_saves }
    }

    /// The way to the worker, with its own gauges and its quarantine.
    pub fn port(&self) -> &Port<EcMachine> {
        &self.port
    }

    /// Forgets saves that have ended, and unpins entries whose fetch was dropped.
    fn sweep(&self) {
        drop(self.port.take_orphans(|resource| matches!(resource, Resource::Slot(_))));
        let mut under_way = self.saves.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.retain_mut(|handle| {
            let Some(resources) = handle.reclaim() else { return true };
            if handle.poll() == EcPoll::Failed {
                self.saves.failed.fetch_add(1, Ordering::Relaxed);
            }
            // Whether a device still writes into these blocks, nobody here knows: they count as lost.
            drop(resources);
            false
        });
    }
}

/// An entry that is being fetched. Dropping the handle ends the session; other sessions that want the same
/// entry are not concerned.
#[derive(Debug)]
pub struct Fetch {
    handle: Handle<EcMachine>,
    /// The entry, once the worker has handed it over.
    entry: Option<EntryGuard>,
    is_handed_over: bool,
}

impl Fetch {
    /// The number by which the poll set reports this session.
    pub fn id(&self) -> SessionId {
        self.handle.id()
    }

    /// How far the entry is: one atomic load, until the entry is here. Once this has returned
    /// [`EcPoll::Ready`], [`entry`](Fetch::entry) has the entry.
    pub fn poll(&mut self) -> EcPoll {
        let poll = self.handle.poll();
        if poll != EcPoll::Ready || self.is_handed_over {
            return poll;
        }
        // The worker says that an entry is here, and hands the entry over right afterwards.
        let Some(resources) = self.handle.reclaim() else { return EcPoll::Transferring };
        self.is_handed_over = true;
        self.entry = resources.into_iter().find_map(|resource| match resource {
            Resource::Slot(entry) => entry,
            Resource::Reservation(_) => None,
        });
        poll
    }

    /// Why the entry will not come; `None` unless the session has failed.
    pub fn failure(&self) -> Option<Failure<EcMachine>> {
        self.handle.failure()
    }

    /// Takes the entry, once it is here. `None` before, after a failure, and after the entry was taken.
    pub fn entry(&mut self) -> Option<EntryGuard> {
        self.poll();
        self.entry.take()
    }

    /// Ends the session, in whatever state.
    pub fn abort(&self) {
        self.handle.abort();
    }
}

/// Why a fetch failed: the machine's reason, or the end of the worker.
pub type FetchFailure = Failure<EcMachine>;
