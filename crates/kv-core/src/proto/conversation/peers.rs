//! All peers of a worker, by id, by conversation, and by identity.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::id::{Incarnation, PeerId, WorkerId};
use crate::meter::each;
use crate::proto::conversation::Peer;
use crate::proto::conversation::detours::Detours;
use crate::proto::conversation::numbers::Numbers;
use crate::proto::conversation::outgoing::Outgoing;
use crate::proto::effects::Effects;
use crate::record::TransportOffer;
use crate::time::Time;
use crate::transport::Origin;
use crate::wire::ConversationId;

/// All peers, by id, by conversation, and by identity.
#[derive(Debug, Clone, Default)]
pub(in crate::proto) struct Peers {
    peers: BTreeMap<PeerId, Peer>,
    by_conversation: BTreeMap<ConversationId, PeerId>,
    /// An incarnation is a number that a worker chooses. Only together with the transport it names
    /// one worker.
    by_identity: BTreeMap<(Incarnation, TransportOffer), PeerId>,
    /// Peers that were removed, with posts that have not ended.
    gone: BTreeMap<PeerId, ((Incarnation, TransportOffer), u32)>,
    /// The ways that have failed.
    pub(in crate::proto) detours: Detours,
    next: u64,
    conversations_drawn: u32,
    /// The last question number of any peer that was forgotten. Later questions get larger numbers,
    /// so that an answer of a conversation that is over is never taken for an answer to a later
    /// question.
    last_numbered: u64,
    /// A number above every attempt at a peer that was forgotten: the peer may remember which
    /// attempts are over.
    tried: u64,
}

/// Where the sessions go that wait for a peer, after a transport has not led there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum NextWay {
    /// The peer is greeted by the next transport.
    Free,
    /// There is a conversation with the same worker over the next transport, by which the worker may have come
    /// itself: the sessions have to wait for that one.
    Known(PeerId),
}

impl Peers {
    /// Draws an id for a new conversation.
    pub(super) fn draw_conversation(&mut self, fx: &mut Effects) -> ConversationId {
        self.conversations_drawn = self.conversations_drawn.saturating_add(1);
        ConversationId::new(self.conversations_drawn, fx.draw() as u32)
    }

    pub(in crate::proto) fn insert(&mut self, mut peer: Peer) -> PeerId {
        peer.numbers = Numbers::above(self.last_numbered);
        peer.outgoing = Outgoing::from(self.tried.max(1));
        let id = PeerId(self.next);
        self.next += 1;
        self.by_conversation.insert(peer.ours, id);
        self.by_identity.insert((peer.incarnation, peer.transport.clone()), id);
        self.peers.insert(id, peer);
        id
    }

