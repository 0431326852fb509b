//! Attempts of peers at this worker, before and after a session serves them: waiting registrations,
//! aborts, and answers to receivers that missed a message.
//!
//! [`Incoming`] lists the states of an attempt. An attempt that its receiver has ended is closed
//! for ever: a registration that arrives after its abort is never served.

use std::time::Duration;

use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::{each, step};
use crate::page_list::MAX_PAGES;
use crate::proto::context::{Admits, Context};
use crate::proto::conversation::{Incoming, Maps, Peer, Registration};
use crate::proto::ending::Ending;
use crate::proto::groups::{check_aux, check_peer_groups};
use crate::proto::rendezvous::{Ambiguity, Named};
use crate::proto::sending::Sending;
use crate::proto::sending::target::{Target, Written};
use crate::proto::timer::Timer;
use crate::trace::Dropped;
use crate::transport::Origin;
use crate::wire::{Abort, AbortAck, Body, Delivery, Destination, Failed, Progress, Register, Registered};

/// Most runs of parts in one answer. The receiver asks again for the rest.
const MAX_TOLD_RUNS: usize = 1024;

impl Sending {
    /// A receiver asks for the pages of a room.
    pub(in crate::proto) fn on_room_register(&mut self, cx: &mut Context, id: PeerId, register: Register) {
        if cx.config.service.by_content {
            cx.fx.drop_frame(Some(id), Dropped::NoSuchAttempt);
            return;
        }
        self.on_register(cx, id, register);
    }

    pub(super) fn on_register(&mut self, cx: &mut Context, id: PeerId, register: Register) {
        let Register { attempt, low_watermark, room, ranks, ttl_ms, delivery } = register;
        self.on_low_watermark(cx, id, low_watermark);
        if let Delivery::Write(to) = &delivery {
            cx.note_permission(id, to.ask, to.permit_ms);
        }
        let Some(peer) = cx.peers.get(id) else { return };
        if !self.may_note(cx, peer, attempt) {
            cx.fx.drop_frame(Some(id), Dropped::NoSuchAttempt);
            return;
        }
        if peer.incoming().get(attempt).is_some() {
            return self.register_again(cx, id, attempt, &delivery);
        }
        let (named, origin) = (Named::new(room, peer.suffixes_requests()), peer.origin());
        let out_of_range = matches!(&delivery, Delivery::Write(to) if is_out_of_range(to, peer.maps()));
        if out_of_range && !cx.is_stopping() {
            return self.refuse_registration(cx, id, attempt, &named, PeerCause::OutOfRange);
        }
        let lease_id = if let Delivery::Read(acquire) = &delivery { acquire.lease_id } else { None };
        let registration = Registration { named, origin, ranks, delivery };
        match lease_id.filter(|_| !cx.is_stopping()) {
            Some(lease_id) => self.acquire_lease(cx, id, attempt, lease_id, registration),
            None => self.seek_sender(cx, id, attempt, registration, ttl_ms),
        }
    }

