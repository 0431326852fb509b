//! Errors: one enum per concern, and what the caller can do about each.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::announce::{FenceError, LayersError};
use crate::groups::GroupSpan;
use crate::id::{ChunkId, Incarnation, Room, WorkerId};
use crate::lease::TransferMode;
use crate::plane::PlaneError;

/// A bad id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// Empty or too long.
    #[error("{field} has {got} bytes; allowed are 1 to {max}")]
    Length {
        /// Which id.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A control character would break logs and headers.
    #[error("{field} contains a control character")]
    ControlCharacter {
        /// Which id.
        field: &'static str,
    },
}

/// A bad list of pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A run ends beyond the largest page number.
    #[error("a run of {len} pages from page {start} exceeds the largest page number")]
    Overflow {
        /// First page of the run.
        start: u32,
        /// Its length.
        len: u32,
    },
    /// More pages than a list may name.
    #[error("{got} pages in one list; at most {max} are allowed")]
    TooMany {
        /// How many were named.
        got: u64,
        /// The bound.
        max: u32,
    },
    /// A page that the cache does not have.
    #[error("page {page} is out of range: the cache has {num_pages} pages")]
    OutOfRange {
        /// The page.
        page: u32,
        /// How many pages there are.
        num_pages: u32,
    },
    /// A page named twice, where each may occur once.
    #[error("page {page} is named twice")]
    Twice {
        /// The page.
        page: u32,
    },
}

