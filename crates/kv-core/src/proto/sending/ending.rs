//! A sending session ends: in success when every receiver has all, in failure when its receivers are told; its
//! pages come back when no post and no lease needs them any more.

use crate::error::{Cause, PeerCause, Phase, TransferError};
use crate::id::SessionId;
use crate::lease::TransferMode;
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::rendezvous::{Latecomers, Named};
use crate::proto::sending::Sending;
use crate::proto::sending::target::Target;
use crate::proto::timer::Timer;
use crate::wire::{Body, Failed};

impl Sending {
    /// A post of the target has ended: is the target over, and with it the session?
    pub(super) fn target_advanced(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let failure = sender.failure.clone();
        let Some(target) = sender.targets.get_mut(index) else { return };
        if target.is_over() || target.is_held(cx.fx.now()) {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        match failure {
            Some(cause) => {
                let abort_asked = target.is_abort_asked();
                target.end();
                self.attempt_failed(cx, id, attempt, cause, abort_asked);
            }
            None => {
                let Some(written) = target.written() else { return };
                let Some(total) = written.all_in_place() else { return };
                let skipped = written.skipped().to_vec();
                target.end();
                if let Some(peer) = cx.peers.get_mut(id)
                    && !peer.incoming().is_closed(attempt)
                {
                    peer.incoming_mut().insert(attempt, Incoming::Served { total, skipped });
                }
            }
        }
        self.maybe_end_sender(cx, session);
    }

    pub(super) fn maybe_end_sender(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if !each(sender.targets.iter()).all(Target::is_over) {
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
        for pages in each(sender.given.into_chunks()) {
            cx.fx.release(session, pages);
        }
        if let Some(groups) = sender.groups {
            cx.fx.release_groups(session, groups, Vec::new());
        }
    }

    pub(in crate::proto) fn fail_sender(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        self.fail_sender_of(cx, session, cause, 0);
    }

    /// Fails a sender; `gone` of its missing receivers will never come.
    pub(super) fn fail_sender_of(&mut self, cx: &mut Context, session: SessionId, cause: Cause, gone: usize) {
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
            let relies = target.outstanding() > 0 || target.reads().is_some() && granted;
            relies && !target.is_abort_asked() && !target.is_over()
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
        cx.cancel_posts(session);
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
