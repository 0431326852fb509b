//! How a worker's regions hold the cache: the geometry that peers compare, and who exchanges bytes
//! with whom.
//!
//! A [`Geometry`] says how large things are, its [`Layout`] how they lie inside an item. Two that
//! are equal exchange items as they are, whatever is in them. Two that differ can do so only if
//! their regions say what they [hold](Holds): then [`plan`](crate::plan) finds the bytes of every
//! layer, token and head on both sides.

mod cells;
mod check;
mod layers;
mod parallel;
mod ranks;
mod region;
mod shape;
#[cfg(test)]
mod tests;
mod validate;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::meter::each;

pub(crate) use cells::{Inside, Overlap, holders, overlaps};
pub(crate) use check::remedy;
pub(crate) use layers::HeldLayers;
pub use parallel::Parallel;
pub use ranks::{Source, consumers, receivers_of, sources};
pub(crate) use ranks::{gcd, shares};
pub use region::{MAX_REGIONS, MemoryKind, Region, RegionRole};
pub use shape::{Axes, Axis, CacheGroup, HND, HND_PACKED, Holds, Layout, MAX_GROUPS, NHD, NHD_PACKED};
pub use validate::GeometryError;

/// A region as peers are told it: without its address, which is the transport's business.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionShape {
    /// What it is for.
    pub role: RegionRole,
    /// Length in bytes.
    pub len: u64,
    /// Bytes of one item.
    pub item_len: u64,
    /// Kind of memory.
    pub memory: MemoryKind,
    /// The model layer, or the first of several.
    pub layer: Option<u32>,
    /// How many layers lie in each item, from `layer` on.
    #[serde(default = "one")]
    pub layers: u32,
    /// What its items hold.
    #[serde(default)]
    pub holds: Holds,
    /// Which group of [`Layout::groups`] a state region belongs to.
    #[serde(default)]
    pub group: u16,
}

fn one() -> u32 {
    1
}

impl RegionShape {
    /// How many whole items it holds; none if `item_len` is zero.
    pub fn items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

impl From<&Region> for RegionShape {
    fn from(region: &Region) -> RegionShape {
        RegionShape {
            role: region.role,
            len: region.len,
            item_len: region.item_len,
            memory: region.memory,
            layer: region.layer,
            layers: region.layers,
            holds: region.holds,
            group: region.group,
        }
    }
}

/// The geometry of a worker's cache: everything that two peers must agree on, or plan around.
///
/// Pages are `item_len` bytes in each KV region. Two kinds are common: *layer-major*, one region
/// for K and one for V of each layer; *page-major*, one region in which a page holds all layers.
/// Here both are just lists of regions; the second makes one descriptor of a page, the first one
/// for each region.
///
/// One that a [`KvArgs`](crate::KvArgs) gives is valid. One that came from a peer may be anything:
/// [`validate`](Geometry::validate) it before use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Pages in the cache.
    pub num_pages: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Element type.
    pub dtype: String,
    /// KV heads on this rank.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Name or hash of the model; empty if not given.
    pub model: String,
    /// Parallel groups.
    pub parallel: Parallel,
    /// The regions: KV, then aux, then state.
    pub regions: Vec<RegionShape>,
    /// How the regions hold the cache.
    #[serde(default)]
    pub layout: Layout,
}

impl Geometry {
    /// The positions of the KV regions.
    pub fn kv_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Kv)
    }

    /// The positions of the aux regions.
    pub fn aux_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Aux)
    }

    /// How many rows every aux region has; `None` if there is no aux region.
    pub fn aux_rows(&self) -> Option<u32> {
        let rows = each(self.regions.get(self.aux_regions())?).map(RegionShape::items).min()?;
        Some(u32::try_from(rows).unwrap_or(u32::MAX))
    }

    /// How many items every region of a cache group has; none if there is no such region.
    pub fn group_items(&self, group: u16) -> u32 {
        let of_group = |region: &&RegionShape| region.role == RegionRole::State && region.group == group;
        let items = each(&self.regions).filter(of_group).map(RegionShape::items).min();
        u32::try_from(items.unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// Bytes of one page in all KV regions together.
    pub fn bytes_per_page(&self) -> u64 {
        let kv = each(&self.regions).filter(|region| region.role == RegionRole::Kv);
        kv.fold(0, |sum, region| sum.saturating_add(region.item_len))
    }

    fn regions_of(&self, role: RegionRole) -> Range<usize> {
        let start = self.regions.partition_point(|region| region.role < role);
        start..self.regions.partition_point(|region| region.role <= role)
    }

    fn count(&self, role: RegionRole) -> usize {
        each(&self.regions).filter(|region| region.role == role).count()
    }

    /// Tokens of a physical page: the page itself, unless the layout says otherwise.
    pub fn kernel_page_size(&self) -> u32 {
        if self.layout.kernel_page_size == 0 { self.page_size } else { self.layout.kernel_page_size }
    }

    /// KV heads of the model.
    pub fn total_kv_heads(&self) -> u32 {
        if self.layout.total_kv_heads == 0 {
            self.kv_heads.saturating_mul(self.replicas())
        } else {
            self.layout.total_kv_heads
        }
    }

    /// The tokens of one page of every rank of a context-parallel group together: what a page number
    /// stands for where all ranks are given the same numbers.
    pub fn page_tokens(&self) -> u32 {
        self.page_size.saturating_mul(self.layout.dcp_size.max(1))
    }

    /// The pages of a request of `tokens` tokens, on all ranks of a context-parallel group together.
    pub fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size.max(1) as usize)
    }

    /// Those of them that are dealt to this rank.
    pub fn own_pages_of(&self, tokens: usize) -> usize {
        let from_here = self.pages_of(tokens).saturating_sub(self.layout.dcp_rank as usize);
        from_here.div_ceil(self.layout.dcp_size.max(1) as usize)
    }
}
