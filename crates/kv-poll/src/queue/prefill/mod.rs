//! The queues of a prefill scheduler: bootstrap → waiting → (forward pass) → inflight.

mod entry;
mod types;

pub use types::{Finished, Outgoing, PrefillConfig, PrefillCounts, PrefillPolicy};

use std::collections::{BTreeMap, VecDeque};

use kv_core::machine::SessionCommand;
use kv_core::proto::{Command, Resource};
use kv_core::{
    AuxIndex, ChunkId, FinalLayers, KvManager, KvPoll, KvSender, KvSession, LeaseRef, Pages, Reclaimed,
    RequestCacheGroups, SessionId,
};

use self::entry::{Entry, Stage};
use super::desk::{self, Desk, InLine, Turn};
use super::error::{CacheGroupsRefused, ChunkError, PushError, Refusal, RequestError};
use super::line::Line;
use super::quarantine::Stopped;
use crate::consensus::{Agreed, RankConsensus, RequestKey, SingleRank, Standing};
use crate::kv::Change;

/// The requests of one prefill rank, from arrival until their pages are free again.
///
/// # Contract
///
/// Once per scheduler iteration: [`push`](Self::push) the requests that have arrived, [`step`](Self::step)
/// with the worker's changes, then drain [`drain_finished`](Self::drain_finished) and take requests with
/// [`pop_waiting`](Self::pop_waiting). For each request taken:
///
/// 1. [`init`](Self::init), once;
/// 2. [`send_chunk`](Self::send_chunk) as pages become final; or [`begin_chunk`](Self::begin_chunk) before,
///    and [`layers_final`](Self::layers_final) as layers of the chunk become final;
/// 3. [`give_groups`](Self::give_groups) before the last chunk, if the request has items of cache groups;
/// 4. [`finish`](Self::finish) after the last chunk.
///
/// No method blocks, except [`step`](Self::step) where the server's own collective does. A step costs
/// O(changes), however many requests are in flight.
///
/// Pages given come back in [`Finished`], once, when no data operation can touch them any more. From then on
/// the server may use the aux row given to `init` again, too. The table in [`queue`](super) says what happens
/// on each failure.
///
/// Dropping the queues aborts all sessions. Every page then comes back from the manager, as those of dropped
/// sessions do ([`Manager::orphans`](crate::Manager::orphans)): also pages for which the worker had no room,
/// and pages that nobody took with `drain_finished`.
pub struct PrefillQueues<R, M: KvManager, C: RankConsensus = SingleRank> {
    desk: Desk<M, C>,
    policy: PrefillPolicy,
    entries: BTreeMap<RequestKey, Entry<R, M::Sender>>,
    waiting: Line<()>,
    finished: VecDeque<Finished<R>>,
    newly_failed: Vec<RequestKey>,
    stages: [usize; 5],
    /// Pages of the worker's whole cache.
    pool: usize,
    /// Pages of failed requests that have not come back.
    quarantined: usize,
}

impl<R, M: KvManager, C: RankConsensus> PrefillQueues<R, M, C> {
    /// Empty queues of one rank. `manager` opens the sessions; its geometry says how many pages the cache
    /// has.
    pub fn new(manager: M, consensus: C, config: PrefillConfig) -> Self {
        PrefillQueues {
            pool: manager.args().geometry().num_pages as usize,
            quarantined: 0,
            desk: Desk::new(manager, consensus, config.quarantine),
            policy: config.policy,
            entries: BTreeMap::new(),
            waiting: Line::new(),
            finished: VecDeque::new(),
            newly_failed: Vec::new(),
            stages: [0; 5],
        }
    }

    /// Opens the request's sender and enters the request into the bootstrap queue, or with
    /// [`PrefillPolicy::Eager`] into the waiting queue. On an error the request comes back.
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
                pool: None,
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

    /// Takes the changes since the last step, agrees on them with the other ranks, and retries the commands
    /// for which the worker had no room. Call once per scheduler iteration, also without changes.
    ///
    /// On an error the ranks have not agreed, and no request moves on; the next step tries again.
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

