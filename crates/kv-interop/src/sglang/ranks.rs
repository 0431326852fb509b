//! Which prefill ranks serve a decode rank, as SGLang's decode workers compute it.

use kv_core::{Mismatch, Parallel};

use crate::cache::differs;

/// The prefill ranks of a decode rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Targets {
    /// The tensor-parallel ranks of the prefill engine.
    pub(crate) tp: std::ops::Range<u32>,
    /// The one of these ranks that sends; `None` if all do. The others are told dummies.
    pub(crate) only: Option<u32>,
    /// The stages, last one first.
    pub(crate) pp: Vec<u32>,
    /// How many decode ranks write to each of the prefill ranks.
    pub(crate) required: u32,
}

impl Targets {
    /// The prefill ranks, of an engine with the sizes of `theirs`, that serve the decode rank `ours`. With
    /// `latent`, all tensor-parallel ranks of the prefill engine hold the same bytes.
    pub(crate) fn new(ours: &Parallel, theirs: &Parallel, latent: bool) -> Result<Targets, Mismatch> {
        let (here, there) = (ours.tp_size.max(1), theirs.tp_size.max(1));
        if here.max(there) % here.min(there) != 0 {
            return Err(differs("attn_tp_size (--tp-size)", here, there));
        }
        // SGLang pairs the regions of stages with those of a whole model only where regions hold latents.
        if ours.pp_size != theirs.pp_size && (ours.pp_size > 1 || !latent) {
            return Err(differs("pp_size (--pp-size)", ours.pp_size, theirs.pp_size));
        }
        let rank = ours.tp_rank % here;
        let (tp, required) = if here >= there {
            let first = rank / (here / there);
            (first..first + 1, here / there)
        } else {
            let each = there / here;
            (rank * each..(rank + 1) * each, 1)
        };
        let pp = if ours.pp_size == theirs.pp_size {
            vec![ours.pp_rank]
        } else {
            (0..theirs.pp_size).rev().collect()
        };
        Ok(Targets { only: latent.then_some(tp.start), tp, pp, required })
    }

    /// Whether a prefill rank is one of the targets; then whether that rank is a dummy.
    pub(crate) fn role_of(&self, rank: &Parallel) -> Option<bool> {
        let served = self.tp.contains(&rank.tp_rank) && self.pp.contains(&rank.pp_rank) && rank.pcp_rank == 0;
        served.then(|| self.only.is_some_and(|only| only != rank.tp_rank))
    }

    /// How many prefill ranks there must be, dummies included.
    pub(crate) fn count(&self) -> usize {
        self.tp.len() * self.pp.len()
    }
}

/// The number by which a prefill rank is named in `KV_STATUS` and `ABORT_ACK`.
pub(crate) fn unique_rank(rank: &Parallel) -> u32 {
    let stage = rank.pp_rank.saturating_mul(rank.pcp_size).saturating_add(rank.pcp_rank);
    rank.tp_rank.saturating_mul(rank.pp_size.saturating_mul(rank.pcp_size)).saturating_add(stage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(tp_size: u32, tp_rank: u32, pp_size: u32) -> Parallel {
        Parallel::default().with(|place| {
            (place.tp_size, place.tp_rank, place.pp_size) = (tp_size, tp_rank, pp_size);
        })
    }

    #[test]
    fn each_decode_rank_finds_the_prefill_ranks_that_sglang_would_find() {
        let targets = |ours: (u32, u32), theirs, latent| {
            let found = Targets::new(&place(ours.0, ours.1, 1), &place(theirs, 0, 1), latent).unwrap();
            (found.tp.clone().collect::<Vec<_>>(), found.required, found.only)
        };
        assert_eq!(targets((2, 1), 2, false), (vec![1], 1, None));
        assert_eq!(targets((4, 3), 2, false), (vec![1], 2, None), "two decode ranks for each prefill rank");
        assert_eq!(targets((2, 1), 4, false), (vec![2, 3], 1, None));
        assert_eq!(targets((1, 0), 2, true), (vec![0, 1], 1, Some(0)), "rank 1 is a dummy");
        let refused = Targets::new(&place(2, 0, 1), &place(3, 0, 1), false).unwrap_err();
        assert_eq!(refused, differs("attn_tp_size (--tp-size)", 2, 3));
        let stages = Targets::new(&place(1, 0, 1), &place(1, 0, 3), true).unwrap();
        assert_eq!((stages.pp.clone(), stages.count()), (vec![2, 1, 0], 3));
        for (ours, latent) in [(2, true), (1, false)] {
            let refused = Targets::new(&place(1, 0, ours), &place(1, 0, 3), latent).unwrap_err();
            assert_eq!(refused, differs("pp_size (--pp-size)", ours, 3));
        }
    }

    #[test]
    fn dummies_and_ranks_of_other_stages_are_told_apart() {
        let targets = Targets::new(&place(1, 0, 1), &place(2, 0, 1), true).unwrap();
        assert_eq!(targets.role_of(&place(2, 0, 1)), Some(false));
        assert_eq!(targets.role_of(&place(2, 1, 1)), Some(true));
        let other = place(2, 0, 1).with(|place| (place.pcp_size, place.pcp_rank) = (2, 1));
        assert_eq!(targets.role_of(&other), None, "only the first context-parallel rank sends");
        let third = place(4, 3, 2).with(|place| (place.pp_rank, place.pcp_size) = (1, 2));
        assert_eq!(unique_rank(&third), 3 * 4 + 2);
    }
}
