//! Receiving sessions: a vLLM engine has the KV of a request, and this worker reads the KV (pull), or the engine
//! writes the KV into this worker's memory (push).
//!
//! ```text
//! open ─▶ Bootstrapping ─ handshake ─▶ WaitingForInput ─ init ─▶ Transferring
//! pull: every rank was read before the lease can be over  ─▶ Success; each rank is told, and frees its pages
//! push: every rank has notified this worker               ─▶ Success
//! abort, deadline, lost engine, expired lease             ─▶ Failed
//! pull: pages come back when this worker's own reads have ended
//! push: pages of a registered request come back when the engine has notified this worker after all, or when its side
//!       channel is dead and all of its agents have ended
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `engine.rs` | one vLLM engine: its ranks, its side channel, its clock, and the sessions that need it |
//! | `handshake.rs` | the way from an address to connected agents |
//! | `death.rs` | what the end of a side channel proves, and what the ends of the agents prove |
//! | `lease.rs` | how long the pages of a request can be relied on |
//! | `used.rs` | which transfer parameters were used before |
//! | `heartbeat.rs` | what keeps the pages of requests at their holder |
//! | `receiving.rs` | one session: from its opening to the return of its pages |
//! | `pull.rs`, `push.rs` | how the pages of a request come |
//! | `config.rs` | what of the worker's settings the receiving sessions need |

mod config;
mod death;
mod engine;
mod handshake;
mod heartbeat;
mod lease;
mod pull;
mod push;
mod receiving;
#[cfg(test)]
mod tests;
mod used;

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::random::SplitMix64;
use kv_core::{
    AuxIndex, Cause, EngineId, KvArgs, Pages, PeerId, PostId, Quarantine, RequestCacheGroups, Room,
    SessionId, SessionOptions, Time, TransferMode, TransportError, WayEnd,
};

use super::config::VllmConfig;
use super::context::Context;
use super::geometry::{CacheError, OwnCache};
use crate::flows::{Bounds, FlowId, Flows};
use crate::sessions::{Due, Sessions};

use config::ConsumerConfig;
use engine::Engines;
use receiving::Receiving;
use used::Used;

/// All receiving sessions of a worker.
///
/// The machine hands every input to the part that knows the session, the peer or the post: the methods answer
/// whether the input was for this part.
#[derive(Debug)]
pub(crate) struct Consumer {
    config: ConsumerConfig,
    cache: OwnCache,
    mode: TransferMode,
    sessions: Sessions<Receiving>,
    engines: Engines,
    flows: Flows,
    /// The session and the rank, by its position in the engine, of each flow that reads.
    readings: BTreeMap<FlowId, (SessionId, usize)>,
    /// The sessions into whose pages a vLLM engine writes, by this worker's id of the request.
    registered: BTreeMap<String, SessionId>,
    /// The requests of all sessions, open ones and those whose pages are held: two sessions for one request would
    /// take each other's ends for their own.
    requests: BTreeMap<(EngineId, String), SessionId>,
    used: Used,
    /// How often each request was opened, by its id without suffix.
    opened: BTreeMap<(EngineId, String), u32>,
    random: SplitMix64,
    /// Why no session is opened any more: the worker drains, or is stopping.
    closed: Option<Cause>,
}

impl Consumer {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> Result<Consumer, CacheError> {
        let config = ConsumerConfig::new(args, config);
        let bounds =
            Bounds { descriptors: args.max_sge(), bytes: config.post_bytes, in_flight: args.max_inflight() };
        Ok(Consumer {
            cache: OwnCache::new(args)?,
            mode: args.transfer_mode(),
            sessions: Sessions::default(),
            engines: Engines::new(config.reader.max_engines),
            flows: Flows::new(bounds),
            readings: BTreeMap::new(),
            registered: BTreeMap::new(),
            requests: BTreeMap::new(),
            used: Used::new(),
            opened: BTreeMap::new(),
            random: SplitMix64::new(config.seed),
            closed: None,
            config,
        })
    }

    /// True if the session is one of these, even if it has ended and its pages are held.
    pub(crate) fn has(&mut self, session: SessionId) -> bool {
        self.sessions.any(session).is_some()
    }

