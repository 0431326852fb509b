//! The lookups of hosts, and the answers of bootstrap servers.

use kv_core::{BootstrapError, LookupId, RankQuery, RankRecord};

use crate::clock::{MS, US};
use crate::net::calendar::{Event, Report, Strike};
use crate::net::lives::{LifeId, life_of};
use crate::net::service::Service;
use crate::net::world::World;

impl<S: Service> World<S> {
    pub(crate) fn publish_later(&mut self, life: LifeId) {
        let delay = if life < self.slots.len() { 0 } else { self.rng.below(20 * MS) };
        self.calendar.enter(self.now + delay, Event::Strike(Strike::Publish { life }));
    }

    pub(crate) fn publish(&mut self, life: LifeId) {
        let host = &self.hosts[life];
        if let Some(addr) = host.published.as_deref().filter(|_| self.lives[life].alive) {
            self.servers.publish(addr, life, host.record.clone());
        }
    }

    /// Takes note that an answer reaches the life that asked.
    pub(crate) fn note_answer(&mut self, life: LifeId, ranks: &[RankRecord]) {
        for named in lives_in(ranks) {
            let key = (life, named);
            if let Some(under_way) = self.answers.get_mut(&key).filter(|count| **count > 0) {
                *under_way -= 1;
                self.named.insert(key, self.now);
            }
        }
    }

    pub(crate) fn lookup(&mut self, life: LifeId, lookup: LookupId, addr: &str, query: &RankQuery) {
        self.counters.lookups += 1;
        let params = self.params.lookup.clone();
        let healthy = self.healed.is_some();
        let delay = if healthy { params.delay } else { self.rng.tail(params.delay, params.delay_max) };
        let mut delay = delay + US;
        if !healthy && self.rng.chance(params.fail) {
            self.counters.lookup_failures += 1;
            let error = BootstrapError::TimedOut;
            return self.report_later(delay, life, Report::LookupFailed { lookup, error });
        }
        let answer = self.servers.lookup(self.now, addr, query);
        if !healthy && self.rng.chance(params.stale) {
            // The answer is of now, but takes so long that it may be of a former life.
            delay += self.rng.tail(20 * MS, 300 * MS);
        }
        let report = match answer {
            Ok(ranks) => {
                // No server names a host that it does not name any more: such an answer excuses nobody.
                for named in lives_in(&ranks).filter(|&named| self.lives[named].withdrawn.is_none()) {
                    *self.answers.entry((life, named)).or_default() += 1;
                }
                let dead = |rank: &RankRecord| {
                    let life = rank.transports.first().and_then(|way| life_of(&way.metadata));
                    life.is_some_and(|life| !self.lives[life].alive)
                };
                self.counters.lookup_stale += u64::from(ranks.iter().any(dead));
                Report::Found { lookup, ranks }
            }
            Err(error) => {
                self.counters.lookup_failures += 1;
                Report::LookupFailed { lookup, error }
            }
        };
        self.report_later(delay, life, report);
    }
}

/// The lives that an answer names.
fn lives_in(ranks: &[RankRecord]) -> impl Iterator<Item = LifeId> {
    ranks.iter().filter_map(|rank| life_of(&rank.transports.first()?.metadata))
}
