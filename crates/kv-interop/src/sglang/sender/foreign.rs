//! A decode worker's cache, derived from this worker's own and from the worker's registration.

use std::collections::BTreeSet;

use kv_core::layout::{Form, NHD, RegionShape};
use kv_core::plan::{PlanError, RegionMap, Side};
use kv_core::{Geometry, Holds, Layout, MAX_PAGES, MemoryKind, Mismatch, Parallel, RegionRole};

use crate::cache::{ForeignCache, ForeignRegion, differs};
use crate::sglang::cache::OurCache;
use crate::sglang::codec::Registration;

/// How many aux rows a decode worker can have at most. SGLang does not tell the number: the regions reach as far
/// as the agent has registered memory, and the transport refuses rows beyond.
const MAX_ROWS: u64 = 1 << 24;

/// The decode worker's cache, and which of its bytes are this worker's to write.
pub(super) fn foreign(ours: &OurCache, theirs: &Registration) -> Result<(ForeignCache, RegionMap), Mismatch> {
    check_numbers(ours, theirs)?;
    let geometry = geometry(ours, theirs)?;
    let map = RegionMap::directed(&ours.geometry, &geometry, Side::Local).map_err(|error| match error {
        PlanError::Incompatible(mismatch) => mismatch,
        error => differs("registration", "a cache that fits", error),
    })?;
    let (memory, device, stride) = (MemoryKind::Dram, 0, 0);
    let kv = theirs.kv_ptrs.iter().zip(&theirs.item_lens).zip(&theirs.kinds).map(|((addr, len), kind)| {
        // SGLang registers host memory under device 0.
        let device = if *kind == MemoryKind::Dram { 0 } else { theirs.device };
        let items = u64::from(theirs.slots);
        ForeignRegion { addr: *addr, items, item_len: *len, stride: *len, memory: *kind, device }
    });
    let lens = ours.geometry.regions[ours.geometry.aux_regions()].iter().map(|region| region.item_len);
    let aux = theirs.aux_ptrs.iter().zip(lens).map(|(addr, item_len)| {
        let region = ForeignRegion { addr: *addr, items: u64::MAX, item_len, stride, memory, device };
        ForeignRegion { stride: item_len, ..region }
    });
    let regions = kv.chain(aux).collect();
    Ok((ForeignCache { geometry, regions }, map))
}

fn check_numbers(ours: &OurCache, theirs: &Registration) -> Result<(), Mismatch> {
    if theirs.has_state {
        return Err(differs("state_data_ptrs", "no state components", "some"));
    }
    if theirs.dcp_size != 1 {
        return Err(differs("dst_dcp_size (--dcp-size)", 1, theirs.dcp_size));
    }
    let (here, there) = (ours.geometry.aux_regions().len(), theirs.aux_ptrs.len());
    if here != there {
        return Err(differs("aux_data_ptrs (count)", here, there));
    }
    if !(1..=MAX_PAGES).contains(&theirs.slots) {
        return Err(differs("dst_num_slots", format!("1 to {MAX_PAGES}"), theirs.slots));
    }
    let (here, there) = (ours.geometry.parallel.tp_size.max(1), theirs.tp_size.max(1));
    if theirs.tp_rank >= there {
        return Err(differs("decode_tp_rank", format!("below {there}"), theirs.tp_rank));
    }
    if here.max(there) % here.min(there) != 0 {
        return Err(differs("decode_tp_size (--tp-size)", here, there));
    }
    Ok(())
}

fn geometry(ours: &OurCache, theirs: &Registration) -> Result<Geometry, Mismatch> {
    let here = &ours.geometry;
    let kv = &here.regions[here.kv_regions()];
    let opaque = kv.iter().any(|region| region.holds == Holds::Opaque);
    let regions = if opaque { mirrored(kv, theirs)? } else { labelled(ours, theirs)? };
    let aux = here.regions[here.aux_regions()].iter();
    let aux = aux.map(|region| RegionShape { len: region.item_len * MAX_ROWS, ..region.clone() });
    let total = here.total_kv_heads();
    Ok(Geometry {
        num_pages: theirs.slots,
        kv_heads: if opaque { here.kv_heads } else { (total / theirs.tp_size.max(1)).max(1) },
        parallel: Parallel::default().with(|place| {
            (place.tp_size, place.tp_rank) = (theirs.tp_size.max(1), theirs.tp_rank);
            if opaque {
                (place.pp_size, place.pp_rank) = (here.parallel.pp_size, here.parallel.pp_rank);
            }
        }),
        regions: regions.into_iter().chain(aux).collect(),
        layout: if opaque {
            here.layout.clone()
        } else {
            Layout::default().with(|layout| (layout.axes, layout.total_kv_heads) = (NHD, total))
        },
        ..here.clone()
    })
}

