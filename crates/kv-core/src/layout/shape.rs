//! What lies inside an item of a region: keys, values, heads and tokens. Plans between unequal
//! caches need to know it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::axes::{Axes, NHD};
use super::constants::Constant;

/// Most cache groups of one worker. One request has items of at most
/// [`MAX_REQUEST_CACHE_GROUPS`](crate::MAX_REQUEST_CACHE_GROUPS) of them.
pub const MAX_CACHE_GROUPS: usize = 64;

/// What the items of a region hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Holds {
    /// Unknown. The items of such a region are exchanged whole, and only with the region at the same
    /// position of a cache of the same shape (equal in everything but the numbers of items).
    #[default]
    Opaque,
    /// The keys of attention layers.
    Key,
    /// The values of attention layers.
    Value,
    /// Keys and values, as two equal halves along [`Axis::Part`](super::Axis::Part).
    KeyValue,
    /// The latent of multi-head latent attention: every tensor-parallel rank holds the same bytes. Two
    /// tensors of a layer (`ckv` and `kpe`) are two [ranges of elements](super::Region::elements).
    Latent,
    /// Keys of a sparse-attention indexer: every tensor-parallel rank holds the same bytes.
    Index,
    /// One of the states of a recurrent layer (convolution, SSM …), cut among the tensor-parallel
    /// ranks along [`Axis::Head`](super::Axis::Head). The number tells several states of a layer apart, and must be
    /// the same at the peer.
    State(u8),
}

impl Holds {
    /// How many equal parts lie along [`Axis::Part`](super::Axis::Part).
    pub const fn parts(self) -> u32 {
        if matches!(self, Holds::KeyValue) { 2 } else { 1 }
    }

    /// True if all tensor-parallel ranks of an engine hold the same bytes.
    pub const fn is_replicated(self) -> bool {
        matches!(self, Holds::Latent | Holds::Index)
    }

    /// The kinds of bytes, as neighbouring numbers in the order in which they lie along
    /// [`Axis::Part`](super::Axis::Part). Values have the same number whether they lie alone or beside their keys.
    pub(crate) fn kinds(self) -> Range<u32> {
        match self {
            Holds::Opaque => 0..0,
            Holds::Key => 0..1,
            Holds::Value => 1..2,
            Holds::KeyValue => 0..2,
            Holds::Latent => 2..3,
            Holds::Index => 3..4,
            Holds::State(number) => 16 + u32::from(number)..17 + u32::from(number),
        }
    }
}

/// How a worker's regions hold the cache, beyond sizes. The default: token-major pages, no
/// replicated heads, no context parallelism, and state regions that are all slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Layout {
    /// The order of the axes inside an item, in every region that does not say another one
    /// ([`Region::axes`](super::Region::axes)).
    pub axes: Axes,
    /// KV heads of the model; 0 if every tensor-parallel rank holds other heads. A tensor-parallel
    /// group larger than this number holds each head several times (grouped-query attention).
    pub total_kv_heads: u32,
    /// Tokens of a physical page, where one page is made of several physical pages; 0 if the two
    /// are the same.
    pub kernel_page_size: u32,
    /// To how many ranks the pages of a request are dealt in turn (decode context parallelism); 1
    /// if every rank has all pages.
    pub dcp_size: u32,
    /// This rank's number among those ranks: `tp_rank % dcp_size`. The rank holds the pages
    /// `dcp_rank`, `dcp_rank + dcp_size` … of a request.
    pub dcp_rank: u32,
    /// The layers of every pipeline stage of the engine, as (first, one past the last); empty if
    /// there is one stage, or if the server does not say.
    pub stages: Vec<(u32, u32)>,
    /// The cache groups of the state regions, by group number; empty if the state regions are all
    /// slots that are copied as they are.
    pub groups: Vec<CacheGroup>,
    /// Values that both sides must have alike, 16 at most; empty if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub constants: Vec<Constant>,
}

impl Default for Layout {
    fn default() -> Layout {
        Layout {
            axes: NHD,
            total_kv_heads: 0,
            kernel_page_size: 0,
            dcp_size: 1,
            dcp_rank: 0,
            stages: Vec::new(),
            groups: Vec::new(),
            constants: Vec::new(),
        }
    }
}

impl Layout {
    /// The same with some fields changed: `Layout::default().with(|layout| layout.dcp_size = 2)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Layers whose items have indices of their own, beside the request's KV pages: slots of recurrent
/// layers, pages of sliding-window layers, pages of a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CacheGroup {
    /// Tokens of an item; 1 for slots. For items of several tokens, the peer may use another number.
    pub page_size: u32,
    /// Heads (or other equal shares) of an item on this rank.
    pub heads: u32,
    /// Heads over all tensor-parallel ranks.
    pub total_heads: u32,
    /// True if the peer may lack the group's regions, as when only one side has a draft model.
    pub optional: bool,
}

impl CacheGroup {
    /// A group of slots. This rank holds `heads` of `total_heads` equal shares of each.
    pub fn slots(heads: u32, total_heads: u32) -> CacheGroup {
        CacheGroup { page_size: 1, heads, total_heads, optional: false }
    }

    /// A group of pages of `page_size` tokens. This rank holds `heads` of `total_heads` heads.
    pub fn pages(page_size: u32, heads: u32, total_heads: u32) -> CacheGroup {
        CacheGroup { page_size, heads, total_heads, optional: false }
    }

    /// The same group, which a peer may lack.
    pub fn optional(mut self) -> CacheGroup {
        self.optional = true;
        self
    }
}
