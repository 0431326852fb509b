//! What a server calls: an encoder reserves, writes and saves entries, and a scheduler fetches them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::machine::Submit;
use kv_core::{ContentHash, OpenError, ReadyEvent, SessionId};
use kv_poll::worker::{Failure, Handle, PollSet, Port, Waiting};

use crate::cache::{Absent, CacheGauges, Reservation, ReserveError};
use crate::machine::{Command, EcMachine, EcPoll, Resource, Want};
use crate::region::{EcRegion, RegionError};
use crate::store::{EntryGuard, SharedStore};
use crate::traffic::Traffic;

/// The handle through which a server uses the encoder cache of its host. Clones are handles of the same cache.
/// No method waits for a peer or for the worker.
///
/// | call | vLLM's connector |
/// |---|---|
/// | [`reserve`](EcConnector::reserve), then [`save`](EcConnector::save) or [`save_after`](EcConnector::save_after) | `save_caches` |
/// | [`ensure_cache_available`](EcConnector::ensure_cache_available) | `ensure_cache_available` |
/// | [`EntryGuard`] | the scheduler's note that a request still needs an entry |
/// | [`read`](EcConnector::read) | `start_load_caches` |
#[derive(Debug, Clone)]
pub struct EcConnector {
    port: EcPort,
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
    /// The worker is fetching the entry. The poll set reports the session when the fetch has progressed.
    Deferred(Fetch),
}

/// A reservation that the cache did not take, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("the entry was not saved: {why}")]
pub struct NotSaved {
    /// The reservation, as the caller gave it: the caller may try again, or discard the reservation.
    pub reservation: Box<Reservation>,
    /// The reason why the reservation came back.
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
    /// A transfer still has blocks of the reservation, or another cache made the reservation.
    #[error("blocks of its reservation were taken out, or another cache made the reservation")]
    NotWhole,
    /// The worker has stopped, or has as many sessions as it may have.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The worker's command queue is full. Try again.
    #[error("the worker's command queue is full")]
    Busy,
}

/// What the cache holds, and how the saves of this handle and its clones have gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EcGauges {
    /// The blocks of the cache by state, and counts since the cache was made.
    pub cache: CacheGauges,
    /// Counts of what the worker's handles wanted, and of what the worker fetched and gave.
    pub traffic: Traffic,
    /// Entries given to [`save_after`](EcConnector::save_after) whose ready event has not passed yet.
    pub saving: usize,
    /// Entries that were never made ready, because their ready event failed or the worker stopped.
    pub failed_saves: u64,
}

impl EcConnector {
    pub(crate) fn new(port: EcPort, store: SharedStore, region: EcRegion) -> EcConnector {
        EcConnector { port, store, region, saves: Arc::default() }
    }

    // ---- the producer's side --------------------------------------------------------------------

    /// Reserves blocks for an entry of `bytes` bytes. Entries that are not in use are evicted to make room.
    ///
    /// # Errors
    ///
    /// [`ReserveError`], of which [`ReserveError::Known`] says that the cache has the entry, or that another
    /// reservation is filling it.
    pub fn reserve(&self, hash: &ContentHash, bytes: u64) -> Result<Reservation, ReserveError> {
        self.sweep();
        self.store.reserve(hash, bytes)
    }

    /// Copies `bytes` into a reserved entry, from byte `offset` of the entry on.
    pub fn write(&self, reservation: &Reservation, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        self.region.write(reservation.pages(), offset, bytes)
    }

    /// Makes an entry ready. All bytes of the entry must be in place; peers that ask from now on get the entry.
    pub fn save(&self, reservation: Reservation) -> Result<(), NotSaved> {
        let saved = self.store.commit(reservation);
        saved.map_err(|reservation| NotSaved::of(reservation, SaveError::NotWhole))
    }

    /// Makes an entry ready once `event` has passed, such as the end of a device's copy into the blocks. Until
    /// then, peers that ask for the entry are told that the entry is not ready. If the event fails, the entry
    /// is discarded and its blocks are free. If the worker stops first, its blocks are lost
    /// ([`CacheGauges::lost`]), because the device may still write into them.
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

    /// Gives up a reserved entry: its blocks are free at once. No copy into the blocks may still run.
    pub fn discard(&self, reservation: Reservation) {
        self.store.discard(reservation);
    }

    // ---- the consumer's side --------------------------------------------------------------------

