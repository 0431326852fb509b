//! The queues of a prefill scheduler: bootstrap → waiting → (forward pass) → inflight.

mod entry;
mod types;

pub use types::{Finished, Outgoing, PrefillCounts, PrefillPolicy};

use std::collections::{BTreeMap, VecDeque};

use kv_core::machine::SessionCommand;
use kv_core::proto::{Command, Resource};
use kv_core::{
    AuxIndex, ChunkId, FinalLayers, KvManager, KvPoll, KvSender, KvSession, LeaseRef, Pages, Reclaimed,
    RequestGroups, SessionId,
};

use self::entry::{Entry, Stage};
use super::desk::{self, Desk};
use super::error::{ChunkError, GroupsRefused, PushError, Refusal, RequestError};
use super::line::Line;
use super::quarantine::{QuarantineRule, Stopped};
use crate::consensus::{Agreed, RankConsensus, RequestKey, SingleRank, Standing};
use crate::kv::Change;

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
    desk: Desk<M, C>,
    policy: PrefillPolicy,
    entries: BTreeMap<RequestKey, Entry<R, M::Sender>>,
    waiting: Line<()>,
    finished: VecDeque<Finished<R>>,
    newly_failed: Vec<RequestKey>,
    stages: [usize; 5],
    /// Pages of the whole cache.
    pool: usize,
    /// Pages of requests that have failed.
    quarantined: usize,
}

impl<R, M: KvManager, C: RankConsensus> PrefillQueues<R, M, C> {
    /// Empty queues of one rank. Its pages are those of the worker's cache.
    pub fn new(manager: M, consensus: C, policy: PrefillPolicy) -> Self {
        PrefillQueues {
            pool: manager.args().geometry().num_pages as usize,
            quarantined: 0,
            desk: Desk::new(manager, consensus, QuarantineRule::HALF),
            policy,
            entries: BTreeMap::new(),
            waiting: Line::new(),
            finished: VecDeque::new(),
            newly_failed: Vec::new(),
            stages: [0; 5],
        }
    }

    /// How much of the cache may be in quarantine before [`pop_waiting`](Self::pop_waiting) offers
    /// nothing: half of it, unless told otherwise here.
    pub fn with_quarantine(mut self, rule: QuarantineRule) -> Self {
        self.desk.rule = rule;
        self
    }

    /// Opens the request's sender and enters it into the bootstrap queue.
    pub fn push(&mut self, request: R, outgoing: Outgoing<'_>) -> Result<RequestKey, PushError<R>> {
        let Outgoing { room, bootstrap_addr, dest_ranks, options, priority } = outgoing;
        let (key, request, session) = self
            .desk
            .open(request, room, |manager, room| manager.sender(bootstrap_addr, room, dest_ranks, options))?;
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
        let entries = &mut self.entries;
        let agreed = self.desk.agree(changes, |key, poll| Some(entries.get_mut(&key)?.observe(poll)))?;
        for Agreed { key, standing } in agreed {
            self.apply(key, standing);
        }
        for key in self.desk.take_unreclaimed() {
            self.reclaim(key);
        }
        let entries = &mut self.entries;
        self.desk.flush(|key| entries.get_mut(&key).is_none_or(Entry::retry));
        self.desk.stop_or_go(self.quarantined, self.pool);
        Ok(())
    }

