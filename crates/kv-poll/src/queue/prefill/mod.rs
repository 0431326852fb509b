//! The queues of a prefill scheduler: bootstrap → waiting → (forward pass) → inflight.

mod entry;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::{
    AuxIndex, Backpressure, ChunkId, FinalLayers, GrantRef, Groups, KvManager, KvPoll, KvSender, KvSession,
    Pages, Reclaimed, Room, SessionId, SessionOptions,
};

use self::entry::{Entry, Stage};
use super::entrance;
use super::error::{ChunkError, GroupsRefused, PushError, PushRefusal, Refusal, RequestError};
use super::line::Line;
use super::quarantine::{QuarantineRule, Stopped};
use crate::consensus::{Agreed, RankConsensus, RequestKey, SingleRank, Standing};
use crate::kv::Change;
use crate::said::ToSender;

/// When the forward pass of a request may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefillPolicy {
    /// When the decode side has registered its pages, as in SGLang: no work for requests that
    /// nobody will fetch.
    #[default]
    AfterBootstrap,
    /// At once: the decode side may register while the prompt is computed.
    Eager,
}

/// A request as its sender needs to know it.
#[derive(Debug, Clone)]
pub struct Outgoing<'a> {
    /// The room that the router gave it.
    pub room: Room,
    /// Where this worker is registered.
    pub bootstrap_addr: &'a str,
    /// The decode ranks that will register; empty: as many as the worker was configured for.
    pub dest_ranks: &'a [u32],
    /// Deadline and the like.
    pub options: SessionOptions,
    /// Higher goes first; equal ones in order of `push`.
    pub priority: i32,
}

impl<'a> Outgoing<'a> {
    /// A request with the worker's defaults.
    pub fn new(bootstrap_addr: &'a str, room: Room) -> Outgoing<'a> {
        Outgoing { room, bootstrap_addr, dest_ranks: &[], options: SessionOptions::default(), priority: 0 }
    }
}

/// The requests of one prefill rank, from arrival until their pages are free again.
///
/// # Contract
///
/// Once per scheduler iteration: [`push`](Self::push) what has arrived, [`step`](Self::step) with
/// the worker's changes, then drain [`drain_finished`](Self::drain_finished) and take requests with
/// [`pop_waiting`](Self::pop_waiting). For each request taken: [`init`](Self::init) once,
/// [`send_chunk`](Self::send_chunk) as pages become final (or [`begin_chunk`](Self::begin_chunk), and
/// [`layers_final`](Self::layers_final) as layers of them do), [`give_groups`](Self::give_groups) before
/// the last if it has state beside its pages, [`finish`](Self::finish) after it.
/// Nothing blocks, and a step costs O(changes), however many requests are in flight.
///
/// Pages given come back in [`Finished`], once, when no wire can touch them; so
/// does the aux row given to `init`. What happens on each failure: see the table in
/// [`queue`](super).
pub struct PrefillQueues<R, M: KvManager, C: RankConsensus = SingleRank> {
    manager: M,
    consensus: C,
    policy: PrefillPolicy,
    entries: BTreeMap<RequestKey, Entry<R, M::Sender>>,
    sessions: BTreeMap<SessionId, RequestKey>,
    rooms: BTreeSet<Room>,
    waiting: Line<()>,
    /// Requests with something that the worker's ring had no room for, oldest first.
    backlog: VecDeque<RequestKey>,
    /// Requests whose session should have given its pages back, and did not.
    unreclaimed: Vec<RequestKey>,
    finished: VecDeque<Finished<R>>,
    newly_failed: Vec<RequestKey>,
    agreed: Vec<Agreed>,
    next_key: u64,
    stages: [usize; 5],
    /// Pages of the whole cache.
    pool: usize,
    /// Pages of requests that have failed.
    quarantined: usize,
    quarantine_rule: QuarantineRule,
    stopped: Option<Stopped>,
}

/// A request whose pages are free again.
#[derive(Debug)]
pub struct Finished<R> {
    /// Its key.
    pub key: RequestKey,
    /// The request.
    pub request: R,
    /// All pages given to `send_chunk` and `begin_chunk`, in that order.
    pub pages: Pages,
    /// The items given to `give_groups`.
    pub groups: Groups,
    /// Whether the decode side has them.
    pub outcome: Result<(), RequestError>,
}

/// How many requests are where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillCounts {
    /// Waiting for the decode side to register.
    pub bootstrap: usize,
    /// Waiting for `pop_waiting`.
    pub waiting: usize,
    /// Popped, not all chunks given.
    pub forward: usize,
    /// All chunks given, transfer not ended.
    pub inflight: usize,
    /// Failed, pages not free yet.
    pub failing: usize,
}

