//! What ended a session: every cause, with the values that tell it from the others.

use std::time::Duration;

use super::arguments::PagesError;
use super::bootstrap::BootstrapError;
use super::peer::{Mismatch, PeerCause};
use crate::announce::{LayersError, ReadyEventError};
use crate::groups::GroupSpan;
use crate::id::{ChunkId, Incarnation, Room, WorkerId};
use crate::transport::TransportError;
use crate::wire::versions::Versions;

/// What ended a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The local scheduler called `abort`, or dropped the session.
    #[error("aborted here")]
    Aborted,
    /// The local worker is stopping.
    #[error("the local worker is stopping")]
    WorkerStopped,
    /// The deadline passed. `last` is the last obstacle seen, if any.
    #[error("not finished within {after:?}{}", last_obstacle(.last))]
    DeadlineExceeded {
        /// The deadline, from the opening of the session.
        after: Duration,
        /// What stood in the way when the deadline passed, if that is known.
        last: Option<Obstacle>,
    },
    /// The rendezvous failed in a way that no retry mends.
    #[error(transparent)]
    Bootstrap(BootstrapError),
    /// The peer's memory could not be reached.
    #[error("cannot connect to the peer: {0}")]
    Connect(TransportError),
    /// The peer has another geometry.
    #[error("the peer's cache does not fit: {0}")]
    Incompatible(Mismatch),
    /// The two workers have no version of the wire in common.
    #[error("versions {ours} of the wire are spoken here, and versions {theirs} by the peer")]
    Versions {
        /// What this worker speaks.
        ours: Versions,
        /// What the peer speaks.
        theirs: Versions,
    },
    /// The peer's process is dead, or has closed its transport.
    #[error("the peer's process has ended or has closed its transport")]
    PeerLost,
    /// This worker's way to the peer was lost. The peer may live.
    #[error("the connection to the peer was lost")]
    WayLost,
    /// The peer is there no more, and another incarnation has taken its place.
    #[error("the peer was restarted")]
    PeerRestarted,
    /// Nothing was heard from the peer.
    #[error("nothing heard from the peer for {silent_for:?}")]
    PeerUnresponsive {
        /// For how long.
        silent_for: Duration,
    },
    /// The peer ended the session, and said why.
    #[error("ended by the peer: {0}")]
    ByPeer(PeerCause),
    /// The two sides disagree about how many pages the request has.
    #[error("{sent} pages are to be sent, but the destination registered {registered}")]
    PageCount {
        /// Pages that the sender announced with `init`.
        sent: usize,
        /// Pages that the receiver registered.
        registered: usize,
    },
    /// More pages were sent than announced.
    #[error("{sent} pages sent, {announced} announced")]
    TooManyPages {
        /// Sent, with the refused chunk.
        sent: usize,
        /// Announced with `init`.
        announced: usize,
    },
    /// A second `init` with other values, or `send` on a session that has none.
    #[error("init was called twice, or not before the pages were sent")]
    InitOrder,
    /// The pages are not pages of this cache.
    #[error(transparent)]
    BadPages(#[from] PagesError),
    /// The layers announced as final are not those of the chunk.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// What an announcement waited for will never be: the pages may be half computed.
    #[error("the ready event before an announcement of chunk {chunk} failed: {error}")]
    ReadyEvent {
        /// The chunk that was to be announced.
        chunk: ChunkId,
        /// What the ready event said.
        error: ReadyEventError,
    },
    /// The aux row does not exist, here or at the peer.
    #[error("aux row {index} is out of range: there are {rows} rows")]
    BadAux {
        /// The row.
        index: u32,
        /// How many there are.
        rows: u32,
    },
    /// One side has an aux row for the request, the other has none.
    #[error("an aux row is given on one side only (sender {sender}, receiver {receiver})")]
    AuxOneSided {
        /// The sender gave a row.
        sender: bool,
        /// The receiver gave a row.
        receiver: bool,
    },
    /// The worker has no regions of this cache group.
    #[error("there are no regions of cache group {group}")]
    UnknownGroup {
        /// The group.
        group: u16,
    },
    /// The items are not items of this cache group.
    #[error("cache group {group}: {error}")]
    BadGroup {
        /// The group.
        group: u16,
        /// Which item, and how many there are.
        error: PagesError,
    },
    /// The two sides disagree about the items of a cache group: both must name it, unless it is
    /// [optional](crate::CacheGroup::optional), and the sender must have all that the receiver wants.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The group.
        group: u16,
        /// What the sender gave; `None` if it did not name the group.
        sent: Option<GroupSpan>,
        /// What the receiver gave; `None` if it did not name the group.
        wanted: Option<GroupSpan>,
    },
    /// The transport failed while moving bytes.
    #[error("the data operation failed: {0}")]
    Post(TransportError),
    /// The pages were pinned for a reader, and none came, or none showed a sign of life, until the
    /// lease had run out. On the reader's side: it came, or finished, too late.
    #[error("the lease on the sender's pages has expired")]
    LeaseExpired,
    /// The reference that the router carried names other pages than the sender holds.
    #[error("the lease names {} at position {position}, where the sender holds {}", page(.referenced), page(.held))]
    LeasePages {
        /// The first position in the request where they differ.
        position: usize,
        /// The page in the reference, if it goes that far.
        referenced: Option<u32>,
        /// The sender's page, if it has that many.
        held: Option<u32>,
    },
    /// The reference names a page that the sender's cache does not have.
    #[error("the lease is out of range: {0}")]
    LeaseOutOfRange(PagesError),
    /// The reference that the router carried is for an earlier life of the sender's worker.
    #[error("the lease is for incarnation {referenced}, but the sender's worker is {found}")]
    StaleLease {
        /// In the reference.
        referenced: Incarnation,
        /// Registered now.
        found: Incarnation,
    },
    /// Two requests have ids that are equal without the suffixes of their engines, and cannot be told
    /// apart at the other side.
    #[error("requests {room} and {other} have the same id without the engines' suffixes")]
    AmbiguousRoom {
        /// One of them.
        room: Room,
        /// The other.
        other: Room,
    },
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
}

/// What stood in the way of a session when its deadline passed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// The rendezvous had not come about.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The session's data operations waited behind those of another peer, which did not end.
    #[error("waiting behind {posts} data operations to {peer} that have not ended")]
    Behind {
        /// The other peer.
        peer: WorkerId,
        /// Its data operations in flight.
        posts: usize,
    },
    /// Data operations to the session's own peer did not end.
    #[error("{posts} data operations to {peer} have not ended")]
    Stuck {
        /// The peer.
        peer: WorkerId,
        /// Its data operations in flight.
        posts: usize,
    },
    /// The receiver's worker has not said that its memory may be written.
    #[error("{peer} has granted no permission to write that is still valid")]
    NotPermitted {
        /// The receiver's worker.
        peer: WorkerId,
    },
}

/// The sentence of [`Cause::GroupItems`] and of its half in a frame.
pub(super) fn group_items(group: &u16, sent: &Option<GroupSpan>, wanted: &Option<GroupSpan>) -> String {
    let text = |span: &Option<GroupSpan>| span.map_or_else(|| "none".to_owned(), |span| span.to_string());
    format!(
        "items of cache group {group}: the sender has {}, the receiver wants {}",
        text(sent),
        text(wanted)
    )
}

fn page(page: &Option<u32>) -> String {
    page.map_or_else(|| "no page".to_owned(), |page| format!("page {page}"))
}

fn last_obstacle(last: &Option<Obstacle>) -> String {
    last.as_ref().map(|error| format!(" ({error})")).unwrap_or_default()
}