    /// The next request for the forward pass, if `admit` takes it. It is offered the first in line
    /// only: a large request that does not fit is not overtaken for ever by small ones. None while
    /// admission is [`stopped`](Self::stopped).
    pub fn pop_waiting(&mut self, admit: impl FnOnce(RequestKey, &mut R) -> bool) -> Option<RequestKey> {
        if self.desk.stopped.is_some() {
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
        let session = entry.session.id();
        self.say(key, Command::InitSender { session, num_pages, aux });
        Ok(())
    }

    /// Gives the next pages, whose content must be final, aux row included if they are the last. A
    /// chunk that the worker has no room for is kept, in order, and given at a later step.
    pub fn send_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<(), ChunkError> {
        self.give_chunk(key, pages, |session, chunk| Command::Send { session, chunk }).map(drop)
    }

    /// Gives the next pages before they are computed; [`layers_final`](Self::layers_final) says what
    /// of them is. Kept as with `send_chunk` if the worker has no room.
    pub fn begin_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<ChunkId, ChunkError> {
        self.give_chunk(key, pages, |session, chunk| Command::BeginChunk { session, chunk })
    }

    /// Says that layers of a chunk are final, now or once a ready event has passed: they are moved while the
    /// forward pass goes on. Kept as with `send_chunk` if the worker has no room. It may come after
    /// `finish`.
    pub fn layers_final(&mut self, key: RequestKey, layers: FinalLayers) -> Result<(), Refusal> {
        let entry = self.entries.get_mut(&key).ok_or(Refusal::Ended { key })?;
        entry.check_popped(key)?;
        let (chunk, given) = (layers.chunk, entry.chunks);
        if chunk.0 >= given {
            return Err(Refusal::UnknownChunk { key, chunk, given });
        }
        let session = entry.session.id();
        self.say(key, Command::LayersFinal { session, layers });
        Ok(())
    }

    /// Gives the items of the request's cache groups: once, before the chunk that completes the
    /// request, with which their content must be final. Kept as with `send_chunk` if the worker has no
    /// room.
    pub fn give_groups(&mut self, key: RequestKey, groups: RequestGroups) -> Result<(), GroupsRefused> {
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
        let session = entry.session.id();
        self.say(key, Command::RequestGroups { session, groups });
        Ok(())
    }

    fn give_chunk(
        &mut self,
        key: RequestKey,
        pages: Pages,
        command: fn(SessionId, Pages) -> Command,
    ) -> Result<ChunkId, ChunkError> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Err(ChunkError { pages, reason: Refusal::Ended { key } });
        };
        if let Err(reason) = entry.check_chunk(key, pages.len()) {
            return Err(ChunkError { pages, reason });
        }
        entry.given += pages.len();
        let (number, session) = (entry.next_chunk(), entry.session.id());
        self.say(key, command(session, pages));
        Ok(number)
    }

    /// Says something to a session, after what it has not taken yet.
    fn say(&mut self, key: RequestKey, command: Command) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.kept.push_back(command);
        if !entry.in_backlog && !entry.flush() {
            entry.in_backlog = true;
            self.desk.enqueue(key);
        }
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
        let session = (entry.chunks == 0).then(|| entry.session.id());
        move_to(&mut self.stages, entry, Stage::Inflight);
        if let Some(session) = session {
            entry.next_chunk();
            self.say(key, Command::Send { session, chunk: Pages::none() });
        }
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
    pub fn lease_refs(&self, key: RequestKey) -> Option<Vec<LeaseRef>> {
        self.entries.get(&key).map(|entry| entry.session.lease_refs())
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
        self.desk.stopped.as_ref()
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
        &self.desk.manager
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
        self.desk.leave(entry.session.room());
        let error = entry.error.take().unwrap_or_else(|| desk::cause(&entry.session, entry.aborted));
        entry.error = Some(error);
        entry.session.abort();
        self.waiting.remove(key);
        move_to(&mut self.stages, entry, Stage::Failing);
        self.quarantined += entry.given;
        self.newly_failed.push(key);
    }

    /// Takes the pages of an ended request out of its session.
    fn reclaim(&mut self, key: RequestKey) {
        let Some(entry) = self.entries.remove(&key) else { return };
        let room = entry.session.room().clone();
        let Reclaimed { mut pages, mut groups, .. } = match self.desk.reclaim(key, entry.session) {
            Ok(reclaimed) => reclaimed,
            Err(session) => {
                self.entries.insert(key, Entry { session, ..entry });
                return;
            }
        };
        for kept in entry.kept.into_iter().filter_map(Command::into_resource) {
            match kept {
                Resource::Pages(chunk) => {
                    let refused = pages.append(chunk);
                    debug_assert!(refused.is_ok(), "one cache's pages exceed a token");
                }
                // They are given once: the session has none.
                Resource::RequestGroups { groups: kept, .. } => groups = kept,
            }
        }
        self.stages[entry.stage as usize] -= 1;
        if entry.stage == Stage::Failing {
            self.quarantined -= entry.given;
        }
        let returned = pages.len();
        let outcome = match entry.error {
            Some(error) => Err(error),
            None if returned != entry.given => {
                Err(RequestError::PagesLost { room: room.clone(), given: entry.given, returned })
            }
            None => Ok(()),
        };
        if entry.stage != Stage::Failing {
            self.desk.leave(&room);
        }
        self.finished.push_back(Finished { key, request: entry.request, pages, groups, outcome });
    }
}

fn move_to<R, S>(stages: &mut [usize; 5], entry: &mut Entry<R, S>, stage: Stage) {
    stages[entry.stage as usize] -= 1;
    stages[stage as usize] += 1;
    entry.stage = stage;
}
