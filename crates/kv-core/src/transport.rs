//! The trait of whatever moves the bytes. The transports of `kv-local`, `kv-tcp`, `kv-nixl`, `kv-ucx`, `kv-fabric`,
//! `kv-ways` and the simulator implement it.

use std::os::fd::RawFd;
use std::time::Duration;

use bytes::Bytes;

use crate::error::OsError;
use crate::id::{PeerId, PostId};
use crate::layout::Region;
use crate::record::TransportOffer;
use crate::time::Time;

/// Longest frame, in bytes: enough for a registration of some hundred thousand scattered pages.
pub const MAX_FRAME: usize = 1 << 20;

/// A data transport: one-sided reads and writes between the registered regions of two workers, and
/// small frames between the workers. A transport is owned by one thread, and no call blocks.
///
/// # Contract
///
/// 1. **Posts.** A `post` that returns `Ok` is followed by exactly one [`TransportEvent::Posted`]
///    with its id. A `post` that returns `Err` is followed by none, and has touched nothing. After the
///    event no data operation touches the memory of the post any more, on either side, whether the post
///    succeeded or failed. While the transport cannot prove that, it reports no event; the pages then
///    stay in quarantine.
/// 2. **Order.** The `notify` frame of a post reaches the peer after all bytes of the post are in
///    place there, or never. There is no other order among posts and frames.
/// 3. **Frames.** Frames may be lost, duplicated and reordered. They are never damaged and never
///    longer than [`MAX_FRAME`].
/// 4. **Bounds.** A descriptor that leaves its region, here or at the peer, is refused by `post`
///    with [`TransportError::OutOfBounds`].
/// 5. **Peers.** [`TransportEvent::PeerGone`] ends this side's way to a peer. It tells whether the
///    peer's process is proven dead ([`WayEnd::Dead`]), or whether only this way to the peer is lost
///    ([`WayEnd::Lost`]) and the peer may go on writing through a way of its own. All posts to the
///    peer have ended before. The same [`PeerId`] may be connected again afterwards.
/// 6. **Permission to write.** Bytes of a write move only while the permission lasts that
///    [`permit`](Transport::permit) has told. The transport reads the clock before each slice of a
///    write. It begins no slice after the permission has ended, and none that by its own estimate
///    would outlast the permission. The write fence bounds a slice that takes longer than estimated. A
///    write without permission waits; it does not fail.
/// 7. **The end of a peer's writes.** [`write_fence`](Transport::write_fence) declares what ends
///    them, and declares no more than the transport can prove. After [`TransportEvent::Revoked`] no
///    byte of that peer arrives in this worker's memory any more.
/// 8. **Time.** Every transport that moves real bytes uses the host's `CLOCK_BOOTTIME` in
///    nanoseconds: it reads this clock itself, and compares the reading with the times that it is
///    told.
/// 9. **Work per call is bounded.** `poll` returns within about a millisecond, however much is in
///    flight, so that frames and deadlines are served beside a large copy.
pub trait Transport {
    /// The transport's name (`local`, `tcp`, `nixl`, `ucx`, `fabric`), the same at both ends of a connection.
    fn name(&self) -> &'static str;

    /// Registers the next region. The worker calls this once for each region of the `KvArgs`, in
    /// order, before any other call. The n-th call defines region n (from 0) of the descriptors.
    fn register(&mut self, region: &Region) -> Result<(), TransportError>;

    /// The bytes that a peer needs to reach this worker, sent to peers by way of the bootstrap
    /// server or in a frame. They are opaque, and at most 64 KiB plus 64 bytes a region long. A
    /// worker whose metadata exceed [`MAX_OFFER_BYTES`](crate::MAX_OFFER_BYTES) cannot register
    /// with a bootstrap server.
    fn metadata(&self) -> Result<Bytes, TransportError>;

