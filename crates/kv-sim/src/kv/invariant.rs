//! The trait of invariants of the KV service.

use crate::kv::fact::{Fact, View};

/// The judgement of an invariant: `Err` says what is wrong with a fact.
pub(crate) type Verdict = Result<(), String>;

/// A promise that is checked against every fact of a world.
pub(crate) trait Invariant: Twin {
    /// Judges one fact, before the ledger shows its effect.
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict;
}

/// Copies an invariant with its world, for the exhaustive check.
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
