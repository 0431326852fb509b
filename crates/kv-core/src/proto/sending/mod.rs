//! The sending half of a push session, on the prefill side.
//!
//! ```text
//! open ─▶ Bootstrapping ─ every receiver has registered ─▶ WaitingForInput ─ send ─▶ Transferring
//!            (chunks given early wait)                                                  │ every part of
//!                                                                                       ▼ every target done
//!                                                                                    Success, pages back
//! any failure ─▶ Failed ─▶ Failed{quiet: false} to the targets, posts cancelled
//!                            └─ last post of a target ended ─▶ Failed{quiet: true} | AbortAck
//!                                 └─ of all targets ─▶ pages back
//! ```
//!
//! A *target* is a receiver that has registered, or claimed. How its bytes are written is in
//! `write.rs`, how it reads them in `grant.rs`.

pub(in crate::proto) mod attempts;
pub(in crate::proto) mod chunks;
mod groups;
pub(in crate::proto) mod holder;
mod peers;
mod quarantine;
mod write;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Cause, PeerCause, Phase, TransferError};
use crate::groups::{GroupLists, Groups};
use crate::id::{Attempt, AuxIndex, Incarnation, PeerId, Room, SessionId};
use crate::layout::{Geometry, HeldLayers};
use crate::lease::{Lease, TransferMode};
use crate::meter::each;
use crate::pages::PageList;
use crate::plan::Plan;
use crate::plane::Op;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{Incoming, Registration, Wish};
use crate::proto::io::{LONGEST, Output};
use crate::proto::receiving::check_aux;
use crate::proto::rendezvous::{Latecomers, Named};
use crate::proto::run_set::RunSet;
use crate::proto::sending::chunks::{Chunk, Final};
use crate::proto::sending::holder::EndedGrants;
use crate::proto::timer::Timer;
use crate::session_options::SessionOptions;
use crate::time::Time;
use crate::wire::{Body, Failed, Link, Registered};

/// All sending sessions of a worker.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Sending {
    sessions: BTreeMap<SessionId, SendSession>,
    held_layers: HeldLayers,
    ended_grants: EndedGrants,
    pages_leased: usize,
}

impl Sending {
    pub(in crate::proto) fn new(geometry: &Geometry) -> Sending {
        Sending {
            sessions: BTreeMap::new(),
            held_layers: HeldLayers::new(geometry),
            ended_grants: EndedGrants::default(),
            pages_leased: 0,
        }
    }

    /// How many sessions have not ended, or have pages that have not come back.
    pub(in crate::proto) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(in crate::proto) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    pub(in crate::proto) fn has(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    pub(in crate::proto) fn deadline(&self, session: SessionId) -> Option<Duration> {
        self.sessions.get(&session).map(|sender| sender.deadline)
    }

    /// How many receivers the sessions have met.
    pub(in crate::proto) fn targets(&self) -> usize {
        self.sessions.values().map(|sender| sender.targets.len()).sum()
    }

    /// Complete pages that are pinned for readers.
    pub(in crate::proto) fn pages_leased(&self) -> usize {
        self.pages_leased
    }

    /// How many ended leases are remembered for latecomers.
    pub(in crate::proto) fn ended_grants(&self) -> usize {
        self.ended_grants.len()
    }
}

/// A sending session.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
struct SendSession {
    deadline: Duration,
    named: Named,
    /// How many ranks receive: told by the scheduler, or by the first of them.
    receivers: usize,
    /// The scheduler has not said how many.
    learns: bool,
    mode: TransferMode,
    /// How long the pages stay for readers.
    lease: Lease,
    /// Until when they stay at least; set when they are complete.
    pinned_until: Option<Time>,
    poll: KvPoll,
    announced: Option<(usize, Option<AuxIndex>)>,
    chunks: Vec<Chunk>,
    given: usize,
    /// How many chunks are final in all layers.
    chunks_final: usize,
    /// What of the chunks is final, in the order in which it was announced.
    finals: Vec<Final>,
    /// All announced pages have been given, and are final.
    complete: bool,
    /// Items of state groups, sent with the last chunk.
    groups: Option<Groups>,
    targets: Vec<Target>,
    /// The last target of each receiver.
    target_of: BTreeMap<Incarnation, usize>,
    failure: Option<PeerCause>,
}

impl SendSession {
    /// How many receivers have come.
    pub(in crate::proto) fn met(&self) -> usize {
        self.targets.len()
    }

