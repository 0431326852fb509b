//! How a request enters a queue, and why it leaves as a failed one.

use std::collections::BTreeSet;

use kv_core::{KvPoll, KvSession, Room};

use super::error::RequestError;
use crate::consensus::{RankConsensus, RequestKey, RoomBusy, Standing};

/// What a rank proposes for a request whose session it could not open.
pub(super) const CANNOT_SERVE: Standing = Standing { poll: KvPoll::Failed, reclaimable: true };

/// Enters a request into the agreement, unless one of the queue's live requests holds the room.
pub(super) fn enter(
    consensus: &mut impl RankConsensus,
    rooms: &BTreeSet<Room>,
    key: RequestKey,
    room: &Room,
) -> Result<(), RoomBusy> {
    if rooms.contains(room) {
        return Err(RoomBusy { room: room.clone() });
    }
    consensus.join(key, room)
}

/// Why a request failed that the ranks agree has failed.
pub(super) fn cause<S: KvSession>(session: &S, aborted: bool) -> RequestError {
    match session.failure() {
        Some(error) => error.into(),
        None if aborted => RequestError::Aborted,
        None => RequestError::OtherRank { room: session.room().clone() },
    }
}
