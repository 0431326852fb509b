//! One socket with what comes and goes on it, and whose it is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_core::Time;
use kv_host::{Memory, OsError, TransferId};
use rustix::event::epoll::EventFlags;

use crate::inbound::{Inbound, ReceiveError, Received};
use crate::outbound::Outbound;
use crate::tls::Session;

/// Most bytes that a plain connection reads, and writes, when it is its turn.
const SHARE: usize = 512 << 10;

/// Number of a connection; never used again.
pub(crate) type ConnectionId = u64;

/// Whose a connection is.
///
/// | from | to | when |
/// |---|---|---|
/// | `Stranger` | `Guest` | the hello names this transport, and is accepted |
/// | `Dialed` | `Greeted` | the kernel has connected the socket: the hello is sent |
/// | `Greeted` | `Lane` | the welcome names the peer that was asked for |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Accepted, and the hello has not come.
    Stranger,
    /// Accepted: the connection of a guest.
    Guest(u64),
    /// Being dialed, for the lane with a number of a way.
    Dialed(u64, usize),
    /// Dialed: the welcome has not come.
    Greeted(u64, usize),
    /// Dialed, and open: the lane with a number of a way.
    Lane(u64, usize),
}

/// A write whose pages come on this connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writing {
    pub(crate) number: u32,
    /// Until when the pages may land.
    pub(crate) until: Time,
    /// Length of the frame that follows the pages; 0 for none.
    pub(crate) notify: usize,
    pub(crate) verdict: crate::message::Verdict,
}

/// A socket that does not block, and its state.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    pub(crate) owner: Owner,
    pub(crate) inbound: Inbound,
    pub(crate) outbound: Outbound,
    /// The write that is landing here, on a guest's connection.
    pub(crate) writing: Option<Writing>,
    /// The read that is landing here, on a lane.
    pub(crate) reading: Option<TransferId>,
    /// The encryption, if the connection is encrypted.
    session: Option<Box<Session>>,
    /// True while the connection is in the transport's list of those with unread bytes.
    pub(crate) listed: bool,
    /// What the socket is watched for; `None` if it is not watched.
    pub(crate) watched: Option<EventFlags>,
    /// When the connection was made.
    pub(crate) since: Time,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, owner: Owner, since: Time) -> Connection {
        Connection {
            socket,
            owner,
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            writing: None,
            reading: None,
            session: None,
            listed: false,
            watched: None,
            since,
        }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The same, encrypted.
    pub(crate) fn encrypted(self, session: Option<Session>) -> Connection {
        Connection { session: session.map(Box::new), ..self }
    }

    /// Reads once: pages into their places, about `most` bytes, and messages by way of `scratch`, no more bytes of
    /// them than fit there.
    pub(crate) fn receive(
        &mut self,
        regions: &[Memory],
        scratch: &mut [u8],
        most: usize,
    ) -> Result<Received, ReceiveError> {
        let (socket, inbound) = (self.socket.as_fd(), &mut self.inbound);
        match &mut self.session {
            None => inbound.receive(socket, regions, scratch, most),
            Some(session) => session.receive(socket, inbound, regions, scratch.len()),
        }
    }

    /// Writes as many bytes as the socket takes, about `most` at most. Returns how many, and whether the socket
    /// may take more.
    pub(crate) fn flush(
        &mut self,
        regions: &[Memory],
        now: Time,
        most: usize,
        scratch: &mut [u8],
    ) -> Result<(usize, bool), OsError> {
        let (socket, outbound) = (self.socket.as_fd(), &mut self.outbound);
        match &mut self.session {
            None => outbound.flush(socket, regions, now, most),
            Some(session) => session.flush(socket, outbound, regions, (now, most), scratch),
        }
    }

    /// True if nothing waits to be written.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbound.is_empty() && self.session.as_ref().is_none_or(|session| !session.has_unwritten())
    }

    /// True if bytes have come that the socket does not report any more.
    pub(crate) fn has_unread(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_unread())
    }

    /// False for an encrypted connection whose other side has shown no certificate.
    pub(crate) fn is_trusted(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.has_shown_a_certificate())
    }

    /// Most bytes that are read, and written, at one turn of the connection: as many as take about a tenth of a
    /// millisecond.
    pub(crate) fn share(&self) -> usize {
        if self.session.is_some() { SHARE / 4 } else { SHARE }
    }

    /// Frees buffers that are empty.
    pub(crate) fn tidy(&mut self) {
        self.inbound.tidy();
        if let Some(session) = &mut self.session {
            session.tidy();
        }
    }

    /// Tells the other side, if the connection is encrypted, that the end of the stream is meant.
    pub(crate) fn say_goodbye(&mut self) {
        if let Some(session) = &mut self.session {
            session.say_goodbye(self.socket.as_fd());
        }
    }
}
