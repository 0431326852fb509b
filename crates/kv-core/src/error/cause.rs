//! The causes that end a session, each with the values by which an operator can tell it from the
//! others.

use std::time::Duration;

use super::bootstrap::BootstrapError;
use super::pages::PagesError;
use super::peer::{Mismatch, PeerCause};
use crate::announce::{LayersError, ReadyEventError};
use crate::groups::CacheGroupSpan;
use crate::id::{ChunkId, Incarnation, Room, WorkerId};
use crate::transport::TransportError;
use crate::wire::versions::Versions;

/// What ended a session. [`advice`](Cause::advice) says what can be done about the cause, and
/// [`recovery`](Cause::recovery) what a server should do with the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The local scheduler called `abort`, or dropped the session's handle.
    #[error("aborted by the local scheduler")]
    Aborted,
    /// The local worker is stopping.
    #[error("the local worker is stopping")]
    WorkerStopped,
    /// The local worker drains, and the session was opened after it had begun to drain.
    #[error("the local worker drains, and takes no new requests")]
    Draining,
    /// The session did not finish before its deadline.
    #[error("not finished within {after:?}{}", last_obstacle(.last))]
    DeadlineExceeded {
        /// The deadline, from the opening of the session.
        after: Duration,
        /// What the session waited for when the deadline passed, if that is known.
        last: Option<Obstacle>,
    },
    /// The lookup at the bootstrap server failed in a way that asking again does not mend.
    #[error(transparent)]
    Bootstrap(BootstrapError),
    /// The transport could not connect to the peer.
    #[error("cannot connect to the peer: {0}")]
    Connect(TransportError),
    /// This worker's table of peers is full, and something depends on each of them.
    #[error("{max} peers are known here, and something depends on each of them")]
    TooManyPeers {
        /// The most peers that this worker knows at once, [`Limits::max_peers`](crate::proto::Limits::max_peers).
        max: usize,
    },
    /// The peer's cache has another geometry, and the two cannot exchange pages.
    #[error("the peer's cache does not fit: {0}")]
    Incompatible(Mismatch),
    /// The two workers have no version of the wire protocol in common.
    #[error("this worker speaks versions {ours} of the wire protocol, and the peer versions {theirs}")]
    Versions {
        /// The versions that this worker speaks.
        ours: Versions,
        /// The versions that the peer speaks.
        theirs: Versions,
    },
    /// The peer's process is dead, or has closed its transport.
    #[error("the peer's process has ended or has closed its transport")]
    PeerLost,
    /// This worker's connection to the peer was lost. The peer's process may still run.
    #[error("the connection to the peer was lost")]
    WayLost,
    /// The peer has forgotten its sessions with this worker, or another incarnation answers in the peer's place.
    #[error("the peer was restarted")]
    PeerRestarted,
    /// No frame came from the peer for so long that the session was given up.
    #[error("nothing heard from the peer for {silent_for:?}")]
    PeerUnresponsive {
        /// How long no frame had come from the peer.
        silent_for: Duration,
    },
    /// The peer ended its half of the session, and told the cause.
    #[error("ended by the peer: {0}")]
    ByPeer(PeerCause),
    /// The two sides disagree about how many pages the request has.
    #[error("{sent} pages are to be sent, but the receiver registered {registered}")]
    PageCount {
        /// How many pages the sender announced with `init`.
        sent: usize,
        /// How many pages the receiver registered.
        registered: usize,
    },
    /// The server gave more pages than it had announced with `init`.
    #[error("{sent} pages sent, {announced} announced")]
    TooManyPages {
        /// How many pages were given in all chunks, the refused chunk included.
        sent: usize,
        /// How many pages `init` announced.
        announced: usize,
    },
    /// The server called `init` or `give_groups` a second time, gave pages before `init`, or called
    /// `give_groups` too late: on a sender after the last chunk, on a receiver after `init`.
    #[error("init was called again, pages came before init, or cache groups were given twice or too late")]
    InitOrder,
    /// The list of pages names pages that this cache does not have, or names a page twice.
    #[error(transparent)]
    BadPages(#[from] PagesError),
    /// The layers announced as final are not layers of the chunk, or were announced before.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// The ready event of an announcement failed: the pages may be half computed.
    #[error("the ready event for layers of chunk {chunk} failed: {error}")]
    ReadyEvent {
        /// The chunk in the announcement.
        chunk: ChunkId,
        /// The error of the ready event.
        error: ReadyEventError,
    },
    /// The aux row does not exist, here or at the peer.
    #[error("aux row {index} is out of range: there are {rows} rows")]
    BadAux {
        /// The number of the aux row.
        index: u32,
        /// How many aux rows there are; the last one is `rows - 1`.
        rows: u32,
    },
    /// One side gave an aux row for the request, and the other side gave none.
    #[error("an aux row is given on one side only (sender {sender}, receiver {receiver})")]
    AuxOneSided {
        /// True if the sender gave an aux row.
        sender: bool,
        /// True if the receiver gave an aux row.
        receiver: bool,
    },
    /// The worker has no regions of this cache group.
    #[error("this worker has no regions of cache group {group}")]
    UnknownGroup {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
    },
    /// The items given for a cache group are not items of its regions.
    #[error("cache group {group}: {error}")]
    BadGroup {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
        /// The item that is wrong, and how many items there are.
        error: PagesError,
    },
    /// The two sides disagree about the items of a cache group. Both sides must name the group,
    /// unless it is [optional](crate::CacheGroup::optional), and the sender must have all items
    /// that the receiver wants.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
        /// The items that the sender gave; `None` if the sender did not name the group.
        sent: Option<CacheGroupSpan>,
        /// The items that the receiver gave; `None` if the receiver did not name the group.
        wanted: Option<CacheGroupSpan>,
    },
    /// The transport failed while moving bytes.
    #[error("the data operation failed: {0}")]
    Post(TransportError),
    /// The lease ran out before the pages were read. On the sender: no reader came, or no reader
    /// sent a heartbeat in time. On the reader: the acquire message or the end of the read came too
    /// late.
    #[error("the lease on the sender's pages has expired")]
    LeaseExpired,
    /// The [`LeaseRef`](crate::LeaseRef) that the router carried names other pages than the sender
    /// holds.
    #[error("the lease names {} at position {position}, where the sender holds {}", page(.referenced), page(.held))]
    LeasePages {
        /// The first position in the request at which the two lists differ, from 0.
        position: usize,
        /// The page in the reference; `None` if the reference names fewer pages.
        referenced: Option<u32>,
        /// The page that the sender holds; `None` if the sender holds fewer pages.
        held: Option<u32>,
    },
    /// The [`LeaseRef`](crate::LeaseRef) names a page that the sender's cache does not have.
    #[error("the lease names a page that does not exist: {0}")]
    LeaseOutOfRange(PagesError),
    /// The [`LeaseRef`](crate::LeaseRef) that the router carried is for an earlier incarnation of
    /// the sender's worker.
    #[error("the lease is for incarnation {referenced}, but the sender's worker is {found}")]
    StaleLease {
        /// The incarnation in the reference.
        referenced: Incarnation,
        /// The incarnation that is registered now.
        found: Incarnation,
    },
    /// Two open requests have ids that are equal without the suffixes of their engines, so that the
    /// other side cannot tell them apart.
    #[error("requests {room} and {other} have the same id without the engines' suffixes")]
    AmbiguousRoom {
        /// The room of one request.
        room: Room,
        /// The room of the other request.
        other: Room,
    },
    /// The peer sent a frame that the protocol does not allow.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
}

/// What a session waited for when its deadline passed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// The lookup at the bootstrap server had not succeeded.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The session's data operations waited behind those of another peer, which had not ended.
    #[error("waiting behind {posts} data operations to {peer} that have not ended")]
    Behind {
        /// The peer whose data operations had not ended.
        peer: WorkerId,
        /// How many data operations to that peer were in flight.
        posts: usize,
    },
    /// Data operations to the session's own peer had not ended.
    #[error("{posts} data operations to {peer} have not ended")]
    Stuck {
        /// The peer of the session.
        peer: WorkerId,
        /// How many data operations to that peer were in flight.
        posts: usize,
    },
    /// The receiver's worker had given no permission to write into its memory, or the permission
    /// had ended.
    #[error("{peer} has granted no permission to write that is still valid")]
    NotPermitted {
        /// The worker of the receiver.
        peer: WorkerId,
    },
}

/// The text of [`Cause::GroupItems`], and of the same cause in a frame.
pub(super) fn group_items(
    group: &u16,
    sent: &Option<CacheGroupSpan>,
    wanted: &Option<CacheGroupSpan>,
) -> String {
    let text =
        |span: &Option<CacheGroupSpan>| span.map_or_else(|| "none".to_owned(), |span| span.to_string());
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
