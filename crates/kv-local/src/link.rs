//! One connection to a peer, and what stands behind it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use bytes::Bytes;
use kv_core::{PeerId, PostId, Time};
use rustix::event::epoll::EventFlags;

use crate::connection::Connection;
use crate::handshake::Process;
use crate::metadata::Metadata;
use crate::remote::PeerMemory;

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
    /// The peer's arenas, until they are mapped.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) process: Option<Process>,
    /// The peer's memory, while the link is open and claimed.
    pub(crate) memory: Option<PeerMemory>,
    /// Posts that wait for the link to open.
    pub(crate) waiting: Vec<PostId>,
    /// Posts whose bytes are in place and whose notify frame found no room yet.
    pub(crate) parked: VecDeque<PostId>,
    /// When it was made.
    pub(crate) opened: Time,
    /// When the last bytes came.
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
            fds: Vec::new(),
            process: None,
            memory: None,
            waiting: Vec::new(),
            parked: VecDeque::new(),
            opened: now,
            heard: now,
            interest: None,
        }
    }
}

/// A peer whose stream ended without a goodbye while its process lives on. That proves nothing: it
/// could still be copying. So nothing is said before the process has ended.
#[derive(Debug)]
pub(crate) struct Mourned {
    pub(crate) peer: PeerId,
    pub(crate) process: Process,
}
