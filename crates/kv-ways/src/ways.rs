//! The transport over several: its members, and who is reached by which.

use std::cell::Cell;
use std::collections::HashMap;

use kv_core::{
    Directions, MAX_NAME, Origin, PeerId, PostId, Region, TRANSPORT_VERSION, TransportError, TransportEvent,
    TransportOffer,
};

use crate::error::WaysError;
use crate::member::{Member, Standing};
use crate::way::{Stage, Way};

/// Most members: as many as a rank record has room for.
pub const MAX_MEMBERS: usize = kv_core::MAX_OFFERS;
/// Members number their connections from zero; what is above shares a number that speaks for nobody.
const ORIGINS: u64 = u64::MAX / MAX_MEMBERS as u64;

/// Several transports as one [`Transport`](kv_core::Transport). See the crate's header.
#[derive(Debug)]
pub struct Ways {
    /// Those that peers may be reached by, the preferred one first.
    pub(crate) members: Vec<Member>,
    pub(crate) standing: Standing,
    pub(crate) peers: HashMap<PeerId, Way>,
    /// By which member each post goes that has not ended.
    pub(crate) posts: HashMap<PostId, usize>,
    /// The member that the next `poll` serves.
    pub(crate) turn: usize,
    /// Members served since the owner was last told to sleep.
    pub(crate) served: Cell<usize>,
    pub(crate) scratch: Vec<TransportEvent>,
}

impl Ways {
    /// A transport over these members, the preferred one first: 1 to 16 under different names. Of those that a
    /// peer has too, the first that is good for both directions is its way; without such a one, the first.
    pub fn new(members: Vec<Member>) -> Result<Ways, WaysError> {
        if !(1..=MAX_MEMBERS).contains(&members.len()) {
            return Err(WaysError::Members { got: members.len(), max: MAX_MEMBERS });
        }
        for (second, Member { name, .. }) in members.iter().enumerate() {
            if !(1..=MAX_NAME).contains(&name.len()) {
                return Err(WaysError::Name { member: second, got: name.len(), max: MAX_NAME });
            }
            if let Some(first) = members[..second].iter().position(|other| other.name == *name) {
                return Err(WaysError::SameName { name, first, second });
            }
        }
        Ok(Ways {
            members,
            standing: Standing::default(),
            peers: HashMap::new(),
            posts: HashMap::new(),
            turn: 0,
            served: Cell::new(0),
            scratch: Vec::new(),
        })
    }

    /// Tells which members are out.
    pub fn standing(&self) -> Standing {
        self.standing.clone()
    }

    /// Registers the next region with every member, and leaves out those that refuse it.
    pub(crate) fn register_with_all(&mut self, region: &Region) -> Result<(), TransportError> {
        let standing = &self.standing;
        self.members.retain_mut(|member| {
            let registered = member.transport.register(region);
            registered.map_err(|error| standing.note(member.name, error)).is_ok()
        });
        if self.members.is_empty() {
            Err(TransportError::NoTransport { ways: standing.refusals() })
        } else {
            Ok(())
        }
    }

