//! What posts copy.

use crate::net::lives::HoldId;

/// The registered memory of one life of a host.
pub trait Memory {
    /// The bytes of a piece; `None` if it leaves its region.
    fn piece(&self, region: u32, offset: u64, len: u64) -> Option<&[u8]>;

    /// Overwrites a piece; false if it leaves its region.
    fn overwrite(&mut self, region: u32, offset: u64, bytes: &[u8]) -> bool;

    /// Who holds the item at an offset of a region; zero if nobody does.
    fn holder(&self, region: u32, offset: u64) -> HoldId;

    /// Bytes of one item of a region: no piece crosses the end of one.
    fn item_len(&self, region: u32) -> u64;
}
