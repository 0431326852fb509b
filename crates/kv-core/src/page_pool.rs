//! The pool of a cache's pages: the only source of [`Pages`], and their end.

use std::ops::Range;
use std::sync::Arc;

use crate::page_ledger::{AdoptError, Ledger};
use crate::page_list::PageList;
use crate::pages::Pages;

/// The pages of one cache, or of a part of a cache, and which of them are out: owned by some [`Pages`].
///
/// A pool does not choose pages: an allocator does, the server's own or one of this project's, and hands
/// its choice to the pool. While a page is out, the pool refuses to hand the page out again, so no page has
/// two owners.
///
/// `Pages` that are dropped instead of released are a loss. Their pages stay out, because a data operation
/// may still touch them, and [`lost`](PagePool::lost) names the pages until
/// [`recover_lost`](PagePool::recover_lost).
///
/// A pool may be used from several threads. Adopting and releasing cost a few steps per run of pages, and
/// one step per 64 pages of a run.
///
/// ```
/// use kv_core::{AdoptError, PageList, PagePool};
///
/// let pool = PagePool::new(8);
/// // The server's allocator has picked pages 4, 5 and 2.
/// let pages = pool.adopt(PageList::from_pages([4, 5, 2])?)?;
/// assert_eq!(pool.adopt(PageList::from_pages([1, 5])?), Err(AdoptError::AlreadyOut { page: 5 }));
///
/// // A transfer took the `Pages` and gave them back. They may be picked again.
/// assert_eq!(pool.release(pages)?, PageList::from_pages([4, 5, 2])?);
/// assert_eq!(pool.num_out(), 0);
///
/// // The pool knows the pages that nobody gave back.
/// drop(pool.adopt(PageList::from_pages([7])?)?);
/// assert_eq!((pool.lost(), pool.num_out()), (PageList::from_pages([7])?, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `Pages` can be given away once only:
///
/// ```compile_fail,E0382
/// # use kv_core::{PageList, PagePool};
/// let pool = PagePool::new(8);
/// let pages = pool.adopt(PageList::from_pages([4])?)?;
/// pool.release(pages)?;
/// pool.release(pages)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PagePool {
    ledger: Arc<Ledger>,
}

/// Pages that a pool did not take back, because they are another pool's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("pages {:?} are not of this pool", pages.list())]
#[non_exhaustive]
pub struct ReleaseError {
    /// The pages, untouched.
    pub pages: Pages,
}

impl PagePool {
    /// A pool of the pages of a whole cache: pages 0 to before `num_pages`, of which the first
    /// [`MAX_PAGES`](crate::MAX_PAGES) count.
    pub fn new(num_pages: u32) -> PagePool {
        PagePool::over(0..num_pages)
    }

    /// A pool of the pages of `range`, of which the first [`MAX_PAGES`](crate::MAX_PAGES) count: for a
    /// server that keeps some pages of its cache for itself.
    pub fn over(range: Range<u32>) -> PagePool {
        PagePool { ledger: Arc::new(Ledger::new(range)) }
    }

    /// The pages of the pool.
    pub fn range(&self) -> Range<u32> {
        self.ledger.range()
    }

    /// Makes the `Pages` that an allocator has picked, in the order of the list: from now on they are out.
    pub fn adopt(&self, list: PageList) -> Result<Pages, AdoptError> {
        self.ledger.take(&list)?;
        Ok(Pages::of(list, &self.ledger))
    }

    /// Takes pages back: they are no longer out, and may be adopted again. Pages of another pool come back in
    /// the error.
    pub fn release(&self, pages: Pages) -> Result<PageList, ReleaseError> {
        if !pages.is_of(&self.ledger) {
            return Err(ReleaseError { pages });
        }
        let list = pages.into_list();
        self.ledger.give_back(&list);
        Ok(list)
    }

    /// True if the page was adopted, and was not released.
    pub fn is_out(&self, page: u32) -> bool {
        self.ledger.is_out(page)
    }

    /// How many pages are out, lost ones included.
    pub fn num_out(&self) -> usize {
        self.ledger.num_out()
    }

    /// The pages whose `Pages` were dropped, in the order of the losses. Lost pages are out.
    pub fn lost(&self) -> PageList {
        self.ledger.lost()
    }

