//! Sending sessions: this worker has the KV of a request, and a vLLM engine reads the KV (pull), or this worker
//! writes the KV into the engine's memory (push).
//!
//! ```text
//! both: open ─▶ WaitingForInput ─ send ─▶ Transferring ─ complete ─▶ the lease runs; heartbeats extend the lease
//! pull: every reader has notified this worker      ─▶ Success, pages back
//!       the lease or the deadline is over, or abort ─▶ Failed; pages back after `read_bound`
//! push: a receiver has registered: no lease; what is final is written
//!       everything is written                       ─▶ Success, pages back
//!       a write, the lease or the deadline failed, or abort ─▶ Failed; pages back when the writes have ended
//! ```
//!
//! In both modes a session waits for no receiver before it takes pages, as in vLLM: the router may choose the
//! receiver when the pages are complete.
//!
//! | file | holds |
//! |---|---|
//! | `leases.rs` | pull: readers; both modes: leases |
//! | `writing.rs` | push: one session and its receiver |
//! | `ranks.rs` | push: the ranks of receivers, from an address to a connected agent |
//! | `registrations.rs` | push: registrations that come before their sender |

mod leases;
mod ranks;
mod registrations;
#[cfg(test)]
mod tests;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::layout::HeldLayers;
use kv_core::proto::Given;
use kv_core::trace::KvWhat;
use kv_core::{
    AuxIndex, Cause, ChunkId, KvArgs, KvPoll, Lease, PageList, Pages, Phase, Quarantine, ReadyEventError,
    RequestCacheGroups, RequestId, Room, SessionId, SessionOptions, Time, TransferMode,
};

use super::config::{VllmConfig, VllmTiming};
use super::context::Context;
use super::geometry::CacheError;
use crate::flows::{Bounds, FlowId, Flows};
use crate::gauges::Ignored;
use crate::sessions::{Due, Sessions};
use leases::{Readers, sane};
use ranks::{RankNo, Ranks};
use registrations::Registrations;
use writing::Writing;

/// All sending sessions of a worker.
#[derive(Debug)]
pub(crate) struct Producer {
    timing: VllmTiming,
    /// What a session does whose options do not say.
    mode: TransferMode,
    engine: Arc<str>,
    tp_size: u32,
    num_pages: u32,
    held_layers: HeldLayers,
    sessions: Sessions<Sender>,
    /// The requests of all sessions, open ones and those whose pages are held.
    requests: BTreeMap<Arc<str>, SessionId>,
    /// The end of each lease that runs.
    leases: BTreeSet<(Time, SessionId)>,
    /// How many complete pages are pinned for readers.
    pages_leased: usize,
    /// The open sessions that write, by the base of their requests.
    bases: BTreeMap<String, SessionId>,
    registrations: Registrations,
    ranks: Ranks,
    flows: Flows,
    /// The session of each flow.
    writers: BTreeMap<FlowId, SessionId>,
    /// Why no session is opened any more: the worker drains, or is stopping.
    closed: Option<Cause>,
}

/// What is kept of one sending session.
#[derive(Debug)]
struct Sender {
    /// The id by which vLLM engines name the request.
    request: Arc<str>,
    given: Given<PageList>,
    lease: Lease,
    /// Until when the pages are pinned under the lease; `None` until they are complete, and while they have a
    /// receiver.
    pinned_until: Option<Time>,
    /// How many pages the lease pins while the lease runs.
    pages_pinned: usize,
    way: Way,
}

/// How the pages of a session get to the vLLM engine.
#[derive(Debug)]
enum Way {
    /// Pull: the engine reads.
    Read(Readers),
    /// Push: this worker writes.
    Write(Box<Writing>),
}

impl Sender {
    fn has_receiver(&self) -> bool {
        matches!(&self.way, Way::Write(writing) if writing.has_receiver())
    }

    fn phase(&self) -> Phase {
        match &self.way {
            Way::Read(_) if self.pinned_until.is_some() => Phase::Transfer,
            Way::Read(_) => Phase::Rendezvous,
            Way::Write(writing) => writing.phase(),
        }
    }
}

impl Producer {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> Result<Producer, CacheError> {
        let (timing, limits) = (config.timing, config.limits);
        let bounds = Bounds {
            descriptors: args.max_sge(),
            bytes: limits.max_post_bytes,
            in_flight: args.max_inflight(),
        };
        Ok(Producer {
            timing,
            mode: args.transfer_mode(),
            engine: args.worker().engine.as_str().into(),
            tp_size: args.geometry().parallel.tp_size,
            num_pages: args.geometry().num_pages,
            held_layers: HeldLayers::new(args.geometry()),
            sessions: Sessions::default(),
            requests: BTreeMap::new(),
            leases: BTreeSet::new(),
            pages_leased: 0,
            bases: BTreeMap::new(),
            registrations: Registrations::new(limits.max_registrations, timing.registration_ttl),
            ranks: Ranks::new(args, config)?,
            flows: Flows::new(bounds),
            writers: BTreeMap::new(),
            closed: None,
        })
    }

