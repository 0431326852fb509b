//! One socket with what comes and goes on it, and whose it is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_core::Time;
use rustix::event::epoll::EventFlags;

use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::posts::TransferId;

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
            watched: None,
            since,
        }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket, and what is to be written to it.
    pub(crate) fn parts(&mut self) -> (BorrowedFd<'_>, &mut Outbound) {
        (self.socket.as_fd(), &mut self.outbound)
    }

    /// The socket, and what comes from it.
    pub(crate) fn reading_parts(&mut self) -> (BorrowedFd<'_>, &mut Inbound) {
        (self.socket.as_fd(), &mut self.inbound)
    }
}