    /// Makes the `Pages` of all lost pages, which then are lost no longer.
    ///
    /// The pool cannot know whether a data operation may still touch the pages. The caller must: for example
    /// because every worker that had registered the cache has stopped, and all of their peers have ended.
    pub fn recover_lost(&self) -> Pages {
        Pages::of(self.ledger.take_lost(), &self.ledger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_list::{MAX_PAGES, PageRun};

    fn list(pages: &[u32]) -> PageList {
        PageList::from_pages(pages.iter().copied()).unwrap()
    }

    #[test]
    fn a_page_that_is_out_is_not_adopted_again_until_it_is_released() {
        let pool = PagePool::new(200);
        let first = pool.adopt(list(&[3, 70, 71, 9])).unwrap();
        for page in [3, 70, 71, 9] {
            assert!(pool.is_out(page));
            // Neither page 100 nor page 5 is out after the refusal.
            assert_eq!(pool.adopt(list(&[100, 5, page])), Err(AdoptError::AlreadyOut { page }));
            assert!(!pool.is_out(100) && !pool.is_out(5));
        }
        let long = PageList::from_runs([PageRun { start: 10, len: 100 }]).unwrap();
        assert_eq!(pool.adopt(long.clone()), Err(AdoptError::AlreadyOut { page: 70 }));
        assert_eq!((pool.num_out(), pool.is_out(10), pool.is_out(69)), (4, false, false));
        assert_eq!(pool.release(first), Ok(list(&[3, 70, 71, 9])));
        assert_eq!(pool.num_out(), 0);
        let again = pool.adopt(long).unwrap();
        assert_eq!((again.len(), pool.num_out()), (100, 100));
        pool.release(again).unwrap();
        assert!(pool.lost().is_empty());
    }

    #[test]
    fn a_list_that_names_a_page_twice_is_refused_and_leaves_nothing_out() {
        let pool = PagePool::new(8);
        assert_eq!(pool.adopt(list(&[1, 2, 1])), Err(AdoptError::Twice { page: 1 }));
        assert_eq!(pool.adopt(list(&[5, 3, 4, 5])), Err(AdoptError::Twice { page: 5 }));
        assert_eq!(pool.num_out(), 0);
        let all = pool.adopt(list(&[7, 6, 5, 4, 3, 2, 1, 0])).unwrap();
        assert_eq!((all.len(), pool.num_out()), (8, 8));
        pool.release(all).unwrap();
    }

    #[test]
    fn a_page_beyond_the_pool_is_refused_with_the_bounds() {
        let pool = PagePool::over(8..18);
        let refused = |page| Err(AdoptError::OutOfRange { page, first: 8, end: 18 });
        for (pages, page) in [(vec![2], 2), (vec![18], 18), (vec![9, 16, 17, 18], 18), (vec![12, 900], 900)] {
            assert_eq!(pool.adopt(list(&pages)), refused(page));
        }
        assert_eq!((pool.num_out(), pool.is_out(18), pool.is_out(2)), (0, false, false));
        assert_eq!(pool.release(pool.adopt(list(&[17, 8])).unwrap()), Ok(list(&[17, 8])));
        assert_eq!(PagePool::new(u32::MAX).range(), 0..MAX_PAGES);
        assert_eq!(PagePool::over(u32::MAX - 3..u32::MAX).range().len(), 3);
        assert_eq!(PagePool::over(std::ops::Range { start: 9, end: 3 }).range().len(), 0);
    }

    #[test]
    fn pages_of_another_pool_come_back_and_stay_out_there() {
        let (mine, other) = (PagePool::new(8), PagePool::new(8));
        let (my_pages, theirs) = (mine.adopt(list(&[1])).unwrap(), other.adopt(list(&[1])).unwrap());
        let theirs = mine.release(theirs).unwrap_err().pages;
        assert_eq!((mine.num_out(), other.num_out(), other.lost().len()), (1, 1, 0));
        assert_eq!(other.release(theirs), Ok(list(&[1])));
        assert_eq!(mine.release(my_pages), Ok(list(&[1])));
        assert_eq!(mine.release(Pages::none()), Ok(PageList::default()));
    }

    #[test]
    fn dropped_pages_are_lost_and_named_and_stay_out() {
        let pool = PagePool::new(16);
        let mut kept = pool.adopt(list(&[4, 5, 6, 2])).unwrap();
        drop(kept.split_off(2));
        drop(pool.adopt(list(&[9])).unwrap());
        drop(pool.adopt(list(&[])).unwrap());
        assert_eq!((pool.lost(), pool.num_out()), (list(&[6, 2, 9]), 5));
        assert_eq!(pool.adopt(list(&[2])), Err(AdoptError::AlreadyOut { page: 2 }));
        pool.release(kept).unwrap();
        assert_eq!((pool.lost(), pool.num_out()), (list(&[6, 2, 9]), 3));
        let back = pool.recover_lost();
        assert_eq!((back.list(), pool.lost()), (&list(&[6, 2, 9]), PageList::default()));
        assert_eq!(pool.adopt(list(&[2])), Err(AdoptError::AlreadyOut { page: 2 }));
        pool.release(back).unwrap();
        assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));
    }

    #[test]
    fn pages_outlive_their_pool_and_may_be_lost_on_any_thread() {
        fn goes_anywhere<T: Send + Sync>(of_any_thread: T) -> T {
            of_any_thread
        }
        let pool = goes_anywhere(PagePool::new(4));
        drop(goes_anywhere(pool.adopt(list(&[1, 2])).unwrap()));
        assert_eq!(pool.lost(), list(&[1, 2]));
        let orphan = PagePool::new(4).adopt(list(&[3])).unwrap();
        assert_eq!(orphan.list(), &list(&[3]));
    }
}
