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

use std::collections::BTreeMap;
use std::time::Duration;

use super::chunks::{Chunk, Final};
use super::incoming::Incoming;
use super::io::{LONGEST, Output};
use super::node::Node;
use super::peer::{Registration, Wish};
use super::receive::check_aux;
use super::rendezvous::{Latecomers, Named};
use super::run_set::RunSet;
use super::timer::Timer;
use crate::error::{Cause, PeerCause, Phase, TransferError};
use crate::groups::{GroupLists, Groups};
use crate::id::{Attempt, AuxIndex, Incarnation, PeerId, Room, SessionId};
use crate::lease::{Lease, TransferMode};
use crate::meter::each;
use crate::pages::PageList;
use crate::plan::Plan;
use crate::plane::Op;
use crate::poll::KvPoll;
use crate::session_options::SessionOptions;
use crate::time::Time;
use crate::wire::{Body, Failed, Link, Registered};

/// A sending session.
#[derive(Debug)]
pub(super) struct SendSession {
    pub(super) deadline: Duration,
    pub(super) named: Named,
    /// How many ranks receive: told by the scheduler, or by the first of them.
    pub(super) receivers: usize,
    /// The scheduler has not said how many.
    pub(super) learns: bool,
    pub(super) mode: TransferMode,
    /// How long the pages stay for readers.
    pub(super) lease: Lease,
    /// Until when they stay at least; set when they are complete.
    pub(super) pinned_until: Option<Time>,
    pub(super) poll: KvPoll,
    pub(super) announced: Option<(usize, Option<AuxIndex>)>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) given: usize,
    /// How many chunks are final in all layers.
    pub(super) chunks_final: usize,
    /// What of the chunks is final, in the order in which it was announced.
    pub(super) finals: Vec<Final>,
    /// All announced pages have been given, and are final.
    pub(super) complete: bool,
    /// Items of state groups, sent with the last chunk.
    pub(super) groups: Option<Groups>,
    pub(super) targets: Vec<Target>,
    /// The last target of each receiver.
    pub(super) target_of: BTreeMap<Incarnation, usize>,
    pub(super) failure: Option<PeerCause>,
}

impl SendSession {
    /// How many receivers have come.
    pub(super) fn met(&self) -> usize {
        self.targets.len()
    }

    /// True if receivers are to come.
    pub(super) fn lacks_receivers(&self) -> bool {
        self.met() < self.receivers
    }

    /// The receivers that read, with their positions.
    pub(super) fn readers(&self) -> impl Iterator<Item = (usize, &Target)> + Clone {
        self.targets.iter().enumerate().filter(|(_, target)| target.reads)
    }

    /// All pages given, in request order.
    pub(super) fn all_pages(&self) -> PageList {
        let runs = self.chunks.iter().flat_map(|chunk| chunk.pages.list().runs());
        PageList::from_runs(runs.copied()).unwrap_or_default()
    }

    /// How many pages are pinned for readers.
    pub(super) fn pages_leased(&self) -> usize {
        let pinned = self.pinned_until.and(self.announced).filter(|_| self.failure.is_none());
        pinned.map_or(0, |(pages, _)| pages)
    }

    /// The aux row, if there is one.
    pub(super) fn aux(&self) -> Option<AuxIndex> {
        self.announced.and_then(|(_, aux)| aux)
    }
}

