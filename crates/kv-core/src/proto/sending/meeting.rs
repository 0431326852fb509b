//! A registration, or a claim, and its sender meet.

use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::lease::TransferMode;
use crate::proto::context::Context;
use crate::proto::conversation::{Incoming, Registration, Wish};
use crate::proto::run_set::RunSet;
use crate::proto::sending::{Sending, Target};
use crate::time::Time;
use crate::wire::{Body, Registered};

impl Sending {
    /// A registration and its sender meet.
    pub(super) fn attach(
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
}
