//! How lives end, and when other hosts notice.

use crate::clock::MS;
use crate::net::calendar::{Event, Report};
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Slot};
use crate::net::service::Service;
use crate::net::world::World;

impl<S: Service> World<S> {
    pub(crate) fn crash(&mut self, slot: Slot) {
        let Some(life) = self.slots[slot].take() else { return };
        self.counters.crashes += 1;
        self.hosts[life].engine = Engine::Dead;
        let lease = self.rng.below(self.params.lookup.lease + 1);
        self.servers.expire(life, self.now + lease);
        self.die(life);
    }

    /// Ends a life, with its posts, connections and sessions.
    pub(crate) fn die(&mut self, life: LifeId) {
        let record = &mut self.lives[life];
        record.alive = false;
        self.counters.died += record.open_sessions as u64;
        record.open_sessions = 0;
        record.holds_out = 0;
        self.last_change = self.now;
        for flight in 0..self.flights.len() {
            let known = &mut self.flights[flight];
            if known.over {
                continue;
            }
            if known.life == life {
                self.counters.crash_in_flight += 1;
            } else if known.target == life {
                self.counters.crash_target += 1;
            }
        }
        for other in 0..self.hosts.len() {
            let conns: Vec<_> = self.hosts[other]
                .conns
                .iter()
                .filter(|(_, conn)| conn.target == life)
                .map(|(&peer, _)| peer)
                .collect();
            for peer in conns {
                let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
                self.lose(other, peer, detected);
            }
        }
        // Posts of connections that were forgotten end, too.
        for flight in 0..self.flights.len() {
            let known = &self.flights[flight];
            if !known.over && known.target == life && known.outcome.is_none() {
                let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
                self.doom(flight, detected);
            }
        }
        self.tell_revoked();
    }

    /// Makes a connection dead. The transport of the life notices at the moment `detected`.
    pub(crate) fn lose(&mut self, life: LifeId, peer: kv_core::PeerId, detected: u64) {
        let Some(conn) = self.hosts[life].conns.get_mut(&peer) else { return };
        if conn.gone_at.is_some() || conn.dead {
            return;
        }
        conn.gone_at = Some(detected);
        let way = conn.way;
        self.calendar.enter(detected, Event::Report { life, report: Report::PeerGone { peer, way } });
        for flight in 0..self.flights.len() {
            let known = &self.flights[flight];
            if !known.over && known.way == way {
                self.doom(flight, detected);
            }
        }
    }
}
