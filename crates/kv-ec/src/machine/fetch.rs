//! One fetch: the sessions that wait for the entry, and the transfer that brings the entry.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::{SessionId, Time, TransferMode};

use super::command::Want;
use super::error::EcError;
use crate::cache::Reservation;
use crate::claims::Claim;
use crate::room::Key;

#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) waiters: BTreeMap<SessionId, Waiter>,
    pub(super) step: Step,
    /// Tries since the last one that was not for a passing reason.
    pub(super) tries: u32,
    /// The producer of the last try.
    pub(super) asked: Option<Producer>,
    /// Why the last try failed.
    pub(super) last: Option<EcError>,
    /// True while the fetch pauses because none of the sessions is in turn.
    pub(super) out_of_turn: bool,
}

/// Where an entry is to be had: the address of a bootstrap server, and the replica there.
pub(super) type Producer = (String, Option<u32>);

/// A session that waits for the entry.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) want: Box<Want>,
    pub(super) budget: Duration,
    pub(super) deadline: Time,
}

#[derive(Debug)]
pub(super) enum Step {
    /// Nothing moves until then.
    Pausing(Time),
    /// A session of the inner machine fills the reservation's blocks.
    Moving(Box<Moving>),
}

#[derive(Debug)]
pub(super) struct Moving {
    pub(super) transfer: SessionId,
    pub(super) producer: Producer,
    pub(super) mode: TransferMode,
    pub(super) reservation: Reservation,
    /// Until when the producer may take, for the sake of sessions that name others.
    pub(super) until: Time,
    /// True once the producer was met.
    pub(super) met: bool,
    /// True once the inner machine has said that the bytes are right.
    pub(super) arrived: bool,
}

impl Fetch {
    pub(super) fn new(now: Time) -> Fetch {
        let (waiters, step) = (BTreeMap::new(), Step::Pausing(now));
        Fetch { waiters, step, tries: 0, asked: None, last: None, out_of_turn: false }
    }

    /// A session whose producer is the next one to ask: all that are named have their turn.
    pub(super) fn next(&self) -> Option<&Waiter> {
        let was_asked =
            |waiter: &Waiter| self.asked.as_ref().is_some_and(|asked| waiter.producer() <= *asked);
        self.waiters.values().min_by_key(|waiter| (was_asked(waiter), waiter.producer()))
    }

    /// Why none of the waiting sessions may take room yet; `None` if one may.
    pub(super) fn waits_for_room(&self) -> Option<EcError> {
        let all: Option<Vec<EcError>> = self.waiters.values().map(Waiter::waits_for_room).collect();
        all?.into_iter().next()
    }
}

impl Waiter {
    /// Why the session's request may not take room; `None` if it may.
    pub(super) fn waits_for_room(&self) -> Option<EcError> {
        self.want.claim.as_ref().and_then(Claim::waits)
    }

    /// Why the session's request never may take room; `None` if it may, or waits.
    pub(super) fn has_ended(&self) -> Option<EcError> {
        self.want.claim.as_ref().and_then(Claim::has_ended)
    }

    /// The entry will not come to the session: its request needs no room for the entry.
    pub(super) fn give_up(&self, key: &Key) {
        if let Some(claim) = &self.want.claim {
            claim.give_up(key);
        }
    }

    /// Until when the session can let another producer than its own be asked: half of its time.
    pub(super) fn turn(&self, now: Time) -> Time {
        now + self.deadline.since(now) / 2
    }

    pub(super) fn producer(&self) -> Producer {
        (self.want.source.clone(), self.want.replica)
    }
}
