//! The queues of a decode scheduler: prealloc (handshake → ready) → transfer → waiting → running.

mod admit;
mod cache;
mod entry;
mod types;

pub use cache::Accounting;
pub use types::{
    Blocked, DecodeConfig, DecodeCounts, Failed, Incoming, Origin, Ready, RetractError, RetractRefusal,
    Shortage,
};

use std::collections::{BTreeMap, VecDeque};

use kv_core::{AuxIndex, KvManager, KvPoll, KvSession, PageList, Pages, Reclaimed, RequestCacheGroups};

use self::cache::{Cache, Place};
use self::entry::{Entry, Quarantined, Retracted, Stage, Waiting};
use super::admission::{AdmissionRule, Load};
use super::aux_rows::AuxRows;
use super::desk::{self, Desk};
use super::error::{PushError, PushRefusal, RequestError};
use super::gate::AuxMemory;
use super::line::Line;
use super::quarantine::Stopped;
use crate::allocator::{FreeError, PageAllocator, RunAllocator};
use crate::consensus::{Agreed, RankConsensus, RequestKey, SingleRank, Standing};
use crate::kv::Change;

/// The requests of one decode rank, from arrival until they run, and the pages of its cache.
///
/// # Contract
///
/// Once per scheduler iteration: [`push`](Self::push) the requests that have arrived, [`step`](Self::step)
/// with the worker's changes, then drain [`drain_failed`](Self::drain_failed) and take requests with
/// [`pop_waiting`](Self::pop_waiting) into the running batch. Their pages belong to the server until
/// [`finish`](Self::finish). A running request grows with [`allocate`](Self::allocate); when no page is left,
/// the server [`retract`](Self::retract)s running requests, which come back through `pop_waiting` before any
/// new request is admitted that no other rank has admitted. No method blocks, except `step` where the server's own collective does. A step
/// costs O(changes + requests admitted), however many requests are in flight.
///
/// Items of cache groups belong to the server, which hands them out in
/// [`take_groups`](AuxMemory::take_groups). The items come back in [`Ready`]; those of a request that fails
/// come back from [`drain_groups`](Self::drain_groups).
///
/// Every page is in exactly one place at any time, see [`Accounting`]. The table in [`queue`](super) says
/// what happens on each failure.
pub struct DecodeQueues<R, M: KvManager, C: RankConsensus = SingleRank, A: PageAllocator = RunAllocator> {
    desk: Desk<M, C>,
    cache: Cache<A>,
    rule: AdmissionRule,
    aux_rows: AuxRows,
    entries: BTreeMap<RequestKey, Entry<R, M::Receiver>>,
    /// Sessions of failed requests that have not given their pages back.
    quarantine: BTreeMap<RequestKey, Quarantined<M::Receiver>>,
    /// Requests whose handshake is complete, and that have no pages yet.
    ready: Line<()>,
    waiting: Line<Waiting<R>>,
    retracted: Line<Retracted<R>>,
    /// Requests that the server runs, with their priority.
    running: BTreeMap<RequestKey, i32>,
    failed: VecDeque<Failed<R>>,
    /// Items of cache groups of failed requests, which no data operation can touch any more.
    returned: VecDeque<RequestCacheGroups>,
    blocked: Option<Blocked>,
    arrivals: u64,
    transfers: usize,
}

impl<R, M: KvManager, C: RankConsensus, A: PageAllocator> DecodeQueues<R, M, C, A> {
    /// Empty queues of one rank, over the pages of `allocator`. Pages that are not free there count as the
    /// server's.
    pub fn new(manager: M, consensus: C, allocator: A, config: DecodeConfig) -> Self {
        DecodeQueues {
            desk: Desk::new(manager, consensus, config.quarantine),
            cache: Cache::new(allocator),
            rule: config.rule,
            aux_rows: AuxRows::new(config.aux_rows),
            entries: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            ready: Line::new(),
            waiting: Line::new(),
            retracted: Line::new(),
            running: BTreeMap::new(),
            failed: VecDeque::new(),
            returned: VecDeque::new(),
            blocked: None,
            arrivals: 0,
            transfers: 0,
        }
    }

