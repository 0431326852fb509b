//! A stack of free pages.

use std::ops::Range;

use kv_core::{PageList, PagePool, Pages, ReleaseError};

use super::page_allocator::{FreeError, FreeReason, PageAllocator};

/// The free list that most engines use: last freed, first allocated.
///
/// Pages come out in whatever order they went in, so after some churn a request's pages are
/// scattered; [`RunAllocator`](super::RunAllocator) avoids that. Cost: O(1) per page.
#[derive(Debug)]
pub struct FreeList {
    /// Makes the `Pages`, and knows which pages are out: those that are not in the stack.
    pool: PagePool,
    stack: Vec<u32>,
}

impl FreeList {
    /// All of a cache of `num_pages` pages (at most [`MAX_PAGES`](kv_core::MAX_PAGES)), all free.
    pub fn new(num_pages: u32) -> FreeList {
        FreeList::over(0..num_pages)
    }

    /// The pages of `range` (at most [`MAX_PAGES`](kv_core::MAX_PAGES) of them), all free: a server may keep the first
    /// pages for itself.
    pub fn over(range: Range<u32>) -> FreeList {
        let pool = PagePool::over(range);
        FreeList { stack: pool.range().rev().collect(), pool }
    }
}

impl PageAllocator for FreeList {
    fn capacity(&self) -> usize {
        self.pool.range().len()
    }

    fn available(&self) -> usize {
        self.stack.len()
    }

    fn allocate(&mut self, n: usize) -> Option<Pages> {
        let keep = self.stack.len().checked_sub(n)?;
        let taken = self.stack.iter().skip(keep).rev().copied();
        let pages = self.pool.adopt(PageList::from_pages(taken).ok()?).ok()?;
        self.stack.truncate(keep);
        Some(pages)
    }

    fn free(&mut self, pages: Pages) -> Result<(), FreeError> {
        let list = match self.pool.release(pages) {
            Ok(list) => list,
            Err(ReleaseError { pages, .. }) => {
                let reason = FreeReason::of_stranger(&pages, &self.pool);
                return Err(FreeError { pages, reason });
            }
        };
        let top = self.stack.len();
        self.stack.extend(list.iter());
        // The first of the pages is the first to be allocated again.
        self.stack[top..].reverse();
        Ok(())
    }

    fn lost(&self) -> PageList {
        self.pool.lost()
    }
}