/// A receiver that has registered.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) peer: PeerId,
    pub(super) attempt: Attempt,
    /// In which conversation it came.
    pub(super) link: Link,
    /// It reads: none of the fields of writing are used.
    pub(super) reads: bool,
    /// The number in its last claim.
    pub(super) beat: u64,
    /// It needs the pages no more.
    pub(super) released: bool,
    /// The session has failed after the grant: when the last lease that it may know of is over.
    pub(super) fence: Option<Time>,
    pub(super) pages: PageList,
    /// The number of the first of them in the request.
    pub(super) first: usize,
    /// How many pages the request has at the receiver.
    pub(super) whole: usize,
    pub(super) aux: Option<AuxIndex>,
    /// The aux row is this worker's to write.
    pub(super) aux_here: bool,
    pub(super) groups: GroupLists,
    /// Plans of the groups, in reverse order; `None` until the request is complete.
    pub(super) group_plans: Option<Vec<Plan>>,
    /// Registered groups that this worker leaves out.
    pub(super) skipped: Vec<u16>,
    pub(super) queued: bool,
    /// First announcement that is not planned yet.
    pub(super) next_final: usize,
    pub(super) aux_planned: bool,
    /// What is left of the plan before.
    pub(super) plan: Option<Plan>,
    pub(super) next_part: u32,
    /// Known once the last part is posted.
    pub(super) total: Option<u32>,
    pub(super) done: RunSet,
    pub(super) outstanding: u32,
    /// The receiver waits for an acknowledgement of its abort.
    pub(super) abort_asked: bool,
    /// All of its parts are in place, or it has failed and is quiet.
    pub(super) over: bool,
}

impl Node {
    pub(super) fn open_sender(
        &mut self,
        session: SessionId,
        room: Room,
        receivers: u32,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(self.config.timing.session_deadline).min(LONGEST);
        let named = Named::new(room, self.config.args.suffixes_requests());
        let lease = match options.lease {
            Some(Lease::Renewable(duration)) => Lease::Renewable(duration.min(LONGEST)),
            Some(Lease::Fixed(duration)) => Lease::Fixed(duration.min(LONGEST)),
            None => Lease::Renewable(self.config.timing.kv_lease_duration),
        };
        let sender = SendSession {
            deadline,
            named: named.clone(),
            // The first of them says how many there are, if the scheduler does not.
            receivers: receivers.max(1) as usize,
            learns: receivers == 0,
            mode: options.mode.unwrap_or(self.config.args.transfer_mode()),
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
        self.senders.insert(session, sender);
        self.status(session, KvPoll::Bootstrapping, None);
        if self.stopping {
            return self.fail_sender(session, Cause::WorkerStopped);
        }
        self.timers.arm(Timer::Deadline(session), self.now + deadline);
        // A new sender for the room: what became of earlier ones does not matter any more.
        self.rendezvous.failed_senders.clear(&named);
        self.rendezvous.senders.insert(&named, session);
        loop {
            let (peer, attempt) = match self.rendezvous.registrations.find(&named) {
                Ok(Some(found)) => found,
                Ok(None) => break,
                Err(rooms) => return self.fail_ambiguous(session, &rooms),
            };
            let Some(registration) = self.take_registration(peer, attempt) else { break };
            self.attach(session, peer, attempt, registration);
            if !self.lacks_receivers(session) {
                return;
            }
        }
        self.update_sender(session);
        if let Some(cause) = self.rendezvous.failed_receivers.take(&named, 1) {
            self.fail_sender_of(session, Cause::ByPeer(cause), 1);
        }
    }

    fn lacks_receivers(&self, session: SessionId) -> bool {
        let sender = self.senders.get(&session);
        sender.is_some_and(|sender| !sender.poll.is_terminal() && sender.lacks_receivers())
    }

    pub(super) fn init_sender(&mut self, session: SessionId, num_pages: usize, aux: Option<AuxIndex>) {
        let bad = check_aux(aux, self.config.args.geometry().aux_rows().unwrap_or(0));
        let Some(sender) = self.senders.get_mut(&session) else { return };
        if sender.poll.is_terminal() {
            return;
        }
        if sender.announced.is_some() {
            return self.fail_sender(session, Cause::InitOrder);
        }
        sender.announced = Some((num_pages, aux));
        match bad {
            Some(cause) => self.fail_sender(session, cause),
            None => self.check_agreement(session),
        }
    }

    /// Both sides must mean the same pages.
    fn check_agreement(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get(&session) else { return };
        let Some((sent, aux)) = sender.announced else { return };
        let mut writes = each(sender.targets.iter()).filter(|target| !target.reads);
        let disagreement = writes.find_map(|target| {
            let registered = target.whole;
            // A peer that is gone has nothing to agree to.
            let map = self.peers.get(target.peer)?.out.as_ref();
            if map.is_none_or(|map| map.check_counts(sent, registered).is_err()) {
                Some(Cause::PageCount { sent, registered })
            } else if target.aux.is_some() != aux.is_some() {
                Some(Cause::AuxOneSided { sender: aux.is_some(), receiver: target.aux.is_some() })
            } else {
                None
            }
        });
        if let Some(cause) = disagreement {
            self.fail_sender(session, cause);
        }
    }

    /// Brings state and posting line up to date after an announcement or a receiver came.
    pub(super) fn update_sender(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let waits = sender.mode == TransferMode::Push && sender.lacks_receivers();
        if sender.poll.is_terminal() || waits {
            return;
        }
        let poll = if sender.finals.is_empty() { KvPoll::WaitingForInput } else { KvPoll::Transferring };
        if poll > sender.poll {
            sender.poll = poll;
            self.status(session, poll, None);
        }
        if poll == KvPoll::Transferring {
            self.queue_targets(session);
        }
    }

    fn queue_targets(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        for (index, target) in each(sender.targets.iter_mut().enumerate()) {
            if !target.reads && !target.queued && target.total.is_none() {
                target.queued = true;
                self.posting.queue(target.peer, Op::Write, session, index);
            }
        }
    }

    /// A registration and its sender meet.
    pub(super) fn attach(
        &mut self,
        session: SessionId,
        id: PeerId,
        attempt: Attempt,
        registration: Registration,
    ) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let wanted = match registration.wish {
            Wish::Write { .. } => TransferMode::Push,
            Wish::Read { .. } => TransferMode::Pull,
        };
        if sender.mode != TransferMode::Auto && sender.mode != wanted {
            let cause = PeerCause::Mode { sender: sender.mode, receiver: wanted };
            self.refuse_attempt(id, attempt, cause.clone());
            return self.fail_sender_of(session, Cause::ByPeer(cause), 1);
        }
        let ranks = registration.ranks.max(1) as usize;
        if sender.learns && sender.targets.is_empty() {
            sender.receivers = ranks;
        } else if !sender.receivers.is_multiple_of(ranks) {
            // The scheduler may give one request to several engines, but not to parts of one.
            let cause = PeerCause::ReceiverCount { expected: sender.receivers, told: ranks };
            self.refuse_attempt(id, attempt, cause.clone());
            return self.fail_sender_of(session, Cause::ByPeer(cause), 1);
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        let (receiver, link) = (peer.incarnation, peer.ours);
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
        peer.incoming.insert(attempt, incoming);
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
            self.rendezvous.senders.remove(&sender.named, session);
        }
        match wanted {
            TransferMode::Pull => self.answer_claim(id, attempt, session, index),
            _ => {
                self.send(id, Body::Registered(Registered { attempt }));
                self.want_permission(id);
            }
        }
        self.check_agreement(session);
        self.plan_groups(session);
        self.update_sender(session);
    }