    /// Opens the request's receiver and enters the request into the prealloc queue. On an error the request
    /// comes back.
    pub fn push(&mut self, request: R, incoming: Incoming<'_>) -> Result<RequestKey, PushError<R>> {
        let Incoming { room, bootstrap_addr, demand, options, priority } = incoming;
        let capacity = self.cache.capacity();
        let needed = self.rule.need(&demand, &Load { available: capacity, active: 0, running_pages: 0 });
        if needed > capacity {
            return Err(PushError { request, reason: PushRefusal::TooLarge { needed, capacity } });
        }
        let (key, request, session) =
            self.desk.open(request, room, |manager, room| manager.receiver(bootstrap_addr, room, options))?;
        let entry = Entry {
            request,
            session,
            priority,
            demand,
            stage: Stage::Handshake,
            aborted: false,
            error: None,
        };
        self.entries.insert(key, entry);
        Ok(key)
    }

    /// Takes the changes since the last step, agrees on them with the other ranks, and admits the requests
    /// for which the cache has room. Call once per scheduler iteration, also without changes.
    ///
    /// On an error the ranks have not agreed, and no request moves on; the next step tries again.
    pub fn step(
        &mut self,
        changes: impl IntoIterator<Item = Change>,
        aux: &mut impl AuxMemory<R>,
    ) -> Result<(), C::Error> {
        let entries = &mut self.entries;
        let agreed = self.desk.agree(changes, |key, poll| match entries.get_mut(&key) {
            Some(entry) => Some(entry.observe(poll, aux)),
            None => Some(KvPoll::Failed),
        })?;
        for Agreed { key, standing } in agreed {
            self.apply(key, standing, aux);
        }
        for key in self.desk.take_unreclaimed() {
            self.reclaim(key, aux);
        }
        let (entries, cache) = (&mut self.entries, &mut self.cache);
        self.desk.flush(|key| match entries.get_mut(&key).map(Entry::flush) {
            Some(Some(pages)) => {
                cache.shift(pages, Place::Held, Place::Transfer);
                true
            }
            Some(None) => false,
            None => true,
        });
        self.desk.stop_or_go(self.cache.at(Place::Quarantine), self.cache.capacity());
        self.admit(aux);
        Ok(())
    }

    /// The next request that may run, with its pages; `None` if there is none at the moment.
    pub fn pop_waiting(&mut self) -> Option<Ready<R>> {
        let (key, Waiting { priority, ready }) = self.waiting.pop()?;
        self.cache.shift(ready.pages.len(), Place::Held, Place::Server);
        self.running.insert(key, priority);
        Some(ready)
    }

    /// Takes pages for a running request to grow into; `None` if fewer pages are free. Then
    /// [`retract`](Self::retract) another request.
    pub fn allocate(&mut self, pages: usize) -> Option<Pages> {
        self.cache.allocate(pages, Place::Server)
    }

    /// Takes back some pages of a request that goes on running.
    pub fn release(&mut self, pages: Pages) -> Result<(), FreeError> {
        self.cache.release(pages)
    }

    /// Ends a running request and takes back its pages.
    pub fn finish(&mut self, key: RequestKey, pages: Pages) -> Result<(), FreeError> {
        self.running.remove(&key);
        self.cache.release(pages)
    }

    /// Takes a running request out of the batch to make room. Its pages are free at once, so save their
    /// content first. The request comes back through [`pop_waiting`](Self::pop_waiting), with
    /// `pages_to_resume` new pages and [`Origin::Retracted`], before any new request gets pages that no other rank has
    /// admitted.
    pub fn retract(
        &mut self,
        key: RequestKey,
        request: R,
        pages: Pages,
        pages_to_resume: usize,
    ) -> Result<(), RetractError<R>> {
        let Some(&priority) = self.running.get(&key) else {
            return Err(RetractError { request, pages, reason: RetractRefusal::NotRunning { key } });
        };
        let capacity = self.cache.capacity();
        if pages_to_resume > capacity {
            let reason = RetractRefusal::TooLarge { needed: pages_to_resume, capacity };
            return Err(RetractError { request, pages, reason });
        }
        if let Err(FreeError { pages, reason }) = self.cache.release(pages) {
            return Err(RetractError { request, pages, reason: reason.into() });
        }
        self.running.remove(&key);
        self.retracted.insert(key, priority, key.0, Retracted { request, priority, pages: pages_to_resume });
        Ok(())
    }

