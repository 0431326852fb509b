//! The state of planted bugs.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::wire::ConversationId;
use kv_core::{Attempt, Room, SessionId, Time};

use crate::net::lives::LifeId;

/// What planted bugs remember of a world.
#[derive(Debug, Default, Clone)]
pub(crate) struct Sabotage {
    /// The number under which one life addresses a conversation with another.
    pub(crate) conversations: BTreeMap<(LifeId, LifeId), ConversationId>,
    /// Releases that a bug has made up, whose true counterparts are left out later.
    pub(crate) released: BTreeMap<(LifeId, SessionId), usize>,
    /// Sessions whose end is kept from the other side.
    pub(crate) hushed: BTreeSet<(LifeId, SessionId)>,
    /// Registrations that were sent, by life, peer and attempt.
    pub(crate) registered: BTreeSet<(LifeId, u64, u64)>,
    /// Registrations sent, of all sources of a request.
    pub(crate) rooms: Vec<Registered>,
    pub(crate) count: u64,
    /// When a life sent each numbered heartbeat, or message that acquires a lease, by its own clock.
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
