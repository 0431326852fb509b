//! How the pages of a request are dealt to the ranks of a group.
//!
//! Under decode context parallelism over `size` ranks, page `i` of the group stands for one page of each
//! rank: the pages `i × size`, `i × size + 1`, … of the request. Some ranks may have no part of the last page
//! of the group. Those ranks have all their pages *early*, with the chunk before the last. The request is
//! complete with the last chunk only, and so are the aux row and the items of cache groups, which therefore
//! wait on those ranks.

use kv_core::{Geometry, PageList};

/// The deal of one request's pages.
#[derive(Debug, Clone)]
pub(super) struct Deal {
    /// For each rank: whether the rank has no part of the last page of the request.
    lack: Vec<bool>,
    /// Number of pages that the tokens of the request fill, if the number of tokens is known.
    whole: Option<usize>,
    /// Number of pages that a sender has announced with `init`.
    announced: Option<usize>,
    /// Number of pages that were given, or that a receiver had already.
    given: usize,
    /// The first chunk after which only the last page is missing, until the last page is given.
    early: Option<u32>,
}

impl Deal {
    /// The deal of a request with this many tokens. `prefix_pages`, which are there already, is 0 for a
    /// sender.
    pub(super) fn new<'a>(
        ranks: impl Iterator<Item = &'a Geometry>,
        tokens: Option<usize>,
        prefix_pages: usize,
    ) -> Deal {
        let (mut lack, mut whole) = (Vec::new(), None);
        for geometry in ranks {
            whole = tokens.map(|tokens| tokens.div_ceil(geometry.page_tokens().max(1) as usize));
            lack.push(tokens.map(|tokens| geometry.own_pages_of(tokens)) < whole);
        }
        Deal { lack, whole, announced: None, given: prefix_pages, early: None }
    }

    /// Number of pages that a rank has been given, or had already.
    pub(super) fn prefix(&self, rank: usize) -> usize {
        self.count(rank, self.given)
    }

    /// Number of pages that a rank has of the first `pages` of the request. A page is missing only if these
    /// pages reach to the end of the tokens.
    pub(super) fn count(&self, rank: usize, pages: usize) -> usize {
        pages.saturating_sub(usize::from(self.lacks_last(rank, pages)))
    }

    /// Notes how many pages a sender announces with `init`.
    pub(super) fn announce(&mut self, pages: usize) {
        self.announced = Some(pages);
    }

    /// The pages that a rank has of the next chunk of a sender.
    pub(super) fn next(&self, rank: usize, chunk: &PageList) -> PageList {
        let end = self.given + chunk.len();
        self.cut(chunk, self.announced == Some(end) && self.lacks_last(rank, end))
    }

    /// The pages that a rank has of all pages of a receiver, which reach to the end of the request.
    pub(super) fn all(&self, rank: usize, pages: &PageList) -> PageList {
        self.cut(pages, self.lacks(rank))
    }

    /// Notes that the next pages were given, in the chunk with this number. True if that was the last chunk.
    pub(super) fn gave(&mut self, pages: usize, chunk: u32) -> bool {
        self.given += pages;
        let missing = self.announced.map(|announced| announced.saturating_sub(self.given));
        match missing {
            Some(0) => self.early = None,
            Some(1) => self.early = self.early.or(Some(chunk)),
            _ => {}
        }
        missing == Some(0)
    }

    /// True if, after a chunk of this many pages, only the last page is missing, and the rank has no part of
    /// that.
    pub(super) fn would_withhold(&self, rank: usize, pages: usize) -> bool {
        let after = self.given + pages + 1;
        self.announced == Some(after) && self.lacks_last(rank, after)
    }

    /// True if a rank must not be told yet that a chunk is final, because the rank would take the request for
    /// complete.
    pub(super) fn withholds(&self, rank: usize, chunk: u32) -> bool {
        let early = self.early.is_some_and(|first| chunk >= first);
        early && self.announced.is_some_and(|pages| self.lacks_last(rank, pages))
    }

    fn lacks(&self, rank: usize) -> bool {
        self.lack.get(rank).is_some_and(|lacks| *lacks)
    }

    fn lacks_last(&self, rank: usize, pages: usize) -> bool {
        self.lacks(rank) && self.whole.is_none_or(|whole| pages >= whole)
    }

    fn cut(&self, pages: &PageList, lacks: bool) -> PageList {
        match pages.len().checked_sub(1) {
            Some(rest) if lacks => pages.slice(0, rest).unwrap_or_default(),
            _ => pages.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{Holds, KvArgs, Layout, Parallel, Region, RegionRole};

    use super::*;

    fn ranks(tp_size: u32, dcp_size: u32) -> Vec<Geometry> {
        let rank = |tp_rank| {
            let region = Region::dram(RegionRole::Kv, 0x1000, 8 * 64, 64).layer(0).holds(Holds::Latent);
            let layout = Layout::default().with(|layout| {
                layout.dcp_size = dcp_size;
                layout.dcp_rank = tp_rank % dcp_size;
            });
            let parallel = Parallel::default().with(|parallel| {
                parallel.tp_size = tp_size;
                parallel.tp_rank = tp_rank;
            });
            let args = KvArgs::builder("e", tp_rank).pages(8, 16).parallel(parallel).layout(layout);
            args.region(region).build().unwrap().geometry().clone()
        };
        (0..tp_size).map(rank).collect()
    }

    fn list(pages: &[u32]) -> PageList {
        PageList::from_pages(pages.iter().copied()).unwrap()
    }

    #[test]
    fn only_ranks_with_a_page_for_the_end_of_a_request_get_its_last_page() {
        // 100 tokens are 7 pages of 16: ranks 0 to 2 of 4 have two, rank 3 one.
        let ranks = ranks(8, 4);
        let mut deal = Deal::new(ranks.iter(), Some(100), 0);
        deal.announce(2);
        let counts = |deal: &Deal| (0..8).map(|rank| deal.count(rank, 2)).collect::<Vec<_>>();
        assert_eq!(counts(&deal), [2, 2, 2, 1, 2, 2, 2, 1]);
        assert_eq!((deal.next(3, &list(&[5])), deal.next(3, &list(&[5, 1]))), (list(&[5]), list(&[5])));
        assert!(!deal.gave(1, 0));
        assert_eq!((deal.next(2, &list(&[1])), deal.next(3, &list(&[1]))), (list(&[1]), list(&[])));
        assert_eq!((deal.all(3, &list(&[5, 1])), deal.all(0, &list(&[5, 1]))), (list(&[5]), list(&[5, 1])));
        assert_eq!(deal.all(3, &list(&[])), list(&[]));
        for (whole, last) in [(128, [2; 4]), (65, [2, 1, 1, 1]), (64, [1; 4]), (1, [1, 0, 0, 0])] {
            let deal = Deal::new(ranks.iter(), Some(whole), 0);
            let pages = whole.div_ceil(64);
            assert_eq!([0, 1, 2, 3].map(|rank| deal.count(rank, pages)), last, "{whole} tokens");
        }
        // Nobody said how long it is: as long as its pages.
        assert_eq!(counts(&Deal::new(ranks.iter(), None, 0)), [2; 8]);
    }

    #[test]
    fn a_request_that_is_here_already_has_no_page_where_it_has_no_tokens() {
        let ranks = ranks(2, 2);
        let prefixes = |(prefix, tokens)| {
            let deal = Deal::new(ranks.iter(), tokens, prefix);
            [0, 1].map(|rank| deal.prefix(rank))
        };
        assert_eq!(prefixes((3, Some(65))), [3, 2]);
        assert_eq!(prefixes((2, Some(65))), [2, 2]);
        assert_eq!(prefixes((2, Some(64))), [2, 2]);
        assert_eq!(prefixes((2, None)), [2, 2]);
    }

    #[test]
    fn ranks_that_hold_all_pages_get_all_of_them() {
        let deal = Deal::new(ranks(2, 1).iter(), Some(1), 0);
        assert_eq!(
            [0, 1].map(|rank| (deal.count(rank, 3), deal.all(rank, &list(&[4])))),
            [(3, list(&[4])), (3, list(&[4]))]
        );
    }

    #[test]
    fn pages_that_end_before_the_tokens_do_are_full_on_all_ranks() {
        // 65 tokens have a second page, on one rank. Without it, the first is a whole one.
        let ranks = ranks(4, 4);
        let mut deal = Deal::new(ranks.iter(), Some(65), 0);
        deal.announce(1);
        assert_eq!([0, 1, 2, 3].map(|rank| deal.count(rank, 1)), [1; 4]);
        assert_eq!(deal.next(3, &list(&[5])), list(&[5]));
        assert!(!deal.would_withhold(3, 0));
    }

    #[test]
    fn a_rank_without_the_last_page_is_not_told_of_the_end_before_the_others() {
        let ranks = ranks(4, 4);
        let mut deal = Deal::new(ranks.iter(), Some(130), 0);
        deal.announce(3);
        let early = |deal: &Deal, chunk| [0, 1, 2, 3].map(|rank| deal.withholds(rank, chunk));
        assert!(!deal.would_withhold(3, 1) && deal.would_withhold(3, 2) && !deal.would_withhold(3, 3));
        assert!(!deal.would_withhold(0, 2));
        assert!(!deal.gave(1, 0) && !deal.gave(1, 1) && !deal.gave(0, 2));
        assert_eq!(early(&deal, 0), [false; 4]);
        assert_eq!(
            (early(&deal, 1), early(&deal, 2)),
            ([false, true, true, true], [false, true, true, true])
        );
        assert!(deal.gave(1, 3));
        assert_eq!(early(&deal, 1), [false; 4]);
    }
}
