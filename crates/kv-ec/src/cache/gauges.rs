//! What a cache holds and has done, in numbers.

/// Blocks of an [`EncoderCache`](super::EncoderCache) by their state, and counts since its start. `blocks` is
/// always the sum of `free`, `filling`, `cached`, `pinned` and `lost`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheGauges {
    /// Blocks of the region.
    pub blocks: u32,
    /// Blocks that no entry and no reservation has.
    pub free: u32,
    /// Blocks of reservations that are neither committed nor given back.
    pub filling: u32,
    /// Blocks of committed entries that nobody has pinned: evicting these entries frees the blocks.
    pub cached: u32,
    /// Blocks of committed entries that are pinned.
    pub pinned: u32,
    /// Blocks whose reservation was dropped, neither committed nor discarded. They are never used again.
    pub lost: u32,
    /// Pins that were dropped without [`unpin`](super::EncoderCache::unpin). Their entries stay pinned.
    pub lost_pins: u64,
    /// Entries that are filling or committed.
    pub entries: usize,
    /// Calls of [`pin`](super::EncoderCache::pin) that found a committed entry.
    pub hits: u64,
    /// Calls of [`pin`](super::EncoderCache::pin) that found none.
    pub misses: u64,
    /// Entries that were evicted to make room for others.
    pub evictions: u64,
    /// Blocks of the evicted entries.
    pub evicted_blocks: u64,
}