/// A [`KvArgs`](crate::KvArgs) that cannot be: found once, when it is built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// A number outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        got: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// Parallel lists of different length (`kv_data_ptrs`, `kv_data_lens`, `kv_item_lens`).
    #[error("{left_field} has {left} entries, {right_field} has {right}")]
    ListLengths {
        /// One list.
        left_field: &'static str,
        /// Its length.
        left: usize,
        /// The other list.
        right_field: &'static str,
        /// Its length.
        right: usize,
    },
    /// A region whose bytes are not `items × item_len`.
    #[error("region {region} ({role}): len {len} is not {items} items of item_len {item_len}")]
    RegionLength {
        /// Position in the list of regions.
        region: usize,
        /// `kv`, `aux` or `state`.
        role: &'static str,
        /// Its length in bytes.
        len: u64,
        /// Bytes per item.
        item_len: u64,
        /// Items it must hold.
        items: u64,
    },
    /// A region that wraps around the address space, or starts at null.
    #[error("region {region}: address {addr:#x} with length {len} is no memory")]
    RegionAddress {
        /// Position in the list of regions.
        region: usize,
        /// Its address.
        addr: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap")]
    RegionOverlap {
        /// One region.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A rank outside its group.
    #[error("{field} is {rank}, but the group has {size} ranks")]
    RankOutOfGroup {
        /// The field.
        field: &'static str,
        /// The rank.
        rank: u32,
        /// The size of the group.
        size: u32,
    },
    /// A bad id.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A field that has no default was not set.
    #[error("{field} was not set")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// The layout cannot be that of a cache.
    #[error(transparent)]
    Layout(#[from] crate::layout::GeometryError),
}

/// Two workers that cannot exchange pages: the first field in which they differ, and both values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{field} differs: {ours} here, {theirs} at the peer{}", crate::layout::remedy(.field))]
pub struct Mismatch {
    /// The field of the geometry.
    pub field: String,
    /// The value on the side that reports the error.
    pub ours: String,
    /// The value on the other side.
    pub theirs: String,
}

/// Why a rendezvous failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The server could not be reached. Check the address, and that the server runs.
    #[error("cannot reach the bootstrap server: {0}")]
    Unreachable(std::io::ErrorKind),
    /// The address is not `host:port`.
    #[error("bootstrap address {0:?} is not host:port")]
    Address(String),
    /// Not all ranks of the engine have registered yet. Wait and ask again.
    #[error("the engine is not ready: {registered} of {expected} ranks have registered")]
    NotReady {
        /// Ranks that have registered.
        registered: u32,
        /// Ranks the engine has.
        expected: u32,
    },
    /// No such rank is registered (any more).
    #[error("no such rank is registered")]
    UnknownRank,
    /// The server answered with something that is not ours.
    #[error("the bootstrap server answered with status {0}")]
    Status(u16),
    /// The server refused a registration: another rank claims its place, or another topology.
    #[error("the bootstrap server refused the registration with status {status}: {reason}")]
    Refused {
        /// Its status.
        status: u16,
        /// Its own words, cut to a line.
        reason: String,
    },
    /// The answer was not valid.
    #[error("the bootstrap server's answer is not valid: {0}")]
    Malformed(&'static str),
    /// No answer in time.
    #[error("the bootstrap server did not answer in time")]
    TimedOut,
}

impl BootstrapError {
    /// True if the same question may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, BootstrapError::Address(_))
    }
}

/// Where in its life a session was when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Looking up the peer at the bootstrap server.
    Bootstrap,
    /// Exchanging geometry and memory with the peer.
    Handshake,
    /// Waiting for the other side's half: a registration, or pages.
    Rendezvous,
    /// Moving bytes.
    Transfer,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Bootstrap => "bootstrap",
            Phase::Handshake => "handshake",
            Phase::Rendezvous => "rendezvous",
            Phase::Transfer => "transfer",
        })
    }
}

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
        /// Why the rendezvous had not come about, if that was the obstacle.
        last: Option<BootstrapError>,
    },
    /// The rendezvous failed in a way that no retry mends.
    #[error(transparent)]
    Bootstrap(BootstrapError),
    /// The peer's memory could not be reached.
    #[error("cannot connect to the peer: {0}")]
    Connect(PlaneError),
    /// The peer has another geometry.
    #[error("the peer's cache does not fit: {0}")]
    Incompatible(Mismatch),
    /// The peer's process is dead.
    #[error("the peer died")]
    PeerLost,
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
    #[error("the fence before an announcement of chunk {chunk} failed: {error}")]
    Fence {
        /// The chunk that was to be announced.
        chunk: ChunkId,
        /// What the fence said.
        error: FenceError,
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
    /// The worker has no regions of this state group.
    #[error("there are no regions of state group {group}")]
    UnknownGroup {
        /// The group.
        group: u16,
    },
    /// The items are not items of this state group.
    #[error("state group {group}: {error}")]
    BadGroup {
        /// The group.
        group: u16,
        /// Which item, and how many there are.
        error: PagesError,
    },
    /// The two sides disagree about the items of a state group: both must name it, unless it is
    /// [optional](crate::StateGroup::optional), and the sender must have all that the receiver wants.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The group.
        group: u16,
        /// What the sender gave; `None` if it did not name the group.
        sent: Option<GroupSpan>,
        /// What the receiver gave; `None` if it did not name the group.
        wanted: Option<GroupSpan>,
    },
    /// The plane failed while moving bytes.
    #[error("the data operation failed: {0}")]
    Post(PlaneError),
    /// The pages were pinned for a reader, and none came, or none showed a sign of life, until the
    /// lease had run out. On the reader's side: it came, or finished, too late.
    #[error("the lease on the sender's pages has expired")]
    LeaseExpired,
    /// The reference that the router carried names other pages than the sender holds.
    #[error("the grant names {} at position {position}, where the sender holds {}", page(.referenced), page(.held))]
    GrantPages {
        /// The first position in the request where they differ.
        position: usize,
        /// The page in the reference, if it goes that far.
        referenced: Option<u32>,
        /// The sender's page, if it has that many.
        held: Option<u32>,
    },
    /// The reference names a page that the sender's cache does not have.
    #[error("the grant is out of range: {0}")]
    GrantOutOfRange(PagesError),
    /// The reference that the router carried is for an earlier life of the sender's worker.
    #[error("the grant is for incarnation {referenced}, but the sender's worker is {found}")]
    StaleGrant {
        /// In the reference.
        referenced: Incarnation,
        /// Registered now.
        found: Incarnation,
    },
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
}

fn group_items(group: &u16, sent: &Option<GroupSpan>, wanted: &Option<GroupSpan>) -> String {
    let text = |span: &Option<GroupSpan>| span.map_or_else(|| "none".to_owned(), |span| span.to_string());
    format!(
        "items of state group {group}: the sender has {}, the receiver wants {}",
        text(sent),
        text(wanted)
    )
}

fn page(page: &Option<u32>) -> String {
    page.map_or_else(|| "no page".to_owned(), |page| format!("page {page}"))
}

fn last_obstacle(last: &Option<BootstrapError>) -> String {
    last.as_ref().map(|error| format!(" ({error})")).unwrap_or_default()
}