/// The regions of a worker with the same cache, where nobody says what regions hold: each has the item length of
/// the region at the same position here.
fn mirrored(kv: &[RegionShape], theirs: &Registration) -> Result<Vec<RegionShape>, Mismatch> {
    if kv.len() != theirs.kv_ptrs.len() {
        return Err(differs("kv_data_ptrs (count)", kv.len(), theirs.kv_ptrs.len()));
    }
    for (at, (here, there)) in kv.iter().zip(&theirs.item_lens).enumerate() {
        if here.item_len != *there {
            return Err(differs(&format!("kv_item_lens[{at}]"), here.item_len, there));
        }
    }
    let slots = u64::from(theirs.slots);
    let kinds = kv.iter().zip(&theirs.kinds);
    let shape = |(region, kind): (&RegionShape, &MemoryKind)| RegionShape {
        len: region.item_len * slots,
        memory: *kind,
        ..region.clone()
    };
    Ok(kinds.map(shape).collect())
}

/// The regions of SGLang's worker, in SGLang's order: the keys of all layers, then the values of all layers; or
/// the latents of all layers.
fn labelled(ours: &OurCache, theirs: &Registration) -> Result<Vec<RegionShape>, Mismatch> {
    let here = &ours.geometry;
    let kv = &here.regions[here.kv_regions()];
    let parts = if ours.latent { 1 } else { 2 };
    let count = theirs.kv_ptrs.len();
    let layers = layers(here, theirs, count / parts)?;
    if count != layers.len() * parts {
        return Err(differs("kv_data_ptrs (count)", layers.len() * parts, count));
    }
    let heads = (here.total_kv_heads() / theirs.tp_size.max(1)).max(1);
    let item_len = |region: &RegionShape| {
        let layer = region.item_len / u64::from(region.layers.max(1));
        if ours.latent {
            return layer;
        }
        let head = layer / u64::from(region.holds.parts()) / u64::from(here.kv_heads.max(1));
        head * u64::from(heads)
    };
    let of_layer = |layer: u32| {
        let first = |region: &RegionShape| region.layer.unwrap_or(0);
        kv.iter().find(|region| (first(region)..first(region) + region.layers).contains(&layer))
    };
    let mut regions = Vec::with_capacity(count);
    for (at, (there, kind)) in theirs.item_lens.iter().zip(&theirs.kinds).enumerate() {
        let (part, place) = (at / layers.len().max(1), at % layers.len().max(1));
        let layer = theirs.layer_ids.get(at).or(layers.get(place)).copied().unwrap_or(0);
        // A layer of another stage has the length of ours.
        let Some(region) = of_layer(layer).or(kv.first()) else { continue };
        let expected = item_len(region);
        if *there != expected {
            return Err(differs(&format!("kv_item_lens[{at}]"), expected, there));
        }
        let holds = match (ours.latent, part) {
            (true, _) => region.holds,
            (false, 0) => Holds::Key,
            (false, _) => Holds::Value,
        };
        let len = expected * u64::from(theirs.slots);
        regions.push(RegionShape {
            role: RegionRole::Kv,
            len,
            item_len: expected,
            memory: *kind,
            layer: Some(layer),
            layers: 1,
            holds,
            group: 0,
            form: Form::default(),
        });
    }
    Ok(regions)
}

/// The layers of the worker's regions: as the worker says, or those of this rank, or those of all stages.
fn layers(here: &Geometry, theirs: &Registration, count: usize) -> Result<Vec<u32>, Mismatch> {
    if !theirs.layer_ids.is_empty() {
        return Ok(theirs.layer_ids.iter().copied().take(count).collect());
    }
    let kv = &here.regions[here.kv_regions()];
    let of_region = |region: &RegionShape| {
        let first = region.layer.unwrap_or(0);
        first..first.saturating_add(region.layers)
    };
    let held: BTreeSet<u32> = kv.iter().flat_map(of_region).collect();
    if held.len() == count {
        return Ok(held.into_iter().collect());
    }
    let all = here.parallel.pp_size > 1 && held.last().is_none_or(|last| (*last as usize) < count);
    if all {
        return Ok((0..count as u32).collect());
    }
    Err(differs("kv_data_ptrs (layers)", held.len(), count))
}
