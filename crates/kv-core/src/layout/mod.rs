//! How a worker's regions hold the cache: the [`Geometry`] that peers compare, and which ranks
//! exchange bytes.
//!
//! A [`Geometry`] gives sizes, and its [`Layout`] says how keys, values, tokens and heads lie
//! inside an item. Two workers whose caches differ only in the number of items exchange items as they
//! are, whatever the items hold. If anything else differs, they can exchange bytes only if their
//! regions say what they [hold](Holds): then [`plan`](crate::plan) finds the bytes of every layer,
//! token and head on both sides.
//!
//! # The caches of some servers
//!
//! Every tensor of a layer is a region, in any of the orders that servers use. A peer may use another
//! order, other pages, and other parallel groups.
//!
//! ```
//! use kv_core::layout::{Axes, HDN, HND, NHD};
//! use kv_core::{ArgsError, Geometry, Holds, KvArgs, Region, RegionRole};
//!
//! const BLOCKS: u32 = 100;
//! const BLOCK: u32 = 64;
//!
//! /// A tensor [blocks, …] of bf16, `elements` a block.
//! fn tensor(addr: u64, elements: u32) -> Region {
//!     let item_len = 2 * u64::from(elements);
//!     Region::dram(RegionRole::Kv, addr << 32, u64::from(BLOCKS) * item_len, item_len)
//! }
//!
//! /// A layer of 8 heads of 128 elements, keys and values in two tensors with these axes.
//! fn cache(keys: Axes, values: Axes) -> Result<Geometry, ArgsError> {
//!     let tensor = |addr| tensor(addr, BLOCK * 8 * 128).layer(0);
//!     let args = KvArgs::builder("engine", 0)
//!         .pages(BLOCKS, BLOCK)
//!         .heads(8, 128)
//!         .dtype("bf16")
//!         .region(tensor(1).holds(Holds::Key).axes(keys))
//!         .region(tensor(2).holds(Holds::Value).axes(values));
//!     Ok(args.build()?.geometry().clone())
//! }
//!
//! // vllm.rs with flash attention: [blocks, block, heads, head_dim].
//! let flash = cache(NHD, NHD)?;
//! // vllm.rs with paged attention, and candle-vllm: keys [blocks, heads, head_dim / 8, block, 8], values
//! // [blocks, heads, head_dim, block].
//! let paged = cache(HDN.packed(8), HDN)?;
//! flash.check(&cache(HND, HND)?)?;
//! paged.check(&paged)?;
//!
//! // From values whose elements are apart to values whose elements are together, every element would be a
//! // range of its own. That is planned up to `MAX_SPLIT_RANGES` ranges a token, and then refused.
//! flash.check(&paged)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Multi-head latent attention with two tensors of a layer is an example of [`Region::elements`]. Layers
//! that differ, as in Gemma, say so in their regions:
//!
//! ```
//! use kv_core::{Holds, KvArgs, Layout, Region, RegionRole};
//!
//! // Tensor-parallel rank 0 of 2. Of the model's layers, most have 8 KV heads of 128 elements, and every
//! // sixth has 4 heads of 256.
//! let tensor = |layer: u32, head_elements: u64, holds| {
//!     let (item_len, at) = (2 * 64 * head_elements, 2 * layer + u32::from(holds == Holds::Value));
//!     let region = Region::dram(RegionRole::Kv, u64::from(1 + at) << 32, 100 * item_len, item_len);
//!     region.layer(layer).holds(holds)
//! };
//! let mut args = KvArgs::builder("engine", 0)
//!     .pages(100, 64)
//!     .heads(4, 128)
//!     .parallel(kv_core::Parallel::default().with(|group| group.tp_size = 2))
//!     .layout(Layout::default().with(|layout| layout.total_kv_heads = 8));
//! for layer in 0..12 {
//!     for holds in [Holds::Key, Holds::Value] {
//!         args = args.region(match layer % 6 {
//!             5 => tensor(layer, 2 * 256, holds).heads(2, 4).head_dim(256),
//!             _ => tensor(layer, 4 * 128, holds),
//!         });
//!     }
//! }
//! assert!(args.build().is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The scales of an fp8 cache that every worker measures for itself travel with the request, as a slot of a
//! cache group: one number for each layer, key or value, and head. The slots are cut among the ranks as the
//! heads are. Scales that are fixed are a [`Constant`], which is compared when two workers meet.
//!
//! ```
//! use kv_core::{CacheGroup, Holds, KvArgs, Layout, Region, RegionRole};
//!
//! let (layers, heads, slots) = (36, 8, 4);
//! let item_len = u64::from(2 * layers * heads * 4);
//! let scales = Region::dram(RegionRole::State, 0x9000_0000, slots * item_len, item_len)
//!     .layers(0..layers)
//!     .holds(Holds::KeyValue)
//!     .group(0);
//! let keys_and_values = 2 * 64 * u64::from(heads) * 128;
//! let pages = Region::dram(RegionRole::Kv, 1 << 40, 100 * 36 * keys_and_values, 36 * keys_and_values);
//! let args = KvArgs::builder("engine", 0)
//!     .pages(100, 64)
//!     .heads(heads, 128)
//!     .dtype("fp8_e4m3")
//!     .layout(Layout::default().with(|layout| layout.groups = vec![CacheGroup::slots(heads, heads)]))
//!     .region(pages.layers(0..layers).holds(Holds::KeyValue))
//!     .region(scales);
//! assert!(args.build().is_ok());
//! ```

