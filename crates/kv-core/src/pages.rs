//! The ownership of pages of a cache, as a value that moves: [`Pages`].

use std::fmt;
use std::sync::Arc;

use crate::page_ledger::Ledger;
use crate::page_list::{MAX_PAGES, PageList, PageRun};

/// Ownership of distinct pages of one cache: a value that moves, and is never copied.
///
/// `Pages` are made by a [`PagePool`](crate::PagePool), on its own or inside of an allocator. A transfer
/// takes `Pages` in, and hands them back when no data operation can touch the pages any more. Who has the
/// `Pages` may write the pages and may free them; nobody else may. If `Pages` are dropped instead of given
/// back, their pool counts and names the pages that were lost: see [`PagePool::lost`](crate::PagePool::lost).
///
/// Two `Pages` are equal if they name the same pages in the same order.
///
/// A session owns the pages that it was given, so the compiler refuses their use in the meantime:
///
/// ```compile_fail,E0382
/// # use kv_core::{Backpressure, KvSender, Pages};
/// fn send(sender: &mut dyn KvSender, pages: Pages) -> Result<usize, Backpressure<Pages>> {
///     sender.send(pages)?;
///     Ok(pages.len())
/// }
/// ```
#[must_use = "dropping pages leaks them: give them back to their allocator"]
#[derive(Default)]
pub struct Pages {
    list: PageList,
    /// The books of the pool that made this value. `None` if the value owns no page, is a mirror, or is
    /// `unpooled`.
    ledger: Option<Arc<Ledger>>,
}

impl Pages {
    /// No pages.
    pub fn none() -> Pages {
        Pages::default()
    }

    /// The pages that a pool has marked as out.
    pub(crate) fn of(list: PageList, ledger: &Arc<Ledger>) -> Pages {
        Pages { list, ledger: Some(Arc::clone(ledger)) }
    }

    /// True if the pool with this ledger can take the pages back.
    pub(crate) fn is_of(&self, ledger: &Arc<Ledger>) -> bool {
        self.is_empty() || self.ledger.as_ref().is_some_and(|own| Arc::ptr_eq(own, ledger))
    }

    /// `Pages` that no pool has made, and none takes back: for simulators and tests, which may give the same
    /// pages to two owners on purpose.
    #[doc(hidden)]
    #[cfg(any(test, feature = "unpooled"))]
    pub fn unpooled(list: PageList) -> Result<Pages, crate::error::PagesError> {
        list.check_distinct()?;
        Ok(Pages { list, ledger: None })
    }

    /// The list of the pages, which nobody owns from then on.
    pub(crate) fn into_list(mut self) -> PageList {
        std::mem::take(&mut self.list)
    }

    /// The pages with the same numbers in the cache of another rank of an engine group, which has one
    /// allocator for the caches of all ranks.
    ///
    /// No pool takes a mirror back, and a mirror that is dropped is no loss: only the original counts.
    #[doc(hidden)]
    pub fn mirror(&self) -> Pages {
        Pages { list: self.list.clone(), ledger: None }
    }

    /// The pages, in order.
    pub fn list(&self) -> &PageList {
        &self.list
    }

    /// How many pages.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if there is no page.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// True if one pool has made both, or no pool either of them.
    pub fn is_of_same_pool(&self, other: &Pages) -> bool {
        match (&self.ledger, &other.ledger) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        }
    }

    /// `Pages` without a page, which are [of the same pool](Pages::is_of_same_pool) as these.
    pub fn none_of_pool(&self) -> Pages {
        Pages { list: PageList::default(), ledger: self.ledger.clone() }
    }

    /// Appends the pages of `other`, in order. Two `Pages` of one pool never share a page, so the pages of the
    /// result are distinct. If `other` is of another pool, or the sum exceeds [`MAX_PAGES`], `other` comes
    /// back untouched, and `self` stays as it was. `Pages` without a page take any `other`.
    pub fn append(&mut self, mut other: Pages) -> Result<(), Pages> {
        if self.is_empty() {
            *self = other;
            return Ok(());
        }
        if !(self.is_of_same_pool(&other) || other.is_empty())
            || self.len() + other.len() > MAX_PAGES as usize
        {
            return Err(other);
        }
        for run in std::mem::take(&mut other.list).runs() {
            // Each run was valid in `other` and the sum is within bounds.
            if self.list.push(*run).is_err() {
                debug_assert!(false, "a run of valid pages was refused");
            }
        }
        Ok(())
    }

    /// Cuts off the pages from position `at` on. `at` beyond the end cuts off nothing.
    pub fn split_off(&mut self, at: usize) -> Pages {
        let mut head = PageList::default();
        let mut tail = PageList::default();
        let mut left = u32::try_from(at).unwrap_or(u32::MAX);
        for run in self.list.runs() {
            let here = run.len.min(left);
            left -= here;
            let parts = [
                (&mut head, PageRun { start: run.start, len: here }),
                (&mut tail, PageRun { start: run.start + here, len: run.len - here }),
            ];
            for (list, part) in parts {
                if list.push(part).is_err() {
                    debug_assert!(false, "a part of valid pages was refused");
                }
            }
        }
        self.list = head;
        Pages { list: tail, ledger: self.ledger.clone() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.as_ref().filter(|_| !self.list.is_empty()) {
            ledger.lose(&self.list);
        }
    }
}

