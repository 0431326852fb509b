//! What a worker of the KV cache counts.

use kv_core::proto::Resource;

use crate::worker;

/// A worker's numbers at one moment. Each is exact; they are not read in one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauges {
    /// Sessions that count against `max_sessions`: those with a handle, and those that the worker
    /// still has to do with.
    pub sessions_open: usize,
    /// Bytes of one page in all KV regions: what turns the pages below into bytes.
    pub bytes_per_page: u64,
    /// Pages that the worker holds for sessions that have not ended.
    pub pages_in_transfer: usize,
    /// Those of them that are complete, and pinned under a lease until they were read.
    pub pages_leased: usize,
    /// Pages of ended sessions that some wire, or reader, may still touch.
    pub pages_quarantined: usize,
    /// Pages that have come back to no handle, waiting for `Manager::orphans`.
    pub pages_orphaned: usize,
    /// Items of state groups that the worker holds for sessions that have not ended.
    pub items_in_transfer: usize,
    /// Items of state groups of ended sessions that some wire, or reader, may still touch.
    pub items_quarantined: usize,
    /// Items of state groups that have come back to no handle, waiting for `Manager::orphan_groups`.
    pub items_orphaned: usize,
    /// Data operations that the plane has taken and not yet ended.
    pub posts_in_flight: usize,
    /// Data operations that the plane has taken.
    pub posts: u64,
    /// Data operations that the plane has refused, or ended with an error.
    pub posts_failed: u64,
    /// Frames that the plane has taken.
    pub frames_sent: u64,
    /// Frames that the plane has refused; the protocol repeats what matters.
    pub frames_dropped: u64,
    /// Frames that have arrived.
    pub frames_received: u64,
    /// Commands taken from session handles.
    pub commands: u64,
    /// Turns of the worker's loop.
    pub turns: u64,
    /// Turns that began with waking up from a sleep.
    pub wake_ups: u64,
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
    /// The pages in bytes.
    pub fn held_bytes(&self) -> HeldBytes {
        let bytes = |pages: usize| self.bytes_per_page.saturating_mul(pages as u64);
        HeldBytes {
            in_transfer: bytes(self.pages_in_transfer.saturating_sub(self.pages_leased)),
            leased: bytes(self.pages_leased),
            quarantined: bytes(self.pages_quarantined),
            orphaned: bytes(self.pages_orphaned),
        }
    }

    /// The worker's numbers, of pages so large.
    pub(super) fn of(gauges: &worker::Gauges, bytes_per_page: u64) -> Gauges {
        let (pages, items) = (Resource::PAGES, Resource::ITEMS);
        Gauges {
            sessions_open: gauges.sessions_open,
            bytes_per_page,
            pages_in_transfer: gauges.in_transfer.kind(pages),
            pages_leased: gauges.leased,
            pages_quarantined: gauges.quarantined.kind(pages),
            pages_orphaned: gauges.orphaned.kind(pages),
            items_in_transfer: gauges.in_transfer.kind(items),
            items_quarantined: gauges.quarantined.kind(items),
            items_orphaned: gauges.orphaned.kind(items),
            posts_in_flight: gauges.posts_in_flight,
            posts: gauges.posts,
            posts_failed: gauges.posts_failed,
            frames_sent: gauges.frames_sent,
            frames_dropped: gauges.frames_dropped,
            frames_received: gauges.frames_received,
            commands: gauges.commands,
            turns: gauges.turns,
            wake_ups: gauges.wake_ups,
        }
    }
}
