//! Meeting peers, keeping in touch, and losing them.
//!
//! ```text
//! receiver's node                          sender's node
//!   Hello{to, link, nonce} ──────────────▶   checks incarnation, plane, geometry
//!   repeated with backoff                    draws its own link
//!                          ◀──────────────  Welcome{nonce, link} | Refused{nonce, cause}
//!   Ping{floor, attempts}  ◀────────────▶   Pong{floor}: whenever one depends on the other and has
//!                                           heard nothing for a while
//! ```
//!
//! A peer that stays silent is *given up*: its sessions fail, but nothing is proven, so pages that
//! it may still write stay where they are until it answers or the plane proves it gone.

use std::time::Duration;

use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::plane::{Directions, Origin, PlaneError, WayEnd, WriteFence};
use crate::proto::conversation::calls::{MAX_ASKED, MAX_METADATA, METADATA_OF_REGION};
use crate::proto::conversation::incoming::Incoming;
use crate::proto::conversation::peer::Peer;
use crate::proto::io::Output;
use crate::proto::node::Node;
use crate::proto::rendezvous::Latecomers;
use crate::proto::run_set::is_rising;
use crate::proto::timer::Timer;
use crate::time::Time;
use crate::wire::{Body, Hello, Ping, Pong, Refused, Welcome};

impl Node {
    pub(super) fn on_hello(&mut self, from: Origin, hello: Hello) {
        let known = self.cx.peers.known(hello.incarnation, &hello.metadata);
        if hello.geometry.validate().is_err()
            || hello.incarnation == self.cx.config.incarnation
            || hello.metadata.len() > MAX_METADATA + METADATA_OF_REGION * hello.geometry.regions.len()
            || known.is_some_and(|known| self.cx.is_impostor(known, from))
        {
            self.cx.fx.drop_frame();
            return;
        }
        // Posts of a former conversation must be over before a new one begins: the welcome tells
        // the peer that its old pages are quiet. It will ask again.
        if self.cx.peers.has_lingering_posts(hello.incarnation, &hello.metadata) {
            return;
        }
        if hello.to != self.cx.config.incarnation {
            return self.cx.refuse_stranger(known, from, hello);
        }
        let refusal = self.cx.refusal(&hello);
        let id = match known {
            Some(id) => {
                if !self.resume(id, &hello) {
                    return;
                }
                id
            }
            None => {
                let Some(id) = self.cx.admit_speaker(from, &hello) else { return };
                id
            }
        };
        let now = self.cx.fx.now();
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        peer.theirs = Some(hello.link);
        peer.origin = Some(from);
        peer.suffixed = hello.suffixed;
        peer.last_heard = now;
        peer.given_up = false;
        let ours = peer.ours;
        match refusal {
            None => {
                peer.refused = false;
                let ask = peer.writes_out.ask(now);
                self.cx.send(id, Body::Welcome(Welcome { nonce: hello.nonce, link: ours, ask }));
                self.came_up(id);
            }
            Some(cause) => {
                peer.refused = true;
                self.cx.send(id, Body::Refused(Refused { nonce: hello.nonce, cause, link: ours }));
            }
        }
    }

    /// Takes a hello from a peer that is known. False if it is a late one of a former conversation.
    fn resume(&mut self, id: PeerId, hello: &Hello) -> bool {
        let Some(peer) = self.cx.peers.get(id) else { return false };
        match peer.theirs {
            Some(theirs) if hello.link.sequence() < theirs.sequence() => false,
            Some(theirs) if hello.link != theirs => {
                // The peer has lost its side of the conversation: a new one begins. Frames of the
                // old one must not reach it. Whatever read from here has failed there.
                self.fail_peer_sessions(id, Cause::PeerRestarted, None);
                self.sending.readers_have_failed(&mut self.cx, id);
                if self.cx.peers.get(id).is_some_and(|peer| peer.posts > 0) {
                    return false;
                }
                let link = self.cx.peers.draw_link(&mut self.cx.fx);
                self.cx.peers.renumber(id, link);
                if let Some(peer) = self.cx.peers.get_mut(id) {
                    peer.incoming = Default::default();
                    // What the peer permitted was for the conversation that is over.
                    peer.writes_out = Default::default();
                    self.cx.fx.output(Output::Permit { peer: id, until: Time::ZERO });
                }
                true
            }
            _ => true,
        }
    }