/// A model checker copies whole machines. What the copies drop is no loss: they hold mirrors.
#[cfg(feature = "model")]
impl Clone for Pages {
    fn clone(&self) -> Pages {
        self.mirror()
    }
}

/// Without that checker, no `Pages` can be copied:
///
/// ```compile_fail,E0599
/// # use kv_core::Pages;
/// fn two_owners(pages: Pages) -> (Pages, Pages) {
///     (pages.clone(), pages)
/// }
/// ```
#[cfg(all(doctest, not(feature = "model")))]
struct NoTwoOwners;

impl PartialEq for Pages {
    fn eq(&self, other: &Pages) -> bool {
        self.list == other.list
    }
}

impl Eq for Pages {}

impl AsRef<PageList> for Pages {
    fn as_ref(&self) -> &PageList {
        &self.list
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages{:?}", self.list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_pool::PagePool;

    fn list(pages: &[u32]) -> PageList {
        PageList::from_pages(pages.iter().copied()).unwrap()
    }

    #[test]
    fn pages_never_grow_beyond_the_most_pages_of_a_list() {
        let all = PageList::from_runs([PageRun { start: 0, len: MAX_PAGES - 1 }]).unwrap();
        // The pages of one pool are never too many.
        let mut all = Pages::unpooled(all).unwrap();
        let one = |page| Pages::unpooled(list(&[page])).unwrap();
        assert_eq!(all.append(one(MAX_PAGES)), Ok(()));
        assert_eq!(all.append(one(MAX_PAGES + 1)), Err(one(MAX_PAGES + 1)));
        assert_eq!(all.len(), MAX_PAGES as usize);
    }

    #[test]
    fn split_and_append_are_inverse() {
        let pool = PagePool::new(10);
        for at in 0..=7 {
            let mut head = pool.adopt(list(&[4, 5, 6, 2, 3, 9])).unwrap();
            let tail = head.split_off(at);
            assert_eq!(head.len(), at.min(6));
            head.append(tail).unwrap();
            assert_eq!(pool.release(head), Ok(list(&[4, 5, 6, 2, 3, 9])));
        }
        assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));
    }

    #[test]
    fn pages_of_two_pools_are_never_joined() {
        let (one, two) = (PagePool::new(4), PagePool::new(4));
        let mut mine = one.adopt(list(&[1])).unwrap();
        let theirs = mine.append(two.adopt(list(&[2])).unwrap()).unwrap_err();
        let mirror = mine.append(theirs.mirror()).unwrap_err();
        assert_eq!((mirror.len(), mine.list()), (1, &list(&[1])));
        mine.append(Pages::none()).unwrap();
        mine.append(two.adopt(list(&[])).unwrap()).unwrap();
        let mut empty = Pages::none();
        empty.append(theirs).unwrap();
        assert_eq!(two.release(empty), Ok(list(&[2])));
        assert_eq!(one.release(mine), Ok(list(&[1])));
    }

    #[test]
    fn a_mirror_is_no_owner_and_its_drop_is_no_loss() {
        let pool = PagePool::new(4);
        let pages = pool.adopt(list(&[1, 3])).unwrap();
        let mirror = pages.mirror();
        assert_eq!(mirror, pages);
        let mirror = pool.release(mirror).unwrap_err().pages;
        drop(mirror);
        assert_eq!((pool.num_out(), pool.lost().len()), (2, 0));
        pool.release(pages).unwrap();
    }
}
