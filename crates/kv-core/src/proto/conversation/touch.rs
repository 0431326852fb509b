//! Keeping in touch with peers: silence, lost ways, and the causes that name the end of a peer.
//!
//! A peer that stays silent is *given up*: its sessions fail, but nothing is proven about the peer.
//! Pages that the peer may still write stay in quarantine until the peer answers, the transport
//! proves it dead, or the transport's write fence ends its writes.

use std::time::Duration;

use super::contact::Event;
use super::heard::Silence;
use crate::error::Cause;
use crate::id::PeerId;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::proto::timer::Timer;
use crate::trace::KvWhat;
use crate::transport::{Directions, WriteFence};

impl Context {
    /// Forgets a peer, and everything that is kept for the peer.
    pub(in crate::proto) fn forget_peer(&mut self, peer: PeerId) {
        self.peers.remove(peer);
        self.lookups.forget(peer);
        self.posts.forget(peer);
        for timer in [Timer::Peer, Timer::Heartbeat, Timer::Permission, Timer::WriteFence, Timer::Sweep] {
            self.fx.cancel(timer(peer));
        }
        self.fx.tell(peer, || KvWhat::PeerForgotten);
        self.fx.output(Output::Disconnect { peer });
    }

    /// After a silence of this length a peer may have lost its way, or may have forgotten the
    /// conversation.
    pub(super) fn forgetful(&self) -> Duration {
        (self.config.timing.keepalive * 3).min(self.config.timing.peer_timeout / 2)
    }

    /// A session begins to depend on the peer.
    pub(in crate::proto) fn watch_peer(&mut self, id: PeerId) {
        if self.fx.is_armed(Timer::Peer(id)) {
            return;
        }
        self.fx.arm(Timer::Peer(id), self.fx.now() + self.config.timing.keepalive);
        // Nothing was expected from the peer until now: its silence says nothing, and no hello of long ago does.
        let now = self.fx.now();
        if let Some(peer) = self.peers.get_mut(id) {
            peer.last_heard = now;
            peer.contact.date_hello(now);
        }
    }