    /// Opens a session. `addr` is the side channel (`host:port`) of the engine that has the KV.
    pub(crate) fn open(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        (room, addr): (Room, String),
        options: SessionOptions,
    ) {
        self.open_session(cx, session, room, addr, options);
    }

    /// Takes the pages of a session: those after the prefix, none if the worker has all of the request.
    pub(crate) fn init(&mut self, cx: &mut Context, session: SessionId, pages: Pages, aux: Option<AuxIndex>) {
        let list = pages.list().clone();
        self.sessions.lend(&mut cx.effects, session, pages.into());
        if aux.is_some() {
            // vLLM's protocol moves no aux rows.
            return self.fail(cx, session, Cause::AuxOneSided { sender: false, receiver: true });
        }
        self.take_pages(cx, session, list);
    }

    /// Takes the items of cache groups, which vLLM's protocol as spoken here does not move.
    pub(crate) fn groups(&mut self, cx: &mut Context, session: SessionId, groups: RequestCacheGroups) {
        let first = groups.iter().next().map(|items| items.group);
        self.sessions.lend(&mut cx.effects, session, groups.into());
        if let Some(group) = first {
            self.fail(cx, session, Cause::UnknownGroup { group });
        }
    }

    pub(crate) fn abort(&mut self, cx: &mut Context, session: SessionId) {
        self.fail(cx, session, Cause::Aborted);
    }

    /// Opens no session any more.
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

    /// Takes a message of a side channel. False if this part has not opened the channel.
    pub(crate) fn message(&mut self, cx: &mut Context, peer: PeerId, parts: &[Bytes]) -> bool {
        let Some(engine) = self.engines.of_channel(peer) else { return false };
        self.answered(cx, engine, parts);
        true
    }

    /// Takes `<id>:<count>` from an agent: a vLLM rank of `count` has written a request. False if this part has no
    /// such request.
    pub(crate) fn written(&mut self, cx: &mut Context, agent: &str, request: &str, count: u32) -> bool {
        let Some(session) = self.registered.get(request).copied() else { return false };
        self.rank_has_written(cx, session, agent, count);
        true
    }

    /// Takes the end of a post; ends of other parts' posts have no effect.
    pub(crate) fn posted(&mut self, cx: &mut Context, post: PostId, result: Result<(), TransportError>) {
        let (gone, came) = (matches!(result, Err(TransportError::PeerGone)), result.is_ok());
        let Some((peer, ended)) = self.flows.post_ended(post, result) else { return };
        if !gone {
            self.judge_silence(cx, peer, came);
        }
        if let Some(ended) = ended {
            self.reading_ended(cx, ended);
        }
        if gone {
            self.way_failed(cx, peer);
        }
        self.read_on(cx, peer);
    }

    /// Takes the news that the way to a peer is open. False if this part has not opened the way.
    pub(crate) fn connected(&mut self, cx: &mut Context, peer: PeerId) -> bool {
        let Some((engine, rank)) = self.engines.of_agent(peer) else {
            return self.engines.of_channel(peer).is_some();
        };
        self.agent_connected(cx, engine, rank);
        true
    }

    pub(crate) fn connect_failed(&mut self, cx: &mut Context, peer: PeerId, error: &TransportError) -> bool {
        let Some(engine) = self.engines.of_peer(peer) else { return false };
        self.try_failed(cx, engine, &Cause::Connect(error.clone()));
        true
    }

    pub(crate) fn peer_gone(&mut self, cx: &mut Context, peer: PeerId, end: WayEnd) -> bool {
        if let Some(engine) = self.engines.of_channel(peer) {
            self.channel_gone(cx, engine, end);
        } else if let Some((engine, rank)) = self.engines.of_agent(peer) {
            self.agent_gone(cx, engine, rank);
        } else {
            return false;
        }
        true
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.engines.next_due().into_iter().chain(self.sessions.next_due()).min()
    }

    pub(crate) fn timeout(&mut self, cx: &mut Context) {
        for engine in self.engines.due(cx.now) {
            self.engine_due(cx, engine);
        }
        while let Some(due) = self.sessions.due(cx.now) {
            match due {
                Due::Deadline(session) => self.deadline(cx, session),
                Due::Free(session) => self.free(cx, session),
            }
        }
    }

    pub(crate) fn quarantine(&self, now: Time) -> Vec<Quarantine> {
        self.sessions.quarantine(now)
    }
}
