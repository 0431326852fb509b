//! A rank's place in the parallel groups of its engine.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The sizes of the parallel groups of an engine, and this rank's place in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Parallel {
    /// How many tensor-parallel ranks there are.
    pub tp_size: u32,
    /// This rank's number among the tensor-parallel ranks, from 0.
    pub tp_rank: u32,
    /// How many pipeline stages there are.
    pub pp_size: u32,
    /// The pipeline stage of this rank, from 0.
    pub pp_rank: u32,
    /// How many data-parallel replicas there are.
    pub dp_size: u32,
    /// The data-parallel replica of this rank, from 0.
    pub dp_rank: u32,
    /// How many prefill-context-parallel ranks there are. They share the work on a prompt;
    /// afterwards each of them holds all pages of the prompt, for its heads and layers. They share
    /// the sending, too: each rank sends a [range](Parallel::page_range) of the pages. Where every
    /// rank keeps only a part of the pages, that is [`Layout::dcp_size`](crate::Layout::dcp_size).
    pub pcp_size: u32,
    /// This rank's number among the prefill-context-parallel ranks, from 0.
    pub pcp_rank: u32,
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            tp_size: 1,
            tp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            dp_size: 1,
            dp_rank: 0,
            pcp_size: 1,
            pcp_rank: 0,
        }
    }
}

impl Parallel {
    /// The same with some fields changed: `Parallel::default().with(|parallel| parallel.tp_size = 4)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The groups, each with the names of its two fields, its size, and this rank's number in the
    /// group.
    pub fn groups(&self) -> [(&'static str, &'static str, u32, u32); 4] {
        [
            ("tp_size", "tp_rank", self.tp_size, self.tp_rank),
            ("pp_size", "pp_rank", self.pp_size, self.pp_rank),
            ("dp_size", "dp_rank", self.dp_size, self.dp_rank),
            ("pcp_size", "pcp_rank", self.pcp_size, self.pcp_rank),
        ]
    }

    /// How many ranks the engine has in all.
    pub fn ranks(&self) -> u32 {
        self.replica_ranks().saturating_mul(self.dp_size)
    }

    /// How many ranks one data-parallel replica of the engine has.
    pub fn replica_ranks(&self) -> u32 {
        self.tp_size.saturating_mul(self.pp_size).saturating_mul(self.pcp_size)
    }

    /// Which positions of the `pages` pages of a receiver this rank sends. The ranges of a
    /// prefill-context-parallel group cover every position once, and their lengths differ by one at
    /// most.
    ///
    /// ```
    /// use kv_core::Parallel;
    ///
    /// let rank = |pcp_rank| Parallel::default().with(|group| (group.pcp_size, group.pcp_rank) = (3, pcp_rank));
    /// assert_eq!([0, 1, 2].map(|cp| rank(cp).page_range(7)), [0..2, 2..4, 4..7]);
    /// ```
    pub fn page_range(&self, pages: usize) -> Range<usize> {
        let bound = |rank: u32| {
            let bound = pages as u128 * u128::from(rank) / u128::from(self.pcp_size.max(1));
            usize::try_from(bound).map_or(pages, |bound| bound.min(pages))
        };
        bound(self.pcp_rank)..bound(self.pcp_rank.saturating_add(1))
    }
}
