//! Context parallelism: ranks that all hold the same pages and share the sending (PCP), and ranks that hold
//! the pages of a request in turn (DCP).

use std::ops::Range;

use super::place::{Deal, Place};
use super::{Engine, Unequal};
use crate::rng::Rng;

/// The number of ranks of an engine, at most.
const MAX_RANKS: u32 = 8;

impl Engine {
    pub(super) fn place(&self, rank: u32) -> Place {
        let (tp, rest) = (rank % self.tp, rank / self.tp);
        let (context, replica) = (tp % self.context, tp / self.context);
        Place { stage: rest / self.cp, cp: rest % self.cp, tp, context, replica }
    }
}

impl Unequal {
    /// The same pair of engines, in some worlds with context-parallel ranks. Pages are distributed over ranks
    /// only if the cache is a latent one, the page sizes are equal, and there are no cache groups.
    pub(crate) fn spread(mut self, rng: &mut Rng, stateful: bool) -> Unequal {
        if self.latent && !stateful && rng.chance(700) {
            self.engines[1].page_size = self.engines[0].page_size;
            for engine in &mut self.engines {
                let most = MAX_RANKS / engine.stages.len() as u32;
                engine.context = rng.pick(&[1, 2, 4]).min(1 << most.ilog2());
                engine.tp = engine.tp.max(engine.context);
            }
        }
        for engine in &mut self.engines {
            engine.cp = rng.pick(&[1, 1, 1, 1, 2, 3]).min(MAX_RANKS / engine.ranks() as u32);
        }
        self
    }

    /// Which tokens the pages of a rank have.
    pub(crate) fn deal(&self, prefill: bool, rank: u32) -> Deal {
        let engine = self.engine(prefill);
        let place = engine.place(rank).context;
        Deal { tokens: engine.page_size.into(), cycle: engine.context.into(), place: place.into() }
    }

    /// True if the two engines have pages of one size, so that a wrong count of pages is noticed by both.
    pub(crate) fn counts_alike(&self) -> bool {
        self.engines[0].page_size == self.engines[1].page_size
    }

    /// The pages that a decode rank asks a prefill rank for, out of `pages` pages that it wants.
    pub(crate) fn share(&self, source: u32, pages: usize) -> Range<usize> {
        let (engine, place) = (&self.engines[0], self.engines[0].place(source));
        let bound = |cp: u32| pages * cp as usize / engine.cp as usize;
        bound(place.cp)..bound(place.cp + 1)
    }

    /// The number of tokens that a prefill rank with `pages` pages sends for the pages of a decode rank.
    pub(crate) fn tokens_from(
        &self,
        (source, sent): (u32, usize),
        (dest, pages): (u32, Range<usize>),
    ) -> u64 {
        let (here, there) = (self.deal(true, source), self.deal(false, dest));
        let asked = self.share(source, pages.len());
        let asked = pages.start + asked.start..pages.start + asked.end;
        let held = (sent as u64).saturating_mul(here.tokens);
        let tokens = asked.map(|position| {
            let number = there.number(position as u64);
            let first = number * there.tokens;
            match (number.checked_sub(here.place), here.cycle) {
                (_, 1) => (first + there.tokens).min(held).saturating_sub(first),
                // Pages are of one size.
                (Some(past), cycle) if past % cycle == 0 && past / cycle < sent as u64 => there.tokens,
                _ => 0,
            }
        });
        tokens.sum()
    }

    /// True if the two prefill ranks hold the same pages.
    pub(crate) fn are_siblings(&self, one: u32, other: u32) -> bool {
        let [one, other] = [one, other].map(|rank| self.engines[0].place(rank));
        (one.stage, one.tp) == (other.stage, other.tp)
    }

    /// The place of a prefill rank among the ranks that hold the same pages, and the number of these ranks.
    pub(crate) fn sibling(&self, source: u32) -> (u32, u32) {
        (self.engines[0].place(source).cp, self.engines[0].cp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dealt_pages_are_all_pages_each_once() {
        for (cycle, tokens) in [(1, 0), (2, 7), (4, 10), (4, 1), (2, 12)] {
            let deals = (0..cycle).map(|place| Deal { tokens: 3, cycle, place });
            let of = |deal: Deal| (0..deal.pages(tokens) as u64).map(move |page| deal.number(page));
            let mut numbers: Vec<u64> = deals.flat_map(of).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..tokens.div_ceil(3) as u64));
        }
    }
}