    /// The transports by which peers can reach this worker, the preferred one first. The worker
    /// registers with this list. Only a transport that combines several transports has more than
    /// one entry.
    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        Ok(vec![TransportOffer::new(self.name(), self.metadata()?)])
    }

    /// Opens the way to the peer that the metadata describe. The call may finish in the background:
    /// frames and posts given meanwhile wait, or fail with `PeerGone`.
    ///
    /// A peer that is dead is no error of this call: [`TransportEvent::PeerGone`] tells that end, with
    /// the proof. The worker connects a lost peer again until then, because pages that the peer may
    /// write wait for the proof. An error proves nothing.
    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError>;

    /// Opens the way to the peer by this one of its transports, and by no other as long as the peer
    /// is connected. For a transport that does not combine several, this is the same as
    /// [`connect`](Transport::connect). Fails if the transport does not lead to the peer; the
    /// worker may then try another transport of the peer.
    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.connect(peer, &transport.metadata)
    }

    /// False if the transport knows that frames of this connection do not come from the worker that
    /// the metadata describe. A worker that presents another worker's metadata must not be
    /// connected to that worker.
    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let _ = (from, metadata);
        true
    }

    /// As [`may_speak_for`](Transport::may_speak_for), for one of the worker's transports: frames
    /// in its name may come by that transport only.
    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        self.may_speak_for(from, &transport.metadata)
    }

    /// Forgets the peer. Posts to the peer still end with their events.
    fn disconnect(&mut self, peer: PeerId);

    /// Sends a frame. `Err(WouldBlock)` means that the frame was dropped; the protocol repeats what
    /// matters. The frame may wait for the next call of [`poll`](Transport::poll), to travel with
    /// others; [`wait`](Transport::wait) then says [`Now`](TransportWait::Now).
    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError>;

    /// A hint: within some tens of microseconds `bytes` bytes, which may be 0, are written to the peer, and a frame follows.
    /// A transport to a peer on this host may wake the peer now, so that the peer is awake when the frame comes.
    fn rouse(&mut self, peer: PeerId, bytes: u64) {
        let _ = (peer, bytes);
    }

    /// Starts a data operation. `Err` means that no memory was touched, and that no event will
    /// follow.
    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError>;

    /// Asks for an early end of a post. The event of the post still comes, with any result. A write
    /// that waits for its permission has moved nothing, and ends at once.
    fn cancel(&mut self, post: PostId);

    /// Tells until when the peer allows writes into its memory. The moment replaces the one told
    /// before. A peer that is connected anew has allowed nothing.
    fn permit(&mut self, peer: PeerId, until: Time);

    /// What ends the danger of the writes that the peer has begun into this worker's memory, once
    /// the peer's permission has ended.
    fn write_fence(&self, peer: PeerId) -> WriteFence;

    /// Takes from the peer, for good, the right to write through this connection. Once no write of
    /// the peer can arrive any more, [`TransportEvent::Revoked`] answers, or
    /// [`TransportEvent::PeerGone`] with [`WayEnd::Dead`]. Called only where the write fence is
    /// [`WriteFence::Revocable`]; the call must also work after this side's way to the peer was
    /// lost. When the owner then [disconnects](Transport::disconnect) the peer, the peer's own way ends, too,
    /// because nothing can be written over it any more.
    fn revoke(&mut self, peer: PeerId) {
        let _ = peer;
    }

    /// Makes progress, and appends to `events` what has happened since the last call.
    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>);

    /// Called when the owner has done other work since the last call of [`poll`](Transport::poll), and begins to handle the
    /// events of that call only now. A transport that counts for each peer what its frames cost begins to count here. Not
    /// called if the owner handles the events at once.
    fn begin_handling(&mut self) {}

    /// How the owner may sleep until there is something to poll. Asked once the events of each call of
    /// [`poll`](Transport::poll) are handled: the time since that call, or since
    /// [`begin_handling`](Transport::begin_handling), is what they have cost.
    fn wait(&self) -> TransportWait;

    /// The directions that are worth using with this peer. For `None`, and for a peer that is not
    /// connected: the directions that can be expected of any peer. Sessions that may choose between
    /// push and pull follow the answer. The default is both.
    fn directions(&self, _peer: Option<PeerId>) -> Directions {
        Directions::BOTH
    }
}

