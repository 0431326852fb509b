//! The decode side: requests whose KV an SGLang prefill engine writes into this worker's memory.
//!
//! ```text
//! opening.rs    from the lookup to the pages that every prefill rank is told
//! ending.rs     success, failure, aborts and their acknowledgements, lost ways
//! session.rs    what a session knows of its ranks, and which of them may still write
//! finding.rs    lookups      engine.rs  what a lookup has found      prefills.rs  ways to ranks
//! ```
//!
//! A prefill rank writes from the moment at which it is told pages until its `KV_STATUS` or `ABORT_ACK`, or until
//! its process is proven dead. The pages of a session that ends before that are in quarantine, and so is the
//! room: `KV_STATUS` names nothing but the room, so that a word for a former session of the room could otherwise
//! be taken for one for its successor.

mod ending;
mod engine;
mod finding;
mod opening;
mod prefills;
mod session;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use kv_core::{Cause, LookupId, Phase, Quarantine, QuarantineReason, Room, SessionId, Time, WorkerId};

use super::aux_rows::AuxRooms;
use super::cache::OurCache;
use super::codec::Registration;
use super::config::{SglangLimits, SglangTiming};
use crate::effects::Effects;
use crate::sessions::{Due, Sessions};
use finding::Finder;
use prefills::Prefills;
use session::Receive;

/// The receiving sessions of a machine.
pub(super) struct Receiving {
    cache: OurCache,
    registration: Registration,
    aux_rooms: Option<Box<dyn AuxRooms>>,
    timing: SglangTiming,
    limits: SglangLimits,
    sessions: Sessions<Receive>,
    /// The session of each room: a session that has not ended, or whose pages are in quarantine.
    rooms: BTreeMap<u64, SessionId>,
    finder: Finder,
    prefills: Prefills,
    /// The number of the last abort.
    generation: u64,
    /// When the abort of each session is said again, if its pages still wait for an acknowledgement.
    repeats: BTreeSet<(Time, SessionId)>,
    /// Why no session is opened any more: the worker drains, or is stopping.
    closed: Option<Cause>,
}

impl Receiving {
    pub(super) fn new(
        cache: OurCache,
        registration: Registration,
        aux_rooms: Option<Box<dyn AuxRooms>>,
        (timing, limits): (SglangTiming, SglangLimits),
        seed: u64,
    ) -> Receiving {
        Receiving {
            cache,
            registration,
            aux_rooms,
            timing,
            limits,
            sessions: Sessions::default(),
            rooms: BTreeMap::new(),
            finder: Finder::default(),
            prefills: Prefills::default(),
            // SGLang repeats the number as it is; half of the range leaves room for all aborts.
            generation: seed >> 1,
            repeats: BTreeSet::new(),
            closed: None,
        }
    }

    /// True if the session is one of this half of the machine.
    pub(super) fn knows(&mut self, session: SessionId) -> bool {
        self.sessions.any(session).is_some()
    }

    /// How many sessions, rooms and ranks are remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> [usize; 3] {
        [self.sessions.len(), self.rooms.len(), self.prefills.len()]
    }

    /// How many sessions a lookup under way serves, as far as is known before the answer.
    pub(super) fn waiting_for(&self, lookup: LookupId) -> usize {
        self.finder.waiting_for(lookup)
    }

    /// The session for which a lookup is made, unless the lookup repeats one that has failed; and whether it does.
    pub(super) fn asks(&self, lookup: LookupId) -> (Option<SessionId>, bool) {
        self.finder.asks(lookup)
    }

    /// Does what time brings.
    pub(super) fn tick(&mut self, effects: &mut Effects, now: Time) {
        if self.next_due().is_none_or(|due| due > now) {
            return;
        }
        self.finder.tick(effects, now);
        self.prefills.tick(effects, now);
        while let Some(due) = self.sessions.due(now) {
            match due {
                Due::Deadline(session) => self.deadline(effects, now, session),
                Due::Free(session) => self.free(effects, session),
            }
        }
        while self.repeats.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, session)) = self.repeats.pop_first() else { break };
            self.repeat_abort(effects, now, session);
        }
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        let repeat = self.repeats.first().map(|(at, _)| *at);
        let due = [self.finder.next_due(), self.prefills.next_due(), self.sessions.next_due(), repeat];
        due.into_iter().flatten().min()
    }

    pub(super) fn quarantine(&self, now: Time) -> Vec<Quarantine> {
        self.sessions.quarantine(now)
    }

    /// The worker stops: every session ends, and prefill ranks are told.
    pub(super) fn shut_down(&mut self, effects: &mut Effects, now: Time) {
        self.closed = Some(Cause::WorkerStopped);
        for session in self.sessions.live_ids() {
            self.fail(effects, now, session, (None, Cause::WorkerStopped));
        }
    }

    /// Opens no session any more.
    pub(super) fn drain(&mut self) {
        self.closed.get_or_insert(Cause::Draining);
    }

    fn registration(&self) -> Vec<Bytes> {
        self.registration.encode()
    }

    /// The phase in which a session is.
    fn phase(&mut self, session: SessionId) -> Phase {
        match self.sessions.any(session) {
            Some(session) if session.dialect.sources.is_empty() => Phase::Bootstrap,
            Some(session) if session.dialect.sources.iter().any(|source| source.told) => Phase::Transfer,
            Some(session) if session.status() == kv_core::KvPoll::WaitingForInput => Phase::Rendezvous,
            _ => Phase::Handshake,
        }
    }
}

/// A room that cannot be opened, because a former session of the room is not over.
fn room_taken(held: Option<QuarantineReason>, room: &Room) -> Cause {
    match held {
        Some(_) => Cause::Protocol(
            "the room's former session is in quarantine: its prefill rank has not said that its writes have ended",
        ),
        None => Cause::AmbiguousRoom { room: room.clone(), other: room.clone() },
    }
}

/// The cause of a session's end, and the peer that caused it.
type Failure = (Option<WorkerId>, Cause);
