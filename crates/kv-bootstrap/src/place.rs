//! Where a rank stands among the ranks of its engine.

use std::fmt;

use kv_core::Parallel;

/// A rank's place in the parallel groups of its engine. Places are ordered as the ranks of a replica are
/// answered: by data-parallel, pipeline, prefill-context and tensor-parallel rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) dp: u32,
    pub(crate) pp: u32,
    pub(crate) cp: u32,
    pub(crate) tp: u32,
}

impl Place {
    pub(crate) const FIRST: Place = Place { dp: 0, pp: 0, cp: 0, tp: 0 };

    pub(crate) fn of(parallel: &Parallel) -> Place {
        Place { dp: parallel.dp_rank, pp: parallel.pp_rank, cp: parallel.pcp_rank, tp: parallel.tp_rank }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { dp, pp, cp, tp } = self;
        write!(f, "dp_rank {dp} pp_rank {pp} pcp_rank {cp} tp_rank {tp}")
    }
}
