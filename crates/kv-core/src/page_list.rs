//! Lists of pages of the KV cache, as runs. A list only names pages; [`Pages`](crate::Pages) own them.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::PagesError;
use crate::few::Few;
use crate::meter::{each, step};
use crate::packed::{self, OfRuns};

/// Most pages that one list may name: 2^24, a cache of 256 M tokens at 16 tokens a page.
pub const MAX_PAGES: u32 = 1 << 24;

/// `len` neighbouring pages from page `start` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    /// The number of the first page.
    pub start: u32,
    /// How many pages; at least one in a valid [`PageList`].
    pub len: u32,
}

impl PageRun {
    /// The first page after the run.
    pub const fn end(self) -> u32 {
        self.start.saturating_add(self.len)
    }
}

/// An ordered list of pages, as runs: page *i* of a request is the *i*-th page of its list.
///
/// Valid by construction: no empty run, neighbours merged, at most [`MAX_PAGES`] pages, no page
/// number over `u32::MAX - 1`. A list may name a page twice; [`Pages`](crate::Pages) may not.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct PageList {
    runs: Few<PageRun>,
    count: u32,
}

impl PageList {
    /// A list from runs, in order; empty runs vanish and neighbours merge.
    pub fn from_runs(runs: impl IntoIterator<Item = PageRun>) -> Result<PageList, PagesError> {
        let mut list = PageList::default();
        for run in runs {
            list.push(run)?;
        }
        Ok(list)
    }

    /// A list from single page numbers, in order.
    pub fn from_pages(pages: impl IntoIterator<Item = u32>) -> Result<PageList, PagesError> {
        PageList::from_runs(pages.into_iter().map(|start| PageRun { start, len: 1 }))
    }

    /// Appends a run; an empty run changes nothing.
    pub fn push(&mut self, run: PageRun) -> Result<(), PagesError> {
        step(1);
        if run.len == 0 {
            return Ok(());
        }
        if run.start.checked_add(run.len).is_none() {
            return Err(PagesError::Overflow { start: run.start, len: run.len });
        }
        let count = self.count.saturating_add(run.len);
        if count > MAX_PAGES {
            return Err(PagesError::TooMany {
                got: u64::from(self.count) + u64::from(run.len),
                max: MAX_PAGES,
            });
        }
        self.count = count;
        match self.runs.last_mut() {
            Some(last) if last.end() == run.start => last.len += run.len,
            _ => self.runs.push(run),
        }
        Ok(())
    }

    /// The runs, in order.
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// How many pages the list names, repetitions included.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// True if the list names no page.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Every page, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| each(run.start..run.end()))
    }

    /// The `len` pages from position `offset` on, as a list of their own; `None` if the list ends
    /// before.
    pub fn slice(&self, offset: usize, len: usize) -> Option<PageList> {
        if offset.checked_add(len)? > self.len() {
            return None;
        }
        let mut skip = u32::try_from(offset).ok()?;
        let mut left = u32::try_from(len).ok()?;
        let mut part = PageList::default();
        for run in each(self.runs.iter()) {
            let skipped = run.len.min(skip);
            let taken = (run.len - skipped).min(left);
            part.push(PageRun { start: run.start + skipped, len: taken }).ok()?;
            skip -= skipped;
            left -= taken;
            if left == 0 {
                break;
            }
        }
        Some(part)
    }

    /// Checks that every page lies below `num_pages`.
    pub fn check_below(&self, num_pages: u32) -> Result<(), PagesError> {
        match each(self.runs.iter()).find(|run| run.end() > num_pages) {
            Some(run) => Err(PagesError::OutOfRange { page: run.end() - 1, num_pages }),
            None => Ok(()),
        }
    }

    /// Checks that no page is named twice.
    pub fn check_distinct(&self) -> Result<(), PagesError> {
        if self.runs.len() <= 1 {
            return Ok(());
        }
        step(2 * self.runs.len());
        let mut sorted = self.runs.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0].end() > pair[1].start) {
            Some(pair) => Err(PagesError::Twice { page: pair[1].start }),
            None => Ok(()),
        }
    }
}

impl TryFrom<Vec<(u32, u32)>> for PageList {
    type Error = PagesError;
    fn try_from(runs: Vec<(u32, u32)>) -> Result<PageList, PagesError> {
        PageList::of_runs(runs.into_iter())
    }
}

/// Written as pairs of a start and a length in formats for people, and as packed bytes in binary
/// formats.
impl Serialize for PageList {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let runs = self.runs.iter().map(|run| (run.start, run.len));
        if out.is_human_readable() { out.collect_seq(runs) } else { packed::write(runs, out) }
    }
}

impl<'de> Deserialize<'de> for PageList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<PageList, D::Error> {
        if !from.is_human_readable() {
            return packed::deserialize(from);
        }
        let runs: Vec<(u32, u32)> = Vec::deserialize(from)?;
        PageList::try_from(runs).map_err(serde::de::Error::custom)
    }
}

impl OfRuns for PageList {
    type Run = (u32, u32);
    type Error = PagesError;

    fn of_runs(runs: impl Iterator<Item = (u32, u32)>) -> Result<PageList, PagesError> {
        PageList::from_runs(runs.map(|(start, len)| PageRun { start, len }))
    }
}

impl AsRef<PageList> for PageList {
    fn as_ref(&self) -> &PageList {
        self
    }
}

impl fmt::Debug for PageList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.runs.iter().map(|run| run.start..run.end());
        f.debug_list().entries(runs).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(pages: &[u32]) -> PageList {
        PageList::from_pages(pages.iter().copied()).unwrap()
    }

    #[test]
    fn neighbours_merge_and_order_is_kept() {
        let pages = list(&[4, 5, 6, 2, 3, 9]);
        assert_eq!(pages.runs().len(), 3);
        assert_eq!(pages.iter().collect::<Vec<_>>(), [4, 5, 6, 2, 3, 9]);
        assert_eq!(pages.len(), 6);
    }

    #[test]
    fn out_of_range_names_the_page_and_the_bound() {
        assert_eq!(list(&[1, 7]).check_below(7), Err(PagesError::OutOfRange { page: 7, num_pages: 7 }));
        assert_eq!(list(&[1, 6]).check_below(7), Ok(()));
    }

    #[test]
    fn a_slice_is_the_same_pages_as_of_the_expanded_list() {
        let pages = [4, 5, 6, 2, 3, 9, 0, 1];
        let all = list(&pages);
        for offset in 0..=pages.len() {
            for len in 0..=pages.len() - offset {
                assert_eq!(all.slice(offset, len), Some(list(&pages[offset..offset + len])));
            }
            assert_eq!(all.slice(offset, pages.len() - offset + 1), None);
        }
        assert_eq!(all.slice(usize::MAX, 1), None);
        assert_eq!(all.slice(1, usize::MAX), None);
        assert_eq!(PageList::default().slice(0, 0), Some(PageList::default()));
        let last = PageList::from_runs([PageRun { start: u32::MAX - 4, len: 4 }]).unwrap();
        assert_eq!(last.slice(3, 1), Some(list(&[u32::MAX - 1])));
        assert_eq!(last.slice(4, 0), Some(PageList::default()));
    }

    #[test]
    fn wire_lists_are_validated() {
        assert!(serde_json::from_str::<PageList>("[[4294967295,1]]").is_err());
        assert!(serde_json::from_str::<PageList>("[[0,16777217]]").is_err());
        let pages: PageList = serde_json::from_str("[[3,2],[5,1],[0,1]]").unwrap();
        assert_eq!(pages, list(&[3, 4, 5, 0]));
    }
}
