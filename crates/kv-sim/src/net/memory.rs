//! The memories between which posts copy.

use crate::net::lives::HoldId;

/// The registered memory of one life of a host.
pub trait Memory {
    /// The bytes of a piece; `None` if the piece leaves its region.
    fn piece(&self, region: u32, offset: u64, len: u64) -> Option<&[u8]>;

    /// Overwrites a piece; false if the piece leaves its region.
    fn overwrite(&mut self, region: u32, offset: u64, bytes: &[u8]) -> bool;

    /// The holder of the item at an offset of a region; zero if no session holds the item.
    fn holder(&self, region: u32, offset: u64) -> HoldId;

    /// The size of one item of a region, in bytes; no piece crosses the end of an item.
    fn item_len(&self, region: u32) -> u64;
}
