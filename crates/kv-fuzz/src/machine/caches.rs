//! The cache of the machine's worker, and the caches of its peers.

use std::sync::OnceLock;

use kv_core::layout::{HDN, RegionShape};
use kv_core::{CacheGroup, Geometry, Holds, KvArgs, Layout, Region, RegionRole, ServiceOffer};

/// Pages of the worker's cache: more than a frame can list.
pub(super) const PAGES: u32 = 1 << 20;

/// The arguments of a worker: of the machine's own worker and, with other numbers, of its peers.
fn args(engine: &str, pages: u32, page_size: u32) -> Option<KvArgs> {
    let item = 16 * u64::from(page_size);
    let kv = |layer| Region::dram(RegionRole::Kv, 1 << 40, u64::from(pages) * item, item).layer(layer);
    let state =
        |len: u64, item, group| Region::dram(RegionRole::State, 1 << 50, len * item, item).group(group);
    let groups =
        vec![CacheGroup::slots(1, 1), CacheGroup::pages(4, 1, 1), CacheGroup::pages(16, 1, 1).optional()];
    let mut builder =
        KvArgs::builder(engine, 0).pages(pages, page_size).heads(1, 8).max_inflight(6).max_sge(64);
    for layer in 0..2 {
        let addr = u64::from(layer) << 44;
        let mut region = kv(layer).holds(Holds::KeyValue);
        region.addr = (1 << 48) + addr;
        builder = builder.region(region);
    }
    builder = builder.region(Region::dram(RegionRole::Aux, 1 << 32, 16 * 16, 16));
    for (number, mut region) in (1..).zip([state(64, 32, 0), state(4096, 48, 1), state(64, 16, 2)]) {
        region.addr = number << 52;
        builder = builder.region(region);
    }
    builder.layout(Layout::default().with(|layout| layout.groups = groups)).build().ok()
}

/// The arguments of the machine's own worker.
pub(super) fn us() -> Option<&'static KvArgs> {
    static US: OnceLock<Option<KvArgs>> = OnceLock::new();
    US.get_or_init(|| args("us", PAGES, 16)).as_ref()
}

/// The cache of a peer, and the record of it at the bootstrap server.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) geometry: Geometry,
    pub(super) offer: ServiceOffer,
}

/// The number of different caches.
const CACHES: usize = 10;

/// A cache by its number, which the metadata of a peer names.
pub(super) fn cache(variant: u8) -> Option<&'static Cache> {
    static ALL: [OnceLock<Option<Cache>>; CACHES] = [const { OnceLock::new() }; CACHES];
    let variant = if usize::from(variant) < CACHES { variant } else { 0 };
    let made = || {
        let geometry = geometry(variant)?;
        Some(Cache { offer: ServiceOffer::kv(&geometry).ok()?, geometry })
    };
    ALL.get(usize::from(variant))?.get_or_init(made).as_ref()
}

/// Which cache a peer of a script has: most fit, and few have as many regions as there may
/// be.
pub(super) fn variant(byte: u8) -> u8 {
    match byte {
        0..128 => 0,
        128..252 => byte % 8,
        252 | 253 => 8 + byte % 2,
        _ => byte % 2,
    }
}

/// A geometry: like the worker's, divided differently (also the heads), small, or one that cannot be paired.
fn geometry(variant: u8) -> Option<Geometry> {
    let (pages, page_size) = match variant {
        2 => (PAGES, 8),
        3 => (64, 16),
        4 => (PAGES, 48),
        _ => (PAGES, 16),
    };
    let mut geometry = args("peer", pages, page_size)?.geometry().clone();
    match variant {
        2 | 4 => {
            geometry.regions[0].form.axes = Some(HDN.packed(2));
            geometry.layout.axes = HDN;
        }
        5 => geometry.dtype = "other".to_owned(),
        6 | 8 => {
            let region = geometry.regions.last()?.clone();
            geometry.regions.resize(if variant == 6 { 64 } else { 4096 }, region);
        }
        7 | 9 => {
            let (groups, regions) = if variant == 7 { (8, 60) } else { (64, 4000) };
            geometry.layout.groups = vec![CacheGroup::slots(1, 1).optional(); groups];
            let (region, group) = (geometry.regions.last()?.clone(), groups as u16 - 1);
            let more = RegionShape { group, holds: Holds::Opaque, ..region };
            geometry.regions.resize(regions, more);
        }
        _ => {}
    }
    Some(geometry)
}
