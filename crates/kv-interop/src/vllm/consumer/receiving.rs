//! One receiving session: from its opening to the return of its pages.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{
    BootstrapError, Cause, Mismatch, Obstacle, PageList, Phase, QuarantineReason, RemoteRequest, Room,
    SessionId, SessionOptions, TransferMode, WorkerId, WorkerRole,
};

use super::super::context::Context;
use super::Consumer;
use super::engine::{EngineNo, Key, Rank, Stage};
use super::lease::Lease;
use crate::cache::differs;
use crate::flows::FlowId;
use crate::sessions::Held;

/// Most ranks of an engine with which one rank exchanges pages.
const MAX_RANKS: usize = 4096;

/// What is kept of one receiving session.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) mode: TransferMode,
    pub(super) engine: EngineNo,
    pub(super) remote: RemoteRequest,
    /// Pages of the request before those that were given.
    pub(super) prefix: usize,
    /// The pages that were given.
    pub(super) pages: Option<PageList>,
    pub(super) lease: Lease,
    pub(super) progress: Progress,
    /// The reads of this worker that have not ended.
    pub(super) flows: BTreeSet<FlowId>,
    /// The id of the request at an engine that writes, which the engine's notifications name.
    pub(super) own_id: String,
    /// The agents that have written.
    pub(super) written: BTreeSet<String>,
    /// How many agents write, as far as agents have said.
    pub(super) writers: usize,
    /// True once the engine was told that this worker reads the request no more.
    pub(super) released: bool,
}

/// How far a session has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Progress {
    /// The handshake has not ended, or the pages were not given.
    Waiting,
    /// This worker reads the pages (pull).
    Reading,
    /// The pages are registered, and the engine may write (push).
    Registered,
}

impl Receiving {
    pub(super) fn is_pull(&self) -> bool {
        self.mode == TransferMode::Pull
    }

    /// True if every rank of the engine has written.
    pub(super) fn is_written(&self) -> bool {
        self.writers > 0 && self.written.len() >= self.writers
    }
}

impl Consumer {
    pub(super) fn open_session(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        room: Room,
        addr: String,
        options: SessionOptions,
    ) {
        let patience = options.deadline.unwrap_or(self.config.session_deadline);
        let found = self.engine_of(cx, addr, &options);
        let (mode, no, remote) = match found {
            Ok(found) => found,
            Err(cause) => return refuse(cx, session, room, cause),
        };
        let own_id = self.new_request_id(&remote);
        let name = (remote.engine.clone(), name_of(mode, &remote));
        if let Some(other) = self.requests.get(&name).copied() {
            let other = self.sessions.any(other).map_or_else(|| room.clone(), |open| open.room.clone());
            return refuse(cx, session, room.clone(), Cause::AmbiguousRoom { room, other });
        }
        let Some(lease) = self.lease_of(cx, mode, options.source, &remote) else {
            return refuse(cx, session, room, Cause::LeaseExpired);
        };
        self.requests.insert(name, session);
        let receiving = Receiving {
            mode,
            engine: no,
            remote,
            prefix: options.prefix_pages,
            pages: None,
            lease,
            progress: Progress::Waiting,
            flows: BTreeSet::new(),
            own_id: own_id.clone(),
            written: BTreeSet::new(),
            writers: 0,
            released: false,
        };
        if mode == TransferMode::Push {
            self.registered.insert(own_id, session);
        }
        self.sessions.open(session, room, cx.now, patience, receiving);
        let Some(engine) = self.engines.get(no) else { return };
        engine.users.insert(session);
        match engine.stage {
            Stage::Ready => {
                self.sessions.advance(&mut cx.effects, session, kv_core::KvPoll::WaitingForInput);
                self.beat_if_due(cx, no);
            }
            Stage::Resting { until } if until <= cx.now => self.begin_try(cx, no),
            _ => {}
        }
    }

