//! Push: this worker writes the pages of a session into the blocks that a vLLM engine has registered.
//!
//! ```text
//! unbound ─ a registration ─▶ bound ─ every rank of the receiver reached ─▶ ready: what is final is written
//!     ▲                        │ the agent that registered is not an agent of that engine
//!     └────────────────────────┘
//! ready ─ every page written to every rank, each rank told ─▶ Success
//! ```
//!
//! Every rank of the receiver registers the same request with every rank here that writes to it. The first one
//! binds the session; the others say nothing new. A registration of the same base with another id is another
//! attempt of the receiver, and takes the place of the first one, as long as the session is open.
//!
//! vLLM's receiver counts the notifications `<id>:<tp size here>`: one from each rank here, after the last byte.
//! So the last write to a receiver of one rank waits for the writes before it, and carries the notification. A
//! receiver of several ranks is told when the writes to all of them have ended: a rank that is told hands its pages
//! back, and the pages of one rank are those of all ranks of its engine. The receiver answers nothing, and cannot be
//! told that a write has failed: vLLM's engine waits until its own timeout ends the request.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::plan::{Plan, PlanError};
use kv_core::trace::KvWhat;
use kv_core::{
    Cause, Descriptor, EngineId, Op, PageList, PeerId, Phase, PostId, QuarantineReason, RequestId, SessionId,
    TransportError, WorkerId,
};

use super::ranks::{News, RankNo, plan_cause};
use super::registrations::Registered;
use super::{Producer, Way};
use crate::cache::differs;
use crate::flows::{Ended, FlowId, descriptors};
use crate::gauges::Ignored;
use crate::sessions::Held;
use crate::vllm::context::Context;
use crate::vllm::notification::{PushRegistration, done};

/// What is kept of a session that writes.
#[derive(Debug, Default)]
pub(super) struct Writing {
    receiver: Option<Receiver>,
    /// The flows in flight, each with its target's position; `None` for a receiver that was replaced.
    flows: BTreeMap<FlowId, Option<usize>>,
    /// All ranks that the session has needed.
    ranks: BTreeSet<RankNo>,
}

/// The receiver of a session.
#[derive(Debug)]
struct Receiver {
    registered: Registered,
    /// The receiver's blocks, in the order of the request.
    pages: PageList,
    targets: Vec<Target>,
    /// True once all ranks were reached, and the agent that registered is one of theirs.
    ready: bool,
    /// True once the ranks were asked anew, because the agent was none of theirs.
    asked_again: bool,
}

/// One rank of the receiver.
#[derive(Debug)]
struct Target {
    rank: RankNo,
    /// The number of the first announcement of final layers that was not planned.
    next_final: usize,
    /// True once the notification was given to the transport.
    told: bool,
}

impl Writing {
    pub(super) fn has_receiver(&self) -> bool {
        self.receiver.is_some()
    }

    /// The receiver's id of the request.
    pub(super) fn receiver_id(&self) -> Option<String> {
        self.receiver.as_ref().map(|receiver| receiver.registered.registration.request_id.clone())
    }

    pub(super) fn phase(&self) -> Phase {
        match &self.receiver {
            None => Phase::Rendezvous,
            Some(receiver) if receiver.ready => Phase::Transfer,
            Some(_) => Phase::Handshake,
        }
    }

    /// The receiver's engine, if the engine's id is possible here.
    pub(super) fn peer(&self) -> Option<WorkerId> {
        let receiver = self.receiver.as_ref()?;
        let engine = EngineId::new(&receiver.registered.registration.decode_engine_id).ok()?;
        Some(WorkerId { engine, rank: 0 })
    }

    /// Why the pages of the session, which fails now, cannot be handed back yet.
    pub(super) fn held(&self) -> Option<Held> {
        let held = Held { reason: QuarantineReason::OwnPosts, peer: self.peer(), until: None };
        (!self.flows.is_empty()).then_some(held)
    }

    /// The ranks that the session has needed, which it does not need any more.
    pub(super) fn take_ranks(&mut self) -> Vec<RankNo> {
        std::mem::take(&mut self.ranks).into_iter().collect()
    }

