//! The place of a rank in its engine, and the pages that it holds.

/// The place of a rank in its engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) stage: u32,
    /// The place among the ranks that hold the same pages.
    pub(super) cp: u32,
    pub(super) tp: u32,
    /// The place among the ranks that hold pages in turn.
    pub(super) context: u32,
    /// The group of ranks over which pages are distributed, among the groups of the stage.
    pub(super) replica: u32,
}

/// Which tokens of a request the pages of a rank hold. If pages are distributed over `cycle` ranks, page `k`
/// of this rank is page `k * cycle + place` of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deal {
    /// The number of tokens in a page.
    pub tokens: u64,
    /// The number of ranks that hold pages in turn.
    pub cycle: u64,
    /// How many ranks of the cycle come before this rank.
    pub place: u64,
}

impl Deal {
    /// A rank that holds all pages, of `tokens` tokens each.
    pub fn all(tokens: usize) -> Deal {
        Deal { tokens: tokens as u64, cycle: 1, place: 0 }
    }

    /// The number that a page has, counted over all ranks.
    pub fn number(self, position: u64) -> u64 {
        position * self.cycle + self.place
    }

    /// How many pages are needed for the tokens of a request.
    pub fn pages(self, tokens: usize) -> usize {
        let all = (tokens as u64).div_ceil(self.tokens);
        (all.saturating_sub(self.place)).div_ceil(self.cycle) as usize
    }
}
