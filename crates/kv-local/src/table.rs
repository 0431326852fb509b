//! All links of a transport, and the peer that each of them serves.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::mem;

use kv_core::{PeerId, TransportError};
use kv_host::Token;

use crate::link::{Link, LinkId, Stage};
use crate::right::Right;

/// Links by their numbers. An accepted link is a stranger's at first, is unclaimed once its hello has been
/// accepted, and serves a peer once `connect` claims it. A dialed link serves its peer from the beginning.
#[derive(Debug, Default)]
pub(crate) struct Links {
    all: BTreeMap<LinkId, Link>,
    next: LinkId,
    peers: BTreeMap<PeerId, LinkId>,
    /// Accepted links whose hello has not been accepted.
    strangers: BTreeSet<LinkId>,
    /// Accepted links whose hello has been accepted, and that no `connect` has claimed.
    unclaimed: BTreeSet<LinkId>,
    /// Links that are dialed again once the peer's backlog has room.
    dialing: BTreeSet<LinkId>,
}

impl Links {
    /// Adds a link that this side has made.
    pub(crate) fn insert(&mut self, link: Link) -> LinkId {
        let id = self.next;
        self.next += 1;
        self.all.insert(id, link);
        id
    }

    /// Adds a link that this side has accepted.
    pub(crate) fn insert_stranger(&mut self, link: Link) -> LinkId {
        let id = self.insert(link);
        self.strangers.insert(id);
        id
    }

    /// Notes that a stranger's hello has been accepted: the link is unclaimed from now on.
    pub(crate) fn introduce(&mut self, id: LinkId) {
        self.strangers.remove(&id);
        self.unclaimed.insert(id);
    }

    /// Notes that the link serves this peer from now on.
    pub(crate) fn serve(&mut self, id: LinkId, peer: PeerId) {
        if let Some(link) = self.all.get_mut(&id) {
            link.peer = Some(peer);
            self.peers.insert(peer, id);
            self.unclaimed.remove(&id);
        }
    }

    /// Notes that the link serves no peer any more. Returns the peer that it served.
    pub(crate) fn release(&mut self, id: LinkId) -> Option<PeerId> {
        self.unclaimed.remove(&id);
        let peer = self.all.get_mut(&id)?.peer.take()?;
        self.peers.remove(&peer);
        Some(peer)
    }

    /// Takes a link out of the table; its peer is served by no link afterwards.
    pub(crate) fn remove(&mut self, id: LinkId) -> Option<Link> {
        let link = self.all.remove(&id)?;
        if let Some(peer) = link.peer {
            self.peers.remove(&peer);
        }
        for set in [&mut self.strangers, &mut self.unclaimed, &mut self.dialing] {
            set.remove(&id);
        }
        Some(link)
    }

    /// A link by its number.
    pub(crate) fn get(&self, id: LinkId) -> Option<&Link> {
        self.all.get(&id)
    }

