//! A simulated world in which nothing is drawn at random: frames, data operations and timers wait until a search
//! chooses what happens next.

use kv_core::{PeerId, TransportError};

use bytes::Bytes;

use crate::net::calendar::{Event, Report, Strike};
use crate::net::flight::{Flight, Piece, WayId};
use crate::net::lives::{LifeId, Slot};
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;
use crate::violation::Violation;

/// A frame in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Letter {
    pub(super) from: LifeId,
    pub(super) to: LifeId,
    pub(super) bytes: Bytes,
}

/// A proof of death that a transport has not given yet: to which host, and about which of its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Proof {
    pub(super) life: LifeId,
    pub(super) peer: PeerId,
    way: WayId,
}

/// A world of a service, and what in it waits to be chosen.
pub(super) struct Stage<S: Service> {
    pub(super) world: World<S>,
    /// Frames in flight, the oldest first.
    pub(super) wire: Vec<Letter>,
    pub(super) proofs: Vec<Proof>,
    /// The latest life of each slot.
    pub(super) lives: Vec<LifeId>,
    /// Most frames in flight; beyond, the oldest is lost.
    pub(super) frames: usize,
}

impl<S: Service> Clone for Stage<S>
where
    World<S>: Clone,
{
    fn clone(&self) -> Stage<S> {
        Stage {
            world: self.world.clone(),
            wire: self.wire.clone(),
            proofs: self.proofs.clone(),
            lives: self.lives.clone(),
            frames: self.frames,
        }
    }
}

impl<S: Service> Stage<S> {
    /// The stage of a world without hosts.
    pub(super) fn new(world: World<S>, frames: usize) -> Stage<S> {
        Stage { world, wire: Vec::new(), proofs: Vec::new(), lives: Vec::new(), frames }
    }

    /// Carries out at once what the simulated world has planned, except for the events that the search
    /// chooses: frames, data operations and proofs of death go to their lists. The times that the simulated
    /// world has drawn for its events do not count.
    pub(super) fn settle(&mut self) -> Result<(), Violation> {
        while let Some((_, event)) = self.world.calendar.next() {
            match event {
                Event::Frame { from, to, bytes, .. } => {
                    self.wire.push(Letter { from, to, bytes });
                    if self.wire.len() > self.frames {
                        self.wire.remove(0);
                    }
                }
                // A connection that was opened to the dead leads nowhere, and nobody notices.
                Event::Report { report: Report::PeerGone { .. }, .. } => {}
                Event::Report { life, report } => self.world.report(life, report),
                Event::Strike(strike @ Strike::Publish { .. }) => self.world.strike(strike),
                _ => {}
            }
        }
        self.world.violation.clone().map_or(Ok(()), Err)
    }

    /// Delivers a frame. A frame for an earlier life of a host is delivered to the present one.
    pub(super) fn deliver(&mut self, letter: Letter) -> Result<(), Violation> {
        let Letter { from, to, bytes } = letter;
        if let Some(at) = self.world.slots[self.world.hosts[to].slot] {
            self.world.arrive((from, to), (at, 0), bytes);
        }
        self.settle()
    }

    /// The frames that may be delivered next, by their places on the wire. Twins lead to the same state.
    pub(super) fn letters(&self) -> impl Iterator<Item = usize> {
        let letters = self.wire.iter().enumerate();
        let next = letters.filter(|(place, letter)| {
            self.is_alive(self.world.hosts[letter.to].slot) && !self.wire[..*place].contains(letter)
        });
        next.map(|(place, _)| place)
    }

    /// The hosts whose next timer may ring.
    pub(super) fn timers(&self) -> impl Iterator<Item = Slot> {
        let set = |slot: &Slot| self.is_alive(*slot) && self.world.hosts[self.lives[*slot]].timer.is_some();
        (0..self.lives.len()).filter(set)
    }

    /// The host whose timer is due first.
    pub(super) fn first_timer(&self) -> Option<Slot> {
        let due = |slot: Slot| {
            let life = self.lives[slot];
            let timer = self.world.hosts[life].timer?;
            Some((self.world.lives[life].clock.global(timer), slot))
        };
        self.timers().filter_map(due).min().map(|(_, slot)| slot)
    }

    /// The next timer of a host rings.
    pub(super) fn ring(&mut self, slot: Slot) -> Result<(), Violation> {
        let life = self.lives[slot];
        let timer = self.world.hosts[life].timer;
        let Some(due) = timer else { return Ok(()) };
        self.world.now = self.world.now.max(self.world.lives[life].clock.global(due));
        self.world.due(life);
        if S::is_deaf(&self.world, life) {
            self.world.hosts[life].timer = timer;
        }
        self.settle()
    }

    /// The reads that have not ended, with their numbers.
    pub(super) fn reads(&self) -> impl Iterator<Item = (usize, &Flight)> {
        let flights = self.world.flights.iter().enumerate();
        flights.filter(|(_, read)| !read.over && self.world.lives[read.life].alive)
    }

    /// True if the memory that a read is of is still there.
    pub(super) fn can_copy(&self, read: &Flight) -> bool {
        self.world.planted == Some(Planted::ReadsSuccessor) || self.world.lives[read.target].alive
    }

    /// Copies the bytes of a read into the reader's pages, and returns the pieces that were copied.
    pub(super) fn copy(&mut self, read: usize) -> Vec<Piece> {
        let pieces = self.world.flights[read].pieces.clone();
        self.world.move_pieces(read, pieces.len());
        pieces
    }

    /// Ends a read, with success or an error.
    pub(super) fn end(&mut self, read: usize, result: Result<(), TransportError>) {
        self.world.flights[read].outcome = Some(result);
        self.world.land(read);
    }

    /// Ends the life of a host. Every host that had a connection to it will be given a proof of its death.
    pub(super) fn crash(&mut self, slot: Slot) {
        self.world.crash(slot);
        while let Some((_, event)) = self.world.calendar.next() {
            if let Event::Report { life, report: Report::PeerGone { peer, way } } = event {
                self.proofs.push(Proof { life, peer, way });
            }
        }
    }

    /// Ends the life of a host for good.
    pub(super) fn die(&mut self, slot: Slot) -> Result<(), Violation> {
        let life = self.lives[slot];
        self.crash(slot);
        self.wire.retain(|letter| letter.to != life);
        self.proofs.retain(|proof| proof.life != life);
        self.settle()
    }

    /// A transport reports as proven that a dead life of a host is gone.
    pub(super) fn prove(&mut self, proof: usize) -> Result<(), Violation> {
        let Proof { life, peer, way } = self.proofs.remove(proof);
        // What the host says at that moment may still arrive.
        if self.world.hosts[life].conns.get(&peer).is_some_and(|conn| conn.way == way) {
            self.world.peer_gone(life, peer);
        }
        self.settle()
    }

    pub(super) fn is_alive(&self, slot: Slot) -> bool {
        self.world.slots[slot].is_some()
    }
}
