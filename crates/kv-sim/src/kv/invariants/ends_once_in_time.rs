//! The state of a session changes only as the table at `KvPoll` allows. Every session reaches exactly one
//! final state, inside its deadline. A failure has a reason, and no other state has one.

use kv_core::KvPoll::{self, Bootstrapping, Failed, Success, Transferring, WaitingForInput};

use crate::kv::fact::{Check, Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::{LegId, Side};

#[derive(Default, Clone)]
pub(crate) struct EndsOnceInTime {
    /// The sessions whose first state was reported.
    begun: Vec<LegId>,
}

impl Invariant for EndsOnceInTime {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Status { leg, to, failure }) => {
                let known = &view.ledger.legs[leg];
                let first = to == Bootstrapping && known.poll == Bootstrapping && !self.begun.contains(&leg);
                if first {
                    self.begun.push(leg);
                } else if !may_move(known.side, known.poll, to) {
                    return Err(format!("leg {leg} ({:?}) moves from {} to {to}", known.side, known.poll));
                }
                if failure.is_some() != (to == Failed) {
                    return Err(format!("leg {leg} is {to} with reason {failure:?}"));
                }
                match failure {
                    Some(failure) if failure.room != known.room => {
                        Err(format!("leg {leg} of room {} fails as room {}", known.room, failure.room))
                    }
                    _ => Ok(()),
                }
            }
            Fact::Own(KvFact::StrangeStatus { life, session, to }) => {
                Err(format!("life {life} tells {to} of session {session}, which nobody opened"))
            }
            Fact::Stepped { life, input, .. } => {
                let record = &view.lives[life];
                if record.shut_down && record.open_sessions > 0 {
                    return Err(format!(
                        "life {life} was shut down, yet {} sessions go on after {input}",
                        record.open_sessions
                    ));
                }
                Ok(())
            }
            Fact::Own(KvFact::Check(Check::Deadline { leg })) => {
                let known = &view.ledger.legs[leg];
                let alive = known.life.is_some_and(|life| view.lives[life].alive);
                if alive && !known.poll.is_terminal() {
                    return Err(format!(
                        "leg {leg} ({:?}, room {}) is still {} after its deadline",
                        known.side, known.room, known.poll
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn may_move(side: Side, from: KvPoll, to: KvPoll) -> bool {
    match (from, to) {
        (Bootstrapping, WaitingForInput) | (WaitingForInput, Transferring) | (Transferring, Success) => true,
        (Bootstrapping, Transferring) => side == Side::Sender,
        (Bootstrapping | WaitingForInput | Transferring, Failed) => true,
        _ => false,
    }
}
