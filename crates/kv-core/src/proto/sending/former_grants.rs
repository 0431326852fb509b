//! What became of leases that are no more, for readers that come late.

use std::collections::{BTreeMap, VecDeque};

use crate::error::PeerCause;
use crate::id::SessionId;
use crate::meter::step;

/// What became of grants that are no more: bounded, the oldest are forgotten first.
#[derive(Debug, Clone, Default)]
pub(super) struct FormerGrants {
    causes: BTreeMap<SessionId, PeerCause>,
    order: VecDeque<SessionId>,
}

impl FormerGrants {
    pub(super) fn insert(&mut self, nonce: SessionId, cause: PeerCause, max: usize) {
        while self.order.len() >= max.max(1) {
            step(1);
            if let Some(oldest) = self.order.pop_front() {
                self.causes.remove(&oldest);
            }
        }
        self.causes.insert(nonce, cause);
        self.order.push_back(nonce);
    }

    pub(super) fn get(&self, nonce: SessionId) -> Option<&PeerCause> {
        self.causes.get(&nonce)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}
