//! What a healed world must do: an entry is saved, several sessions of several hosts want the entry at once,
//! and all of them get it.

use std::time::Duration;

use kv_core::TransferMode;
use kv_ec::EcPoll;

use super::ledger::Item;
use super::oracle::broken;
use super::service::EcWorld;
use super::workload::{EcAct, Wish};
use crate::clock::MS;
use crate::net::lives::Slot;
use crate::violation::Violation;

/// One round of a healed world.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// The entries, and who saves each.
    saved: Vec<(Slot, Item)>,
}

impl EcWorld {
    /// Begins the next round. False if there is none.
    pub(super) fn begin_round(&mut self) -> bool {
        if self.service.rounds_left == 0 {
            return false;
        }
        self.service.rounds_left -= 1;
        self.service.ledger.sent.values_mut().for_each(|sent| sent.of_round = false);
        let misfit = self.service.params.misfit;
        let fits = |slot: &Slot| misfit != Some(*slot);
        let mut producers: Vec<Slot> = (0..self.params.prefills).filter(fits).collect();
        let consumers: Vec<Slot> = (self.params.prefills..self.params.hosts()).filter(fits).collect();
        let mut items: Vec<Item> = (0..self.service.params.items.len()).collect();
        self.rng.shuffle(&mut producers);
        self.rng.shuffle(&mut items);
        let most = if self.rng.chance(500) { 2 } else { 1 };
        let saved: Vec<(Slot, Item)> = producers.into_iter().zip(items).take(most).collect();
        // Hosts that are stopped serve nobody.
        let living = self.lives.iter().filter(|life| life.alive);
        let resumed = living.map(|life| life.paused_until).max().unwrap_or(0).saturating_sub(self.now) + MS;
        for &(slot, item) in &saved {
            self.act_in(resumed, EcAct::Save { slot, item, must: true });
            for &consumer in &consumers {
                // Under a lease that is about as long as a frame's way nobody can read.
                let short = self.service.params.lease < Duration::from_millis(50);
                let mode = if short { TransferMode::Push } else { self.rng.pick(self.service.params.modes) };
                let sessions = 1 + self.rng.index(4);
                let (blocks, budget) = (self.service.params.items[item], Some(EcWorld::PATIENCE));
                let wish = Wish { item, blocks, source: slot, sessions, mode, budget, must: true };
                let at = resumed + 1 + self.rng.below(40 * MS);
                self.act_in(at, EcAct::Want { slot: consumer, wish });
            }
        }
        self.service.round = Some(Round { saved });
        true
    }

    /// At rest: every session of the round has its entry, and of the requests that were not refused there is
    /// one for each consumer and entry.
    pub(super) fn round_is_served(&self) -> Result<(), Violation> {
        let Some(round) = &self.service.round else { return Ok(()) };
        let ledger = &self.service.ledger;
        let unserved = ledger.sessions.iter().find(|(_, known)| known.must && known.state != EcPoll::Ready);
        if let Some((id, session)) = unserved {
            return broken("requests_are_served", format!("session {id:?} has no entry: {session:?}"));
        }
        // A try that ends before its transfer is repeated.
        let patient = self.service.params.try_limit >= Duration::from_secs(1);
        for (_, item) in round.saved.iter().filter(|_| patient) {
            for life in (0..self.hosts.len()).filter(|life| self.lives[*life].alive) {
                let requests = ledger.sent.iter().filter(|((consumer, ..), sent)| {
                    (*consumer, sent.item) == (life, *item) && sent.of_round && sent.served && !sent.failed
                });
                let requests = requests.count();
                if requests > 1 {
                    let what = format!("life {life} was given image {item} {requests} times: {round:?}");
                    return broken("one_transfer_for_an_entry", what);
                }
            }
        }
        Ok(())
    }

    /// A healed world has not done what it must.
    pub(super) fn unserved(&mut self, what: String) {
        self.violation.get_or_insert(Violation { invariant: "requests_are_served", what });
    }
}
