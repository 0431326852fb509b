//! What an allocator does, and what it refuses.

use kv_core::{PageList, PagePool, Pages};

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

    /// The pages whose `Pages` were dropped instead of freed, in the order of the losses. They stay
    /// allocated, because a data operation may still touch them.
    fn lost(&self) -> PageList;
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
    /// A page is free already, and the `Pages` are of another pool.
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
    /// A page that is allocated, in `Pages` that this allocator has not made.
    #[error("page {page} is allocated, and these pages are of another pool")]
    OtherToken {
        /// The page.
        page: u32,
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

impl FreeReason {
    /// What is wrong with pages that another pool has made.
    pub(super) fn of_stranger(pages: &Pages, pool: &PagePool) -> FreeReason {
        let (range, list) = (pool.range(), pages.list());
        let (first, end) = (range.start, range.end);
        // `Pages` that are refused have a page.
        let some = list.iter().next().unwrap_or(first);
        let foreign = list.iter().find(|page| !range.contains(page));
        let free = || list.iter().find(|&page| !pool.is_out(page));
        match foreign {
            Some(page) => FreeReason::Foreign { page, first, end },
            None => {
                free().map_or(FreeReason::OtherToken { page: some }, |page| FreeReason::AlreadyFree { page })
            }
        }
    }
}
