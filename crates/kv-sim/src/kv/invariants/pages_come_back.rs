//! All pages that a scheduler gives to a machine come back exactly once, as they were given, and after the
//! final state of its session. The posts of a failed session are cancelled, so that its pages come back soon.
//! When the world has come to rest, no machine holds a page.

use kv_core::KvPoll;

use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::lives::HoldId;

#[derive(Default, Clone)]
pub(crate) struct PagesComeBack;

impl Invariant for PagesComeBack {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Released { life, session, leg: Some(leg), hold, pages }) => {
                if hold.is_none() {
                    return Err(format!(
                        "session {session} of life {life} hands back {pages:?}, which it does not hold"
                    ));
                }
                let known = &view.ledger.legs[leg];
                if !known.poll.is_terminal() {
                    return Err(format!("leg {leg} hands back {pages:?} in state {}", known.poll));
                }
                Ok(())
            }
            Fact::Own(KvFact::Released { life, session, leg: None, pages, .. }) => {
                // No page was ever given to sessions that do not exist.
                if !pages.is_empty() || view.lives[life].holds_out == 0 {
                    return Err(format!("unknown session {session} of life {life} hands back {pages:?}"));
                }
                Ok(())
            }
            Fact::Stepped { life, .. } => {
                let failed = |hold: HoldId| {
                    hold != 0 && view.ledger.legs[view.ledger.holds[hold as usize].leg].poll == KvPoll::Failed
                };
                let mut flying = view.flights.iter().filter(|flight| flight.life == life && !flight.over);
                let kept = flying.find(|flight| !flight.cancelled && failed(flight.pieces[0].local_hold));
                match kept {
                    Some(flight) => Err(format!(
                        "post {} of life {life} goes on for a failed session: its pages could come back sooner",
                        flight.post
                    )),
                    None => Ok(()),
                }
            }
            Fact::Settled { .. } => {
                for (leg, known) in view.ledger.legs.iter().enumerate() {
                    let alive = known.life.is_some_and(|life| view.lives[life].alive);
                    if alive && !known.holds.is_empty() {
                        return Err(format!(
                            "leg {leg} ({:?}, {}) never hands back {} of its `Pages`",
                            known.side,
                            known.poll,
                            known.holds.len()
                        ));
                    }
                }
                let mut lives = view.lives.iter().enumerate();
                match lives.find(|(_, life)| life.alive && life.holds_out > 0) {
                    Some((life, record)) => {
                        Err(format!("life {life} never hands back {} of its `Pages`", record.holds_out))
                    }
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}