    /// A session's receiver at this position.
    pub(super) fn target_mut(&mut self, session: SessionId, index: usize) -> Option<&mut Target> {
        self.senders.get_mut(&session)?.targets.get_mut(index)
    }

    /// A post of the target has ended: is the target over, and with it the session?
    pub(super) fn target_advanced(&mut self, session: SessionId, index: usize) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let failure = sender.failure.clone();
        let Some(target) = sender.targets.get_mut(index) else { return };
        let leased = target.fence.is_some_and(|fence| fence > self.now);
        let held = target.reads && leased && !target.released && !target.abort_asked;
        if target.over || target.outstanding > 0 || held {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        match failure {
            Some(cause) => {
                target.over = true;
                let abort_asked = target.abort_asked;
                self.attempt_failed(id, attempt, cause, abort_asked);
            }
            None => match target.total {
                Some(total) if target.done.len() == u64::from(total) => {
                    target.over = true;
                    if let Some(peer) = self.peers.get_mut(id)
                        && !peer.incoming.is_closed(attempt)
                    {
                        let skipped = target.skipped.clone();
                        peer.incoming.insert(attempt, Incoming::Served { total, skipped });
                    }
                }
                _ => return,
            },
        }
        self.maybe_end_sender(session);
    }

    pub(super) fn maybe_end_sender(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        if !each(sender.targets.iter()).all(|target| target.over) {
            return;
        }
        if sender.poll != KvPoll::Failed {
            if sender.lacks_receivers() {
                return;
            }
            sender.poll = KvPoll::Success;
            self.status(session, KvPoll::Success, None);
        }
        self.timers.cancel(Timer::Deadline(session));
        self.timers.cancel(Timer::Lease(session));
        let Some(sender) = self.senders.remove(&session) else { return };
        self.pages_leased -= sender.pages_leased();
        if sender.mode != TransferMode::Push {
            let consumed = PeerCause::GrantConsumed { nonce: session.0 };
            let max = self.config.limits.max_ended_grants;
            self.ended_grants.insert(session, sender.failure.unwrap_or(consumed), max);
        }
        for chunk in each(sender.chunks) {
            self.output(Output::Release { session, resource: chunk.pages.into() });
        }
        if let Some(groups) = sender.groups {
            self.release_groups(session, groups, Vec::new());
        }
    }

