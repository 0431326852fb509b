//! Errors in a worker's description of its own memory and limits.

use super::id::IdError;

/// Why a [`KvArgs`](crate::KvArgs) cannot be built.
/// [`KvArgsBuilder::build`](crate::KvArgsBuilder::build) finds all of these errors; the
/// configuration must be corrected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// A number is outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The name of the field.
        field: &'static str,
        /// The value that was given.
        got: u64,
        /// The smallest value allowed.
        min: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// Two lists that must be equally long are not (`kv_data_ptrs`, `kv_data_lens`,
    /// `kv_item_lens`).
    #[error("{left_field} has {left} entries, {right_field} has {right}")]
    ListLengths {
        /// The name of one list.
        left_field: &'static str,
        /// How many entries that list has.
        left: usize,
        /// The name of the other list.
        right_field: &'static str,
        /// How many entries the other list has.
        right: usize,
    },
    /// A region wraps around the address space, or begins at address zero.
    #[error("region {region}: address {addr:#x} with length {len} is not a range of memory")]
    RegionAddress {
        /// Position in the list of regions.
        region: usize,
        /// The address of the region's first byte.
        addr: u64,
        /// The length of the region in bytes.
        len: u64,
    },
    /// Two regions of the same memory share bytes.
    #[error("regions {first} and {second} overlap")]
    RegionOverlap {
        /// Position of one region in the list.
        first: usize,
        /// Position of the other region in the list.
        second: usize,
    },
    /// The engine id is empty, too long, or contains a control character.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A field that has no default was not set.
    #[error("{field} was not set")]
    Missing {
        /// The name of the field.
        field: &'static str,
    },
    /// The geometry breaks a rule that every peer checks, too.
    #[error(transparent)]
    Layout(#[from] crate::layout::GeometryError),
}
