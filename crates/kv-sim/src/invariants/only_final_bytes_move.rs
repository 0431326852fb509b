//! No write reads bytes of a sender that its scheduler has not called final, and no grant names such
//! bytes to a reader.
//!
//! A read that comes after its lease may find pages of any session, and will not succeed.

use kv_core::Op;

use super::{Invariant, Verdict};
use crate::fact::{Fact, View};

#[derive(Default)]
pub(crate) struct OnlyFinalBytesMove;

impl Invariant for OnlyFinalBytesMove {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let ledger = view.ledger;
        match *fact {
            Fact::Read { flight, piece, .. } => {
                let flight = &view.flights[flight];
                debug_assert_eq!(flight.op, Op::Write);
                let Some(hold) = ledger.holds.get(piece.local_hold as usize) else { return Ok(()) };
                if piece.local_hold == 0 || hold.is_final(piece.local_region) {
                    return Ok(());
                }
                Err(format!(
                    "post {} of life {} writes region {} offset {} of leg {}, which is not final",
                    flight.post, flight.life, piece.local_region, piece.local_offset, hold.leg
                ))
            }
            Fact::Granted { leg } => {
                let known = &ledger.legs[leg];
                let regions = 0..view.params.kv_regions as u32;
                for &hold in known.holds.iter().chain(Some(&known.row_hold).filter(|hold| **hold != 0)) {
                    let hold = &ledger.holds[hold as usize];
                    if let Some(region) = regions.clone().find(|region| !hold.is_final(*region)) {
                        return Err(format!(
                            "leg {leg} grants pages {:?}, which are not final in region {region}",
                            hold.pages
                        ));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