    /// True if receivers are to come.
    fn lacks_receivers(&self) -> bool {
        self.met() < self.receivers
    }

    /// The receivers that read, with their positions.
    pub(in crate::proto) fn readers(&self) -> impl Iterator<Item = (usize, &Target)> + Clone {
        self.targets.iter().enumerate().filter(|(_, target)| target.reads)
    }

    /// All pages given, in request order.
    fn all_pages(&self) -> PageList {
        let runs = self.chunks.iter().flat_map(|chunk| chunk.pages.list().runs());
        PageList::from_runs(runs.copied()).unwrap_or_default()
    }

    /// How many pages are pinned for readers.
    pub(in crate::proto) fn pages_leased(&self) -> usize {
        let pinned = self.pinned_until.and(self.announced).filter(|_| self.failure.is_none());
        pinned.map_or(0, |(pages, _)| pages)
    }

    /// The aux row, if there is one.
    pub(in crate::proto) fn aux(&self) -> Option<AuxIndex> {
        self.announced.and_then(|(_, aux)| aux)
    }
}

/// A receiver that has registered.
#[derive(Debug, Clone)]
struct Target {
    peer: PeerId,
    attempt: Attempt,
    /// In which conversation it came.
    link: Link,
    /// It reads: none of the fields of writing are used.
    reads: bool,
    /// The number in its last claim.
    beat: u64,
    /// It needs the pages no more.
    released: bool,
    /// The session has failed after the grant: when the last lease that it may know of is over.
    fence: Option<Time>,
    pages: PageList,
    /// The number of the first of them in the request.
    first: usize,
    /// How many pages the request has at the receiver.
    whole: usize,
    aux: Option<AuxIndex>,
    /// The aux row is this worker's to write.
    aux_here: bool,
    groups: GroupLists,
    /// Plans of the groups, in reverse order; `None` until the request is complete.
    group_plans: Option<Vec<Plan>>,
    /// Registered groups that this worker leaves out.
    skipped: Vec<u16>,
    queued: bool,
    /// First announcement that is not planned yet.
    next_final: usize,
    aux_planned: bool,
    /// What is left of the plan before.
    plan: Option<Plan>,
    next_part: u32,
    /// Known once the last part is posted.
    total: Option<u32>,
    done: RunSet,
    outstanding: u32,
    /// The receiver waits for an acknowledgement of its abort.
    abort_asked: bool,
    /// All of its parts are in place, or it has failed and is quiet.
    over: bool,
}

impl Sending {
    pub(in crate::proto) fn open_sender(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        room: Room,
        receivers: u32,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(cx.config.timing.session_deadline).min(LONGEST);
        let named = Named::new(room, cx.config.args.suffixes_requests());
        let lease = match options.lease {
            Some(Lease::Renewable(duration)) => Lease::Renewable(duration.min(LONGEST)),
            Some(Lease::Fixed(duration)) => Lease::Fixed(duration.min(LONGEST)),
            None => Lease::Renewable(cx.config.timing.kv_lease_duration),
        };
        let sender = SendSession {
            deadline,
            named: named.clone(),
            // The first of them says how many there are, if the scheduler does not.
            receivers: receivers.max(1) as usize,
            learns: receivers == 0,
            mode: options.mode.unwrap_or(cx.config.args.transfer_mode()),
            lease,
            pinned_until: None,
            poll: KvPoll::Bootstrapping,
            announced: None,
            chunks: Vec::new(),
            given: 0,
            chunks_final: 0,
            finals: Vec::new(),
            complete: false,
            groups: None,
            targets: Vec::new(),
            target_of: BTreeMap::new(),
            failure: None,
        };
        self.sessions.insert(session, sender);
        cx.fx.status(session, KvPoll::Bootstrapping, None);
        if cx.stopping {
            return self.fail_sender(cx, session, Cause::WorkerStopped);
        }
        cx.fx.arm(Timer::Deadline(session), cx.fx.now() + deadline);
        // A new sender for the room: what became of earlier ones does not matter any more.
        cx.rendezvous.failed_senders.clear(&named);
        cx.rendezvous.senders.insert(&named, session);
        loop {
            let (peer, attempt) = match cx.rendezvous.registrations.find(&named) {
                Ok(Some(found)) => found,
                Ok(None) => break,
                Err(rooms) => return self.fail_ambiguous(cx, session, &rooms),
            };
            let Some(registration) = self.take_registration(cx, peer, attempt) else { break };
            self.attach(cx, session, peer, attempt, registration);
            if !self.wants_receivers(session) {
                return;
            }
        }
        self.update_sender(cx, session);
        if let Some(cause) = cx.rendezvous.failed_receivers.take(&named, 1) {
            self.fail_sender_of(cx, session, Cause::ByPeer(cause), 1);
        }
    }