impl<R, M: KvManager, C: RankConsensus> PrefillQueues<R, M, C> {
    /// Empty queues of one rank. Its pages are those of the worker's cache.
    pub fn new(manager: M, consensus: C, policy: PrefillPolicy) -> Self {
        PrefillQueues {
            pool: manager.args().geometry().num_pages as usize,
            quarantined: 0,
            quarantine_rule: QuarantineRule::HALF,
            stopped: None,
            manager,
            consensus,
            policy,
            entries: BTreeMap::new(),
            sessions: BTreeMap::new(),
            rooms: BTreeSet::new(),
            waiting: Line::new(),
            backlog: VecDeque::new(),
            unreclaimed: Vec::new(),
            finished: VecDeque::new(),
            newly_failed: Vec::new(),
            agreed: Vec::new(),
            next_key: 0,
            stages: [0; 5],
        }
    }

    /// How much of the cache may be in quarantine before [`pop_waiting`](Self::pop_waiting) offers
    /// nothing: half of it, unless told otherwise here.
    pub fn with_quarantine(self, rule: QuarantineRule) -> Self {
        PrefillQueues { quarantine_rule: rule, ..self }
    }

    /// Opens the request's sender and enters it into the bootstrap queue.
    pub fn push(&mut self, request: R, outgoing: Outgoing<'_>) -> Result<RequestKey, PushError<R>> {
        let Outgoing { room, bootstrap_addr, dest_ranks, options, priority } = outgoing;
        let key = RequestKey(self.next_key);
        match entrance::enter(&mut self.consensus, &self.rooms, key, &room) {
            Ok(()) => self.next_key += 1,
            Err(busy) => return Err(PushError { request, reason: busy.into() }),
        }
        let session = match self.manager.sender(bootstrap_addr, room.clone(), dest_ranks, options) {
            Ok(session) => session,
            Err(error) => {
                self.consensus.propose(key, entrance::CANNOT_SERVE);
                return Err(PushError { request, reason: PushRefusal::Open(error) });
            }
        };
        self.sessions.insert(session.id(), key);
        self.rooms.insert(room);
        let stage = match self.policy {
            PrefillPolicy::AfterBootstrap => Stage::Bootstrap,
            PrefillPolicy::Eager => Stage::Waiting,
        };
        if stage == Stage::Waiting {
            self.waiting.insert(key, priority, key.0, ());
        }
        self.stages[stage as usize] += 1;
        self.entries.insert(
            key,
            Entry {
                request,
                session,
                priority,
                stage,
                announced: None,
                given: 0,
                grouped: false,
                sent_any: false,
                init: None,
                chunks: 0,
                kept: VecDeque::new(),
                in_backlog: false,
                aborted: false,
                error: None,
            },
        );
        Ok(key)
    }

