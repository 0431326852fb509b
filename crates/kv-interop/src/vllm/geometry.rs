//! This worker's cache in vLLM's words, and a vLLM rank's cache as the planner takes it.
//!
//! vLLM keeps one region for each layer. A block holds the layer's heads, of each head its tokens, and of each
//! token key and value side by side; or, under latent attention, the latents of its tokens. This worker's own
//! cache may be arranged otherwise where this worker reads or writes, because the planner cuts pages as needed.
//! Only a cache that vLLM's ranks are to read or write must have vLLM's arrangement.

use kv_core::layout::{Axes, Axis, Geometry, HND_PACKED, Holds, Layout, NHD_PACKED, RegionRole, RegionShape};
use kv_core::{KvArgs, MemoryKind, Mismatch, Parallel};

use super::metadata::NixlAgentMetadata;
use crate::cache::{ForeignCache, ForeignRegion};

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
    atom: u64,
    /// True if the cache holds latents, which all tensor-parallel ranks have.
    latent: bool,
    memory: MemoryKind,
}

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

/// The metadata of this worker, for vLLM's ranks. `device` is the number under which the worker's memory is
/// registered with NIXL. Fails if the cache is not arranged as vLLM's ranks need it.
pub(crate) fn own_metadata(
    args: &KvArgs,
    agent_metadata: bytes::Bytes,
    attn_backend_name: &str,
) -> Result<NixlAgentMetadata, CacheError> {
    let cache = OwnCache::new(args)?;
    let geometry = &cache.geometry;
    if geometry.parallel.dp_size > 1 {
        // vLLM's ranks know the memory of an engine by the engine's id: all replicas would be the first one met.
        let needed = "1: each replica as an engine, with an engine id and a side channel of its own";
        return Err(refused("dp_size", geometry.parallel.dp_size, needed));
    }
    let layout = shown_layout(&cache)?;
    let kernel = geometry.kernel_page_size();
    let ratio = geometry.page_size / kernel.max(1);
    let num_blocks = u64::from(geometry.num_pages) * u64::from(ratio);
    let mut layers: Vec<(u32, u64, u64, u64)> = Vec::new();
    for (number, (region, shape)) in args.regions().iter().zip(&geometry.regions).enumerate() {
        if !matches!(shape.holds, Holds::KeyValue | Holds::Latent) {
            let field = format!("regions[{number}].holds");
            return Err(refused(&field, shape.holds, "keys and values side by side in one region"));
        }
        let (stride, first) = (shape.item_len / u64::from(ratio.max(1)), shape.layer.unwrap_or(0));
        let len = stride / u64::from(shape.layers.max(1));
        layers.extend((0..shape.layers).map(|n| (first + n, region.addr + u64::from(n) * len, len, stride)));
    }
    layers.sort_unstable();
    let mut memory = args.regions().iter().take(geometry.regions.len());
    let kind = |kind| if kind == MemoryKind::Vram { "VRAM" } else { "DRAM" };
    let (memory_kind, device) =
        memory.next().map_or((MemoryKind::Dram, 0), |region| (region.memory, region.device));
    if let Some(other) = memory.find(|region| (region.memory, region.device) != (memory_kind, device)) {
        let ours = format!("{:?} of device {}", other.memory, other.device);
        return Err(refused("regions.device", ours, "all regions in one device's memory"));
    }
    if memory_kind == MemoryKind::File {
        return Err(refused("regions.memory", "a file", "host or device memory"));
    }
    Ok(NixlAgentMetadata {
        engine_id: args.worker().engine.as_str().to_owned(),
        agent_metadata,
        kv_caches_base_addr: layers.iter().map(|layer| layer.1).collect(),
        device_id: device,
        num_blocks,
        block_lens: layers.iter().map(|layer| layer.2).collect(),
        block_strides: layers.iter().map(|layer| layer.3).collect(),
        kv_cache_layout: layout.to_owned(),
        block_size: kernel,
        ssm_sizes: (0, 0),
        attn_backend_name: attn_backend_name.to_owned(),
        physical_blocks_per_logical_kv_block: ratio,
        region_num_blocks: Some(vec![num_blocks; layers.len()]),
        region_group_ids: Some(vec![0; layers.len()]),
        region_names: None,
        region_mem_types: Some(vec![kind(memory_kind).to_owned(); layers.len()]),
        dcp_size: 1,
        pcp_size: 1,
        ple_block_len: None,
        region_members: Vec::new(),
        packed_member_layouts: std::collections::BTreeMap::new(),
    })
}