    pub(super) fn fail_sender(&mut self, session: SessionId, cause: Cause) {
        self.fail_sender_of(session, cause, 0);
    }

    /// Fails a sender; `gone` of its missing receivers will never come.
    pub(super) fn fail_sender_of(&mut self, session: SessionId, cause: Cause, gone: usize) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
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
        let peer = sender.targets.first().and_then(|target| self.peers.get(target.peer));
        let peer = peer.map(|peer| peer.worker.clone());
        let failure = TransferError { room: sender.named.room.clone(), peer, phase, cause };
        let named = sender.named.clone();
        let granted = sender.pinned_until.is_some();
        let loud = each(sender.targets.iter()).filter(|target| {
            (target.outstanding > 0 || target.reads && granted) && !target.abort_asked && !target.over
        });
        let loud: Vec<_> = loud.map(|target| (target.peer, target.attempt)).collect();
        let (targets, learns) = (sender.targets.len(), sender.learns);

        self.timers.cancel(Timer::Deadline(session));
        self.rendezvous.senders.remove(&named, session);
        // A scheduler that did not say how many come leaves it to the first to say.
        let latecomers = match learns && targets == 0 {
            true => Latecomers::AllBut(gone),
            false => Latecomers::Left(missing.saturating_sub(gone)),
        };
        self.remember_failed_sender(named, &told, latecomers);
        self.status(session, KvPoll::Failed, Some(failure));
        for (peer, attempt) in each(loud) {
            self.send(peer, Body::Failed(Failed { attempt, cause: told.clone(), quiet: false }));
        }
        self.posting.leave(session);
        for post in each(self.posting.of(session)) {
            self.output(Output::Cancel { post });
        }
        self.fence_readers(session);
        for index in each(0..targets) {
            self.target_advanced(session, index);
        }
        self.maybe_end_sender(session);
    }

    /// Receivers that have not registered yet are told when they do.
    pub(super) fn remember_failed_sender(&mut self, named: Named, cause: &PeerCause, latecomers: Latecomers) {
        if matches!(latecomers, Latecomers::Left(0)) {
            return;
        }
        let until = self.now + self.config.timing.failed_room_ttl;
        let max = self.config.limits.max_failed_rooms;
        let rooms = &mut self.rendezvous.failed_senders;
        rooms.insert((named, cause.clone()), latecomers, until, (None, max, max));
        self.timers.arm_once(Timer::Rooms, until);
    }

    pub(super) fn expire_rooms(&mut self) {
        let rooms = &mut self.rendezvous;
        rooms.failed_senders.expire(self.now);
        rooms.failed_receivers.expire(self.now);
        let next = [rooms.failed_senders.next_expiry(), rooms.failed_receivers.next_expiry()];
        if let Some(next) = next.into_iter().flatten().min() {
            self.timers.arm(Timer::Rooms, next);
        }
    }
}
