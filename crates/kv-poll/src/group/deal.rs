//! How the pages of a request are dealt to the ranks of a group.
//!
//! Under decode context parallelism, page `i` of the group stands for one page of each context rank:
//! `i × size`, `i × size + 1`, … of the request. Of the last one, some ranks may have no part.

use kv_core::{Geometry, PageList, SessionOptions};

/// Of one request.
#[derive(Debug, Clone)]
pub(super) struct Deal {
    /// Ranks that have nothing of its last page.
    lack: Vec<bool>,
    /// Its pages, once that is known.
    pages: Option<usize>,
    /// How many of them were given, or are there already.
    given: usize,
}

impl Deal {
    pub(super) fn new<'a>(ranks: impl Iterator<Item = &'a Geometry>, options: &SessionOptions) -> Deal {
        let (mut lack, mut pages) = (Vec::new(), None);
        for geometry in ranks {
            let size = geometry.layout.context_size.max(1) as usize;
            let whole = options.tokens.filter(|_| size > 1).map(|tokens| geometry.pages_of(tokens));
            // How many ranks have a part of the last page.
            let have = whole.map_or(size, |whole| whole - whole.div_ceil(size).saturating_sub(1) * size);
            lack.push(geometry.layout.context_rank as usize >= have);
            pages = whole.map(|whole| whole.div_ceil(size));
        }
        Deal { lack, pages, given: options.prefix_pages }
    }

    /// How many pages a rank has already.
    pub(super) fn prefix(&self, rank: usize) -> usize {
        match self.pages {
            Some(pages) if self.given >= pages => self.count(rank, self.given),
            _ => self.given,
        }
    }

    /// How many of a request's pages a rank has.
    pub(super) fn count(&self, rank: usize, pages: usize) -> usize {
        pages.saturating_sub(usize::from(self.lacks(rank)))
    }

    /// A sender says how many pages there are.
    pub(super) fn announce(&mut self, pages: usize) {
        self.pages = Some(pages);
    }

    /// The part that a rank has of the next pages of a sender.
    pub(super) fn next(&self, rank: usize, chunk: &PageList) -> PageList {
        let ends = self.pages == Some(self.given + chunk.len());
        self.cut(rank, chunk, ends)
    }

    /// The part that a rank has of all pages of a receiver.
    pub(super) fn all(&self, rank: usize, pages: &PageList) -> PageList {
        self.cut(rank, pages, true)
    }

    /// The next pages were given.
    pub(super) fn gave(&mut self, pages: usize) {
        self.given += pages;
    }

    fn lacks(&self, rank: usize) -> bool {
        self.lack.get(rank).is_some_and(|lacks| *lacks)
    }

    fn cut(&self, rank: usize, pages: &PageList, ends: bool) -> PageList {
        match pages.len().checked_sub(1) {
            Some(rest) if ends && self.lacks(rank) => pages.slice(0, rest).unwrap_or_default(),
            _ => pages.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{Holds, KvArgs, Layout, Parallel, Region, RegionRole};

    use super::*;

    fn ranks(tp_size: u32, context_size: u32) -> Vec<Geometry> {
        let rank = |tp_rank| {
            let region = Region::dram(RegionRole::Kv, 0x1000, 8 * 64, 64).layer(0).holds(Holds::Latent);
            let layout = Layout { context_size, context_rank: tp_rank % context_size, ..Layout::default() };
            let parallel = Parallel { tp_size, tp_rank, ..Parallel::default() };
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
        let tokens = |tokens| SessionOptions { tokens: Some(tokens), ..SessionOptions::default() };
        let ranks = ranks(8, 4);
        let mut deal = Deal::new(ranks.iter(), &tokens(100));
        deal.announce(2);
        let counts = |deal: &Deal| (0..8).map(|rank| deal.count(rank, 2)).collect::<Vec<_>>();
        assert_eq!(counts(&deal), [2, 2, 2, 1, 2, 2, 2, 1]);
        assert_eq!((deal.next(3, &list(&[5])), deal.next(3, &list(&[5, 1]))), (list(&[5]), list(&[5])));
        deal.gave(1);
        assert_eq!((deal.next(2, &list(&[1])), deal.next(3, &list(&[1]))), (list(&[1]), list(&[])));
        assert_eq!((deal.all(3, &list(&[5, 1])), deal.all(0, &list(&[5, 1]))), (list(&[5]), list(&[5, 1])));
        assert_eq!(deal.all(3, &list(&[])), list(&[]));
        for (whole, last) in [(128, [2; 4]), (65, [2, 1, 1, 1]), (64, [1; 4]), (1, [1, 0, 0, 0])] {
            let deal = Deal::new(ranks.iter(), &tokens(whole));
            let pages = whole.div_ceil(64);
            assert_eq!([0, 1, 2, 3].map(|rank| deal.count(rank, pages)), last, "{whole} tokens");
        }
        // Nobody said how long it is: as long as its pages.
        assert_eq!(counts(&Deal::new(ranks.iter(), &SessionOptions::default())), [2; 8]);
    }

    #[test]
    fn a_request_that_is_here_already_has_no_page_where_it_has_no_tokens() {
        let ranks = ranks(2, 2);
        let options = |prefix_pages, tokens| SessionOptions { prefix_pages, tokens, ..Default::default() };
        let prefixes = |options| {
            let deal = Deal::new(ranks.iter(), &options);
            [0, 1].map(|rank| deal.prefix(rank))
        };
        assert_eq!(prefixes(options(3, Some(65))), [3, 2]);
        assert_eq!(prefixes(options(2, Some(65))), [2, 2]);
        assert_eq!(prefixes(options(2, Some(64))), [2, 2]);
        assert_eq!(prefixes(options(2, None)), [2, 2]);
    }

    #[test]
    fn ranks_that_hold_all_pages_get_all_of_them() {
        let options = SessionOptions { tokens: Some(1), ..SessionOptions::default() };
        let deal = Deal::new(ranks(2, 1).iter(), &options);
        assert_eq!(
            [0, 1].map(|rank| (deal.count(rank, 3), deal.all(rank, &list(&[4])))),
            [(3, list(&[4])), (3, list(&[4]))]
        );
    }
}
