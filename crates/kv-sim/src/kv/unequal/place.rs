//! Where a rank stands, and which pages it is dealt.

/// Where a rank stands in its engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) stage: u32,
    /// Among ranks that hold the same pages.
    pub(super) cp: u32,
    pub(super) tp: u32,
    /// Among ranks to which pages are dealt.
    pub(super) context: u32,
    /// The group of these, among those of its stage.
    pub(super) replica: u32,
}

/// Which tokens of a request the pages of a rank have: page `k` those of page `k * cycle + place`, had
/// one rank all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deal {
    /// Tokens of a page.
    pub tokens: u64,
    /// To how many ranks pages are dealt.
    pub cycle: u64,
    /// How many of these come before this one.
    pub place: u64,
}

impl Deal {
    /// All pages, of so many tokens.
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
