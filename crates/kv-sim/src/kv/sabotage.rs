//! What planted bugs remember.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::wire::ConversationId;
use kv_core::{Attempt, Room, SessionId, Time};

use crate::net::lives::LifeId;

/// What planted bugs remember.
#[derive(Debug, Default, Clone)]
pub(crate) struct Sabotage {
    /// The conversation that a life answers to from another.
    pub(crate) conversations: BTreeMap<(LifeId, LifeId), ConversationId>,
    /// Releases made up, to be left out when the true ones come.
    pub(crate) released: BTreeMap<(LifeId, SessionId), usize>,
    /// Sessions about whose end nothing is said.
    pub(crate) hushed: BTreeSet<(LifeId, SessionId)>,
    /// Registrations sent.
    pub(crate) registered: BTreeSet<(LifeId, u64, u64)>,
    /// Registrations sent, of all sources of a request.
    pub(crate) rooms: Vec<Registered>,
    pub(crate) count: u64,
    /// When a life sent which heartbeat or acquire message, by its own clock.
    pub(crate) numbers: BTreeMap<(LifeId, u64), Time>,
}

/// A registration of a receiver at one of its sources.
#[derive(Debug, Clone)]
pub(crate) struct Registered {
    pub(crate) receiver: LifeId,
    pub(crate) source: LifeId,
    pub(crate) attempt: Attempt,
    pub(crate) room: Room,
}