    /// Another incarnation answers for the peer, whose sessions have failed: the peer is given up as if it had been silent for
    /// long. It may still be heard itself.
    pub(in crate::proto) fn give_up(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.contact.turn(Event::Silent);
        }
    }

    /// The peer was heard. True if it had been given up.
    pub(in crate::proto) fn hear(&mut self, id: PeerId) -> bool {
        let now = self.fx.now();
        let Some(peer) = self.peers.get_mut(id) else { return false };
        peer.last_heard = now;
        let was_given_up = peer.contact.is_given_up();
        peer.contact.turn(Event::Heard);
        was_given_up
    }

    /// How long nothing was heard from the peer.
    pub(in crate::proto) fn silent_for(&self, id: PeerId) -> Duration {
        self.peers.get(id).map_or(Duration::ZERO, |peer| self.fx.now() - peer.last_heard)
    }

    /// Gives the peer up if it has been silent for too long.
    pub(in crate::proto) fn judge_silence(&mut self, id: PeerId) -> Silence {
        let silent_for = self.silent_for(id);
        let Some(peer) = self.peers.get_mut(id) else { return Silence::Short };
        if peer.contact.is_given_up() {
            return Silence::GivenUp;
        }
        if silent_for < self.config.timing.peer_timeout {
            return Silence::Short;
        }
        peer.contact.turn(Event::Silent);
        Silence::TooLong
    }

    /// Greets a peer that does not react: it may have forgotten the conversation.
    pub(in crate::proto) fn greet_if_forgetful(&mut self, id: PeerId, silent_for: Duration) {
        let needed = self.peers.get(id).is_some_and(|peer| peer.outgoing.is_needed());
        if needed && silent_for >= self.forgetful() {
            self.say_hello(id);
        }
    }

    /// Sets the time at which the peer is looked after again, if anything depends on the peer.
    pub(in crate::proto) fn set_next_tick(&mut self, id: PeerId) {
        let timing = self.config.timing;
        let Some(peer) = self.peers.get(id) else { return };
        let given_up = peer.contact.is_given_up();
        if given_up && !peer.outgoing.is_needed() {
            // Only bookkeeping for the peer is left, and the peer does not answer: wait until it is
            // heard.
            self.fx.cancel(Timer::Peer(id));
        } else {
            let pause = if given_up { timing.retry_max.max(timing.keepalive) } else { timing.keepalive };
            self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
        }
    }

    /// If nothing depends on the peer, stops its timer and returns true.
    pub(in crate::proto) fn rest_if_idle(&mut self, id: PeerId) -> bool {
        let Some(peer) = self.peers.get(id) else { return true };
        if peer.outgoing.is_needed() || peer.has_attempts() {
            return false;
        }
        if peer.contact.conversation().is_none() {
            self.forget_peer(id);
        }
        true
    }

    // ---- ways -----------------------------------------------------------------------------------

    /// The transport has opened the way to the peer.
    pub(in crate::proto) fn way_opened(&mut self, id: PeerId, directions: Directions, fence: WriteFence) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.directions = directions;
        peer.writes_in.declare(fence);
        self.fx.tell(id, || KvWhat::WayOpened);
        // What was declared of a former connection ends nothing any more.
        self.fx.cancel(Timer::WriteFence(id));
        let until = peer.writes_out.until();
        let lost = peer.is_lost();
        peer.contact.turn(Event::WayOpened);
        if until > self.fx.now() {
            self.fx.output(Output::Permit { peer: id, until });
        }
        if lost {
            // The conversation continues, if the peer has not forgotten it. Its permission has ended with the lost way.
            self.greet_again(id);
            if self.fx.is_armed(Timer::Permission(id)) {
                self.ask_to_write(id);
            }
        }
    }

    /// True if this worker waits for the peer's word, or if the peer may wait for this worker's: the result of one of
    /// the peer's attempts may have been lost with the way, or is yet to be said. A peer that waits is heard, unless it
    /// stands still: the results are kept for as long as a room whose sender has failed.
    fn needs_way(&self, id: PeerId) -> bool {
        let timing = self.config.timing;
        let may_wait = self.silent_for(id) < timing.peer_timeout.max(timing.failed_room_ttl);
        self.peers.get(id).is_some_and(|peer| peer.outgoing.is_needed() || peer.has_attempts() && may_wait)
    }

    /// True if the peer is not given up, and has yet to hear that an attempt was served, or to acknowledge the end of
    /// one. A peer whose way is lost is told over the next way: it is owed for as long as a silent peer is waited for.
    pub(in crate::proto) fn is_owed(&self, id: PeerId) -> bool {
        let Some(peer) = self.peers.get(id) else { return false };
        let is_waited_for = !peer.is_lost() || self.silent_for(id) < self.config.timing.peer_timeout;
        is_waited_for && !peer.contact.is_given_up() && peer.has_unheard_ends()
    }

    /// This side's way to the peer is lost. True if the way [is needed](Context::needs_way), and must be opened again.
    pub(in crate::proto) fn lose_way(&mut self, id: PeerId) -> bool {
        if !self.needs_way(id) {
            self.forget_peer(id);
            return false;
        }
        let Some(peer) = self.peers.get_mut(id) else { return false };
        peer.way_lost();
        if peer.contact.is_wanted() {
            // A peer that a session here looks for may come on another connection. Any other says hello there first,
            // and until then counts among the peers of its old connection.
            peer.origin = None;
        }
        // The peer may revoke the right to write on the connection that is lost, and a new one has no part in that. What
        // begins meanwhile waits for the new way, and for what the peer permits on it.
        let is_wanted = self.fx.is_armed(Timer::Permission(id));
        self.ask_anew(id);
        if is_wanted {
            self.want_permission(id);
        }
        true
    }

    /// A peer that does not come back is after a while told no more of attempts that have ended: for them alone, it would
    /// never be forgotten. One that has never answered, also in no earlier conversation, knows of no session; the sessions
    /// of one that has are over by their deadlines, and what it holds for them by its leases.
    pub(in crate::proto) fn tell_no_more_if_vanished(&mut self, id: PeerId) {
        let (silent_for, timing) = (self.silent_for(id), self.config.timing);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let has_answered = peer.has_met() || peer.outgoing.says_again();
        let patience = if has_answered { timing.session_deadline } else { timing.peer_timeout };
        if silent_for >= patience.max(timing.peer_timeout) {
            peer.outgoing.forget_ended();
        }
    }

    /// Sets the time at which the lost way is opened again. The more often the way was lost since the peer has last answered
    /// over it, the longer the pause: a peer that cannot open its own way may end this one whenever it is open.
    pub(in crate::proto) fn reopen_later(&mut self, id: PeerId) {
        let losses = self.peers.get(id).map_or(0, |peer| peer.losses_unanswered);
        let pause = self.fx.backoff(self.config.timing.retry_first, losses);
        self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
    }

    /// The peer greets while the way to it is lost: the pause is no longer than that after a first loss.
    pub(in crate::proto) fn reopen_sooner(&mut self, id: PeerId) {
        let at = self.fx.now() + self.fx.backoff(self.config.timing.retry_first, 1);
        if self.fx.due(Timer::Peer(id)).is_some_and(|due| due > at) {
            self.fx.arm(Timer::Peer(id), at);
        }
    }

    /// Opens a lost way again. Called repeatedly. False if the way [is not needed](Context::needs_way) any more.
    pub(in crate::proto) fn reopen_way(&mut self, id: PeerId) -> bool {
        if !self.needs_way(id) {
            return false;
        }
        let Some(peer) = self.peers.get(id) else { return false };
        // A right to write is revoked on the connection that is lost: that connection must stay
        // known.
        if !peer.writes_in.is_revoking() {
            let transport = peer.transport.clone();
            self.fx.output(Output::Disconnect { peer: id });
            self.fx.output(Output::Connect { peer: id, transport });
        }
        let pause = self.fx.backoff(self.config.timing.retry_max, 1);
        self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
        true
    }

    // ---- causes ---------------------------------------------------------------------------------

    /// The silence of the peer, as a cause.
    pub(in crate::proto) fn silence(&self, id: PeerId) -> Cause {
        match self.peers.get(id) {
            Some(peer) if !peer.is_lost() => Cause::PeerUnresponsive { silent_for: self.silent_for(id) },
            _ => Cause::WayLost,
        }
    }

    /// Why a peer is lost: if a successor is known, the cause is the restart.
    pub(in crate::proto) fn loss(&self, id: PeerId, otherwise: Cause) -> Cause {
        match self.peers.get(id) {
            Some(peer) if self.peers.has_successor(&peer.worker, peer.incarnation) => Cause::PeerRestarted,
            _ => otherwise,
        }
    }
}
