//! Arguments that cannot be: an id, a list of pages, a worker's description of itself.

/// A bad id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// Empty or too long.
    #[error("{field} has {got} bytes; allowed are 1 to {max}")]
    Length {
        /// Which id.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A control character would break logs and headers.
    #[error("{field} contains a control character")]
    ControlCharacter {
        /// Which id.
        field: &'static str,
    },
}

/// A bad list of pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A run ends beyond the largest page number.
    #[error("a run of {len} pages from page {start} exceeds the largest page number")]
    Overflow {
        /// First page of the run.
        start: u32,
        /// Its length.
        len: u32,
    },
    /// More pages than a list may name.
    #[error("{got} pages in one list; at most {max} are allowed")]
    TooMany {
        /// How many were named.
        got: u64,
        /// The bound.
        max: u32,
    },
    /// A page that the cache does not have.
    #[error("page {page} is out of range: the cache has {num_pages} pages")]
    OutOfRange {
        /// The page.
        page: u32,
        /// How many pages there are.
        num_pages: u32,
    },
    /// A page named twice, where each may occur once.
    #[error("page {page} is named twice")]
    Twice {
        /// The page.
        page: u32,
    },
}

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