    /// How each member is reached. Members that are good for both directions come first.
    pub(crate) fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        let mut members: Vec<&Member> = self.members.iter().collect();
        members.sort_by_key(|member| member.transport.directions(None) != Directions::BOTH);
        let offer = |member: &Member| match member.transport.metadata() {
            Ok(metadata) => Some(TransportOffer::new(member.name, metadata)),
            Err(error) => {
                self.standing.note(member.name, error);
                None
            }
        };
        let offers: Vec<TransportOffer> = members.into_iter().filter_map(offer).collect();
        if offers.is_empty() {
            return Err(TransportError::NoTransport { ways: self.standing.refusals() });
        }
        Ok(offers)
    }

    /// Opens the way to a peer by the member of this name. One that is open, or whose writes may go on, is not
    /// left for another.
    pub(crate) fn open(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        if transport.version != TRANSPORT_VERSION {
            return Err(TransportError::Metadata("it is of another version of the transport"));
        }
        let member = self.members.iter().position(|member| member.name == transport.name);
        let member = member.ok_or(TransportError::Metadata("it is of a transport that is not here"))?;
        let former = self.peers.get(&peer).copied().filter(|way| way.member != member);
        if let Some(former) = former {
            if former.stage != Stage::Fenced {
                return Err(TransportError::Unsupported("another way to a peer whose way has not ended"));
            }
            self.members[former.member].transport.disconnect(peer);
            self.peers.remove(&peer);
        }
        self.members[member].transport.connect(peer, &transport.metadata)?;
        self.peers.insert(peer, Way { member, stage: Stage::Open });
        Ok(())
    }

    /// The transports that both have, in an order that both sides find: what each prefers counts alike.
    pub(crate) fn common(&self, theirs: &[TransportOffer]) -> Result<Vec<TransportOffer>, TransportError> {
        let mut common = Vec::new();
        for (rank, ours) in self.offers()?.iter().enumerate() {
            if let Some(other) = theirs.iter().position(|offer| offer.name == ours.name) {
                common.push((rank + other, &theirs[other]));
            }
        }
        common.sort_by_key(|(ranks, offer)| (*ranks, &offer.name));
        Ok(common.into_iter().map(|(_, offer)| offer.clone()).collect())
    }

    /// The member by which a peer is reached.
    pub(crate) fn member_of(&mut self, peer: PeerId) -> Result<(usize, &mut Member), TransportError> {
        let way = self.peers.get(&peer).ok_or(TransportError::PeerGone)?;
        let member = self.members.get_mut(way.member).ok_or(TransportError::PeerGone)?;
        Ok((way.member, member))
    }

    /// The same, to look at it.
    pub(crate) fn known_member(&self, peer: PeerId) -> Option<&Member> {
        self.members.get(self.peers.get(&peer)?.member)
    }

    /// What the owner is to hear of something that a member reports. Nothing, if it is about a way or a post
    /// of another member, or of none any more.
    pub(crate) fn hear(&mut self, member: usize, event: TransportEvent) -> Option<TransportEvent> {
        match event {
            TransportEvent::Frame { from, frame } => {
                Some(TransportEvent::Frame { from: origin(member, from), frame })
            }
            TransportEvent::Posted { post, .. } => {
                self.posts.get(&post).filter(|by| **by == member)?;
                self.posts.remove(&post);
                Some(event)
            }
            TransportEvent::PeerGone { peer, .. } | TransportEvent::Revoked { peer } => {
                let way = self.peers.get_mut(&peer).filter(|way| way.member == member)?;
                way.stage = way.stage.after(&event);
                Some(event)
            }
        }
    }
}

/// A member's number of a connection, among those of all members.
fn origin(member: usize, from: Origin) -> Origin {
    Origin(from.0.min(ORIGINS) * MAX_MEMBERS as u64 + member as u64)
}

/// The member on whose connection a frame came, and the member's own number of the connection.
pub(crate) fn member_and_origin(from: Origin) -> Option<(usize, Origin)> {
    let (number, member) = (from.0 / MAX_MEMBERS as u64, from.0 % MAX_MEMBERS as u64);
    (number < ORIGINS).then_some((member as usize, Origin(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_different_members_have_different_numbers() {
        for number in [0, 1, 4095, ORIGINS - 1] {
            let of = [0, 1, 15].map(|member| origin(member, Origin(number)));
            assert!(of[0] != of[1] && of[1] != of[2], "{number}");
            for (at, member) in [0, 1, 15].into_iter().enumerate() {
                assert_eq!(member_and_origin(of[at]), Some((member, Origin(number))));
            }
        }
        assert_eq!(member_and_origin(origin(3, Origin(u64::MAX))), None);
    }
}