    /// Pins the entry if the cache has it. Otherwise begins a fetch, or joins the fetch of the same entry that
    /// another session has begun.
    ///
    /// # Errors
    ///
    /// [`OpenError`], if a fetch is needed and the worker cannot take it: the worker has stopped, has as many
    /// sessions as it may have, or its command queue is full.
    pub fn ensure_cache_available(&self, want: Want) -> Result<Availability, OpenError> {
        let here = self.here(&want);
        self.available(want, here)
    }

    /// Pins the entry if the cache has it with this length.
    pub(crate) fn here(&self, want: &Want) -> Option<EntryGuard> {
        self.local(&want.hash).ok().filter(|entry| entry.bytes() == want.bytes)
    }

    /// Counts an entry that is here, or begins to fetch it.
    pub(crate) fn available(&self, want: Want, here: Option<EntryGuard>) -> Result<Availability, OpenError> {
        if let Some(entry) = here {
            self.store.counters().here.add(1);
            return Ok(Availability::Here(entry));
        }
        self.sweep();
        let want = Box::new(want);
        let handle = self.port.open(|session| Command::Fetch { session, want })?;
        self.store.counters().deferred.add(1);
        Ok(Availability::Deferred(Fetch { handle, entry: None, is_handed_over: false }))
    }

    /// Pins the entry if the cache has it. No peer is asked.
    pub fn local(&self, hash: &ContentHash) -> Result<EntryGuard, Absent> {
        self.store.pin_guard(hash)
    }

    /// Copies `out.len()` bytes of an entry to `out`, from byte `offset` of the entry on.
    pub fn read(&self, entry: &EntryGuard, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        self.region.read(entry.pages(), offset, out)
    }

    /// The poll set of the worker: the fetches whose state has changed, and a descriptor that becomes readable
    /// when there are any. The saves of [`save_after`](EcConnector::save_after) are sessions, too.
    pub fn poll_set(&self) -> &EcPollSet {
        self.port.poll_set()
    }

    // ---- both -----------------------------------------------------------------------------------

    /// The memory that holds the entries, in blocks.
    pub fn region(&self) -> &EcRegion {
        &self.region
    }

    /// The cache itself, to be shared with the [server of this host's ranks](crate::host::HostServer).
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// What the cache holds, and how the saves have gone. The worker's own gauges are those of
    /// [`port`](EcConnector::port).
    pub fn gauges(&self) -> EcGauges {
        self.sweep();
        let saving = self.saves.under_way.lock().unwrap_or_else(PoisonError::into_inner).len();
        let failed_saves = self.saves.failed.load(Ordering::Relaxed);
        let (cache, traffic) = (self.store.gauges(), self.store.counters().read());
        EcGauges { cache, traffic, saving, failed_saves }
    }

    /// The port of the worker, which has the worker's gauges and the list of blocks in quarantine.
    pub fn port(&self) -> &EcPort {
        &self.port
    }

    /// Forgets saves that have ended.
    fn sweep(&self) {
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

/// The session of an entry that is being fetched. Dropping the value ends the session; other sessions that want
/// the same entry go on.
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

    /// The state of the fetch. Costs one atomic load until the entry has come. After `poll` has returned
    /// [`EcPoll::Ready`], [`entry`](Fetch::entry) returns the entry.
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

    /// The reason why the entry will not come; `None` unless the session has failed.
    pub fn failure(&self) -> Option<Failure<EcMachine>> {
        self.handle.failure()
    }

    /// Takes the entry after it has come. `None` while it has not, after a failure, and after an earlier call
    /// that took the entry.
    pub fn entry(&mut self) -> Option<EntryGuard> {
        self.poll();
        self.entry.take()
    }

    /// Ends the session, whatever its state. Has no effect on a session that has ended.
    pub fn abort(&self) {
        self.handle.abort();
    }

    /// The registration of a task that waits for a change of the fetch.
    pub(crate) fn waiting(&self) -> Waiting {
        self.handle.waiting()
    }
}

/// The sessions of the encoder cache that have changed, with a descriptor to sleep on.
pub type EcPollSet = PollSet<EcMachine>;
/// The way to a worker of the encoder cache, with the worker's own gauges and its quarantine.
pub type EcPort = Port<EcMachine>;
/// Why a fetch failed: the machine's reason, or the end of the worker.
pub type FetchFailure = Failure<EcMachine>;
