//! How a receiving session aborts its sources. Each source is told until it has said that it writes
//! no more, or until that is certain without its word. The rest of the session's end is in
//! [`ending`](crate::proto::ending).

use crate::command::Resource;
use crate::error::{Cause, PeerCause, Phase};
use crate::id::{Attempt, PeerId, Room, SessionId};
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::ending::{Ending, Role, Session, Sessions, Standing};
use crate::proto::receiving::source::{Closes, Source};
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::rendezvous::Named;
use crate::proto::timer::Timer;
use crate::quarantine::Quarantine;
use crate::trace::Half;
use crate::wire::{Abort, Body, Failed};

impl Session for ReceiveSession {
    fn standing(&self) -> &Standing {
        &self.standing
    }

    fn standing_mut(&mut self) -> &mut Standing {
        &mut self.standing
    }

    fn room(&self) -> &Room {
        &self.room
    }

    fn phase(&self) -> Phase {
        let mut moves = false;
        for source in each(self.sources.iter()) {
            if source.is_meeting() {
                return Phase::Handshake;
            }
            moves |= source.parts.len() > 0 || source.reading.is_some();
        }
        match moves {
            _ if self.sources.is_empty() => Phase::Bootstrap,
            false => Phase::Rendezvous,
            true => Phase::Transfer,
        }
    }

    fn peer(&self) -> Option<PeerId> {
        self.sources.first().map(|source| source.peer)
    }

    fn is_served(&self) -> bool {
        self.standing.poll() == KvPoll::Transferring
    }

    fn is_quiet(&self) -> bool {
        each(self.sources.iter()).all(Source::is_over)
    }

    fn into_resources(self) -> impl Iterator<Item = Resource> {
        let skipped = self.skipped_groups();
        let pages = self.given.map(|(pages, _)| Resource::from(pages));
        let groups = self.groups.map(|groups| Resource::RequestCacheGroups { groups, skipped });
        pages.into_iter().chain(groups)
    }
}

impl Role for Receiving {
    type Session = ReceiveSession;
    const HALF: Half = Half::Receiver;
    const TIMERS: [fn(SessionId) -> Timer; 2] = [Timer::Deadline, Timer::Repeat];

    fn sessions(&self) -> &Sessions<ReceiveSession> {
        &self.sessions
    }

    fn sessions_mut(&mut self) -> &mut Sessions<ReceiveSession> {
        &mut self.sessions
    }

    fn waits(&self, cx: &Context, session: SessionId) -> Option<Quarantine> {
        Some(self.sessions.get(&session)?.waits(cx, session))
    }

    fn withdraw(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        receiver.repeats = 0;
        receiver.close_sources(cx, session, told);
        receiver.forget_room(cx, session);
        self.stop_asking(cx, session);
    }

    fn stop(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        cx.cancel_posts(session);
        if self.sessions.get(&session).is_some_and(|receiver| receiver.pulls) {
            self.stop_reading(cx, session, told);
        } else {
            self.say_aborts(cx, session);
        }
    }

    fn forget(&mut self, cx: &mut Context, session: SessionId, ended: &ReceiveSession) {
        ended.forget_room(cx, session);
        for source in each(ended.sources.iter()) {
            cx.stop_beating_if_idle(source.peer);
        }
    }
}

impl Receiving {
    pub(super) fn say_aborts(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(cause) = receiver.standing.failure().cloned() else { return };
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
            let low_watermark = cx.peers.get(peer).map_or(attempt, |peer| peer.outgoing().low_watermark());
            let (room, cause) = (room.clone(), cause.clone());
            cx.send(
                peer,
                Body::Abort(Abort {
                    attempt,
                    room,
                    lease_id: None,
                    cause,
                    low_watermark,
                    failed_ms_ago: None,
                }),
            );
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    pub(in crate::proto) fn on_failed(&mut self, cx: &mut Context, id: PeerId, failed: Failed) {
        if failed.cause == PeerCause::WorkerStopped {
            // Later receivers ask the bootstrap server anew: the worker leaves the server.
            cx.lookups.forget(id);
            if let Some(peer) = cx.peers.get_mut(id) {
                peer.leave();
            }
        }
        if failed.attempt == Attempt::LATER {
            return;
        }
        let Some((session, index, source, live)) = self.source_of(cx, id, failed.attempt) else {
            // The attempt is over for this worker: let the peer forget it, too.
            return cx.say_over(id, failed.attempt);
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
            self.fail_by(cx, session, Some(id), cause);
        } else {
            self.settle(cx, session);
        }
    }

    pub(in crate::proto) fn on_abort_ack(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.outgoing_mut().acknowledged(attempt..Attempt(attempt.0.saturating_add(1)));
        }
        let Some((session, index, source, _)) = self.source_of(cx, id, attempt) else { return };
        if source.closing_attempt().is_some() {
            self.source_over(cx, session, index);
            self.settle(cx, session);
        }
    }

    /// It is certain that the source writes no more. The peer may forget the attempt.
    pub(super) fn source_over(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let (id, attempt) = (source.peer, source.end());
        cx.fx.cancel(Timer::Quiet(session, id));
        if let (Some(attempt), Some(peer)) = (attempt, cx.peers.get_mut(id)) {
            peer.outgoing_mut().end(attempt);
            cx.say_over(id, attempt);
        }
    }
}

impl ReceiveSession {
    /// The session has failed: each source is over, or is closing until it says that it writes no
    /// more.
    fn close_sources(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        let now = cx.fx.now();
        for (index, source) in each(self.sources.iter_mut().enumerate()) {
            let Some(peer) = cx.peers.get_mut(source.peer) else {
                source.close(now);
                continue;
            };
            match source.close(now) {
                Closes::Open(attempt) => peer.outgoing_mut().close(attempt),
                // The reference is for another source: this source has nothing to do with the
                // session.
                Closes::Met if !self.lease_refs.is_empty() => peer.outgoing_mut().wait_no_more(session),
                Closes::Met => {
                    // There is nothing to stop, but the sender should not wait for a registration
                    // in vain.
                    let attempt = peer.outgoing_mut().open(session, index);
                    peer.outgoing_mut().close(attempt);
                    source.abort(attempt, now);
                }
                Closes::Meeting => {
                    peer.outgoing_mut().wait_no_more(session);
                    peer.abort_when_met(&self.room, &self.lease_refs, told, now);
                    cx.note_vain_wait(source.peer, told);
                }
                Closes::Already => {}
            }
        }
    }
    /// Removes the session's room from the rooms that could be mistaken for another.
    fn forget_room(&self, cx: &mut Context, session: SessionId) {
        if cx.config.args.suffixes_requests() {
            cx.rendezvous.forget_receiver(&Named::new(self.room.clone(), true), session);
        }
    }
}