    pub(super) fn on_welcome(&mut self, from: Origin, id: PeerId, welcome: Welcome) {
        if !self.cx.is_answer(from, id, welcome.nonce) {
            return;
        }
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        peer.refuses = None;
        let before = peer.theirs.replace(welcome.link);
        let again = before.is_some_and(|before| before != welcome.link);
        if again {
            peer.writes_in.heard = 0;
        }
        peer.writes_in.heard = peer.writes_in.heard.max(welcome.ask);
        if again {
            self.receiving.peer_forgot_us(&mut self.cx, id);
        }
        self.came_up(id);
    }

    /// The peer can be spoken to: whoever waited for that goes on.
    fn came_up(&mut self, id: PeerId) {
        self.cx.fx.arm(Timer::Peer(id), self.cx.fx.now() + self.cx.config.timing.keepalive);
        let Some(peer) = self.cx.peers.get(id) else { return };
        for session in each(peer.waiting.clone()) {
            self.receiving.source_came_up(&mut self.cx, session);
        }
        self.cx.say_releases(id);
    }

    pub(super) fn on_refused(&mut self, from: Origin, id: PeerId, refused: Refused) {
        if !self.cx.is_answer(from, id, refused.nonce) {
            return;
        }
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        let mismatch = peer.mismatch.clone();
        let cause = match (refused.cause, mismatch) {
            (PeerCause::Unknown, _) => {
                // Another incarnation answers. That proves nothing about writes that the one we knew
                // left in flight.
                self.fail_peer_sessions(id, Cause::PeerRestarted, None);
                if self.cx.peers.get(id).is_some_and(Peer::is_idle) {
                    self.cx.forget_peer(id);
                }
                return;
            }
            (PeerCause::Incompatible(_), Some(mismatch)) => Cause::Incompatible(mismatch),
            (cause, _) => Cause::ByPeer(cause),
        };
        peer.refuses = Some(cause);
        let before = peer.theirs.replace(refused.link);
        if before.is_some_and(|before| before != refused.link) {
            self.receiving.peer_forgot_us(&mut self.cx, id);
        }
        // Its receivers here fail, and abort their rooms at its senders. Later ones ask the bootstrap
        // server anew: another incarnation may fit.
        self.cx.lookups.forget(id);
        self.came_up(id);
    }

    pub(super) fn heard_from(&mut self, id: PeerId) {
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        peer.last_heard = self.cx.fx.now();
        if std::mem::take(&mut peer.given_up) {
            self.came_up(id);
        }
    }

    pub(super) fn on_peer_tick(&mut self, id: PeerId) {
        let timing = self.cx.config.timing;
        let Some(peer) = self.cx.peers.get(id) else { return };
        if peer.lost {
            return self.reconnect(id);
        }
        if peer.writes_in.revoking {
            self.end_waiting(id);
        }
        let Some(peer) = self.cx.peers.get(id) else { return };
        if let Some(said) = peer.hello
            && !peer.is_up()
        {
            let silent_for = self.cx.fx.now() - said.first_said;
            if silent_for < timing.peer_timeout {
                return self.cx.say_hello(id);
            }
            self.fail_newcomers(id, Cause::PeerUnresponsive { silent_for });
        }
        let Some(peer) = self.cx.peers.get(id) else { return };
        let silent_for = self.cx.fx.now() - peer.last_heard;
        self.cx.say_releases(id);
        let Some(peer) = self.cx.peers.get(id) else { return };
        if !peer.is_needed() && peer.incoming.live_len() + peer.incoming.results_len() == 0 {
            // Nothing depends on it: silence, and no timer.
            if peer.theirs.is_none() {
                self.cx.forget_peer(id);
            }
            return;
        }
        if silent_for >= timing.peer_timeout && !peer.given_up {
            let cause = self.cx.loss(id, Cause::PeerUnresponsive { silent_for });
            if let Some(peer) = self.cx.peers.get_mut(id) {
                peer.given_up = true;
            }
            // The next session asks the bootstrap server anew.
            self.cx.lookups.forget(id);
            self.fail_peer_sessions(id, cause, None);
        }
        if self.cx.peers.get(id).is_some_and(|peer| peer.given_up) {
            self.cx.fence_off(id);
        }
        self.ask_peer(id, silent_for);
        let Some(peer) = self.cx.peers.get(id) else { return };
        if peer.given_up && !peer.is_needed() {
            // Only bookkeeping on its behalf is left, and it does not answer: wait for its word.
            self.cx.fx.cancel(Timer::Peer(id));
        } else {
            let pause = if peer.given_up { timing.retry_max.max(timing.keepalive) } else { timing.keepalive };
            self.cx.fx.arm(Timer::Peer(id), self.cx.fx.now() + pause);
        }
    }

