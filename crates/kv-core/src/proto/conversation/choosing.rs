//! Which of the transports that two workers have in common carries their next conversation.
//!
//! The transport is chosen once for each conversation. A session goes by a conversation that works,
//! before it begins one over a transport that was not tried, and tries transports that have failed
//! only where nothing else is left: first those whose pause is over, among them first those over
//! which the peer has answered before, and then the one whose pause has been over for longest. The
//! order of this worker's list decides among equals. So a failed transport costs the sessions that
//! were under way on it, and no later one.
//!
//! A preferred transport that has failed is tried again after a pause, and no session waits for that;
//! so is every other one while the peer does not answer over the chosen one. Once the peer answers
//! there, new sessions go that way. A transport that has failed here, and by which the peer comes
//! itself, has still failed until the peer answers there: a firewall may let only the peer open
//! connections.

use std::collections::VecDeque;

use super::contact::Event;
use super::detours::Pauses;
use super::peers::NextWay;
use super::{Introduction, Peer};
use crate::error::PeerCause;
use crate::id::{Incarnation, PeerId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::record::TransportOffer;
use crate::time::Time;
use crate::trace::{KvWhat, WayFault};

/// How much the next session can expect of a way, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Prospect {
    /// The peer answers over the way; or the peer has come over the way, and nothing has failed there.
    Works,
    /// Nothing speaks against the way.
    Untried,
    /// The way has failed, and its pause is over since this moment.
    Due(Footing, Time),
    /// The way has failed, and is left alone until this moment.
    LeftAlone(Footing, Time),
}

/// What there is to begin with on a way that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Footing {
    /// The peer has answered over the way before it fell silent, or before the way was lost.
    Met,
    /// Nothing: the way may never lead to the peer, as shared memory does not lead to another host.
    Unmet,
}

impl Context {
    /// Puts the transports by which an incarnation may be reached into the order in which a session
    /// tries them.
    pub(super) fn order_ways(&self, life: Incarnation, ways: &mut VecDeque<TransportOffer>) {
        if ways.len() > 1 {
            ways.make_contiguous().sort_by_cached_key(|way| self.prospect(life, way));
        }
    }

    fn prospect(&self, life: Incarnation, way: &TransportOffer) -> Prospect {
        if self.leads_to(life, way) {
            return Prospect::Works;
        }
        let is_met = self.peer_by(life, way).is_some_and(Peer::has_fallen_silent);
        let footing = if is_met { Footing::Met } else { Footing::Unmet };
        let (way, now) = ((life, way.clone()), self.fx.now());
        match (self.peers.detours.left_alone(&way, now), self.peers.detours.due_since(&way, now)) {
            (Some(until), _) => Prospect::LeftAlone(footing, until),
            (None, Some(since)) => Prospect::Due(footing, since),
            (None, None) if is_met => Prospect::Due(footing, Time::ZERO),
            (None, None) => Prospect::Untried,
        }
    }

    /// True if a session can go by the way at once: the peer has answered a hello of this worker there, or has come there
    /// and no attempt to reach the peer there has failed since the peer's last answer.
    fn leads_to(&self, life: Incarnation, way: &TransportOffer) -> bool {
        self.peer_by(life, way).is_some_and(|peer| {
            peer.is_up() || peer.is_in_touch() && !self.peers.detours.is_unanswered(&(life, way.clone()))
        })
    }

    fn peer_by(&self, life: Incarnation, way: &TransportOffer) -> Option<&Peer> {
        self.peers.known(life, way).and_then(|id| self.peers.get(id))
    }

    /// True if a way that this worker prefers may lead to the peer again: the answer of the bootstrap
    /// server is to be asked for anew.
    pub(in crate::proto) fn may_be_met_better(&self, id: PeerId) -> bool {
        self.peers.get(id).is_some_and(|peer| {
            each(peer.preferred()).any(|way| {
                self.leads_to(peer.incarnation, way) || self.is_worth_another_try(peer.incarnation, way)
            })
        })
    }

    /// True if a way has failed, its pause is over, and the peer can be greeted there. A peer is not greeted there if it
    /// answers or does not fit, if a hello is under way, if its lost way is being opened again, or if its right to write is
    /// being revoked.
    fn is_worth_another_try(&self, life: Incarnation, way: &TransportOffer) -> bool {
        let can_be_greeted = match self.peer_by(life, way) {
            None => self.peers.len() < self.config.limits.max_peers,
            Some(peer) => {
                let fits = !peer.is_refused() && peer.refuses().is_none();
                let is_busy =
                    peer.contact.hello().is_some() || peer.is_lost() || peer.writes_in.is_revoking();
                fits && !is_busy && !peer.is_up()
            }
        };
        can_be_greeted && self.peers.detours.is_due(&(life, way.clone()), self.fx.now())
    }

