//! A receiver whose peer is proven gone fails at once. When one half of a request fails and no frame is lost, the other half ends soon after, not at its
//! deadline.

use kv_core::KvPoll;

use super::{Invariant, Verdict};
use crate::calendar::Check;
use crate::fact::{Fact, View};
use crate::flight::Piece;
use crate::ledger::{Leg, LegId, LifeId, Side, Slot};

#[derive(Default)]
pub(crate) struct FailureIsTold;

impl Invariant for FailureIsTold {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let (leg, origin) = match *fact {
            Fact::Check(Check::Told { leg, origin }) => (leg, origin),
            Fact::CutOff { life, from } => return cut_off(view, life, from),
            _ => return Ok(()),
        };
        let (known, failed) = (&view.ledger.legs[leg], &view.ledger.legs[origin]);
        if known.poll.is_terminal() || known.receivers > 1 && was_served(view, origin) {
            return Ok(());
        }
        Err(format!(
            "leg {leg} ({:?}, room {}) is still {} though leg {origin} ({:?}) failed in state {} {} us ago",
            known.side,
            known.room,
            known.poll,
            failed.side,
            failed.before,
            failed.ended_at.map_or(0, |ended| (view.now - ended) / 1000)
        ))
    }
}

/// A receiver cannot wait for a host to which its own has no connection.
fn cut_off(view: &View<'_>, life: LifeId, from: Slot) -> Verdict {
    let waits = |leg: &Leg| {
        leg.side == Side::Receiver
            && leg.life == Some(life)
            && leg.server == from
            && matches!(leg.poll, KvPoll::WaitingForInput | KvPoll::Transferring)
    };
    match view.ledger.legs.iter().position(waits) {
        Some(leg) => Err(format!("leg {leg} goes on though its host has lost its connection to slot {from}")),
        None => Ok(()),
    }
}

/// True if a receiver had got everything: then its failure is no news to a sender that still serves
/// another one.
fn was_served(view: &View<'_>, receiver: LegId) -> bool {
    let held = |hold: u32| hold != 0 && view.ledger.holds[hold as usize].leg == receiver;
    let moved = view.flights.iter().flat_map(|flight| &flight.pieces[..flight.moved]);
    let into = |piece: &&Piece| held(piece.remote_hold) || held(piece.local_hold);
    let got: u64 = moved.filter(into).map(|piece| piece.len).sum();
    let known = &view.ledger.legs[receiver];
    let items = known.num_pages * view.params.kv_regions + usize::from(known.wants_aux);
    known.side == Side::Receiver && got >= (items * view.params.item_len) as u64
}
