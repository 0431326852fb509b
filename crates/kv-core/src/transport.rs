//! What moves the bytes: the trait that NIXL, the embedded transport and the simulator implement.

use std::os::fd::RawFd;
use std::time::Duration;

use bytes::Bytes;

use crate::id::{PeerId, PostId};
use crate::layout::Region;
use crate::record::TransportOffer;
use crate::time::Time;

/// Largest frame, in bytes: a registration of some hundred thousand scattered pages.
pub const MAX_FRAME: usize = 1 << 20;

/// A data transport: one-sided reads and writes between the registered regions of two workers, and
/// small frames between them. Owned by one thread; nothing in it blocks.
///
/// # Contract
///
/// 1. **Posts.** A `post` that returns `Ok` is followed by exactly one [`TransportEvent::Posted`] with
///    its id; a `post` that returns `Err` by none, and has touched nothing. After the event no wire
///    touches the memory of the post any more, on either side, whether it went well or not. While
///    the transport cannot prove that, it stays silent: that is what keeps pages in quarantine.
/// 2. **Order.** The `notify` frame of a post reaches the peer only after all its bytes are in
///    place there, or never. There is no order among posts or frames otherwise.
/// 3. **Frames.** May be lost, duplicated and reordered; they are never damaged and never longer
///    than [`MAX_FRAME`].
/// 4. **Bounds.** A descriptor that leaves its region, here or at the peer, is refused by `post`
///    with [`TransportError::OutOfBounds`].
/// 5. **Peers.** [`TransportEvent::PeerGone`] ends this side's way to a peer, and says whose end it is: the
///    peer's process is proven dead ([`WayEnd::Dead`]), or only this way to it is lost
///    ([`WayEnd::Lost`]), and the peer may go on writing through a way of its own. The posts to the
///    peer have ended before. The same [`PeerId`] may be connected again afterwards.
/// 6. **Permission to write.** Bytes of a write move only while the permission that
///    [`permit`](Transport::permit) has told lasts: the transport reads the clock before each slice, and
///    begins none after the permission has ended, nor one that by its own estimate would outlast it. What
///    bounds a slice that takes longer than estimated is the write fence. A write without permission waits;
///    it does not fail.
/// 7. **The end of a peer's writes** is what [`write_fence`](Transport::write_fence) declares for the peer,
///    and never more than the transport can prove. After [`TransportEvent::Revoked`] no byte of that peer
///    arrives in this worker's memory any more.
/// 8. **Time** is the host's `CLOCK_BOOTTIME` in nanoseconds for every transport that moves real bytes:
///    transports read it by themselves, and compare it with the times they are told.
/// 9. **Work per call is bounded**: `poll` returns within about a millisecond however much is in
///    flight, so that frames and deadlines are served beside a large copy.
pub trait Transport {
    /// The transport's name (`local`, `nixl`), the same at both ends of a connection.
    fn name(&self) -> &'static str;

    /// Registers the next region; called once for each region of the `KvArgs`, in order, before
    /// anything else. The n-th call defines region n of the descriptors.
    fn register(&mut self, region: &Region) -> Result<(), TransportError>;

    /// What a peer must be given, by way of the bootstrap server or a frame, to reach this worker:
    /// opaque, at most 64 KiB plus 64 bytes a region. A worker whose metadata exceeds
    /// [`MAX_OFFER_BYTES`](crate::MAX_OFFER_BYTES) cannot register with a bootstrap server.
    fn metadata(&self) -> Result<Bytes, TransportError>;

