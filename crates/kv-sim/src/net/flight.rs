//! Posts under way.

use bytes::Bytes;
use kv_core::{Op, PeerId, PostId, TransportError};

use crate::net::lives::{HoldId, LifeId};

/// Number of a way in its world.
pub type WayId = usize;

/// One post under way, or over.
#[derive(Debug, Clone)]
pub struct Flight {
    /// Who posted it.
    pub life: LifeId,
    /// Over which connection.
    pub peer: PeerId,
    /// On which way.
    pub way: WayId,
    /// Which way the bytes go.
    pub op: Op,
    /// Into, or from, whose memory.
    pub target: LifeId,
    /// Its number within its node.
    pub post: PostId,
    /// What moves, piece by piece: no piece crosses the end of an item on either side.
    pub pieces: Vec<Piece>,
    /// Pieces that have moved.
    pub moved: usize,
    /// The frame for the target.
    pub notify: Option<Bytes>,
    /// It fails once so many pieces have moved.
    pub fails_after: Option<usize>,
    /// How it will end; `None` while that is open.
    pub outcome: Option<Result<(), TransportError>>,
    /// Where a write is cut into slices, the next end last.
    pub cuts: Vec<usize>,
    /// The longest pause before a slice.
    pub pause: u64,
    /// The end of the slice that is under way.
    pub slice: Option<usize>,
    /// It waits for a permission to write.
    pub waits: bool,
    /// With a planted bug: its permission was looked at before its writer was stopped.
    pub looked: bool,
    /// It does not end, nor begin another slice, before the world is healed.
    pub stuck: bool,
    /// Its node has asked for an early end.
    pub cancelled: bool,
    /// Its node has been told of its end, or is dead.
    pub over: bool,
}

/// What moves at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Region of the poster.
    pub local_region: u32,
    /// Offset there.
    pub local_offset: u64,
    /// Region of the target.
    pub remote_region: u32,
    /// Offset there.
    pub remote_offset: u64,
    /// Bytes.
    pub len: u64,
    /// Who held the poster's side when the post was made.
    pub local_hold: HoldId,
    /// Who held the target's side when the post was made.
    pub remote_hold: HoldId,
}
