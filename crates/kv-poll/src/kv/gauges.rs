//! The numbers of a worker of the KV cache, under the names of what it holds: pages and items.

use std::ops::Deref;

use kv_core::proto::Resource;

use crate::worker;

/// The numbers of a worker. Dereferences to the [`worker::Gauges`] that every worker has; the methods give
/// amounts of pages and of items of cache groups. Each number is exact, but the numbers are not read in one
/// instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Gauges {
    /// The numbers that every worker counts, whatever the service.
    pub worker: worker::Gauges,
    /// Bytes of one page in all KV regions of the worker together.
    pub bytes_per_page: u64,
}

/// Bytes of KV that a worker holds, by the reason why the memory cannot be used for anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HeldBytes {
    /// Bytes of pages that wait for the other half of their request, or that are being moved.
    pub in_transfer: u64,
    /// Bytes of pages that are complete, and pinned under a lease until they were read.
    pub leased: u64,
    /// Bytes of pages of ended sessions, until no data operation and no reader can touch the pages.
    pub quarantined: u64,
    /// Bytes of pages that have come back and wait for `Manager::orphans`.
    pub orphaned: u64,
}

impl Gauges {
    /// Pages that the worker holds for sessions that have not ended.
    pub fn pages_in_transfer(&self) -> usize {
        self.worker.in_transfer(Resource::PAGES)
    }

    /// Pages that are complete, and pinned under a lease until they were read. A part of `pages_in_transfer`.
    pub fn pages_leased(&self) -> usize {
        self.leased
    }

    /// Pages of ended sessions that a data operation or a reader may still touch.
    pub fn pages_quarantined(&self) -> usize {
        self.worker.quarantined(Resource::PAGES)
    }

    /// Pages that came back after their handle was dropped, and that wait for `Manager::orphans`.
    pub fn pages_orphaned(&self) -> usize {
        self.worker.orphaned(Resource::PAGES)
    }

    /// Items of cache groups that the worker holds for sessions that have not ended.
    pub fn items_in_transfer(&self) -> usize {
        self.worker.in_transfer(Resource::ITEMS)
    }

    /// Items of cache groups of ended sessions that a data operation or a reader may still touch.
    pub fn items_quarantined(&self) -> usize {
        self.worker.quarantined(Resource::ITEMS)
    }

    /// Items of cache groups that came back after their handle was dropped, and that wait for
    /// `Manager::orphan_groups`.
    pub fn items_orphaned(&self) -> usize {
        self.worker.orphaned(Resource::ITEMS)
    }

    /// The pages that the worker holds, in bytes.
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