    /// The engine that has the KV of a session, or why there can be none.
    fn engine_of(
        &mut self,
        cx: &mut Context,
        addr: String,
        options: &SessionOptions,
    ) -> Result<(TransferMode, EngineNo, RemoteRequest), Cause> {
        if let Some(cause) = self.closed.clone() {
            return Err(cause);
        }
        if host_and_port(&addr).is_none() {
            return Err(Cause::Bootstrap(BootstrapError::Address(addr)));
        }
        let Some(remote) = options.remote.as_deref().cloned() else {
            return Err(incompatible("kv_transfer_params", "none", "needed by vLLM's protocol"));
        };
        let mode = mode_of(options.mode, self.mode, &remote).map_err(Cause::Incompatible)?;
        if remote.dcp_size > 1 {
            return Err(incompatible("dcp_size", "1", remote.dcp_size));
        }
        if remote.block_ids.len() > 1 {
            return Err(incompatible("remote_block_ids", "1 cache group", remote.block_ids.len()));
        }
        let generation = remote.registration_generation.unwrap_or(0);
        let key = Key {
            engine: remote.engine.clone(),
            addr,
            tp_size: remote.tp_size,
            pp_size: remote.pp_size,
            push: mode == TransferMode::Push,
        };
        if let Some(no) = self.engines.current(&key)
            && let Some(known) = self.engines.get(no).map(|engine| engine.generation)
        {
            if remote.registration_generation.is_none() || generation == known {
                return Ok((mode, no, remote));
            }
            if generation < known {
                // The engine has registered its memory again since, and lost the pages.
                return Err(Cause::PeerRestarted);
            }
            self.lose(cx, no, &Cause::PeerRestarted);
        }
        let ranks = self.ranks_of(&remote).map_err(Cause::Incompatible)?;
        if self.engines.is_full() {
            let Some(idlest) = self.engines.idlest() else {
                return Err(Cause::TooManyPeers { max: self.engines.max() });
            };
            self.forget_engine(cx, idlest);
        }
        let no = self.engines.add(key, generation, ranks, cx.now);
        Ok((mode, no, remote))
    }

    /// The lease of a session that is opened now; `None` if the engine has no pages for the session any more.
    fn lease_of(
        &mut self,
        cx: &Context,
        mode: TransferMode,
        source: Option<WorkerRole>,
        remote: &RemoteRequest,
    ) -> Option<Lease> {
        let duration = self.config.kv_lease_duration;
        let lease = match source {
            Some(WorkerRole::Decode) => Lease::Told(remote.expires_at),
            _ => Lease::renewed(cx.now, duration),
        };
        if mode == TransferMode::Push {
            return Some(lease);
        }
        let until = lease.remembered_until(cx.now + duration);
        let first = self.used.open(cx.now, remote, until)?;
        Some(if matches!(lease, Lease::Told(_)) { lease } else { Lease::renewed(first, duration) })
    }

