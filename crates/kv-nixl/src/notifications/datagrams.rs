//! Datagrams between transports of one host: notifications that go beside NIXL, and rings. A ring wakes a peer that
//! sleeps between two looks: NIXL has no descriptor that becomes readable when something arrives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::agent::name::{agent_name, is_of_a_transport};
use crate::notifications::envelope::HEADER;

/// Longest notification that goes as a datagram: a datagram that waits takes from the bytes that this transport may
/// have waiting at all peers together, of which the kernel gives it some 200 KiB.
const LONGEST: usize = 16 << 10;
/// The datagrams, and bytes of notifications, after which a look ends: what is left is for the next one. The queue of a
/// socket has 10 or 512 places on most hosts.
const MOST: usize = 1024;
const MOST_BYTES: usize = 4 << 20;
/// The time for which a peer that was rung is awake at least.
const AGAIN: Duration = Duration::from_micros(100);
/// What comes before an agent's name in the address of its transport.
const PREFIX: &str = "kv-nixl-";

/// A transport's datagram socket. Its address in the abstract namespace is made of the token: the kernel tells receivers
/// who has sent a datagram, as long as the sender lives.
#[derive(Debug)]
pub(crate) struct Datagrams {
    socket: UnixDatagram,
    /// One byte longer than the longest notification, so that a longer datagram is seen.
    buffer: Vec<u8>,
}

impl Datagrams {
    /// The socket of the transport with this token.
    pub(crate) fn new(token: u64) -> io::Result<Datagrams> {
        let socket = UnixDatagram::bind_addr(&address(token)?)?;
        socket.set_nonblocking(true)?;
        Ok(Datagrams { socket, buffer: vec![0; LONGEST + 1] })
    }

    /// Takes what has come, and hands over the notifications with the names of the agents that have sent them. True if
    /// anything has come that wakes: a ring, whoever has sent it.
    pub(crate) fn take(&mut self, mut each: impl FnMut(&str, Bytes)) -> bool {
        let (mut rung, mut bytes) = (false, 0);
        for _ in 0..MOST {
            let Ok((len, from)) = self.socket.recv_from(&mut self.buffer) else { break };
            let notification = self.buffer.get(..len).filter(|bytes| (HEADER..=LONGEST).contains(&bytes.len()));
            match notification.zip(sender(&from)) {
                Some((notification, name)) => each(&name, Bytes::copy_from_slice(notification)),
                None => rung = true,
            }
            bytes += len;
            if bytes >= MOST_BYTES {
                break;
            }
        }
        rung
    }
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A peer's socket, and when the peer was rung last.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    address: SocketAddr,
    rung: Option<Instant>,
    /// Notifications may go as datagrams, not only rings.
    carries: bool,
}

impl PeerSocket {
    /// The socket of the transport with this token.
    pub(crate) fn new(token: u64, carries: bool) -> Option<PeerSocket> {
        Some(PeerSocket { address: address(token).ok()?, rung: None, carries })
    }

    /// Sends a notification, if it may go as a datagram, and the peer's queue has room. True if the peer will get it,
    /// unless the peer ends before.
    pub(crate) fn send(&self, from: &Datagrams, notification: &[u8]) -> bool {
        self.carries
            && notification.len() <= LONGEST
            && from.socket.send_to_addr(notification, &self.address).is_ok()
    }

    /// Rings, unless the peer was rung a moment ago. A ring that is lost costs time, nothing else.
    pub(crate) fn ring(&mut self, from: &Datagrams, now: Instant) {
        if self.rung.is_none_or(|last| now.saturating_duration_since(last) >= AGAIN) {
            self.rung = Some(now);
            // It fails if the peer has much to take already, or has ended.
            let _ = from.socket.send_to_addr(&[0], &self.address);
        }
    }
}

fn address(token: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{PREFIX}{}", agent_name(token)))
}

/// The name of the agent of the transport whose socket has this address.
fn sender(address: &SocketAddr) -> Option<String> {
    let name = std::str::from_utf8(address.as_abstract_name()?).ok()?.strip_prefix(PREFIX)?;
    is_of_a_transport(name).then(|| name.to_owned())
}
