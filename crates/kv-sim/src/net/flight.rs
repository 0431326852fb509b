//! The posts of a world, from their start to their end.

use bytes::Bytes;
use kv_core::{Op, PeerId, PostId, TransportError};

use crate::net::lives::{HoldId, LifeId};

/// The number of a way in its world.
pub type WayId = usize;

/// One post, in flight or ended.
#[derive(Debug, Clone)]
pub struct Flight {
    /// The life that posted it.
    pub life: LifeId,
    /// The poster's id of the peer.
    pub peer: PeerId,
    /// The way that the bytes take.
    pub way: WayId,
    /// The direction of the bytes.
    pub op: Op,
    /// The life whose memory the post writes into or reads from.
    pub target: LifeId,
    /// The id of the post at its poster.
    pub post: PostId,
    /// The pieces that move one by one; no piece crosses the end of an item on either side.
    pub pieces: Vec<Piece>,
    /// The number of pieces that have moved.
    pub moved: usize,
    /// The frame for the target that follows the bytes.
    pub notify: Option<Bytes>,
    /// If set, the post fails once this many pieces have moved.
    pub fails_after: Option<usize>,
    /// The result of the post; `None` while it is open.
    pub outcome: Option<Result<(), TransportError>>,
    /// Where a write is cut into slices, the next end last.
    pub cuts: Vec<usize>,
    /// The longest pause before a slice, in nanoseconds.
    pub pause: u64,
    /// The end of the slice that is under way.
    pub slice: Option<usize>,
    /// True if the post waits for a permission to write.
    pub waits: bool,
    /// With a planted bug, true if the permission was checked before the writer was stopped.
    pub looked: bool,
    /// True if the post neither ends nor begins another slice before the world is healed.
    pub stuck: bool,
    /// True if the poster has asked for an early end.
    pub cancelled: bool,
    /// True if the poster has been told of the end, or is dead.
    pub over: bool,
}

/// Bytes that move at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// The region of the poster.
    pub local_region: u32,
    /// The offset in the poster's region, in bytes.
    pub local_offset: u64,
    /// The region of the target.
    pub remote_region: u32,
    /// The offset in the target's region, in bytes.
    pub remote_offset: u64,
    /// The length in bytes.
    pub len: u64,
    /// The holder of the poster's item when the post was made.
    pub local_hold: HoldId,
    /// The holder of the target's item when the post was made.
    pub remote_hold: HoldId,
}
