//! A registration, or an acquire message, meets its sender.

use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, Incarnation, PeerId, SessionId};
use crate::lease::TransferMode;
use crate::proto::context::Context;
use crate::proto::conversation::{Incoming, Peer, Registration};
use crate::proto::sending::target::{Reads, Role, Target, Written};
use crate::proto::sending::{SendSession, Sending};
use crate::time::Time;
use crate::trace::KvWhat;
use crate::wire::{Body, ConversationId, Delivery, Registered};

impl Sending {
    /// Makes a receiver a target of its sender.
    pub(super) fn attach(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        id: PeerId,
        attempt: Attempt,
        registration: Registration,
    ) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if let Err(cause) = sender.admit(&registration) {
            self.refuse_attempt(cx, id, attempt, cause.clone());
            return self.fail_one(cx, session, Cause::ByPeer(cause));
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let (receiver, conversation) = (peer.incarnation(), peer.conversation());
        let index = sender.place_of(receiver, conversation);
        let (incoming, role) = roles(session, index, registration.delivery);
        let reads = matches!(role, Role::Reads(_));
        peer.incoming_mut().insert(attempt, incoming);
        let target = Target::new(id, attempt, conversation, role);
        match sender.targets.get_mut(index) {
            Some(before) => *before = target,
            None => sender.targets.push(target),
        }
        if !sender.lacks_receivers() {
            cx.rendezvous.await_no_more(&sender.named, session);
        }
        cx.fx.tell((session, id, attempt), || KvWhat::ReceiverCame);
        if reads {
            self.answer_acquire(cx, id, attempt, session, index);
        } else {
            cx.want_permission(id);
        }
        self.check_agreement(cx, session);
        self.plan_groups(cx, session);
        self.update_sender(cx, session);
        if !reads && !self.is_about_to_tell(cx, session, index) {
            cx.send(id, Body::Registered(Registered { attempt }));
        }
    }

    /// True if a target that is written to needs no answer to its registration: its session has failed, which it was
    /// told or is told when its posts have ended, or its first part is about to be written, which answers as well. If
    /// that takes long, the receiver repeats the registration, and is answered then.
    fn is_about_to_tell(&self, cx: &Context, session: SessionId, index: usize) -> bool {
        let Some(sender) = self.sessions.get(&session).filter(|sender| sender.standing.is_going()) else {
            return true;
        };
        let Some(target) = sender.targets.get(index) else { return false };
        let is_permitted = |peer: &Peer| peer.writes_out().is_permitted(cx.fx.now());
        sender.given.is_complete()
            && target.written().is_some_and(Written::is_queued)
            && cx.peers.get(target.peer).is_some_and(is_permitted)
    }
}

impl SendSession {
    /// Whether a registration fits the session: the transfer mode, and the number of receivers that
    /// it tells.
    fn admit(&mut self, registration: &Registration) -> Result<(), PeerCause> {
        let wanted = match registration.delivery {
            Delivery::Write(_) => TransferMode::Push,
            Delivery::Read(_) => TransferMode::Pull,
        };
        if self.mode != TransferMode::Auto && self.mode != wanted {
            return Err(PeerCause::Mode { sender: self.mode, receiver: wanted });
        }
        let ranks = registration.ranks.max(1) as usize;
        if self.learns && self.targets.is_empty() {
            self.receivers = ranks;
        } else if !self.receivers.is_multiple_of(ranks) {
            // The scheduler may give one request to several engines, but not to parts of one
            // engine.
            return Err(PeerCause::ReceiverCount { expected: self.receivers, told: ranks });
        }
        Ok(())
    }

    /// The position of a receiver among the targets. A receiver that was served in a conversation
    /// that is over, and does not know that, keeps its position: it is the same receiver.
    fn place_of(&mut self, receiver: Incarnation, conversation: ConversationId) -> usize {
        let first = (self.first_receiver == Some(receiver)).then_some(0);
        let before = self.target_of.get(&receiver).copied().or(first);
        let replaced = before.filter(|&before| {
            let target = self.targets.get(before);
            target.is_some_and(|target| {
                target.conversation != conversation && target.is_over() && target.outstanding() == 0
            })
        });
        let index = replaced.unwrap_or(self.targets.len());
        if index == 0 {
            self.first_receiver = Some(receiver);
        } else {
            self.target_of.insert(receiver, index);
        }
        index
    }
}

/// The states that a registration begins among its peer's attempts and among its sender's targets.
fn roles(session: SessionId, target: usize, delivery: Delivery) -> (Incoming, Role) {
    match delivery {
        Delivery::Write(to) => {
            let pages = (to.pages, to.first_page as usize, to.total_pages as usize);
            let written = Written::new(pages, (to.aux, to.aux_here), to.groups);
            (Incoming::Active(session, target), Role::Written(written))
        }
        Delivery::Read(acquire) => {
            let until = Time::ZERO;
            let reading = Incoming::Reading { session, target, until, extension: None, intact: false };
            (reading, Role::Reads(Reads { number: acquire.number, released: false, fence: None }))
        }
    }
}
