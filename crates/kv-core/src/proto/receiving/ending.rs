//! A receiving session ends: in success when every source is over, in failure when its sources are told. Its pages
//! stay where they are until it is certain that none of them writes any more.

use crate::error::{Cause, PeerCause, TransferError};
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::receiving::source::Closes;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::rendezvous::Named;
use crate::proto::timer::Timer;
use crate::wire::{Abort, Body, Failed};

impl Receiving {
    pub(in crate::proto) fn fail_receiver(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll.is_terminal() {
            return;
        }
        receiver.poll = KvPoll::Failed;
        receiver.repeats = 0;
        let told = cause.for_peer();
        receiver.failure = Some(told.clone());
        let phase = receiver.phase();
        let peer = receiver.sources.first().and_then(|source| cx.peers.get(source.peer));
        let failure = TransferError {
            room: receiver.room.clone(),
            peer: peer.map(|peer| peer.worker().clone()),
            phase,
            cause,
        };
        receiver.close_sources(cx, session, &told);
        let pulls = receiver.pulls;
        cx.fx.cancel(Timer::Deadline(session));
        cx.fx.cancel(Timer::Repeat(session));
        self.forget_room(cx, session);
        cx.posts.leave(session);
        self.stop_asking(cx, session);
        cx.fx.status(session, KvPoll::Failed, Some(failure));
        if pulls {
            self.stop_reading(cx, session);
        }
        self.say_aborts(cx, session);
        self.maybe_retire(cx, session);
    }

    pub(super) fn say_aborts(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(cause) = receiver.failure.clone() else { return };
        let closing = each(receiver.sources.iter());
        let closing = closing.filter_map(|source| Some((source.peer, source.closing_attempt()?)));
        let closing: Vec<_> = closing.collect();
        if closing.is_empty() {
            return;
        }
        receiver.repeats += 1;
        let (repeats, room) = (receiver.repeats, receiver.room.clone());
        for (peer, attempt) in each(closing) {
            cx.watch_peer(peer);
            cx.send(
                peer,
                Body::Abort(Abort { attempt, room: room.clone(), grant: None, cause: cause.clone() }),
            );
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    /// The receiver has ended.
    pub(super) fn forget_room(&mut self, cx: &mut Context, session: SessionId) {
        if let Some(receiver) = self.sessions.get(&session).filter(|_| cx.config.args.suffixes_requests()) {
            cx.rendezvous.receivers.remove(&Named::new(receiver.room.clone(), true), session);
        }
    }

    pub(super) fn maybe_succeed(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll != KvPoll::Transferring || !receiver.is_quiet_everywhere() {
            return;
        }
        receiver.poll = KvPoll::Success;
        self.forget_room(cx, session);
        cx.fx.status(session, KvPoll::Success, None);
        self.retire_receiver(cx, session);
    }

    pub(in crate::proto) fn on_failed(&mut self, cx: &mut Context, id: PeerId, failed: Failed) {
        let Some((session, index, source, live)) = self.source_of(cx, id, failed.attempt) else {
            // Over for us: let the peer forget it too.
            return cx.say_finish(id, failed.attempt);
        };
        if source.is_over() {
            return;
        }
        if failed.quiet {
            // No abort is needed for this source.
            self.source_over(cx, session, index);
        }
        if live {
            let cause = match failed.cause {
                PeerCause::LeaseExpired => Cause::LeaseExpired,
                cause => Cause::ByPeer(cause),
            };
            self.fail_receiver(cx, session, cause);
        } else {
            self.maybe_retire(cx, session);
        }
    }

    pub(in crate::proto) fn on_abort_ack(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.outgoing_mut().acknowledged(attempt..Attempt(attempt.0.saturating_add(1)));
        }
        let Some((session, index, source, _)) = self.source_of(cx, id, attempt) else { return };
        if source.closing_attempt().is_some() {
            self.source_over(cx, session, index);
            self.maybe_retire(cx, session);
        }
    }

    /// The source writes no more, and that is certain. The peer may forget the attempt.
    pub(super) fn source_over(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let (id, attempt) = (source.peer, source.end());
        cx.fx.cancel(Timer::Quiet(session, id));
        if let (Some(attempt), Some(peer)) = (attempt, cx.peers.get_mut(id)) {
            peer.outgoing_mut().end(attempt);
            cx.say_finish(id, attempt);
        }
    }

    /// Hands the pages of a failed session back once all its sources are over.
    pub(super) fn maybe_retire(&mut self, cx: &mut Context, session: SessionId) {
        let retire = self
            .sessions
            .get(&session)
            .is_some_and(|receiver| receiver.poll == KvPoll::Failed && receiver.is_quiet_everywhere());
        if retire && !cx.posts.has_any_of(session) {
            self.retire_receiver(cx, session);
        }
    }

    pub(super) fn retire_receiver(&mut self, cx: &mut Context, session: SessionId) {
        cx.fx.cancel(Timer::Deadline(session));
        cx.fx.cancel(Timer::Repeat(session));
        let Some(receiver) = self.sessions.remove(&session) else { return };
        for source in each(&receiver.sources) {
            cx.stop_beating_if_idle(source.peer);
        }
        let skipped = receiver.skipped_groups();
        if let Some((pages, _)) = receiver.given {
            cx.fx.release(session, pages);
        }
        if let Some(groups) = receiver.groups {
            cx.fx.release_groups(session, groups, skipped);
        }
    }
}

impl ReceiveSession {
    /// The session has failed: each source is over, or closing until it says that it writes no more.
    fn close_sources(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        for (index, source) in each(self.sources.iter_mut().enumerate()) {
            let Some(peer) = cx.peers.get_mut(source.peer) else {
                source.close();
                continue;
            };
            match source.close() {
                Closes::Open(attempt) => peer.outgoing_mut().close(attempt),
                // A reference that this source cannot have is none of its business.
                Closes::Met if !self.grants.is_empty() => peer.outgoing_mut().wait_no_more(session),
                Closes::Met => {
                    // Nothing to stop, but the sender should not wait for a registration in vain.
                    let attempt = peer.outgoing_mut().open(session, index);
                    peer.outgoing_mut().close(attempt);
                    source.abort(attempt);
                }
                Closes::Meeting => {
                    peer.outgoing_mut().wait_no_more(session);
                    peer.abort_when_met(&self.room, &self.grants, told);
                }
                Closes::Already => {}
            }
        }
    }
}