    /// The next request for the forward pass, if `admit` accepts it. Only the first in line is offered, so
    /// that small requests cannot overtake a large one for ever. Where ranks go at their own speeds, the first in
    /// line is the same one on all ([`turn`](RankConsensus::turn)). `None` while admission is
    /// [`stopped`](Self::stopped).
    pub fn pop_waiting(&mut self, admit: impl FnOnce(RequestKey, &mut R) -> bool) -> Option<RequestKey> {
        if self.desk.stopped.is_some() {
            return None;
        }
        let (first, ()) = self.waiting.front()?;
        let entries = &self.entries;
        let is_in_line = |key| entries.get(&key).map_or(InLine::Never, Entry::is_in_line);
        let Turn::Of(key) = self.desk.turn(Some(first), is_in_line) else { return None };
        let entry = self.entries.get_mut(&key)?;
        if !admit(key, &mut entry.request) {
            return None;
        }
        move_to(&mut self.stages, entry, Stage::Forward);
        self.waiting.remove(key);
        self.desk.took_turn();
        Some(key)
    }

    /// Announces how many pages the request will send, and the aux row that travels with the last of them.
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

    /// Gives the request's next pages. Their content must be final, and with the last pages that of the aux
    /// row, too. A chunk for which the worker has no room is kept, in order, and given at a later step.
    pub fn send_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<(), ChunkError> {
        self.give_chunk(key, pages, |session, chunk| Command::Send { session, chunk }).map(drop)
    }

    /// Gives the request's next pages before they are computed. [`layers_final`](Self::layers_final) then
    /// says which of their layers are final. Kept for a later step, as with `send_chunk`, if the worker has
    /// no room. Returns the number of the chunk.
    pub fn begin_chunk(&mut self, key: RequestKey, pages: Pages) -> Result<ChunkId, ChunkError> {
        self.give_chunk(key, pages, |session, chunk| Command::BeginChunk { session, chunk })
    }

    /// Says that layers of a chunk are final, now or once a ready event has passed: they are moved while the
    /// forward pass goes on. Kept for a later step, as with `send_chunk`, if the worker has no room. May be
    /// called after `finish`.
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

    /// Gives the items of the request's cache groups (SSM slots, pages of a sliding window). Call this once,
    /// before the chunk that completes the request; the items' content must be final with that chunk. Kept
    /// for a later step, as with `send_chunk`, if the worker has no room.
    pub fn give_groups(
        &mut self,
        key: RequestKey,
        groups: RequestCacheGroups,
    ) -> Result<(), CacheGroupsRefused> {
        let Some(entry) = self.entries.get_mut(&key) else {
            return Err(CacheGroupsRefused { groups, reason: Refusal::Ended { key } });
        };
        let order = if entry.grouped || entry.stage == Stage::Inflight {
            Err(Refusal::GroupsOrder { key })
        } else {
            entry.check_popped(key)
        };
        if let Err(reason) = order {
            return Err(CacheGroupsRefused { groups, reason });
        }
        entry.grouped = true;
        let session = entry.session.id();
        self.say(key, Command::RequestCacheGroups { session, groups });
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
        if let Err(reason) = entry.check_chunk(key, &pages) {
            return Err(ChunkError { pages, reason });
        }
        if entry.pool.is_none() && !pages.is_empty() {
            entry.pool = Some(pages.none_of_pool());
        }
        entry.given += pages.len();
        let (number, session) = (entry.next_chunk(), entry.session.id());
        self.say(key, command(session, pages));
        Ok(number)
    }