    fn wants_receivers(&self, session: SessionId) -> bool {
        let sender = self.sessions.get(&session);
        sender.is_some_and(|sender| !sender.poll.is_terminal() && sender.lacks_receivers())
    }

    pub(in crate::proto) fn init_sender(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        num_pages: usize,
        aux: Option<AuxIndex>,
    ) {
        let bad = check_aux(aux, cx.config.args.geometry().aux_rows().unwrap_or(0));
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if sender.poll.is_terminal() {
            return;
        }
        if sender.announced.is_some() {
            return self.fail_sender(cx, session, Cause::InitOrder);
        }
        sender.announced = Some((num_pages, aux));
        match bad {
            Some(cause) => self.fail_sender(cx, session, cause),
            None => self.check_agreement(cx, session),
        }
    }

    /// Both sides must mean the same pages.
    fn check_agreement(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get(&session) else { return };
        let Some((sent, aux)) = sender.announced else { return };
        let mut writes = each(sender.targets.iter()).filter(|target| !target.reads);
        let disagreement = writes.find_map(|target| {
            let registered = target.whole;
            // A peer that is gone has nothing to agree to.
            let map = cx.peers.get(target.peer)?.maps().out();
            if map.is_none_or(|map| map.check_counts(sent, registered).is_err()) {
                Some(Cause::PageCount { sent, registered })
            } else if target.aux.is_some() != aux.is_some() {
                Some(Cause::AuxOneSided { sender: aux.is_some(), receiver: target.aux.is_some() })
            } else {
                None
            }
        });
        if let Some(cause) = disagreement {
            self.fail_sender(cx, session, cause);
        }
    }

    /// Brings state and posting line up to date after an announcement or a receiver came.
    fn update_sender(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let waits = sender.mode == TransferMode::Push && sender.lacks_receivers();
        if sender.poll.is_terminal() || waits {
            return;
        }
        let poll = if sender.finals.is_empty() { KvPoll::WaitingForInput } else { KvPoll::Transferring };
        if poll > sender.poll {
            sender.poll = poll;
            cx.fx.status(session, poll, None);
        }
        if poll == KvPoll::Transferring {
            self.queue_targets(cx, session);
        }
    }

    fn queue_targets(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        for (index, target) in each(sender.targets.iter_mut().enumerate()) {
            if !target.reads && !target.queued && target.total.is_none() {
                target.queued = true;
                cx.posts.queue(target.peer, Op::Write, session, index);
            }
        }
    }