/// The directions that a transport does at full speed, and without a risk that the other direction
/// does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Directions {
    /// [`Op::Write`], which push sessions use.
    pub write: bool,
    /// [`Op::Read`], which pull sessions use.
    pub read: bool,
}

impl Directions {
    /// Writes and reads are equally good.
    pub const BOTH: Directions = Directions { write: true, read: true };
    /// Only writes are worth using.
    pub const WRITE: Directions = Directions { write: true, read: false };
    /// Only reads are worth using.
    pub const READ: Directions = Directions { write: false, read: true };

    /// The directions that both ends of a way recommend.
    pub const fn and(self, other: Directions) -> Directions {
        Directions { write: self.write && other.write, read: self.read && other.read }
    }
}

/// One data operation: a list of descriptors, all of one direction, to or from one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    /// The id of the post, repeated in the event that ends it.
    pub id: PostId,
    /// Whether the post writes or reads.
    pub op: Op,
    /// The descriptors, at least one and at most [`KvArgs::max_sge`](crate::KvArgs::max_sge).
    pub descriptors: Vec<Descriptor>,
    /// A frame that the peer gets once all bytes of the post are in place.
    pub notify: Option<Bytes>,
}

/// The direction in which the bytes of a post go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From local regions into the peer's.
    Write,
    /// From the peer's regions into local ones.
    Read,
}

/// A descriptor: one contiguous range of `len` bytes here, and one at the peer. Each range is named
/// by region number and offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Descriptor {
    /// The number of the region here, as registered.
    pub local_region: u32,
    /// The number of the region at the peer.
    pub remote_region: u32,
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Offset in the peer's region, in bytes.
    pub remote_offset: u64,
    /// The length of both ranges in bytes, at least one.
    pub len: u64,
}

/// A transport connection on which frames arrive: what the transport can tell apart without
/// trusting what a peer writes into its frames. A remote process has one connection, or a few.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Origin(pub u64);

/// Whether a peer is dead, or only the way to the peer is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WayEnd {
    /// The peer's process is proven dead, or its transport has said that it writes nothing more.
    Dead {
        /// How long from now, by this worker's clock, the last writes of the peer may still arrive.
        /// A transport that measures with another clock has added the difference that the two
        /// clocks may have.
        quiet_after: Duration,
    },
    /// This side's way to the peer is lost. Nothing is proven about the peer, which may live and go
    /// on writing.
    Lost,
}

/// What ends the danger of a peer's last writes, when the peer does not answer any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteFence {
    /// Only the proven death of the peer: a processor copies the bytes there, and a stopped process
    /// may continue at any time.
    AtDeath,
    /// [`Transport::revoke`] takes the right to write from the peer.
    Revocable,
    /// Time: a write that was begun under a permission has ended this long after the permission's
    /// end. Only for hardware with a finite number of retries, never where a processor copies, and
    /// only where nothing can stop the peer between its reading of the clock and the moment at
    /// which the hardware begins.
    Within(Duration),
}

/// What a transport reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransportEvent {
    /// A frame arrived. The transport reports only the connection; the frame itself says who sent it.
    Frame {
        /// The connection on which the frame came.
        from: Origin,
        /// The bytes of the frame, at most [`MAX_FRAME`].
        frame: Bytes,
    },
    /// A post ended: no data operation touches the memory of the post any more.
    Posted {
        /// The post that ended.
        post: PostId,
        /// Whether all bytes are in place. On `Err` any part of the bytes may have arrived.
        result: Result<(), TransportError>,
    },
    /// The way to a peer has ended.
    PeerGone {
        /// The peer whose way has ended.
        peer: PeerId,
        /// Whether the peer is dead, or only the way is lost.
        end: WayEnd,
    },
    /// No write of the peer arrives any more. This is the answer to [`Transport::revoke`].
    Revoked {
        /// The peer that may not write any more.
        peer: PeerId,
    },
}

