//! Sending sessions: this worker has the KV of a request, and a vLLM engine reads the KV (pull), or this worker
//! writes the KV into the engine's memory (push).
//!
//! ```text
//! pull: open ─▶ WaitingForInput ─ send ─▶ Transferring ─ complete ─▶ the lease runs; heartbeats extend the lease
//!         every reader has notified this worker      ─▶ Success, pages back
//!         the lease or the deadline is over, or abort ─▶ Failed; pages back after `read_bound`
//! ```
//!
//! `leases.rs` keeps the leases of pull.

mod leases;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::layout::HeldLayers;
use kv_core::proto::Given;
use kv_core::trace::KvWhat;
use kv_core::{
    AuxIndex, Cause, ChunkId, KvArgs, KvPoll, PageList, Pages, Phase, Quarantine, ReadyEventError,
    RequestCacheGroups, Room, SessionId, SessionOptions, Time,
};

use super::config::{VllmConfig, VllmTiming};
use super::context::Context;
use crate::sessions::{Due, Held, Sessions};
use leases::Readers;

/// All sending sessions of a worker.
#[derive(Debug)]
pub(crate) struct Producer {
    timing: VllmTiming,
    num_pages: u32,
    held_layers: HeldLayers,
    sessions: Sessions<Sender>,
    /// The requests of all sessions, open ones and those whose pages are held.
    requests: BTreeMap<Arc<str>, SessionId>,
    /// The end of each lease that runs.
    leases: BTreeSet<(Time, SessionId)>,
    /// How many complete pages are pinned for readers.
    pages_leased: usize,
    /// True once the worker stops.
    stopping: bool,
}

/// What is kept of one sending session.
#[derive(Debug)]
struct Sender {
    /// The id by which vLLM engines name the request.
    request: Arc<str>,
    given: Given<PageList>,
    readers: Readers,
}

impl Producer {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> Producer {
        Producer {
            timing: config.timing,
            num_pages: args.geometry().num_pages,
            held_layers: HeldLayers::new(args.geometry()),
            sessions: Sessions::default(),
            requests: BTreeMap::new(),
            leases: BTreeSet::new(),
            pages_leased: 0,
            stopping: false,
        }
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
        let readers = Readers::new(options, receivers, &self.timing);
        let sender = Sender { request: Arc::clone(&request), given: Given::default(), readers };
        self.sessions.open(session, room.clone(), cx.now, patience, sender);
        if self.stopping {
            return self.fail(cx, session, Cause::WorkerStopped);
        }
        if self.requests.contains_key(&request) {
            // The end of the earlier request would be taken for the end of this one.
            return self.fail(cx, session, Cause::AmbiguousRoom { room: room.clone(), other: room });
        }
        self.requests.insert(request, session);
        self.sessions.advance(&mut cx.effects, session, KvPoll::WaitingForInput);
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

    /// Ends all sessions, and opens none from now on.
    pub(crate) fn stop(&mut self, cx: &mut Context) {
        self.stopping = true;
        for session in self.sessions.live_ids() {
            self.fail(cx, session, Cause::WorkerStopped);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let lease = self.leases.first().map(|(at, _)| *at);
        lease.into_iter().chain(self.sessions.next_due()).min()
    }

    pub(crate) fn timeout(&mut self, cx: &mut Context) {
        self.expire_leases(cx);
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
        let Some(request) = self.unpin(session) else { return };
        self.sessions.succeed(&mut cx.effects, session);
        self.forget(session, &request);
    }

    /// Ends a session with this cause. The pages stay as long as a reader may read them.
    fn fail(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        let (now, read_bound) = (cx.now, self.timing.read_bound);
        let Some(sender) = self.sender(session) else { return };
        let phase = if sender.readers.is_pinned() { Phase::Transfer } else { Phase::Rendezvous };
        let held: Option<Held> = sender.readers.held(now, read_bound);
        let Some(request) = self.unpin(session) else { return };
        self.sessions.fail(&mut cx.effects, session, (None, phase, cause), held);
        self.forget(session, &request);
    }

    /// Hands the pages of an ended session back.
    fn free(&mut self, cx: &mut Context, session: SessionId) {
        let Some(ended) = self.sessions.any(session) else { return };
        let request = Arc::clone(&ended.dialect.request);
        self.sessions.free(&mut cx.effects, session);
        self.forget(session, &request);
    }

    /// Forgets the request of a session that is no more.
    fn forget(&mut self, session: SessionId, request: &Arc<str>) {
        let gone = self.sessions.any(session).is_none();
        if gone && self.requests.get(request) == Some(&session) {
            self.requests.remove(request);
        }
    }
}
