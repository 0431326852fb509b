//! A receiver whose peer is proven gone fails at once. When one half of a request fails, or a sender has sent
//! everything, the other half ends soon after, and not at its deadline, where no frame is lost. Where frames are lost
//! with connections that break between living hosts, this holds of receivers, and of senders that had been open for some time
//! when a receiver failed that had met their host.

use kv_core::KvPoll;

use super::success_means_right_bytes::bytes_between;
use crate::kv::fact::{Check, Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::{Leg, LegId, Side};
use crate::net::flight::Piece;
use crate::net::lives::{LifeId, Slot};

#[derive(Default, Clone)]
pub(crate) struct EndsAreTold;

impl Invariant for EndsAreTold {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let (leg, origin) = match *fact {
            Fact::Own(KvFact::Check(Check::Told { leg, origin })) => (leg, origin),
            Fact::CutOff { life, from } => return cut_off(view, life, from),
            _ => return Ok(()),
        };
        let (known, ended) = (&view.ledger.legs[leg], &view.ledger.legs[origin]);
        // Who has nothing to do with the other any more may go on with the rest.
        let served = known.receivers > 1 && was_served(view, leg, origin)
            || known.servers.len() > 1 && was_served(view, origin, leg);
        if known.poll.is_terminal() || served {
            return Ok(());
        }
        Err(format!(
            "leg {leg} ({:?}, room {}) is still {} though leg {origin} ({:?}) went from {} to {} {} us ago",
            known.side,
            known.room,
            known.poll,
            ended.side,
            ended.before,
            ended.poll,
            ended.ended_at.map_or(0, |at| (view.now - at) / 1000)
        ))
    }
}

/// Checks that no receiver waits for a host to which its own host has lost all connections. A receiver with
/// several sources may have all it needs from the host that was lost.
fn cut_off(view: &View<'_>, life: LifeId, from: Slot) -> Verdict {
    let legs = &view.ledger.legs;
    let done = |receiver: LegId| {
        let mut senders =
            legs.iter().enumerate().filter(|(_, leg)| leg.slot == from && leg.side == Side::Sender);
        legs[receiver].servers.len() > 1
            && senders.any(|(sender, leg)| leg.is_of(&legs[receiver]) && was_served(view, sender, receiver))
    };
    let waits = |(id, leg): (LegId, &Leg)| {
        leg.side == Side::Receiver
            && leg.life == Some(life)
            && leg.servers.contains(&from)
            && matches!(leg.poll, KvPoll::WaitingForInput | KvPoll::Transferring)
            && !done(id)
    };
    match legs.iter().enumerate().position(waits) {
        Some(leg) => Err(format!("leg {leg} goes on though its host has lost its connection to slot {from}")),
        None => Ok(()),
    }
}

/// True if a receiver had got everything from a sender: then the failure of either is no news to the
/// other, if that has another peer to go on with.
fn was_served(view: &View<'_>, sender: LegId, receiver: LegId) -> bool {
    let (from, known) = (&view.ledger.legs[sender], &view.ledger.legs[receiver]);
    if known.side != Side::Receiver {
        return false;
    }
    let of = |hold: u32, leg: LegId| hold != 0 && view.ledger.holds[hold as usize].leg == leg;
    let moved = view.flights.iter().flat_map(|flight| &flight.pieces[..flight.moved]);
    let between = |piece: &&Piece| {
        of(piece.local_hold, sender) && of(piece.remote_hold, receiver)
            || of(piece.local_hold, receiver) && of(piece.remote_hold, sender)
    };
    let got: u64 = moved.filter(between).map(|piece| piece.len).sum();
    got >= bytes_between(view, from, known)
}
