//! Of ranks that hold the same pages, each sends the pages that it is asked for and no others. Aux rows and
//! items of cache groups come from the first of these ranks. No byte is sent twice.

use kv_core::{Op, RegionRole};

use crate::kv::fact::{Fact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::Leg;
use crate::net::lives::HoldId;

#[derive(Default, Clone)]
pub(crate) struct EachSendsItsShare;

impl Invariant for EachSendsItsShare {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let Fact::Written { flight, piece, .. } = *fact else { return Ok(()) };
        let Some(pair) = view.params.unequal.as_ref().filter(|pair| pair.engines[0].cp > 1) else {
            return Ok(());
        };
        if piece.local_hold == 0 || piece.remote_hold == 0 {
            return Ok(());
        }
        let flight = &view.flights[flight];
        let ours = (flight.life, piece.local_hold, piece.local_region, piece.local_offset);
        let theirs = (flight.target, piece.remote_hold, piece.remote_region, piece.remote_offset);
        let ((_, from, ..), (life, to, region, offset)) = match flight.op {
            Op::Write => (ours, theirs),
            Op::Read => (theirs, ours),
        };
        let leg = |hold: HoldId| &view.ledger.legs[view.ledger.holds[hold as usize].leg];
        let (sender, receiver) = (leg(from), leg(to));
        let rank = |leg: &Leg| view.params.rank(leg.slot).1;
        let Some(region) = view.memories[life].regions().get(region as usize) else { return Ok(()) };
        let right = match region.role {
            RegionRole::Aux => pair.aux_source(rank(receiver)) == rank(sender),
            RegionRole::State => pair.sibling(rank(sender)).0 == 0,
            _ => {
                let page = (offset as usize / region.item_len) as u32;
                let at = receiver.pages.iter().position(|known| *known == page);
                let asked = pair.share(rank(sender), receiver.num_pages);
                receiver.misused || at.is_none_or(|at| asked.contains(&at))
            }
        };
        if right {
            return Ok(());
        }
        let (sender, receiver) = (sender.slot, receiver.slot);
        Err(format!("slot {sender} sends {:?} offset {offset} to slot {receiver} unasked", region.role))
    }
}
