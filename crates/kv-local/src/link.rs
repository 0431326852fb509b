//! A link: one connection to a peer, with its stage, the peer's memory, and both rights to write.

use std::collections::BTreeSet;

use bytes::Bytes;
use kv_core::{PeerId, PostId, Time};
use kv_host::{Parked, Process, Token};
use rustix::event::epoll::EventFlags;

use crate::connection::Connection;
use crate::handshake::Lent;
use crate::metadata::Metadata;
use crate::remote::PeerMemory;
use crate::right::Right;
use crate::space::AddressSpace;

/// Number of a link. Numbers are never reused, so that a late event of an old link cannot reach a new one.
pub(crate) type LinkId = u64;

/// How far a link has come.
///
/// | stage | next | when |
/// |---|---|---|
/// | `Dialing` | `Greeting` | the peer's backlog has room: the socket is connected, this side's hello is queued |
/// | `Greeting` | `Open` | dialed links: the peer's hello is accepted |
/// | `Greeting` | `Welcoming` | accepted links: the peer's hello is accepted, this side's hello is queued |
/// | `Welcoming` | `Open` | this side's hello is written |
/// | any | `Closing` | this side disconnects: it copies no more, and its goodbye is queued |
///
/// A side uses the other's memory only in `Open`. The accepting side gets there only once its hello is
/// written completely; so a dialing side that reads the end of the stream before a complete hello knows that
/// its memory was never mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Dialing,
    Greeting,
    Welcoming,
    Open,
    Closing,
}

/// A connection in one of its stages, with everything that belongs to it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) stage: Stage,
    /// The peer that the link serves; an accepted link serves none until `connect` claims it.
    pub(crate) peer: Option<PeerId>,
    /// The peer's metadata, as given to `connect` or as received in the hello.
    pub(crate) identity: Option<Identity>,
    /// The descriptors that the peer has sent, until they are mapped.
    pub(crate) lent: Option<Lent>,
    pub(crate) process: Option<Process>,
    /// Where the peer's adopted memory lies, if it has some.
    pub(crate) space: Option<AddressSpace>,
    /// True if the kernel confirms that the peer is the process that the identity names.
    pub(crate) proven: bool,
    /// The peer's memory and this side's right to write to it, while the link is open and serves a peer.
    pub(crate) memory: Option<(PeerMemory, Right)>,
    /// The peer's right to write to this side's memory, from this side's hello on.
    pub(crate) granted: Option<Right>,
    /// Slices that the peer had counted at the last look.
    pub(crate) copied: u64,
    /// Until when the peer permits writes.
    pub(crate) permitted: Time,
    /// True if a frame has come since this side has woken the peer, or since the peer has woken this side.
    pub(crate) may_wake: bool,
    pub(crate) may_be_woken: bool,
    /// Writes that wait for a permission.
    pub(crate) held: BTreeSet<PostId>,
    /// Posts that wait for the link to open.
    pub(crate) waiting: Vec<PostId>,
    /// Posts whose bytes are in place and for whose notify frames there has been no room yet.
    pub(crate) parked: Parked,
    /// When the link was made.
    pub(crate) opened: Time,
    /// When the last bytes came, or the peer's count of slices was last seen to have changed.
    pub(crate) heard: Time,
    /// The events for which epoll watches the socket; `None` if epoll does not watch it.
    pub(crate) interest: Option<EventFlags>,
}

/// A peer's metadata, encoded and decoded.
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
            space: None,
            proven: false,
            memory: None,
            granted: None,
            copied: 0,
            permitted: Time::ZERO,
            may_wake: true,
            may_be_woken: true,
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
    /// The token of the transport at the other end, once it is known.
    pub(crate) fn token(&self) -> Option<Token> {
        Some(self.identity.as_ref()?.metadata.token)
    }

    /// Checks whether the peer has copied since the last look, which shows that it lives although it sends
    /// nothing.
    pub(crate) fn notice_copies(&mut self, now: Time) {
        let copied = self.granted.as_ref().map_or(0, Right::copied);
        if copied != self.copied {
            self.copied = copied;
            self.heard = now;
        }
    }
}

/// The rest of a link that has ended while the peer's process lives on. The peer's right to write is revoked,
/// but a slice that the peer had begun may still be under way.
#[derive(Debug)]
pub(crate) struct Lost {
    /// The peer that the link served, until `disconnect`.
    pub(crate) peer: Option<PeerId>,
    pub(crate) token: Option<Token>,
    pub(crate) process: Option<Process>,
    pub(crate) granted: Option<Right>,
}

impl Lost {
    /// True if a slice of the peer may still be under way.
    pub(crate) fn is_marked(&self) -> bool {
        self.granted.as_ref().is_some_and(|right| !right.revoke())
    }
}
