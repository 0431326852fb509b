//! A range of a foreign agent's memory.

use kv_core::MemoryKind;

use crate::regions::place::Place;

/// A range of a foreign agent's memory, as its side channel describes it: what
/// [`Descriptor::remote_region`](kv_core::Descriptor::remote_region) counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForeignRegion {
    /// The address of the first byte, in the agent's process.
    pub addr: u64,
    /// Length in bytes, or [`REST`](ForeignRegion::REST). The agent must have registered the whole range in one
    /// piece.
    pub len: u64,
    /// Bytes from the beginning of an item (a page of a layer, say) to the beginning of the next item:
    /// descriptors of single items are cheaper. 0 if there are no items.
    pub item_len: u64,
    /// The kind of memory: [`MemoryKind::Dram`] or [`MemoryKind::Vram`].
    pub memory: MemoryKind,
    /// The number of the device, as the agent gave it to NIXL.
    pub device: u64,
}

impl ForeignRegion {
    /// The length of a region that reaches to the end of the registration in which `addr` lies: for peers that do
    /// not tell lengths.
    pub const REST: u64 = u64::MAX;

    pub(crate) fn of(place: &Place) -> ForeignRegion {
        let Place { addr, len, item_len, kind, device } = *place;
        ForeignRegion { addr, len, item_len, memory: kind, device }
    }

    pub(crate) fn place(&self) -> Place {
        let ForeignRegion { addr, len, item_len, memory, device } = *self;
        Place { addr, len, item_len, kind: memory, device }
    }
}
