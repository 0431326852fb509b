//! Datagrams between transports of one host. A datagram has one or more notifications, which go beside NIXL, or is a ring,
//! or is empty. Each wakes a peer that sleeps between two looks; NIXL has no descriptor that becomes readable when something
//! arrives. A ring says that something has come by NIXL. An empty datagram says nothing: what follows is to find the peer
//! awake.
//!
//! Once a datagram is sent, the datagram is in the peer's queue, and stays there when its sender dies. The kernel refuses a
//! datagram if the queue is full, if too many bytes of this transport wait there, or if the peer has ended.
//! The notifications of the datagram then go by NIXL.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_host::random;

use crate::agent::name::{agent_name, is_of_a_transport};

/// Longest datagram. The kernel allows a socket some 200 KiB that wait in its peer's queue.
pub(crate) const LONGEST: usize = 16 << 10;
/// Bytes of a notification's length, which comes before the notification.
const LENGTH: usize = 2;
/// The datagram that says that something has come by NIXL.
pub(crate) const RING: &[u8] = &[0];
/// The datagrams, and their bytes, after which a look ends: the next look takes what is left. A queue has 10 or 512
/// places on most hosts.
const MOST: usize = 1024;
const MOST_BYTES: usize = 256 << 10;
/// What a notification counts beside its bytes.
const EACH: usize = 64;
/// A look that takes so many datagrams has perhaps emptied a queue that was full, or one whose sender might put no more
/// into it: then further notifications went by NIXL, and the rings behind them were lost.
const MANY: usize = 8;
/// The time for which a peer that was rung is awake at least.
const AGAIN: Duration = Duration::from_micros(100);
/// What comes before an agent's name in the addresses of its transport, and behind the name in those that send.
const PREFIX: &str = "kv-nixl-";
const MARK: char = '/';

