//! What a worker counts, whatever its service.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kv_core::machine::{Amounts, MAX_KINDS};

/// A worker's numbers at one moment. Each is exact; they are not read in one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauges {
    /// Sessions that count against the configured maximum: those with a handle, and those that the worker
    /// still has to do with.
    pub sessions_open: usize,
    /// Sessions whose resources were lost with the worker, which stopped before they were quiet.
    pub sessions_lost: usize,
    /// What the worker holds for sessions that have not ended, by kind.
    pub in_transfer: Amounts,
    /// What it holds for ended sessions because some wire, or reader, may still touch it, by kind.
    pub quarantined: Amounts,
    /// What has come back to no handle, waiting for [`Port::take_orphans`](super::Port::take_orphans).
    pub orphaned: Amounts,
    /// What is complete and pinned under leases, in the first kind.
    pub leased: usize,
    /// Data operations that the transport has taken and not yet ended.
    pub posts_in_flight: usize,
    /// Data operations that the transport has taken.
    pub posts: u64,
    /// Data operations that the transport has refused, or ended with an error.
    pub posts_failed: u64,
    /// Frames that the transport has taken.
    pub frames_sent: u64,
    /// Frames that the transport has refused, or that came in the name of another worker.
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

/// The numbers as the worker keeps them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) sessions_lost: Level,
    pub(crate) in_transfer: Levels,
    pub(crate) quarantined: Levels,
    pub(crate) orphaned: Levels,
    pub(crate) leased: Level,
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
    /// The session of these resources has ended, and they are not quiet.
    pub(crate) fn start_quarantine(&self, amounts: Amounts) {
        self.in_transfer.sub(amounts);
        self.quarantined.add(amounts);
    }

    pub(crate) fn read(&self, sessions_open: usize) -> Gauges {
        Gauges {
            sessions_open,
            sessions_lost: self.sessions_lost.get(),
            in_transfer: self.in_transfer.get(),
            quarantined: self.quarantined.get(),
            orphaned: self.orphaned.get(),
            leased: self.leased.get(),
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

/// A level for each kind of resource.
#[derive(Debug, Default)]
pub(crate) struct Levels([Level; MAX_KINDS]);

impl Levels {
    pub(crate) fn add(&self, amounts: Amounts) {
        for (level, amount) in self.0.iter().zip(amounts.0) {
            level.add(amount);
        }
    }

    pub(crate) fn sub(&self, amounts: Amounts) {
        for (level, amount) in self.0.iter().zip(amounts.0) {
            level.sub(amount);
        }
    }

    pub(crate) fn get(&self) -> Amounts {
        let mut amounts = Amounts::default();
        for (amount, level) in amounts.0.iter_mut().zip(&self.0) {
            *amount = level.get();
        }
        amounts
    }
}
