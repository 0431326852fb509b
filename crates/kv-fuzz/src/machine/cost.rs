//! The cost of an input, and the budget for it.

use kv_core::meter;

use crate::alloc;

/// The cost of one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Steps of loops whose length a peer, the scheduler or kept state decides.
    pub steps: u64,
    /// Bytes that were allocated.
    pub allocated: u64,
    /// Bytes of all outputs: frames, descriptors, lists.
    pub said: u64,
}

/// What the budget of an input is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paid {
    /// Bytes of the input, and, once, those of earlier lists that the input is the first to walk along.
    pub bytes: u64,
    /// What the worker's own scheduler asks for: sessions that have not ended, their receivers, pages, items
    /// and leases, the ranks that serve receiving sessions, and attempts of ended sessions whose end a peer
    /// has not acknowledged.
    pub own: u64,
}

/// `base + per_byte × bytes + per_own × own`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// The amount that any input may cost. The machine's tables are kept small here, so that the amount
    /// covers a walk over them.
    pub base: u64,
    /// For each byte of the input.
    pub per_byte: u64,
    /// For each thing that the own scheduler asks for.
    pub per_own: u64,
}

/// The steps that one input may take.
pub const STEPS: Budget = Budget { base: 4000, per_byte: 24, per_own: 24 };
/// The bytes that one input may allocate.
pub const ALLOCATED: Budget = Budget { base: 160 << 10, per_byte: 96, per_own: 512 };
/// The bytes of the outputs that one input may cause.
pub const SAID: Budget = Budget { base: 32 << 10, per_byte: 8, per_own: 128 };

impl Budget {
    /// The budget for an input.
    pub fn of(&self, paid: Paid) -> u64 {
        self.base + self.per_byte * paid.bytes + self.per_own * paid.own
    }

    fn share(&self, cost: u64, paid: Paid) -> f64 {
        cost as f64 / self.of(paid) as f64
    }
}

impl Cost {
    /// The share of its budgets that a cost takes up; more than 1 is too much.
    pub fn share(&self, paid: Paid) -> f64 {
        let shares = [
            STEPS.share(self.steps, paid),
            ALLOCATED.share(self.allocated, paid),
            SAID.share(self.said, paid),
        ];
        shares.into_iter().fold(0.0, f64::max)
    }
}

/// Counters at one moment on this thread.
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