    /// True if the session is one of these, even if it has ended and its pages are held.
    pub(crate) fn has(&mut self, session: SessionId) -> bool {
        self.sessions.any(session).is_some()
    }

    /// How many complete pages are pinned for readers.
    pub(crate) fn leased(&self) -> usize {
        self.pages_leased
    }

    pub(crate) fn quarantine(&self, now: Time) -> Vec<Quarantine> {
        self.sessions.quarantine(now)
    }

    pub(crate) fn open(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        (room, receivers): (Room, u32),
        options: &SessionOptions,
    ) {
        let request: Arc<str> = room.to_string().into();
        let patience = options.deadline.unwrap_or(self.timing.session_deadline);
        let lease = sane(options.lease.unwrap_or(Lease::Renewable(self.timing.kv_lease_duration)));
        let writes = options.mode.unwrap_or(self.mode) == TransferMode::Push;
        let way = match writes {
            true => Way::Write(Box::default()),
            false => Way::Read(Readers::new(receivers)),
        };
        let (given, pinned_until) = (Given::default(), None);
        let sender =
            Sender { request: Arc::clone(&request), given, lease, pinned_until, pages_pinned: 0, way };
        self.sessions.open(session, room.clone(), cx.now, patience, sender);
        if let Some(cause) = self.closed.clone() {
            return self.fail(cx, session, cause);
        }
        let base = RequestId::base_of(&request).to_owned();
        let other = self.bases.get(&base).filter(|_| writes).or_else(|| self.requests.get(&request)).copied();
        if let Some(other) = other.and_then(|other| self.sessions.any(other)) {
            // What vLLM tells of the earlier request would be taken for this one.
            let other = other.room.clone();
            return self.fail(cx, session, Cause::AmbiguousRoom { room, other });
        }
        if writes {
            self.bases.insert(base, session);
        }
        self.requests.insert(Arc::clone(&request), session);
        self.sessions.advance(&mut cx.effects, session, KvPoll::WaitingForInput);
        if let Some(registered) = self.registrations.take(&request).filter(|_| writes) {
            self.bind(cx, session, registered);
        }
    }

    pub(crate) fn init(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        num_pages: usize,
        aux: Option<AuxIndex>,
    ) {
        let Some(sender) = self.sender(session) else { return };
        let first = sender.given.announce(num_pages, aux);
        if !first {
            self.fail(cx, session, Cause::InitOrder);
        } else if aux.is_some() {
            // vLLM's protocol moves no aux rows.
            self.fail(cx, session, Cause::AuxOneSided { sender: true, receiver: false });
        } else {
            self.advance(cx, session);
        }
    }

    /// Takes the items of cache groups, which vLLM's protocol as spoken here does not move.
    pub(crate) fn groups(&mut self, cx: &mut Context, session: SessionId, groups: RequestCacheGroups) {
        let first = groups.iter().next().map(|items| items.group);
        self.sessions.lend(&mut cx.effects, session, groups.into());
        if let Some(group) = first {
            self.fail(cx, session, Cause::UnknownGroup { group });
        }
    }

    /// Takes the pages of a chunk, all of which are final.
    pub(crate) fn send(&mut self, cx: &mut Context, session: SessionId, chunk: Pages) {
        if let Some(chunk) = self.begin_chunk(cx, session, chunk) {
            self.layers_final(cx, session, chunk, None);
        }
    }

    /// Takes the next pages, of which no layer is final. Returns the number of the chunk, unless the session has
    /// ended.
    pub(crate) fn begin_chunk(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        chunk: Pages,
    ) -> Option<ChunkId> {
        let list = chunk.list().clone();
        let bad = list.check_below(self.num_pages).err();
        let pages = list.len();
        self.sessions.lend(&mut cx.effects, session, chunk.into());
        let begun = self.sender(session)?.given.begin(list);
        match (begun, bad) {
            (Ok(chunk), None) => {
                cx.tell(session, || KvWhat::ChunkGiven { chunk, pages });
                return Some(chunk);
            }
            (Ok(_), Some(bad)) => self.fail(cx, session, Cause::BadPages(bad)),
            (Err(cause), _) => self.fail(cx, session, cause),
        }
        None
    }

    /// Layers of a chunk are final; `None` for all layers of this rank.
    pub(crate) fn layers_final(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        chunk: ChunkId,
        layers: Option<Range<u32>>,
    ) {
        let Some(sender) = self.sessions.live(session) else { return };
        if let Err(error) = sender.dialect.given.finish(chunk, layers, &self.held_layers) {
            return self.fail(cx, session, error.into());
        }
        self.sessions.advance(&mut cx.effects, session, KvPoll::Transferring);
        self.pin_if_complete(cx, session);
        self.advance(cx, session);
    }

