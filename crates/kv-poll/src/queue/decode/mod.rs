//! The queues of a decode scheduler: prealloc → transfer → waiting → running.

mod cache;
mod entry;
mod types;

pub use cache::Accounting;
pub use types::{
    Blocked, DecodeConfig, DecodeCounts, Failed, Incoming, Origin, Ready, RetractError, RetractRefusal,
    Shortage,
};

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::{AuxIndex, Groups, KvManager, KvPoll, KvSession, Pages, Reclaimed, Room, SessionId};

use self::cache::{Cache, Place};
use self::entry::{Entry, Quarantined, Retracted, Stage, Waiting};
use super::admission::{AdmissionRule, Load};
use super::aux_rows::AuxRows;
use super::entrance;
use super::error::{PushError, PushRefusal, RequestError};
use super::gate::AuxMemory;
use super::line::Line;
use super::quarantine::{QuarantineRule, Stopped};
use crate::allocator::{FreeError, PageAllocator, RunAllocator};
use crate::consensus::{Agreed, RankConsensus, RequestKey, SingleRank, Standing};
use crate::kv::Change;

/// The requests of one decode rank, from arrival until they run, and the pages of its cache.
///
/// # Contract
///
/// Once per scheduler iteration: [`push`](Self::push) what has arrived, [`step`](Self::step) with
/// the worker's changes, then drain [`drain_failed`](Self::drain_failed) and take requests with
/// [`pop_waiting`](Self::pop_waiting) into the running batch. Their pages are the server's until
/// [`finish`](Self::finish). A running request grows with [`allocate`](Self::allocate); when that
/// has nothing left, the server [`retract`](Self::retract)s running requests, which come back through
/// `pop_waiting` before any new one is admitted. Nothing blocks, and a step costs O(changes +
/// requests admitted), however many requests are in flight.
///
/// Items of state groups are the server's: it hands them out in
/// [`take_groups`](AuxMemory::take_groups), and has them back in [`Ready`] or, of a request that fails,
/// from [`drain_groups`](Self::drain_groups).
///
/// Every page is at any time in exactly one place, see [`Accounting`]. What happens on each
/// failure: see the table in [`queue`](super).
pub struct DecodeQueues<R, M: KvManager, C: RankConsensus = SingleRank, A: PageAllocator = RunAllocator> {
    manager: M,
    consensus: C,
    cache: Cache<A>,
    rule: AdmissionRule,
    aux_rows: AuxRows,
    entries: BTreeMap<RequestKey, Entry<R, M::Receiver>>,
    /// Failed requests whose sessions have not given their pages back.
    quarantine: BTreeMap<RequestKey, Quarantined<M::Receiver>>,
    sessions: BTreeMap<SessionId, RequestKey>,
    rooms: BTreeSet<Room>,
    /// Handshake done, no pages yet.
    ready: Line<()>,
    waiting: Line<Waiting<R>>,
    retracted: Line<Retracted<R>>,
    /// Requests of the server, with their priority.
    running: BTreeMap<RequestKey, i32>,
    /// Requests whose pages the worker's ring had no room for, oldest first.
    backlog: VecDeque<RequestKey>,
    /// Requests whose session should have given its pages back, and did not.
    unreclaimed: Vec<RequestKey>,
    failed: VecDeque<Failed<R>>,
    /// Items of state groups of requests that have failed, and are quiet.
    returned: VecDeque<Groups>,
    blocked: Option<Blocked>,
    quarantine_rule: QuarantineRule,
    stopped: Option<Stopped>,
    agreed: Vec<Agreed>,
    next_key: u64,
    arrivals: u64,
    transfers: usize,
}

impl<R, M: KvManager, C: RankConsensus, A: PageAllocator> DecodeQueues<R, M, C, A> {
    /// Empty queues of one rank, over the pages that are free in `allocator`.
    pub fn new(manager: M, consensus: C, allocator: A, config: DecodeConfig) -> Self {
        DecodeQueues {
            manager,
            consensus,
            cache: Cache::new(allocator),
            rule: config.rule,
            aux_rows: AuxRows::new(config.aux_rows),
            entries: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            sessions: BTreeMap::new(),
            rooms: BTreeSet::new(),
            ready: Line::new(),
            waiting: Line::new(),
            retracted: Line::new(),
            running: BTreeMap::new(),
            backlog: VecDeque::new(),
            unreclaimed: Vec::new(),
            failed: VecDeque::new(),
            returned: VecDeque::new(),
            blocked: None,
            quarantine_rule: config.quarantine,
            stopped: None,
            agreed: Vec::new(),
            next_key: 0,
            arrivals: 0,
            transfers: 0,
        }
    }

