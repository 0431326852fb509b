//! A simulated world in which nothing is drawn at random: frames, reads and timers wait until the search
//! chooses what happens next.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node};
use kv_core::wire::{Body, Delivery, Frame, Register};
use kv_core::{Lease, LeaseRef, PageList, PeerId, Room, SessionId, SessionOptions, TransferMode};

use super::choice::Choice;
use super::scope::{LEASE, PAGE, Scope};
use crate::clock::Clock;
use crate::kv::boot::memory_of;
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::request::{Plan, Request};
use crate::kv::service::KvWorld;
use crate::net::Memory as _;
use crate::net::calendar::{Event, Report, Strike};
use crate::net::flight::{Flight, WayId};
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Slot};
use crate::net::world::World;
use crate::planted::Planted;
use crate::violation::Violation;

/// The slot of the prefill host; decode hosts have the slots from 1 on.
pub(super) const P: Slot = 0;
const ROOM: Room = Room::Number(7);

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

/// How many faults of each kind may still happen in the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Left {
    pub(super) duplicates: u8,
    pub(super) aborts: u8,
    pub(super) failures: u8,
    pub(super) restarts: u8,
    pub(super) deaths: u8,
}

/// The whole state of a small world at one moment.
#[derive(Clone)]
pub(super) struct Small {
    pub(super) scope: Scope,
    pub(super) world: KvWorld,
    /// Frames in flight, the oldest first.
    pub(super) wire: Vec<Letter>,
    pub(super) proofs: Vec<Proof>,
    pub(super) left: Left,
    /// True if the pages of the sender's present life are complete.
    pub(super) sent: bool,
    /// The latest life of each slot.
    pub(super) lives: Vec<LifeId>,
    /// The half of the request on each slot, in the slot's latest life.
    pub(super) legs: Vec<LegId>,
    /// A hash of the bytes that reads have put into each page, by life and offset.
    landed: BTreeMap<(LifeId, u64), u64>,
}

impl Small {
    /// The world at the moment at which every receiver has met the sender's host and has sent the message
    /// that acquires the lease.
    pub(super) fn new(scope: Scope, planted: Option<Planted>) -> Result<Small, Violation> {
        let Scope { duplicates, aborts, failures, restarts, deaths, .. } = scope;
        let mut world = World::still(scope.params(), planted);
        world.now = 1_000_000_000;
        let mut small = Small {
            scope,
            world,
            wire: Vec::new(),
            proofs: Vec::new(),
            left: Left { duplicates, aborts, failures, restarts, deaths },
            sent: false,
            lives: Vec::new(),
            legs: Vec::new(),
            landed: BTreeMap::new(),
        };
        small.world.service.requests.push(Request::number(7));
        for slot in 0..=scope.decodes {
            small.begin_life(slot, 0);
        }
        small.open(P)?;
        for slot in 1..=scope.decodes {
            small.open(slot)?;
            let acquires = |letter: &Letter| {
                let acquires = |frame: Frame| {
                    matches!(frame.body, Body::Register(Register { delivery: Delivery::Read(_), .. }))
                };
                Frame::decode(&letter.bytes).is_ok_and(acquires)
            };
            while let Some(at) = small.wire.iter().position(|letter| !acquires(letter)) {
                let letter = small.wire.remove(at);
                small.deliver(letter)?;
            }
        }
        if scope.reading {
            small.apply(Choice::Send)?;
            while !small.wire.is_empty() {
                small.apply(Choice::Deliver { letter: 0, again: false })?;
            }
            for slot in 1..=scope.decodes {
                small.apply(Choice::Init(slot))?;
            }
        }
        Ok(small)
    }

    fn begin_life(&mut self, slot: Slot, life: u64) {
        let memory = memory_of(&self.world.service.params, slot, 0);
        let clock = Clock::new(0, 0, if slot == P { 1_000_000 } else { self.scope.drift.rate_ppm() });
        self.lives.truncate(if self.lives.len() > slot { usize::MAX } else { slot });
        let number = self.world.hosts.len();
        match self.lives.get_mut(slot) {
            Some(last) => *last = number,
            None => self.lives.push(number),
        }
        self.world.begin_kv_life(slot, memory, 1 + slot as u64 * 100 + life, clock);
    }