    /// Fails the receivers that wait for a hello to be answered.
    fn fail_newcomers(&mut self, id: PeerId, cause: Cause) {
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        peer.hello = None;
        if peer.theirs.is_none() {
            peer.releasing.clear();
        }
        for session in each(peer.waiting.clone()) {
            self.receiving.fail_receiver(&mut self.cx, session, cause.clone());
        }
    }

    /// Asks for a sign of life, and about attempts that have been quiet for a while. A peer that
    /// does not react may have forgotten the conversation: then it is greeted again.
    fn ask_peer(&mut self, id: PeerId, silent_for: Duration) {
        let keepalive = self.cx.config.timing.keepalive;
        let Some(peer) = self.cx.peers.get(id) else { return };
        let mut pings = self.receiving.quiet_attempts(peer, self.cx.fx.now(), keepalive);
        if pings.is_empty() && silent_for >= keepalive {
            pings.push(Vec::new());
        }
        let floor = peer.outgoing_floor();
        for attempts in each(pings) {
            self.cx.send(id, Body::Ping(Ping { floor, attempts }));
        }
        let Some(peer) = self.cx.peers.get(id) else { return };
        if silent_for >= self.cx.forgetful() && peer.is_needed() {
            self.cx.say_hello(id);
        }
    }

    pub(super) fn on_ping(&mut self, id: PeerId, ping: Ping) {
        // Each attempt once: what an answer costs was paid for by this worker's own scheduler, or is small.
        if !is_rising(&ping.attempts) {
            self.cx.fx.drop_frame();
            return;
        }
        self.sending.on_floor(&mut self.cx, id, ping.floor);
        let runs = ping.attempts.iter();
        let asked = runs.flat_map(|&(start, count)| start..start.saturating_add(u64::from(count)));
        let asked: Vec<Attempt> = asked.take(MAX_ASKED).map(Attempt).collect();
        for attempt in each(asked) {
            self.sending.tell_about(&mut self.cx, id, attempt);
        }
        if let Some(peer) = self.cx.peers.get(id) {
            let floor = peer.outgoing_floor();
            self.cx.send(id, Body::Pong(Pong { floor }));
        }
    }

    pub(super) fn on_connected(&mut self, id: PeerId, directions: Directions, fence: WriteFence) {
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        peer.directions = directions;
        peer.writes_in.fence = fence;
        let until = peer.writes_out.until();
        if until > self.cx.fx.now() {
            // The way is another one, and the permission the same.
            self.cx.fx.output(Output::Permit { peer: id, until });
        }
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        if std::mem::take(&mut peer.lost) {
            // The conversation goes on where it was, if the peer still knows it.
            peer.hello = None;
            self.cx.say_hello(id);
        }
    }

    pub(super) fn on_connect_failed(&mut self, id: PeerId, error: PlaneError) {
        // A way that was lost is tried again, and what is known of the peer proves nothing.
        if self.cx.peers.get(id).is_some_and(|peer| !peer.lost) {
            self.fail_peer_sessions(id, Cause::Connect(error), Some(self.cx.fx.now()));
            self.cx.forget_peer(id);
        }
    }

    pub(super) fn on_peer_gone(&mut self, id: PeerId, end: WayEnd) {
        if self.cx.peers.get(id).is_none() {
            return;
        }
        match end {
            WayEnd::Dead { quiet_after } => {
                let cause = self.cx.loss(id, Cause::PeerLost);
                self.fail_peer_sessions(id, cause, Some(self.cx.fx.now() + quiet_after));
                self.cx.forget_peer(id);
            }
            WayEnd::Lost => self.on_way_lost(id),
        }
    }

