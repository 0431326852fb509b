//! What lies inside an item of a region: the part of a geometry that a plan between unequal caches needs.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Most cache groups of one worker.
pub const MAX_GROUPS: usize = 64;

/// What the items of a region hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Holds {
    /// Nobody said. Such a region goes with the one at the same position of a cache of the very same
    /// shape, item by item, and with no other.
    #[default]
    Opaque,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Keys and values: two equal halves along [`Axis::Part`].
    KeyValue,
    /// The latent of multi-head latent attention: every tensor-parallel rank holds the same bytes.
    Latent,
    /// Keys of a sparse-attention indexer: every tensor-parallel rank holds the same bytes.
    Index,
    /// State number so-and-so of a recurrent layer (convolution, SSM …), cut among the
    /// tensor-parallel ranks along [`Axis::Head`]. The number is the same at the peer.
    State(u8),
}

impl Holds {
    /// How many equal parts lie along [`Axis::Part`].
    pub const fn parts(self) -> u32 {
        if matches!(self, Holds::KeyValue) { 2 } else { 1 }
    }

    /// True if all tensor-parallel ranks of an engine hold the same bytes.
    pub const fn is_replicated(self) -> bool {
        matches!(self, Holds::Latent | Holds::Index)
    }

    /// The kinds of bytes in it, as neighbouring numbers in the order in which they lie along
    /// [`Axis::Part`]: a value that is packed with its key has the number that it has alone.
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

/// A direction inside an item. The elements of one head (`head_dim`) lie innermost, always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Axis {
    /// The layers of the region.
    Layer,
    /// Key, value.
    Part,
    /// The tokens of a page.
    Token,
    /// The heads of this rank.
    Head,
}

/// The axes of an item, outermost first.
pub type Axes = [Axis; 4];

/// Token-major pages (`NHD`): layers, then keys before values, then tokens, then heads.
pub const NHD: Axes = [Axis::Layer, Axis::Part, Axis::Token, Axis::Head];
/// Head-major pages (`HND`): layers, then keys before values, then heads, then tokens.
pub const HND: Axes = [Axis::Layer, Axis::Part, Axis::Head, Axis::Token];
/// Head-major pages with key and value of a token side by side, as vLLM packs them.
pub const HND_PACKED: Axes = [Axis::Layer, Axis::Head, Axis::Token, Axis::Part];
/// Token-major pages with key and value of a head side by side.
pub const NHD_PACKED: Axes = [Axis::Layer, Axis::Token, Axis::Head, Axis::Part];

/// How a worker's regions hold the cache, beyond sizes. The default says nothing more than the
/// geometry does: token-major, no replication, no context parallelism, one group of state slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Layout {
    /// The order inside an item, in every region.
    pub axes: Axes,
    /// KV heads of the model; 0 if every rank of the tensor-parallel group holds others. Larger
    /// groups than this hold each head several times (grouped-query attention).
    pub total_kv_heads: u32,
    /// Tokens of a physical page, of which a page is a row of several; 0 if the page is one itself.
    pub kernel_page_size: u32,
    /// Over how many ranks the pages of a request are dealt in turn (decode context parallelism).
    pub dcp_size: u32,
    /// This rank among them: `tp_rank % dcp_size`. It holds pages `rank`, `rank + size` …
    pub dcp_rank: u32,
    /// The layers of every pipeline stage of the engine, (first, one past the last); empty if there
    /// is one stage, or if nobody said.
    pub stages: Vec<(u32, u32)>,
    /// What the state regions are for, by their group number; empty if they are all slots that are
    /// copied as they are.
    pub groups: Vec<CacheGroup>,
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
        }
    }
}

/// Regions that a request uses beside its KV pages, with indices of their own: slots of recurrent
/// layers, the window pages of sliding-window layers, the pages of a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    /// Tokens of an item; 1 for slots. Items of several tokens may be paged differently at the peer.
    pub page_size: u32,
    /// Heads (or other equal shares) of an item on this rank.
    pub heads: u32,
    /// Heads over all tensor-parallel ranks.
    pub total_heads: u32,
    /// True if the peer may lack the group's regions, as for a draft model of one side only.
    pub optional: bool,
}

impl CacheGroup {
    /// Slots of which every tensor-parallel rank holds `heads` of `total_heads` equal shares.
    pub fn slots(heads: u32, total_heads: u32) -> CacheGroup {
        CacheGroup { page_size: 1, heads, total_heads, optional: false }
    }

    /// Pages of `page_size` tokens, `heads` of `total_heads` heads on this rank.
    pub fn pages(page_size: u32, heads: u32, total_heads: u32) -> CacheGroup {
        CacheGroup { page_size, heads, total_heads, optional: false }
    }

    /// The same group, which a peer may lack.
    pub fn optional(mut self) -> CacheGroup {
        self.optional = true;
        self
    }
}