/// The socket by which a transport receives. Its address in the abstract namespace is made of the token, as are those of
/// the sockets by which the transport sends, one for each peer: so a peer that does not look takes nothing from others.
/// The kernel tells receivers by which address a datagram was sent. Any process of the network namespace can send, and can
/// take an address that nobody has: one that floods the socket takes a bounded time of each look, and makes the frames of
/// others go by NIXL.
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
    /// them; `None` for an empty datagram, by which another one is announced. True if something may have come by NIXL: a
    /// transport has rung, or could not for all that had come.
    pub(crate) fn take(&mut self, mut each: impl FnMut(&str, Option<Bytes>)) -> bool {
        let (mut rung, mut bytes) = (false, 0);
        for number in 1..=MOST {
            let Ok((len, from)) = self.socket.recv_from(&mut self.buffer) else { break };
            bytes += len;
            rung |= number >= MANY;
            let datagram = self.buffer.get(..len).filter(|datagram| datagram.len() <= LONGEST);
            match datagram.zip(sender(&from)) {
                Some((RING, _)) => rung = true,
                Some(([], name)) => each(&name, None),
                Some((datagram, name)) => {
                    for part in parts(datagram) {
                        bytes += EACH;
                        each(&name, Some(Bytes::copy_from_slice(part)));
                    }
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

/// The socket by which a transport sends to one peer, when the peer was rung last, and the next datagram.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    socket: UnixDatagram,
    rung: Option<Instant>,
    /// Datagrams may have notifications.
    carries: bool,
    next: Vec<u8>,
}

impl PeerSocket {
    /// A socket of the transport with the first token to that with the second; if `carries`, for notifications too.
    pub(crate) fn new(here: u64, there: u64, carries: bool) -> io::Result<PeerSocket> {
        let number = u64::from_le_bytes(random().map_err(|error| io::Error::other(error.to_string()))?);
        let name = format!("{PREFIX}{}{MARK}{number:x}", agent_name(here));
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        socket.set_nonblocking(true)?;
        socket.connect_addr(&address(there)?)?;
        Ok(PeerSocket { socket, rung: None, carries, next: Vec::new() })
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
        add(&mut self.next, notification);
        is_first
    }

    /// Sends the datagram. Returns its notifications if the peer cannot take it.
    pub(crate) fn send(&mut self) -> Result<(), Vec<u8>> {
        match self.socket.send(&self.next) {
            Ok(_) => {
                self.next.clear();
                Ok(())
            }
            Err(_) => Err(mem::take(&mut self.next)),
        }
    }

    /// Wakes the peer, to which the next datagram will go soon.
    pub(crate) fn wake(&self) {
        // The send fails if the peer's queue is full; such a peer is awake.
        let _ = self.socket.send(&[]);
    }

    /// Rings, unless the peer was rung a moment ago.
    pub(crate) fn ring(&mut self, now: Instant) {
        if self.rung.is_none_or(|last| now.saturating_duration_since(last) >= AGAIN) {
            self.rung = Some(now);
            // It fails if the peer has ended, or has much to take already: then the peer looks at NIXL, too.
            let _ = self.socket.send(RING);
        }
    }
}

/// Adds a notification to the content of a datagram, which has room.
pub(crate) fn add(datagram: &mut Vec<u8>, notification: &[u8]) {
    datagram.extend((notification.len() as u16).to_le_bytes());
    datagram.extend(notification);
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

/// The name of the agent of the transport that sends by a socket with this address.
fn sender(address: &SocketAddr) -> Option<String> {
    let name = std::str::from_utf8(address.as_abstract_name()?).ok()?.strip_prefix(PREFIX)?;
    let (name, _number) = name.split_once(MARK)?;
    is_of_a_transport(name).then(|| name.to_owned())
}

#[cfg(test)]
impl Datagrams {
    /// The lengths of the datagrams that have come.
    pub(crate) fn lengths(&mut self) -> Vec<usize> {
        let next = || self.socket.recv(&mut self.buffer).ok();
        std::iter::from_fn(next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(number: u64) -> u64 {
        u64::from(std::process::id()) << 32 | number
    }

    fn taken(datagrams: &mut Datagrams) -> (Vec<(String, Bytes)>, bool) {
        let mut all = Vec::new();
        let rung = datagrams.take(|name, bytes| all.push((name.to_owned(), bytes.unwrap())));
        (all, rung)
    }

    #[test]
    fn an_empty_datagram_is_told_and_is_no_notification() {
        let mut there = Datagrams::new(token(12)).unwrap();
        let mut peer = PeerSocket::new(token(11), token(12), true).unwrap();
        peer.wake();
        peer.put(b"frame");
        peer.send().unwrap();
        let mut all = Vec::new();
        assert!(!there.take(|name, part| all.push((name.to_owned(), part))));
        let name = agent_name(token(11));
        assert_eq!(all, [(name.clone(), None), (name, Some(Bytes::from_static(b"frame")))]);
    }

    #[test]
    fn notifications_of_one_datagram_come_in_order_with_the_name_of_their_sender() {
        let mut there = Datagrams::new(token(2)).unwrap();
        let mut peer = PeerSocket::new(token(1), token(2), true).unwrap();
        let sent: Vec<Bytes> = [0, 1, 300, 5000].map(|len| vec![len as u8; len].into()).into();
        let firsts: Vec<bool> = sent.iter().map(|bytes| peer.put(bytes)).collect();
        assert_eq!(firsts, [true, false, false, false]);
        assert_eq!(peer.send(), Ok(()));
        let expected = sent.into_iter().map(|bytes| (agent_name(token(1)), bytes)).collect();
        assert_eq!(taken(&mut there), (expected, false));
        assert!(peer.put(b"another"), "what was sent is not sent again");
        // The longest one fills a datagram.
        let most = LONGEST - LENGTH;
        assert!(peer.carries(most) && !peer.carries(most + 1) && !peer.has_room(most));
        peer.send().unwrap();
        assert!(peer.has_room(most));
        peer.put(&vec![9; most]);
        peer.send().unwrap();
        let lens: Vec<usize> = taken(&mut there).0.iter().map(|(_, bytes)| bytes.len()).collect();
        assert_eq!(lens, [7, most]);
        assert!(!PeerSocket::new(token(1), token(2), false).unwrap().carries(0));
    }

    #[test]
    fn a_full_queue_and_an_ended_peer_give_the_notifications_back() {
        let mut there = Datagrams::new(token(4)).unwrap();
        let mut peer = PeerSocket::new(token(3), token(4), true).unwrap();
        let mut sent = 0_u32;
        let back = loop {
            peer.put(&sent.to_le_bytes());
            peer.put(b"beside");
            match peer.send() {
                Ok(()) => sent += 1,
                Err(back) => break back,
            }
            assert!(sent < 1 << 20, "a queue without an end");
        };
        assert_eq!(parts(&back).collect::<Vec<_>>(), [&sent.to_le_bytes()[..], b"beside"]);
        let mut numbers = Vec::new();
        let mut rung = false;
        while let (some, may_more) = taken(&mut there)
            && !some.is_empty()
        {
            rung |= may_more;
            numbers.extend(some.into_iter().map(|(_, bytes)| bytes).filter(|bytes| *bytes != "beside"));
        }
        let expected: Vec<Bytes> = (0..sent).map(|number| number.to_le_bytes().to_vec().into()).collect();
        assert_eq!(numbers, expected, "each once, and none of those that came back");
        assert!(rung, "those that came back may have come by NIXL, and no ring had room");
        drop(there);
        peer.put(b"too late");
        assert_eq!(peer.send().map_err(|back| back.len()), Err(LENGTH + 8));
    }

    #[test]
    fn what_strangers_send_is_no_notification_and_no_ring_and_delays_nobody_for_good() {
        let mut there = Datagrams::new(token(6)).unwrap();
        let to = address(token(6)).unwrap();
        let other = format!("kv-nixl-{:016x}", token(7));
        let named =
            |name: &str| UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let (unnamed, named) = (UnixDatagram::unbound().unwrap(), named(&other));
        let mut peer = PeerSocket::new(token(5), token(6), true).unwrap();
        for stranger in [&unnamed, &named] {
            for bytes in [&[][..], RING, &[3, 0, 1, 2, 3], &[7; 1000]] {
                stranger.send_to_addr(bytes, &to).unwrap();
            }
            assert_eq!(taken(&mut there), (Vec::new(), false));
        }
        peer.socket.send(&vec![0; LONGEST + 1]).unwrap();
        assert_eq!(taken(&mut there), (Vec::new(), false), "longer than any datagram of a transport");

        unnamed.set_nonblocking(true).unwrap();
        for round in 0..20 {
            while unnamed.send_to_addr(&[7; 1000], &to).is_ok() {}
            peer.put(b"a frame");
            let back = peer.send().unwrap_err();
            assert_eq!(parts(&back).collect::<Vec<_>>(), [b"a frame"]);
            assert_eq!(taken(&mut there).0, [], "round {round}");
            peer.put(b"another");
            peer.send().unwrap();
            assert_eq!(taken(&mut there).0.len(), 1, "round {round}");
        }
    }

    #[test]
    fn a_ring_is_heard_once_and_nobody_home_is_no_error() {
        let mut there = Datagrams::new(token(9)).unwrap();
        assert!(!taken(&mut there).1);
        let mut peer = PeerSocket::new(token(8), token(9), false).unwrap();
        let now = Instant::now();
        peer.ring(now);
        peer.ring(now);
        let mut two = [0; 2];
        assert_eq!(there.socket.recv(&mut two).unwrap(), 1);
        assert!(there.socket.recv(&mut two).is_err(), "rung twice at once");
        peer.ring(now + AGAIN);
        assert_eq!(taken(&mut there), (Vec::new(), true));
        assert_eq!(taken(&mut there), (Vec::new(), false));
        assert!(PeerSocket::new(token(8), token(10), false).is_err());
    }

    #[test]
    fn a_peer_that_never_looks_takes_no_room_from_others() {
        let (_stopped, mut there) = (Datagrams::new(token(14)).unwrap(), Datagrams::new(token(15)).unwrap());
        let peer = |number| PeerSocket::new(token(13), token(number), true).unwrap();
        let (mut stuck, mut healthy) = (peer(14), peer(15));
        let long = vec![7; LONGEST - LENGTH];
        while stuck.put(&long) && stuck.send().is_ok() {}
        for round in 0..3 {
            healthy.put(&long);
            assert_eq!(healthy.send(), Ok(()), "round {round}");
            assert_eq!(taken(&mut there).0.len(), 1);
        }
    }

    #[test]
    fn garbage_is_cut_into_parts_that_are_all_of_it() {
        let _there = Datagrams::new(token(12)).unwrap();
        let mut peer = PeerSocket::new(token(11), token(12), true).unwrap();
        for len in [0, 1, 255, 256, 70] {
            peer.put(&vec![len as u8; len]);
        }
        let good = peer.next;
        for len in 0..good.len() {
            let cut = &good[..len];
            let all: Vec<&[u8]> = parts(cut).collect();
            let bytes: usize = all.iter().map(|part| part.len()).sum();
            let whole = bytes + LENGTH * all.len() == len;
            let broken = bytes + LENGTH * all.len().saturating_sub(1) == len;
            assert!(whole || broken, "{len}: {all:?}");
        }
    }
}
