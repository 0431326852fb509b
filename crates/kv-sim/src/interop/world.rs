//! A world of a dialect: its lives, and its calendar.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::machine::Input;
use kv_core::proto::Command;
use kv_core::{KvArgs, LookupId, PagePool, PeerId, SessionId, Time};
use kv_poll::KvMachine;

use super::agents::Flight;
use super::channels::{Channel, ChannelId};
use super::hosts::{self, Place, ROWS, Rooms};
use super::memory::Memory;
use super::params::DialectParams;
use super::requests::{Leg, Request};
use super::scheduler::Act;
use super::stats::DialectCounters;
use super::strikes::Strike;
use super::{LegId, LifeId};
use crate::clock::{Clock, SEC};
use crate::planted::Planted;
use crate::rng::Rng;
use crate::trace::Trace;
use crate::violation::Violation;

/// How long a healed world rests before requests must succeed: longer than any deadline, any hold of a dead
/// process and any distance of two tries.
const REST: u64 = 300 * SEC;
/// How long the requests may take that must succeed.
const SERVING: u64 = 200 * SEC;
/// How long the world goes on after the restart of all prefill engines.
const AFTER_RESTART: u64 = 300 * SEC;
/// Something that happens at one moment of virtual time.
#[derive(Debug)]
pub(super) enum Event {
    /// The timer of a machine rings, unless the machine has set it anew since.
    Timer { life: LifeId, set: u64 },
    /// A machine is told something by its transport or its bootstrap client.
    Told { life: LifeId, what: &'static str, input: Input<Command> },
    /// A side channel makes progress.
    Channel { channel: ChannelId },
    /// A side channel that has ended is tried again, after this many refusals in a row.
    Probe { channel: ChannelId, refused: u32 },
    /// A notification of one agent arrives at another.
    Notify { from: LifeId, peer: PeerId, to: LifeId, bytes: bytes::Bytes },
    /// A post makes progress.
    Slice { flight: usize },
    /// An agent notices that the way to another is gone.
    AgentGone { life: LifeId, peer: PeerId },
    /// A scheduler does something.
    Act(Act),
    /// A fault begins or ends.
    Strike(Strike),
    /// A lookup is answered.
    Answer { life: LifeId, lookup: LookupId, engine: usize, asked: u64 },
    /// A session must have ended.
    Overdue { leg: LegId },
}

/// What a life knows under a peer id.
#[derive(Debug, Clone)]
pub(super) enum Peer {
    Channel(ChannelId),
    Agent { life: LifeId, regions: Vec<kv_interop::message::AgentRegion>, permitted: bool },
}

impl Peer {
    /// The life whose agent the peer is.
    pub(super) fn agent(&self) -> Option<LifeId> {
        match self {
            Peer::Agent { life, .. } => Some(*life),
            Peer::Channel(_) => None,
        }
    }
}

/// One life of a host.
pub(super) struct Life {
    pub(super) place: Place,
    pub(super) args: KvArgs,
    pub(super) machine: KvMachine,
    pub(super) clock: Clock,
    pub(super) memory: Memory,
    pub(super) rooms: Rooms,
    pub(super) pool: PagePool,
    pub(super) alive: bool,
    pub(super) died_at: Option<u64>,
    pub(super) stopped: bool,
    /// True once the thread of the side channel has ended, of which nobody connected to the engine's agents hears.
    pub(super) deaf: bool,
    /// What waits until the host continues.
    pub(super) backlog: VecDeque<(&'static str, Input<Command>)>,
    pub(super) rang: bool,
    pub(super) peers: BTreeMap<PeerId, Peer>,
    pub(super) sessions: BTreeMap<SessionId, LegId>,
    pub(super) timer: Option<Time>,
    pub(super) set: u64,
    /// The moment of the last timeout, and how many there were.
    pub(super) timeouts: (u64, u32),
}

/// An engine: the lives of its ranks.
pub(super) struct Engine {
    pub(super) prefill: bool,
    pub(super) number: usize,
    pub(super) lives: Vec<LifeId>,
}

/// A world of a dialect.
pub(crate) struct World {
    pub(super) params: DialectParams,
    pub(super) planted: Option<Planted>,
    pub(super) rng: Rng,
    pub(super) now: u64,
    calendar: BTreeMap<(u64, u64), Event>,
    entered: u64,
    pub(super) engines: Vec<Engine>,
    pub(super) lives: Vec<Life>,
    pub(super) channels: Vec<Channel>,
    pub(super) flights: Vec<Flight>,
    pub(super) requests: Vec<Request>,
    pub(super) legs: Vec<Leg>,
    pub(super) sessions: u64,
    pub(super) retries: u64,
    /// The leg of each id under which a receiver of vLLM's push mode has registered.
    pub(super) registered: BTreeMap<String, LegId>,
    /// Which engines cannot reach each other, and until when.
    pub(super) parted: BTreeMap<(usize, usize), u64>,
    pub(super) healed: bool,
    pub(super) counters: DialectCounters,
    pub(super) trace: Trace,
    pub(super) violation: Option<Violation>,
}

/// What is left of a world.
pub(crate) struct Outcome {
    pub(crate) violation: Option<Violation>,
    pub(crate) counters: DialectCounters,
    pub(crate) trace: Trace,
    pub(crate) ended_at: u64,
}

/// Runs a world to its end, or to its first broken promise.
pub(crate) fn run(
    params: DialectParams,
    planted: Option<Planted>,
    trace: Trace,
    max_events: Option<u64>,
) -> Outcome {
    let mut world = World::new(params, planted, trace);
    let span = world.params.fault_span;
    let mut events = 0;
    let limit = max_events.unwrap_or(u64::MAX);
    world.run_until(span, (&mut events, limit));
    world.heal();
    world.run_until(span + REST, (&mut events, limit));
    world.serve();
    world.run_until(span + REST + SERVING, (&mut events, limit));
    if events < limit {
        world.check_rest(false);
    }
    world.restart_prefills();
    world.run_until(span + REST + SERVING + AFTER_RESTART, (&mut events, limit));
    if events < limit {
        world.check_rest(true);
    }
    world.counters.worlds = 1;
    let World { violation, counters, trace, now, .. } = world;
    Outcome { violation, counters, trace, ended_at: now }
}

impl World {
    fn new(params: DialectParams, planted: Option<Planted>, trace: Trace) -> World {
        let mut world = World {
            rng: Rng::new(params.seed ^ 0x0dd5_0001),
            planted,
            now: 0,
            calendar: BTreeMap::new(),
            entered: 0,
            engines: Vec::new(),
            lives: Vec::new(),
            channels: Vec::new(),
            flights: Vec::new(),
            requests: Vec::new(),
            legs: Vec::new(),
            sessions: 0,
            retries: 0,
            registered: BTreeMap::new(),
            parted: BTreeMap::new(),
            healed: false,
            counters: DialectCounters::default(),
            trace,
            violation: None,
            params,
        };
        for number in 0..world.params.prefills + world.params.decodes {
            let prefill = number < world.params.prefills;
            world.engines.push(Engine { prefill, number, lives: Vec::new() });
            world.boot(number);
        }
        world.plan_strikes();
        world.plan_requests();
        world
    }

