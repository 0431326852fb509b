//! Nothing meant for a former life changes anything in its successor: no frame, no write.
//!
//! (Frames *of* a former life may still be believed by others until the transport proves it dead:
//! incarnations have no order, so that nobody can tell which of two is the former one. What such a
//! frame starts goes to the dead, and can never succeed.)

use kv_core::Op;

use crate::kv::fact::{Fact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::fact::Effects;

#[derive(Default, Clone)]
pub(crate) struct IncarnationFence;

impl Invariant for IncarnationFence {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Written { flight, life, .. } => {
                let flight = &view.flights[flight];
                if flight.op == Op::Write && life != flight.target {
                    return Err(format!(
                        "post {} of life {} for life {} writes into its successor {life}",
                        flight.post, flight.life, flight.target
                    ));
                }
                Ok(())
            }
            Fact::Handled { at, from, addressed, effects }
                if at != addressed && effects != Effects::default() =>
            {
                Err(format!(
                    "a frame of life {from} for life {addressed} changes its successor {at}: {effects:?}"
                ))
            }
            _ => Ok(()),
        }
    }
}
