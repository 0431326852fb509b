//! Datagrams between transports of one host: notifications that go beside NIXL, several in one datagram, and rings. A
//! ring wakes a peer that sleeps between two looks: NIXL has no descriptor that becomes readable when something arrives.
//!
//! A datagram is in the peer's queue when the call returns that sends it, and stays there when its sender dies. A queue
//! that is full, or a peer that has ended, refuses it, and its notifications go by NIXL.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::agent::name::{agent_name, is_of_a_transport};

/// Longest datagram. What waits in peers' queues takes from the bytes that the kernel allows this transport for all
/// peers together, some 200 KiB.
const LONGEST: usize = 16 << 10;
/// Bytes of a notification's length, which comes before the notification.
const LENGTH: usize = 2;
/// A datagram without notifications.
const RING: &[u8] = &[0];
/// The datagrams, and their bytes, after which a look ends: the next look takes what is left. A queue has 10 or 512
/// places on most hosts.
const MOST: usize = 1024;
const MOST_BYTES: usize = 256 << 10;
/// The time for which a peer that was rung is awake at least.
const AGAIN: Duration = Duration::from_micros(100);
/// What comes before an agent's name in the address of its transport.
const PREFIX: &str = "kv-nixl-";

/// A transport's datagram socket. Its address in the abstract namespace is made of the token: the kernel tells receivers
/// who has sent a datagram, as long as the sender lives.
#[derive(Debug)]
pub(crate) struct Datagrams {
    socket: UnixDatagram,
    /// One byte longer than the longest datagram, so that a longer one is seen.
    buffer: Vec<u8>,
}

impl Datagrams {
    /// The socket of the transport with this token.
    pub(crate) fn new(token: u64) -> io::Result<Datagrams> {
        let socket = UnixDatagram::bind_addr(&address(token)?)?;
        socket.set_nonblocking(true)?;
        Ok(Datagrams { socket, buffer: vec![0; LONGEST + 1] })
    }

    /// Takes what has come of transports, and hands over the notifications with the names of the agents that have sent
    /// them. True if a transport has rung.
    pub(crate) fn take(&mut self, mut each: impl FnMut(&str, Bytes)) -> bool {
        let (mut rung, mut bytes) = (false, 0);
        for _ in 0..MOST {
            let Ok((len, from)) = self.socket.recv_from(&mut self.buffer) else { break };
            bytes += len;
            let datagram = self.buffer.get(..len).filter(|datagram| datagram.len() <= LONGEST);
            match datagram.zip(sender(&from)) {
                Some((RING, _)) => rung = true,
                Some((datagram, name)) => {
                    parts(datagram).for_each(|part| each(&name, Bytes::copy_from_slice(part)));
                }
                None => {}
            }
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

/// A peer's socket, when the peer was rung last, and the next datagram.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    address: SocketAddr,
    rung: Option<Instant>,
    /// Datagrams may have notifications.
    carries: bool,
    next: Vec<u8>,
}

impl PeerSocket {
    /// The socket of the transport with this token; if `carries`, for notifications too.
    pub(crate) fn new(token: u64, carries: bool) -> Option<PeerSocket> {
        Some(PeerSocket { address: address(token).ok()?, rung: None, carries, next: Vec::new() })
    }

    /// Whether a notification of this length may be part of a datagram.
    pub(crate) fn carries(&self, len: usize) -> bool {
        self.carries && LENGTH + len <= LONGEST
    }

    /// Whether the next datagram has room for a notification of this length.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.next.len() + LENGTH + len <= LONGEST
    }

    /// Adds a notification to the next datagram, which has room. True if it is the first one.
    pub(crate) fn put(&mut self, notification: &[u8]) -> bool {
        let is_first = self.next.is_empty();
        self.next.extend((notification.len() as u16).to_le_bytes());
        self.next.extend(notification);
        is_first
    }

    /// Sends the datagram. Returns its notifications if the peer cannot take it.
    pub(crate) fn send(&mut self, from: &Datagrams) -> Result<(), Vec<u8>> {
        match from.socket.send_to_addr(&self.next, &self.address) {
            Ok(_) => {
                self.next.clear();
                Ok(())
            }
            Err(_) => Err(mem::take(&mut self.next)),
        }
    }

    /// Rings, unless the peer was rung a moment ago. A ring that is lost costs time, nothing else.
    pub(crate) fn ring(&mut self, from: &Datagrams, now: Instant) {
        if self.rung.is_none_or(|last| now.saturating_duration_since(last) >= AGAIN) {
            self.rung = Some(now);
            // It fails if the peer has much to take already, or has ended.
            let _ = from.socket.send_to_addr(RING, &self.address);
        }
    }
}

/// The notifications of a datagram. What no length fits comes as it is.
pub(crate) fn parts(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let fitting = rest
            .split_first_chunk::<LENGTH>()
            .and_then(|(len, after)| after.split_at_checked(usize::from(u16::from_le_bytes(*len))));
        let (part, after) = fitting.unwrap_or((rest, &[]));
        let is_over = rest.is_empty();
        rest = after;
        (!is_over).then_some(part)
    })
}

fn address(token: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{PREFIX}{}", agent_name(token)))
}

/// The name of the agent of the transport whose socket has this address.
fn sender(address: &SocketAddr) -> Option<String> {
    let name = std::str::from_utf8(address.as_abstract_name()?).ok()?.strip_prefix(PREFIX)?;
    is_of_a_transport(name).then(|| name.to_owned())
}
