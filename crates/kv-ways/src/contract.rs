//! The [`Plane`] trait: each call goes to the member that it concerns.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{
    Directions, Origin, PeerId, Plane, PlaneError, PlaneEvent, PlaneWait, Post, PostId, Region, Time,
    TransportOffer, WriteFence,
};

use crate::form;
use crate::way::Stage;
use crate::ways::{Ways, member_and_origin};

impl Plane for Ways {
    fn name(&self) -> &'static str {
        "ways"
    }

    fn register(&mut self, region: &Region) -> Result<(), PlaneError> {
        self.register_with_all(region)
    }

    /// All transports in one piece, for an owner that knows of no transports.
    fn metadata(&self) -> Result<Bytes, PlaneError> {
        form::encode(&self.offers()?)
    }

    fn transports(&self) -> Result<Vec<TransportOffer>, PlaneError> {
        self.offers()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), PlaneError> {
        let mut common = self.common(&form::decode(metadata)?)?;
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
            None => PlaneError::Metadata("no transport is common"),
            Some((_, first)) if refusals.iter().all(|(_, error)| error == first) => first.clone(),
            Some(_) => PlaneError::NoTransport { ways: refusals },
        })
    }

    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), PlaneError> {
        self.open(peer, transport)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let offers = form::decode(metadata).unwrap_or_default();
        offers.iter().any(|transport| self.may_speak_by(from, transport))
    }

    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        let Some((member, from)) = member_and_origin(from) else { return false };
        self.members.get(member).is_some_and(|member| {
            member.name == transport.name && member.plane.may_speak_for(from, &transport.metadata)
        })
    }

    fn disconnect(&mut self, peer: PeerId) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.plane.disconnect(peer);
        }
        self.peers.remove(&peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), PlaneError> {
        self.member_of(peer)?.1.plane.send(peer, frame)
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), PlaneError> {
        let id = post.id;
        if self.posts.contains_key(&id) {
            return Err(PlaneError::Unsupported("a second post under the id of one that has not ended"));
        }
        let (by, member) = self.member_of(peer)?;
        member.plane.post(peer, post)?;
        self.posts.insert(id, by);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        let member = self.posts.get(&post).and_then(|by| self.members.get_mut(*by));
        if let Some(member) = member {
            member.plane.cancel(post);
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.plane.permit(peer, until);
        }
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.known_member(peer).map_or(WriteFence::AtDeath, |member| member.plane.write_fence(peer))
    }

    fn revoke(&mut self, peer: PeerId) {
        if let Ok((_, member)) = self.member_of(peer) {
            member.plane.revoke(peer);
        }
    }

    /// Serves one member, which takes about a millisecond at most; the others have their turns in the next
    /// calls, however busy this one is.
    fn poll(&mut self, now: Time, events: &mut Vec<PlaneEvent>) {
        let turn = self.turn % self.members.len().max(1);
        let Some(member) = self.members.get_mut(turn) else { return };
        let mut reported = std::mem::take(&mut self.scratch);
        member.plane.poll(now, &mut reported);
        events.extend(reported.drain(..).filter_map(|event| self.hear(turn, event)));
        self.scratch = reported;
        self.turn = turn + 1;
        self.served.set(self.served.get().saturating_add(1));
    }

    /// Sleep is for when every member has had its turn since the last one.
    fn wait(&self) -> PlaneWait {
        // The one that was served last measures what its events have cost until it is asked.
        let last = self.turn.checked_sub(1).and_then(|last| self.members.get(last));
        let busy = last.is_some_and(|member| member.plane.wait() == PlaneWait::Now);
        if busy || self.served.get() < self.members.len() {
            return PlaneWait::Now;
        }
        let (mut fds, mut at_most): (_, Option<Duration>) = (Vec::new(), None);
        for member in &self.members {
            match member.plane.wait() {
                PlaneWait::Now => return PlaneWait::Now,
                PlaneWait::Readable(more) => fds.extend(more),
                PlaneWait::ReadableOrAfter(more, after) => {
                    fds.extend(more);
                    at_most = Some(at_most.map_or(after, |known| known.min(after)));
                }
            }
        }
        self.served.set(0);
        match at_most {
            Some(after) => PlaneWait::ReadableOrAfter(fds, after),
            None => PlaneWait::Readable(fds),
        }
    }

    /// Before a peer is connected: what every way is good for, and where that is nothing, the preferred one.
    fn directions(&self, peer: Option<PeerId>) -> Directions {
        if let Some(peer) = peer
            && let Some(member) = self.known_member(peer)
        {
            return member.plane.directions(Some(peer));
        }
        let each = || self.members.iter().map(|member| member.plane.directions(None));
        let all = each().fold(Directions::BOTH, Directions::and);
        if all.write || all.read { all } else { each().next().unwrap_or(all) }
    }
}