    /// Removes a peer. Its id stays reserved until its posts have ended.
    pub(in crate::proto) fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.peers.remove(&id)?;
        self.last_numbered = self.last_numbered.max(peer.numbers.last());
        self.tried = self.tried.max(peer.outgoing.next());
        self.by_conversation.remove(&peer.ours);
        let identity = (peer.incarnation, peer.transport.clone());
        self.by_identity.remove(&identity);
        if peer.posts > 0 {
            self.gone.insert(id, (identity, peer.posts));
        }
        Some(peer)
    }

    /// Gives the conversation with a peer a new id on this side.
    pub(super) fn renumber(&mut self, id: PeerId, conversation: ConversationId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            self.by_conversation.remove(&peer.ours);
            peer.ours = conversation;
            self.by_conversation.insert(conversation, id);
        }
    }

    pub(in crate::proto) fn post_started(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.posts += 1;
        }
    }

    pub(in crate::proto) fn post_ended(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.posts = peer.posts.saturating_sub(1);
        } else if let Some((_, posts)) = self.gone.get_mut(&id) {
            *posts = posts.saturating_sub(1);
            if *posts == 0 {
                self.gone.remove(&id);
            }
        }
    }

    /// True while posts of a former conversation with this worker have not ended.
    pub(super) fn has_lingering_posts(&self, incarnation: Incarnation, transport: &TransportOffer) -> bool {
        each(self.gone.values()).any(|((gone, of), _)| *gone == incarnation && of == transport)
    }

    /// True while posts of a former conversation have not ended, for a peer that is known again.
    pub(in crate::proto) fn lingers(&self, id: PeerId) -> bool {
        self.peers.get(&id).is_some_and(|peer| self.has_lingering_posts(peer.incarnation, &peer.transport))
    }

    pub(in crate::proto) fn get(&self, id: PeerId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    pub(in crate::proto) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.peers.get_mut(&id)
    }

    /// The peer that puts this id into its frames, and the connection on which its frames come.
    pub(in crate::proto) fn with_conversation(
        &self,
        conversation: ConversationId,
    ) -> Option<(PeerId, Option<Origin>)> {
        let &id = self.by_conversation.get(&conversation)?;
        Some((id, self.peers.get(&id)?.origin))
    }

    /// The peers whose frames come on this connection.
    pub(in crate::proto) fn of_origin(&self, origin: Origin) -> impl Iterator<Item = (PeerId, &Peer)> {
        each(self.iter()).filter(move |(_, peer)| peer.origin == Some(origin))
    }

    pub(in crate::proto) fn known(
        &self,
        incarnation: Incarnation,
        transport: &TransportOffer,
    ) -> Option<PeerId> {
        self.by_identity.get(&(incarnation, transport.clone())).copied()
    }

    /// The conversations with the same worker in which sessions here wait while the peer is out of touch, if this
    /// peer's transport is one of those by which the worker is reached.
    pub(in crate::proto) fn waited_for_beside(&self, id: PeerId) -> Vec<PeerId> {
        let Some(here) = self.peers.get(&id) else { return Vec::new() };
        let beside = |there: &Peer| {
            there.incarnation == here.incarnation
                && there.is_out_of_touch()
                && there.ways.contains(&here.transport)
                && !there.outgoing.waiting().is_empty()
        };
        let all = each(self.peers.iter()).filter(|(there, peer)| **there != id && beside(peer));
        all.map(|(&there, _)| there).collect()
    }

    /// If a peer that was not met yet cannot be reached by its transport, these come next.
    pub(super) fn reach_also_by(&mut self, id: PeerId, others: VecDeque<TransportOffer>) {
        if let Some(peer) = self.peers.get_mut(&id).filter(|peer| !peer.has_met()) {
            // All that there are: the slow one is among them, or is the one that is tried now.
            (peer.others, peer.slow) = (others, None);
        }
    }

    /// No answer has come in time over the transport of a peer that was not met yet, but may still come.
    pub(in crate::proto) fn note_slow(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.slow.get_or_insert_with(|| peer.transport.clone());
        }
    }

    /// Goes over to the next transport by which the peer may be reached, if none has led to the
    /// peer yet. `None` if there is no other.
    pub(super) fn reroute(&mut self, id: PeerId) -> Option<NextWay> {
        let peer = self.peers.get_mut(&id).filter(|peer| peer.contact.conversation().is_none())?;
        let next = peer.others.pop_front().or_else(|| peer.slow.take())?;
        if let Some(&there) = self.by_identity.get(&(peer.incarnation, next.clone())) {
            return Some(NextWay::Known(there));
        }
        let before = std::mem::replace(&mut peer.transport, next.clone());
        self.by_identity.remove(&(peer.incarnation, before));
        self.by_identity.insert((peer.incarnation, next), id);
        Some(NextWay::Free)
    }

    /// What one conversation with a worker was yet to say of failed sessions is said in another one.
    pub(super) fn hand_over_aborts(&mut self, from: PeerId, to: PeerId) {
        let aborts = self.peers.get_mut(&from).map(|peer| peer.outgoing.take_unanswered());
        let Some(peer) = self.peers.get_mut(&to) else { return };
        for (abort, failed_at) in each(aborts.unwrap_or_default()) {
            peer.outgoing.abort_unopened(abort, failed_at);
        }
    }

    /// True if another incarnation of the same worker is known.
    pub(super) fn has_successor(&self, worker: &WorkerId, incarnation: Incarnation) -> bool {
        each(self.peers.values()).any(|peer| peer.worker == *worker && peer.incarnation != incarnation)
    }

    /// The idle peer that has been silent the longest.
    pub(super) fn oldest_idle(&self) -> Option<PeerId> {
        let idle = each(self.peers.iter()).filter(|(_, peer)| peer.is_idle());
        idle.min_by_key(|(_, peer)| peer.last_heard).map(|(&id, _)| id)
    }

    /// This worker received nothing for `deaf`: that time does not count as silence of any peer.
    pub(in crate::proto) fn excuse(&mut self, deaf: Duration, now: Time) {
        for peer in each(self.peers.values_mut()) {
            peer.last_heard = (peer.last_heard + deaf).min(now);
            peer.contact.excuse(deaf, now);
        }
    }

    pub(in crate::proto) fn len(&self) -> usize {
        self.peers.len()
    }

    pub(in crate::proto) fn iter(&self) -> impl Iterator<Item = (PeerId, &Peer)> {
        each(self.peers.iter()).map(|(&id, peer)| (id, peer))
    }
}
