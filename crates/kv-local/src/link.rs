//! One connection to a peer, and what stands behind it.

use std::collections::BTreeSet;

use bytes::Bytes;
use kv_core::{PeerId, PostId, Time};
use kv_host::{Parked, Process};
use rustix::event::epoll::EventFlags;

use crate::connection::Connection;
use crate::handshake::Lent;
use crate::metadata::{Metadata, Token};
use crate::remote::PeerMemory;
use crate::right::Right;

/// Number of a link; never reused, so that a late event of an old one cannot hit a new one.
pub(crate) type LinkId = u64;

/// How far a link has come.
///
/// | stage | next | when |
/// |---|---|---|
/// | `Dialing` | `Greeting` | the peer's backlog has room: connected, our hello is queued |
/// | `Greeting` | `Open` | outgoing: the peer's hello is right |
/// | `Greeting` | `Welcoming` | incoming: the peer's hello is right, ours is queued |
/// | `Welcoming` | `Open` | our hello is written |
/// | any | `Closing` | we forget the peer: no copy any more, our goodbye is queued |
///
/// A side uses the other's memory only in `Open`. The accepting side gets there only once its hello
/// is written whole; so a dialing side that reads the end of the stream before a whole hello knows
/// that its memory was never mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Dialing,
    Greeting,
    Welcoming,
    Open,
    Closing,
}

/// A connection in one of its stages.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) stage: Stage,
    /// The peer it serves; an accepted link has none until `connect` claims it.
    pub(crate) peer: Option<PeerId>,
    /// What the peer says of itself: as given to `connect`, or as it came in its hello.
    pub(crate) identity: Option<Identity>,
    /// The peer's descriptors, until they are mapped.
    pub(crate) lent: Option<Lent>,
    pub(crate) process: Option<Process>,
    /// The kernel confirms that the peer is the process that the identity names.
    pub(crate) proven: bool,
    /// The peer's memory and our right to write to it, while the link is open and claimed.
    pub(crate) memory: Option<(PeerMemory, Right)>,
    /// The peer's right to write to our memory, from our hello on.
    pub(crate) granted: Option<Right>,
    /// Slices that the peer had copied when it was last looked at.
    pub(crate) copied: u64,
    /// Until when the peer allows writes.
    pub(crate) permitted: Time,
    /// Writes that wait for a permission.
    pub(crate) held: BTreeSet<PostId>,
    /// Posts that wait for the link to open.
    pub(crate) waiting: Vec<PostId>,
    /// Posts whose bytes are in place and whose notify frame found no room yet.
    pub(crate) parked: Parked,
    /// When it was made.
    pub(crate) opened: Time,
    /// When the last bytes came, or slices were seen to have been copied.
    pub(crate) heard: Time,
    /// What epoll watches the socket for; `None` if it does not.
    pub(crate) interest: Option<EventFlags>,
}

/// A peer's metadata, raw and read.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) bytes: Bytes,
    pub(crate) metadata: Metadata,
}

impl Link {
    pub(crate) fn new(connection: Connection, stage: Stage, now: Time) -> Link {
        Link {
            connection,
            stage,
            peer: None,
            identity: None,
            lent: None,
            process: None,
            proven: false,
            memory: None,
            granted: None,
            copied: 0,
            permitted: Time::ZERO,
            held: BTreeSet::new(),
            waiting: Vec::new(),
            parked: Parked::default(),
            opened: now,
            heard: now,
            interest: None,
        }
    }
}

impl Link {
    /// The life of the transport at the other end, once it is known.
    pub(crate) fn token(&self) -> Option<Token> {
        Some(self.identity.as_ref()?.metadata.token)
    }

    /// Looks whether the peer has copied since the last look: it lives, although it says nothing.
    pub(crate) fn notice_copies(&mut self, now: Time) {
        let copied = self.granted.as_ref().map_or(0, Right::copied);
        if copied != self.copied {
            self.copied = copied;
            self.heard = now;
        }
    }
}

/// What is left of a link that has ended while the peer's process lives on. The peer's right to write
/// is revoked, but a slice that it had begun may still be under way.
#[derive(Debug)]
pub(crate) struct Lost {
    /// The peer that the link served, until `disconnect`.
    pub(crate) peer: Option<PeerId>,
    pub(crate) token: Option<Token>,
    pub(crate) process: Option<Process>,
    pub(crate) granted: Option<Right>,
}

impl Lost {
    /// Whether a slice may still be under way.
    pub(crate) fn is_marked(&self) -> bool {
        self.granted.as_ref().is_some_and(|right| !right.revoke())
    }
}
