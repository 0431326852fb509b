//! Once faults have stopped and every host lives, every new request is served in bounded time. So is every
//! request of a world whose only faults are frames that are lost, duplicated or late.

use std::collections::BTreeSet;

use kv_core::{BootstrapError, Cause, KvPoll};

use crate::kv::fact::{Check, Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::{Leg, LegId, Side};

#[derive(Default, Clone)]
pub(crate) struct RequestsAreServed {
    /// Requests of which a half was excused when it changed its state. Halves of them may fail, even those that are opened
    /// after the host that drained was replaced: receivers may still be told of the former host.
    lost: BTreeSet<usize>,
}

impl Invariant for RequestsAreServed {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Status { leg, to, failure }) => {
                let known = &view.ledger.legs[leg];
                let cause = failure.as_ref().map(|failure| &failure.cause);
                let missed_the_end = cause == Some(&Cause::PeerLost) && was_served_by_drained(view, leg);
                let was_turned_away = cause == Some(&Cause::Bootstrap(BootstrapError::Draining))
                    && view.was_told_of_a_drain(leg);
                if view.is_excused(leg) || missed_the_end || was_turned_away {
                    self.lost.insert(known.request);
                }
                match to == KvPoll::Failed && self.is_owed(view, leg) {
                    true => Err(format!("leg {leg} which must be served, fails: {failure:?}")),
                    false => Ok(()),
                }
            }
            Fact::Cancelled { flight } => {
                let flight = &view.flights[flight];
                let hold = flight.pieces[0].local_hold as usize;
                let leg = view.ledger.holds[hold].leg;
                if view.ledger.legs.get(leg).is_some_and(|leg| leg.poll != KvPoll::Failed) {
                    return Err(format!(
                        "post {} of leg {leg}, which has not failed, is cancelled",
                        flight.post
                    ));
                }
                Ok(())
            }
            Fact::Own(KvFact::Check(Check::Served { leg })) => {
                let known = &view.ledger.legs[leg];
                if known.poll == KvPoll::Success || !self.is_owed(view, leg) {
                    return Ok(());
                }
                if is_starved(view, known.request) {
                    self.lost.insert(known.request);
                    return Ok(());
                }
                Err(format!("leg {leg} ({:?}) which must be served, is still {}", known.side, known.poll))
            }
            _ => Ok(()),
        }
    }
}

impl RequestsAreServed {
    fn is_owed(&self, view: &View<'_>, leg: LegId) -> bool {
        let known = &view.ledger.legs[leg];
        known.must_succeed && !view.is_excused(leg) && !self.lost.contains(&known.request)
    }
}

/// True if a host of the request has found no room for it, because sessions of before hold pages or items: a receiver that
/// has died may read what it has leased until the lease ends.
fn is_starved(view: &View<'_>, request: usize) -> bool {
    let holds = |leg: &Leg| {
        let life = leg.life.and_then(|life| view.lives.get(life));
        life.is_some_and(|life| life.alive && life.holds_out > 0)
    };
    view.ledger.legs.iter().any(|leg| leg.request == request && leg.starved && holds(leg))
}

/// True for a sender of which a receiver has succeeded on a host that was then stopped, because it drained and was empty.
/// The receiver hears of the last write before the sender's transport says that the write has ended, and does not wait
/// for the sender to know.
fn was_served_by_drained(view: &View<'_>, leg: LegId) -> bool {
    let known = &view.ledger.legs[leg];
    let mut others = view.ledger.legs.iter().filter(|other| other.request == known.request);
    let drained = |other: &Leg| {
        let life = other.life.and_then(|life| view.lives.get(life));
        life.is_some_and(|life| life.emptied.is_some() && !life.alive)
    };
    known.side == Side::Sender
        && others.any(|other| other.side == Side::Receiver && other.poll == KvPoll::Success && drained(other))
}