    /// Opens the request's receiver and enters it into the prealloc queue.
    pub fn push(&mut self, request: R, incoming: Incoming<'_>) -> Result<RequestKey, PushError<R>> {
        let Incoming { room, bootstrap_addr, demand, options, priority } = incoming;
        let capacity = self.cache.capacity();
        let needed = self.rule.need(&demand, &Load { available: capacity, active: 0, running_pages: 0 });
        if needed > capacity {
            return Err(PushError { request, reason: PushRefusal::TooLarge { needed, capacity } });
        }
        let key = RequestKey(self.next_key);
        match entrance::enter(&mut self.consensus, &self.rooms, key, &room) {
            Ok(()) => self.next_key += 1,
            Err(busy) => return Err(PushError { request, reason: busy.into() }),
        }
        let session = match self.manager.receiver(bootstrap_addr, room.clone(), options) {
            Ok(session) => session,
            Err(error) => {
                self.consensus.propose(key, entrance::CANNOT_SERVE);
                return Err(PushError { request, reason: PushRefusal::Open(error) });
            }
        };
        self.sessions.insert(session.id(), key);
        self.rooms.insert(room);
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

    /// Takes what has changed since the last step, agrees on it with the other ranks, and admits
    /// what the cache has room for. Once per scheduler iteration, also without changes.
    pub fn step(
        &mut self,
        changes: impl IntoIterator<Item = Change>,
        aux: &mut impl AuxMemory<R>,
    ) -> Result<(), C::Error> {
        for change in changes {
            let Some(key) = self.sessions.get(&change.session) else { continue };
            let poll = match self.entries.get_mut(key) {
                Some(entry) => entry.observe(change.poll, aux),
                None => KvPoll::Failed,
            };
            self.consensus.propose(*key, Standing { poll, reclaimable: change.reclaimable });
        }
        let mut agreed = std::mem::take(&mut self.agreed);
        let result = self.consensus.agree(&mut agreed);
        for Agreed { key, standing } in agreed.drain(..) {
            self.apply(key, standing, aux);
        }
        self.agreed = agreed;
        result?;
        for key in std::mem::take(&mut self.unreclaimed) {
            self.reclaim(key, aux);
        }
        self.flush_backlog();
        self.stop_or_go();
        self.admit(aux);
        Ok(())
    }

    /// The next request that may run, with its pages.
    pub fn pop_waiting(&mut self) -> Option<Ready<R>> {
        let (key, Waiting { priority, ready }) = self.waiting.pop()?;
        self.cache.shift(ready.pages.len(), Place::Held, Place::Server);
        self.running.insert(key, priority);
        Some(ready)
    }

    /// Takes pages for a running request to grow into; `None` if fewer are free: then
    /// [`retract`](Self::retract) something.
    pub fn allocate(&mut self, pages: usize) -> Option<Pages> {
        self.cache.allocate(pages, Place::Server)
    }

    /// Takes back pages of the server, of a request that goes on.
    pub fn release(&mut self, pages: Pages) -> Result<(), FreeError> {
        self.cache.release(pages)
    }

    /// Ends a running request and takes back its pages.
    pub fn finish(&mut self, key: RequestKey, pages: Pages) -> Result<(), FreeError> {
        self.running.remove(&key);
        self.cache.release(pages)
    }

    /// Takes a running request out of the batch to make room: its pages are free at once (save their
    /// content first), and it comes back through [`pop_waiting`](Self::pop_waiting), with
    /// `pages_to_resume` pages and [`Origin::Retracted`], before any new request gets pages.
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

    /// Ends a request that is not running, at any stage; false if there is no such request. It comes
    /// out of [`drain_failed`](Self::drain_failed).
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

    /// The next request that has failed.
    pub fn drain_failed(&mut self) -> Option<Failed<R>> {
        self.failed.pop_front()
    }

    /// The next items of state groups that are free again: those of a request that has failed, once no
    /// wire can touch them.
    pub fn drain_groups(&mut self) -> Option<Groups> {
        self.returned.pop_front()
    }

    fn give_back_groups(&mut self, groups: Groups) {
        if !groups.is_empty() {
            self.returned.push_back(groups);
        }
    }

    /// The request that waits for room, as of the last step. Compare `shortage` with what can be
    /// evicted or retracted. New requests that wait while admission is [`stopped`](Self::stopped) are not
    /// told here: no room would let them in.
    pub fn blocked(&self) -> Option<Blocked> {
        self.blocked
    }

    /// Why no new request is let in, as of the last step, while quarantined pages take up so much of
    /// the cache that [`DecodeConfig::quarantine`] stops admission. Pages of requests that run, and
    /// requests that come back from a retraction, are not concerned.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.stopped.as_ref()
    }

