//! How a worker's regions hold the cache: the [`Geometry`] that peers compare, and which ranks
//! exchange bytes.
//!
//! A [`Geometry`] gives sizes, and its [`Layout`] says how keys, values, tokens and heads lie
//! inside an item. Two workers whose caches differ only in the number of items exchange items as they
//! are, whatever the items hold. If anything else differs, they can exchange bytes only if their
//! regions say what they [hold](Holds): then [`plan`](crate::plan) finds the bytes of every layer,
//! token and head on both sides.

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
#[doc(hidden)]
pub use layers::HeldLayers;
pub use parallel::Parallel;
pub use ranks::{Source, consumers, receivers_of, sources};
pub(crate) use ranks::{gcd, shares};
pub use region::{MAX_REGIONS, MemoryKind, Region, RegionRole};
pub use shape::{Axes, Axis, CacheGroup, HND, HND_PACKED, Holds, Layout, MAX_CACHE_GROUPS, NHD, NHD_PACKED};
pub use validate::GeometryError;

/// A region as peers are told it. The address is missing, because only the transport needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionShape {
    /// What the region is for.
    pub role: RegionRole,
    /// Length of the region in bytes.
    pub len: u64,
    /// Bytes of one item.
    pub item_len: u64,
    /// Kind of the memory: host, device or file.
    pub memory: MemoryKind,
    /// The model layer that the items hold, or the first of several; `None` if the server did not
    /// say.
    pub layer: Option<u32>,
    /// How many layers lie in each item, from `layer` on.
    #[serde(default = "one")]
    pub layers: u32,
    /// What the items hold.
    #[serde(default)]
    pub holds: Holds,
    /// The group of a state region, by its position in [`Layout::groups`].
    #[serde(default)]
    pub group: u16,
}

fn one() -> u32 {
    1
}

impl RegionShape {
    /// How many whole items the region holds; 0 if `item_len` is zero.
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

/// The geometry of a worker's cache: everything on which two peers must agree, or which a plan
/// between them must know.
///
/// A page takes `item_len` bytes in each KV region. Two arrangements are common: *layer-major*,
/// with one region for K and one for V of each layer, and *page-major*, with one region in which a
/// page holds all layers. Both are lists of regions here. In the page-major arrangement a page is
/// one descriptor, in the layer-major one a page is one descriptor for each region.
///
/// The geometry of a [`KvArgs`](crate::KvArgs) is valid. A geometry that came from a peer may hold
/// anything: [`validate`](Geometry::validate) it before use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// How many pages the cache has.
    pub num_pages: u32,
    /// How many tokens a page has.
    pub page_size: u32,
    /// Element type, by the name that both engines use (`bf16`, `fp8_e4m3` …).
    pub dtype: String,
    /// How many KV heads this rank holds.
    pub kv_heads: u32,
    /// How many elements one head has.
    pub head_dim: u32,
    /// Name or hash of the model; empty if not given.
    pub model: String,
    /// The engine's parallel groups, and this rank's place in each.
    pub parallel: Parallel,
    /// The regions: KV, then aux, then state.
    pub regions: Vec<RegionShape>,
    /// How the regions hold the cache.
    #[serde(default)]
    pub layout: Layout,
}

impl Geometry {
    /// The positions of the KV regions in `regions`.
    pub fn kv_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Kv)
    }

    /// The positions of the aux regions in `regions`.
    pub fn aux_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Aux)
    }

    /// How many aux rows there are: the number that every aux region has. `None` if there is no aux
    /// region.
    pub fn aux_rows(&self) -> Option<u32> {
        let rows = each(self.regions.get(self.aux_regions())?).map(RegionShape::items).min()?;
        Some(u32::try_from(rows).unwrap_or(u32::MAX))
    }

    /// How many items every region of a cache group has; 0 if there is no such region.
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

    /// Tokens of a physical page: [`Layout::kernel_page_size`], or the page size if that is 0.
    pub fn kernel_page_size(&self) -> u32 {
        if self.layout.kernel_page_size == 0 { self.page_size } else { self.layout.kernel_page_size }
    }

    /// KV heads of the whole model: [`Layout::total_kv_heads`], or those of all tensor-parallel
    /// ranks if that is 0.
    pub fn total_kv_heads(&self) -> u32 {
        if self.layout.total_kv_heads == 0 {
            self.kv_heads.saturating_mul(self.replicas())
        } else {
            self.layout.total_kv_heads
        }
    }

    /// How many tokens a page number stands for where all ranks of a decode-context-parallel group
    /// are given the same page numbers: one page of every rank together.
    pub fn page_tokens(&self) -> u32 {
        self.page_size.saturating_mul(self.layout.dcp_size.max(1))
    }

    /// How many pages a request of `tokens` tokens has on all ranks of a decode-context-parallel
    /// group together.
    pub fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size.max(1) as usize)
    }

    /// How many pages of a request of `tokens` tokens are dealt to this rank of its
    /// decode-context-parallel group.
    pub fn own_pages_of(&self, tokens: usize) -> usize {
        let from_here = self.pages_of(tokens).saturating_sub(self.layout.dcp_rank as usize);
        from_here.div_ceil(self.layout.dcp_size.max(1) as usize)
    }
}
