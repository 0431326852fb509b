//! The death of an engine: what the end of its side channel proves, and what only the ends of its agents prove.
//!
//! An engine's side channel is served by a thread of vLLM's scheduler, and the engine's writers are other threads or
//! other processes: the thread ends at the first question that it cannot answer, whoever asks, and the workers live
//! on and write. A dead side channel therefore ends the sessions of an engine, and frees none of the pages that the
//! engine may write. Pages are free once every agent has ended to which this worker had a way:
//!
//! ```text
//! side channel dead ─▶ sessions fail ─▶ every agent is tested each second ─▶ all have ended ─▶ quiet_after ─▶ free
//! ```
//!
//! - NIXL notices the end of an agent when a notification to the agent fails. The test is a heartbeat that names no
//!   request (`HB:`), which vLLM's workers of both modes take without effect.
//! - A way that was lost before the side channel died proves nothing, because the network may have lost the way. The
//!   agent is connected once more, and tested.
//! - An agent to which this rank never had a way was told nothing by this rank. If another rank of this rank's engine
//!   has registered there, that rank has the way, and holds the same pages.
//!
//! The rule is the same for an engine whose address has another engine or other agents.

use std::time::Duration;

use kv_core::{Cause, PeerId, QuarantineReason};

use super::super::context::Context;
use super::super::notification::heartbeat;
use super::Consumer;
use super::engine::{EngineNo, Stage};
use super::handshake::unconnected;
use crate::message::Way;
use crate::sessions::Held;

/// The time between two tests of the agents of an engine whose side channel is dead.
const TEST: Duration = Duration::from_secs(1);

impl Consumer {
    /// The side channel of an engine is dead, or another process has its address. The last bytes of a process of the
    /// engine arrive within `quiet_after` of the end of the process.
    pub(super) fn engine_died(
        &mut self,
        cx: &mut Context,
        no: EngineNo,
        quiet_after: Duration,
        cause: &Cause,
    ) {
        self.lose(cx, no, cause);
        self.close_channel(cx, no);
        let Some(engine) = self.engines.get(no) else { return };
        engine.stage = Stage::Dying { quiet_after };
        for peer in unconnected(engine) {
            cx.effects.disconnect(peer);
            self.engines.forget_peer(peer);
        }
        let Some(engine) = self.engines.get(no) else { return };
        for rank in engine.ranks.iter_mut().filter(|rank| rank.ended) {
            (rank.connected, rank.ended) = (false, false);
        }
        if !self.free_if_ended(cx, no) {
            self.test_agents(cx, no);
        }
    }

    /// Tests the agents that have not ended, for as long as pages wait for their ends.
    pub(super) fn test_agents(&mut self, cx: &mut Context, no: EngineNo) {
        let waits = !self.unacknowledged(no).is_empty();
        self.engines.set_due(no, waits.then_some(cx.now + TEST));
        let Some(engine) = self.engines.get(no).filter(|_| waits) else { return };
        for agent in engine.agents() {
            cx.effects.notify(agent, heartbeat([]));
        }
        let mut again = Vec::new();
        for (number, rank) in engine.ranks.iter_mut().enumerate().filter(|(_, rank)| !rank.connected) {
            let (Some(before), Some(known)) = (rank.agent, &rank.metadata) else { continue };
            let way = Way::Agent { metadata: known.agent_metadata.clone(), regions: Vec::new() };
            cx.effects.disconnect(before);
            let peer = cx.effects.connect(&way);
            rank.agent = Some(peer);
            again.push((number, before, peer));
        }
        for (number, before, peer) in again {
            self.engines.forget_peer(before);
            self.engines.add_agent(no, number, peer);
        }
    }

    /// Tests one agent that has been connected again.
    pub(super) fn test_agent(&mut self, cx: &mut Context, no: EngineNo, rank: usize) {
        let Some(agent) = self.engines.get(no).and_then(|engine| engine.ranks.get(rank)?.agent) else {
            return;
        };
        cx.effects.notify(agent, heartbeat([]));
    }

    /// The way to an agent has ended.
    pub(super) fn agent_gone(&mut self, cx: &mut Context, no: EngineNo, rank: usize) {
        self.engines.way_ends(no, rank);
        let Some(engine) = self.engines.get(no) else { return };
        if matches!(engine.stage, Stage::Dying { .. }) {
            self.free_if_ended(cx, no);
        } else {
            self.lose(cx, no, &Cause::WayLost);
        }
    }

    /// A read could not reach its agent: nor did the heartbeats that were sent meanwhile, so that no lease of a session
    /// that is open now can be relied on.
    pub(super) fn way_failed(&mut self, cx: &mut Context, agent: PeerId) {
        let Some((no, _)) = self.engines.of_agent(agent) else { return };
        let users = self.engines.get(no).map(|engine| engine.users.clone()).unwrap_or_default();
        for session in users {
            self.fail(cx, session, Cause::WayLost);
        }
    }

    /// Lets the pages go of an engine whose agents have all ended, as soon as their last bytes have arrived. False
    /// if an agent may live.
    fn free_if_ended(&mut self, cx: &mut Context, no: EngineNo) -> bool {
        let Some(engine) = self.engines.get(no) else { return true };
        let Stage::Dying { quiet_after } = engine.stage else { return true };
        if engine.ranks.iter().any(|rank| rank.agent.is_some() && !rank.ended) {
            return false;
        }
        engine.stage = Stage::Dead;
        self.engines.set_due(no, None);
        for (session, held) in self.unacknowledged(no) {
            let until = Some(cx.now + quiet_after);
            self.sessions.hold(session, Held { until, reason: QuarantineReason::WayLost, ..held });
        }
        true
    }

    /// The sessions whose pages wait for the words or the ends of an engine's agents.
    fn unacknowledged(&mut self, no: EngineNo) -> Vec<(kv_core::SessionId, Held)> {
        let Some(ended) = self.engines.get(no).map(|engine| engine.ended.clone()) else { return Vec::new() };
        let held = ended.into_iter().filter_map(|session| {
            let held = self.sessions.any(session)?.held()?.clone();
            (held.reason == QuarantineReason::Unacknowledged).then_some((session, held))
        });
        held.collect()
    }
}
