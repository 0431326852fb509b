//! The cache of a vLLM rank, from what the rank says of itself, and what this worker refuses of it.

use kv_core::layout::{Axes, Form, Geometry, HND_PACKED, Holds, Layout, NHD_PACKED, RegionRole, RegionShape};
use kv_core::{MemoryKind, Mismatch, Parallel};

use super::own::OwnCache;
use super::shown::shown_layout;
use crate::cache::{ForeignCache, ForeignRegion, differs};
use crate::vllm::metadata::NixlAgentMetadata;

/// A rank of a vLLM engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) tp_size: u32,
    pub(crate) tp_rank: u32,
    pub(crate) pp_size: u32,
    pub(crate) pp_rank: u32,
    /// The first layer of the rank's pipeline stage.
    pub(crate) first_layer: u32,
}

impl OwnCache {
    /// Refuses a vLLM rank that could not write into this cache, or would write it wrongly, and say nothing. Blocks
    /// must lie in the same order and have one size. A writer cuts a larger block into equal runs of bytes: these are
    /// blocks of this cache only if the tokens of a block lie outermost, or if there is one head.
    pub(crate) fn check_writer(&self, theirs: &NixlAgentMetadata, tp_size: u32) -> Result<(), Mismatch> {
        let ours = self.geometry.kernel_page_size();
        let one_head = self.latent || self.geometry.kv_heads == 1;
        let by_token = one_head || matches!(theirs.kv_cache_layout.as_str(), "LBNHC" | "BLNHC");
        let shared = self.consumers(tp_size) > 1 && !self.latent;
        let cut = by_token && !shared && theirs.block_size.is_multiple_of(ours);
        if theirs.block_size != ours && !cut {
            return Err(differs("block_size", ours, theirs.block_size));
        }
        self.check_layout(theirs)
    }

    /// Refuses a vLLM rank whose engine step would raise an exception once the rank is told that this worker has
    /// written. vLLM rearranges received blocks of other sizes, or of another order, by the block ids of the sender,
    /// and a receiver in push mode has none: not even latents may come from blocks of another size.
    pub(crate) fn check_receiver(&self, theirs: &NixlAgentMetadata) -> Result<(), Mismatch> {
        let (page, ours) = (self.geometry.page_size, self.geometry.kernel_page_size());
        same("block_size", ours, theirs.block_size)?;
        let ratio = theirs.physical_blocks_per_logical_kv_block;
        same("physical_blocks_per_logical_kv_block", page / ours.max(1), ratio)?;
        self.check_layout(theirs)
    }

    fn check_layout(&self, theirs: &NixlAgentMetadata) -> Result<(), Mismatch> {
        match shown_layout(self) {
            _ if self.latent => Ok(()),
            Ok(shown) if shown == theirs.kv_cache_layout => Ok(()),
            Ok(shown) => Err(differs("kv_cache_layout", shown, &theirs.kv_cache_layout)),
            Err(error) => Err(differs(&error.field, error.ours, error.needed)),
        }
    }

    /// The cache of a vLLM rank. Every length is compared with the one that this worker's cache demands.
    pub(crate) fn foreign(&self, theirs: &NixlAgentMetadata, place: Place) -> Result<ForeignCache, Mismatch> {
        let axes = self.axes_of(&theirs.kv_cache_layout)?;
        self.plain(theirs)?;
        let ratio = theirs.physical_blocks_per_logical_kv_block;
        let total = self.geometry.total_kv_heads();
        let heads = if self.latent { self.geometry.kv_heads } else { (total / place.tp_size.max(1)).max(1) };
        let page_size = theirs.block_size.checked_mul(ratio).filter(|size| *size > 0);
        let page_size = page_size.ok_or_else(|| {
            differs("block_size", self.geometry.page_size, format!("{} × {ratio}", theirs.block_size))
        })?;
        let pages = u32::try_from(theirs.num_blocks / u64::from(ratio)).unwrap_or(u32::MAX);
        let regions = self.regions_of(theirs, heads)?;
        let shape = |(number, region): (u32, &ForeignRegion)| {
            let item_len = region.item_len.saturating_mul(ratio.into());
            RegionShape {
                role: RegionRole::Kv,
                len: item_len.saturating_mul(pages.into()),
                item_len,
                memory: region.memory,
                layer: place.first_layer.checked_add(number),
                layers: 1,
                holds: if self.latent { Holds::Latent } else { Holds::KeyValue },
                group: 0,
                form: Form::default(),
            }
        };
        let geometry = Geometry {
            num_pages: pages,
            page_size,
            dtype: self.geometry.dtype.clone(),
            kv_heads: heads,
            head_dim: self.geometry.head_dim,
            model: self.geometry.model.clone(),
            parallel: Parallel::default().with(|parallel| {
                (parallel.tp_size, parallel.tp_rank) = (place.tp_size, place.tp_rank);
                (parallel.pp_size, parallel.pp_rank) = (place.pp_size, place.pp_rank);
            }),
            regions: (0..).zip(&regions).map(shape).collect(),
            layout: Layout::default().with(|layout| {
                layout.axes = axes;
                layout.total_kv_heads = if self.latent { self.geometry.layout.total_kv_heads } else { total };
                layout.kernel_page_size = theirs.block_size;
            }),
        };
        geometry.validate().map_err(|error| differs("NixlAgentMetadata", "a possible cache", error))?;
        self.geometry.check(&geometry)?;
        Ok(ForeignCache { geometry, regions })
    }

