//! A run of pages that are contiguous on both sides.

/// A run of `len` items that are neighbours on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The position of the first item in the list: how many items the segments before this one
    /// hold.
    pub position: u32,
    /// The number of the first item here.
    pub local: u32,
    /// The number of the first item at the peer.
    pub remote: u32,
    /// How many items the segment has, at least one.
    pub len: u32,
}
