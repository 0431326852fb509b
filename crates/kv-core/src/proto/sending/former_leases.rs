//! What became of leases that have ended, for readers that come late.

use std::collections::{BTreeMap, VecDeque};

use crate::error::PeerCause;
use crate::id::SessionId;
use crate::meter::step;

/// What became of leases that have ended. Bounded: the oldest entries are forgotten first.
#[derive(Debug, Clone, Default)]
pub(super) struct FormerLeases {
    causes: BTreeMap<SessionId, PeerCause>,
    order: VecDeque<SessionId>,
}

impl FormerLeases {
    pub(super) fn insert(&mut self, lease_id: SessionId, cause: PeerCause, max: usize) {
        while self.order.len() >= max.max(1) {
            step(1);
            if let Some(oldest) = self.order.pop_front() {
                self.causes.remove(&oldest);
            }
        }
        self.causes.insert(lease_id, cause);
        self.order.push_back(lease_id);
    }

    pub(super) fn get(&self, lease_id: SessionId) -> Option<&PeerCause> {
        self.causes.get(&lease_id)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}