    /// A registration is repeated. Does nothing if its number is that of an attempt of the other
    /// kind.
    fn register_again(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt, delivery: &Delivery) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        match (peer.incoming_mut().get_mut(attempt), delivery) {
            (None, _) => self.tell_about(cx, id, attempt),
            (Some(&mut Incoming::Reading { session, target, .. }), Delivery::Read(acquire)) => {
                if let Some(reads) = self.target_mut(session, target).and_then(Target::reads_mut) {
                    reads.number = acquire.number;
                }
                self.answer_acquire(cx, id, attempt, session, target);
            }
            (Some(Incoming::Reading { .. }), Delivery::Write(_)) => {}
            (Some(Incoming::Active(..)), Delivery::Read(_)) => {}
            (Some(incoming), delivery) => {
                if let (Incoming::Waiting(registration), Delivery::Read(acquire)) = (incoming, delivery)
                    && let Delivery::Read(known) = &mut registration.delivery
                {
                    known.number = acquire.number;
                }
                cx.send(id, Body::Registered(Registered { attempt }));
            }
        }
    }

    /// True if a message about an attempt with this number may be accepted: the attempt is not
    /// over, and the number is near enough to the others.
    pub(super) fn may_note(&self, cx: &Context, peer: &Peer, attempt: Attempt) -> bool {
        let attempts = &peer.incoming();
        attempts.get(attempt).is_some()
            || !attempts.is_closed(attempt) && attempts.has_room(attempt, cx.config.limits.max_attempts)
    }

    /// Finds the sender for a new registration or acquire message, or lets the message wait for
    /// one.
    pub(super) fn seek_sender(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        registration: Registration,
        ttl_ms: u64,
    ) {
        if cx.is_stopping() {
            return self.refuse_attempt(cx, id, attempt, PeerCause::WorkerStopped);
        }
        if cx.peers.get(id).is_some_and(|peer| peer.is_refused()) {
            return self.refuse_registration(cx, id, attempt, &registration.named, PeerCause::Protocol);
        }
        cx.watch_peer(id);
        match cx.rendezvous.sender_for(&registration.named) {
            Ok(Some(session)) => return self.attach(cx, session, id, attempt, registration),
            Ok(None) => {}
            Err(rooms) => return self.refuse_ambiguous(cx, id, attempt, &rooms),
        }
        let failed = cx.rendezvous.failed_sender_for(&registration.named, registration.ranks);
        if let Some(cause) = failed {
            return self.refuse_attempt(cx, id, attempt, cause);
        }
        if cx.admits == Admits::OpenRooms {
            return self.refuse_attempt(cx, id, attempt, PeerCause::WorkerStopped);
        }
        let Registration { named, origin, .. } = &registration;
        let (runs, writes) = (registration.runs(), matches!(registration.delivery, Delivery::Write(_)));
        if !cx.rendezvous.has_room(&cx.config.limits, *origin, runs) {
            return self.refuse_registration(cx, id, attempt, &named.clone(), PeerCause::Overloaded);
        }
        cx.rendezvous.wait(named, (id, attempt), *origin, runs);
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.incoming_mut().insert(attempt, Incoming::Waiting(Box::new(registration)));
        }
        let ttl =
            Duration::from_millis(ttl_ms).min(cx.config.timing.session_deadline.max(Duration::from_secs(1)));
        cx.fx.arm(Timer::Registration(id, attempt), cx.fx.now() + ttl);
        cx.send(id, Body::Registered(Registered { attempt }));
        if writes {
            cx.want_permission(id);
        }
    }

    /// The worker drains: no sender will come for the registrations that wait.
    pub(in crate::proto) fn refuse_waiting(&mut self, cx: &mut Context) {
        let waiting = cx.peers.iter().flat_map(|(id, peer)| {
            let live = peer.incoming().live();
            live.filter(|(_, incoming)| matches!(incoming, Incoming::Waiting(_)))
                .map(move |(attempt, _)| (id, attempt))
        });
        let waiting: Vec<(PeerId, Attempt)> = waiting.collect();
        for (id, attempt) in each(waiting) {
            if self.take_registration(cx, id, attempt).is_some() {
                self.refuse_attempt(cx, id, attempt, PeerCause::WorkerStopped);
            }
        }
    }

    /// Two senders wait whose rooms could both be meant by a registration: none of the three can be
    /// served.
    fn refuse_ambiguous(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt, rooms: &Ambiguity) {
        let (room, other) = rooms.clone();
        self.refuse_attempt(cx, id, attempt, PeerCause::AmbiguousRoom { room, other });
        self.fail_ambiguous_senders(cx, rooms);
    }

    /// Two registrations wait whose rooms could both be meant by a new sender.
    pub(super) fn fail_ambiguous(&mut self, cx: &mut Context, session: SessionId, (one, other): &Ambiguity) {
        for (room, other) in [(one, other), (other, one)] {
            while let Some((id, attempt)) = cx.rendezvous.registration_in(room) {
                let (room, other) = (room.clone(), other.clone());
                self.take_registration(cx, id, attempt);
                self.refuse_attempt(cx, id, attempt, PeerCause::AmbiguousRoom { room, other });
            }
        }
        let (room, other) = (one.clone(), other.clone());
        self.fail(cx, session, Cause::AmbiguousRoom { room, other });
    }

    fn fail_ambiguous_senders(&mut self, cx: &mut Context, (one, other): &Ambiguity) {
        for (room, other) in [(one, other), (other, one)] {
            while let Some(session) = cx.rendezvous.sender_in(room) {
                step(1);
                let (room, other) = (room.clone(), other.clone());
                self.fail_one(cx, session, Cause::AmbiguousRoom { room, other });
            }
        }
    }

    pub(super) fn take_registration(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
    ) -> Option<Registration> {
        let peer = cx.peers.get_mut(id)?;
        match peer.incoming_mut().remove(attempt) {
            Some(Incoming::Waiting(registration)) => {
                let Registration { named, origin, .. } = &*registration;
                cx.rendezvous.leave(named, (id, attempt), *origin, registration.runs());
                cx.fx.cancel(Timer::Registration(id, attempt));
                Some(*registration)
            }
            other => {
                if let Some(other) = other {
                    peer.incoming_mut().insert(attempt, other);
                }
                None
            }
        }
    }

    pub(in crate::proto) fn on_registration_expired(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
    ) {
        self.drop_registration(cx, id, attempt, PeerCause::DeadlineExceeded);
    }

    /// Fails a registration that waits for its sender.
    pub(super) fn drop_registration(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        cause: PeerCause,
    ) {
        if let Some(registration) = self.take_registration(cx, id, attempt) {
            self.refuse_registration(cx, id, attempt, &registration.named, cause);
        }
    }

    /// Fails a registration for a reason of this side: its sender should not wait for another
    /// registration.
    fn refuse_registration(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        named: &Named,
        cause: PeerCause,
    ) {
        self.refuse_attempt(cx, id, attempt, cause.clone());
        let origin = cx.peers.get(id).and_then(|peer| peer.origin());
        self.receiver_gave_up(cx, named, origin, cause);
    }

    /// Fails an attempt that no session serves.
    pub(super) fn refuse_attempt(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        cause: PeerCause,
    ) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.incoming_mut().insert(attempt, Incoming::Failed { cause: cause.clone() });
        }
        cx.watch_peer(id);
        cx.send(id, Body::Failed(Failed { attempt, cause, quiet: true }));
    }

    pub(in crate::proto) fn on_abort(&mut self, cx: &mut Context, id: PeerId, abort: Abort) {
        let Abort { attempt, room, lease_id, cause, low_watermark, failed_ms_ago } = abort;
        self.on_low_watermark(cx, id, low_watermark);
        let Some(peer) = cx.peers.get(id) else { return };
        if peer.incoming().is_closed(attempt)
            && peer.incoming().get(attempt).is_none()
            && !cx.peers.lingers(id)
        {
            return cx.send(id, Body::AbortAck(AbortAck { attempt }));
        }
        if !self.may_note(cx, peer, attempt) {
            cx.fx.drop_frame(Some(id), Dropped::NoSuchAttempt);
            return;
        }
        let (named, origin) = (Named::new(room, peer.suffixes_requests()), peer.origin());
        if peer.incoming().get(attempt).is_none() && cx.peers.lingers(id) {
            // The abort may be of a former conversation, whose writes have not ended. The peer will
            // ask again.
            return;
        }
        match peer.incoming().get(attempt) {
            Some(&Incoming::Active(session, index)) => {
                let target = self.sessions.get_mut(&session).and_then(|sender| sender.targets.get_mut(index));
                if let Some(target) = target {
                    target.ask_abort();
                }
                // The abort is acknowledged once the target's posts have ended: now or later.
                return self.fail(cx, session, Cause::ByPeer(cause));
            }
            Some(&Incoming::Reading { session, target: index, .. }) => {
                if let Some(target) = self.target_mut(session, index) {
                    target.ask_abort();
                }
                self.fail(cx, session, Cause::ByPeer(cause));
                // The session may have failed before.
                return self.reader_let_go(cx, session, index);
            }
            Some(Incoming::Waiting(_)) => {
                self.take_registration(cx, id, attempt);
                self.receiver_gave_up(cx, &named, origin, cause);
            }
            Some(Incoming::Served { .. } | Incoming::Failed { .. }) => {}
            None => match (lease_id, failed_ms_ago) {
                (Some(lease_id), _) => self.reader_gave_up(cx, lease_id, &named, cause),
                (None, Some(ago)) => {
                    self.receiver_had_given_up(cx, &named, Duration::from_millis(ago), cause)
                }
                (None, None) => self.receiver_gave_up(cx, &named, origin, cause),
            },
        }
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.incoming_mut().close(attempt);
        }
        cx.send(id, Body::AbortAck(AbortAck { attempt }));
    }

    /// A receiver will never register. Its sender is told the cause, now or when it comes.
    fn receiver_gave_up(
        &mut self,
        cx: &mut Context,
        named: &Named,
        origin: Option<Origin>,
        cause: PeerCause,
    ) {
        if cx.config.service.by_content {
            return;
        }
        match cx.rendezvous.sender_for(named) {
            Ok(Some(session)) => self.fail_one(cx, session, Cause::ByPeer(cause)),
            Ok(None) => {
                let with = (&mut cx.fx, &cx.config);
                cx.rendezvous.receiver_failed(with, named.clone(), cause, origin);
            }
            // One of two senders waits in vain, and nothing tells which.
            Err(rooms) => self.fail_ambiguous_senders(cx, &rooms),
        }
    }

    /// A receiver failed in an earlier conversation, in which its sender may have been told. Only a sender that was open
    /// then is meant: any other is for a later request in the room.
    fn receiver_had_given_up(&mut self, cx: &mut Context, named: &Named, ago: Duration, cause: PeerCause) {
        if cx.config.service.by_content {
            return;
        }
        // The oldest of several senders is found: if that one was opened later, so were all others. Nothing tells which
        // of two similar rooms is meant.
        let Ok(Some(session)) = cx.rendezvous.sender_for(named) else { return };
        if self.open_for(cx, session).is_some_and(|open_for| open_for >= ago) {
            self.fail_one(cx, session, Cause::ByPeer(cause));
        }
    }

    /// For how long the session has been open.
    fn open_for(&self, cx: &Context, session: SessionId) -> Option<Duration> {
        let left = cx.fx.due(Timer::Deadline(session))? - cx.fx.now();
        Some(self.sessions.get(&session)?.standing.deadline().saturating_sub(left))
    }

    /// Answers a receiver that has heard nothing about an attempt.
    pub(in crate::proto) fn tell_about(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        let Some(peer) = cx.peers.get(id) else { return };
        let body = match peer.incoming().get(attempt) {
            Some(Incoming::Waiting(_)) => return,
            Some(Incoming::Active(session, index)) => {
                let Some(sender) = self.sessions.get(session) else { return };
                let written = sender.targets.get(*index).and_then(Target::written);
                match (sender.standing.failure(), written.and_then(Written::progress)) {
                    (Some(cause), _) => Body::Failed(Failed { attempt, cause: cause.clone(), quiet: false }),
                    (None, None) => return,
                    (None, Some((done, total, skipped))) => {
                        let runs = done.runs().take(MAX_TOLD_RUNS);
                        let done = runs.map(|(start, count)| (start as u32, count as u32)).collect();
                        Body::Progress(Progress { attempt, done, total, skipped: skipped.to_vec() })
                    }
                }
            }
            Some(&Incoming::Reading { session, target, .. }) => {
                let Some(sender) = self.sessions.get(&session) else { return };
                match sender.standing.failure() {
                    Some(cause) => Body::Failed(Failed { attempt, cause: cause.clone(), quiet: false }),
                    None => return self.answer_acquire(cx, id, attempt, session, target),
                }
            }
            Some(Incoming::Served { total, skipped }) => Body::Progress(Progress {
                attempt,
                done: vec![(0, *total)],
                total: Some(*total),
                skipped: skipped.clone(),
            }),
            Some(Incoming::Failed { cause }) => {
                Body::Failed(Failed { attempt, cause: cause.clone(), quiet: true })
            }
            None if cx.peers.lingers(id) => return,
            None => Body::Failed(Failed { attempt, cause: PeerCause::Unknown, quiet: true }),
        };
        cx.send(id, body);
    }

    /// A failed attempt is quiet: the receiver may use its pages again.
    pub(super) fn attempt_failed(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        cause: PeerCause,
        abort_asked: bool,
    ) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        if abort_asked {
            peer.incoming_mut().close(attempt);
            return cx.send(id, Body::AbortAck(AbortAck { attempt }));
        }
        if !peer.incoming().is_closed(attempt) {
            peer.incoming_mut().insert(attempt, Incoming::Failed { cause: cause.clone() });
        }
        cx.send(id, Body::Failed(Failed { attempt, cause, quiet: true }));
    }
}

/// True if the receiver's own cache lacks a page, item or aux row that it wants to be filled.
fn is_out_of_range(to: &Destination, maps: &Maps) -> bool {
    to.pages.check_below(maps.geometry().num_pages).is_err()
        || to.pages.check_distinct().is_err()
        || to.first_page > MAX_PAGES
        || to.pages.len() as u64 + u64::from(to.first_page) > u64::from(to.total_pages)
        || check_aux(to.aux, maps.aux_rows()).is_some()
        || check_peer_groups(&to.groups, maps.group_items()).is_err()
}
