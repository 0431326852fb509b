//! [`Ways`]: the members, and which peer is reached by which member.

use std::cell::Cell;
use std::collections::HashMap;

use kv_core::{
    Directions, MAX_NAME, Origin, PeerId, PostId, Region, TRANSPORT_VERSION, TransportError, TransportEvent,
    TransportOffer, WayEnd,
};

use crate::error::WaysError;
use crate::member::Member;
use crate::standing::Standing;
use crate::way::{Stage, Way};

/// Most members of one [`Ways`]: as many as a rank record has room for.
pub const MAX_MEMBERS: usize = kv_core::MAX_OFFERS;
/// Most connections of one member that have an origin of their own. Members number their connections from
/// zero; connections above this number share one origin, which may speak for no peer.
const ORIGINS: u64 = u64::MAX / MAX_MEMBERS as u64;

/// Several transports as one [`Transport`](kv_core::Transport): the [crate's page](crate) says how peers meet
/// and how conversations end.
#[derive(Debug)]
pub struct Ways {
    /// The members that have not been left out, the preferred one first.
    pub(crate) members: Vec<Member>,
    pub(crate) standing: Standing,
    pub(crate) peers: HashMap<PeerId, Way>,
    /// Position of the member that carries each post, until the post has ended.
    pub(crate) posts: HashMap<PostId, usize>,
    /// Position of the member that the next `poll` polls, modulo the number of members.
    pub(crate) turn: usize,
    /// Members polled since the owner was last told to sleep.
    pub(crate) served: Cell<usize>,
    pub(crate) scratch: Vec<TransportEvent>,
}

impl Ways {
    /// A transport over 1 to [`MAX_MEMBERS`] members with different names, the preferred one first.
    ///
    /// The decode side chooses, in the order of its list: the first member that both sides have, that leads to
    /// the peer, and that both writes and reads; if none does both, the first that leads to the peer.
    ///
    /// # Errors
    ///
    /// [`WaysError`] if there are too few or too many members, or a name is empty, too long, or given twice.
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
            standing: Standing::of(members.iter().map(|member| member.name)),
            members,
            peers: HashMap::new(),
            posts: HashMap::new(),
            turn: 0,
            served: Cell::new(0),
            scratch: Vec::new(),
        })
    }

    /// A handle that tells which members have been left out, and over which of them peers are connected.
    pub fn standing(&self) -> Standing {
        self.standing.clone()
    }

    /// Registers the next region with every member, and leaves out the members that refuse it.
    pub(crate) fn register_with_all(&mut self, region: &Region) -> Result<(), TransportError> {
        let standing = &self.standing;
        self.members.retain_mut(|member| {
            let registered = member.transport.register(region);
            registered.map_err(|error| standing.leave_out(member.name, error)).is_ok()
        });
        if self.members.is_empty() {
            Err(TransportError::NoTransport { ways: standing.refusals() })
        } else {
            Ok(())
        }
    }

    /// The offer of each member. Members that both write and read come first.
    pub(crate) fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        let mut members: Vec<&Member> = self.members.iter().collect();
        members.sort_by_key(|member| member.transport.directions(None) != Directions::BOTH);
        let offer = |member: &Member| match member.transport.metadata() {
            Ok(metadata) => Some(TransportOffer::new(member.name, metadata)),
            Err(error) => {
                self.standing.leave_out(member.name, error);
                None
            }
        };
        let offers: Vec<TransportOffer> = members.into_iter().filter_map(offer).collect();
        if offers.is_empty() {
            return Err(TransportError::NoTransport { ways: self.standing.refusals() });
        }
        Ok(offers)
    }

    /// Opens the way to a peer by the member that `transport` names. A way by another member must have ended
    /// first: it is refused to leave a way that is open, or over which the peer may still write.
    pub(crate) fn open(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        if transport.version != TRANSPORT_VERSION {
            return Err(TransportError::Metadata("the peer's transport has another version"));
        }
        let member = self.members.iter().position(|member| member.name == transport.name);
        let member =
            member.ok_or(TransportError::Metadata("this worker does not have the peer's transport"))?;
        let former = self.peers.get(&peer).copied().filter(|way| way.member != member);
        if let Some(former) = former {
            if former.stage != Stage::Fenced {
                return Err(TransportError::Unsupported(
                    "a second member to a peer before the first has ended",
                ));
            }
            self.close(peer);
        }
        let name = self.members[member].name;
        let connected = self.members[member].transport.connect(peer, &transport.metadata);
        connected.inspect_err(|error| self.standing.refused(name, error))?;
        let before = self.peers.insert(peer, Way { member, stage: Stage::Open });
        if before.is_none_or(|way| !way.stage.is_connected()) {
            self.standing.connected(name);
        }
        Ok(())
    }

    /// Forgets the way to a peer.
    pub(crate) fn close(&mut self, peer: PeerId) {
        let Some(way) = self.peers.remove(&peer) else { return };
        let Some(member) = self.members.get_mut(way.member) else { return };
        member.transport.disconnect(peer);
        if way.stage.is_connected() {
            self.standing.gone(member.name, false);
        }
    }

    /// The transports that both sides have, in an order that both sides compute alike: by the sum of the
    /// positions in both lists. For owners that connect by metadata; workers connect by offers, among which the
    /// decode side chooses.
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

    /// The member by which a peer is reached, for reading; `None` if the peer is not connected.
    pub(crate) fn known_member(&self, peer: PeerId) -> Option<&Member> {
        self.members.get(self.peers.get(&peer)?.member)
    }

    /// The event that the owner is told for an event that a member reports. `None` if the event is about a
    /// way or a post of another member, or about one that has ended.
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
                let was_connected = way.stage.is_connected();
                way.stage = way.stage.after(&event);
                if was_connected && !way.stage.is_connected() {
                    let lost = matches!(event, TransportEvent::PeerGone { end: WayEnd::Lost, .. });
                    self.standing.gone(self.members.get(member)?.name, lost);
                }
                Some(event)
            }
        }
    }
}

/// The origin of a member's connection, distinct among the connections of all members.
fn origin(member: usize, from: Origin) -> Origin {
    Origin(from.0.min(ORIGINS) * MAX_MEMBERS as u64 + member as u64)
}

/// The member on whose connection a frame came, and the member's own number of that connection; `None` if the
/// connection has no origin of its own.
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
