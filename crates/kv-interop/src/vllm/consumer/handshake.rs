//! The handshake with a vLLM engine: questions for the metadata of the ranks that this rank needs, one after
//! another as a REQ socket demands, and then the connection of the ranks' agents.
//!
//! Every engine has a handshake of its own, so that an engine that does not answer delays the sessions of no other
//! engine. The side channel stays connected afterwards: its end tells that the engine's process may be gone. The
//! engine is then asked again, and is the same engine only if its agents are the same.

use std::time::Duration;

use bytes::Bytes;
use kv_core::layout::{Geometry, sources};
use kv_core::plan::{PlanError, RegionMap, Side};
use kv_core::{Cause, KvPoll, Mismatch, Time, TransferMode, WayEnd};

use super::super::context::Context;
use super::super::geometry::Place;
use super::super::hash::NIXL_CONNECTOR_VERSION;
use super::super::metadata::{MetadataError, NixlAgentMetadata, answer, question};
use super::super::notification::heartbeat;
use super::Consumer;
use super::engine::{Engine, EngineNo, Stage, rest};
use super::lease::EngineClock;
use crate::cache::{ForeignCache, differs};
use crate::gauges::Ignored;
use crate::message::Way;

/// How long after the end of all tries an engine is asked again whose processes may still write here.
const PROBE: Duration = Duration::from_secs(30);
/// How long the last bytes of an engine's process may be under way after another process has taken its place.
const QUIET_AFTER: Duration = Duration::from_secs(5);

impl Consumer {
    /// Begins a try: connects the side channel, and asks for the first rank.
    pub(super) fn begin_try(&mut self, cx: &mut Context, no: EngineNo) {
        let Some(engine) = self.engines.get(no) else { return };
        if engine.channel.is_none() {
            let peer = cx.effects.connect(&Way::Request { addr: engine.key.addr.clone() });
            engine.channel = Some(peer);
            self.engines.add_channel(no, peer);
        }
        self.ask(cx, no, 0);
    }

    fn ask(&mut self, cx: &mut Context, no: EngineNo, rank: usize) {
        let until = cx.now + self.config.handshake_timeout;
        let Some(engine) = self.engines.get(no) else { return };
        let (Some(channel), Some(asked)) = (engine.channel, engine.ranks.get(rank)) else { return };
        cx.effects.say(channel, vec![question(asked.pp_rank, asked.tp_rank)]);
        engine.stage = Stage::Asking { rank, asked: cx.now, until };
        self.engines.set_due(no, Some(until));
    }

    /// Takes an answer of a side channel.
    pub(super) fn answered(&mut self, cx: &mut Context, no: EngineNo, parts: &[Bytes]) {
        let Some(engine) = self.engines.get(no) else { return };
        let Stage::Asking { rank, asked, .. } = engine.stage else { return cx.ignore(Ignored::NotAsked) };
        match self.read_answer(cx, no, rank, parts, asked) {
            Ok(()) if self.engines.get(no).is_some_and(|engine| rank + 1 < engine.ranks.len()) => {
                self.ask(cx, no, rank + 1);
            }
            Ok(()) => self.join(cx, no),
            // The process of the engine that the sessions want may be gone, and with it the pages.
            Err(Cause::PeerRestarted) => self.engine_died(cx, no, QUIET_AFTER, &Cause::PeerRestarted),
            Err(cause) => self.refuse(cx, no, &cause),
        }
    }

    /// Checks one answer as vLLM does: the hash, then the metadata, then the engine.
    fn read_answer(
        &mut self,
        cx: &mut Context,
        no: EngineNo,
        rank: usize,
        parts: &[Bytes],
        asked: Time,
    ) -> Result<(), Cause> {
        let Some(engine) = self.engines.get(no) else { return Ok(()) };
        let (payload, shown) = answer(parts).map_err(|error| unread("NixlHandshakePayload", &error))?;
        let mode = if engine.key.push { TransferMode::Push } else { TransferMode::Pull };
        let checked = self.config.compatibility.check(mode, &payload.compatibility_hash);
        checked.map_err(Cause::Incompatible)?;
        let metadata = NixlAgentMetadata::decode(&payload.agent_metadata_bytes);
        let metadata = metadata.map_err(|error| unread("NixlAgentMetadata", &error))?;
        if metadata.engine_id != engine.key.engine.as_str() {
            return Err(Cause::PeerRestarted);
        }
        engine.clock = Some(EngineClock::new(shown, asked, cx.now).better(engine.clock));
        let Some(rank) = engine.ranks.get_mut(rank) else { return Ok(()) };
        let same = |known: &NixlAgentMetadata| known.agent_metadata == metadata.agent_metadata;
        // A writer that was not connected has nothing of a session; who is to be read may have had its pages.
        let is_known = rank.connected || (!engine.key.push && rank.metadata.is_some());
        if is_known && !rank.metadata.as_ref().is_some_and(same) {
            return Err(Cause::PeerRestarted);
        }
        let (worker, agent) = (rank.worker.clone(), metadata.agent_metadata.clone());
        let has_forerunner = rank.forerunner.as_ref().is_some_and(|known| *known != agent);
        rank.metadata = Some(metadata);
        let rivals = self.engines.rivals(no, &worker, &agent);
        for agent in &rivals {
            // Whose end is noticed thereby, so that the next session has one candidate.
            cx.effects.notify(*agent, heartbeat([]));
        }
        if rivals.is_empty() && !has_forerunner { Ok(()) } else { Err(Cause::PeerRestarted) }
    }

