//! A worker's description of itself that cannot be.

use super::arguments::IdError;

/// A [`KvArgs`](crate::KvArgs) that cannot be: found once, when it is built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// A number outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        got: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// Parallel lists of different length (`kv_data_ptrs`, `kv_data_lens`, `kv_item_lens`).
    #[error("{left_field} has {left} entries, {right_field} has {right}")]
    ListLengths {
        /// One list.
        left_field: &'static str,
        /// Its length.
        left: usize,
        /// The other list.
        right_field: &'static str,
        /// Its length.
        right: usize,
    },
    /// A region that wraps around the address space, or starts at null.
    #[error("region {region}: address {addr:#x} with length {len} is no memory")]
    RegionAddress {
        /// Position in the list of regions.
        region: usize,
        /// Its address.
        addr: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap")]
    RegionOverlap {
        /// One region.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A bad id.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A field that has no default was not set.
    #[error("{field} was not set")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// The layout cannot be that of a cache.
    #[error(transparent)]
    Layout(#[from] crate::layout::GeometryError),
}
