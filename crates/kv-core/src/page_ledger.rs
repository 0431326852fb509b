//! What a pool knows of its pages: which are out, and which of those were lost.
//!
//! The pool and all `Pages` that the pool has made share the ledger, so that `Pages` can note their own loss
//! when they are dropped. The lock is held for a few steps per run of pages, and never across code of a caller.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::page_list::{MAX_PAGES, PageList, PageRun};

/// The pages of one pool.
#[derive(Debug)]
pub(crate) struct Ledger {
    range: Range<u32>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    /// One bit for each page of the range: set while the page is out.
    out: Vec<u64>,
    num_out: usize,
    /// Pages that are out and that no `Pages` owns, in the order of their loss.
    lost: PageList,
}

/// Why a pool did not adopt a list of pages. Nothing has changed in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// The pool does not have a page of the list.
    #[error("page {page} is out of range: the pool has pages {first} to before {end}")]
    OutOfRange {
        /// The first page of the list that the pool does not have.
        page: u32,
        /// The first page of the pool.
        first: u32,
        /// The page after the last one of the pool.
        end: u32,
    },
    /// A page of the list has an owner: the page was adopted, and was not released.
    #[error("page {page} is out already")]
    AlreadyOut {
        /// The first page of the list that is out.
        page: u32,
    },
    /// The list names a page twice.
    #[error("page {page} is named twice")]
    Twice {
        /// The first page that the list names again.
        page: u32,
    },
}

impl Ledger {
    /// A range of at most [`MAX_PAGES`] pages, none of them out.
    pub(crate) fn new(range: Range<u32>) -> Ledger {
        let end = range.end.max(range.start);
        let range = range.start..end.min(range.start.saturating_add(MAX_PAGES));
        let books = Books { out: vec![0; range.len().div_ceil(64)], num_out: 0, lost: PageList::default() };
        Ledger { range, books: Mutex::new(books) }
    }

    pub(crate) fn range(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Marks all listed pages as out or, with an error, none of them.
    pub(crate) fn take(&self, list: &PageList) -> Result<(), AdoptError> {
        let Range { start: first, end } = self.range;
        for run in list.runs() {
            if run.start < first || run.start >= end {
                return Err(AdoptError::OutOfRange { page: run.start, first, end });
            }
            if run.end() > end {
                return Err(AdoptError::OutOfRange { page: end, first, end });
            }
        }
        let mut books = self.books();
        for (at, run) in list.runs().iter().enumerate() {
            let Some(page) = books.set(self.bits(run)) else { continue };
            for earlier in list.runs().iter().take(at) {
                books.clear(self.bits(earlier));
            }
            let page = first + page;
            return Err(match books.is_set(page - first) {
                true => AdoptError::AlreadyOut { page },
                false => AdoptError::Twice { page },
            });
        }
        books.num_out += list.len();
        Ok(())
    }

    /// Marks pages as in that [`take`](Ledger::take) had marked as out.
    pub(crate) fn give_back(&self, list: &PageList) {
        let mut books = self.books();
        for run in list.runs() {
            books.clear(self.bits(run));
        }
        books.num_out -= list.len();
    }

    /// Notes that the owner of these pages was dropped: the pages stay out.
    pub(crate) fn lose(&self, list: &PageList) {
        let mut books = self.books();
        for run in list.runs() {
            let noted = books.lost.push(*run);
            debug_assert!(noted.is_ok(), "a pool has lost more pages than it has");
        }
    }

    pub(crate) fn lost(&self) -> PageList {
        self.books().lost.clone()
    }

    /// Forgets that pages were lost, and says which.
    pub(crate) fn take_lost(&self) -> PageList {
        std::mem::take(&mut self.books().lost)
    }

    pub(crate) fn num_out(&self) -> usize {
        self.books().num_out
    }

    pub(crate) fn is_out(&self, page: u32) -> bool {
        self.range.contains(&page) && self.books().is_set(page - self.range.start)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // No code of a caller runs under the lock, so a panic elsewhere has left nothing half done.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bits of a run that lies in the range.
    fn bits(&self, run: &PageRun) -> Range<u32> {
        run.start - self.range.start..run.end() - self.range.start
    }
}

impl Books {
    /// Sets bits that are all clear, or says which of them is not, and sets none.
    fn set(&mut self, bits: Range<u32>) -> Option<u32> {
        for (word, mask) in words(bits.clone()) {
            let taken = self.out[word] & mask;
            if taken != 0 {
                return Some(word as u32 * 64 + taken.trailing_zeros());
            }
        }
        words(bits).for_each(|(word, mask)| self.out[word] |= mask);
        None
    }

    fn clear(&mut self, bits: Range<u32>) {
        words(bits).for_each(|(word, mask)| self.out[word] &= !mask);
    }

    fn is_set(&self, bit: u32) -> bool {
        self.out[bit as usize / 64] & 1 << (bit % 64) != 0
    }
}

/// The words that bits lie in, with the bits of each; there is at least one bit.
fn words(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / 64..bits.end.div_ceil(64)).map(move |word| {
        let low = bits.start.saturating_sub(word * 64);
        let high = (bits.end - word * 64).min(64);
        (word as usize, (u64::MAX >> (64 - (high - low))) << low)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_cover_each_bit_of_a_range_exactly_once() {
        for start in [0, 1, 62, 63, 64, 65, 127, 128] {
            for end in start + 1..start + 200 {
                let mut covered = Vec::new();
                for (word, mask) in words(start..end) {
                    covered
                        .extend((0..64).filter(|bit| mask & 1 << bit != 0).map(|bit| word as u32 * 64 + bit));
                }
                assert_eq!(covered, (start..end).collect::<Vec<_>>());
            }
        }
    }
}