    /// The scheduler of a host opens its half of the request.
    fn open(&mut self, slot: Slot) -> Result<(), Violation> {
        let leg = self.world.service.ledger.legs.len();
        let side = if slot == P { Side::Sender } else { Side::Receiver };
        let lease = if self.scope.fixed { Lease::Fixed } else { Lease::Renewable };
        self.world.service.ledger.legs.push(Leg {
            servers: vec![P],
            num_pages: self.scope.pages as usize,
            pulls: true,
            receivers: self.scope.readers,
            key: 100 + leg as u64,
            lease: (slot == P).then_some(lease(LEASE)),
            ..Leg::unopened(0, (side, slot), ROOM)
        });
        self.world.service.plans.push(Plan::default());
        match self.legs.get_mut(slot) {
            Some(last) => *last = leg,
            None => self.legs.push(leg),
        }
        let session = self.world.begin_session(leg, self.lives[slot]);
        let long = self.world.planted == Some(Planted::LongLease);
        let lease = Some(lease(if long { LEASE * 2 } else { LEASE }));
        let options = SessionOptions::default().with(|options| {
            options.mode = Some(TransferMode::Pull);
            options.lease = lease;
        });
        if side == Side::Receiver {
            return self.open_receiver(slot, session, options);
        }
        let (receivers, options) = (self.scope.readers, Box::new(options));
        self.command(slot, Command::OpenSender { session, room: ROOM, receivers, options })?;
        self.world.service.ledger.legs[self.legs[slot]].inited_at = Some(self.world.now);
        let num_pages = self.scope.pages as usize;
        self.command(slot, Command::InitSender { session, num_pages, aux: None })
    }

    fn open_receiver(
        &mut self,
        slot: Slot,
        session: SessionId,
        options: SessionOptions,
    ) -> Result<(), Violation> {
        let sender = &self.world.service.ledger.legs[self.legs[P]];
        let incarnation = self.world.hosts[self.lives[P]].incarnation;
        let lease_ref = LeaseRef::new(incarnation, sender.session);
        let lease_refs = vec![match PageList::from_pages(self.pages()) {
            Ok(pages) => lease_ref.of_pages(pages),
            Err(_) => lease_ref,
        }];
        let lease_refs = if self.scope.by_room { Vec::new() } else { lease_refs };
        self.world.note_references(self.legs[slot], &lease_refs);
        let options = Box::new(options.with(|options| options.lease_refs = lease_refs));
        let bootstrap_addr = self.world.service.params.addr(P);
        self.command(slot, Command::OpenReceiver { session, room: ROOM, bootstrap_addr, options })
    }

    /// The pages of the request on either side: every other page, so that each page is a descriptor of its
    /// own.
    fn pages(&self) -> impl Iterator<Item = u32> + use<> {
        (0..self.scope.pages).map(|page| page * 2)
    }

    /// The scheduler of the prefill host gives its pages, complete.
    pub(super) fn send_pages(&mut self) -> Result<(), Violation> {
        self.sent = true;
        let (leg, life) = (self.legs[P], self.lives[P]);
        let pages: Vec<u32> = self.pages().collect();
        self.world.service.stock[life].free_pages.retain(|page| !pages.contains(page));
        self.world.fill(leg, life, &pages, true);
        self.world.cover_complete(leg);
        let session = self.world.service.ledger.legs[leg].session;
        let Some(chunk) = self.world.give_final(leg, life, &pages) else { return Ok(()) };
        self.command(P, Command::Send { session, chunk })
    }

    /// The scheduler of a decode host gives the pages to read into.
    pub(super) fn init_receiver(&mut self, slot: Slot) -> Result<(), Violation> {
        let (leg, life) = (self.legs[slot], self.lives[slot]);
        let pages: Vec<u32> = self.pages().collect();
        self.world.service.stock[life].free_pages.retain(|page| !pages.contains(page));
        self.world.service.ledger.legs[leg].inited_at = Some(self.world.now);
        let session = self.world.service.ledger.legs[leg].session;
        let Some(pages) = self.world.give(leg, life, &pages) else { return Ok(()) };
        self.command(slot, Command::InitReceiver { session, pages, aux: None })
    }

    fn command(&mut self, slot: Slot, command: Command) -> Result<(), Violation> {
        self.world.feed(self.lives[slot], "command", Input::Command(command));
        self.settle()
    }

