//! Once a session has handed back its pages, no post of that session reads or writes them. And no post ever
//! touches pages that were not in a transfer when the post was made.

use kv_core::Op;

use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::way::may_write;

#[derive(Default, Clone)]
pub(crate) struct PagesQuietWhenReleased;

impl Invariant for PagesQuietWhenReleased {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Released { life, leg: Some(leg), hold: Some(hold), pages, .. }) => {
                for flight in view.flights {
                    let reads = flight.life == life && !flight.over;
                    // What is read is protected by its lease: the reader must not succeed, that is all.
                    let writes = flight.target == life
                        && flight.op == Op::Write
                        && may_write(flight, &view.ways[flight.way], view.lives, view.now);
                    let touches = flight.pieces.iter().any(|piece| {
                        (reads && piece.local_hold == hold) || (writes && piece.remote_hold == hold)
                    });
                    if touches {
                        return Err(format!(
                            "leg {leg} hands back {pages:?} of life {life} while post {} of life {} is in flight",
                            flight.post, flight.life
                        ));
                    }
                }
                Ok(())
            }
            Fact::Read { flight, piece, holder } => {
                let flight = &view.flights[flight];
                if piece.local_hold == 0 || holder != piece.local_hold {
                    return Err(format!(
                        "post {} of life {} reads region {} offset {}, held by {} when posted and by {holder} now",
                        flight.post, flight.life, piece.local_region, piece.local_offset, piece.local_hold
                    ));
                }
                Ok(())
            }
            Fact::Written { flight, piece, life, holder } => {
                let flight = &view.flights[flight];
                if flight.op == Op::Read {
                    if piece.local_hold == 0 || holder != piece.local_hold {
                        return Err(format!(
                            "read {} of life {life} fills region {} offset {}, held by {} when posted and by {holder} now",
                            flight.post, piece.local_region, piece.local_offset, piece.local_hold
                        ));
                    }
                    return Ok(());
                }
                if life != flight.target {
                    return Ok(());
                }
                if piece.remote_hold == 0 || holder != piece.remote_hold {
                    return Err(format!(
                        "post {} of life {} writes into life {life} region {} offset {}, held by {} when posted and by {holder} now",
                        flight.post, flight.life, piece.remote_region, piece.remote_offset, piece.remote_hold
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
