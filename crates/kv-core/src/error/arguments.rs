//! Errors in the arguments of a call: an id, or a list of pages.

/// Why a text is not accepted as an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// The id is empty or too long.
    #[error("{field} has {got} bytes; allowed are 1 to {max}")]
    Length {
        /// The name of the field: `engine_id`, `request_id` or `content_hash`.
        field: &'static str,
        /// The length of the text in bytes.
        got: usize,
        /// The longest id allowed, in bytes.
        max: usize,
    },
    /// The id contains a control character, which would break logs and headers.
    #[error("{field} contains a control character")]
    ControlCharacter {
        /// The name of the field: `engine_id`, `request_id` or `content_hash`.
        field: &'static str,
    },
}

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
