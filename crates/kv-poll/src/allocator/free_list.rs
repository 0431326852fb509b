//! A stack of free pages.

use std::ops::Range;

use kv_core::{PageList, Pages};

use super::page_allocator::{FreeError, FreeReason, PageAllocator};

/// The free list that most engines use: last freed, first allocated.
///
/// Pages come out in whatever order they went in, so after some churn a request's pages are
/// scattered; [`RunAllocator`](super::RunAllocator) avoids that. Cost: O(1) per page.
#[derive(Debug, Clone)]
pub struct FreeList {
    range: Range<u32>,
    stack: Vec<u32>,
    /// One bit per page: set while it is free.
    free: Vec<u64>,
}

impl FreeList {
    /// All of a cache of `num_pages` pages (at most [`MAX_PAGES`](kv_core::MAX_PAGES)), all free.
    pub fn new(num_pages: u32) -> FreeList {
        FreeList::over(0..num_pages)
    }

    /// The pages of `range` (at most [`MAX_PAGES`](kv_core::MAX_PAGES) of them), all free: a server may keep the first
    /// pages for itself.
    pub fn over(range: Range<u32>) -> FreeList {
        let range = super::run::bounded(range);
        let mut free = vec![0; range.len().div_ceil(64)];
        for index in 0..range.len() {
            free[index / 64] |= 1 << (index % 64);
        }
        FreeList { stack: range.clone().rev().collect(), range, free }
    }

    fn bit(&self, page: u32) -> (usize, u64) {
        let index = (page - self.range.start) as usize;
        (index / 64, 1 << (index % 64))
    }

    fn check(&self, pages: &Pages) -> Result<(), FreeReason> {
        for run in pages.list().runs() {
            super::run::check_range(run, &self.range)?;
        }
        for page in pages.list().iter() {
            let (word, bit) = self.bit(page);
            if self.free[word] & bit != 0 {
                return Err(FreeReason::AlreadyFree { page });
            }
        }
        Ok(())
    }
}

impl PageAllocator for FreeList {
    fn capacity(&self) -> usize {
        self.range.len()
    }

    fn available(&self) -> usize {
        self.stack.len()
    }

    fn allocate(&mut self, n: usize) -> Option<Pages> {
        let keep = self.stack.len().checked_sub(n)?;
        let taken = self.stack.iter().skip(keep).rev().copied();
        let pages = Pages::claim(PageList::from_pages(taken).ok()?).ok()?;
        self.stack.truncate(keep);
        for page in pages.list().iter() {
            let (word, bit) = self.bit(page);
            self.free[word] &= !bit;
        }
        Some(pages)
    }

    fn free(&mut self, pages: Pages) -> Result<(), FreeError> {
        if let Err(reason) = self.check(&pages) {
            return Err(FreeError { pages, reason });
        }
        for page in pages.list().iter() {
            let (word, bit) = self.bit(page);
            self.free[word] |= bit;
        }
        let top = self.stack.len();
        self.stack.extend(pages.list().iter());
        // The first page of the token is the first to be allocated again.
        self.stack[top..].reverse();
        Ok(())
    }
}