    /// Ends a request at any stage before it runs; false if there is no such request. The request comes out
    /// of [`drain_failed`](Self::drain_failed).
    pub fn abort(&mut self, key: RequestKey) -> bool {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.aborted = true;
            if self.ready.remove(key).is_some() {
                entry.stage = Stage::Handshake;
            }
            entry.session.abort();
            return true;
        }
        let request = if let Some(Waiting { ready, .. }) = self.waiting.remove(key) {
            let given = ready.pages.len();
            self.cache.give_back(ready.pages, given, Place::Held);
            self.give_back_groups(ready.groups);
            ready.request
        } else if let Some(retracted) = self.retracted.remove(key) {
            retracted.request
        } else {
            return false;
        };
        self.failed.push_back(Failed { key, request, error: RequestError::Aborted });
        true
    }

    /// The next request that has failed; `None` if there is none at the moment.
    pub fn drain_failed(&mut self) -> Option<Failed<R>> {
        self.failed.pop_front()
    }

    /// The items of cache groups of the next failed request, once no data operation can touch them; `None` if
    /// there are none at the moment.
    pub fn drain_groups(&mut self) -> Option<RequestCacheGroups> {
        self.returned.pop_front()
    }

    fn give_back_groups(&mut self, groups: RequestCacheGroups) {
        if !groups.is_empty() {
            self.returned.push_back(groups);
        }
    }

    /// The request that waits for room, and what it lacks, as of the last step: evict or retract as much. New
    /// requests that wait because admission is [`stopped`](Self::stopped) are not told here, because free
    /// pages would not let them in.
    pub fn blocked(&self) -> Option<Blocked> {
        self.blocked
    }

    /// Why no new request is admitted: so much of the cache is in quarantine that
    /// [`DecodeConfig::quarantine`] stops admission. As of the last step; `None` while requests are admitted.
    /// Requests that run, or come back from a retraction, go on.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.desk.stopped.as_ref()
    }

    /// The server's request with this key; `None` if its transfer has ended, or if there is none.
    pub fn request(&self, key: RequestKey) -> Option<&R> {
        self.entries.get(&key).map(|entry| &entry.request)
    }

    /// How many pages of the cache are in each place.
    pub fn accounting(&self) -> Accounting {
        self.cache.accounting()
    }

    /// The pages whose `Pages` were dropped, by a session or by the server, instead of given back. They are
    /// never allocated again.
    pub fn lost(&self) -> PageList {
        self.cache.lost()
    }

    /// How many requests are in each stage.
    pub fn counts(&self) -> DecodeCounts {
        DecodeCounts {
            handshake: self.entries.len() - self.ready.len() - self.transfers,
            ready: self.ready.len(),
            transfer: self.transfers,
            waiting: self.waiting.len(),
            running: self.running.len(),
            retracted: self.retracted.len(),
            quarantined: self.quarantine.len(),
        }
    }

    /// The manager that opens the sessions.
    pub fn manager(&self) -> &M {
        &self.desk.manager
    }

    fn apply(&mut self, key: RequestKey, standing: Standing, aux: &mut impl AuxMemory<R>) {
        match standing.poll {
            KvPoll::Failed => self.fail(key),
            KvPoll::WaitingForInput => {
                if let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.awaits_pages()) {
                    entry.stage = Stage::Ready;
                    self.ready.insert(key, entry.priority, key.0, ());
                }
            }
            KvPoll::Bootstrapping | KvPoll::Transferring | KvPoll::Success => {}
        }
        if standing.reclaimable {
            self.reclaim(key, aux);
        }
    }

    /// Moves the request to `drain_failed`, and the session into quarantine.
    fn fail(&mut self, key: RequestKey) {
        let Some(mut entry) = self.entries.remove(&key) else { return };
        self.desk.leave(entry.session.room());
        self.ready.remove(key);
        let error = entry.error.take().unwrap_or_else(|| desk::cause(&entry.session, entry.aborted));
        entry.session.abort();
        let mut held = Quarantined::nothing(entry.session);
        if let Stage::Transfer { pages, row, init, groups, .. } = entry.stage {
            self.transfers -= 1;
            match init {
                // The session never had the pages, so no data operation can touch them.
                Some(unsent) if !self.desk.is_lock_step() => {
                    self.cache.give_back(unsent, pages, Place::Held);
                    self.give_back_groups(groups.unwrap_or_default());
                    self.free_row(row);
                }
                // Another rank's session may have its pages: all ranks get their pages back in the same step,
                // or their caches would differ from then on.
                unsent => {
                    let from = if unsent.is_some() { Place::Held } else { Place::Transfer };
                    self.cache.shift(pages, from, Place::Quarantine);
                    (held.pages, held.row, held.unsent, held.groups) = (pages, row, unsent, groups);
                }
            }
        }
        self.quarantine.insert(key, held);
        self.failed.push_back(Failed { key, request: entry.request, error });
    }

    /// Takes the pages of an ended request out of its session: into the cache if the request has failed, else
    /// to the waiting queue.
    fn reclaim(&mut self, key: RequestKey, aux: &mut impl AuxMemory<R>) {
        if let Some(held) = self.quarantine.get_mut(&key) {
            let Some(returned) = self.desk.reclaim(key, &mut held.session) else { return };
            let Some(held) = self.quarantine.remove(&key) else { return };
            let pages = held.unsent.unwrap_or(returned.pages);
            self.cache.give_back(pages, held.pages, Place::Quarantine);
            self.give_back_groups(held.groups.unwrap_or(returned.groups));
            self.free_row(held.row);
        } else {
            self.complete(key, aux);
        }
    }

    /// All ranks have the bytes, and each rank's aux row has passed its gate.
    fn complete(&mut self, key: RequestKey, aux: &mut impl AuxMemory<R>) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let Stage::Transfer { pages: given, row, init: None, .. } = entry.stage else {
            // `observe` lets no session succeed before it has its pages.
            return;
        };
        let Some(reclaimed) = self.desk.reclaim(key, &mut entry.session) else { return };
        let Some(entry) = self.entries.remove(&key) else { return };
        let Reclaimed { pages, groups, skipped, .. } = reclaimed;
        let room = entry.session.room().clone();
        self.desk.leave(&room);
        self.transfers -= 1;
        let mut request = entry.request;
        let returned = pages.len();
        if entry.aborted || returned != given {
            self.cache.give_back(pages, given, Place::Transfer);
            self.give_back_groups(groups);
            self.free_row(row);
            let error = match entry.aborted {
                true => RequestError::Aborted,
                false => RequestError::PagesLost { room, given, returned },
            };
            self.failed.push_back(Failed { key, request, error });
            return;
        }
        if let Some(row) = row {
            aux.read(row, &mut request);
        }
        self.free_row(row);
        self.cache.shift(given, Place::Transfer, Place::Held);
        let origin = Origin::Transferred;
        self.arrive(entry.priority, Ready { key, request, pages, groups, skipped, origin });
    }

    fn arrive(&mut self, priority: i32, ready: Ready<R>) {
        self.arrivals += 1;
        self.waiting.insert(ready.key, priority, self.arrivals, Waiting { priority, ready });
    }

    fn free_row(&mut self, row: Option<AuxIndex>) {
        if let Some(row) = row {
            let taken = self.aux_rows.give(row);
            debug_assert!(taken, "aux row {row} was free");
        }
    }
}
