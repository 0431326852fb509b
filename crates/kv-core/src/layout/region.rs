//! A region: one piece of registered memory, what it is for, and what its items hold.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::Holds;

/// Most regions of one worker.
pub const MAX_REGIONS: usize = 4096;

/// A piece of registered memory: `len / item_len` items of `item_len` bytes from `addr` on.
///
/// A region is data, not a promise: a transport accepts only memory that it was given (an arena it
/// allocated, or memory adopted through an `unsafe` call), so a wrong address is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// What it is for.
    pub role: RegionRole,
    /// Address of the first byte (file offset for [`MemoryKind::File`]).
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Bytes of one item: of one page in this region, of one aux row.
    pub item_len: u64,
    /// Kind of memory.
    pub memory: MemoryKind,
    /// Device (GPU index, NUMA node, file descriptor).
    pub device: u64,
    /// The model layer whose KV it holds, or the first of several (page-major); `None` if nobody
    /// said.
    pub layer: Option<u32>,
    /// How many layers each item holds, from `layer` on.
    pub layers: u32,
    /// What its items hold; needed only where the peer's cache may have another shape.
    pub holds: Holds,
    /// Which group of [`Layout::groups`](crate::Layout::groups) a state region belongs to.
    pub group: u16,
}

impl Region {
    /// A region in host memory.
    pub fn dram(role: RegionRole, addr: u64, len: u64, item_len: u64) -> Region {
        let memory = MemoryKind::Dram;
        let (layer, layers, holds, group) = (None, 1, Holds::Opaque, 0);
        Region { role, addr, len, item_len, memory, device: 0, layer, layers, holds, group }
    }

    /// The same region as the memory of `layer`.
    pub fn layer(mut self, layer: u32) -> Region {
        self.layer = Some(layer);
        self
    }

    /// The same region as the memory of several layers, all in each item.
    pub fn layers(mut self, layers: Range<u32>) -> Region {
        self.layer = Some(layers.start);
        self.layers = layers.end.saturating_sub(layers.start);
        self
    }

    /// The same region, with a word on what its items hold: then the peer's cache may be cut
    /// differently.
    pub fn holds(mut self, holds: Holds) -> Region {
        self.holds = holds;
        self
    }

    /// The same region as part of a cache group.
    pub fn group(mut self, group: u16) -> Region {
        self.group = group;
        self
    }

    /// How many whole items it holds.
    pub fn items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

/// What a region is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RegionRole {
    /// KV pages: item *i* is page *i*.
    Kv,
    /// Per-request rows (first token, logprobs, room …): item *i* is aux row *i*.
    Aux,
    /// Per-request state slots of recurrent layers: item *i* is slot *i*.
    State,
}

impl RegionRole {
    /// The role in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            RegionRole::Kv => "kv",
            RegionRole::Aux => "aux",
            RegionRole::State => "state",
        }
    }
}

/// Where the bytes of a region live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryKind {
    /// Host memory.
    Dram,
    /// Device memory.
    Vram,
    /// A file; the address is an offset, the device a descriptor.
    File,
}
