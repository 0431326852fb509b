//! Planted bugs: each breaks one promise on purpose, so that the invariant that serves it is seen
//! to fail.
//!
//! They stand between nodes and world, and need no change in the nodes: what a buggy node or plane
//! would do is done to the inputs and outputs of a correct one. Those of engines that differ are in
//! `ranks.rs`, those of context-parallel ranks in `context.rs`, and those of leases in `leases.rs`.

mod context;
mod frames;
mod leases;
mod outputs;
mod provoke;
mod ranks;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::proto::NodeGauges;
use kv_core::wire::Link;
use kv_core::{SessionId, Time};

use crate::cost::Cost;
use crate::ledger::LifeId;

pub use table::{Planted, SEEDS};

/// What planted bugs remember.
#[derive(Debug, Default, Clone)]
pub(crate) struct Sabotage {
    /// The link that a life answers to from another.
    links: BTreeMap<(LifeId, LifeId), Link>,
    /// Releases made up, to be left out when the true ones come.
    released: BTreeMap<(LifeId, SessionId), usize>,
    /// Sessions about whose end nothing is said.
    hushed: BTreeSet<(LifeId, SessionId)>,
    /// Registrations sent.
    registered: BTreeSet<(LifeId, u64, u64)>,
    /// Registrations sent, of all sources of a request.
    rooms: Vec<ranks::Registered>,
    count: u64,
    /// When a life sent which heartbeat or claim, by its own clock.
    beats: BTreeMap<(LifeId, u64), Time>,
}

impl Sabotage {
    /// What a fork of a world has to be told apart by.
    pub(crate) fn beats(&self) -> &BTreeMap<(LifeId, u64), Time> {
        &self.beats
    }
}

impl Planted {
    pub(crate) fn panic_at(self, inputs: u64) {
        if self == Planted::Panics && inputs == 20 {
            std::panic::resume_unwind(Box::new("planted"));
        }
    }

    pub(crate) fn next_timeout(self, next: Option<Time>, now: Time) -> Option<Time> {
        match self {
            Planted::SpinningTimer => next.map(|next| next.min(now)),
            Planted::RestlessTimer => {
                let always = now + Duration::from_millis(500);
                Some(next.map_or(always, |next| next.min(always)))
            }
            _ => next,
        }
    }

    pub(crate) fn costs(self, costs: &mut [Cost]) {
        if self == Planted::Amplifies {
            // As if each byte of a question were answered with a frame.
            for cost in costs.iter_mut().filter(|cost| cost.of_peer) {
                cost.outputs += cost.input;
            }
        }
    }

    pub(crate) fn gauges(self, gauges: &mut NodeGauges) {
        if self == Planted::LeakedSession {
            gauges.senders += 1;
        }
    }
}
