//! What an input costs, and what it may cost.

use kv_core::meter;

use crate::alloc;

/// What one input has cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Counted steps.
    pub steps: u64,
    /// Bytes asked of the allocator.
    pub allocated: u64,
    /// Bytes of all outputs: frames, descriptors, lists.
    pub said: u64,
}

/// What pays for an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paid {
    /// Bytes of the input, and of earlier frames those lists that it is the one to walk along, once.
    pub bytes: u64,
    /// What the worker's own scheduler asks for in the sessions that have not ended: sessions,
    /// receivers, pages, items, leases, and the ranks that serve each of its receiving sessions; and
    /// attempts of sessions that have ended, as long as their peers have not acknowledged that.
    pub own: u64,
}

/// `base + per_byte × bytes + per_own × own`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// For any input. The machine's tables are kept small here, so that it covers a walk over them.
    pub base: u64,
    /// For each byte of the input.
    pub per_byte: u64,
    /// For each thing that the own scheduler asks for.
    pub per_own: u64,
}

/// Most steps of one input.
pub const STEPS: Budget = Budget { base: 4000, per_byte: 24, per_own: 24 };
/// Most bytes that one input allocates.
pub const ALLOCATED: Budget = Budget { base: 160 << 10, per_byte: 96, per_own: 512 };
/// Most bytes that come out for one input.
pub const SAID: Budget = Budget { base: 32 << 10, per_byte: 8, per_own: 128 };

impl Budget {
    /// What may be spent.
    pub fn of(&self, paid: Paid) -> u64 {
        self.base + self.per_byte * paid.bytes + self.per_own * paid.own
    }

    fn share(&self, cost: u64, paid: Paid) -> f64 {
        cost as f64 / self.of(paid) as f64
    }
}

impl Cost {
    /// How much of its budgets the cost takes up; more than 1 is too much.
    pub fn share(&self, paid: Paid) -> f64 {
        let shares = [
            STEPS.share(self.steps, paid),
            ALLOCATED.share(self.allocated, paid),
            SAID.share(self.said, paid),
        ];
        shares.into_iter().fold(0.0, f64::max)
    }
}

/// A moment on this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    steps: u64,
    allocated: u64,
}

impl Moment {
    pub(super) fn now() -> Moment {
        Moment { steps: meter::steps(), allocated: alloc::allocated() }
    }

    pub(super) fn cost_since(self, said: u64) -> Cost {
        let now = Moment::now();
        Cost { steps: now.steps - self.steps, allocated: now.allocated - self.allocated, said }
    }
}