    /// Carries out at once what the simulated world has planned, except for the events that the search
    /// chooses: frames, reads and proofs of death go to their lists. The times that the simulated world has
    /// drawn for its events do not count.
    pub(super) fn settle(&mut self) -> Result<(), Violation> {
        while let Some((_, event)) = self.world.calendar.next() {
            match event {
                Event::Frame { from, to, bytes, .. } => {
                    self.wire.push(Letter { from, to, bytes });
                    if self.wire.len() > self.scope.frames {
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

    /// The next timer of a host rings.
    pub(super) fn ring(&mut self, slot: Slot) -> Result<(), Violation> {
        let life = self.lives[slot];
        let timer = self.world.hosts[life].timer;
        let Some(due) = timer else { return Ok(()) };
        self.world.now = self.world.now.max(self.world.lives[life].clock.global(due));
        self.world.due(life);
        if self.world.is_deaf(life) {
            self.world.hosts[life].timer = timer;
        }
        self.settle()
    }

    /// The posts of reads that have not ended, with their numbers.
    pub(super) fn reads(&self) -> impl Iterator<Item = (usize, &Flight)> {
        let flights = self.world.flights.iter().enumerate();
        flights.filter(|(_, read)| !read.over && self.world.lives[read.life].alive)
    }

    /// True if the memory that a read is of is still there.
    pub(super) fn can_copy(&self, read: &Flight) -> bool {
        self.world.planted == Some(Planted::ReadsSuccessor) || self.world.lives[read.target].alive
    }

    /// Copies the bytes of a read into the reader's pages.
    pub(super) fn copy(&mut self, read: usize) -> Result<(), Violation> {
        let pieces = self.world.flights[read].pieces.clone();
        self.world.move_pieces(read, pieces.len());
        let life = self.world.flights[read].life;
        for piece in pieces {
            let bytes = self.world.memories[life].piece(piece.local_region, piece.local_offset, piece.len);
            self.landed.insert((life, piece.local_offset), digest(&bytes));
        }
        self.settle()
    }

    /// Ends a read, with success or an error. With a certain planted bug, the host takes all of its reads to
    /// have ended.
    pub(super) fn end(
        &mut self,
        read: usize,
        result: Result<(), kv_core::TransportError>,
    ) -> Result<(), Violation> {
        let mut ending = vec![read];
        if self.world.planted == Some(Planted::FirstReadEnds) && result.is_ok() {
            let host = self.world.flights[read].life;
            ending.extend(
                self.reads().filter(|&(other, it)| it.life == host && other != read).map(|(it, _)| it),
            );
        }
        for read in ending {
            self.world.flights[read].outcome = Some(result.clone());
            self.world.land(read);
        }
        self.settle()
    }

    pub(super) fn abort(&mut self, slot: Slot) -> Result<(), Violation> {
        self.world.abort(self.legs[slot], self.lives[slot]);
        self.settle()
    }

    /// Ends the life of a host. Every host that had a connection to it will be given a proof of its death.
    fn crash(&mut self, slot: Slot) {
        self.world.crash(slot);
        while let Some((_, event)) = self.world.calendar.next() {
            if let Event::Report { life, report: Report::PeerGone { peer, way } } = event {
                self.proofs.push(Proof { life, peer, way });
            }
        }
    }

    /// The prefill host comes back with other pages for the same room and session number.
    pub(super) fn restart(&mut self) -> Result<(), Violation> {
        self.crash(P);
        self.begin_life(P, 1);
        self.settle()?;
        self.open(P)?;
        self.send_pages()
    }

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

    /// True if the session of a host goes on.
    pub(super) fn is_open(&self, slot: Slot) -> bool {
        self.is_alive(slot) && self.world.service.ledger.legs[self.legs[slot]].is_open()
    }

    /// True if the scheduler of a decode host has given its pages.
    pub(super) fn is_init(&self, slot: Slot) -> bool {
        self.world.service.ledger.legs[self.legs[slot]].inited_at.is_some()
    }

    /// A hash of the whole state: two worlds with the same number have the same future.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut state = DefaultHasher::new();
        let world = &self.world;
        (world.now, self.left, self.sent, &self.proofs, &self.landed).hash(&mut state);
        for (slot, &life) in self.lives.iter().enumerate() {
            let host = &world.hosts[life];
            (life, self.is_alive(slot), fingerprint(&host.engine)).hash(&mut state);
            host.conns.iter().for_each(|(peer, conn)| (peer, conn.target).hash(&mut state));
        }
        let pages = u64::from(self.scope.pages * 2);
        world.memories[self.lives[P]].piece(0, 0, pages * PAGE).hash(&mut state);
        for (_, read) in self.reads() {
            (read.life, read.post, read.target, read.moved).hash(&mut state);
        }
        for (leg, plan) in world.service.ledger.legs.iter().zip(&world.service.plans) {
            // What the dead have promised is of no consequence.
            let promised = leg.leased_until.filter(|_| leg.life.is_some_and(|life| world.lives[life].alive));
            (leg.poll as u8, leg.inited_at.is_some(), plan.given, leg.holds.len(), promised).hash(&mut state);
        }
        // In which order frames were sent does not matter.
        self.wire
            .iter()
            .map(|letter| digest(&(letter.to, &letter.bytes)))
            .fold(0_u64, u64::wrapping_add)
            .hash(&mut state);
        if world.planted.is_some() {
            world.service.sabotage.numbers.hash(&mut state);
        }
        state.finish()
    }
}

fn digest(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// A number for the state of a node; zero if there is none.
fn fingerprint<G: Send, L>(engine: &Engine<Node, G, L>) -> u64 {
    match engine {
        Engine::Node(node) => node.fingerprint(),
        _ => 0,
    }
}