    /// A registration and its sender meet.
    fn attach(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        id: PeerId,
        attempt: Attempt,
        registration: Registration,
    ) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let wanted = match registration.wish {
            Wish::Write { .. } => TransferMode::Push,
            Wish::Read { .. } => TransferMode::Pull,
        };
        if sender.mode != TransferMode::Auto && sender.mode != wanted {
            let cause = PeerCause::Mode { sender: sender.mode, receiver: wanted };
            self.refuse_attempt(cx, id, attempt, cause.clone());
            return self.fail_sender_of(cx, session, Cause::ByPeer(cause), 1);
        }
        let ranks = registration.ranks.max(1) as usize;
        if sender.learns && sender.targets.is_empty() {
            sender.receivers = ranks;
        } else if !sender.receivers.is_multiple_of(ranks) {
            // The scheduler may give one request to several engines, but not to parts of one.
            let cause = PeerCause::ReceiverCount { expected: sender.receivers, told: ranks };
            self.refuse_attempt(cx, id, attempt, cause.clone());
            return self.fail_sender_of(cx, session, Cause::ByPeer(cause), 1);
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let (receiver, link) = (peer.incarnation(), peer.conversation());
        // It was served in a conversation that is over, and does not know: not another receiver, but the
        // same one in the same place.
        let before = sender.target_of.get(&receiver).copied();
        let replaced = before.filter(|&before| {
            sender
                .targets
                .get(before)
                .is_some_and(|target| target.link != link && target.over && target.outstanding == 0)
        });
        let index = replaced.unwrap_or(sender.targets.len());
        sender.target_of.insert(receiver, index);
        let (incoming, (pages, first, whole), (aux, aux_here), groups, beat) = match registration.wish {
            Wish::Write { pages, first, whole, aux, aux_here, groups } => {
                let pages = (pages, first as usize, whole as usize);
                (Incoming::Active(session, index), pages, (aux, aux_here), groups, 0)
            }
            Wish::Read { beat } => {
                let until = Time::ZERO;
                let reading =
                    Incoming::Reading { session, target: index, until, extension: None, intact: false };
                (reading, Default::default(), Default::default(), Default::default(), beat)
            }
        };
        peer.incoming_mut().insert(attempt, incoming);
        let target = Target {
            peer: id,
            attempt,
            link,
            reads: wanted == TransferMode::Pull,
            beat,
            released: false,
            fence: None,
            pages,
            first,
            whole,
            aux,
            aux_here,
            groups,
            group_plans: None,
            skipped: Vec::new(),
            queued: false,
            next_final: 0,
            aux_planned: false,
            plan: None,
            next_part: 0,
            total: None,
            done: RunSet::default(),
            outstanding: 0,
            abort_asked: false,
            over: false,
        };
        match sender.targets.get_mut(index) {
            Some(before) => *before = target,
            None => sender.targets.push(target),
        }
        if !sender.lacks_receivers() {
            cx.rendezvous.senders.remove(&sender.named, session);
        }
        match wanted {
            TransferMode::Pull => self.answer_claim(cx, id, attempt, session, index),
            _ => {
                cx.send(id, Body::Registered(Registered { attempt }));
                cx.want_permission(id);
            }
        }
        self.check_agreement(cx, session);
        self.plan_groups(cx, session);
        self.update_sender(cx, session);
    }

    /// A session's receiver at this position.
    fn target_mut(&mut self, session: SessionId, index: usize) -> Option<&mut Target> {
        self.sessions.get_mut(&session)?.targets.get_mut(index)
    }