    /// The places of a rank's blocks, for a rank that holds so many heads.
    fn regions_of(&self, theirs: &NixlAgentMetadata, heads: u32) -> Result<Vec<ForeignRegion>, Mismatch> {
        let block_len = self.block_len(if self.latent { 1 } else { heads }, theirs.block_size);
        let memory = self.memory_of(theirs)?;
        let mut regions = Vec::new();
        for (number, (&addr, memory)) in theirs.kv_caches_base_addr.iter().zip(memory).enumerate() {
            let of = |list: &[u64]| list.get(number).copied().unwrap_or(0);
            let (len, stride) = (of(&theirs.block_lens), of(&theirs.block_strides));
            if len != block_len {
                return Err(differs(&format!("block_lens[{number}]"), block_len, len));
            }
            if stride < len || reach(addr, theirs.num_blocks, stride, len).is_none() {
                let field = format!("block_strides[{number}]");
                return Err(differs(&field, format!("{len} or more, inside 64 bits"), stride));
            }
            let (items, device) = (theirs.num_blocks, theirs.device_id);
            regions.push(ForeignRegion { addr, items, item_len: len, stride, memory, device });
        }
        Ok(regions)
    }

    /// Bytes of a vLLM block of this many heads and tokens.
    fn block_len(&self, heads: u32, tokens: u32) -> u64 {
        let parts = if self.latent { 1 } else { 2 };
        [heads, tokens, parts].into_iter().fold(self.atom, |len, count| len.saturating_mul(count.into()))
    }

    fn axes_of(&self, layout: &str) -> Result<Axes, Mismatch> {
        match layout {
            "LBHNC" | "BLHNC" => Ok(HND_PACKED),
            "LBNHC" | "BLNHC" => Ok(NHD_PACKED),
            _ => Err(differs("kv_cache_layout", "LBHNC", layout)),
        }
    }

    /// Refuses what a cache of one group without recurrent states does not have.
    fn plain(&self, theirs: &NixlAgentMetadata) -> Result<(), Mismatch> {
        same("dcp_size", 1, theirs.dcp_size)?;
        same("ssm_sizes", "(0, 0)".to_owned(), format!("{:?}", theirs.ssm_sizes))?;
        same("ple_block_len", 0, theirs.ple_block_len.unwrap_or(0))?;
        same("packed_member_layouts", 0, theirs.packed_member_layouts.len())?;
        for (number, group) in theirs.region_group_ids.iter().flatten().enumerate() {
            if !(-1..=0).contains(group) {
                return Err(differs(&format!("region_group_ids[{number}]"), 0, group));
            }
        }
        for (number, blocks) in theirs.region_num_blocks.iter().flatten().enumerate() {
            same(&format!("region_num_blocks[{number}]"), theirs.num_blocks, *blocks)?;
        }
        match theirs.physical_blocks_per_logical_kv_block {
            0 => Err(differs("physical_blocks_per_logical_kv_block", 1, 0)),
            ratio if !theirs.num_blocks.is_multiple_of(ratio.into()) => {
                Err(differs("num_blocks", format!("a multiple of {ratio}"), theirs.num_blocks))
            }
            _ => Ok(()),
        }
    }

    fn memory_of(&self, theirs: &NixlAgentMetadata) -> Result<Vec<MemoryKind>, Mismatch> {
        let Some(kinds) = &theirs.region_mem_types else {
            return Ok(vec![self.memory; theirs.kv_caches_base_addr.len()]);
        };
        let kind = |(number, kind): (usize, &String)| match kind.as_str() {
            "DRAM" => Ok(MemoryKind::Dram),
            "VRAM" => Ok(MemoryKind::Vram),
            other => Err(differs(&format!("region_mem_types[{number}]"), "DRAM or VRAM", other)),
        };
        kinds.iter().enumerate().map(kind).collect()
    }
}

/// The end of the last item; `None` if the end lies outside 64 bits.
fn reach(addr: u64, items: u64, stride: u64, len: u64) -> Option<u64> {
    items.saturating_sub(1).checked_mul(stride)?.checked_add(len)?.checked_add(addr)
}