    /// Takes what has changed since the last step, agrees on it with the other ranks, and retries
    /// what the worker had no room for. Once per scheduler iteration, also without changes.
    pub fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Result<(), C::Error> {
        self.newly_failed.clear();
        for change in changes {
            let Some(key) = self.sessions.get(&change.session) else { continue };
            let Some(entry) = self.entries.get_mut(key) else { continue };
            let standing = Standing { poll: entry.observe(change.poll), reclaimable: change.reclaimable };
            self.consensus.propose(*key, standing);
        }
        let mut agreed = std::mem::take(&mut self.agreed);
        let result = self.consensus.agree(&mut agreed);
        for Agreed { key, standing } in agreed.drain(..) {
            self.apply(key, standing);
        }
        self.agreed = agreed;
        for key in std::mem::take(&mut self.unreclaimed) {
            self.reclaim(key);
        }
        self.flush_backlog();
        self.stop_or_go();
        result
    }

    /// The next request for the forward pass, if `admit` takes it. It is offered the first in line
    /// only: a large request that does not fit is not overtaken for ever by small ones. None while
    /// admission is [`stopped`](Self::stopped).
    pub fn pop_waiting(&mut self, admit: impl FnOnce(RequestKey, &mut R) -> bool) -> Option<RequestKey> {
        if self.stopped.is_some() {
            return None;
        }
        let (key, ()) = self.waiting.front()?;
        let entry = self.entries.get_mut(&key)?;
        if !admit(key, &mut entry.request) {
            return None;
        }
        move_to(&mut self.stages, entry, Stage::Forward);
        self.waiting.pop();
        Some(key)
    }