/// vLLM's name for the order of the axes inside a block of one layer.
fn shown_layout(cache: &OwnCache) -> Result<&'static str, CacheError> {
    let [outermost, inner @ ..] = cache.geometry.layout.axes;
    let spread = cache.geometry.regions.iter().any(|region| region.layers > 1);
    if spread && outermost != Axis::Layer {
        return Err(refused("layout.axes", format!("{outermost:?} outermost"), "Axis::Layer outermost"));
    }
    // Latents have one head and one part: the order of these axes does not matter.
    let mut packed: Vec<Axis> =
        cache.geometry.layout.axes.into_iter().filter(|axis| *axis != Axis::Layer).collect();
    if cache.geometry.kv_heads == 1 {
        // One head lies in the same place in either order of heads and tokens.
        packed.retain(|axis| *axis != Axis::Head);
    }
    match (cache.latent, packed.as_slice()) {
        (true, _) | (_, [Axis::Head, Axis::Token, Axis::Part] | [Axis::Token, Axis::Part]) => Ok("LBHNC"),
        (_, [Axis::Token, Axis::Head, Axis::Part]) => Ok("LBNHC"),
        _ => {
            Err(refused("layout.axes", format!("{inner:?}"), "HND_PACKED: heads, tokens, keys beside values"))
        }
    }
}

/// The end of the last item; `None` if the end lies outside 64 bits.
fn reach(addr: u64, items: u64, stride: u64, len: u64) -> Option<u64> {
    items.saturating_sub(1).checked_mul(stride)?.checked_add(len)?.checked_add(addr)
}

fn refused(field: &str, ours: impl std::fmt::Debug, needed: &'static str) -> CacheError {
    let ours = format!("{ours:?}").trim_matches('"').to_owned();
    CacheError { field: field.to_owned(), ours, needed }
}

fn same<T: PartialEq + ToString>(field: &str, ours: T, theirs: T) -> Result<(), Mismatch> {
    if ours == theirs { Ok(()) } else { Err(differs(field, ours.to_string(), theirs.to_string())) }
}

