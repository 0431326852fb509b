//! No write reads bytes of a sender that its scheduler has not announced as final, and no lease grants such
//! bytes to a reader.
//!
//! A read that comes after the end of its lease may find pages of any session. Such a read does not succeed.

use kv_core::Op;

use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};

#[derive(Default, Clone)]
pub(crate) struct OnlyFinalBytesMove;

impl Invariant for OnlyFinalBytesMove {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let ledger = view.ledger;
        match *fact {
            Fact::Read { flight, piece, .. } => {
                let flight = &view.flights[flight];
                debug_assert_eq!(flight.op, Op::Write);
                let Some(hold) = ledger.holds.get(piece.local_hold as usize) else { return Ok(()) };
                let layers =
                    view.memories[flight.life].layers_in(piece.local_region, piece.local_offset, piece.len);
                if piece.local_hold == 0 || hold.is_final(layers) {
                    return Ok(());
                }
                Err(format!(
                    "post {} of life {} writes region {} offset {} of leg {}, which is not final",
                    flight.post, flight.life, piece.local_region, piece.local_offset, hold.leg
                ))
            }
            Fact::Own(KvFact::Granted { leg }) => {
                let known = &ledger.legs[leg];
                let layers = view.params.layers(known.slot).fold(0, |layers, layer| layers | 1 << layer);
                // An empty chunk has nothing that could not be final.
                let given = known.holds.iter().filter(|hold| !ledger.holds[**hold as usize].pages.is_empty());
                let others = [&known.row_hold, &known.state.hold].into_iter().filter(|hold| **hold != 0);
                for &hold in given.chain(others) {
                    let hold = &ledger.holds[hold as usize];
                    if !hold.is_final(layers) {
                        let pages = &hold.pages;
                        return Err(format!("leg {leg} grants pages {pages:?}, which are not final"));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
