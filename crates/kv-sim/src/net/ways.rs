//! How transports open ways, permit writes on them, and revoke the right to write.

use std::time::Duration;

use kv_core::{PeerId, Time, WriteFence};

use crate::clock::{MS, US};
use crate::net::calendar::{Event, Report};
use crate::net::flight::WayId;
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Road};
use crate::net::service::Service;
use crate::net::way::{Revoking, Way, fence_between};
use crate::net::world::World;
use crate::planted::Planted;

impl<S: Service> World<S> {
    /// Opens the way on which a life may write into the memory of another over a connection.
    pub(crate) fn open_way(&mut self, writer: LifeId, target: LifeId, road: Road) -> WayId {
        let ends = (writer, target, road);
        let fence = fence_between(self.params.seed, &self.params.ways, ends, None);
        self.ways.push(Way { writer, target, road, fence, permit: None, revoked: false, flying: 0 });
        self.ways.len() - 1
    }

    /// The write fence that the transport of a life declares for the writes of another.
    pub(crate) fn declared_fence(&self, writer: LifeId, target: LifeId, road: Road) -> WriteFence {
        fence_between(self.params.seed, &self.params.ways, (writer, target, road), self.planted)
    }

    /// A node has been allowed to write into the memory of a peer.
    pub(crate) fn permit(&mut self, life: LifeId, peer: PeerId, until: Time) {
        let Some(conn) = self.hosts[life].conns.get(&peer) else { return };
        let way = conn.way;
        let late = match self.planted {
            Some(Planted::PermissionFromAnswer) => {
                self.lives[life].clock.local(self.now) + self.params.timing.write_permission
            }
            _ => until,
        };
        self.counters.permits += 1;
        self.trace.note(self.now, || format!("  life {life} may write to peer {peer} until {until:?}"));
        self.ways[way].permit = Some(until.max(late));
        for flight in 0..self.flights.len() {
            let known = &mut self.flights[flight];
            if known.way == way && std::mem::take(&mut known.waits) && !known.over {
                let soon = self.rng.below(100 * US);
                self.calendar.enter(self.now + soon, Event::Begin { flight });
            }
        }
    }

    /// With the planted bug, extends the permissions of a host by the time for which it was stopped.
    pub(crate) fn excuse(&mut self, life: LifeId, span: u64) {
        let span = Duration::from_nanos(span);
        for way in self.ways.iter_mut().filter(|way| way.writer == life) {
            way.permit = way.permit.map(|until| until + span);
        }
    }

    /// A node takes the right to write from a peer.
    pub(crate) fn revoke(&mut self, life: LifeId, peer: PeerId) {
        let Some(conn) = self.hosts[life].conns.get(&peer) else { return };
        let (writer, road) = (conn.target, conn.road);
        self.counters.revocations += 1;
        self.trace.note(self.now, || format!("  life {life} revokes the writes of peer {peer}"));
        for way in
            self.ways.iter_mut().filter(|way| (way.writer, way.target, way.road) == (writer, life, road))
        {
            way.revoked = true;
        }
        self.revoking.push(Revoking { life, peer, writer, road });
        self.tell_revoked();
        // A transport on its own keeps the contract to the letter: the way stays, without the right.
        if !matches!(self.hosts[writer].engine, Engine::Transport(_)) {
            self.end_ways(writer, life, road);
        }
    }

    /// Reports every revocation that is complete.
    pub(crate) fn tell_revoked(&mut self) {
        let waiting = std::mem::take(&mut self.revoking);
        for Revoking { life, peer, writer, road } in waiting {
            let marked = self.flights.iter().any(|flight| {
                (flight.life, flight.target, self.ways[flight.way].road) == (writer, life, road)
                    && flight.slice.is_some()
                    && (self.lives[writer].alive || !self.ways[flight.way].copies())
            });
            if marked && self.planted != Some(Planted::RevokedInTheSlice) {
                self.revoking.push(Revoking { life, peer, writer, road });
            } else {
                let delay = self.rng.tail(10 * US, 2 * MS);
                self.report_later(delay, life, Report::Revoked { peer });
            }
        }
    }

    /// A transport on its own has been disconnected from a peer whose right to write it has revoked.
    pub(crate) fn leave_revoked(&mut self, writer: LifeId, target: LifeId, road: Road) {
        let ends = (writer, target, road);
        if self.ways.iter().any(|way| way.revoked && (way.writer, way.target, way.road) == ends) {
            self.end_ways(writer, target, road);
        }
    }

    /// Lets the writer's transport notice, after some time, that its connection was revoked.
    fn end_ways(&mut self, writer: LifeId, target: LifeId, road: Road) {
        let conns = self.hosts[writer].conns.iter();
        let lost: Vec<PeerId> = conns
            .filter(|(_, conn)| (conn.target, conn.road) == (target, road))
            .map(|(&peer, _)| peer)
            .collect();
        for peer in lost {
            let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
            self.lose(writer, peer, detected);
        }
    }
}
