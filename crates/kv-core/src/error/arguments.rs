//! Arguments that cannot be: an id, a list of pages.

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