    /// The transports by which peers reach this worker, the preferred one first: what it is registered
    /// with. One, for every transport that is not made of several.
    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        Ok(vec![TransportOffer::new(self.name(), self.metadata()?)])
    }

    /// Opens the way to the peer that this metadata describes. May finish in the background:
    /// frames and posts given meanwhile wait, or fail with `PeerGone`.
    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError>;

    /// Opens the way to the peer by one of its transports, and by no other for as long as the peer is
    /// connected: what [`connect`](Transport::connect) does, for a transport that is not made of several. An error if
    /// this transport leads nowhere: another one of the peer's may then be tried.
    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.connect(peer, &transport.metadata)
    }

    /// False if the transport knows that frames of this connection are not from the worker that this
    /// metadata describes. A worker that brings another one's metadata must not get the way to it.
    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let _ = (from, metadata);
        true
    }

    /// The same for one of the worker's transports: frames in its name come by that transport only.
    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        self.may_speak_for(from, &transport.metadata)
    }

    /// Forgets the peer. Its posts still end with their events.
    fn disconnect(&mut self, peer: PeerId);

    /// Sends a frame. `Err(WouldBlock)` means it was dropped; protocols retry anyway.
    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError>;

    /// Starts a data operation.
    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError>;

    /// Asks for an early end of a post; its event still comes, with whatever result. A write that waits
    /// for its permission has begun nothing, and ends now.
    fn cancel(&mut self, post: PostId);

    /// The peer allows writes into its memory until this moment. Replaces what was told before; a
    /// peer that is connected anew has allowed nothing.
    fn permit(&mut self, peer: PeerId, until: Time);

    /// What ends the danger of writes that the peer has begun into this worker's memory, once it has
    /// no permission any more.
    fn write_fence(&self, peer: PeerId) -> WriteFence;

    /// Takes from the peer, for good, the right to write through this connection. Answered by
    /// [`TransportEvent::Revoked`], or by [`TransportEvent::PeerGone`] with [`WayEnd::Dead`], once it is certain
    /// that none of its writes arrives any more. Asked only where the fence is
    /// [`WriteFence::Revocable`], and possible after this side's way was lost.
    fn revoke(&mut self, peer: PeerId) {
        let _ = peer;
    }

    /// Makes progress and appends what happened.
    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>);

    /// How the owner may sleep until there is something to poll.
    fn wait(&self) -> TransportWait;

    /// Which directions are worth using: with this peer or, for `None` and for one that is not
    /// connected, as far as can be known before a peer is. Whoever may choose between push and pull
    /// goes by it. Both, for a transport that does not say otherwise.
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

/// A transport connection on which frames arrive: whatever the transport can tell apart without
/// trusting what a peer writes into its frames. One remote process has few of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Origin(pub u64);

/// Whose end a lost way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WayEnd {
    /// The peer's process is proven dead, or its transport has said that it writes nothing more.
    Dead {
        /// How long from now, by this worker's clock, its last writes may still arrive. A transport that
        /// goes by another clock has added what the two may differ by.
        quiet_after: Duration,
    },
    /// This side's way to the peer is lost. Nothing is proven about the peer, which may live and go
    /// on writing.
    Lost,
}

/// What ends the danger of the last writes of a peer that says nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteFence {
    /// Nothing but its proven death: the peer's processor copies, and a stopped process goes on where
    /// it was.
    AtDeath,
    /// [`Transport::revoke`].
    Revocable,
    /// Time: a write that was begun while the permission lasted has ended this long after it.
    /// For hardware with finite retries, never where the peer's processor copies, and only where nothing
    /// can stop the peer between its look at the clock and the moment at which the hardware begins.
    Within(Duration),
}

/// What a transport reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransportEvent {
    /// A frame arrived. Its author, as the author says, stands in it.
    Frame {
        /// The connection on which it came.
        from: Origin,
        /// The frame.
        frame: Bytes,
    },
    /// A post ended: its memory is quiet.
    Posted {
        /// Which.
        post: PostId,
        /// How it went. On `Err` any part of the bytes may have arrived.
        result: Result<(), TransportError>,
    },
    /// The way to the peer has ended.
    PeerGone {
        /// Which.
        peer: PeerId,
        /// Whose end it is.
        end: WayEnd,
    },
    /// No write of the peer arrives any more: answers [`Transport::revoke`].
    Revoked {
        /// Which.
        peer: PeerId,
    },
}

/// How the owner of a transport may sleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransportWait {
    /// There is more to do at once: do not sleep.
    Now,
    /// Until one of these descriptors is readable.
    Readable(Vec<RawFd>),
    /// Until one of these descriptors is readable, but no longer than this.
    ReadableOrAfter(Vec<RawFd>, Duration),
}

/// Why a transport refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The region is not in memory that the transport was given.
    #[error("region {region}: {addr:#x}+{len} is not in memory given to the transport")]
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
    /// The metadata is not of this transport, of this version, or of this host.
    #[error("the peer's metadata cannot be used: {0}")]
    Metadata(&'static str),
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
    #[error("cancelled")]
    Cancelled,
    /// None of the transports that a transport is made of can do it.
    #[error("no transport can: {}", list(ways))]
    NoTransport {
        /// The transports, and why each cannot.
        ways: Vec<(&'static str, TransportError)>,
    },
    /// The transport does not do this kind of memory or operation.
    #[error("not supported by this transport: {0}")]
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

fn list(ways: &[(&'static str, TransportError)]) -> String {
    let ways: Vec<String> = ways.iter().map(|(name, error)| format!("{name}: {error}")).collect();
    ways.join("; ")
}