    /// What is needed to try a way again that has failed and that this worker prefers to the chosen one
    /// (`ways` is in the order of this worker's list); `None` if no such way is due. While the peer does
    /// not answer over the chosen way, this worker prefers every other one.
    pub(super) fn way_to_try_again(
        &self,
        to: &Introduction,
        ways: &[TransportOffer],
        chosen: &TransportOffer,
    ) -> Option<Introduction> {
        let life = to.incarnation;
        let is_silent = self.peer_by(life, chosen).is_some_and(Peer::has_fallen_silent);
        let mut preferred =
            each(ways).take_while(|way| is_silent || *way != chosen).filter(|way| *way != chosen);
        let due = preferred.find(|way| self.is_worth_another_try(life, way))?;
        let Introduction { worker, geometry, .. } = to;
        let (worker, geometry, transports) = (worker.clone(), geometry.clone(), [due.clone()].into());
        Some(Introduction { worker, incarnation: life, geometry, transports })
    }

    /// Opens the way to a peer by the transport of its conversation.
    pub(super) fn open_way(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let transport = peer.transport.clone();
        self.fx.tell(id, || KvWhat::WayChosen { transport: transport.name.clone() });
        self.fx.output(Output::Connect { peer: id, transport });
    }

    /// Notes that the way of a conversation has failed, if a session here has chosen the way and this worker
    /// has another.
    pub(in crate::proto) fn note_fault(&mut self, id: PeerId, fault: WayFault) {
        let (timing, ways) = (self.config.timing, self.config.limits.max_peers);
        let Some(peer) = self.peers.get(id) else { return };
        if self.config.transports.len() < 2 || !peer.contact.is_wanted() {
            return;
        }
        let (way, now) = ((peer.incarnation, peer.transport.clone()), self.fx.now());
        let name = way.1.name.clone();
        let pauses = Pauses { first: timing.way_retry_first, longest: timing.way_retry_max, ways };
        let pause = self.peers.detours.fail(way, &fault, now, pauses);
        self.fx.tell(id, || KvWhat::WayFailed { transport: name, fault, pause });
    }

    /// A session has ended before the peer has answered its hello. If the peer had time to answer, the way has failed: sessions
    /// shorter than the patience with a silent way would otherwise never go by another one. A session that ends within two
    /// first pauses of the hello (`retry_first`) says nothing, and neither does a second one that has waited for the same hello.
    pub(in crate::proto) fn note_vain_wait(&mut self, id: PeerId, told: &PeerCause) {
        let (now, time) = (self.fx.now(), self.config.timing.retry_first * 2);
        let had_time = |peer: &Peer| {
            peer.contact.hello().is_some_and(|said| said.times > 1 && now - said.first_said >= time)
        };
        let is_cut_short = matches!(told, PeerCause::DeadlineExceeded | PeerCause::Aborted);
        let is_vain = self.peers.get(id).is_some_and(|peer| !peer.is_up() && had_time(peer));
        if is_cut_short && is_vain && self.note_silence(id) {
            // The next session asks the bootstrap server anew, and goes by another way if the server names this one.
            self.lookups.forget(id);
        }
    }

    /// Notes that nothing has answered the hello of this worker. False if that was noted before, of the same hello.
    pub(in crate::proto) fn note_silence(&mut self, id: PeerId) -> bool {
        let is_first = self.peers.get_mut(id).is_some_and(|peer| peer.contact.blame_hello());
        if is_first {
            self.note_fault(id, WayFault::Silent);
        }
        is_first
    }

    /// Notes that the peer has answered over the way of its conversation.
    pub(super) fn note_answer(&mut self, id: PeerId) {
        let now = self.fx.now();
        let Some(peer) = self.peers.get_mut(id) else { return };
        (peer.others, peer.slow) = (VecDeque::new(), None);
        let way = (peer.incarnation, peer.transport.clone());
        self.peers.detours.answered(&way, now);
    }

    /// The way to a peer has failed before anything was heard from the peer: greets the peer by the
    /// next transport that both sides have, unless there is a conversation over that transport already, which is
    /// greeted instead. `None` if there is no other. A way by which the peer was heard stays the way of the
    /// conversation.
    pub(in crate::proto) fn greet_by_next_way(&mut self, id: PeerId) -> Option<NextWay> {
        let next = self.peers.reroute(id)?;
        if let NextWay::Known(there) = next {
            let ways = self.peers.get(id).map(|peer| peer.ways.clone());
            if let (Some(there), Some(ways)) = (self.peers.get_mut(there), ways) {
                there.ways = ways;
            }
            self.want_again(there);
            self.peers.hand_over_aborts(id, there);
            self.watch_peer(there);
            return Some(next);
        }
        // What the peer may still say over the former way is not for this conversation.
        let conversation = self.peers.draw_conversation(&mut self.fx);
        self.peers.renumber(id, conversation);
        if let Some(peer) = self.peers.get_mut(id) {
            peer.contact.turn(Event::HelloOver);
        }
        self.fx.output(Output::Disconnect { peer: id });
        self.open_way(id);
        self.say_hello(id);
        Some(next)
    }
}