    /// The ready event of an announcement has failed: the pages may be half computed.
    pub(crate) fn ready_event_failed(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        chunk: ChunkId,
        error: ReadyEventError,
    ) {
        self.fail(cx, session, Cause::ReadyEvent { chunk, error });
    }

    pub(crate) fn abort(&mut self, cx: &mut Context, session: SessionId) {
        self.fail(cx, session, Cause::Aborted);
    }

    /// Opens no session any more. Readers of leases, and engines that have registered for a session that is
    /// open, are served. vLLM's protocol has no word by which a registration for another request could be
    /// refused: it waits at the engine until that gives the request up.
    pub(crate) fn drain(&mut self) {
        self.closed.get_or_insert(Cause::Draining);
    }

    /// Ends all sessions, and opens none from now on.
    pub(crate) fn stop(&mut self, cx: &mut Context) {
        self.closed = Some(Cause::WorkerStopped);
        for session in self.sessions.live_ids() {
            self.fail(cx, session, Cause::WorkerStopped);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let lease = self.leases.first().map(|(at, _)| *at);
        let others = [self.sessions.next_due(), self.registrations.next_expiry(), self.ranks.next_timeout()];
        lease.into_iter().chain(others.into_iter().flatten()).min()
    }

    pub(crate) fn timeout(&mut self, cx: &mut Context) {
        while let Some(news) = self.ranks.overdue(cx) {
            self.take_news(cx, news);
        }
        self.expire_leases(cx);
        for _ in 0..self.registrations.expire(cx.now) {
            cx.ignore(Ignored::NoRoom);
        }
        while let Some(due) = self.sessions.due(cx.now) {
            match due {
                Due::Deadline(session) => {
                    let after = self.sessions.any(session).map_or(Duration::ZERO, |open| open.patience);
                    self.fail(cx, session, Cause::DeadlineExceeded { after, last: None });
                }
                Due::Free(session) => self.free(cx, session),
            }
        }
    }

    fn sender(&mut self, session: SessionId) -> Option<&mut Sender> {
        self.sessions.live(session).map(|session| &mut session.dialect)
    }

    fn succeed(&mut self, cx: &mut Context, session: SessionId) {
        let Some(request) = self.close(cx, session) else { return };
        let ranks = self.take_ranks(session);
        self.sessions.succeed(&mut cx.effects, session);
        self.ranks.leave(cx, session, &ranks);
        self.forget(session, &request);
    }

    /// Ends a session with this cause. The pages stay as long as a reader may read them, or a write is in flight.
    fn fail(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        self.cancel_flows(cx, session);
        let (now, read_bound) = (cx.now, self.timing.read_bound);
        let Some(sender) = self.sender(session) else { return };
        let phase = sender.phase();
        let (peer, held) = match &sender.way {
            Way::Read(readers) => (None, readers.held(sender.pinned_until, now, read_bound)),
            Way::Write(writing) => (writing.peer(), writing.held()),
        };
        let Some(request) = self.close(cx, session) else { return };
        let ranks = self.take_ranks(session);
        self.sessions.fail(&mut cx.effects, session, (peer, phase, cause), held);
        self.ranks.leave(cx, session, &ranks);
        self.forget(session, &request);
    }

    /// Hands the pages of an ended session back.
    fn free(&mut self, cx: &mut Context, session: SessionId) {
        let Some(ended) = self.sessions.any(session) else { return };
        let request = Arc::clone(&ended.dialect.request);
        let ranks = self.take_ranks(session);
        self.sessions.free(&mut cx.effects, session);
        self.ranks.leave(cx, session, &ranks);
        self.forget(session, &request);
    }

    /// Ends the lease of a session that ends, and what waits for the session. Returns the session's request.
    fn close(&mut self, cx: &mut Context, session: SessionId) -> Option<Arc<str>> {
        self.unpin(session);
        let sender = self.sender(session)?;
        let request = Arc::clone(&sender.request);
        let Way::Write(writing) = &sender.way else { return Some(request) };
        let (receiver, base) = (writing.receiver_id(), RequestId::base_of(&request));
        if self.bases.get(base) == Some(&session) {
            self.bases.remove(base);
            self.registrations.end(cx.now, base, receiver);
        }
        Some(request)
    }

    /// The ranks that a session does not need any more: all of them, once no write is in flight.
    fn take_ranks(&mut self, session: SessionId) -> Vec<RankNo> {
        match self.sessions.any(session).map(|session| &mut session.dialect.way) {
            Some(Way::Write(writing)) if writing.held().is_none() => writing.take_ranks(),
            _ => Vec::new(),
        }
    }

    /// Forgets the request of a session that is no more.
    fn forget(&mut self, session: SessionId, request: &Arc<str>) {
        let gone = self.sessions.any(session).is_none();
        if gone && self.requests.get(request) == Some(&session) {
            self.requests.remove(request);
        }
    }
}
