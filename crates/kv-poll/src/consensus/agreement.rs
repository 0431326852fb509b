//! What a queue proposes, what the ranks agree on, and the rule by which they agree.

use kv_core::{KvPoll, Room};

/// The number of a request within one queue. Numbers rise in the order of `push` and are never reused.
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
    /// The state of the request.
    pub poll: KvPoll,
    /// True if the state is final and no data operation can touch the pages any more.
    pub reclaimable: bool,
}

/// A change of the agreed standing of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The request, by the key that this rank entered it with.
    pub key: RequestKey,
    /// The minimum of all ranks' states. If it is `reclaimable`, so is this rank's session.
    pub standing: Standing,
}

/// One rank's part in the agreement of all ranks on the state of each request.
///
/// For each request: one `join`, then `propose` whenever its session changes. The agreed state rises, or
/// falls to `Failed`, and each change is reported once by `agree`. A final state with `reclaimable` is the
/// last report for a request, which is forgotten then.
pub trait RankConsensus {
    /// Why ranks could not agree. The queues change nothing in a step that ends with an error.
    type Error: std::error::Error;

    /// Enters a request under a room. Keys must rise from call to call. Refused with [`RoomBusy`] while
    /// another request has the room.
    ///
    /// **Every rank must enter every request**, or the other ranks wait until their sessions' deadlines. A
    /// rank that cannot serve a request enters it and proposes `Failed`.
    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy>;

    /// Proposes the standing of this rank's session. A state below an earlier one (`Failed` excepted) and an
    /// unknown key are ignored.
    fn propose(&mut self, key: RequestKey, standing: Standing);

    /// Exchanges proposals with the other ranks, and appends to `agreed` what has newly been agreed. Call
    /// once per scheduler step.
    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Self::Error>;

    /// Whose turn it is to be admitted, in one order for all ranks.
    ///
    /// | this rank | whose turn it is |
    /// |---|---|
    /// | has not passed a request that has a turn, whichever rank has given it | that request's, also if it is not in this rank's line yet: nobody is admitted before it |
    /// | has passed all of them | `first`'s, the first in this rank's line, once all ranks have entered it: it has the next turn on all ranks |
    ///
    /// `None` for `first` asks only for a request that another rank has passed already. A turn stays until
    /// [`took_turn`](RankConsensus::took_turn), also while this rank has no room, or until the request has ended: a
    /// request with a higher priority that comes later has its turn afterwards.
    ///
    /// **All ranks must have the same order.** A rank gives room to a request and waits until all other ranks have
    /// given room to it, too. `first` is right for ranks that always have the same line in the same step.
    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey>;

    /// The request whose turn it was has been admitted on this rank, or will never be: it was aborted, or has ended.
    fn took_turn(&mut self);

    /// True if the ranks build identical batches, so that all of them must have the same pages free in each
    /// step. The queues then free pages on one rank only when all ranks can.
    fn is_lock_step(&self) -> bool {
        true
    }
}

/// Another request has the room. That request ends within its deadline; push again afterwards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room {room} is in use by another request; push again when that request has ended")]
pub struct RoomBusy {
    /// The room that two requests have.
    pub room: Room,
}

/// The standing after a proposal: final states stay, others only rise or fail.
pub(super) fn advance(current: Standing, proposed: Standing) -> Standing {
    let keep =
        current.poll.is_terminal() || (proposed.poll < current.poll && proposed.poll != KvPoll::Failed);
    let poll = if keep { current.poll } else { proposed.poll };
    Standing { poll, reclaimable: poll.is_terminal() && (current.reclaimable || proposed.reclaimable) }
}

/// The standing with which every request begins.
pub(crate) const OPENING: Standing = Standing { poll: KvPoll::Bootstrapping, reclaimable: false };