impl Cause {
    /// What a server can do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Cause::Aborted => "nothing to do",
            Cause::WorkerStopped | Cause::ByPeer(PeerCause::WorkerStopped) => "retry on another worker",
            Cause::DeadlineExceeded { .. } => "retry; if it happens often, raise the deadline or add workers",
            Cause::Bootstrap(_) => "check the bootstrap address",
            Cause::Connect(_) => "check that both workers run and share a plane",
            Cause::Incompatible(_) => "configure both engines alike",
            Cause::PeerLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
                "retry on another peer, or recompute"
            }
            Cause::ByPeer(_) | Cause::Post(_) => "retry, or recompute",
            Cause::Fence { .. } => "recompute; look into what the device says",
            Cause::LeaseExpired | Cause::StaleGrant { .. } => {
                "recompute; if it happens often, raise kv_lease_duration"
            }
            Cause::GrantPages { .. } | Cause::GrantOutOfRange(_) => {
                "a bug in the router: recompute, and check its transfer parameters"
            }
            Cause::PageCount { .. }
            | Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::AuxOneSided { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. }
            | Cause::GroupItems { .. } => "a bug in the server: both sides must agree on the request's pages",
            Cause::Protocol(_) => "run the same version on both sides",
        }
    }

    /// The cause as the peer is told it.
    pub fn for_peer(&self) -> PeerCause {
        match self {
            Cause::Aborted => PeerCause::Aborted,
            Cause::WorkerStopped => PeerCause::WorkerStopped,
            Cause::DeadlineExceeded { .. } => PeerCause::DeadlineExceeded,
            Cause::PageCount { sent, registered } => {
                PeerCause::PageCount { sent: *sent as u64, registered: *registered as u64 }
            }
            Cause::AuxOneSided { sender, receiver } => {
                PeerCause::AuxOneSided { sender: *sender, receiver: *receiver }
            }
            Cause::GroupItems { group, sent, wanted } => {
                PeerCause::GroupItems { group: *group, sent: *sent, wanted: *wanted }
            }
            Cause::Post(_) => PeerCause::DataOperation,
            Cause::PeerLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
                PeerCause::OtherRankLost
            }
            Cause::Incompatible(mismatch) => PeerCause::Incompatible(mismatch.clone()),
            Cause::ByPeer(cause) => cause.clone(),
            Cause::Protocol(_) => PeerCause::Protocol,
            Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. } => PeerCause::BadArguments,
            Cause::LeaseExpired => PeerCause::LeaseExpired,
            Cause::GrantPages { .. } | Cause::GrantOutOfRange(_) | Cause::StaleGrant { .. } => {
                PeerCause::BadArguments
            }
            Cause::Bootstrap(_) | Cause::Connect(_) | Cause::Fence { .. } => PeerCause::Internal,
        }
    }

    /// What a server that lost the request's pages this way should do with the request (vLLM's
    /// `kv_load_failure_policy`).
    pub fn recovery(&self) -> Recovery {
        match self {
            Cause::Aborted | Cause::ByPeer(PeerCause::Aborted) => Recovery::Fail,
            Cause::Incompatible(_)
            | Cause::ByPeer(PeerCause::Incompatible(_) | PeerCause::Mode { .. })
            | Cause::Bootstrap(BootstrapError::Address(_))
            | Cause::PageCount { .. }
            | Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::AuxOneSided { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. }
            | Cause::GroupItems { .. } => Recovery::Fail,
            Cause::WorkerStopped
            | Cause::DeadlineExceeded { .. }
            | Cause::Bootstrap(_)
            | Cause::Connect(_)
            | Cause::PeerLost
            | Cause::PeerRestarted
            | Cause::PeerUnresponsive { .. }
            | Cause::ByPeer(_)
            | Cause::Post(_)
            | Cause::Fence { .. }
            | Cause::LeaseExpired
            | Cause::GrantPages { .. }
            | Cause::GrantOutOfRange(_)
            | Cause::StaleGrant { .. }
            | Cause::Protocol(_) => Recovery::Recompute,
        }
    }
}

/// What to do with a request whose pages did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Compute the prompt again, here or on another prefill worker: nothing is wrong with the
    /// request.
    Recompute,
    /// Answer the client with an error: another try would end the same way, or nobody waits for it.
    Fail,
}

