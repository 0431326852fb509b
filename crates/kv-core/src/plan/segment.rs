//! A run of pages that lie one after the other on both sides.

/// `len` items that are neighbours on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Position of the first in the list: how many items the segments before it hold.
    pub position: u32,
    /// The first item here.
    pub local: u32,
    /// The first item at the peer.
    pub remote: u32,
    /// How many items, at least one.
    pub len: u32,
}
