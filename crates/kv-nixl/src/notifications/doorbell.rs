//! Waking a peer on this host that sleeps between two looks: NIXL has no descriptor that becomes readable
//! when something arrives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// The time for which a peer that was rung is awake at least.
const AGAIN: Duration = Duration::from_micros(100);
/// Most rings that one look takes.
const TAKE: usize = 64;

/// A datagram socket in the abstract namespace. Peers send an empty datagram to the socket after they have
/// sent something through NIXL. A lost ring costs time, nothing else.
#[derive(Debug)]
pub(crate) struct Doorbell {
    socket: UnixDatagram,
}

impl Doorbell {
    /// The doorbell of the transport with this token.
    pub(crate) fn new(token: u64) -> io::Result<Doorbell> {
        let socket = UnixDatagram::bind_addr(&address(token)?)?;
        socket.set_nonblocking(true)?;
        Ok(Doorbell { socket })
    }

    /// Takes the rings that have come. True if there was at least one.
    pub(crate) fn answer(&self) -> bool {
        let mut byte = [0];
        let taken = (0..TAKE).take_while(|_| self.socket.recv(&mut byte).is_ok());
        taken.count() > 0
    }

    /// Sends a ring to a peer's doorbell.
    fn ring(&self, address: &SocketAddr) {
        // The peer is of another network namespace, or has many rings to answer already.
        let _ = self.socket.send_to_addr(&[0], address);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The address of a peer's doorbell, and when it was rung last.
#[derive(Debug)]
pub(crate) struct Button {
    address: SocketAddr,
    pressed: Option<Instant>,
}

impl Button {
    /// The button for the doorbell of the transport with this token.
    pub(crate) fn new(token: u64) -> Option<Button> {
        Some(Button { address: address(token).ok()?, pressed: None })
    }

    /// Rings, unless the button was pressed a moment ago.
    pub(crate) fn press(&mut self, doorbell: &Doorbell, now: Instant) {
        if self.pressed.is_none_or(|last| now.saturating_duration_since(last) >= AGAIN) {
            self.pressed = Some(now);
            doorbell.ring(&self.address);
        }
    }
}

fn address(token: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("kv-nixl-{token:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_heard_once_and_nobody_home_is_no_error() {
        let base = u64::from(std::process::id()) << 32;
        let (here, there) = (Doorbell::new(base + 1).unwrap(), Doorbell::new(base + 2).unwrap());
        assert!(!there.answer());
        let mut button = Button::new(base + 2).unwrap();
        let now = Instant::now();
        button.press(&here, now);
        button.press(&here, now);
        let mut byte = [0];
        assert_eq!(there.socket.recv(&mut byte).unwrap(), 1);
        assert!(there.socket.recv(&mut byte).is_err(), "rung twice at once");
        button.press(&here, now + AGAIN);
        assert!(there.answer());
        assert!(!there.answer());
        Button::new(base + 3).unwrap().press(&here, now);
    }
}