mod axes;
mod cells;
mod check;
mod constants;
mod form;
mod layers;
mod loops;
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

pub use axes::{Axes, Axis, HDN, HND, HND_PACKED, NHD, NHD_PACKED};
pub(crate) use cells::{Overlap, holders, overlaps};
pub use check::MAX_SPLIT_RANGES;
pub(crate) use check::remedy;
pub use constants::{Constant, MAX_CONSTANTS};
pub(crate) use form::Content;
pub use form::{Form, MAX_ELEMENT_RANGES};
#[doc(hidden)]
pub use layers::HeldLayers;
pub(crate) use loops::{Loop, Loops, Steps};
pub use parallel::Parallel;
pub use ranks::{Source, consumers, receivers_of, sources};
pub(crate) use ranks::{gcd, shares};
pub use region::{MAX_REGIONS, MemoryKind, Region, RegionRole};
pub use shape::{CacheGroup, Holds, Layout, MAX_CACHE_GROUPS};
pub use validate::GeometryError;

/// A region as peers are told it. The address is missing, because only the transport needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "WireRegion", from = "WireRegion")]
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
    pub layers: u32,
    /// What the items hold.
    pub holds: Holds,
    /// The group of a state region, by its position in [`Layout::groups`].
    pub group: u16,
    /// Where the region differs from the rest of the cache.
    pub form: Form,
}

/// A [`RegionShape`] as it travels.
#[derive(Serialize, Deserialize)]
struct WireRegion {
    role: RegionRole,
    len: u64,
    item_len: u64,
    memory: MemoryKind,
    layer: Option<u32>,
    #[serde(default = "one")]
    layers: u32,
    #[serde(default)]
    holds: Content,
    #[serde(default)]
    group: u16,
}

impl From<RegionShape> for WireRegion {
    fn from(region: RegionShape) -> WireRegion {
        let RegionShape { role, len, item_len, memory, layer, layers, holds, group, form } = region;
        WireRegion { role, len, item_len, memory, layer, layers, holds: (holds, form).into(), group }
    }
}

impl From<WireRegion> for RegionShape {
    fn from(region: WireRegion) -> RegionShape {
        let WireRegion { role, len, item_len, memory, layer, layers, holds, group } = region;
        let (holds, form) = holds.into();
        RegionShape { role, len, item_len, memory, layer, layers, holds, group, form }
    }
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
            form: region.form,
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