/// What ended the peer's half of a session, as it travels in a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PeerCause {
    /// Its scheduler aborted.
    #[error("its scheduler aborted the request")]
    Aborted,
    /// It is stopping.
    #[error("it is stopping")]
    WorkerStopped,
    /// Its deadline passed.
    #[error("its deadline passed")]
    DeadlineExceeded,
    /// The numbers of pages differ.
    #[error("{sent} pages are to be sent, but {registered} were registered")]
    PageCount {
        /// Pages announced by the sender.
        sent: u64,
        /// Pages registered by the receiver.
        registered: u64,
    },
    /// One side has an aux row, the other none.
    #[error("an aux row is given on one side only (sender {sender}, receiver {receiver})")]
    AuxOneSided {
        /// The sender gave a row.
        sender: bool,
        /// The receiver gave a row.
        receiver: bool,
    },
    /// The two sides disagree about the items of a state group.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The group.
        group: u16,
        /// What the sender gave; `None` if it did not name the group.
        sent: Option<GroupSpan>,
        /// What the receiver gave; `None` if it did not name the group.
        wanted: Option<GroupSpan>,
    },
    /// Its server gave pages, rows or chunks that do not fit the request or its cache.
    #[error("its server gave pages or rows that do not fit")]
    BadArguments,
    /// A data operation failed.
    #[error("a data operation failed")]
    DataOperation,
    /// Another rank that the request needs was lost.
    #[error("another rank that the request needs was lost")]
    OtherRankLost,
    /// The geometries do not fit.
    #[error("{0}")]
    Incompatible(Mismatch),
    /// The scheduler expected another number of receivers than an engine has for the sender's rank.
    #[error("the sender expects {expected} receivers, the receiver's engine has {told} for it")]
    ReceiverCount {
        /// Told by the sender's scheduler.
        expected: usize,
        /// Told by the receiver.
        told: usize,
    },
    /// The registration names pages or rows that do not exist.
    #[error("the registration is out of range")]
    OutOfRange,
    /// Its tables are full.
    #[error("it is overloaded")]
    Overloaded,
    /// The lease on its pages has run out.
    #[error("the lease on its pages has expired")]
    LeaseExpired,
    /// It has no such grant, or has forgotten what became of it.
    #[error("it knows no grant {nonce}")]
    UnknownGrant {
        /// The nonce of the grant.
        nonce: u64,
    },
    /// The pages of the grant were read and released, or have all the readers they wait for.
    #[error("grant {nonce} has been consumed")]
    GrantConsumed {
        /// The nonce of the grant.
        nonce: u64,
    },
    /// One side pushes, the other pulls.
    #[error("transfer_mode differs: sender {sender}, receiver {receiver}")]
    Mode {
        /// Of the sender.
        sender: TransferMode,
        /// Of the receiver.
        receiver: TransferMode,
    },
    /// It does not know the session.
    #[error("it does not know the session")]
    Unknown,
    /// The frames made no sense to it.
    #[error("it saw a protocol error")]
    Protocol,
    /// Anything else.
    #[error("internal error")]
    Internal,
}

/// Why a session failed (the seed's `failure_exception`, as a value): who, where, why, what now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room {room}, {phase}{}: {cause}; {}", with_peer(.peer), .cause.advice())]
pub struct TransferError {
    /// The request.
    pub room: Room,
    /// The peer, if it was known yet.
    pub peer: Option<WorkerId>,
    /// How far the session had come.
    pub phase: Phase,
    /// What happened.
    pub cause: Cause,
}

fn with_peer(peer: &Option<WorkerId>) -> String {
    peer.as_ref().map(|peer| format!(" with {peer}")).unwrap_or_default()
}

/// A bounded queue was full; the argument comes back untouched. Retry after the next poll.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the command queue is full; retry after the next poll")]
pub struct Backpressure<T>(pub T);

/// Why a session could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// As many sessions are open as the configuration allows. Retry when some have ended.
    #[error("{open} sessions are open, the limit is {max}")]
    TooManySessions {
        /// Open now.
        open: usize,
        /// The limit.
        max: usize,
    },
    /// The command queue is full. Retry after the next poll.
    #[error("the command queue is full; retry after the next poll")]
    Backpressure,
    /// The worker has stopped.
    #[error("the worker has stopped")]
    WorkerStopped,
}