    /// The ranks of the engine that this rank needs: by pipeline stage, then by tensor-parallel rank.
    fn ranks_of(&self, remote: &RemoteRequest) -> Result<Vec<Rank>, Mismatch> {
        let peers = self.cache.peers(remote.tp_size)?;
        let ranks = peers.len().saturating_mul(remote.pp_size as usize);
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(differs("pp_size", format!("1 to {MAX_RANKS} ranks"), format!("{ranks} ranks")));
        }
        let rank = |(pp_rank, tp_rank): (u32, u32)| Rank {
            worker: WorkerId { engine: remote.engine.clone(), rank: pp_rank * remote.tp_size + tp_rank },
            pp_rank,
            tp_rank,
            metadata: None,
            agent: None,
            connected: false,
            ended: false,
            forerunner: None,
            silent_since: None,
            pages: None,
        };
        Ok((0..remote.pp_size).flat_map(|pp| peers.clone().map(move |tp| (pp, tp))).map(rank).collect())
    }

    /// Takes the pages of a session.
    pub(super) fn take_pages(&mut self, cx: &mut Context, session: SessionId, pages: PageList) {
        let bad = pages.check_below(self.cache.geometry.num_pages).and_then(|()| pages.check_distinct());
        let Some(live) = self.sessions.live(session) else { return };
        if let Err(bad) = bad {
            return self.fail(cx, session, Cause::BadPages(bad));
        }
        if live.dialect.pages.replace(pages).is_some() {
            return self.fail(cx, session, Cause::InitOrder);
        }
        self.start(cx, session);
    }

    /// Lets the pages of a session come, if the engine is ready and the pages were given.
    pub(super) fn start(&mut self, cx: &mut Context, session: SessionId) {
        let Some(live) = self.sessions.live(session) else { return };
        let (no, pull) = (live.dialect.engine, live.dialect.is_pull());
        let Some(pages) = live.dialect.pages.clone().filter(|_| live.dialect.progress == Progress::Waiting)
        else {
            return;
        };
        if !self.engines.get(no).is_some_and(|engine| engine.stage == Stage::Ready) {
            return;
        }
        self.moving(cx, session);
        match pull {
            true => self.read(cx, session, &pages),
            false => self.register(cx, session, &pages),
        }
    }

    /// Ends a session in success.
    pub(super) fn finish(&mut self, cx: &mut Context, session: SessionId) {
        self.release_at_engine(cx, session);
        self.forget_names(session);
        let Some(no) = self.sessions.live(session).map(|live| live.dialect.engine) else { return };
        self.sessions.succeed(&mut cx.effects, session);
        self.leave(cx, session, no);
    }

    /// Ends a session with this cause. Its pages stay as long as anything may touch them.
    pub(super) fn fail(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        let Some(live) = self.sessions.live(session) else { return };
        let no = live.dialect.engine;
        for flow in live.dialect.flows.clone() {
            if let Some(ended) = self.flows.cancel(&mut cx.effects, flow) {
                self.readings.remove(&ended.flow);
                if let Some(live) = self.sessions.live(session) {
                    live.dialect.flows.remove(&ended.flow);
                }
            }
        }
        let Some(live) = self.sessions.live(session) else { return };
        let receiving = &live.dialect;
        let ready = self.engines.get(no).map(|engine| (engine.stage == Stage::Ready, engine.ranks.first()));
        let (ready, peer) =
            ready.map_or((false, None), |(ready, rank)| (ready, rank.map(|rank| rank.worker.clone())));
        let held = |reason| Some(Held { reason, peer: peer.clone(), until: None });
        let held = match &receiving.progress {
            Progress::Reading if receiving.flows.is_empty() => None,
            Progress::Reading => held(QuarantineReason::OwnPosts),
            _ if receiving.is_written() => None,
            Progress::Waiting if receiving.written.is_empty() => None,
            // The engine writes to this rank, too, if another rank of this engine has registered.
            _ => held(QuarantineReason::Unacknowledged),
        };
        let phase = match receiving.progress {
            Progress::Waiting if !ready => Phase::Handshake,
            Progress::Waiting => Phase::Rendezvous,
            _ => Phase::Transfer,
        };
        if held.is_none() {
            self.release_at_engine(cx, session);
            self.forget_names(session);
        }
        self.sessions.fail(&mut cx.effects, session, (peer, phase, cause), held);
        self.leave(cx, session, no);
    }

    pub(super) fn deadline(&mut self, cx: &mut Context, session: SessionId) {
        let Some(live) = self.sessions.live(session) else { return };
        let (after, no, flows) = (live.patience, live.dialect.engine, live.dialect.flows.clone());
        let busy: BTreeMap<_, _> =
            flows.iter().filter_map(|flow| Some((*flow, self.readings.get(flow)?.1))).collect();
        let rank = busy.values().next().copied();
        let last = self.engines.get(no).and_then(|engine| {
            let rank = engine.ranks.get(rank?)?;
            Some(Obstacle::Stuck { peer: rank.worker.clone(), posts: self.flows.in_flight(rank.agent?) })
        });
        self.fail(cx, session, Cause::DeadlineExceeded { after, last });
    }

    /// Forgets the names of a session whose pages are free, at the engine and here.
    fn forget_names(&mut self, session: SessionId) {
        let Some(open) = self.sessions.any(session) else { return };
        let receiving = &open.dialect;
        if self.registered.get(&receiving.own_id) == Some(&session) {
            self.registered.remove(&receiving.own_id);
        }
        let name = (receiving.remote.engine.clone(), name_of(receiving.mode, &receiving.remote));
        self.requests.remove(&name);
    }

    /// Hands the pages of an ended session back.
    pub(super) fn free(&mut self, cx: &mut Context, session: SessionId) {
        self.release_at_engine(cx, session);
        self.forget_names(session);
        let Some(no) = self.sessions.any(session).map(|open| open.dialect.engine) else { return };
        self.sessions.free(&mut cx.effects, session);
        self.leave(cx, session, no);
    }

    /// Takes a session that has ended off its engine, unless its pages are held.
    fn leave(&mut self, cx: &mut Context, session: SessionId, no: EngineNo) {
        let held = self.sessions.any(session).is_some();
        let Some(engine) = self.engines.get(no) else { return };
        engine.users.remove(&session);
        if held {
            engine.ended.insert(session);
        } else {
            engine.ended.remove(&session);
        }
        if engine.is_idle() {
            engine.idle_since = cx.now;
        }
        self.sweep(cx, no);
    }

    /// An engine is lost: its sessions fail, and the next session asks for the engine again. Pages that the engine
    /// may write stay.
    pub(super) fn lose(&mut self, cx: &mut Context, no: EngineNo, cause: &Cause) {
        self.engines.give_to_nobody(no);
        let Some(engine) = self.engines.get(no) else { return };
        engine.farewells.clear();
        let users: Vec<_> = engine.users.iter().copied().collect();
        for session in users {
            self.fail(cx, session, cause.clone());
        }
        self.sweep(cx, no);
    }

    /// Forgets a lost engine once no session needs it.
    pub(super) fn sweep(&mut self, cx: &mut Context, no: EngineNo) {
        if self.engines.get(no).is_some_and(|engine| engine.lost && engine.is_idle()) {
            self.forget_engine(cx, no);
        }
    }
}