    /// A link by its number.
    pub(crate) fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        self.all.get_mut(&id)
    }

    /// All links, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.all.iter().map(|(id, link)| (*id, link))
    }

    /// How many links there are.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// The link that serves a peer.
    pub(crate) fn of_peer(&mut self, peer: PeerId) -> Result<(LinkId, &mut Link), TransportError> {
        let id = self.id_of(peer).ok_or(TransportError::PeerGone)?;
        Ok((id, self.all.get_mut(&id).ok_or(TransportError::PeerGone)?))
    }

    /// Number of the link that serves a peer.
    pub(crate) fn id_of(&self, peer: PeerId) -> Option<LinkId> {
        self.peers.get(&peer).copied()
    }

    /// How many peers are served by a link.
    pub(crate) fn peers(&self) -> usize {
        self.peers.len()
    }

    /// The tokens of the transports that are peers now.
    pub(crate) fn tokens(&self) -> HashSet<Token> {
        self.peers.values().filter_map(|id| self.get(*id)?.token()).collect()
    }

    /// Links of strangers, oldest first.
    pub(crate) fn strangers(&self) -> &BTreeSet<LinkId> {
        &self.strangers
    }

    /// Unclaimed links, oldest first.
    pub(crate) fn unclaimed(&self) -> &BTreeSet<LinkId> {
        &self.unclaimed
    }

    /// An unclaimed link that the transport with this token has opened, for certain. A link whose process the
    /// kernel cannot confirm is not returned: any process that has read the peer's metadata may have opened
    /// it.
    pub(crate) fn proven_unclaimed(&self, token: Token) -> Option<LinkId> {
        let is_theirs = |link: &Link| link.token() == Some(token) && link.proven && link.stage == Stage::Open;
        self.unclaimed.iter().copied().find(|id| self.get(*id).is_some_and(is_theirs))
    }

    /// Unclaimed links of the peer of this link: both sides may have connected at the same time.
    pub(crate) fn unclaimed_beside(&self, id: LinkId) -> Vec<LinkId> {
        let token = |id: LinkId| self.get(id)?.token();
        match token(id) {
            Some(ours) => {
                self.unclaimed.iter().copied().filter(|other| token(*other) == Some(ours)).collect()
            }
            None => Vec::new(),
        }
    }

    /// Unclaimed links through which the transport with this token may not write any more. None of a transport that
    /// is a peer now: such links end with the link that serves the peer.
    pub(crate) fn revoked_unclaimed(&self, token: Token) -> Vec<LinkId> {
        let is_over =
            |link: &Link| link.token() == Some(token) && link.granted.as_ref().is_some_and(Right::is_revoked);
        if self.tokens().contains(&token) {
            return Vec::new();
        }
        self.unclaimed.iter().copied().filter(|id| self.get(*id).is_some_and(is_over)).collect()
    }

    /// How many descriptors the peers of unclaimed links have sent.
    pub(crate) fn lent(&self) -> usize {
        let lent = self.unclaimed.iter().filter_map(|id| self.get(*id)?.lent.as_ref());
        lent.map(|lent| 1 + lent.arenas.len()).sum()
    }

    /// Notes that the peer's backlog is full, so that the link must be dialed again.
    pub(crate) fn dial_later(&mut self, id: LinkId) {
        self.dialing.insert(id);
    }

    /// True if links must be dialed again.
    pub(crate) fn has_to_dial(&self) -> bool {
        !self.dialing.is_empty()
    }

    /// Takes the links that must be dialed again.
    pub(crate) fn take_dialing(&mut self) -> BTreeSet<LinkId> {
        mem::take(&mut self.dialing)
    }

    /// How many links have been made so far.
    #[cfg(test)]
    pub(crate) fn made(&self) -> u64 {
        self.next
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::net::UnixStream;

    use bytes::Bytes;
    use kv_core::Time;
    use kv_host::{Host, ProcessIdentity};

    use super::*;
    use crate::connection::Connection;
    use crate::handshake::OPENING;
    use crate::link::Identity;
    use crate::metadata::Metadata;

    /// A link whose other end is closed.
    pub(crate) fn link() -> Link {
        let (socket, _) = UnixStream::pair().unwrap();
        Link::new(Connection::new(socket.into(), 1 << 20, [0; OPENING]), Stage::Greeting, Time::ZERO)
    }

    #[test]
    fn a_link_passes_from_stranger_to_unclaimed_to_peer_and_leaves_nothing() {
        let mut links = Links::default();
        let (dialed, accepted) = (links.insert(link()), links.insert_stranger(link()));
        links.dial_later(dialed);
        links.serve(dialed, PeerId(7));
        assert_eq!(links.of_peer(PeerId(7)).map(|(id, link)| (id, link.peer)), Ok((dialed, Some(PeerId(7)))));
        assert!(links.strangers().contains(&accepted));
        links.introduce(accepted);
        assert!(links.strangers().is_empty() && links.unclaimed().contains(&accepted));
        links.serve(accepted, PeerId(8));
        assert!(links.unclaimed().is_empty());
        assert_eq!((links.len(), links.peers()), (2, 2));

        assert_eq!(links.release(accepted), Some(PeerId(8)));
        assert_eq!((links.release(accepted), links.id_of(PeerId(8))), (None, None));
        assert_eq!(links.remove(dialed).and_then(|link| link.peer), Some(PeerId(7)));
        assert!(links.of_peer(PeerId(7)).is_err_and(|error| error == TransportError::PeerGone));
        assert!(!links.has_to_dial() && links.remove(dialed).is_none());
        let stranger = links.insert_stranger(link());
        assert!(links.remove(stranger).is_some() && links.strangers().is_empty());
        assert_eq!((links.len(), links.peers()), (1, 0));
        assert!(stranger > accepted && accepted > dialed, "numbers are never used again");
    }

    #[test]
    fn only_an_open_link_of_a_proven_process_is_taken_for_the_peers() {
        let metadata = Metadata {
            host: Host::here().unwrap(),
            token: Token::random().unwrap(),
            process: ProcessIdentity::here().unwrap(),
            socket: String::new(),
            arenas: Vec::new(),
            regions: Vec::new(),
        };
        let token = metadata.token;
        for (stage, proven, is_theirs) in [
            (Stage::Greeting, true, false),
            (Stage::Welcoming, true, false),
            (Stage::Open, false, false),
            (Stage::Open, true, true),
            (Stage::Closing, true, false),
        ] {
            let identity = Some(Identity { bytes: Bytes::new(), metadata: metadata.clone() });
            let mut links = Links::default();
            let id = links.insert_stranger(Link { identity, stage, proven, ..link() });
            links.introduce(id);
            assert_eq!(links.proven_unclaimed(token), is_theirs.then_some(id), "{stage:?}, proven: {proven}");
            assert_eq!(links.proven_unclaimed(Token::random().unwrap()), None);
        }
    }
}