    /// Forgets the receiver. The flows to the receiver are strange from now on.
    fn unbind(&mut self) -> Option<Receiver> {
        self.flows.values_mut().for_each(|target| *target = None);
        self.receiver.take()
    }
}

impl Producer {
    /// The open session that writes a request with the same base.
    pub(super) fn written_request(&self, request: &str) -> Option<&SessionId> {
        self.bases.get(RequestId::base_of(request))
    }

    /// A receiver has registered the blocks of a request.
    pub(crate) fn register(
        &mut self,
        cx: &mut Context,
        agent: &str,
        registration: PushRegistration,
    ) -> Result<(), Ignored> {
        if registration.remote_engine_id != *self.engine {
            return Err(Ignored::OtherEngine);
        }
        if self.registrations.is_over(&registration.request_id) {
            return Err(Ignored::Repeated);
        }
        let session = self.written_request(&registration.request_id).copied();
        let registered = Registered { agent: agent.to_owned(), registration };
        match session {
            Some(session) => self.bind(cx, session, registered),
            None => {
                for _ in 0..self.registrations.keep(cx.now, registered) {
                    cx.ignore(Ignored::NoRoom);
                }
            }
        }
        Ok(())
    }

    fn writing(&mut self, session: SessionId) -> Option<&mut Writing> {
        match &mut self.sender(session)?.way {
            Way::Write(writing) => Some(writing),
            Way::Read(_) => None,
        }
    }

    /// Makes a registration the receiver of a session, in the place of an earlier attempt.
    pub(super) fn bind(&mut self, cx: &mut Context, session: SessionId, registered: Registered) {
        let Some(writing) = self.writing(session) else { return };
        if let Some(before) = &writing.receiver {
            let (before, now) = (&before.registered.registration, &registered.registration);
            if (&before.request_id, &before.decode_engine_id) == (&now.request_id, &now.decode_engine_id) {
                return;
            }
            let before = before.request_id.clone();
            self.registrations.note_over(cx.now, before);
            self.unbind(cx, session);
        }
        self.unpin(session);
        cx.tell(session, || KvWhat::ReceiverCame);
        let found = match blocks(&registered.registration) {
            Ok(pages) => self.ranks.need(cx, session, &registered.registration).map(|ranks| (pages, ranks)),
            Err(cause) => Err(cause),
        };
        let (pages, ranks) = match found {
            Ok(found) => found,
            Err(cause) => return self.fail(cx, session, cause),
        };
        let Some(writing) = self.writing(session) else { return };
        writing.ranks.extend(&ranks);
        let targets = targets(&ranks);
        let receiver = Receiver { registered, pages, targets, ready: false, asked_again: false };
        writing.receiver = Some(receiver);
        self.advance(cx, session);
    }

    /// Forgets the receiver of a session, and stops the writes to the receiver.
    fn unbind(&mut self, cx: &mut Context, session: SessionId) {
        let Some(writing) = self.writing(session) else { return };
        writing.unbind();
        self.cancel_flows(cx, session);
    }

    /// Asks for the end of all writes of a session. Those that had not begun end at once.
    pub(super) fn cancel_flows(&mut self, cx: &mut Context, session: SessionId) {
        let Some(writing) = self.writing(session) else { return };
        let flows: Vec<FlowId> = writing.flows.keys().copied().collect();
        for flow in flows {
            if self.flows.cancel(&mut cx.effects, flow).is_some() {
                self.writers.remove(&flow);
                if let Some(writing) = self.writing(session) {
                    writing.flows.remove(&flow);
                }
            }
        }
    }

    /// Goes on with a session: checks its receiver, writes what is final, and ends the session when all is done.
    pub(super) fn advance(&mut self, cx: &mut Context, session: SessionId) {
        if !self.make_ready(cx, session) {
            return;
        }
        let targets =
            self.writing(session).and_then(|writing| Some(writing.receiver.as_ref()?.targets.len()));
        for target in 0..targets.unwrap_or(0) {
            if let Err(error) = self.write(cx, session, target) {
                return self.fail(cx, session, plan_cause(error));
            }
        }
        let Some(writing) = self.writing(session) else { return };
        let told = writing.receiver.as_ref().is_some_and(|found| found.targets.iter().all(|one| one.told));
        if told && writing.flows.is_empty() {
            self.succeed(cx, session);
        }
    }