pub(crate) fn differs(field: &str, ours: impl ToString, theirs: impl ToString) -> Mismatch {
    Mismatch { field: field.to_owned(), ours: ours.to_string(), theirs: theirs.to_string() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use bytes::Bytes;
    use kv_core::Region;

    const LEN: u64 = 2 * 16 * 2 * 8 * 2;

    /// A rank of `tp_size` ranks of a model of 4 heads of 8 two-byte elements and two layers; 10 pages of 16
    /// tokens, either all pages of a layer side by side, or all layers of a page.
    pub(crate) fn args(tp: (u32, u32), page_major: bool) -> KvArgs {
        let heads = (4 / tp.0).max(1);
        let len = u64::from(heads) * 16 * 2 * 8 * 2;
        let parallel = Parallel::default().with(|group| (group.tp_size, group.tp_rank) = tp);
        let layout = Layout::default().with(|layout| (layout.axes, layout.total_kv_heads) = (HND_PACKED, 4));
        let builder = KvArgs::builder("d-0", tp.1).pages(10, 16).heads(heads, 8).dtype("bf16");
        let builder = builder.parallel(parallel).layout(layout);
        let kv =
            |addr, items: u64| Region::dram(RegionRole::Kv, addr, 10 * items, items).holds(Holds::KeyValue);
        let builder = if page_major {
            builder.region(kv(0x10_0000, 2 * len).layers(0..2))
        } else {
            // The regions need not come in the order of layers.
            builder.region(kv(0x20_0000, len).layer(1)).region(kv(0x10_0000, len).layer(0))
        };
        builder.region(Region::dram(RegionRole::Aux, 0x1000, 64, 64)).build().unwrap()
    }

    /// What a rank of another engine with the same model tells.
    pub(crate) fn metadata(tp: (u32, u32), page_major: bool) -> NixlAgentMetadata {
        own_metadata(&args(tp, page_major), Bytes::from_static(b"nixl"), "FLASH_ATTN").unwrap()
    }

    pub(crate) fn place(tp: (u32, u32)) -> Place {
        Place { tp_size: tp.0, tp_rank: tp.1, pp_size: 1, pp_rank: 0, first_layer: 0 }
    }

    #[test]
    fn each_layer_is_a_region_of_vllm_also_where_pages_hold_all_layers() {
        let shown = metadata((2, 0), false);
        assert_eq!(shown.kv_caches_base_addr, [0x10_0000, 0x20_0000]);
        assert_eq!((shown.block_lens, shown.block_strides), (vec![LEN; 2], vec![LEN; 2]));
        let shown = metadata((2, 0), true);
        assert_eq!(shown.kv_caches_base_addr, [0x10_0000, 0x10_0000 + LEN]);
        assert_eq!((shown.block_lens, shown.block_strides), (vec![LEN; 2], vec![2 * LEN; 2]));
        assert_eq!((shown.num_blocks, shown.block_size, shown.kv_cache_layout.as_str()), (10, 16, "LBHNC"));
    }

    #[test]
    fn a_cache_that_vllm_could_not_read_is_refused_with_the_field() {
        let refusal = |change: &dyn Fn(&mut Region), axes: Axes| {
            let mut region =
                Region::dram(RegionRole::Kv, 0x1000, 10 * LEN, LEN).layer(0).holds(Holds::KeyValue);
            change(&mut region);
            let layout = Layout::default().with(|layout| layout.axes = axes);
            let args = KvArgs::builder("d", 0).pages(10, 16).heads(2, 8).layout(layout).region(region);
            own_metadata(&args.build().unwrap(), Bytes::new(), "x").map(|_| ()).map_err(|error| error.field)
        };
        assert_eq!(refusal(&|_| (), HND_PACKED), Ok(()));
        assert_eq!(refusal(&|_| (), NHD_PACKED), Ok(()));
        assert_eq!(refusal(&|_| (), kv_core::layout::HND), Err("layout.axes".to_owned()));
        let holds = Err("regions[0].holds".to_owned());
        assert_eq!(refusal(&|region| region.holds = Holds::Opaque, HND_PACKED), holds);
        assert_eq!(refusal(&|region| region.holds = Holds::Key, HND_PACKED), holds);
        let inner = [Axis::Head, Axis::Layer, Axis::Token, Axis::Part];
        assert_eq!(refusal(&|region| region.layers = 2, inner), Err("layout.axes".to_owned()));
        assert_eq!(
            refusal(&|region| region.memory = MemoryKind::File, HND_PACKED),
            Err("regions.memory".to_owned())
        );
    }

    #[test]
    fn ranks_that_vllm_could_not_tell_apart_are_refused_with_the_field() {
        let refusal = |change: &dyn Fn(&mut Parallel)| {
            let parallel = Parallel::default().with(|parallel| change(parallel));
            let layout = Layout::default().with(|layout| layout.axes = HND_PACKED);
            let region = Region::dram(RegionRole::Kv, 0x1000, 10 * LEN, LEN).layer(0).holds(Holds::KeyValue);
            let args = KvArgs::builder("d", 0)
                .pages(10, 16)
                .heads(2, 8)
                .layout(layout)
                .parallel(parallel)
                .region(region);
            let args = args.build().unwrap();
            let own = OwnCache::new(&args).map(drop).map_err(|error| error.field);
            (own, own_metadata(&args, Bytes::new(), "x").map(drop).map_err(|error| error.field))
        };
        let of = |field: &str| Err(field.to_owned());
        assert_eq!(refusal(&|_| ()), (Ok(()), Ok(())));
        assert_eq!(refusal(&|place| place.pcp_size = 2), (of("pcp_size"), of("pcp_size")));
        assert_eq!(
            refusal(&|place| place.dp_size = 2),
            (Ok(()), of("dp_size")),
            "a reader may have replicas"
        );
    }

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