    /// Starts the processes of an engine.
    pub(super) fn boot(&mut self, engine: usize) {
        let Engine { prefill, number, .. } = self.engines[engine];
        let tp = if prefill { self.params.prefill_tp } else { self.params.decode_tp };
        let mut lives = Vec::new();
        for rank in 0..tp {
            let place = Place { engine: number, prefill, rank, tp };
            let life = self.lives.len();
            let rooms: Rooms = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
            let host = hosts::args(&self.params, place).and_then(|args| {
                let machine = hosts::machine(&self.params, place, &args, (life, &rooms))?;
                Ok((args, machine))
            });
            let (args, machine) = match host {
                Ok(host) => host,
                Err(error) => {
                    let wrong = format!("{place:?} cannot start: {error}");
                    return self.violate("dialect_requests_are_served", wrong);
                }
            };
            let ppm = 1_000_000 - self.params.drift_ppm + self.rng.below(2 * self.params.drift_ppm + 1);
            let epoch = self.rng.below(1000 * SEC);
            let memory = Memory::new(&args, self.params.seed ^ life as u64);
            self.lives.push(Life {
                place,
                pool: PagePool::new(args.geometry().num_pages),
                args,
                machine,
                clock: Clock::new(self.now, epoch, ppm),
                memory,
                rooms,
                alive: true,
                died_at: None,
                stopped: false,
                deaf: false,
                backlog: VecDeque::new(),
                rang: false,
                peers: BTreeMap::new(),
                sessions: BTreeMap::new(),
                timer: None,
                set: 0,
                timeouts: (0, 0),
            });
            (0..ROWS).for_each(|row| self.note_row(life, row));
            lives.push(life);
        }
        self.engines[engine].lives = lives;
    }

    /// Tells the machine's reader of aux rows what a row holds.
    pub(super) fn note_row(&mut self, life: LifeId, row: u32) {
        let room = self.lives[life].memory.room_of(row);
        self.lives[life].rooms[row as usize].store(room, Ordering::Relaxed);
    }

    pub(super) fn enter(&mut self, after: u64, event: Event) {
        self.entered += 1;
        self.calendar.insert((self.now.saturating_add(after), self.entered), event);
    }

    fn run_until(&mut self, end: u64, (events, limit): (&mut u64, u64)) {
        while self.violation.is_none() && *events < limit {
            let Some(entry) = self.calendar.first_entry().filter(|entry| entry.key().0 <= end) else { break };
            let ((at, _), event) = entry.remove_entry();
            self.now = at;
            *events += 1;
            self.happen(event);
        }
        if self.violation.is_none() && *events < limit {
            self.now = self.now.max(end);
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Timer { life, set } => self.ring(life, set),
            Event::Told { life, what, input } => self.tell(life, what, input),
            Event::Channel { channel } => self.advance_channel(channel),
            Event::Probe { channel, refused } => self.probe(channel, refused),
            Event::Notify { from, peer, to, bytes } => self.notified(from, peer, to, bytes),
            Event::Slice { flight } => self.slice(flight),
            Event::AgentGone { life, peer } => self.agent_gone(life, peer),
            Event::Act(act) => self.act(act),
            Event::Strike(strike) => self.strike(strike),
            Event::Answer { life, lookup, engine, asked } => self.answer_lookup(life, lookup, engine, asked),
            Event::Overdue { leg } => self.check_overdue(leg),
        }
    }

    pub(super) fn violate(&mut self, invariant: &'static str, what: String) {
        self.trace.note(self.now, || format!("VIOLATION {invariant}: {what}"));
        self.violation.get_or_insert(Violation { invariant, what });
    }

    /// True if the processes of two engines cannot reach each other.
    pub(super) fn are_parted(&self, one: LifeId, other: LifeId) -> bool {
        let (one, other) = (self.lives[one].place, self.lives[other].place);
        self.parted.contains_key(&(one.engine.min(other.engine), one.engine.max(other.engine)))
    }
}