    /// True if the receiver of the session can be written to.
    fn make_ready(&mut self, cx: &mut Context, session: SessionId) -> bool {
        let Some(sender) = self.sessions.live(session).map(|session| &mut session.dialect) else {
            return false;
        };
        let Way::Write(writing) = &mut sender.way else { return false };
        let Writing { receiver: Some(receiver), ranks, .. } = &mut **writing else { return false };
        if receiver.ready {
            return true;
        }
        let agents = receiver.targets.iter().map(|target| self.ranks.reached(target.rank));
        let Some(agents) = agents.collect::<Option<Vec<_>>>() else { return false };
        if agents.iter().any(|rank| rank.agent == receiver.registered.agent) {
            receiver.ready = true;
            return true;
        }
        // The engine may have been restarted since its ranks were asked.
        if !receiver.asked_again {
            receiver.asked_again = true;
            receiver.targets.iter().for_each(|target| self.ranks.distrust(target.rank));
            match self.ranks.need(cx, session, &receiver.registered.registration) {
                Ok(again) => {
                    ranks.extend(&again);
                    receiver.targets = targets(&again);
                }
                Err(cause) => self.fail(cx, session, cause),
            }
            return false;
        }
        cx.ignore(Ignored::OtherEngine);
        self.unbind(cx, session);
        self.pin_if_complete(cx, session);
        false
    }

    /// Writes what is final and was not written to one rank of the receiver, and tells the rank at the end.
    fn write(&mut self, cx: &mut Context, session: SessionId, position: usize) -> Result<(), PlanError> {
        let tp_size = self.tp_size;
        loop {
            let Some(sender) = self.sessions.live(session).map(|open| &mut open.dialect) else {
                return Ok(());
            };
            let Way::Write(writing) = &mut sender.way else { return Ok(()) };
            let Some(receiver) = &mut writing.receiver else { return Ok(()) };
            let (given, complete) = (&sender.given, sender.given.is_complete());
            let alone = receiver.targets.len() == 1;
            let planned = |target: &Target| given.writable(target.next_final).is_none();
            let all_in_place =
                alone || receiver.targets.iter().all(planned) && !writing.flows.values().any(Option::is_some);
            let Some(target) = receiver.targets.get_mut(position) else { return Ok(()) };
            let busy = writing.flows.values().any(|of| *of == Some(position));
            let notify = || done(&receiver.registered.registration.request_id, tp_size);
            let Some(writable) = given.writable(target.next_final) else {
                if complete && !busy && !target.told && all_in_place {
                    target.told = true;
                    if let Some(reached) = self.ranks.reached(target.rank) {
                        cx.effects.notify(reached.peer, notify());
                    }
                }
                return Ok(());
            };
            let last = alone && complete && target.next_final + 1 == given.finals();
            if last && busy {
                return Ok(());
            }
            let Some(map) = self.ranks.map(target.rank, writable.layers)? else { return Ok(()) };
            let Some(reached) = self.ranks.reached(target.rank) else { return Ok(()) };
            let announced = given.announced().map_or(0, |(pages, _)| pages);
            let first = first_page(announced, receiver.pages.len())?;
            let plan = Plan::suffix(&map, (writable.pages, writable.first), (&receiver.pages, first))?;
            let all: VecDeque<Descriptor> = descriptors(plan, &reached.cache);
            target.next_final += 1;
            if all.is_empty() {
                continue;
            }
            target.told = last;
            let notify = last.then(notify);
            let flow = self.flows.start(&mut cx.effects, reached.peer, Op::Write, all, notify);
            writing.flows.insert(flow, Some(position));
            self.writers.insert(flow, session);
        }
    }

    /// True if the post is of this part.
    pub(crate) fn has_post(&self, post: PostId) -> bool {
        self.flows.has(post)
    }

