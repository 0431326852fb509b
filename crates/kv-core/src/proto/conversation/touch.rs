//! Keeping in touch with peers: silence, lost ways, and what a peer's end is called.
//!
//! A peer that stays silent is *given up*: its sessions fail, but nothing is proven, so pages that
//! it may still write stay where they are until it answers, the transport proves it gone, or the transport's
//! write fence ends its writes.

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
    /// Forgets a peer, and all that is kept for it.
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

    /// After such a silence a peer may have lost its way, or what it knew of the conversation.
    pub(super) fn forgetful(&self) -> Duration {
        (self.config.timing.keepalive * 3).min(self.config.timing.peer_timeout / 2)
    }

    /// Someone begins to depend on the peer.
    pub(in crate::proto) fn watch_peer(&mut self, id: PeerId) {
        if self.fx.is_armed(Timer::Peer(id)) {
            return;
        }
        self.fx.arm(Timer::Peer(id), self.fx.now() + self.config.timing.keepalive);
        // Nobody listened to it until now: that it was silent says nothing.
        let now = self.fx.now();
        if let Some(peer) = self.peers.get_mut(id) {
            peer.last_heard = now;
        }
    }

    /// The peer has said something. True if it had been given up.
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

    /// Gives the peer up if it is silent for too long.
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

    /// Sets when the peer is looked after again, if anything depends on it.
    pub(in crate::proto) fn set_next_tick(&mut self, id: PeerId) {
        let timing = self.config.timing;
        let Some(peer) = self.peers.get(id) else { return };
        let given_up = peer.contact.is_given_up();
        if given_up && !peer.outgoing.is_needed() {
            // Only bookkeeping on its behalf is left, and it does not answer: wait for its word.
            self.fx.cancel(Timer::Peer(id));
        } else {
            let pause = if given_up { timing.retry_max.max(timing.keepalive) } else { timing.keepalive };
            self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
        }
    }

    /// Nothing depends on the peer: silence, and no timer. False if something does.
    pub(in crate::proto) fn rest_if_idle(&mut self, id: PeerId) -> bool {
        let Some(peer) = self.peers.get(id) else { return true };
        let kept = peer.incoming.live_len() + peer.incoming.results_len();
        if peer.outgoing.is_needed() || kept > 0 {
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
        peer.others.clear();
        peer.writes_in.declare(fence);
        self.fx.tell(id, || KvWhat::WayOpened);
        let until = peer.writes_out.until();
        let lost = peer.is_lost();
        peer.contact.turn(Event::WayOpened);
        if until > self.fx.now() {
            // The way is another one, and the permission the same.
            self.fx.output(Output::Permit { peer: id, until });
        }
        if lost {
            // The conversation goes on where it was, if the peer still knows it.
            self.greet_again(id);
        }
    }

    /// This side's way to the peer is lost. True if it is to be opened again, because something waits for the
    /// peer's word.
    pub(in crate::proto) fn lose_way(&mut self, id: PeerId) -> bool {
        let Some(peer) = self.peers.get_mut(id) else { return false };
        if !(peer.contact.is_wanted() && peer.outgoing.is_needed()) {
            self.forget_peer(id);
            return false;
        }
        peer.contact.turn(Event::WayLost);
        peer.origin = None;
        true
    }

    /// Opens a lost way anew, again and again for as long as something waits for the peer's word.
    pub(in crate::proto) fn reopen_way(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        if !peer.outgoing.is_needed() {
            return self.forget_peer(id);
        }
        // A right to write is taken from the connection that is lost: it must stay known.
        if !peer.writes_in.is_revoking() {
            let transport = peer.transport.clone();
            self.fx.output(Output::Disconnect { peer: id });
            self.fx.output(Output::Connect { peer: id, transport });
        }
        let pause = self.fx.backoff(self.config.timing.retry_max, 1);
        self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
    }

    // ---- causes ---------------------------------------------------------------------------------

    /// How long nothing was heard from the peer, as a cause.
    pub(in crate::proto) fn silence(&self, id: PeerId) -> Cause {
        match self.peers.get(id) {
            Some(peer) if !peer.is_lost() => Cause::PeerUnresponsive { silent_for: self.silent_for(id) },
            _ => Cause::WayLost,
        }
    }

    /// Why a peer is lost: a known successor explains it better.
    pub(in crate::proto) fn loss(&self, id: PeerId, otherwise: Cause) -> Cause {
        match self.peers.get(id) {
            Some(peer) if self.peers.has_successor(&peer.worker, peer.incarnation) => Cause::PeerRestarted,
            _ => otherwise,
        }
    }
}
