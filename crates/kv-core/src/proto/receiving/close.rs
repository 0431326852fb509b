//! The end of a receiving session that failed: its sources are told, and its pages stay where they are
//! until it is certain that none of them writes any more.

use crate::error::{Cause, TransferError};
use crate::id::SessionId;
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::receiving::{Receiving, SourceState};
use crate::proto::timer::Timer;
use crate::wire::{Abort, Body};

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
        for (index, source) in each(receiver.sources.iter_mut().enumerate()) {
            match source.state {
                SourceState::Open => {
                    source.state = SourceState::Closing;
                    if let (Some(attempt), Some(peer)) = (source.attempt, cx.peers.get_mut(source.peer)) {
                        peer.outgoing_mut().close(attempt);
                    }
                }
                // A reference that this source cannot have is none of its business.
                SourceState::Met if !receiver.grants.is_empty() => {
                    source.state = SourceState::Over;
                    if let Some(peer) = cx.peers.get_mut(source.peer) {
                        peer.outgoing_mut().wait_no_more(session);
                    }
                }
                SourceState::Met => {
                    // Nothing to stop, but the sender should not wait for a registration in vain.
                    let Some(peer) = cx.peers.get_mut(source.peer) else {
                        source.state = SourceState::Over;
                        continue;
                    };
                    let attempt = peer.outgoing_mut().open(session, index);
                    peer.outgoing_mut().close(attempt);
                    source.attempt = Some(attempt);
                    source.state = SourceState::Closing;
                }
                SourceState::Meeting => {
                    source.state = SourceState::Over;
                    if let Some(peer) = cx.peers.get_mut(source.peer) {
                        peer.outgoing_mut().wait_no_more(session);
                        peer.abort_when_met(&receiver.room, &receiver.grants, &told);
                    }
                }
                SourceState::Closing | SourceState::Over => {}
            }
        }
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
        let closing = each(receiver.sources.iter()).filter(|source| source.state == SourceState::Closing);
        let closing: Vec<_> = closing.filter_map(|source| Some((source.peer, source.attempt?))).collect();
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
}
