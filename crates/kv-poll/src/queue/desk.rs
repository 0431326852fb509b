//! The common part of prefill and decode queues: they open sessions, agree with other ranks, retry commands
//! that a full ring refused, and take pages out of ended sessions.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::{KvManager, KvPoll, KvSession, OpenError, Reclaimed, Room, SessionId};

use super::error::{PushError, PushRefusal, RequestError};
use super::quarantine::{QuarantineRule, Stopped};
use crate::consensus::{Agreed, RankConsensus, RequestKey, RoomBusy, Standing};
use crate::kv::Change;

/// The standing that a rank proposes for a request whose session it could not open.
const CANNOT_SERVE: Standing = Standing { poll: KvPoll::Failed, reclaimable: true };

/// The sessions of a queue's requests, and this rank's place in the agreement.
pub(super) struct Desk<M, C> {
    pub(super) manager: M,
    rule: QuarantineRule,
    pub(super) stopped: Option<Stopped>,
    consensus: C,
    sessions: BTreeMap<SessionId, RequestKey>,
    rooms: BTreeSet<Room>,
    /// Requests with commands for which the worker's ring had no room, oldest first.
    backlog: VecDeque<RequestKey>,
    /// Requests whose session should have given its pages back, and has not.
    unreclaimed: Vec<RequestKey>,
    agreed: Vec<Agreed>,
    next_key: u64,
}

impl<M: KvManager, C: RankConsensus> Desk<M, C> {
    pub(super) fn new(manager: M, consensus: C, rule: QuarantineRule) -> Desk<M, C> {
        Desk {
            manager,
            rule,
            stopped: None,
            consensus,
            sessions: BTreeMap::new(),
            rooms: BTreeSet::new(),
            backlog: VecDeque::new(),
            unreclaimed: Vec::new(),
            agreed: Vec::new(),
            next_key: 0,
        }
    }

    /// Enters a request into the agreement, unless a live request of the queue has the room, and opens the
    /// request's session.
    pub(super) fn open<R, S: KvSession>(
        &mut self,
        request: R,
        room: Room,
        open: impl FnOnce(&M, Room) -> Result<S, OpenError>,
    ) -> Result<(RequestKey, R, S), PushError<R>> {
        let key = RequestKey(self.next_key);
        let entered = match self.rooms.contains(&room) {
            true => Err(RoomBusy { room: room.clone() }),
            false => self.consensus.join(key, &room),
        };
        if let Err(busy) = entered {
            return Err(PushError { request, reason: busy.into() });
        }
        self.next_key += 1;
        match open(&self.manager, room.clone()) {
            Ok(session) => {
                self.sessions.insert(session.id(), key);
                self.rooms.insert(room);
                Ok((key, request, session))
            }
            Err(error) => {
                self.consensus.propose(key, CANNOT_SERVE);
                Err(PushError { request, reason: PushRefusal::Open(error) })
            }
        }
    }

    /// Proposes the states that sessions report, as `observe` judges them, and exchanges them with the other
    /// ranks. Returns what has newly been agreed. `observe` returns `None` for requests that it does not
    /// know.
    pub(super) fn agree(
        &mut self,
        changes: impl IntoIterator<Item = Change>,
        mut observe: impl FnMut(RequestKey, KvPoll) -> Option<KvPoll>,
    ) -> Result<Vec<Agreed>, C::Error> {
        for Change { session, poll, reclaimable } in changes {
            let Some(&key) = self.sessions.get(&session) else { continue };
            if let Some(poll) = observe(key, poll) {
                self.consensus.propose(key, Standing { poll, reclaimable });
            }
        }
        // Agreements that came before an error are kept for the next step.
        self.consensus.agree(&mut self.agreed)?;
        Ok(std::mem::take(&mut self.agreed))
    }

    /// True if other ranks must have the same pages free in the same step.
    pub(super) fn is_lock_step(&self) -> bool {
        self.consensus.is_lock_step()
    }

    /// Whose turn it is to be admitted. `first` is the first in this rank's line; `None` asks only for a request that
    /// another rank has passed already.
    pub(super) fn turn(
        &mut self,
        first: Option<RequestKey>,
        mut is_in_line: impl FnMut(RequestKey) -> InLine,
    ) -> Turn {
        loop {
            let Some(key) = self.consensus.turn(first) else { return Turn::Nobodys };
            if Some(key) == first {
                return Turn::Of(key);
            }
            match is_in_line(key) {
                InLine::Yes => return Turn::Of(key),
                InLine::Later => return Turn::Awaited,
                InLine::Never => self.consensus.took_turn(),
            }
        }
    }

    /// The request whose turn it was has been admitted.
    pub(super) fn took_turn(&mut self) {
        self.consensus.took_turn();
    }

    /// Notes that the room may be used again.
    pub(super) fn leave(&mut self, room: &Room) {
        self.rooms.remove(room);
    }

    /// Takes everything out of an ended session; a session that still holds something is tried again at
    /// the next step.
    pub(super) fn reclaim(&mut self, key: RequestKey, session: &mut impl KvSession) -> Option<Reclaimed> {
        let reclaimed = session.reclaim();
        match &reclaimed {
            Some(_) => drop(self.sessions.remove(&session.id())),
            None => self.unreclaimed.push(key),
        }
        reclaimed
    }

    /// Takes the requests whose sessions must be tried again.
    pub(super) fn take_unreclaimed(&mut self) -> Vec<RequestKey> {
        std::mem::take(&mut self.unreclaimed)
    }

    /// Notes that the ring had no room for a command of this request.
    pub(super) fn enqueue(&mut self, key: RequestKey) {
        self.backlog.push_back(key);
    }

    /// Retries the commands for which the ring had no room. `flush` returns true if a request has no command
    /// left. All sessions share the ring, so the first refusal ends the retry.
    pub(super) fn flush(&mut self, mut flush: impl FnMut(RequestKey) -> bool) {
        while let Some(&key) = self.backlog.front() {
            if !flush(key) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Stops admission, or lets it go on. Both numbers follow from what the ranks have agreed, so that ranks
    /// in lock-step decide alike.
    pub(super) fn stop_or_go(&mut self, quarantined: usize, pool: usize) {
        let stops = self.rule.stops(quarantined, pool);
        self.stopped = stops.then(|| Stopped { quarantined, pool, by: self.manager.quarantine() });
    }
}

/// Whose turn it is to be admitted.
pub(super) enum Turn {
    /// The turn of this request, which is in this rank's line.
    Of(RequestKey),
    /// The turn of a request that enters the line in the next step: the agreement on it is under way.
    Awaited,
    Nobodys,
}

/// Whether a request is among those that wait to be admitted.
pub(super) enum InLine {
    Yes,
    /// Not before the ranks have agreed on it.
    Later,
    /// Not any more: it has ended, or is to end.
    Never,
}

/// Why a request failed, once the ranks agree that it has.
pub(super) fn cause<S: KvSession>(session: &S, aborted: bool) -> RequestError {
    match session.failure() {
        Some(error) => error.into(),
        None if aborted => RequestError::Aborted,
        None => RequestError::OtherRank { room: session.room().clone() },
    }
}
