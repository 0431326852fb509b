//! The scheduler's commands to sending sessions, and how chunks become posts.

use std::collections::VecDeque;
use std::ops::Range;

use kv_core::plan::{Plan, PlanError};
use kv_core::proto::{Given, Resource};
use kv_core::{
    AuxIndex, Cause, ChunkId, KvPoll, Op, Pages, Room, SessionId, SessionOptions, Time, TransportError,
};

use super::Sending;
use super::agents::Agent;
use super::session::{Send, Target};
use crate::effects::Effects;
use crate::flows::{Ended, descriptors};
use crate::sglang::codec::Request;

impl Sending {
    pub(in crate::sglang) fn open(
        &mut self,
        effects: &mut Effects,
        now: Time,
        (session, room, receivers): (SessionId, Room, u32),
        options: &SessionOptions,
    ) {
        let patience = options.deadline.unwrap_or(self.timing.session_deadline);
        let number = if let Room::Number(number) = room { number } else { 0 };
        let send = Send {
            room: number,
            receivers,
            given: Given::default(),
            targets: Vec::new(),
            attached: false,
            reason: None,
        };
        self.sessions.open(session, room.clone(), now, patience, send);
        let refusal = if self.closed.is_some() {
            self.closed.clone()
        } else if number == 0 {
            Some(Cause::Protocol("SGLang's rooms are numbers above 0"))
        } else if self.rooms.session(number).is_some() {
            Some(Cause::AmbiguousRoom { room: room.clone(), other: room })
        } else {
            None
        };
        if let Some(cause) = refusal {
            return self.fail(effects, session, (None, cause));
        }
        let known = self.rooms.claim(number, session);
        for request in known.requests.into_values() {
            self.attach_late(effects, session, request);
        }
        if let Some(refusal) = known.refusal {
            self.fail(effects, session, refusal);
        }
    }

    /// A decode rank joins a session that came after the rank's request. The rank may have died meanwhile, or have
    /// registered other memory.
    fn attach_late(&mut self, effects: &mut Effects, session: SessionId, request: Request) {
        let worker = self.agents.get(&request.agent).map(Agent::worker);
        match (worker, self.refusal(&request)) {
            (None, _) => self.fail(effects, session, (None, Cause::PeerLost)),
            (Some(worker), Some(cause)) => {
                self.refuse(effects, &(request.ip, request.port), request.room, &cause.to_string());
                self.fail(effects, session, (worker, cause));
            }
            (Some(_), None) => {
                self.attach(effects, session, request);
            }
        }
    }

    pub(in crate::sglang) fn init(
        &mut self,
        effects: &mut Effects,
        session: SessionId,
        (num_pages, aux): (usize, Option<AuxIndex>),
    ) {
        let rows = self.cache.geometry.aux_rows().unwrap_or(0);
        let Some(open) = self.sessions.live(session) else { return };
        let cause = match aux {
            _ if open.dialect.given.announced().is_some() => Some(Cause::InitOrder),
            None => Some(Cause::AuxOneSided { sender: false, receiver: true }),
            Some(AuxIndex(index)) if index >= rows => Some(Cause::BadAux { index, rows }),
            Some(_) => {
                open.dialect.given.announce(num_pages, aux);
                None
            }
        };
        match cause {
            Some(cause) => self.fail(effects, session, (None, cause)),
            None => self.check_agreement(effects, session),
        }
    }

    /// Takes the next pages, of which no layer is final. The number of the chunk, unless the session has ended.
    pub(in crate::sglang) fn begin(
        &mut self,
        effects: &mut Effects,
        session: SessionId,
        pages: Pages,
    ) -> Option<ChunkId> {
        let list = pages.list().clone();
        let bad = list.check_below(self.cache.geometry.num_pages).err().map(Cause::BadPages);
        self.sessions.lend(effects, session, Resource::Pages(pages));
        let begun = self.sessions.live(session)?.dialect.given.begin(list);
        match begun.and_then(|chunk| bad.map_or(Ok(chunk), Err)) {
            Ok(chunk) => Some(chunk),
            Err(cause) => {
                self.fail(effects, session, (None, cause));
                None
            }
        }
    }

    pub(in crate::sglang) fn finish(
        &mut self,
        effects: &mut Effects,
        session: SessionId,
        (chunk, layers): (ChunkId, Option<Range<u32>>),
    ) {
        let Some(open) = self.sessions.live(session) else { return };
        match open.dialect.given.finish(chunk, layers, &self.layers) {
            Ok(()) => self.write(effects, session),
            Err(error) => self.fail(effects, session, (None, error.into())),
        }
    }