    /// Connects the agents of all ranks, after all answers have come.
    fn join(&mut self, cx: &mut Context, no: EngineNo) {
        if self.engines.get(no).is_some_and(|engine| engine.ranks.iter().all(|rank| rank.connected)) {
            return self.ready(cx, no);
        }
        let caches = match self.caches(no) {
            Ok(caches) => caches,
            Err(mismatch) => return self.refuse(cx, no, &Cause::Incompatible(mismatch)),
        };
        let until = cx.now + self.config.handshake_timeout;
        let Some(engine) = self.engines.get(no) else { return };
        engine.stage = Stage::Joining { until };
        let mut agents = Vec::new();
        for (number, (rank, pages)) in engine.ranks.iter_mut().zip(caches).enumerate() {
            let regions = pages.as_ref().map(|(cache, _)| cache.agent_regions()).unwrap_or_default();
            rank.pages = pages;
            let metadata =
                rank.metadata.as_ref().map(|known| known.agent_metadata.clone()).unwrap_or_default();
            if rank.agent.is_none() {
                let peer = cx.effects.connect(&Way::Agent { metadata, regions });
                rank.agent = Some(peer);
                agents.push((number, peer));
            }
        }
        for (number, peer) in agents {
            self.engines.add_agent(no, number, peer);
        }
        self.engines.set_due(no, Some(until));
    }

    /// The caches of all ranks and what of them this rank reads, if they fit.
    fn caches(&mut self, no: EngineNo) -> Result<Vec<Option<(ForeignCache, RegionMap)>>, Mismatch> {
        let Some(engine) = self.engines.get(no) else { return Ok(Vec::new()) };
        let (tp_size, pp_size, push) = (engine.key.tp_size, engine.key.pp_size, engine.key.push);
        let (mut caches, mut first_layer, mut next) = (Vec::new(), 0, (0, 0));
        for rank in &engine.ranks {
            let Some(metadata) = &rank.metadata else { continue };
            if rank.pp_rank != next.0 {
                first_layer += next.1;
            }
            next = (rank.pp_rank, u32::try_from(metadata.kv_caches_base_addr.len()).unwrap_or(u32::MAX));
            let (tp_rank, pp_rank) = (rank.tp_rank, rank.pp_rank);
            let place = Place { tp_size, tp_rank, pp_size, pp_rank, first_layer };
            caches.push(self.cache.foreign(metadata, place)?);
            if push {
                self.cache.check_writer(metadata, tp_size)?;
            }
        }
        let own = &self.cache.geometry;
        let geometries: Vec<&Geometry> = caches.iter().map(|cache| &cache.geometry).collect();
        let mut reads = vec![false; caches.len()];
        for source in sources(own, &geometries)? {
            if let Some(read) = reads.get_mut(source.index) {
                *read = source.bytes && !push;
            }
        }
        let mapped = caches.into_iter().zip(reads).map(|(cache, read)| {
            let map = read.then(|| RegionMap::directed(own, &cache.geometry, Side::Remote)).transpose();
            Ok(map.map_err(mismatch)?.map(|map| (cache, map)))
        });
        mapped.collect()
    }

    pub(super) fn agent_connected(&mut self, cx: &mut Context, no: EngineNo, rank: usize) {
        let Some(engine) = self.engines.get(no) else { return };
        if let Some(rank) = engine.ranks.get_mut(rank) {
            rank.connected = true;
        }
        if matches!(engine.stage, Stage::Dying { .. }) {
            return self.test_agent(cx, no, rank);
        }
        let joining = matches!(engine.stage, Stage::Joining { .. });
        if joining && engine.ranks.iter().all(|rank| rank.connected) {
            self.ready(cx, no);
        }
    }

    /// All agents are connected: what has waited goes on.
    fn ready(&mut self, cx: &mut Context, no: EngineNo) {
        let Some(engine) = self.engines.get(no) else { return };
        engine.stage = Stage::Ready;
        engine.tries = 0;
        let farewells = std::mem::take(&mut engine.farewells);
        let agents: Vec<_> = engine.agents().collect();
        for bytes in farewells {
            for agent in &agents {
                cx.effects.notify(*agent, bytes.clone());
            }
        }
        let users: Vec<_> = engine.users.iter().copied().collect();
        for session in users {
            self.sessions.advance(&mut cx.effects, session, KvPoll::WaitingForInput);
            self.start(cx, session);
        }
        self.beat_if_due(cx, no);
        self.sweep(cx, no);
    }

