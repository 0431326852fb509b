//! The end of a receiving session that failed: its sources are told, and its pages stay where they are
//! until it is certain that none of them writes any more.

use crate::error::{Cause, TransferError};
use crate::id::{PeerId, SessionId};
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::receiving::{Receiving, SourceState};
use crate::proto::run_set::RunSet;
use crate::proto::timer::Timer;
use crate::time::Time;
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
            peer: peer.map(|peer| peer.worker.clone()),
            phase,
            cause,
        };
        for (index, source) in each(receiver.sources.iter_mut().enumerate()) {
            match source.state {
                SourceState::Open => {
                    source.state = SourceState::Closing;
                    if let (Some(attempt), Some(peer)) = (source.attempt, cx.peers.get_mut(source.peer)) {
                        peer.closing.insert(attempt);
                    }
                }
                // A reference that this source cannot have is none of its business.
                SourceState::Met if !receiver.grants.is_empty() => {
                    source.state = SourceState::Over;
                    if let Some(peer) = cx.peers.get_mut(source.peer) {
                        peer.waiting.remove(&session);
                    }
                }
                SourceState::Met => {
                    // Nothing to stop, but the sender should not wait for a registration in vain.
                    let Some(peer) = cx.peers.get_mut(source.peer) else {
                        source.state = SourceState::Over;
                        continue;
                    };
                    let attempt = peer.open_attempt(session, index);
                    peer.closing.insert(attempt);
                    source.attempt = Some(attempt);
                    source.state = SourceState::Closing;
                }
                SourceState::Meeting => {
                    source.state = SourceState::Over;
                    if let Some(peer) = cx.peers.get_mut(source.peer) {
                        peer.waiting.remove(&session);
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

    pub(in crate::proto) fn say_aborts(&mut self, cx: &mut Context, session: SessionId) {
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

    /// From `quiet_at` on it is proven that the peer writes no more.
    pub(in crate::proto) fn source_is_quiet_at(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        id: PeerId,
        quiet_at: Time,
    ) {
        if quiet_at <= cx.fx.now() {
            self.on_quiet(cx, session, id);
        } else if self.sessions.contains_key(&session) {
            cx.fx.arm(Timer::Quiet(session, id), quiet_at);
        }
    }

    pub(in crate::proto) fn on_quiet(&mut self, cx: &mut Context, session: SessionId, id: PeerId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        for source in each(receiver.sources.iter_mut().filter(|source| source.peer == id)) {
            source.state = SourceState::Over;
            if let (Some(attempt), Some(peer)) = (source.attempt, cx.peers.get_mut(id)) {
                peer.end_attempt(attempt);
            }
        }
        self.maybe_retire(cx, session);
    }

    /// The peer has forgotten the conversation, which it does only when nothing of it is in flight:
    /// failed attempts are over, live ones begin again under the new link.
    pub(in crate::proto) fn peer_forgot_us(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.releasing.clear();
        let open = std::mem::take(&mut peer.outgoing);
        peer.closing.clear();
        for (_, (session, index)) in each(open) {
            let Some(receiver) = self.sessions.get_mut(&session) else { continue };
            let live = !receiver.poll.is_terminal();
            let Some(source) = receiver.sources.get_mut(index) else { continue };
            if !live || source.state != SourceState::Open {
                source.state = SourceState::Over;
                cx.fx.cancel(Timer::Quiet(session, id));
                self.maybe_retire(cx, session);
                continue;
            }
            if source.reading.is_some() {
                // Whoever forgot the conversation has no lease of it any more.
                source.state = SourceState::Over;
                self.fail_receiver(cx, session, Cause::PeerRestarted);
                continue;
            }
            let Some(peer) = cx.peers.get_mut(id) else { return };
            source.attempt = Some(peer.open_attempt(session, index));
            source.registered = false;
            source.parts = RunSet::default();
            source.total = None;
            self.say_registrations(cx, session);
        }
    }
}
