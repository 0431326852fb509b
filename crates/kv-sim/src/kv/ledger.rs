//! What is known from outside of the machines: sessions, their states, and who holds which pages.

use std::ops::Range;

use kv_core::{KvPoll, Lease, PeerCause, Room, SessionId, Time};

use crate::kv::items::State;
use crate::net::lives::{HoldId, LifeId, Slot};

/// The number of one half of one request, counted over the whole world.
pub type LegId = usize;
/// The side of a request that a half is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The half on the prefill side.
    Sender,
    /// The half on the decode side.
    Receiver,
}

/// One half of one request, also called a leg: what its scheduler plans, and what has come of it.
#[derive(Debug, Clone)]
pub struct Leg {
    /// The number of the request. A request that is tried again has a number for each try.
    pub request: usize,
    /// The number of the first try of the same request; equal to `request` if this is the first try.
    pub family: usize,
    /// The side of the request.
    pub side: Side,
    /// The slot of the host.
    pub slot: Slot,
    /// The prefill slots that serve the half; for a sender, its own slot.
    pub servers: Vec<Slot>,
    /// The room of the session.
    pub room: Room,
    /// The number of pages that a sender announces or a receiver registers.
    pub num_pages: usize,
    /// True if the scheduler gives an aux row.
    pub wants_aux: bool,
    /// True if the pages are read (pull), and not written (push).
    pub pulls: bool,
    /// The number of receivers that a sender expects.
    pub receivers: u32,
    /// The key of the content that a sender writes.
    pub key: u64,
    /// True if the request must succeed.
    pub must_succeed: bool,
    /// True if the scheduler gives arguments that cannot be right.
    pub misused: bool,
    /// Where engines differ: true for a sender that is given a page more or less than the other senders of
    /// the request.
    pub miscounted: bool,

    /// The life of the host in which the session was opened; `None` before.
    pub life: Option<LifeId>,
    /// The id of the session.
    pub session: SessionId,
    /// The state of the session.
    pub poll: KvPoll,
    /// The state of the session before its last change.
    pub before: KvPoll,
    /// When the session was opened, in global time.
    pub opened_at: u64,
    /// When the session must have ended, on its host's clock.
    pub deadline: Time,
    /// When the session ended, in global time.
    pub ended_at: Option<u64>,
    /// True if the scheduler has aborted the session.
    pub aborted: bool,
    /// The reason of the session's failure, in the form that the peer may be told.
    pub told: Option<PeerCause>,
    /// When `init` was called, in global time.
    pub inited_at: Option<u64>,
    /// True while the session waits for pages or items that its host has not free.
    pub starved: bool,
    /// The aux row of the session, once the session has one.
    pub row: Option<u32>,
    /// Where engines differ: the number of pages at the start of the request that the receiver has already.
    pub prefix: usize,
    /// The pages given so far, in request order.
    pub pages: Vec<u32>,
    /// The holds whose pages have not come back.
    pub holds: Vec<HoldId>,
    /// The hold on the aux row.
    pub row_hold: HoldId,
    /// The items of the session in each cache group.
    pub state: State,
    /// On a receiver, the senders whose pages the router told it to read, if any.
    pub meant: Vec<LegId>,
    /// On a sender that is only ever read, how long its pages are kept for readers.
    pub lease: Option<Lease>,
    /// Until when the complete pages may be kept for readers, on the host's clock.
    pub leased_until: Option<Time>,
}

impl Leg {
    /// A half of a request that no scheduler has opened yet, without pages.
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
            starved: false,
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

    /// True if both halves are of one request, or of two attempts at it.
    pub fn is_of(&self, other: &Leg) -> bool {
        self.family == other.family && Ledger::rooms_match(&self.room, &other.room)
    }

    /// True while the session exists and has not ended.
    pub fn is_open(&self) -> bool {
        self.life.is_some() && !self.poll.is_terminal()
    }
}

/// One `Pages` that a session holds.
#[derive(Debug, Clone)]
pub struct Hold {
    /// The half that holds the pages.
    pub leg: LegId,
    /// The pages, in the order of the request.
    pub pages: Vec<u32>,
    /// The layers in which their content is final, as bits.
    pub finals: u64,
}

impl Hold {
    /// True if the content of these layers (a bit for each) was announced as final.
    pub fn is_final(&self, layers: u64) -> bool {
        self.finals & layers == layers
    }
}

/// All that is known of sessions and pages, for the invariants to compare with.
#[derive(Debug, Default, Clone)]
pub struct Ledger {
    /// All halves of all requests.
    pub legs: Vec<Leg>,
    /// The halves whose pages are kept for readers under a lease that is checked.
    pub leased: Vec<LegId>,
    /// All holds that there ever were; number 0 stands for no holder.
    pub holds: Vec<Hold>,
}

impl Ledger {
    /// A ledger in which no session holds anything.
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

    /// True if one sender of the half's request was given other pages than the others.
    pub fn is_miscounted(&self, half: &Leg) -> bool {
        self.legs.iter().any(|leg| leg.miscounted && leg.is_of(half))
    }

    /// True if the two rooms can be those of one request.
    pub fn rooms_match(one: &Room, other: &Room) -> bool {
        one == other || one.base().is_some_and(|base| other.base() == Some(base))
    }

    /// The halves on the other side of the request that a half exchanges pages with.
    pub fn counterparts(&self, leg: LegId) -> impl Iterator<Item = LegId> + '_ {
        let own = &self.legs[leg];
        let meets = move |other: &Leg| other.request == own.request && own.meets(other);
        self.legs.iter().enumerate().filter(move |(_, other)| meets(other)).map(|(id, _)| id)
    }
}
