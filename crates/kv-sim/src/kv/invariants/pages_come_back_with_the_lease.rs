//! The pages that a sender keeps for readers come back no later than the lease allows, as it was last renewed
//! by a heartbeat.

use crate::kv::fact::{Fact, View};
use crate::kv::invariant::{Invariant, Verdict};

#[derive(Default, Clone)]
pub(crate) struct PagesComeBackWithTheLease;

impl Invariant for PagesComeBackWithTheLease {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        let (Fact::Stepped { life, .. } | Fact::Unheard { life }) = *fact else { return Ok(()) };
        if view.ledger.leased.is_empty() {
            return Ok(());
        }
        let now = view.lives[life].clock.local(view.now);
        let legs = view.ledger.leased.iter().map(|leg| (*leg, &view.ledger.legs[*leg]));
        let mut kept = legs.filter(|(_, leg)| leg.life == Some(life) && !leg.holds.is_empty());
        match kept.find(|(_, leg)| leg.leased_until.is_some_and(|until| until <= now)) {
            Some((leg, known)) => {
                let until = known.leased_until;
                Err(format!("leg {leg} keeps pages at {now:?} that were leased until {until:?}"))
            }
            None => Ok(()),
        }
    }
}