    /// Announces how many pages will be sent, and the aux row that goes with the last of them.
    pub fn init(&mut self, key: RequestKey, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Refusal> {
        let entry = self.entries.get_mut(&key).ok_or(Refusal::Ended { key })?;
        entry.check_popped(key)?;
        if entry.announced.is_some() {
            return Err(Refusal::InitOrder { key });
        }
        entry.announced = Some(num_pages);
        if let Err(Backpressure(())) = entry.session.init(num_pages, aux) {
            entry.init = Some((num_pages, aux));
            enqueue(&mut self.backlog, key, entry);
        }
        Ok(())
    }

    /// Gives the next pages, whose content must be final, aux row included if they are the last. A
    /// chunk that the worker has no room for is kept, in order, and given at a later step.
    pub fn send_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<(), ChunkError> {
        self.give_chunk(key, pages, ToSender::Send).map(drop)
    }

    /// Gives the next pages before they are computed; [`layers_final`](Self::layers_final) says what
    /// of them is. Kept as with `send_chunk` if the worker has no room.
    pub fn begin_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<ChunkId, ChunkError> {
        self.give_chunk(key, pages, ToSender::Begin)
    }

    /// Says that layers of a chunk are final, now or once a fence has passed: they are moved while the
    /// forward pass goes on. Kept as with `send_chunk` if the worker has no room. It may come after
    /// `finish`.
    pub fn layers_final(&mut self, key: RequestKey, layers: FinalLayers) -> Result<(), Refusal> {
        let entry = self.entries.get_mut(&key).ok_or(Refusal::Ended { key })?;
        entry.check_popped(key)?;
        let (chunk, given) = (layers.chunk, entry.chunks);
        if chunk.0 >= given {
            return Err(Refusal::UnknownChunk { key, chunk, given });
        }
        entry.kept.push_back(ToSender::Final(layers));
        if !entry.in_backlog && !entry.flush() {
            enqueue(&mut self.backlog, key, entry);
        }
        Ok(())
    }

    /// Gives the items of the request's state groups: once, before the chunk that completes the
    /// request, with which their content must be final. Kept as with `send_chunk` if the worker has no
    /// room.
    pub fn give_groups(&mut self, key: RequestKey, groups: Groups) -> Result<(), GroupsRefused> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Err(GroupsRefused { groups, reason: Refusal::Ended { key } });
        };
        let order = if entry.grouped || entry.stage == Stage::Inflight {
            Err(Refusal::GroupsOrder { key })
        } else {
            entry.check_popped(key)
        };
        if let Err(reason) = order {
            return Err(GroupsRefused { groups, reason });
        }
        entry.grouped = true;
        entry.kept.push_back(ToSender::Groups(groups));
        if !entry.in_backlog && !entry.flush() {
            enqueue(&mut self.backlog, key, entry);
        }
        Ok(())
    }

    fn give_chunk(
        &mut self,
        key: RequestKey,
        pages: Pages,
        step: fn(Pages) -> ToSender,
    ) -> Result<ChunkId, ChunkError> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Err(ChunkError { pages, reason: Refusal::Ended { key } });
        };
        if let Err(reason) = entry.check_chunk(key, pages.len()) {
            return Err(ChunkError { pages, reason });
        }
        entry.given += pages.len();
        let number = entry.give(step(pages));
        if !entry.in_backlog && !entry.flush() {
            enqueue(&mut self.backlog, key, entry);
        }
        Ok(number)
    }

    /// Says that the forward pass is over and all announced pages are given. For a request without
    /// pages this sends the aux row.
    pub fn finish(&mut self, key: RequestKey) -> Result<(), Refusal> {
        let entry = self.entries.get_mut(&key).ok_or(Refusal::Ended { key })?;
        entry.check_popped(key)?;
        let announced = entry.announced.ok_or(Refusal::InitOrder { key })?;
        if entry.given != announced {
            return Err(Refusal::PageCount { key, given: entry.given, announced });
        }
        if entry.chunks == 0 {
            entry.give(ToSender::Send(Pages::none()));
            if !entry.in_backlog && !entry.flush() {
                enqueue(&mut self.backlog, key, entry);
            }
        }
        move_to(&mut self.stages, entry, Stage::Inflight);
        Ok(())
    }

    /// Ends a request, at any stage; false if it has ended already. It comes out of
    /// [`drain_finished`](Self::drain_finished) when its pages are free.
    pub fn abort(&mut self, key: RequestKey) -> bool {
        let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.stage != Stage::Failing) else {
            return false;
        };
        entry.aborted = true;
        if self.waiting.remove(key).is_some() {
            move_to(&mut self.stages, entry, Stage::Bootstrap);
        }
        entry.session.abort();
        true
    }

    /// The next request whose pages are free again.
    pub fn drain_finished(&mut self) -> Option<Finished<R>> {
        self.finished.pop_front()
    }

    /// Requests that have failed in the last step: their clients can be told at once, while
    /// the pages may still be in quarantine.
    pub fn newly_failed(&self) -> &[RequestKey] {
        &self.newly_failed
    }

    /// What a router carries to the receiver of a request in pull mode.
    pub fn grants(&self, key: RequestKey) -> Option<Vec<GrantRef>> {
        self.entries.get(&key).map(|entry| entry.session.grants())
    }

    /// Why a request that is still in the queues has failed.
    pub fn failure(&self, key: RequestKey) -> Option<&RequestError> {
        let entry = self.entries.get(&key).filter(|entry| entry.stage == Stage::Failing)?;
        entry.error.as_ref()
    }

    /// A request that is still in the queues.
    pub fn request(&self, key: RequestKey) -> Option<&R> {
        self.entries.get(&key).map(|entry| &entry.request)
    }

    /// A request that is still in the queues.
    pub fn request_mut(&mut self, key: RequestKey) -> Option<&mut R> {
        self.entries.get_mut(&key).map(|entry| &mut entry.request)
    }

    /// Why no request is offered, as of the last step, while quarantined pages take up so much of the
    /// cache that the [`QuarantineRule`] stops admission. Requests in their forward pass go on.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.stopped.as_ref()
    }

    /// How many requests are where.
    pub fn counts(&self) -> PrefillCounts {
        let [bootstrap, waiting, forward, inflight, failing] = self.stages;
        PrefillCounts { bootstrap, waiting, forward, inflight, failing }
    }

    /// Requests in the queues, those in `drain_finished` not counted.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if no request is in the queues.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What sessions are opened with.
    pub fn manager(&self) -> &M {
        &self.manager
    }

    fn apply(&mut self, key: RequestKey, standing: Standing) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        match standing.poll {
            KvPoll::Failed => self.fail(key),
            KvPoll::Bootstrapping => {}
            KvPoll::WaitingForInput | KvPoll::Transferring | KvPoll::Success => {
                if entry.stage == Stage::Bootstrap && !entry.aborted {
                    move_to(&mut self.stages, entry, Stage::Waiting);
                    self.waiting.insert(key, entry.priority, key.0, ());
                }
            }
        }
        if standing.reclaimable {
            self.reclaim(key);
        }
    }

    fn fail(&mut self, key: RequestKey) {
        let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.stage != Stage::Failing) else {
            return;
        };
        let room = entry.session.room();
        self.rooms.remove(room);
        let error = entry.error.take().unwrap_or_else(|| entrance::cause(&entry.session, entry.aborted));
        entry.error = Some(error);
        entry.session.abort();
        entry.init = None;
        self.waiting.remove(key);
        move_to(&mut self.stages, entry, Stage::Failing);
        self.quarantined += entry.given;
        self.newly_failed.push(key);
    }

    /// Takes the pages of an ended request out of its session.
    fn reclaim(&mut self, key: RequestKey) {
        let Some(entry) = self.entries.remove(&key) else { return };
        let (id, room) = (entry.session.id(), entry.session.room().clone());
        let Reclaimed { mut pages, mut groups, .. } = match entry.session.reclaim_all() {
            Ok(reclaimed) => reclaimed,
            Err(session) => {
                self.entries.insert(key, Entry { session, ..entry });
                self.unreclaimed.push(key);
                return;
            }
        };
        for step in entry.kept {
            match step {
                ToSender::Send(chunk) | ToSender::Begin(chunk) => {
                    let refused = pages.append(chunk);
                    debug_assert!(refused.is_ok(), "one cache's pages exceed a token");
                }
                // They are given once: the session has none.
                ToSender::Groups(kept) => groups = kept,
                ToSender::Init(..) | ToSender::Final(_) => {}
            }
        }
        self.stages[entry.stage as usize] -= 1;
        if entry.stage == Stage::Failing {
            self.quarantined -= entry.given;
        }
        self.sessions.remove(&id);
        let returned = pages.len();
        let outcome = match entry.error {
            Some(error) => Err(error),
            None if returned != entry.given => {
                Err(RequestError::PagesLost { room: room.clone(), given: entry.given, returned })
            }
            None => Ok(()),
        };
        if entry.stage != Stage::Failing {
            self.rooms.remove(&room);
        }
        self.finished.push_back(Finished { key, request: entry.request, pages, groups, outcome });
    }

    /// Stops admission, or lets it go on. What it depends on is agreed: ranks in lock-step decide alike.
    fn stop_or_go(&mut self) {
        let (quarantined, pool) = (self.quarantined, self.pool);
        let stops = self.quarantine_rule.stops(quarantined, pool);
        self.stopped = stops.then(|| Stopped { quarantined, pool, by: self.manager.quarantine() });
    }

    /// Retries what the ring had no room for. All sessions share it, so the first refusal ends it.
    fn flush_backlog(&mut self) {
        while let Some(&key) = self.backlog.front() {
            if let Some(entry) = self.entries.get_mut(&key) {
                if entry.stage != Stage::Failing && !entry.flush() {
                    return;
                }
                entry.in_backlog = false;
            }
            self.backlog.pop_front();
        }
    }
}

fn enqueue<R, S>(backlog: &mut VecDeque<RequestKey>, key: RequestKey, entry: &mut Entry<R, S>) {
    if !entry.in_backlog {
        entry.in_backlog = true;
        backlog.push_back(key);
    }
}

fn move_to<R, S>(stages: &mut [usize; 5], entry: &mut Entry<R, S>, stage: Stage) {
    stages[entry.stage as usize] -= 1;
    stages[stage as usize] += 1;
    entry.stage = stage;
}
