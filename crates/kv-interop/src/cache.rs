//! A foreign rank's cache: a geometry that the planner takes, and the places where its pages really lie.
//!
//! The planner counts with regions in which pages lie one behind the other. A foreign engine may leave room
//! between the pages of a region (vLLM's `block_strides`), for instance because the pages of all layers lie side
//! by side.

use std::collections::VecDeque;

use kv_core::layout::Geometry;
use kv_core::{Descriptor, MemoryKind, Mismatch};

use crate::message::AgentRegion;

/// A region of a foreign cache: `items` pages of `item_len` bytes, `stride` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForeignRegion {
    pub(crate) addr: u64,
    pub(crate) items: u64,
    pub(crate) item_len: u64,
    pub(crate) stride: u64,
    pub(crate) memory: MemoryKind,
    pub(crate) device: u64,
}

/// The cache of one foreign rank. Region *n* of the geometry is region *n* of the list.
#[derive(Debug, Clone)]
pub(crate) struct ForeignCache {
    pub(crate) geometry: Geometry,
    pub(crate) regions: Vec<ForeignRegion>,
}

impl ForeignCache {
    /// The regions as the transport is told them. The maker of the cache has checked that each region ends inside
    /// 64 bits.
    pub(crate) fn agent_regions(&self) -> Vec<AgentRegion> {
        let region = |region: &ForeignRegion| {
            let ForeignRegion { addr, items, item_len, stride, memory, device } = *region;
            let len = items.saturating_sub(1).saturating_mul(stride).saturating_add(item_len);
            AgentRegion { addr, len, stride, memory, device }
        };
        self.regions.iter().map(region).collect()
    }

    /// Appends a planned descriptor with the offsets that the foreign region really has, in as many pieces as
    /// there are pages if the pages do not lie one behind the other.
    pub(crate) fn place(&self, planned: Descriptor, out: &mut VecDeque<Descriptor>) {
        let Some(region) = self.regions.get(planned.remote_region as usize) else { return };
        if region.stride == region.item_len {
            out.push_back(planned);
            return;
        }
        let mut rest = planned;
        while rest.len > 0 {
            let (item, inside) = (rest.remote_offset / region.item_len, rest.remote_offset % region.item_len);
            let len = rest.len.min(region.item_len - inside);
            out.push_back(Descriptor { remote_offset: item * region.stride + inside, len, ..rest });
            rest.local_offset += len;
            rest.remote_offset += len;
            rest.len -= len;
        }
    }
}

/// Why a foreign rank is refused: a field, by the name that the rank's engine gives to the field, and both values.
pub(crate) fn differs(field: &str, ours: impl ToString, theirs: impl ToString) -> Mismatch {
    Mismatch { field: field.to_owned(), ours: ours.to_string(), theirs: theirs.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::{KvArgs, Region, RegionRole};

    #[test]
    fn a_run_of_pages_is_cut_where_the_foreign_pages_lie_apart() {
        let args = KvArgs::builder("e", 0).pages(4, 16);
        let args = args.region(Region::dram(RegionRole::Kv, 4096, 400, 100)).build().unwrap();
        let region = |stride| ForeignRegion {
            addr: 1000,
            items: 4,
            item_len: 100,
            stride,
            memory: MemoryKind::Dram,
            device: 0,
        };
        let cache =
            |stride| ForeignCache { geometry: args.geometry().clone(), regions: vec![region(stride)] };
        let planned =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 7, remote_offset: 150, len: 200 };
        let placed = |stride| {
            let mut out = VecDeque::new();
            cache(stride).place(planned, &mut out);
            out.iter().map(|piece| (piece.local_offset, piece.remote_offset, piece.len)).collect::<Vec<_>>()
        };
        assert_eq!(placed(100), [(7, 150, 200)]);
        assert_eq!(placed(300), [(7, 350, 50), (57, 600, 100), (157, 900, 50)]);
        let len = |stride| cache(stride).agent_regions()[0].len;
        assert_eq!((len(100), len(300)), (400, 1000));
    }
}
