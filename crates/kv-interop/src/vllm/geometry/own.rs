//! This worker's KV cache as vLLM's protocol takes it, and the vLLM ranks that share the heads of this rank.

use kv_core::layout::{Geometry, Holds};
use kv_core::{KvArgs, MemoryKind, Mismatch, Parallel};

use crate::cache::differs;

/// Why vLLM's ranks could not read or write this worker's cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {ours}; vLLM's ranks need {needed}")]
pub struct CacheError {
    /// The field of this worker's arguments.
    pub field: String,
    /// The value of the field.
    pub ours: String,
    /// What the value must be.
    pub needed: &'static str,
}

/// The KV of this worker, without aux rows and cache groups, for which vLLM has no words.
#[derive(Debug, Clone)]
pub(crate) struct OwnCache {
    /// The geometry of the KV regions. Region *n* is region *n* of the worker.
    pub(crate) geometry: Geometry,
    /// Bytes of the key, the value or the latent of one token in one head of one layer.
    pub(super) atom: u64,
    /// True if the cache holds latents, which all tensor-parallel ranks have.
    pub(super) latent: bool,
    pub(super) memory: MemoryKind,
}

impl OwnCache {
    /// The KV of a worker. The regions must say what they hold, and all must hold the same.
    pub(crate) fn new(args: &KvArgs) -> Result<OwnCache, CacheError> {
        let mut geometry = args.geometry().clone();
        geometry.regions.truncate(geometry.kv_regions().end);
        geometry.layout.groups.clear();
        let Some(first) = geometry.regions.first() else {
            return Err(refused("regions", "0 KV regions", "one at least"));
        };
        let latent = first.holds == Holds::Latent;
        let fits = |holds| match holds {
            Holds::Latent => latent,
            Holds::Key | Holds::Value | Holds::KeyValue => !latent,
            _ => false,
        };
        for (number, region) in geometry.regions.iter().enumerate() {
            if !fits(region.holds) {
                let field = format!("regions[{number}].holds");
                return Err(refused(
                    &field,
                    region.holds,
                    "keys and values in all regions, or latents in all",
                ));
            }
        }
        if let Some(own) = geometry.regions.iter().position(|region| !region.form.is_plain()) {
            let field = format!("regions[{own}].form");
            return Err(refused(
                &field,
                geometry.regions[own].form,
                "axes, heads and elements as in the whole cache",
            ));
        }
        // Ranks that hold the same pages in turn or together would count as one for vLLM's ranks.
        for (field, ours) in
            [("dcp_size", geometry.layout.dcp_size), ("pcp_size", geometry.parallel.pcp_size)]
        {
            if ours > 1 {
                return Err(refused(field, ours, "1 in this crate"));
            }
        }
        let heads = if latent { 1 } else { geometry.kv_heads };
        let pieces = u64::from(heads)
            * u64::from(geometry.page_size)
            * u64::from(first.holds.parts())
            * u64::from(first.layers);
        let atom = first.item_len / pieces.max(1);
        Ok(OwnCache { atom, latent, memory: first.memory, geometry })
    }

    /// The tensor-parallel ranks of a vLLM engine that have something to do with this rank: the ranks that vLLM
    /// itself would choose.
    pub(crate) fn peers(&self, tp_size: u32) -> Result<std::ops::Range<u32>, Mismatch> {
        let Parallel { tp_size: ours, tp_rank, .. } = self.geometry.parallel;
        if tp_size > 0 && ours.is_multiple_of(tp_size) {
            let peer = tp_rank / (ours / tp_size);
            return Ok(peer..peer + 1);
        }
        if tp_size > 0 && tp_size.is_multiple_of(ours) {
            let each = tp_size / ours;
            return Ok(tp_rank * each..(tp_rank + 1) * each);
        }
        Err(differs("tp_size", ours, tp_size))
    }

    /// How many ranks of this engine share one rank of a vLLM engine of `tp_size` ranks: the number that a
    /// completion tells the vLLM rank.
    pub(crate) fn consumers(&self, tp_size: u32) -> u32 {
        (self.geometry.parallel.tp_size / tp_size.max(1)).max(1)
    }

    /// True for one of the ranks of this engine that share one rank of a vLLM engine of `tp_size` ranks.
    pub(crate) fn speaks_for_all(&self, tp_size: u32) -> bool {
        self.geometry.parallel.tp_rank.is_multiple_of(self.consumers(tp_size))
    }
}

pub(super) fn refused(field: &str, ours: impl std::fmt::Debug, needed: &'static str) -> CacheError {
    let ours = format!("{ours:?}").trim_matches('"').to_owned();
    CacheError { field: field.to_owned(), ours, needed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::geometry::tests::args;

    #[test]
    fn ranks_that_hold_the_same_heads_are_neighbours_whichever_engine_has_more() {
        let peers = |ours, theirs| {
            let of_rank = |rank| OwnCache::new(&args((ours, rank), false)).unwrap().peers(theirs).unwrap();
            (0..ours).map(of_rank).collect::<Vec<_>>()
        };
        assert_eq!(peers(4, 2), [0..1, 0..1, 1..2, 1..2]);
        assert_eq!(peers(2, 4), [0..2, 2..4]);
        assert_eq!(peers(2, 2), [0..1, 1..2]);
    }
}
