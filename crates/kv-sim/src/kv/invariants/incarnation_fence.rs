//! Nothing that is meant for a former incarnation changes anything in its successor: no frame, no write.
//!
//! Other hosts may still believe frames *of* a former incarnation until the transport proves that it is dead,
//! because incarnations have no order that would tell the older from the newer. What such a frame starts goes
//! to the dead incarnation, and can never succeed.

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
