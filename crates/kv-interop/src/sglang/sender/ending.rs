//! How sending sessions end, and what decode ranks are told.

use std::collections::btree_map::Entry;

use kv_core::{Cause, QuarantineReason, RequestCacheGroups, SessionId, WorkerId};

use super::Sending;
use crate::effects::Effects;
use crate::sessions::Held;
use crate::sglang::codec::{AbortAck, FAILED, KvStatus, SUCCESS};

impl Sending {
    /// Tells each target that has everything, and ends the session with the last of them.
    pub(super) fn conclude(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        let send = &mut open.dialect;
        for target in send.targets.iter_mut().filter(|target| target.aux_begun && !target.told) {
            if target.flows.is_empty() {
                target.told = true;
                let status =
                    KvStatus { room: send.room, status: SUCCESS, rank: self.rank, reason: String::new() };
                self.pushes.say(effects, &target.endpoint, status.encode());
            }
        }
        if send.is_done() {
            let (room, agents) = (send.room, send.agents());
            self.sessions.succeed(effects, session);
            self.leave_if_over(session, room, agents);
        }
    }

    pub(in crate::sglang) fn abort(&mut self, effects: &mut Effects, session: SessionId) {
        self.fail(effects, session, (None, Cause::Aborted));
    }

    /// The ready event of a chunk has failed.
    pub(in crate::sglang) fn not_ready(&mut self, effects: &mut Effects, session: SessionId, cause: Cause) {
        self.fail(effects, session, (None, cause));
    }

    /// SGLang's state components are no cache groups of ours: such items end the session.
    pub(in crate::sglang) fn refuse_groups(
        &mut self,
        effects: &mut Effects,
        (session, groups): (SessionId, RequestCacheGroups),
    ) {
        let group = groups.iter().next().map_or(0, |items| items.group);
        self.sessions.lend(effects, session, groups.into());
        self.fail(effects, session, (None, Cause::UnknownGroup { group }));
    }

    /// Ends a session with an error. Its posts are cancelled; its pages come back, and its decode ranks are told,
    /// when the posts have ended.
    pub(super) fn fail(
        &mut self,
        effects: &mut Effects,
        session: SessionId,
        (peer, cause): (Option<WorkerId>, Cause),
    ) {
        let phase = self.phase(session);
        let Some(open) = self.sessions.live(session) else { return };
        open.dialect.reason = Some(cause.to_string());
        let flows: Vec<_> =
            open.dialect.targets.iter().flat_map(|target| target.flows.iter().copied()).collect();
        let mut ended = Vec::new();
        for flow in flows {
            ended.extend(self.flows.cancel(effects, flow));
        }
        for flow in ended {
            let Some((session, target)) = self.flow_of.remove(&flow.flow) else { continue };
            if let Some(target) =
                self.sessions.any(session).and_then(|open| open.dialect.targets.get_mut(target))
            {
                target.flows.remove(&flow.flow);
            }
        }
        self.tell_targets(effects, session);
        let Some(open) = self.sessions.live(session) else { return };
        let (room, agents, quiet) = (open.dialect.room, open.dialect.agents(), open.dialect.is_quiet());
        let reason = QuarantineReason::OwnPosts;
        let held = (!quiet).then(|| Held { reason, peer: peer.clone(), until: None });
        self.sessions.fail(effects, session, (peer, phase, cause), held);
        self.leave_if_over(session, room, agents);
    }

    /// Tells the targets of a failed session whose posts have ended, and frees the pages once all have.
    pub(super) fn settle(&mut self, effects: &mut Effects, session: SessionId) {
        self.tell_targets(effects, session);
        let Some(ended) = self.sessions.any(session).filter(|session| session.has_ended()) else { return };
        let (room, agents) = (ended.dialect.room, ended.dialect.agents());
        if ended.dialect.is_quiet() {
            self.sessions.free(effects, session);
        }
        self.leave_if_over(session, room, agents);
    }

    fn leave_if_over(&mut self, session: SessionId, room: u64, agents: Vec<String>) {
        if self.sessions.any(session).is_some() {
            return;
        }
        self.rooms.leave(room, session);
        for agent in agents {
            if let Entry::Occupied(mut sessions) = self.of_agent.entry(agent) {
                sessions.get_mut().remove(&session);
                if sessions.get().is_empty() {
                    sessions.remove();
                }
            }
        }
    }

    fn tell_targets(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.any(session) else { return };
        let send = &mut open.dialect;
        let Some(reason) = &send.reason else { return };
        for target in send.targets.iter_mut().filter(|target| target.flows.is_empty()) {
            // A dummy waits for no word.
            if !std::mem::replace(&mut target.told, true) && !target.dummy {
                let (room, rank, reason) = (send.room, self.rank, reason.clone());
                let status = KvStatus { room, status: FAILED, rank, reason };
                self.pushes.say(effects, &target.endpoint, status.encode());
            }
            for generation in std::mem::take(&mut target.stop) {
                let ack = AbortAck { room: send.room, rank: self.rank, generation: Some(generation) };
                self.pushes.say(effects, &target.endpoint, ack.encode());
            }
        }
    }
}