    /// Checks that both sides mean the same pages.
    pub(super) fn check_agreement(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session).filter(|open| open.dialect.attached) else { return };
        let Some((sent, _)) = open.dialect.given.announced() else { return };
        let pages = |target: &Target| target.prefix.saturating_add(target.pages.len());
        let targets = open.dialect.targets.iter().filter(|target| !target.dummy);
        let other = targets.map(|target| (target, pages(target))).find(|(_, registered)| *registered != sent);
        if let Some((target, registered)) = other {
            let worker = self.agents.get(&target.agent).and_then(Agent::worker);
            self.fail(effects, session, (worker, Cause::PageCount { sent, registered }));
        }
    }

    /// Writes every chunk that is final and was not written yet, and the aux row behind the last one.
    pub(super) fn write(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session).filter(|open| open.dialect.attached) else { return };
        if open.dialect.given.whole_chunks(&self.layers).next().is_none() {
            return;
        }
        let targets = open.dialect.targets.len();
        self.sessions.advance(effects, session, KvPoll::Transferring);
        for target in 0..targets {
            match self.next_descriptors(session, target) {
                Ok(None) => {}
                Ok(Some((descriptors, agent))) => {
                    let Some(peer) = self.agents.open(effects, &agent) else { continue };
                    let flow = self.flows.start(effects, peer, Op::Write, descriptors, None);
                    self.flow_of.insert(flow, (session, target));
                    if let Some(target) = self.target(session, target) {
                        target.flows.insert(flow);
                    }
                }
                Err(error) => {
                    let cause = match error {
                        PlanError::Incompatible(mismatch) => Cause::Incompatible(mismatch),
                        _ => Cause::Protocol("the decode rank's pages cannot be written"),
                    };
                    return self.fail(effects, session, (None, cause));
                }
            }
        }
        self.conclude(effects, session);
    }

    fn target(&mut self, session: SessionId, target: usize) -> Option<&mut Target> {
        self.sessions.any(session)?.dialect.targets.get_mut(target)
    }

    /// What may be written to a target now, and to which agent; `None` if nothing may.
    #[allow(clippy::type_complexity)]
    fn next_descriptors(
        &mut self,
        session: SessionId,
        target: usize,
    ) -> Result<Option<(VecDeque<kv_core::Descriptor>, String)>, PlanError> {
        let Some(open) = self.sessions.live(session) else { return Ok(None) };
        let Send { given, targets, .. } = &mut open.dialect;
        let Some(target) = targets.get_mut(target).filter(|target| !target.dummy) else { return Ok(None) };
        let Some(Ok((cache, map))) = self.agents.get(&target.agent).map(|agent| &agent.cache) else {
            return Ok(None);
        };
        let mut all = VecDeque::new();
        for (position, chunk) in given.whole_chunks(&self.layers) {
            if !target.begun.insert(position) {
                continue;
            }
            // The prefix is in the decode rank's own cache.
            let skip = target.prefix.saturating_sub(chunk.first).min(chunk.pages.len());
            let list = chunk.pages.slice(skip, chunk.pages.len() - skip).unwrap_or_default();
            if list.is_empty() {
                continue;
            }
            let remote = (&target.pages, target.prefix);
            all.append(&mut descriptors(Plan::suffix(map, (&list, chunk.first + skip), remote)?, cache));
        }
        if let Some(aux) = given.aux().filter(|_| given.is_complete() && !target.aux_begun) {
            target.aux_begun = true;
            all.append(&mut descriptors(Plan::aux(map, aux, AuxIndex(target.aux))?, cache));
        }
        Ok(if all.is_empty() { None } else { Some((all, target.agent.clone())) })
    }

    /// A post has ended; perhaps the last one of its flow.
    pub(in crate::sglang) fn posted(
        &mut self,
        effects: &mut Effects,
        post: kv_core::PostId,
        result: Result<(), TransportError>,
    ) {
        if let Some(ended) = self.flows.posted(effects, post, result) {
            self.flow_ended(effects, ended);
        }
    }

    pub(super) fn flow_ended(&mut self, effects: &mut Effects, ended: Ended) {
        let Some((session, target)) = self.flow_of.remove(&ended.flow) else { return };
        let Some(target) = self.target(session, target) else { return };
        target.flows.remove(&ended.flow);
        let agent = target.agent.clone();
        if let Err(error) = ended.result {
            let worker = self.agents.get(&agent).and_then(Agent::worker);
            self.fail(effects, session, (worker, Cause::Post(error)));
        }
        self.conclude(effects, session);
        self.settle(effects, session);
    }
}
