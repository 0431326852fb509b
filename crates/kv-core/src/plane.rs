//! What moves the bytes: the trait that NIXL, the embedded plane and the simulator implement.

use std::os::fd::RawFd;
use std::time::Duration;

use bytes::Bytes;

use crate::args::Region;
use crate::id::{PeerId, PostId};
use crate::time::Time;

/// Largest frame, in bytes: a registration of some hundred thousand scattered pages.
pub const MAX_FRAME: usize = 1 << 20;

/// A data plane: one-sided reads and writes between the registered regions of two workers, and
/// small frames between them. Owned by one thread; nothing in it blocks.
///
/// # Contract
///
/// 1. **Posts.** A `post` that returns `Ok` is followed by exactly one [`PlaneEvent::Posted`] with
///    its id; a `post` that returns `Err` by none, and has touched nothing. After the event no wire
///    touches the memory of the post any more, on either side, whether it went well or not. While
///    the plane cannot prove that, it stays silent: that is what keeps pages in quarantine.
/// 2. **Order.** The `notify` frame of a post reaches the peer only after all its bytes are in
///    place there, or never. There is no order among posts or frames otherwise.
/// 3. **Frames.** May be lost, duplicated and reordered; they are never damaged and never longer
///    than [`MAX_FRAME`].
/// 4. **Bounds.** A descriptor that leaves its region, here or at the peer, is refused by `post`
///    with [`PlaneError::OutOfBounds`].
/// 5. **Peers.** [`PlaneEvent::PeerGone`] means proof: the peer's process is dead, or this
///    connection to it can never carry a byte again once `quiet_after` has passed.
/// 6. **Work per call is bounded**: `poll` returns within about a millisecond however much is in
///    flight, so that frames and deadlines are served beside a large copy.
pub trait Plane {
    /// The plane's name (`local`, `nixl`), the same at both ends of a connection.
    fn name(&self) -> &'static str;

    /// Registers the next region; called once for each region of the `KvArgs`, in order, before
    /// anything else. The n-th call defines region n of the descriptors.
    fn register(&mut self, region: &Region) -> Result<(), PlaneError>;

    /// What a peer must be given, by way of the bootstrap server or a frame, to reach this worker:
    /// opaque, at most 64 KiB plus 64 bytes a region.
    fn metadata(&self) -> Result<Bytes, PlaneError>;

    /// Opens the way to the peer that this metadata describes. May finish in the background:
    /// frames and posts given meanwhile wait, or fail with `PeerGone`.
    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), PlaneError>;

    /// Forgets the peer. Its posts still end with their events.
    fn disconnect(&mut self, peer: PeerId);

    /// Sends a frame. `Err(WouldBlock)` means it was dropped; protocols retry anyway.
    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), PlaneError>;

    /// Starts a data operation.
    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), PlaneError>;

    /// Asks for an early end of a post; its event still comes, with whatever result.
    fn cancel(&mut self, post: PostId);

    /// Makes progress and appends what happened.
    fn poll(&mut self, now: Time, events: &mut Vec<PlaneEvent>);

    /// How the owner may sleep until there is something to poll.
    fn wait(&self) -> PlaneWait;

    /// Which directions are worth using: with this peer or, for `None` and for one that is not
    /// connected, as far as can be known before a peer is. Whoever may choose between push and pull
    /// goes by it. Both, for a plane that does not say otherwise.
    fn directions(&self, _peer: Option<PeerId>) -> Directions {
        Directions::BOTH
    }
}

/// Which directions a transport does at its full speed, and without a risk that the other has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Directions {
    /// [`Op::Write`], which push sessions use.
    pub write: bool,
    /// [`Op::Read`], which pull sessions use.
    pub read: bool,
}

impl Directions {
    /// Both alike.
    pub const BOTH: Directions = Directions { write: true, read: true };
    /// Only writes.
    pub const WRITE: Directions = Directions { write: true, read: false };
    /// Only reads.
    pub const READ: Directions = Directions { write: false, read: true };

    /// What both ends of a way agree on.
    pub const fn and(self, other: Directions) -> Directions {
        Directions { write: self.write && other.write, read: self.read && other.read }
    }
}

/// One data operation: descriptors of one direction, to or from one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    /// Its id in the event that ends it.
    pub id: PostId,
    /// Which way the bytes go.
    pub op: Op,
    /// The pieces, at least one.
    pub descs: Vec<Desc>,
    /// A frame for the peer once all bytes are in place.
    pub notify: Option<Bytes>,
}

/// Which way the bytes of a post go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From local regions into the peer's.
    Write,
    /// From the peer's regions into local ones.
    Read,
}

/// A piece of memory on both sides: `len` bytes, each side by region number and offset in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Desc {
    /// Region here.
    pub local_region: u32,
    /// Region at the peer.
    pub remote_region: u32,
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Offset in the peer's region, in bytes.
    pub remote_offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
}

/// What a plane reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaneEvent {
    /// A frame arrived. Who sent it stands in it.
    Frame(Bytes),
    /// A post ended: its memory is quiet.
    Posted {
        /// Which.
        post: PostId,
        /// How it went. On `Err` any part of the bytes may have arrived.
        result: Result<(), PlaneError>,
    },
    /// The peer is proven gone.
    PeerGone {
        /// Which.
        peer: PeerId,
        /// How long from now its last writes may still arrive.
        quiet_after: Duration,
    },
}

/// How the owner of a plane may sleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaneWait {
    /// There is more to do at once: do not sleep.
    Now,
    /// Until one of these descriptors is readable.
    Readable(Vec<RawFd>),
    /// Until one of these descriptors is readable, but no longer than this.
    ReadableOrAfter(Vec<RawFd>, Duration),
}

/// Why a plane refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// The region is not in memory that the plane was given.
    #[error("region {region}: {addr:#x}+{len} is not in memory given to the plane")]
    UnknownMemory {
        /// Its number.
        region: u32,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
    /// A descriptor leaves its region.
    #[error("descriptor {desc}: {side} region {region} has {len} bytes, {offset}+{size} was asked for")]
    OutOfBounds {
        /// Position in the post.
        desc: usize,
        /// `local` or `remote`.
        side: &'static str,
        /// Region number.
        region: u32,
        /// Its length, zero if there is no such region.
        len: u64,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        size: u64,
    },
    /// A post without descriptors, or a frame that is too long.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Size {
        /// What.
        field: &'static str,
        /// Its size.
        got: usize,
        /// Smallest allowed.
        min: usize,
        /// Largest allowed.
        max: usize,
    },
    /// The metadata is not of this plane, of this version, or of this host.
    #[error("the peer's metadata cannot be used: {0}")]
    Metadata(&'static str),
    /// The peer is not connected (any more).
    #[error("the peer is gone")]
    PeerGone,
    /// No room for another frame or post now.
    #[error("the plane's queue is full")]
    WouldBlock,
    /// The operation was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The plane does not do this kind of memory or operation.
    #[error("not supported by this plane: {0}")]
    Unsupported(&'static str),
    /// The operating system failed.
    #[error("{call} failed: {kind}")]
    Os {
        /// The call.
        call: &'static str,
        /// The error.
        kind: std::io::ErrorKind,
    },
    /// The transport library failed.
    #[error("{call} failed with {status}")]
    Backend {
        /// The call.
        call: &'static str,
        /// Its status.
        status: &'static str,
    },
}
