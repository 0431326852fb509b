//! Ways by which one life writes into the memory of another, each as the transports at its two ends know
//! it: what ends its writes, until when they are allowed, whether they were revoked.

use std::time::Duration;

use kv_core::{PeerId, Time, WriteFence};

use crate::calendar::{Event, Report};
use crate::clock::{MS, US};
use crate::flight::Flight;
use crate::ledger::{Ledger, LifeId};
use crate::planted::Planted;
use crate::rng::mix;
use crate::world::World;

/// Number of a way in its world.
pub type WayId = usize;

/// One connection of one life to another, for as long as its writes can matter.
#[derive(Debug, Clone)]
pub struct Way {
    /// Who writes.
    pub writer: LifeId,
    /// Into whose memory.
    pub target: LifeId,
    /// What ends its writes.
    pub fence: WriteFence,
    /// Until when writes are allowed, on the writer's clock.
    pub permit: Option<Time>,
    /// The target has taken back the right to write.
    pub revoked: bool,
    /// Posts that have not ended.
    pub flying: usize,
}

/// What a transport was asked to say as soon as it is true.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Revoking {
    life: LifeId,
    peer: PeerId,
    writer: LifeId,
}

/// How ways end their writes, and for how long one slice of a write may be under way.
#[derive(Debug, Clone)]
pub struct WayParams {
    /// How often a way is of each kind: at death, revocable, within a bound; in tenths.
    pub kinds: [u64; 3],
    /// The bound of the last kind.
    pub bound: u64,
    /// Slices that take long, in permille.
    pub long: u32,
    /// The longest slice where a processor copies.
    pub slice_max: u64,
    /// Deaths that a transport of the last kind cannot prove, in permille.
    pub unproven: u32,
    /// Posts that do not end before the world is healed, in permille.
    pub stuck: u32,
    /// How long a way that was lost may be refused.
    pub refused_max: u64,
}

impl Way {
    /// True if a slice may begin.
    pub fn is_open(&self, ledger: &Ledger, now: u64) -> bool {
        let writer = &ledger.lives[self.writer];
        writer.alive && !self.revoked && self.permit.is_some_and(|until| writer.clock.local(now) < until)
    }

    /// True if the writer's own processor copies, so that its writes stop where it is stopped.
    pub fn copies(&self) -> bool {
        !matches!(self.fence, WriteFence::Within(_))
    }
}

/// True if a write may still reach the memory of its target, as things are now.
pub(crate) fn may_write(flight: &Flight, way: &Way, ledger: &Ledger, now: u64) -> bool {
    let lives = ledger.lives[flight.life].alive || !way.copies();
    !flight.over && (flight.slice.is_some() && lives || !flight.stuck && way.is_open(ledger, now))
}

/// What ends the writes of one life into the memory of another.
pub(crate) fn fence_between(
    seed: u64,
    ways: &WayParams,
    writer: LifeId,
    target: LifeId,
    planted: Option<Planted>,
) -> WriteFence {
    let drawn = mix(seed ^ mix((writer as u64) << 32 | target as u64)) % 10;
    let short = if planted == Some(Planted::BoundTooShort) { 8 } else { 1 };
    if drawn < ways.kinds[0] {
        WriteFence::AtDeath
    } else if drawn < ways.kinds[0] + ways.kinds[1] {
        WriteFence::Revocable
    } else {
        WriteFence::Within(Duration::from_nanos(ways.bound / short))
    }
}

impl World {
    /// The way on which a life may write into the memory of another through a connection.
    pub(crate) fn open_way(&mut self, writer: LifeId, target: LifeId) -> WayId {
        let fence = self.fence_of(writer, target);
        self.ways.push(Way { writer, target, fence, permit: None, revoked: false, flying: 0 });
        self.ways.len() - 1
    }

    /// What ends the writes of one life into the memory of another.
    pub(crate) fn fence_of(&self, writer: LifeId, target: LifeId) -> WriteFence {
        fence_between(self.params.seed, &self.params.ways, writer, target, None)
    }

    /// What the transport of a life says that ends the writes of another.
    pub(crate) fn declared_fence(&self, writer: LifeId, target: LifeId) -> WriteFence {
        fence_between(self.params.seed, &self.params.ways, writer, target, self.planted)
    }

    /// A node has been allowed to write into the memory of a peer.
    pub(crate) fn permit(&mut self, life: LifeId, peer: PeerId, until: Time) {
        let Some(conn) = self.hosts[life].conns.get(&peer) else { return };
        let way = conn.way;
        let late = match self.planted {
            Some(Planted::PermissionFromAnswer) => {
                self.ledger.lives[life].clock.local(self.now) + self.params.timing.write_permission
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

    /// As if a permission did not count while its holder was stopped.
    pub(crate) fn excuse(&mut self, life: LifeId, span: u64) {
        let span = Duration::from_nanos(span);
        for way in self.ways.iter_mut().filter(|way| way.writer == life) {
            way.permit = way.permit.map(|until| until + span);
        }
    }

    /// A node takes the right to write from a peer.
    pub(crate) fn revoke(&mut self, life: LifeId, peer: PeerId) {
        let Some(conn) = self.hosts[life].conns.get(&peer) else { return };
        let writer = conn.target;
        self.counters.revocations += 1;
        self.trace.note(self.now, || format!("  life {life} revokes the writes of peer {peer}"));
        for way in self.ways.iter_mut().filter(|way| (way.writer, way.target) == (writer, life)) {
            way.revoked = true;
        }
        self.revoking.push(Revoking { life, peer, writer });
        self.tell_revoked();
        self.end_revoked_ways(writer, life);
    }

    /// Says of every revocation that is complete that it is.
    pub(crate) fn tell_revoked(&mut self) {
        let waiting = std::mem::take(&mut self.revoking);
        for Revoking { life, peer, writer } in waiting {
            let marked = self.flights.iter().any(|flight| {
                (flight.life, flight.target) == (writer, life)
                    && flight.slice.is_some()
                    && (self.ledger.lives[writer].alive || !self.ways[flight.way].copies())
            });
            if marked && self.planted != Some(Planted::RevokedInTheSlice) {
                self.revoking.push(Revoking { life, peer, writer });
            } else {
                let delay = self.rng.tail(10 * US, 2 * MS);
                self.report_later(delay, life, Report::Revoked { peer });
            }
        }
    }

    /// The writer's transport notices at some time that its connection is worth nothing any more.
    fn end_revoked_ways(&mut self, writer: LifeId, target: LifeId) {
        let conns = self.hosts[writer].conns.iter();
        let lost: Vec<PeerId> =
            conns.filter(|(_, conn)| conn.target == target).map(|(&peer, _)| peer).collect();
        // A plane on its own keeps the contract to the letter: the way stays, without the right.
        let ends = !matches!(self.hosts[writer].engine, crate::host::Engine::Plane(_));
        for peer in lost.into_iter().filter(|_| ends) {
            let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
            self.lose(writer, peer, detected);
        }
    }
}
