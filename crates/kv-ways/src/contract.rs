//! The [`Transport`] trait for [`Ways`]: each call goes to the member that the call concerns.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{
    Directions, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent,
    TransportOffer, TransportWait, WriteFence,
};

use crate::metadata;
use crate::way::Stage;
use crate::ways::{Ways, member_and_origin};

impl Transport for Ways {
    fn name(&self) -> &'static str {
        "ways"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.register_with_all(region)
    }

    /// The metadata of all members as one piece of bytes, for an owner that does not use
    /// [`offers`](Transport::offers).
    fn metadata(&self) -> Result<Bytes, TransportError> {
        metadata::encode(&self.offers()?)
    }

    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        self.offers()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        let mut common = self.common(&metadata::decode(metadata)?)?;
        if let Some(way) = self.peers.get(&peer).filter(|way| way.stage != Stage::Fenced) {
            let name = self.members.get(way.member).map(|member| member.name);
            common.retain(|offer| Some(offer.name.as_str()) == name);
        }
        let mut refusals = Vec::new();
        for transport in &common {
            let Err(error) = self.open(peer, transport) else { return Ok(()) };
            let member = self.members.iter().find(|member| member.name == transport.name);
            refusals.extend(member.map(|member| (member.name, error)));
        }
        Err(match refusals.first() {
            None => TransportError::Metadata("the two workers have no transport in common"),
            Some((_, first)) if refusals.iter().all(|(_, error)| error == first) => first.clone(),
            Some(_) => TransportError::NoTransport { ways: refusals },
        })
    }

    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.open(peer, transport)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let offers = metadata::decode(metadata).unwrap_or_default();
        offers.iter().any(|transport| self.may_speak_by(from, transport))
    }

    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        let Some((member, from)) = member_and_origin(from) else { return false };
        self.members.get(member).is_some_and(|member| {
            member.name == transport.name && member.transport.may_speak_for(from, &transport.metadata)
        })
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.close(peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.member_of(peer)?.1.transport.send(peer, frame)
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        let id = post.id;
        if self.posts.contains_key(&id) {
            return Err(TransportError::Unsupported("a second post under the id of one that has not ended"));
        }
        let (by, member) = self.member_of(peer)?;
        member.transport.post(peer, post)?;
        self.posts.insert(id, by);
        Ok(())
    }

    fn rouse(&mut self, peer: PeerId, bytes: u64) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.transport.rouse(peer, bytes);
        }
    }

    fn cancel(&mut self, post: PostId) {
        let member = self.posts.get(&post).and_then(|by| self.members.get_mut(*by));
        if let Some(member) = member {
            member.transport.cancel(post);
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.transport.permit(peer, until);
        }
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.known_member(peer).map_or(WriteFence::AtDeath, |member| member.transport.write_fence(peer))
    }

    fn revoke(&mut self, peer: PeerId) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.transport.revoke(peer);
        }
    }

    /// Polls one member, which takes about a millisecond at most. The members are polled in turn, one in each
    /// call, however busy one of them is.
    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        let turn = self.turn % self.members.len().max(1);
        let Some(member) = self.members.get_mut(turn) else { return };
        let mut reported = std::mem::take(&mut self.scratch);
        member.transport.poll(now, &mut reported);
        events.extend(reported.drain(..).filter_map(|event| self.hear(turn, event)));
        self.scratch = reported;
        self.turn = turn + 1;
        self.served.set(self.served.get().saturating_add(1));
    }

    fn begin_handling(&mut self) {
        let last = self.turn.checked_sub(1).and_then(|last| self.members.get_mut(last));
        if let Some(member) = last {
            member.transport.begin_handling();
        }
    }

    /// Allows the owner to sleep only after every member has been polled since the last sleep.
    fn wait(&self) -> TransportWait {
        // The member that was polled last measures the cost of its events until this call of `wait`.
        let last = self.turn.checked_sub(1).and_then(|last| self.members.get(last));
        let busy = last.is_some_and(|member| member.transport.wait() == TransportWait::Now);
        if busy || self.served.get() < self.members.len() {
            return TransportWait::Now;
        }
        let (mut fds, mut at_most): (_, Option<Duration>) = (Vec::new(), None);
        for member in &self.members {
            match member.transport.wait() {
                TransportWait::Now => return TransportWait::Now,
                TransportWait::Readable(more) => fds.extend(more),
                TransportWait::ReadableOrAfter(more, after) => {
                    fds.extend(more);
                    at_most = Some(at_most.map_or(after, |known| known.min(after)));
                }
            }
        }
        self.served.set(0);
        match at_most {
            Some(after) => TransportWait::ReadableOrAfter(fds, after),
            None => TransportWait::Readable(fds),
        }
    }

    /// Of a connected peer: the directions of its member. Without a peer, or before the peer is connected:
    /// the directions that all members have in common, or those of the first member where they have none.
    fn directions(&self, peer: Option<PeerId>) -> Directions {
        if let Some(peer) = peer
            && let Some(member) = self.known_member(peer)
        {
            return member.transport.directions(Some(peer));
        }
        let each = || self.members.iter().map(|member| member.transport.directions(None));
        let all = each().fold(Directions::BOTH, Directions::and);
        if all.write || all.read { all } else { each().next().unwrap_or(all) }
    }
}