    /// A try has failed. The sessions that wait fail with the cause of the last of several tries.
    pub(super) fn try_failed(&mut self, cx: &mut Context, no: EngineNo, cause: &Cause) {
        if self.engines.get(no).is_some_and(|engine| engine.is_dead()) {
            // No handshake: an agent that is tested cannot be connected again, and is tried with the next test.
            return;
        }
        self.close_channel(cx, no);
        let max = self.config.reader.handshake_tries.max(1);
        let Some(engine) = self.engines.get(no) else { return };
        for peer in unconnected(engine) {
            cx.effects.disconnect(peer);
            self.engines.forget_peer(peer);
        }
        let Some(engine) = self.engines.get(no) else { return };
        engine.tries += 1;
        let (tries, lost) = (engine.tries, engine.lost);
        if tries >= max && !lost {
            self.lose(cx, no, cause);
        }
        let Some(engine) = self.engines.get(no) else { return };
        let until = cx.now + if engine.lost { PROBE } else { rest(tries) };
        engine.stage = Stage::Resting { until };
        self.engines.set_due(no, Some(until));
    }

    /// The engine does not fit: the sessions that wait fail, and the next session asks again.
    fn refuse(&mut self, cx: &mut Context, no: EngineNo, cause: &Cause) {
        self.lose(cx, no, cause);
    }

    /// The side channel has ended.
    pub(super) fn channel_gone(&mut self, cx: &mut Context, no: EngineNo, end: WayEnd) {
        self.close_channel(cx, no);
        let Some(engine) = self.engines.get(no) else { return };
        match (end, engine.stage) {
            (WayEnd::Dead { quiet_after }, _) => {
                self.engine_died(cx, no, quiet_after, &Cause::PeerLost);
            }
            (WayEnd::Lost, Stage::Ready) => self.begin_try(cx, no),
            (WayEnd::Lost, Stage::Asking { .. } | Stage::Joining { .. }) => {
                self.try_failed(cx, no, &Cause::WayLost);
            }
            // The next try opens the channel again.
            (WayEnd::Lost, Stage::Resting { .. } | Stage::Dying { .. } | Stage::Dead) => {}
        }
    }

    /// Time has passed for an engine.
    pub(super) fn engine_due(&mut self, cx: &mut Context, no: EngineNo) {
        let (silent_for, engine_ttl) = (self.config.handshake_timeout, self.config.reader.engine_ttl);
        let Some(engine) = self.engines.get(no) else { return };
        match engine.stage {
            Stage::Asking { until, .. } | Stage::Joining { until } if until <= cx.now => {
                self.try_failed(cx, no, &Cause::PeerUnresponsive { silent_for });
            }
            Stage::Resting { until } if until <= cx.now => self.begin_try(cx, no),
            Stage::Ready if engine.is_idle() && engine.idle_since + engine_ttl <= cx.now => {
                self.forget_engine(cx, no);
            }
            Stage::Ready => self.beat_if_due(cx, no),
            Stage::Dying { .. } => self.test_agents(cx, no),
            Stage::Dead => self.engines.set_due(no, None),
            Stage::Asking { until, .. } | Stage::Joining { until } | Stage::Resting { until } => {
                self.engines.set_due(no, Some(until));
            }
        }
    }

    pub(super) fn close_channel(&mut self, cx: &mut Context, no: EngineNo) {
        let Some(peer) = self.engines.get(no).and_then(|engine| engine.channel.take()) else { return };
        cx.effects.disconnect(peer);
        self.engines.forget_peer(peer);
    }

    /// Forgets an engine that no session needs.
    pub(super) fn forget_engine(&mut self, cx: &mut Context, no: EngineNo) {
        for peer in self.engines.remove(no) {
            cx.effects.disconnect(peer);
        }
    }
}

/// Takes the agents that are not connected out of an engine.
pub(super) fn unconnected(engine: &mut Engine) -> Vec<kv_core::PeerId> {
    let waiting = engine.ranks.iter_mut().filter(|rank| !rank.connected);
    waiting.filter_map(|rank| rank.agent.take()).collect()
}

/// A message that cannot be read is one of another version of vLLM's connector.
fn unread(field: &str, error: &MetadataError) -> Cause {
    Cause::Incompatible(differs(field, format!("connector version {NIXL_CONNECTOR_VERSION}"), error))
}

pub(super) fn mismatch(error: PlanError) -> Mismatch {
    match error {
        PlanError::Incompatible(mismatch) => mismatch,
        error => differs("NixlAgentMetadata", "a cache that pages can be planned with", error),
    }
}
