//! Which bytes of this worker's cache correspond to which bytes of one peer's cache, computed once
//! when the two meet.

use std::collections::BTreeMap;

use crate::error::Mismatch;
use crate::layout::RegionRole;
use crate::layout::{Geometry, Layout, receivers_of};
use crate::meter::each;
use crate::plan::{RegionMap, Side};

/// Most ranges of layers for which maps are kept for one peer.
const MAX_LAYER_MAPS: usize = 512;

/// The peer's geometry, with everything that is computed from it and from this worker's geometry.
#[derive(Debug, Clone)]
pub(in crate::proto) struct Maps {
    geometry: Geometry,
    aux_rows: u32,
    /// How many items the peer has of each cache group.
    group_items: Box<[u32]>,
    mismatch: Option<Mismatch>,
    out: Option<RegionMap>,
    /// The map `out` for some layers, as announcements have named them: made when first needed.
    out_layers: BTreeMap<(u32, u32), RegionMap>,
    inward: Option<RegionMap>,
    ranks_served: u32,
    /// True if the peer's cache could not be understood.
    unknown: bool,
}

impl Maps {
    pub(in crate::proto) fn new(geometry: Option<Geometry>, here: &Geometry) -> Maps {
        let Some(geometry) = geometry else { return Maps::unknown(here) };
        let mismatch = here.check(&geometry).err();
        let fits = mismatch.is_none();
        let map = |source| if fits { RegionMap::directed(here, &geometry, source).ok() } else { None };
        Maps {
            aux_rows: geometry.aux_rows().unwrap_or(0),
            group_items: group_items(&geometry),
            mismatch,
            out: map(Side::Local),
            out_layers: BTreeMap::new(),
            inward: map(Side::Remote),
            ranks_served: u32::try_from(receivers_of(&geometry, here)).unwrap_or(u32::MAX).max(1),
            geometry,
            unknown: false,
        }
    }

    /// The maps for a peer whose cache cannot be understood here: nothing fits, and little is kept.
    fn unknown(here: &Geometry) -> Maps {
        let (parallel, layout) = (here.parallel, Layout::default());
        let (dtype, model, regions) = (String::new(), String::new(), Vec::new());
        let (num_pages, page_size, kv_heads, head_dim) = (0, 1, 0, 0);
        Maps {
            geometry: Geometry {
                num_pages,
                page_size,
                dtype,
                kv_heads,
                head_dim,
                model,
                parallel,
                regions,
                layout,
            },
            aux_rows: 0,
            group_items: Box::default(),
            mismatch: None,
            out: None,
            out_layers: BTreeMap::new(),
            inward: None,
            ranks_served: 1,
            unknown: true,
        }
    }

    /// True if the peer's cache could not be understood.
    pub(in crate::proto) fn is_unknown(&self) -> bool {
        self.unknown
    }

    /// The peer's own geometry.
    pub(in crate::proto) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How many aux rows the peer has.
    pub(in crate::proto) fn aux_rows(&self) -> u32 {
        self.aux_rows
    }

    /// How many items every region of each of the peer's cache groups has.
    pub(in crate::proto) fn group_items(&self) -> &[u32] {
        &self.group_items
    }

    /// Why the peer's cache does not fit this worker's; `None` if it fits.
    pub(in crate::proto) fn mismatch(&self) -> Option<&Mismatch> {
        self.mismatch.as_ref()
    }

    /// How many ranks of this worker's engine the peer has to serve for a request.
    pub(in crate::proto) fn ranks_served(&self) -> u32 {
        self.ranks_served
    }

    /// The bytes that this worker sends to the peer; `None` if the caches do not fit.
    pub(in crate::proto) fn out(&self) -> Option<&RegionMap> {
        self.out.as_ref()
    }

    /// The bytes of these layers (`None` for all) that this worker, with the geometry `here`, sends
    /// to the peer.
    pub(in crate::proto) fn out_of_layers(
        &mut self,
        here: &Geometry,
        layers: Option<(u32, u32)>,
    ) -> Option<&RegionMap> {
        let all = self.out.as_ref()?;
        let Some(layers) = layers else { return Some(all) };
        // Servers usually cut the layers of all requests in the same places.
        if self.out_layers.len() >= MAX_LAYER_MAPS && !self.out_layers.contains_key(&layers) {
            self.out_layers.clear();
        }
        let make = || all.of_layers(here, &self.geometry, layers.0..layers.1);
        Some(self.out_layers.entry(layers).or_insert_with(make))
    }

    /// The bytes that the peer sends to this worker; `None` if the caches do not fit.
    pub(in crate::proto) fn inward(&self) -> Option<&RegionMap> {
        self.inward.as_ref()
    }
}

/// How many items every region of each cache group has; 0 if there is no such region.
fn group_items(geometry: &Geometry) -> Box<[u32]> {
    let mut items = vec![None; geometry.layout.groups.len().max(1)];
    for region in each(&geometry.regions).filter(|region| region.role == RegionRole::State) {
        if let Some(known) = items.get_mut(usize::from(region.group)) {
            let own = u32::try_from(region.items()).unwrap_or(u32::MAX);
            *known = Some(known.map_or(own, |least: u32| least.min(own)));
        }
    }
    items.into_iter().map(Option::unwrap_or_default).collect()
}
