//! Dialing peers, accepting strangers, and claiming what they have opened.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};

use bytes::Bytes;
use kv_core::{PeerId, PlaneError};
use kv_host::{OsError, Process, Proof, check_user};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, connect};

use super::{ACCEPT_BUDGET, DIAL_AGAIN, LISTEN_AGAIN, LISTENER, new_socket, process_key};
use crate::connection::Connection;
use crate::handshake::{Hello, opening};
use crate::link::{Identity, Link, LinkId, Stage};
use crate::metadata::{Metadata, Token};
use crate::plane::LocalPlane;
use crate::right::Right;

impl LocalPlane {
    pub(crate) fn watch_listener(&mut self) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(LISTENER);
        epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN)
    }

    /// Opens the way to a peer: over the connection it has opened to us, or a new one.
    pub(crate) fn open_link(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), PlaneError> {
        let metadata = Metadata::decode(bytes)?;
        self.host.check(&metadata.host)?;
        if metadata.token == self.token {
            return Err(PlaneError::Metadata("it is this plane's own"));
        }
        if self.peers.contains_key(&peer) {
            return Err(PlaneError::Unsupported("a second peer under the id of a connected one"));
        }
        if self.tokens().contains(&metadata.token) {
            // Two peers that are one process could not be told apart when one of them leaves.
            return Err(PlaneError::Metadata("the peer is connected already, under another id"));
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(PlaneError::WouldBlock);
        }
        self.own_metadata()?;
        match self.find_unclaimed(metadata.token) {
            Some(id) => self.claim(id, peer, bytes)?,
            None => self.dial_new(peer, Identity { bytes: Bytes::copy_from_slice(bytes), metadata })?,
        }
        self.forget_lost(peer);
        Ok(())
    }

    /// The lives of planes that are peers now.
    pub(super) fn tokens(&self) -> HashSet<Token> {
        let links = self.peers.values().filter_map(|id| self.links.get(id));
        links.filter_map(Link::token).collect()
    }

    /// A connection that the peer has opened. Where the kernel cannot confirm that it was the peer, it
    /// may have been anybody who has read the peer's metadata: then the peer is dialed.
    pub(super) fn find_unclaimed(&self, token: Token) -> Option<LinkId> {
        self.unclaimed.iter().copied().find(|id| {
            self.links
                .get(id)
                .is_some_and(|link| link.token() == Some(token) && link.proven && link.stage == Stage::Open)
        })
    }

    /// Uses a connection that the peer has opened.
    pub(super) fn claim(&mut self, id: LinkId, peer: PeerId, bytes: &[u8]) -> Result<(), PlaneError> {
        let link = self.links.get_mut(&id).ok_or(PlaneError::PeerGone)?;
        let identity = link.identity.as_ref().ok_or(PlaneError::PeerGone)?;
        if identity.bytes != bytes {
            return Err(PlaneError::Metadata("it is not what the peer says of itself"));
        }
        let lent = link.lent.as_ref().ok_or(PlaneError::PeerGone)?;
        let mapped = lent.map(&identity.metadata)?;
        link.memory = Some(mapped);
        link.lent = None;
        link.peer = Some(peer);
        self.unclaimed.remove(&id);
        self.peers.insert(peer, id);
        self.populating.push_back(id);
        Ok(())
    }

    pub(super) fn dial_new(&mut self, peer: PeerId, identity: Identity) -> Result<(), PlaneError> {
        if self.links.len() >= self.config.max_connections {
            return Err(PlaneError::WouldBlock);
        }
        let socket = new_socket().map_err(|error| OsError::new("socket", error))?;
        let connection = Connection::new(socket, self.config.outbound_bytes, opening(self.token));
        let mut link = Link::new(connection, Stage::Dialing, self.now);
        link.peer = Some(peer);
        link.identity = Some(identity);
        let id = self.insert(link);
        match self.dial(id) {
            Ok(()) => {
                self.peers.insert(peer, id);
                Ok(())
            }
            Err(error) => {
                self.remove(id);
                Err(error)
            }
        }
    }

    /// Connects and says hello; stays in `Dialing` if the peer's backlog is full.
    pub(super) fn dial(&mut self, id: LinkId) -> Result<(), PlaneError> {
        let own = self.own_metadata()?;
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        let Some(identity) = &link.identity else {
            return Err(PlaneError::PeerGone);
        };
        let address = SocketAddrUnix::new_abstract_name(identity.metadata.socket.as_bytes())
            .map_err(|error| OsError::new("connect", error))?;
        match connect(link.connection.socket(), &address) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                self.dialing.insert(id);
                self.dial_at = self.now + DIAL_AGAIN;
                return Ok(());
            }
            // A plane listens for as long as it lives, under a name that is never used again.
            Err(Errno::CONNREFUSED | Errno::NOENT) => return Err(PlaneError::PeerGone),
            Err(error) => return Err(OsError::new("connect", error).into()),
        }
        let hello = Hello { expected: identity.metadata.token, metadata: own };
        check_user(link.connection.socket())?;
        let process = Process::behind(link.connection.socket())?;
        link.proven = match identity.metadata.process.check(&process) {
            Proof::Proven => true,
            Proof::Unknown => false,
            Proof::Refuted => {
                return Err(PlaneError::Metadata("another process listens at the peer's address"));
            }
        };
        let (right, page) = Right::grant()?;
        epoll::add(&self.epoll, &process, process_key(id), epoll::EventFlags::IN)
            .map_err(|error| OsError::new("epoll_ctl", error))?;
        link.process = Some(process);
        link.stage = Stage::Greeting;
        link.granted = Some(right);
        link.connection.queue_hello(hello.encode(), page.into(), self.arenas.clone());
        self.flush(id);
        Ok(())
    }

    pub(super) fn accept_some(&mut self) {
        for _ in 0..ACCEPT_BUDGET {
            match accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => {
                    // Out of descriptors or memory: the listener would stay readable all the time.
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    self.listen_at = Some(self.now + LISTEN_AGAIN);
                    return;
                }
            }
        }
    }

    pub(super) fn admit(&mut self, socket: OwnedFd) {
        self.stats.accepted += 1;
        if check_user(socket.as_fd()).is_err() {
            self.stats.refused += 1;
            return;
        }
        if self.strangers.len() >= self.config.max_strangers
            && let Some(oldest) = self.strangers.first().copied()
        {
            self.stats.refused += 1;
            self.remove(oldest);
        }
        if self.links.len() >= self.config.max_connections {
            self.stats.refused += 1;
            return;
        }
        let connection = Connection::new(socket, self.config.outbound_bytes, opening(self.token));
        let id = self.insert(Link::new(connection, Stage::Greeting, self.now));
        self.strangers.insert(id);
        self.sweep_at = self.sweep_at.min(self.now + self.config.handshake_timeout);
        self.flush(id);
    }

    pub(super) fn insert(&mut self, link: Link) -> LinkId {
        let id = self.next_link;
        self.next_link += 1;
        self.links.insert(id, link);
        id
    }
}
