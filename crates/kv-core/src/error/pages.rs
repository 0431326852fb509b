//! Errors in a list of pages.

/// Why a list of pages is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A run ends beyond the largest page number.
    #[error("a run of {len} pages from page {start} exceeds the largest page number")]
    Overflow {
        /// The first page of the run.
        start: u32,
        /// The number of pages in the run.
        len: u32,
    },
    /// The list names more pages than one list may.
    #[error("{got} pages in one list; at most {max} are allowed")]
    TooMany {
        /// How many pages were named.
        got: u64,
        /// The most pages that one list may name.
        max: u32,
    },
    /// The list names a page that the cache does not have.
    #[error("page {page} is out of range: the cache has {num_pages} pages")]
    OutOfRange {
        /// The number of that page.
        page: u32,
        /// How many pages the cache has; the last one is `num_pages - 1`.
        num_pages: u32,
    },
    /// The list names a page twice, where every page may occur once.
    #[error("page {page} is named twice")]
    Twice {
        /// The number of that page.
        page: u32,
    },
}
