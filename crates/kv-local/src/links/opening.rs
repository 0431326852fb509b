//! Dialing peers, accepting strangers, and claiming connections that peers have opened.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use bytes::Bytes;
use kv_core::{PeerId, TransportError};
use kv_host::{OsError, PeerError, Process, Proof, check_user};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, connect};

use crate::connection::Connection;
use crate::handshake::{Hello, opening};
use crate::link::{Identity, Link, LinkId, Stage};
use crate::metadata::Metadata;
use crate::right::Right;
use crate::space::AddressSpace;
use crate::transport::LocalTransport;
use crate::watch::new_socket;

/// Most connections accepted in one call of `poll`.
const ACCEPT_BUDGET: usize = 16;
/// How soon a peer with a full backlog is dialed again.
pub(super) const DIAL_AGAIN: Duration = Duration::from_millis(10);
/// How soon connections are accepted again after file descriptors ran out.
pub(super) const LISTEN_AGAIN: Duration = Duration::from_millis(100);

/// Where the peer's adopted memory lies, if it has some; `None` as well if the peer's process has ended. Refuses a peer
/// whose adopted memory cannot be reached from here, so that the peer is reached by another transport.
fn adopted_space(metadata: &Metadata, process: &Process) -> Result<Option<AddressSpace>, TransportError> {
    if !metadata.regions.iter().any(|region| region.arena.is_none() && region.len > 0) {
        return Ok(None);
    }
    if process.pid().is_none() {
        return Err(TransportError::Metadata(
            "it has adopted memory in a PID namespace that is not seen here",
        ));
    }
    match AddressSpace::of(process) {
        Ok(space) => Ok(Some(space)),
        Err(PeerError::Gone) => Ok(None),
        Err(PeerError::Os(error)) if error.kind == ErrorKind::PermissionDenied => {
            Err(TransportError::Metadata("it has adopted memory that this process has no right to reach"))
        }
        Err(error) => Err(error.into()),
    }
}

impl LocalTransport {
    /// Connects a peer: over a connection that the peer has opened to this transport, or over a new one.
    pub(crate) fn open_link(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), TransportError> {
        let metadata = Metadata::decode(bytes)?;
        self.given.check_peer(&metadata)?;
        if self.links.id_of(peer).is_some() {
            return Err(TransportError::Unsupported("a second connect under the id of a connected peer"));
        }
        if self.links.tokens().contains(&metadata.token) {
            // Two peers that are one process could not be told apart when one of them leaves.
            return Err(TransportError::Metadata("the peer is connected already, under another id"));
        }
        if self.links.peers() >= self.config.max_peers {
            return Err(TransportError::WouldBlock);
        }
        self.given.metadata()?;
        self.close_revoked(metadata.token);
        match self.links.proven_unclaimed(metadata.token) {
            Some(id) => self.claim(id, peer, bytes)?,
            None => self.dial_new(peer, Identity { bytes: Bytes::copy_from_slice(bytes), metadata })?,
        }
        self.forget_lost(peer);
        Ok(())
    }

    /// Uses a connection that the peer has opened for the peer id `peer`.
    fn claim(&mut self, id: LinkId, peer: PeerId, bytes: &[u8]) -> Result<(), TransportError> {
        let link = self.links.get_mut(id).ok_or(TransportError::PeerGone)?;
        let identity = link.identity.as_ref().ok_or(TransportError::PeerGone)?;
        if identity.bytes != bytes {
            return Err(TransportError::Metadata("it differs from the metadata in the peer's hello"));
        }
        let lent = link.lent.as_ref().ok_or(TransportError::PeerGone)?;
        if let Some(process) = &link.process {
            link.space = adopted_space(&identity.metadata, process)?;
        }
        let mapped = lent.map(&identity.metadata)?;
        link.memory = Some(mapped);
        link.lent = None;
        self.links.serve(id, peer);
        self.populate(id);
        Ok(())
    }

    fn dial_new(&mut self, peer: PeerId, identity: Identity) -> Result<(), TransportError> {
        if self.links.len() >= self.config.max_connections {
            return Err(TransportError::WouldBlock);
        }
        let link = self.new_link(new_socket()?, Stage::Dialing);
        let id = self.links.insert(Link { identity: Some(identity), ..link });
        self.pacing.open(id);
        self.links.serve(id, peer);
        match self.dial(id) {
            // No socket listens there any more: the peer's transport has ended.
            Err(TransportError::PeerGone) => {
                self.gone(id);
                Ok(())
            }
            Err(error) => {
                self.remove(id);
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    fn new_link(&self, socket: OwnedFd, stage: Stage) -> Link {
        let opening = opening(self.given.token());
        Link::new(Connection::new(socket, self.config.outbound_bytes, opening), stage, self.now)
    }

    /// Connects the socket and queues the hello. The link stays in `Dialing` if the peer's backlog is full.
    pub(super) fn dial(&mut self, id: LinkId) -> Result<(), TransportError> {
        let own = self.given.metadata()?;
        let Some(link) = self.links.get_mut(id) else {
            return Ok(());
        };
        let Some(identity) = &link.identity else {
            return Err(TransportError::PeerGone);
        };
        let failed = |error| OsError::new("connect", error);
        let name = identity.metadata.socket.as_bytes();
        let address = SocketAddrUnix::new_abstract_name(name).map_err(failed)?;
        match connect(link.connection.socket(), &address) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                self.links.dial_later(id);
                self.dial_at = self.now + DIAL_AGAIN;
                return Ok(());
            }
            // A transport listens for as long as it lives, under a name that is never used again.
            Err(Errno::CONNREFUSED | Errno::NOENT) => return Err(TransportError::PeerGone),
            Err(error) => return Err(failed(error).into()),
        }
        let hello = Hello { expected: identity.metadata.token, metadata: own };
        let process = Process::behind(link.connection.socket())?;
        link.proven = match identity.metadata.process.check(&process) {
            Proof::Proven => true,
            Proof::Unknown => false,
            Proof::Refuted => {
                return Err(TransportError::Metadata("another process listens at the peer's address"));
            }
        };
        link.space = adopted_space(&identity.metadata, &process)?;
        let (right, page) = Right::grant()?;
        self.watch.watch_process(id, &process)?;
        link.process = Some(process);
        link.stage = Stage::Greeting;
        link.granted = Some(right);
        link.connection.outbound.queue_hello(hello.encode(), page.into(), self.given.arenas().to_vec());
        self.flush(id);
        Ok(())
    }

    pub(super) fn accept_some(&mut self) {
        for _ in 0..ACCEPT_BUDGET {
            match self.watch.accept() {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => {
                    // No descriptors or memory are left: the listener would stay readable all the time.
                    self.watch.ignore_listener();
                    self.listen_at = Some(self.now + LISTEN_AGAIN);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, socket: OwnedFd) {
        self.stats.accepted += 1;
        if check_user(socket.as_fd()).is_err() {
            self.stats.refused += 1;
            return;
        }
        if self.links.strangers().len() >= self.config.max_strangers
            && let Some(oldest) = self.links.strangers().first().copied()
        {
            self.stats.refused += 1;
            self.remove(oldest);
        }
        if self.links.len() >= self.config.max_connections {
            self.stats.refused += 1;
            return;
        }
        let id = self.links.insert_stranger(self.new_link(socket, Stage::Greeting));
        self.pacing.open(id);
        self.sweep_at = self.sweep_at.min(self.now + self.config.handshake_timeout);
        self.flush(id);
    }
}
