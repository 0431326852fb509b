//! What a worker of the KV cache counts.

use std::ops::Deref;

use kv_core::proto::Resource;

use crate::worker;

/// A worker's numbers at one moment, read as the [`worker::Gauges`] that they are, with the kinds of what it
/// holds by their names. Each is exact; they are not read in one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauges {
    /// What every worker counts.
    pub worker: worker::Gauges,
    /// Bytes of one page in all KV regions: what turns pages into bytes.
    pub bytes_per_page: u64,
}

/// KV bytes that a worker holds, by the reason why they cannot be used for anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeldBytes {
    /// Waiting for the other half, or on the wire.
    pub in_transfer: u64,
    /// Complete, and pinned under a lease until they were read.
    pub leased: u64,
    /// Of ended sessions, until no wire or reader can touch them.
    pub quarantined: u64,
    /// Back, and not taken from `Manager::orphans`.
    pub orphaned: u64,
}

impl Gauges {
    /// Pages that the worker holds for sessions that have not ended.
    pub fn pages_in_transfer(&self) -> usize {
        self.in_transfer.kind(Resource::PAGES)
    }

    /// Those of them that are complete, and pinned under a lease until they were read.
    pub fn pages_leased(&self) -> usize {
        self.leased
    }

    /// Pages of ended sessions that some wire, or reader, may still touch.
    pub fn pages_quarantined(&self) -> usize {
        self.quarantined.kind(Resource::PAGES)
    }

    /// Pages that have come back to no handle, waiting for `Manager::orphans`.
    pub fn pages_orphaned(&self) -> usize {
        self.orphaned.kind(Resource::PAGES)
    }

    /// Items of cache groups that the worker holds for sessions that have not ended.
    pub fn items_in_transfer(&self) -> usize {
        self.in_transfer.kind(Resource::ITEMS)
    }

    /// Items of cache groups of ended sessions that some wire, or reader, may still touch.
    pub fn items_quarantined(&self) -> usize {
        self.quarantined.kind(Resource::ITEMS)
    }

    /// Items of cache groups that have come back to no handle, waiting for `Manager::orphan_groups`.
    pub fn items_orphaned(&self) -> usize {
        self.orphaned.kind(Resource::ITEMS)
    }

    /// The pages in bytes.
    pub fn held_bytes(&self) -> HeldBytes {
        let bytes = |pages: usize| self.bytes_per_page.saturating_mul(pages as u64);
        HeldBytes {
            in_transfer: bytes(self.pages_in_transfer().saturating_sub(self.pages_leased())),
            leased: bytes(self.pages_leased()),
            quarantined: bytes(self.pages_quarantined()),
            orphaned: bytes(self.pages_orphaned()),
        }
    }
}

impl Deref for Gauges {
    type Target = worker::Gauges;

    fn deref(&self) -> &worker::Gauges {
        &self.worker
    }
}