    /// Takes the end of a post of this part.
    pub(crate) fn posted(&mut self, cx: &mut Context, post: PostId, result: Result<(), TransportError>) {
        if let Some(ended) = self.flows.posted(&mut cx.effects, post, result) {
            self.flow_ended(cx, ended);
        }
    }

    fn flow_ended(&mut self, cx: &mut Context, Ended { flow, result }: Ended) {
        let Some(id) = self.writers.remove(&flow) else { return };
        let Some(session) = self.sessions.any(id) else { return };
        let has_ended = session.has_ended();
        let Way::Write(writing) = &mut session.dialect.way else { return };
        let target = writing.flows.remove(&flow).flatten();
        let quiet = writing.flows.is_empty();
        let rank = target.and_then(|position| Some(writing.receiver.as_ref()?.targets.get(position)?.rank));
        match (result, rank) {
            _ if has_ended && quiet => self.free(cx, id),
            _ if has_ended => {}
            (Err(error), Some(rank)) => {
                self.ranks.distrust(rank);
                self.fail(cx, id, Cause::Post(error));
            }
            _ => self.advance(cx, id),
        }
    }

    /// Takes the news of a rank: the sessions that need the rank go on, or fail.
    pub(super) fn take_news(&mut self, cx: &mut Context, (sessions, result): News) {
        for session in sessions {
            match &result {
                Ok(()) => self.advance(cx, session),
                Err(cause) => self.rank_failed(cx, session, cause.clone()),
            }
        }
        self.ranks.dial(cx);
    }

    /// A rank that a session needs, or has needed for a receiver that was replaced, is gone.
    fn rank_failed(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        let Some(writing) = self.writing(session) else { return };
        let Some(receiver) = &writing.receiver else { return };
        let ranks: Vec<RankNo> = receiver.targets.iter().map(|target| target.rank).collect();
        if ranks.iter().any(|rank| !self.ranks.has(*rank)) {
            self.fail(cx, session, cause);
        }
    }

    /// Takes the answer of a side channel. False if this part has not opened the channel.
    pub(crate) fn message(&mut self, cx: &mut Context, peer: PeerId, parts: &[bytes::Bytes]) -> bool {
        let news = self.ranks.answered(cx, peer, parts);
        news.map(|news| self.take_news(cx, news)).is_some()
    }

    /// Takes the news that the way to a peer is open. False if this part has not opened the way.
    pub(crate) fn connected(&mut self, cx: &mut Context, peer: PeerId) -> bool {
        let news = self.ranks.connected(cx, peer);
        news.map(|news| self.take_news(cx, news)).is_some()
    }

    /// Takes the news that the way to a peer could not be opened, or has ended without an error. False if this
    /// part has not opened the way.
    pub(crate) fn lost(&mut self, cx: &mut Context, peer: PeerId, error: Option<TransportError>) -> bool {
        let news = self.ranks.lost(cx, peer, error);
        news.map(|news| self.take_news(cx, news)).is_some()
    }
}

fn targets(ranks: &[RankNo]) -> Vec<Target> {
    ranks.iter().map(|rank| Target { rank: *rank, next_final: 0, told: false }).collect()
}

/// The blocks of a registration, which must be of one cache group.
fn blocks(registration: &PushRegistration) -> Result<PageList, Cause> {
    let blocks = match registration.local_block_ids.as_slice() {
        [] => return Ok(PageList::default()),
        [blocks] => blocks,
        groups => {
            let groups = format!("{} groups", groups.len());
            return Err(Cause::Incompatible(differs("local_block_ids", "1 group", groups)));
        }
    };
    PageList::from_pages(blocks.iter().copied())
        .map_err(|_| Cause::Protocol("the registered blocks are too many"))
}

/// The number of the receiver's first block within the request: the receiver's blocks are the last ones, and have as
/// many tokens as the pages here.
fn first_page(announced: usize, registered: usize) -> Result<usize, PlanError> {
    if registered == 0 {
        return Ok(0);
    }
    announced.checked_sub(registered).ok_or(PlanError::PageCount { local: announced, remote: registered })
}
