//! What has been seen from outside: sessions, their states, and who holds which pages.

use std::ops::Range;

use kv_core::{KvPoll, Lease, PeerCause, Room, SessionId, Time};

use crate::kv::items::State;
use crate::net::lives::{HoldId, LifeId, Slot};

/// One half of one request, numbered over the whole world.
pub type LegId = usize;
/// Which half of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The prefill half.
    Sender,
    /// The decode half.
    Receiver,
}

/// One half of one request: what its scheduler plans, and what came of it.
#[derive(Debug, Clone)]
pub struct Leg {
    /// The request it belongs to.
    pub request: usize,
    /// The request of which that is another attempt, or itself.
    pub family: usize,
    /// Which half.
    pub side: Side,
    /// Where.
    pub slot: Slot,
    /// The prefill slots that serve it (its own for a sender).
    pub servers: Vec<Slot>,
    /// Its room.
    pub room: Room,
    /// How many pages it announces or registers.
    pub num_pages: usize,
    /// Whether it gives an aux row.
    pub wants_aux: bool,
    /// Its pages are read, not written.
    pub pulls: bool,
    /// How many receivers a sender expects.
    pub receivers: u32,
    /// The content a sender writes.
    pub key: u64,
    /// True for requests that must succeed.
    pub must_succeed: bool,
    /// True if its scheduler gives arguments that cannot be right.
    pub misused: bool,
    /// Where engines differ: a sender that is given a page more or less than its siblings.
    pub miscounted: bool,

    /// The life in which it was opened; `None` before.
    pub life: Option<LifeId>,
    /// Its session.
    pub session: SessionId,
    /// Its state.
    pub poll: KvPoll,
    /// Its state before the last change.
    pub before: KvPoll,
    /// When it was opened, in global time.
    pub opened_at: u64,
    /// When it must have ended, on its host's clock.
    pub deadline: Time,
    /// When it ended, in global time.
    pub ended_at: Option<u64>,
    /// True if its scheduler aborted it.
    pub aborted: bool,
    /// The reason of its failure, as its peer may be told.
    pub told: Option<PeerCause>,
    /// When `init` was called, in global time.
    pub inited_at: Option<u64>,
    /// Its aux row, once it has one.
    pub row: Option<u32>,
    /// Where engines differ: pages of the request that it has already.
    pub prefix: usize,
    /// The pages given so far, in request order.
    pub pages: Vec<u32>,
    /// Tokens that have not come back.
    pub holds: Vec<HoldId>,
    /// The hold on the aux row.
    pub row_hold: HoldId,
    /// What it has of the cache groups.
    pub state: State,
    /// Of a receiver: the senders whose pages it was told to read, if it was told.
    pub meant: Vec<LegId>,
    /// Of a sender that is only ever read: for how long its pages wait for readers.
    pub lease: Option<Lease>,
    /// Until when they may wait, on its host's clock, once they are complete.
    pub leased_until: Option<Time>,
}

impl Leg {
    /// Half a request that nobody has opened yet, without pages.
    pub fn unopened(request: usize, (side, slot): (Side, Slot), room: Room) -> Leg {
        Leg {
            request,
            family: request,
            side,
            slot,
            servers: Vec::new(),
            room,
            num_pages: 0,
            wants_aux: false,
            pulls: false,
            receivers: 1,
            key: 0,
            must_succeed: false,
            misused: false,
            miscounted: false,
            life: None,
            session: SessionId(0),
            poll: KvPoll::Bootstrapping,
            before: KvPoll::Bootstrapping,
            opened_at: 0,
            deadline: Time::MAX,
            ended_at: None,
            aborted: false,
            told: None,
            inited_at: None,
            row: None,
            prefix: 0,
            pages: Vec::new(),
            holds: Vec::new(),
            row_hold: 0,
            state: State::default(),
            meant: Vec::new(),
            lease: None,
            leased_until: None,
        }
    }

    /// True if the hosts of the two exchange pages.
    pub fn meets(&self, other: &Leg) -> bool {
        match (self.side, other.side) {
            (Side::Sender, Side::Receiver) => other.servers.contains(&self.slot),
            (Side::Receiver, Side::Sender) => self.servers.contains(&other.slot),
            _ => false,
        }
    }

    /// True if the two are halves of one request, or of two attempts at it.
    pub fn is_of(&self, other: &Leg) -> bool {
        self.family == other.family && Ledger::rooms_match(&self.room, &other.room)
    }

    /// True while its session exists and has not ended.
    pub fn is_open(&self) -> bool {
        self.life.is_some() && !self.poll.is_terminal()
    }
}

/// One token of pages that a session holds.
#[derive(Debug, Clone)]
pub struct Hold {
    /// Whose.
    pub leg: LegId,
    /// Which pages, in order.
    pub pages: Vec<u32>,
    /// The layers in which their content is final, as bits.
    pub finals: u64,
}

impl Hold {
    /// True if its content in these layers (bits) has been called final.
    pub fn is_final(&self, layers: u64) -> bool {
        self.finals & layers == layers
    }
}

/// Everything that invariants compare against.
#[derive(Debug, Default, Clone)]
pub struct Ledger {
    /// All halves of all requests.
    pub legs: Vec<Leg>,
    /// Those whose pages wait for readers under a lease that is watched.
    pub leased: Vec<LegId>,
    /// All tokens ever given; number 0 is nobody.
    pub holds: Vec<Hold>,
}

impl Ledger {
    /// A ledger in which nobody holds anything.
    pub fn new() -> Ledger {
        let nobody = Hold { leg: LegId::MAX, pages: Vec::new(), finals: 0 };
        Ledger { holds: vec![nobody], ..Ledger::default() }
    }

    /// Notes that a leg's session now holds pages.
    pub fn hold(&mut self, leg: LegId, pages: Vec<u32>) -> HoldId {
        self.holds.push(Hold { leg, pages, finals: 0 });
        (self.holds.len() - 1) as HoldId
    }

    /// Notes that the content of pages (or of a row) is final in some layers.
    pub fn announce(&mut self, hold: HoldId, layers: &Range<u32>) {
        if let Some(hold) = self.holds.get_mut(hold as usize) {
            layers.clone().for_each(|layer| hold.finals |= 1 << layer.min(63));
        }
    }

    /// True if a sender of a request is given other pages than its siblings.
    pub fn is_miscounted(&self, half: &Leg) -> bool {
        self.legs.iter().any(|leg| leg.miscounted && leg.is_of(half))
    }

    /// True if two rooms can be those of one request.
    pub fn rooms_match(one: &Room, other: &Room) -> bool {
        one == other || one.base().is_some_and(|base| other.base() == Some(base))
    }

    /// The halves on the other side of a leg's request that it meets.
    pub fn counterparts(&self, leg: LegId) -> impl Iterator<Item = LegId> + '_ {
        let own = &self.legs[leg];
        let meets = move |other: &Leg| other.request == own.request && own.meets(other);
        self.legs.iter().enumerate().filter(move |(_, other)| meets(other)).map(|(id, _)| id)
    }
}
