//! Hosts that drain: they take no new requests, leave their bootstrap server when they await no peer any more,
//! and are replaced by a new life once they are empty.

use crate::clock::MS;
use crate::net::calendar::{Event, Strike};
use crate::net::lives::{LifeId, Slot};
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;

/// What still ties a machine that drains to its peers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ties {
    /// Peers may still look for the host at its bootstrap server.
    pub awaits_peers: bool,
    /// Something is under way that belongs to no session of the host.
    pub is_busy: bool,
    /// Peers have yet to hear, or to acknowledge, how sessions have ended.
    pub owes_answers: bool,
}

impl<S: Service> World<S> {
    /// The scheduler of a host tells the host to drain.
    pub(crate) fn drain(&mut self, slot: Slot) {
        let Some(life) = self.slots[slot] else { return };
        let record = &mut self.lives[life];
        if record.shut_down || record.draining.is_some() {
            return;
        }
        record.draining = Some(self.now);
        self.counters.drains += 1;
        S::drain(self, life);
    }

    /// Takes note of how far a host that drains has come, after a step of its machine.
    pub(crate) fn note_drain(&mut self, life: LifeId, gauges: &S::Gauges) {
        let record = &self.lives[life];
        if record.draining.is_none() || record.shut_down || !record.alive {
            return;
        }
        let Ties { awaits_peers, is_busy, owes_answers } = S::ties(gauges);
        if record.left.is_none() && (!awaits_peers || self.planted == Some(Planted::LeavesAwaited)) {
            self.lives[life].left = Some(self.now);
            let names = self.planted == Some(Planted::NamedAfterLeaving);
            let found_no_more = self.servers.leave(life, names);
            for life in found_no_more {
                self.lives[life].withdrawn.get_or_insert(self.now);
            }
            S::left(self, life);
        }
        let record = &self.lives[life];
        let (planted, conns) = (self.planted, &self.hosts[life].conns);
        let is_forgotten = planted == Some(Planted::StopsInDebt)
            || planted == Some(Planted::NotOwedWhileLost) && conns.values().any(|conn| conn.dead);
        let owes = owes_answers && !is_forgotten;
        let is_busy = is_busy && self.planted != Some(Planted::EmptyWhileItServes);
        let busy = is_busy || owes || record.open_sessions > 0 || record.holds_out > 0;
        let done = record.left.is_some() && !busy;
        if done && record.emptied.is_none() {
            self.lives[life].emptied = Some(self.now);
            self.counters.drained += 1;
            self.trace.note(self.now, || format!("  life {life} is empty"));
            let stops = self.now + self.rng.tail(MS, 50 * MS);
            self.calendar.enter(stops, Event::Strike(Strike::Replace { life }));
        }
    }

    /// The scheduler of a host that is empty stops the host and starts it anew: at once in a healed world, and
    /// where hosts do not fail only after the faults.
    pub(crate) fn replace(&mut self, life: LifeId) {
        let slot = self.hosts[life].slot;
        if self.slots[slot] != Some(life) {
            return;
        }
        self.crash(slot);
        if self.healed.is_some() {
            self.counters.restarts += 1;
            S::boot(self, slot);
            self.replaced = Some(self.now);
        } else if !S::spares_hosts(self) {
            let down_for = self.rng.tail(5 * MS, 100 * MS);
            self.calendar.enter(self.now + down_for, Event::Strike(Strike::Boot { slot }));
        }
    }

    /// True while a host drains that lives.
    pub(crate) fn is_any_draining(&self) -> bool {
        self.lives.iter().any(|life| life.alive && life.draining.is_some())
    }
}
