//! What a worker counts.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::token::Size;

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
}

/// The numbers as the worker keeps them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) pages_in_transfer: Level,
    pub(crate) pages_leased: Level,
    pub(crate) pages_quarantined: Level,
    pub(crate) pages_orphaned: Level,
    pub(crate) items_in_transfer: Level,
    pub(crate) items_quarantined: Level,
    pub(crate) items_orphaned: Level,
    pub(crate) posts_in_flight: Level,
    pub(crate) posts: Count,
    pub(crate) posts_failed: Count,
    pub(crate) frames_sent: Count,
    pub(crate) frames_dropped: Count,
    pub(crate) frames_received: Count,
    pub(crate) commands: Count,
    pub(crate) turns: Count,
    pub(crate) wake_ups: Count,
}

impl Counters {
    /// Tokens go to a worker.
    pub(crate) fn start_transfer(&self, size: Size) {
        self.pages_in_transfer.add(size.pages);
        self.items_in_transfer.add(size.items);
    }

    /// Tokens leave a session that has not ended.
    pub(crate) fn end_transfer(&self, size: Size) {
        self.pages_in_transfer.sub(size.pages);
        self.items_in_transfer.sub(size.items);
    }

    /// The session of these tokens has ended, and they are not quiet.
    pub(crate) fn start_quarantine(&self, size: Size) {
        self.end_transfer(size);
        self.pages_quarantined.add(size.pages);
        self.items_quarantined.add(size.items);
    }

    /// Tokens of an ended session are quiet.
    pub(crate) fn end_quarantine(&self, size: Size) {
        self.pages_quarantined.sub(size.pages);
        self.items_quarantined.sub(size.items);
    }

    /// True if anything is in quarantine.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.pages_quarantined.get() > 0 || self.items_quarantined.get() > 0
    }

    pub(crate) fn read(&self, sessions_open: usize, bytes_per_page: u64) -> Gauges {
        Gauges {
            bytes_per_page,
            sessions_open,
            pages_in_transfer: self.pages_in_transfer.get(),
            pages_leased: self.pages_leased.get(),
            pages_quarantined: self.pages_quarantined.get(),
            pages_orphaned: self.pages_orphaned.get(),
            items_in_transfer: self.items_in_transfer.get(),
            items_quarantined: self.items_quarantined.get(),
            items_orphaned: self.items_orphaned.get(),
            posts_in_flight: self.posts_in_flight.get(),
            posts: self.posts.get(),
            posts_failed: self.posts_failed.get(),
            frames_sent: self.frames_sent.get(),
            frames_dropped: self.frames_dropped.get(),
            frames_received: self.frames_received.get(),
            commands: self.commands.get(),
            turns: self.turns.get(),
            wake_ups: self.wake_ups.get(),
        }
    }
}

/// A number that only rises.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub(crate) struct Level(AtomicUsize);

impl Level {
    pub(crate) fn add(&self, amount: usize) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, amount: usize) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, amount: usize) {
        self.0.store(amount, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
