//! What every worker counts, whatever the service.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kv_core::machine::{Amounts, MAX_KINDS};

/// The numbers of a worker. Each number is exact, but the numbers are not read in one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Gauges {
    /// Sessions that count against [`Setup::max_sessions`](super::Setup::max_sessions): sessions with a
    /// handle, and sessions without a handle whose end or whose resources the worker still waits for.
    pub sessions_open: usize,
    /// Sessions whose resources were lost, because the worker stopped before the resources were quiet.
    pub sessions_lost: usize,
    pub(super) in_transfer: Amounts,
    pub(super) quarantined: Amounts,
    pub(super) orphaned: Amounts,
    /// Resources of the first kind that are complete and pinned under leases. A part of `in_transfer`.
    pub leased: usize,
    /// Data operations that the transport has taken and that have not ended.
    pub posts_in_flight: usize,
    /// Data operations that the transport has taken since the worker started.
    pub posts: u64,
    /// Data operations that the transport has refused, or ended with an error, since the worker started.
    pub posts_failed: u64,
    /// Frames that the transport has taken since the worker started.
    pub frames_sent: u64,
    /// Frames that the transport has refused to send, and frames that arrived in the name of a worker that
    /// the connection does not belong to, since the worker started.
    pub frames_dropped: u64,
    /// Frames that have arrived since the worker started.
    pub frames_received: u64,
    /// Commands that the worker has taken from session handles since it started.
    pub commands: u64,
    /// Turns of the worker's loop since the worker started.
    pub turns: u64,
    /// Turns that began with waking up from a sleep, since the worker started.
    pub wake_ups: u64,
}

/// Amounts of one kind of resource, which is named by its position in
/// [`SessionResource::KINDS`](kv_core::machine::SessionResource::KINDS).
impl Gauges {
    /// How much the worker holds for sessions that have not ended.
    pub fn in_transfer(&self, kind: usize) -> usize {
        self.in_transfer.kind(kind)
    }

    /// How much of ended sessions a data operation or a reader may still touch.
    pub fn quarantined(&self, kind: usize) -> usize {
        self.quarantined.kind(kind)
    }

    /// How much came back after the handle was dropped, and waits for
    /// [`Port::take_orphans`](super::Port::take_orphans).
    pub fn orphaned(&self, kind: usize) -> usize {
        self.orphaned.kind(kind)
    }
}

/// The numbers as the worker keeps them, for reading from any thread.
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
    /// Notes that the session of these resources has ended before the resources were quiet.
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
        for (level, amount) in self.each(amounts) {
            level.add(amount);
        }
    }

    pub(crate) fn sub(&self, amounts: Amounts) {
        for (level, amount) in self.each(amounts) {
            level.sub(amount);
        }
    }

    /// The levels that change by these amounts: of most kinds nothing is lent.
    fn each(&self, amounts: Amounts) -> impl Iterator<Item = (&Level, usize)> {
        self.0.iter().zip(amounts.0).filter(|(_, amount)| *amount > 0)
    }

    pub(crate) fn get(&self) -> Amounts {
        let mut amounts = Amounts::default();
        for (amount, level) in amounts.0.iter_mut().zip(&self.0) {
            *amount = level.get();
        }
        amounts
    }
}
