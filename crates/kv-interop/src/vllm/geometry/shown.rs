//! What this worker tells vLLM's ranks of its cache.

use kv_core::layout::{Axis, Holds};
use kv_core::{KvArgs, MemoryKind};

use super::own::{CacheError, OwnCache, refused};
use crate::vllm::metadata::NixlAgentMetadata;

/// The metadata of this worker, for vLLM's ranks. `agent_metadata` is the blob of the worker's NIXL agent.
///
/// # Errors
///
/// [`CacheError`] if the cache is not arranged as vLLM's ranks need the cache.
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
pub(super) fn shown_layout(cache: &OwnCache) -> Result<&'static str, CacheError> {
    let axes = cache.geometry.layout.axes;
    let [outermost, ..] = axes.order();
    let spread = cache.geometry.regions.iter().any(|region| region.layers > 1);
    if spread && outermost != Axis::Layer {
        return Err(refused("layout.axes", format!("{outermost:?} outermost"), "Axis::Layer outermost"));
    }
    if !axes.dim_is_innermost() {
        return Err(refused("layout.axes", axes, "the elements of a head innermost"));
    }
    // Latents have one head and one part: the order of these axes does not matter.
    let mut packed: Vec<Axis> =
        axes.order().into_iter().filter(|axis| ![Axis::Layer, Axis::Dim].contains(axis)).collect();
    if cache.geometry.kv_heads == 1 {
        // One head lies in the same place in either order of heads and tokens.
        packed.retain(|axis| *axis != Axis::Head);
    }
    match (cache.latent, packed.as_slice()) {
        (true, _) | (_, [Axis::Head, Axis::Token, Axis::Part] | [Axis::Token, Axis::Part]) => Ok("LBHNC"),
        (_, [Axis::Token, Axis::Head, Axis::Part]) => Ok("LBNHC"),
        _ => Err(refused("layout.axes", axes, "HND_PACKED: heads, tokens, keys beside values")),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kv_core::layout::{Axes, HND_PACKED, Layout, NHD_PACKED, RegionRole};
    use kv_core::{Parallel, Region};

    use super::*;
    use crate::vllm::geometry::tests::{LEN, metadata};

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
        assert_eq!(refusal(&|_| (), kv_core::layout::HDN), Err("layout.axes".to_owned()));
        let own = |region: &mut Region| region.form.axes = Some(HND_PACKED);
        assert_eq!(refusal(&own, HND_PACKED), Err("regions[0].form".to_owned()));
        let holds = Err("regions[0].holds".to_owned());
        assert_eq!(refusal(&|region| region.holds = Holds::Opaque, HND_PACKED), holds);
        assert_eq!(refusal(&|region| region.holds = Holds::Key, HND_PACKED), holds);
        let inner = Axes::new([Axis::Head, Axis::Layer, Axis::Token, Axis::Part]);
        assert_eq!(refusal(&|region| region.layers = 2, inner), Err("layout.axes".to_owned()));
        assert_eq!(
            refusal(&|region| region.memory = MemoryKind::File, HND_PACKED),
            Err("regions.memory".to_owned())
        );
    }
}