    /// Gives a command to a request's session, after the commands that are kept.
    fn say(&mut self, key: RequestKey, command: Command) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.kept.push_back(command);
        if !entry.in_backlog && !entry.flush() {
            entry.in_backlog = true;
            self.desk.enqueue(key);
        }
    }

    /// Says that the forward pass is over and all announced pages have been given. For a request without
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

    /// Ends a request at any stage; false if the request has ended already. The request comes out of
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

    /// The next request that has ended and whose pages are free again; `None` if there is none at the moment.
    pub fn drain_finished(&mut self) -> Option<Finished<R>> {
        self.finished.pop_front()
    }

    /// The requests that failed in the last step. Their clients can be told at once, while the pages may
    /// still be in quarantine.
    pub fn newly_failed(&self) -> &[RequestKey] {
        &self.newly_failed
    }

    /// The leases of a request's pages, which a router carries to the receiver in pull mode; `None` if the
    /// request is not in the queues.
    pub fn lease_refs(&self, key: RequestKey) -> Option<Vec<LeaseRef>> {
        self.entries.get(&key).map(|entry| entry.session.lease_refs())
    }

    /// Why a request that is still in the queues has failed; `None` if it has not.
    pub fn failure(&self, key: RequestKey) -> Option<&RequestError> {
        let entry = self.entries.get(&key).filter(|entry| entry.stage == Stage::Failing)?;
        entry.error.as_ref()
    }

    /// The server's request with this key; `None` if the request is not in the queues.
    pub fn request(&self, key: RequestKey) -> Option<&R> {
        self.entries.get(&key).map(|entry| &entry.request)
    }

    /// The server's request with this key, to be changed; `None` if the request is not in the queues.
    pub fn request_mut(&mut self, key: RequestKey) -> Option<&mut R> {
        self.entries.get_mut(&key).map(|entry| &mut entry.request)
    }

    /// Why `pop_waiting` offers no request: so much of the cache is in quarantine that
    /// [`PrefillConfig::quarantine`] stops admission. As of the last step; `None` while requests are
    /// admitted. Requests in their forward pass go on.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.desk.stopped.as_ref()
    }

    /// How many requests are in each stage.
    pub fn counts(&self) -> PrefillCounts {
        let [bootstrap, waiting, forward, inflight, failing] = self.stages;
        PrefillCounts { bootstrap, waiting, forward, inflight, failing }
    }

    /// How many requests are in the queues, not counting those that wait in `drain_finished`.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if no request is in the queues.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The manager that opens the sessions.
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

    /// Takes the pages of an ended request out of its session, and finishes the request.
    fn reclaim(&mut self, key: RequestKey) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let Some(reclaimed) = self.desk.reclaim(key, &mut entry.session) else { return };
        let Some(entry) = self.entries.remove(&key) else { return };
        let Reclaimed { mut pages, mut groups, .. } = reclaimed;
        let room = entry.session.room().clone();
        for kept in entry.kept.into_iter().filter_map(Command::into_resource) {
            match kept {
                Resource::Pages(chunk) => {
                    let refused = pages.append(chunk);
                    debug_assert!(refused.is_ok(), "the pages of one request are of two pools");
                }
                // Items are given once, so the session has none.
                Resource::RequestCacheGroups { groups: kept, .. } => groups = kept,
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

impl<R, M: KvManager, C: RankConsensus> Drop for PrefillQueues<R, M, C> {
    fn drop(&mut self) {
        // No data operation knows of what the sessions have not taken, nor of what they gave back.
        for (_, Entry { session, kept, .. }) in std::mem::take(&mut self.entries) {
            drop(session);
            for left in kept.into_iter().filter_map(Command::into_resource) {
                self.desk.manager.leave_behind(match left {
                    Resource::Pages(pages) => reclaimed(pages, RequestCacheGroups::none()),
                    Resource::RequestCacheGroups { groups, .. } => reclaimed(Pages::none(), groups),
                });
            }
        }
        for Finished { pages, groups, .. } in std::mem::take(&mut self.finished) {
            self.desk.manager.leave_behind(reclaimed(pages, groups));
        }
    }
}

/// Pages and items as a session hands them back.
fn reclaimed(pages: Pages, groups: RequestCacheGroups) -> Reclaimed {
    let mut reclaimed = Reclaimed::new(pages);
    reclaimed.groups = groups;
    reclaimed
}

fn move_to<R, S>(stages: &mut [usize; 5], entry: &mut Entry<R, S>, stage: Stage) {
    stages[entry.stage as usize] -= 1;
    stages[stage as usize] += 1;
    entry.stage = stage;
}
