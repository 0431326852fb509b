//! Free pages as runs: few, long pieces instead of many pages.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kv_core::{PageList, PagePool, PageRun, Pages, ReleaseError};

use super::page_allocator::{FreeError, FreeReason, PageAllocator};

/// Allocates few, long runs: the cost of a transfer is per descriptor, and a run of neighbouring
/// pages is one descriptor a region.
///
/// Best fit: the smallest free run that holds the whole request; if none does, the largest free
/// runs are used up one after the other, and the best fit serves the rest. Runs merge with their
/// neighbours when freed. Cost: O(log r) for each run taken or freed, with r free runs.
#[derive(Debug)]
pub struct RunAllocator {
    /// Makes the `Pages`, and knows which pages are out: those that are in no free run.
    pool: PagePool,
    available: usize,
    /// Free runs: first page → length. No two touch.
    by_start: BTreeMap<u32, u32>,
    /// The same runs as (length, first page).
    by_len: BTreeSet<(u32, u32)>,
}

impl RunAllocator {
    /// All of a cache of `num_pages` pages (at most [`MAX_PAGES`](kv_core::MAX_PAGES)), all free.
    pub fn new(num_pages: u32) -> RunAllocator {
        RunAllocator::over(0..num_pages)
    }

    /// The pages of `range` (at most [`MAX_PAGES`](kv_core::MAX_PAGES) of them), all free: a server may keep the first
    /// pages for itself.
    pub fn over(range: Range<u32>) -> RunAllocator {
        let pool = PagePool::over(range);
        let range = pool.range();
        let mut allocator =
            RunAllocator { available: range.len(), pool, by_start: BTreeMap::new(), by_len: BTreeSet::new() };
        if !range.is_empty() {
            allocator.insert(PageRun { start: range.start, len: range.end - range.start });
        }
        allocator
    }

    /// How many runs the free pages form: 1 is an unfragmented cache.
    pub fn free_runs(&self) -> usize {
        self.by_start.len()
    }

    /// True if the page is free.
    pub fn is_free(&self, page: u32) -> bool {
        self.before(page.saturating_add(1)).is_some_and(|run| page < run.end())
    }

    /// The smallest run of at least `need` pages, or else the largest of all.
    fn best(&self, need: u32) -> Option<PageRun> {
        let fitting = self.by_len.range((need, 0)..).next();
        let (len, start) = fitting.or_else(|| self.by_len.last())?;
        Some(PageRun { start: *start, len: *len })
    }

    fn insert(&mut self, run: PageRun) {
        self.by_start.insert(run.start, run.len);
        self.by_len.insert((run.len, run.start));
    }

    fn remove(&mut self, run: PageRun) {
        self.by_start.remove(&run.start);
        self.by_len.remove(&(run.len, run.start));
    }

    /// The last free run that starts before `page`.
    fn before(&self, page: u32) -> Option<PageRun> {
        self.by_start.range(..page).next_back().map(|(start, len)| PageRun { start: *start, len: *len })
    }

    /// The first free run that starts at `page` or later.
    fn from(&self, page: u32) -> Option<PageRun> {
        self.by_start.range(page..).next().map(|(start, len)| PageRun { start: *start, len: *len })
    }

    fn insert_merged(&mut self, mut run: PageRun) {
        if let Some(left) = self.before(run.start).filter(|left| left.end() == run.start) {
            self.remove(left);
            run = PageRun { start: left.start, len: left.len + run.len };
        }
        if let Some(right) = self.from(run.start).filter(|right| right.start == run.end()) {
            self.remove(right);
            run.len += right.len;
        }
        self.insert(run);
    }
}

impl PageAllocator for RunAllocator {
    fn capacity(&self) -> usize {
        self.pool.range().len()
    }

    fn available(&self) -> usize {
        self.available
    }

    fn allocate(&mut self, n: usize) -> Option<Pages> {
        let left = self.available.checked_sub(n)?;
        let mut need = u32::try_from(n).ok()?;
        let mut list = PageList::default();
        while need > 0 {
            let run = self.best(need)?;
            let taken = PageRun { start: run.start, len: run.len.min(need) };
            self.remove(run);
            if taken.len < run.len {
                self.insert(PageRun { start: taken.end(), len: run.len - taken.len });
            }
            list.push(taken).ok()?;
            need -= taken.len;
        }
        self.available = left;
        self.pool.adopt(list).ok()
    }

    fn free(&mut self, pages: Pages) -> Result<(), FreeError> {
        let list = match self.pool.release(pages) {
            Ok(list) => list,
            Err(ReleaseError { pages, .. }) => {
                let reason = FreeReason::of_stranger(&pages, &self.pool);
                return Err(FreeError { pages, reason });
            }
        };
        for run in list.runs() {
            self.insert_merged(*run);
        }
        self.available += list.len();
        Ok(())
    }

    fn lost(&self) -> PageList {
        self.pool.lost()
    }
}