    /// A post of the target has ended: is the target over, and with it the session?
    fn target_advanced(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let failure = sender.failure.clone();
        let Some(target) = sender.targets.get_mut(index) else { return };
        let leased = target.fence.is_some_and(|fence| fence > cx.fx.now());
        let held = target.reads && leased && !target.released && !target.abort_asked;
        if target.over || target.outstanding > 0 || held {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        match failure {
            Some(cause) => {
                target.over = true;
                let abort_asked = target.abort_asked;
                self.attempt_failed(cx, id, attempt, cause, abort_asked);
            }
            None => match target.total {
                Some(total) if target.done.len() == u64::from(total) => {
                    target.over = true;
                    if let Some(peer) = cx.peers.get_mut(id)
                        && !peer.incoming().is_closed(attempt)
                    {
                        let skipped = target.skipped.clone();
                        peer.incoming_mut().insert(attempt, Incoming::Served { total, skipped });
                    }
                }
                _ => return,
            },
        }
        self.maybe_end_sender(cx, session);
    }

    fn maybe_end_sender(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if !each(sender.targets.iter()).all(|target| target.over) {
            return;
        }
        if sender.poll != KvPoll::Failed {
            if sender.lacks_receivers() {
                return;
            }
            sender.poll = KvPoll::Success;
            cx.fx.status(session, KvPoll::Success, None);
        }
        cx.fx.cancel(Timer::Deadline(session));
        cx.fx.cancel(Timer::Lease(session));
        let Some(sender) = self.sessions.remove(&session) else { return };
        self.pages_leased -= sender.pages_leased();
        if sender.mode != TransferMode::Push {
            let consumed = PeerCause::GrantConsumed { nonce: session.0 };
            let max = cx.config.limits.max_ended_grants;
            self.ended_grants.insert(session, sender.failure.unwrap_or(consumed), max);
        }
        for chunk in each(sender.chunks) {
            cx.fx.release(session, chunk.pages);
        }
        if let Some(groups) = sender.groups {
            cx.fx.release_groups(session, groups, Vec::new());
        }
    }

    pub(in crate::proto) fn fail_sender(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        self.fail_sender_of(cx, session, cause, 0);
    }

    /// Fails a sender; `gone` of its missing receivers will never come.
    fn fail_sender_of(&mut self, cx: &mut Context, session: SessionId, cause: Cause, gone: usize) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if sender.poll.is_terminal() {
            return;
        }
        sender.poll = KvPoll::Failed;
        // Not leased any more, but in quarantine.
        self.pages_leased -= sender.pages_leased();
        let told = cause.for_peer();
        sender.failure = Some(told.clone());
        let missing = sender.receivers.saturating_sub(sender.met());
        let phase = if missing > 0 { Phase::Rendezvous } else { Phase::Transfer };
        let peer = sender.targets.first().and_then(|target| cx.peers.get(target.peer));
        let peer = peer.map(|peer| peer.worker().clone());
        let failure = TransferError { room: sender.named.room.clone(), peer, phase, cause };
        let named = sender.named.clone();
        let granted = sender.pinned_until.is_some();
        let loud = each(sender.targets.iter()).filter(|target| {
            (target.outstanding > 0 || target.reads && granted) && !target.abort_asked && !target.over
        });
        let loud: Vec<_> = loud.map(|target| (target.peer, target.attempt)).collect();
        let (targets, learns) = (sender.targets.len(), sender.learns);

        cx.fx.cancel(Timer::Deadline(session));
        cx.rendezvous.senders.remove(&named, session);
        // A scheduler that did not say how many come leaves it to the first to say.
        let latecomers = match learns && targets == 0 {
            true => Latecomers::AllBut(gone),
            false => Latecomers::Left(missing.saturating_sub(gone)),
        };
        self.remember_failed_sender(cx, named, &told, latecomers);
        cx.fx.status(session, KvPoll::Failed, Some(failure));
        for (peer, attempt) in each(loud) {
            cx.send(peer, Body::Failed(Failed { attempt, cause: told.clone(), quiet: false }));
        }
        cx.posts.leave(session);
        for post in each(cx.posts.of(session)) {
            cx.fx.output(Output::Cancel { post });
        }
        self.fence_readers(cx, session);
        for index in each(0..targets) {
            self.target_advanced(cx, session, index);
        }
        self.maybe_end_sender(cx, session);
    }

    /// Receivers that have not registered yet are told when they do.
    pub(in crate::proto) fn remember_failed_sender(
        &mut self,
        cx: &mut Context,
        named: Named,
        cause: &PeerCause,
        latecomers: Latecomers,
    ) {
        if matches!(latecomers, Latecomers::Left(0)) {
            return;
        }
        let until = cx.fx.now() + cx.config.timing.failed_room_ttl;
        let max = cx.config.limits.max_failed_rooms;
        let rooms = &mut cx.rendezvous.failed_senders;
        rooms.insert((named, cause.clone()), latecomers, until, (None, max, max));
        cx.fx.arm_once(Timer::Rooms, until);
    }

    pub(in crate::proto) fn expire_rooms(&mut self, cx: &mut Context) {
        let rooms = &mut cx.rendezvous;
        rooms.failed_senders.expire(cx.fx.now());
        rooms.failed_receivers.expire(cx.fx.now());
        let next = [rooms.failed_senders.next_expiry(), rooms.failed_receivers.next_expiry()];
        if let Some(next) = next.into_iter().flatten().min() {
            cx.fx.arm(Timer::Rooms, next);
        }
    }
}