/// The mode of a session with these options, at a worker of this mode. A registration ends the step of an engine in
/// pull mode, so that push needs the word of the engine, or that of the session's own options.
fn mode_of(
    session: Option<TransferMode>,
    worker: TransferMode,
    remote: &RemoteRequest,
) -> Result<TransferMode, Mismatch> {
    let asked = session.unwrap_or(worker);
    let told = remote.mode.filter(|mode| *mode != TransferMode::Auto);
    match (asked, told) {
        (TransferMode::Auto, Some(told)) => Ok(told),
        (TransferMode::Auto, None) if !remote.block_ids.is_empty() => Ok(TransferMode::Pull),
        (TransferMode::Pull, None) => Ok(asked),
        (TransferMode::Push, None) if session.is_some() => Ok(asked),
        (_, None) => Err(differs("transfer_mode", asked, "not said by the engine")),
        (_, Some(told)) if asked == told => Ok(asked),
        (_, Some(told)) => Err(differs("transfer_mode", asked, told)),
    }
}

/// Ends a session that cannot be opened.
fn refuse(cx: &mut Context, session: SessionId, room: Room, cause: Cause) {
    let error = kv_core::TransferError::new(room, Phase::Bootstrap, cause);
    cx.effects.end(session, Some(error));
}

/// The name by which the engine tells requests apart: where the engine writes, the id without its suffix.
fn name_of(mode: TransferMode, remote: &RemoteRequest) -> String {
    let id = if mode == TransferMode::Push { remote.request.base() } else { remote.request.as_str() };
    id.to_owned()
}

fn incompatible(field: &str, ours: &str, theirs: impl ToString) -> Cause {
    Cause::Incompatible(differs(field, ours, theirs))
}

/// The parts of `host:port`; `None` for other texts.
pub(super) fn host_and_port(addr: &str) -> Option<(String, u16)> {
    let (host, port) = addr.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}
