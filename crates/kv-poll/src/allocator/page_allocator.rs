//! What an allocator does, and what it refuses.

use kv_core::Pages;

/// Hands out the pages of one cache, and takes them back.
pub trait PageAllocator {
    /// How many pages there are.
    fn capacity(&self) -> usize;

    /// How many of them are free.
    fn available(&self) -> usize;

    /// Takes `n` pages; `None`, and nothing taken, if fewer are free. Zero pages are always there.
    fn allocate(&mut self, n: usize) -> Option<Pages>;

    /// Takes pages back. All of them or, with an error, none.
    fn free(&mut self, pages: Pages) -> Result<(), FreeError>;
}

/// Pages that were not taken back, and why. Whoever holds them is mistaken about their owner: log
/// it, and do not write to them.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("pages were not taken back: {reason}")]
pub struct FreeError {
    /// The pages, all of them.
    pub pages: Pages,
    /// The first thing wrong with them.
    pub reason: FreeReason,
}

/// What is wrong with pages that are given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreeReason {
    /// A page is free already: it was given back twice.
    #[error("page {page} is free already")]
    AlreadyFree {
        /// The page.
        page: u32,
    },
    /// A page of another cache.
    #[error("page {page} is not of this cache, which has pages {first} to before {end}")]
    Foreign {
        /// The page.
        page: u32,
        /// First page of this cache.
        first: u32,
        /// The page after the last.
        end: u32,
    },
    /// More pages than the caller holds: some of them belong to a transfer.
    #[error("{given} pages given back, but only {held} are out")]
    NotHeld {
        /// How many were given back.
        given: usize,
        /// How many are out.
        held: usize,
    },
}
