//! A small world of the KV cache: one sender, and the readers of its lease.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use kv_core::proto::{Command, Input, Node};
use kv_core::wire::{Body, Delivery, Frame, Register};
use kv_core::{Lease, LeaseRef, PageList, Room, SessionId, SessionOptions, TransferMode};

use super::choice::Choice;
use super::scope::{LEASE, PAGE, Scope};
use super::search::Histories;
use super::stage::{Letter, Stage};
use crate::clock::Clock;
use crate::kv::boot::memory_of;
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::request::{Plan, Request};
use crate::kv::service::Kv;
use crate::net::Memory as _;
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Slot};
use crate::net::world::World;
use crate::planted::Planted;
use crate::violation::Violation;

/// The slot of the prefill host; decode hosts have the slots from 1 on.
pub(super) const P: Slot = 0;
const ROOM: Room = Room::Number(7);

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
    pub(super) stage: Stage<Kv>,
    pub(super) left: Left,
    /// True if the pages of the sender's present life are complete.
    pub(super) sent: bool,
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
            stage: Stage::new(world, scope.frames),
            left: Left { duplicates, aborts, failures, restarts, deaths },
            sent: false,
            legs: Vec::new(),
            landed: BTreeMap::new(),
        };
        small.stage.world.service.requests.push(Request::number(7));
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
            while let Some(at) = small.stage.wire.iter().position(|letter| !acquires(letter)) {
                let letter = small.stage.wire.remove(at);
                small.stage.deliver(letter)?;
            }
        }
        if scope.reading {
            small.apply(Choice::Send)?;
            while !small.stage.wire.is_empty() {
                small.apply(Choice::Deliver { letter: 0, again: false })?;
            }
            for slot in 1..=scope.decodes {
                small.apply(Choice::Init(slot))?;
            }
        }
        Ok(small)
    }

    fn begin_life(&mut self, slot: Slot, life: u64) {
        let memory = memory_of(&self.stage.world.service.params, slot, 0);
        let clock = Clock::new(0, 0, if slot == P { 1_000_000 } else { self.scope.drift.rate_ppm() });
        self.stage.lives.truncate(if self.stage.lives.len() > slot { usize::MAX } else { slot });
        let number = self.stage.world.hosts.len();
        match self.stage.lives.get_mut(slot) {
            Some(last) => *last = number,
            None => self.stage.lives.push(number),
        }
        self.stage.world.begin_kv_life(slot, memory, 1 + slot as u64 * 100 + life, clock);
    }

    /// The scheduler of a host opens its half of the request.
    fn open(&mut self, slot: Slot) -> Result<(), Violation> {
        let leg = self.stage.world.service.ledger.legs.len();
        let side = if slot == P { Side::Sender } else { Side::Receiver };
        let lease = if self.scope.fixed { Lease::Fixed } else { Lease::Renewable };
        self.stage.world.service.ledger.legs.push(Leg {
            servers: vec![P],
            num_pages: self.scope.pages as usize,
            pulls: true,
            receivers: self.scope.readers,
            key: 100 + leg as u64,
            lease: (slot == P).then_some(lease(LEASE)),
            ..Leg::unopened(0, (side, slot), ROOM)
        });
        self.stage.world.service.plans.push(Plan::default());
        match self.legs.get_mut(slot) {
            Some(last) => *last = leg,
            None => self.legs.push(leg),
        }
        let session = self.stage.world.begin_session(leg, self.stage.lives[slot]);
        let long = self.stage.world.planted == Some(Planted::LongLease);
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
        self.stage.world.service.ledger.legs[self.legs[slot]].inited_at = Some(self.stage.world.now);
        let num_pages = self.scope.pages as usize;
        self.command(slot, Command::InitSender { session, num_pages, aux: None })
    }

    fn open_receiver(
        &mut self,
        slot: Slot,
        session: SessionId,
        options: SessionOptions,
    ) -> Result<(), Violation> {
        let sender = &self.stage.world.service.ledger.legs[self.legs[P]];
        let incarnation = self.stage.world.hosts[self.stage.lives[P]].incarnation;
        let lease_ref = LeaseRef::new(incarnation, sender.session);
        let lease_refs = vec![match PageList::from_pages(self.pages()) {
            Ok(pages) => lease_ref.of_pages(pages),
            Err(_) => lease_ref,
        }];
        let lease_refs = if self.scope.by_room { Vec::new() } else { lease_refs };
        self.stage.world.note_references(self.legs[slot], &lease_refs);
        let options = Box::new(options.with(|options| options.lease_refs = lease_refs));
        let bootstrap_addr = self.stage.world.service.params.addr(P);
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
        let (leg, life) = (self.legs[P], self.stage.lives[P]);
        let pages: Vec<u32> = self.pages().collect();
        self.stage.world.service.stock[life].free_pages.retain(|page| !pages.contains(page));
        self.stage.world.fill(leg, life, &pages, true);
        self.stage.world.cover_complete(leg);
        let session = self.stage.world.service.ledger.legs[leg].session;
        let Some(chunk) = self.stage.world.give_final(leg, life, &pages) else { return Ok(()) };
        self.command(P, Command::Send { session, chunk })
    }

    /// The scheduler of a decode host gives the pages to read into.
    pub(super) fn init_receiver(&mut self, slot: Slot) -> Result<(), Violation> {
        let (leg, life) = (self.legs[slot], self.stage.lives[slot]);
        let pages: Vec<u32> = self.pages().collect();
        self.stage.world.service.stock[life].free_pages.retain(|page| !pages.contains(page));
        self.stage.world.service.ledger.legs[leg].inited_at = Some(self.stage.world.now);
        let session = self.stage.world.service.ledger.legs[leg].session;
        let Some(pages) = self.stage.world.give(leg, life, &pages) else { return Ok(()) };
        self.command(slot, Command::InitReceiver { session, pages, aux: None })
    }

    fn command(&mut self, slot: Slot, command: Command) -> Result<(), Violation> {
        self.stage.world.feed(self.stage.lives[slot], "command", Input::Command(command));
        self.stage.settle()
    }

    /// Copies the bytes of a read into the reader's pages.
    pub(super) fn copy(&mut self, read: usize) -> Result<(), Violation> {
        let life = self.stage.world.flights[read].life;
        for piece in self.stage.copy(read) {
            let bytes =
                self.stage.world.memories[life].piece(piece.local_region, piece.local_offset, piece.len);
            self.landed.insert((life, piece.local_offset), digest(&bytes));
        }
        self.stage.settle()
    }

    /// Ends a read, with success or an error. With a certain planted bug, the host takes all of its reads to
    /// have ended.
    pub(super) fn end(
        &mut self,
        read: usize,
        result: Result<(), kv_core::TransportError>,
    ) -> Result<(), Violation> {
        let mut ending = vec![read];
        if self.stage.world.planted == Some(Planted::FirstReadEnds) && result.is_ok() {
            let host = self.stage.world.flights[read].life;
            ending.extend(
                self.stage.reads().filter(|&(other, it)| it.life == host && other != read).map(|(it, _)| it),
            );
        }
        for read in ending {
            self.stage.end(read, result.clone());
        }
        self.stage.settle()
    }

    pub(super) fn abort(&mut self, slot: Slot) -> Result<(), Violation> {
        self.stage.world.abort(self.legs[slot], self.stage.lives[slot]);
        self.stage.settle()
    }

    /// The prefill host comes back with other pages for the same room and session number.
    pub(super) fn restart(&mut self) -> Result<(), Violation> {
        self.stage.crash(P);
        self.begin_life(P, 1);
        self.stage.settle()?;
        self.open(P)?;
        self.send_pages()
    }

    /// True if the session of a host goes on.
    pub(super) fn is_open(&self, slot: Slot) -> bool {
        self.stage.is_alive(slot) && self.stage.world.service.ledger.legs[self.legs[slot]].is_open()
    }

    /// True if the scheduler of a decode host has given its pages.
    pub(super) fn is_init(&self, slot: Slot) -> bool {
        self.stage.world.service.ledger.legs[self.legs[slot]].inited_at.is_some()
    }

    /// A hash of the whole state: two worlds with the same number have the same future.
    pub(super) fn state(&self) -> u64 {
        let mut state = DefaultHasher::new();
        let world = &self.stage.world;
        (world.now, self.left, self.sent, &self.stage.proofs, &self.landed).hash(&mut state);
        for (slot, &life) in self.stage.lives.iter().enumerate() {
            let host = &world.hosts[life];
            (life, self.stage.is_alive(slot), fingerprint(&host.engine)).hash(&mut state);
            host.conns.iter().for_each(|(peer, conn)| (peer, conn.target).hash(&mut state));
        }
        let pages = u64::from(self.scope.pages * 2);
        world.memories[self.stage.lives[P]].piece(0, 0, pages * PAGE).hash(&mut state);
        for (_, read) in self.stage.reads() {
            (read.life, read.post, read.target, read.moved).hash(&mut state);
        }
        for (leg, plan) in world.service.ledger.legs.iter().zip(&world.service.plans) {
            // What the dead have promised is of no consequence.
            let promised = leg.leased_until.filter(|_| leg.life.is_some_and(|life| world.lives[life].alive));
            (leg.poll as u8, leg.inited_at.is_some(), plan.given, leg.holds.len(), promised).hash(&mut state);
        }
        // In which order frames were sent does not matter.
        self.stage
            .wire
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
