//! Why a cache reserves no blocks, or pins no entry.

/// Why [`reserve`](super::EncoderCache::reserve) reserved no blocks. No entry was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The entry would have no bytes.
    #[error("an entry of 0 bytes cannot be reserved; an entry has at least 1")]
    Empty,
    /// The entry has more blocks than the whole region: encode the item locally, or use a larger region.
    #[error("the entry needs {blocks} blocks, and the region has only {region}")]
    TooLarge {
        /// Blocks of the entry.
        blocks: u64,
        /// Blocks of the region.
        region: u32,
    },
    /// Too many blocks are filling or pinned. Reserving may succeed after a commit, a discard or an unpin.
    #[error(
        "the entry needs {blocks} blocks; {free} are free, and evicting entries would free {evictable} more"
    )]
    Full {
        /// Blocks of the entry.
        blocks: u32,
        /// Blocks that are free.
        free: u32,
        /// Blocks of entries that are ready and not pinned, so that they could be evicted.
        evictable: u32,
    },
    /// The cache has an entry with the same hash.
    #[error("the cache has the entry already, and the entry is {}", if *ready { "ready" } else { "filling" })]
    Known {
        /// True if the entry is committed; false if another reservation is filling it.
        ready: bool,
    },
}

/// Why [`pin`](super::EncoderCache::pin) found no committed entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
pub enum Absent {
    /// The cache has no entry with the hash.
    #[error("the cache does not have the entry")]
    Missing,
    /// The entry is reserved and not committed yet: another try may find it.
    #[error("the entry is not ready yet")]
    NotReady,
}
