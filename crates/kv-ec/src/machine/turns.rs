//! Sessions of requests, and which of them to begin, or to end, because their claims were decided.
//!
//! However many sessions wait, one timer looks for claims that were decided, and a look costs nothing for claims
//! that were not.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::{SessionId, Time};

use crate::claims::Claim;
use crate::store::SharedStore;

/// Sessions of requests. Clones of a claim share its number.
#[derive(Debug, Default)]
pub(super) struct Turns {
    of_claim: BTreeMap<u64, BTreeSet<SessionId>>,
    /// Sessions whose claims were decided, and which nobody has looked at since.
    due: BTreeSet<SessionId>,
    /// When to look next for claims that were decided.
    look: Option<Time>,
    /// How many sessions may still be looked at before the worker's thread does something else.
    left: usize,
}

impl Turns {
    pub(super) fn add(&mut self, claim: &Claim, session: SessionId) {
        self.of_claim.entry(claim.number()).or_default().insert(session);
    }

    pub(super) fn remove(&mut self, claim: &Claim, session: SessionId) {
        self.due.remove(&session);
        if let Some(sessions) = self.of_claim.get_mut(&claim.number()) {
            sessions.remove(&session);
            if sessions.is_empty() {
                self.of_claim.remove(&claim.number());
            }
        }
    }

    /// The sessions of a claim, which are few.
    pub(super) fn of(&self, claim: &Claim) -> impl Iterator<Item = &SessionId> {
        self.of_claim.get(&claim.number()).into_iter().flatten()
    }

    /// Looks from now on for claims that were decided, while there are sessions of requests.
    pub(super) fn arm(&mut self, now: Time) {
        if !self.of_claim.is_empty() {
            self.look.get_or_insert(now + TURN_AGAIN);
        }
    }

    /// Lets the sessions of decided claims be due, once the pause since the last look is over.
    pub(super) fn look(&mut self, now: Time, store: &SharedStore) {
        if self.look.is_none_or(|at| now < at) {
            return;
        }
        self.look = (!self.of_claim.is_empty()).then_some(now + TURN_AGAIN);
        for number in store.look_at_claims() {
            self.due.extend(self.of_claim.get(&number).into_iter().flatten());
        }
    }

    /// Lets as many sessions be looked at as one input may begin.
    pub(super) fn begin(&mut self) {
        self.left = AT_ONCE;
    }

    /// The next session whose claim was decided; `None` also if enough were begun for one input.
    pub(super) fn next(&mut self) -> Option<SessionId> {
        let session = if self.left == 0 { None } else { self.due.pop_first() };
        self.left -= usize::from(session.is_some());
        session
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        if self.due.is_empty() { self.look } else { Some(Time::ZERO) }
    }
}

/// How soon to look again for requests that are in turn.
const TURN_AGAIN: Duration = Duration::from_millis(10);
/// Sessions that begin after one input; the others follow at once, after what else there is to do.
const AT_ONCE: usize = 64;