fn same<T: PartialEq + ToString>(field: &str, ours: T, theirs: T) -> Result<(), Mismatch> {
    if ours == theirs { Ok(()) } else { Err(differs(field, ours.to_string(), theirs.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::geometry::tests::{LEN, args, metadata, place};

    #[test]
    fn a_vllm_rank_has_the_heads_of_its_place_and_strides_of_its_own() {
        let ours = OwnCache::new(&args((1, 0), false)).unwrap();
        let cache = ours.foreign(&metadata((2, 1), true), place((2, 1))).unwrap();
        assert_eq!((cache.geometry.kv_heads, cache.geometry.total_kv_heads()), (2, 4));
        assert_eq!(cache.geometry.kv_layers(), Some((0, 2)));
        assert_eq!((cache.regions[1].addr, cache.regions[1].stride), (0x10_0000 + LEN, 2 * LEN));
        assert_eq!(cache.agent_regions()[0].len, 9 * 2 * LEN + LEN);
        assert_eq!((ours.peers(2), ours.consumers(2)), (Ok(0..2), 1));
        let small = OwnCache::new(&args((4, 3), false)).unwrap();
        assert_eq!((small.peers(2), small.consumers(2)), (Ok(1..2), 2));
        assert_eq!(small.peers(3), Err(differs("tp_size", 4, 3)));
        assert!(small.peers(0).is_err());
    }

    #[test]
    fn physical_blocks_of_a_vllm_rank_join_to_the_blocks_of_its_requests() {
        let ours = OwnCache::new(&args((1, 0), false)).unwrap();
        let mut theirs = metadata((1, 0), false);
        theirs.physical_blocks_per_logical_kv_block = 2;
        theirs.block_size = 8;
        theirs.block_lens = vec![LEN; 2];
        theirs.block_strides = vec![LEN; 2];
        theirs.num_blocks = 20;
        theirs.region_num_blocks = None;
        let cache = ours.foreign(&theirs, place((1, 0))).unwrap();
        assert_eq!((cache.geometry.num_pages, cache.geometry.page_size), (10, 16));
        assert_eq!(cache.geometry.kernel_page_size(), 8);
        assert_eq!((cache.regions[0].items, cache.regions[0].item_len), (20, LEN));
        assert_eq!(cache.geometry.regions[0].item_len, 2 * LEN);
    }

    #[test]
    fn what_does_not_fit_is_refused_in_vllms_words_with_both_values() {
        let ours = OwnCache::new(&args((2, 0), false)).unwrap();
        let refusal = |change: &dyn Fn(&mut NixlAgentMetadata)| {
            let mut theirs = metadata((2, 0), false);
            change(&mut theirs);
            ours.foreign(&theirs, place((2, 0))).err()
        };
        assert_eq!(refusal(&|_| ()), None);
        let layout = refusal(&|theirs| theirs.kv_cache_layout = "LHBNC".to_owned());
        assert_eq!(layout, Some(differs("kv_cache_layout", "LBHNC", "LHBNC")));
        let len = refusal(&|theirs| theirs.block_lens[1] = 77);
        assert_eq!(len, Some(differs("block_lens[1]", LEN, 77)));
        let stride = refusal(&|theirs| theirs.block_strides[0] = LEN - 1).unwrap();
        assert_eq!((stride.field.as_str(), stride.theirs), ("block_strides[0]", (LEN - 1).to_string()));
        let far = refusal(&|theirs| theirs.kv_caches_base_addr[0] = u64::MAX - LEN).unwrap();
        assert_eq!(far.field, "block_strides[0]");
        type Change = fn(&mut NixlAgentMetadata);
        let changes: [(&str, Change); 8] = [
            ("dcp_size", |theirs| theirs.dcp_size = 2),
            ("ssm_sizes", |theirs| theirs.ssm_sizes = (1, 2)),
            ("region_group_ids[1]", |theirs| theirs.region_group_ids = Some(vec![0, 1])),
            ("region_num_blocks[0]", |theirs| theirs.region_num_blocks = Some(vec![9, 10])),
            ("region_mem_types[0]", |theirs| theirs.region_mem_types = Some(vec!["TAPE".to_owned(); 2])),
            ("physical_blocks_per_logical_kv_block", |theirs| {
                theirs.physical_blocks_per_logical_kv_block = 0
            }),
            ("block_size", |theirs| theirs.block_size = 0),
            ("NixlAgentMetadata", |theirs| {
                (theirs.num_blocks, theirs.region_num_blocks) = (u64::from(u32::MAX), None);
            }),
        ];
        for (field, change) in changes {
            assert_eq!(refusal(&change).map(|mismatch| mismatch.field), Some(field.to_owned()));
        }
    }
}