/// How the owner of a transport may sleep until there is something to poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransportWait {
    /// There is more to do at once: do not sleep.
    Now,
    /// Sleep until one of these file descriptors is readable.
    Readable(Vec<RawFd>),
    /// Sleep until one of these file descriptors is readable, but no longer than this.
    ReadableOrAfter(Vec<RawFd>, Duration),
}

/// Why a transport refused a call, or why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The region is not in memory that the transport was given. Give the memory to the transport first.
    #[error("region {region}: {addr:#x}+{len} is not in memory given to the transport")]
    UnknownMemory {
        /// The number of the region, as registered.
        region: u32,
        /// The address of the region's first byte.
        addr: u64,
        /// The length of the region in bytes.
        len: u64,
    },
    /// A descriptor leaves its region, here or at the peer.
    #[error(
        "descriptor {descriptor}: {side} region {region} has {len} bytes, but {size} bytes at offset {offset} were asked for"
    )]
    OutOfBounds {
        /// The position of the descriptor in the post.
        descriptor: usize,
        /// The side on which the range lies: `local` or `remote`.
        side: &'static str,
        /// The number of the region on that side.
        region: u32,
        /// The length of the region in bytes; zero if there is no such region.
        len: u64,
        /// The offset of the range in the region, in bytes.
        offset: u64,
        /// The length of the range in bytes.
        size: u64,
    },
    /// A number is outside its range: a post has no descriptors, a frame or metadata are too long, or
    /// there are too many regions.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Size {
        /// What was counted: descriptors, regions, or bytes of a frame.
        field: &'static str,
        /// The number that was found.
        got: usize,
        /// The smallest number allowed.
        min: usize,
        /// The largest number allowed.
        max: usize,
    },
    /// The metadata are of another transport, another version, or another host.
    #[error("the peer's metadata cannot be used: {0}")]
    Metadata(&'static str),
    /// The description of a program that does not speak this library's protocol is refused. The text names
    /// the field and both values.
    #[error("the foreign peer cannot be connected: {0}")]
    Foreign(String),
    /// The peer's process belongs to another user of this host, who could write what a peer may write.
    #[error("the peer belongs to user {peer}, this process to user {ours}")]
    OtherUser {
        /// The effective user id of the peer.
        peer: u32,
        /// The effective user id of this process.
        ours: u32,
    },
    /// The peer is not connected (any more).
    #[error("the peer is gone")]
    PeerGone,
    /// No room for another frame or post now.
    #[error("the transport's queue is full")]
    WouldBlock,
    /// The peer has taken back the right to write into its memory.
    #[error("the peer has revoked the right to write")]
    Revoked,
    /// The operation was cancelled.
    #[error("the operation was cancelled")]
    Cancelled,
    /// None of the transports that a combined transport consists of can do it.
    #[error("no transport can do it: {}", list(ways))]
    NoTransport {
        /// The transports, each with the reason why it cannot.
        ways: Vec<(&'static str, TransportError)>,
    },
    /// The transport does not support this kind of memory or operation.
    #[error("not supported by this transport: {0}")]
    Unsupported(&'static str),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
    /// The transport library failed.
    #[error("{call} failed with {status}")]
    Backend {
        /// The library's call that failed.
        call: &'static str,
        /// The status that the call returned, in words.
        status: &'static str,
        /// The library's number for the status; `None` if several statuses come as one, without a number.
        code: Option<i32>,
    },
}

fn list(ways: &[(&'static str, TransportError)]) -> String {
    let ways: Vec<String> = ways.iter().map(|(name, error)| format!("{name}: {error}")).collect();
    ways.join("; ")
}
