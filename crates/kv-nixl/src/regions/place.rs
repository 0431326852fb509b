//! Where a region lies in memory.

use kv_core::MemoryKind;
use serde::{Deserialize, Serialize};

use crate::ffi::memory::Memory;

/// Where a region lies, in the address space of the agent that has registered the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// Bytes of an item; 0 if the region has no items.
    pub(crate) item_len: u64,
    pub(crate) kind: MemoryKind,
    pub(crate) device: u64,
}

impl Place {
    /// The place of a region of this transport, with items of this length.
    pub(crate) fn of(memory: &Memory, item_len: u64) -> Place {
        Place {
            addr: memory.addr(),
            len: memory.len(),
            item_len,
            kind: memory.kind(),
            device: memory.device(),
        }
    }
}
