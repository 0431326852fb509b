//! What an invariant is.

use crate::kv::fact::{Fact, View};

/// What an invariant says of a fact: `Err` tells what is wrong with it.
pub(crate) type Verdict = Result<(), String>;

/// One invariant.
pub(crate) trait Invariant: Twin {
    /// Looks at one fact, before the ledger shows its effect.
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict;
}

/// Invariants of a world that is forked are forked with it.
pub(crate) trait Twin {
    fn twin(&self) -> Box<dyn Invariant>;
}

impl<T: Invariant + Clone + 'static> Twin for T {
    fn twin(&self) -> Box<dyn Invariant> {
        Box::new(self.clone())
    }
}

impl Clone for Box<dyn Invariant> {
    fn clone(&self) -> Box<dyn Invariant> {
        (**self).twin()
    }
}