    /// This side's way to the peer is lost: the peer may live, and go on writing through its own. Pages that
    /// it may write wait for its word, over a new way, or for what the transport knows of its writes.
    fn on_way_lost(&mut self, id: PeerId) {
        let cause = self.cx.loss(id, Cause::WayLost);
        let served = self.sending.served(&mut self.cx, id);
        self.fail_peer_sessions(id, cause.clone(), None);
        for named in served {
            // Its receiver cannot be told now. It will greet anew, and register again.
            self.sending.remember_failed_sender(&mut self.cx, named, &cause.for_peer(), Latecomers::Left(1));
        }
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        if !(peer.greeted && peer.is_needed()) {
            return self.cx.forget_peer(id);
        }
        peer.lost = true;
        peer.origin = None;
        // The next session asks the bootstrap server anew.
        self.cx.lookups.forget(id);
        self.cx.fence_off(id);
        let pause = self.cx.fx.backoff(self.cx.config.timing.retry_first, 1);
        self.cx.fx.arm(Timer::Peer(id), self.cx.fx.now() + pause);
    }

    /// Opens a lost way anew, again and again for as long as pages wait for the peer's word.
    fn reconnect(&mut self, id: PeerId) {
        self.end_waiting(id);
        let Some(peer) = self.cx.peers.get(id) else { return };
        if !peer.is_needed() {
            return self.cx.forget_peer(id);
        }
        // A right to write is taken from the connection that is lost: it must stay known.
        if !peer.writes_in.revoking {
            let metadata = peer.metadata.clone();
            self.cx.fx.output(Output::Disconnect { peer: id });
            self.cx.fx.output(Output::Connect { peer: id, metadata });
        }
        let pause = self.cx.fx.backoff(self.cx.config.timing.retry_max, 1);
        self.cx.fx.arm(Timer::Peer(id), self.cx.fx.now() + pause);
    }

    /// Sessions that have waited for a lost way, or for a revocation, as long as for a peer that is silent
    /// wait no more.
    fn end_waiting(&mut self, id: PeerId) {
        let (now, patience) = (self.cx.fx.now(), self.cx.config.timing.peer_timeout);
        let Some(peer) = self.cx.peers.get(id) else { return };
        let waited = |session: &&SessionId| {
            self.receiving.sessions.get(session).is_some_and(|receiver| now - receiver.opened >= patience)
        };
        let ended: Vec<SessionId> = each(&peer.waiting).filter(waited).copied().collect();
        let cause = self.cx.silence(id);
        for session in ended {
            self.receiving.fail_receiver(&mut self.cx, session, cause.clone());
        }
    }

    /// Fails every session that depends on the peer. `quiet_at` tells from when on it is proven that
    /// the peer writes no more; `None` if that is not proven.
    pub(super) fn fail_peer_sessions(&mut self, id: PeerId, cause: Cause, quiet_at: Option<Time>) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        let attempts = each(peer.outgoing.values()).map(|&(session, _)| session);
        let receivers: Vec<SessionId> = attempts.chain(peer.waiting.iter().copied()).collect();
        let mut senders = Vec::new();
        let mut waiting = Vec::new();
        for (attempt, incoming) in each(peer.incoming.iter_live()) {
            match incoming {
                Incoming::Reading { session, .. } => senders.push(*session),
                Incoming::Waiting(_) => waiting.push(attempt),
                Incoming::Active(session, _) => senders.push(*session),
                Incoming::Served { .. } | Incoming::Failed { .. } => {}
            }
        }
        for attempt in each(waiting) {
            self.sending.drop_registration(&mut self.cx, id, attempt, cause.for_peer());
        }
        for session in each(senders) {
            self.sending.fail_sender(&mut self.cx, session, cause.clone());
        }
        for session in each(receivers) {
            self.receiving.fail_receiver(&mut self.cx, session, cause.clone());
            if let Some(quiet_at) = quiet_at {
                self.receiving.source_is_quiet_at(&mut self.cx, session, id, quiet_at);
            }
        }
    }
}
