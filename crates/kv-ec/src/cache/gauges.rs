//! What a cache holds and has done, in numbers.

/// Blocks of an [`EncoderCache`](super::EncoderCache) by their state, and counts since the cache was made.
/// `blocks` is always the sum of `free`, `filling`, `cached`, `pinned` and `lost`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheGauges {
    /// Blocks of the region.
    pub blocks: u32,
    /// Blocks that no entry and no reservation has.
    pub free: u32,
    /// Blocks of reservations that are not committed, and blocks of discarded reservations that a transfer has
    /// not given back.
    pub filling: u32,
    /// Blocks of committed entries that are not pinned. A reservation that needs room evicts these entries.
    pub cached: u32,
    /// Blocks of committed entries that are pinned.
    pub pinned: u32,
    /// Blocks whose reservation was dropped without a commit or a discard. The cache never uses them again.
    pub lost: u32,
    /// Pins that were dropped without [`unpin`](super::EncoderCache::unpin). Their entries stay pinned for good.
    pub lost_pins: u64,
    /// Entries that are filling or committed.
    pub entries: usize,
    /// Calls of [`pin`](super::EncoderCache::pin) that found a committed entry.
    pub hits: u64,
    /// Calls of [`pin`](super::EncoderCache::pin) that found no committed entry.
    pub misses: u64,
    /// Entries that were evicted to make room for others.
    pub evictions: u64,
    /// Blocks of the evicted entries.
    pub evicted_blocks: u64,
}
