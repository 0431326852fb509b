//! What a queue proposes, what ranks agree on, and the rule by which they do.

use kv_core::{KvPoll, Room};

/// A request within one queue; numbers rise in the order of `push` and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey(pub u64);

impl std::fmt::Display for RequestKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How a request stands, on one rank or on all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// The state.
    pub poll: KvPoll,
    /// True if the state is final and no wire can touch the pages any more.
    pub reclaimable: bool,
}

/// A change of the agreed standing of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The request, by this rank's key.
    pub key: RequestKey,
    /// The minimum of all ranks' states. `reclaimable` implies that this rank's session is.
    pub standing: Standing,
}

/// This rank's place in the agreement.
///
/// For each request: one `join`, then `propose` as its session changes. What is agreed rises, or
/// falls to `Failed`, and is reported once for each change. A final state with `reclaimable` is the
/// last report; the request is forgotten with it.
pub trait RankConsensus {
    /// Why ranks could not agree. The queues change nothing in a step that ends with an error.
    type Error: std::error::Error;

    /// Enters a request under a room. Keys must rise from call to call.
    ///
    /// **Every rank must enter every request**, or the others wait for it until their sessions'
    /// deadlines. A rank that cannot serve one enters it and proposes `Failed`.
    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy>;

    /// Says how this rank's session stands. States that go back, and unknown keys, are ignored.
    fn propose(&mut self, key: RequestKey, standing: Standing);

    /// Exchanges proposals and appends what has newly been agreed. Once per scheduler step.
    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Self::Error>;

    /// True if the ranks build identical batches, so that in each step all of them must have the same pages
    /// free. The queues then free nothing on one rank before all ranks can.
    fn is_lock_step(&self) -> bool {
        true
    }
}

/// Another request holds the room. It ends within its deadline; push again after that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room {room} is held by another request")]
pub struct RoomBusy {
    /// The room.
    pub room: Room,
}

/// The standing after `proposed` is heard: final states stay, others only rise or fail.
pub(super) fn advance(current: Standing, proposed: Standing) -> Standing {
    let keep =
        current.poll.is_terminal() || (proposed.poll < current.poll && proposed.poll != KvPoll::Failed);
    let poll = if keep { current.poll } else { proposed.poll };
    Standing { poll, reclaimable: poll.is_terminal() && (current.reclaimable || proposed.reclaimable) }
}

/// Where every request begins.
pub(crate) const OPENING: Standing = Standing { poll: KvPoll::Bootstrapping, reclaimable: false };