    /// A request whose transfer has not ended.
    pub fn request(&self, key: RequestKey) -> Option<&R> {
        self.entries.get(&key).map(|entry| &entry.request)
    }

    /// Where the pages are.
    pub fn accounting(&self) -> Accounting {
        self.cache.accounting()
    }

    /// How many requests are where.
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

    /// What sessions are opened with.
    pub fn manager(&self) -> &M {
        &self.manager
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

    /// Hands out the request, and puts the session into quarantine.
    fn fail(&mut self, key: RequestKey) {
        let Some(mut entry) = self.entries.remove(&key) else { return };
        self.rooms.remove(entry.session.room());
        self.ready.remove(key);
        let error = entry.error.take().unwrap_or_else(|| entrance::cause(&entry.session, entry.aborted));
        entry.session.abort();
        let (pages, row) = match entry.stage {
            Stage::Handshake | Stage::Ready => (0, None),
            Stage::Transfer { pages, row, init: None, .. } => {
                self.transfers -= 1;
                self.cache.shift(pages, Place::Transfer, Place::Quarantine);
                (pages, row)
            }
            Stage::Transfer { pages, row, init: Some(unsent), groups, .. } => {
                // The session never saw them: no wire knows them.
                self.transfers -= 1;
                self.cache.give_back(unsent, pages, Place::Held);
                self.give_back_groups(groups.unwrap_or_default());
                self.free_row(row);
                (0, None)
            }
        };
        self.quarantine.insert(key, Quarantined { session: entry.session, pages, row });
        self.failed.push_back(Failed { key, request: entry.request, error });
    }

    /// Takes the pages of an ended request out of its session.
    fn reclaim(&mut self, key: RequestKey, aux: &mut impl AuxMemory<R>) {
        if let Some(Quarantined { session, pages, row }) = self.quarantine.remove(&key) {
            let id = session.id();
            match session.reclaim_all() {
                Ok(returned) => {
                    self.cache.give_back(returned.pages, pages, Place::Quarantine);
                    self.give_back_groups(returned.groups);
                    self.free_row(row);
                    self.sessions.remove(&id);
                }
                Err(session) => {
                    self.quarantine.insert(key, Quarantined { session, pages, row });
                    self.unreclaimed.push(key);
                }
            }
        } else if let Some(entry) = self.entries.remove(&key) {
            self.complete(key, entry, aux);
        }
    }

    /// All ranks have the bytes, and each rank's aux row has passed its gate.
    fn complete(&mut self, key: RequestKey, entry: Entry<R, M::Receiver>, aux: &mut impl AuxMemory<R>) {
        let Stage::Transfer { pages: given, row, init: None, .. } = entry.stage else {
            // `observe` lets no session succeed before it has its pages.
            self.entries.insert(key, entry);
            return;
        };
        let (id, room) = (entry.session.id(), entry.session.room().clone());
        let Reclaimed { pages, groups, skipped } = match entry.session.reclaim_all() {
            Ok(reclaimed) => reclaimed,
            Err(session) => {
                self.entries.insert(key, Entry { session, ..entry });
                self.unreclaimed.push(key);
                return;
            }
        };
        self.sessions.remove(&id);
        self.rooms.remove(&room);
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

    /// Retries what the ring had no room for. All sessions share it, so the first refusal ends it.
    fn flush_backlog(&mut self) {
        while let Some(&key) = self.backlog.front() {
            if let Some(entry) = self.entries.get_mut(&key) {
                match entry.flush() {
                    Some(pages) => self.cache.shift(pages, Place::Held, Place::Transfer),
                    None => return,
                }
            }
            self.backlog.pop_front();
        }
    }

    /// Stops admission, or lets it go on. What it depends on is agreed: ranks in lock-step decide alike.
    fn stop_or_go(&mut self) {
        let (quarantined, pool) = (self.cache.at(Place::Quarantine), self.cache.capacity());
        let stops = self.quarantine_rule.stops(quarantined, pool);
        self.stopped = stops.then(|| Stopped { quarantined, pool, by: self.manager.quarantine() });
    }

    /// Gives pages to whoever is first in line, for as long as they fit: retracted requests, then
    /// new ones.
    fn admit(&mut self, aux: &mut impl AuxMemory<R>) {
        self.blocked = loop {
            let step = if self.retracted.len() > 0 { self.resume_first() } else { self.admit_first(aux) };
            match step {
                Admission::Admitted => {}
                Admission::Blocked(blocked) => break Some(blocked),
                Admission::Nobody => break None,
            }
        };
    }

    fn load(&self) -> Load {
        Load {
            available: self.cache.available(),
            active: self.transfers + self.waiting.len() + self.running.len(),
            running_pages: self.cache.at(Place::Server),
        }
    }

    fn resume_first(&mut self) -> Admission {
        let Some((key, retracted)) = self.retracted.front() else { return Admission::Nobody };
        let missing = self.rule.missing_to_resume(retracted.pages, &self.load());
        if missing > 0 {
            return blocked(key, Shortage::Pages(missing));
        }
        let Some(pages) = self.cache.allocate(retracted.pages, Place::Held) else {
            return blocked(key, Shortage::Pages(1));
        };
        if let Some((key, Retracted { request, priority, .. })) = self.retracted.pop() {
            let (groups, skipped, origin) = (Groups::none(), Vec::new(), Origin::Retracted);
            self.arrive(priority, Ready { key, request, pages, groups, skipped, origin });
        }
        Admission::Admitted
    }

    fn admit_first(&mut self, aux: &mut impl AuxMemory<R>) -> Admission {
        if self.stopped.is_some() {
            return Admission::Nobody;
        }
        let Some((key, ())) = self.ready.front() else { return Admission::Nobody };
        let load = self.load();
        let Some(entry) = self.entries.get_mut(&key) else {
            self.ready.pop();
            return Admission::Admitted;
        };
        let missing = self.rule.missing(&entry.demand, &load);
        if missing > 0 {
            return blocked(key, Shortage::Pages(missing));
        }
        let row = match self.aux_rows.capacity() {
            0 => None,
            _ => match self.aux_rows.take() {
                Some(row) => Some(row),
                None => return blocked(key, Shortage::AuxRow),
            },
        };
        let Some(pages) = self.cache.allocate(entry.demand.pages, Place::Held) else {
            self.free_row(row);
            return blocked(key, Shortage::Pages(1));
        };
        let given = pages.len();
        let Some(groups) = aux.take_groups(&mut entry.request) else {
            self.cache.give_back(pages, given, Place::Held);
            self.free_row(row);
            return blocked(key, Shortage::Groups);
        };
        if let Some(row) = row {
            aux.clear(row);
        }
        self.ready.pop();
        self.transfers += 1;
        let groups = Some(groups).filter(|groups| !groups.is_empty());
        entry.stage = Stage::Transfer { pages: given, row, init: Some(pages), groups, passed: false };
        match entry.flush() {
            Some(given) => self.cache.shift(given, Place::Held, Place::Transfer),
            None => self.backlog.push_back(key),
        }
        Admission::Admitted
    }
}

/// What became of the first in line.
enum Admission {
    Admitted,
    Blocked(Blocked),
    /// There is none, or none may be let in.
    Nobody,
}

fn blocked(key: RequestKey, shortage: Shortage) -> Admission {
    Admission::Blocked(Blocked { key, shortage })
}
