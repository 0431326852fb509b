//! A world of a dialect: its lives, its calendar, and how machines are driven.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::{
    BootstrapError, Directions, KvArgs, KvPoll, LookupId, PagePool, PeerId, SessionId, Time, TransferError,
    TransportError, WayEnd, WriteFence,
};
use kv_interop::message::Way;
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

pub(super) type Out = Output<KvPoll, Resource, TransferError>;

/// How long a healed world rests before requests must succeed: longer than any deadline, any hold of a dead
/// process and any distance of two tries.
const REST: u64 = 300 * SEC;
/// How long the requests may take that must succeed.
const SERVING: u64 = 200 * SEC;
/// How long the world goes on after the restart of all prefill engines.
const AFTER_RESTART: u64 = 300 * SEC;
/// Outputs that one input may cause for each session of the host, and beyond.
const OUTPUTS: (usize, usize) = (64, 400);

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
    /// A notification arrives.
    Notify { from: LifeId, peer: PeerId, to: LifeId, bytes: bytes::Bytes },
    /// A post makes progress.
    Slice { flight: usize },
    /// An agent notices that the way to another is gone.
    AgentGone { life: LifeId, peer: PeerId },
    /// A scheduler acts.
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
    /// What waits until the host continues.
    backlog: VecDeque<(&'static str, Input<Command>)>,
    rang: bool,
    pub(super) peers: BTreeMap<PeerId, Peer>,
    pub(super) sessions: BTreeMap<SessionId, LegId>,
    timer: Option<Time>,
    set: u64,
    /// The moment of the last timeout, and how many there were.
    timeouts: (u64, u32),
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

    fn ring(&mut self, life: LifeId, set: u64) {
        if self.lives[life].set != set || !self.lives[life].alive {
            return;
        }
        if self.lives[life].stopped {
            self.lives[life].rang = true;
            return;
        }
        self.lives[life].timer = None;
        self.tell(life, "timeout", Input::Timeout);
    }

    /// The host goes on: it takes what has waited, and looks at the clock first or last.
    pub(super) fn resume(&mut self, life: LifeId) {
        if !self.lives[life].alive || !std::mem::take(&mut self.lives[life].stopped) {
            return;
        }
        let rang = std::mem::take(&mut self.lives[life].rang);
        let first = self.rng.chance(500);
        if rang && first {
            self.lives[life].timer = None;
            self.tell(life, "timeout", Input::Timeout);
        }
        let waiting: Vec<_> = self.lives[life].backlog.drain(..).collect();
        for (what, input) in waiting {
            self.tell(life, what, input);
        }
        if rang && !first {
            self.lives[life].timer = None;
            self.tell(life, "timeout", Input::Timeout);
        }
    }

    /// Gives an input to a machine, and carries out what the machine wants.
    pub(super) fn tell(&mut self, life: LifeId, what: &'static str, input: Input<Command>) {
        if !self.lives[life].alive || self.violation.is_some() {
            return;
        }
        if self.lives[life].stopped {
            self.lives[life].backlog.push_back((what, input));
            return;
        }
        let mut inputs = VecDeque::from([(what, input)]);
        while let Some((what, input)) = inputs.pop_front() {
            self.counters.inputs += 1;
            self.trace.step(self.now, life, what);
            self.trace.note(self.now, || format!("  {input:?}"));
            let record = &mut self.lives[life];
            let now = record.clock.local(self.now);
            let machine = &mut record.machine;
            let outputs = catch_unwind(AssertUnwindSafe(|| {
                machine.handle(now, input);
                std::iter::from_fn(|| machine.poll_output()).take(100_000).collect::<Vec<Out>>()
            }));
            let Ok(outputs) = outputs else {
                return self.violate("dialect_machines_are_bounded", format!("life {life} panics at {what}"));
            };
            self.check_step(life, what, outputs.len());
            for output in outputs {
                self.carry_out(life, output, &mut inputs);
            }
        }
        self.set_timer(life);
    }

    fn carry_out(
        &mut self,
        life: LifeId,
        output: Out,
        inputs: &mut VecDeque<(&'static str, Input<Command>)>,
    ) {
        match &output {
            Output::Connect { peer, transport } => {
                let way = Way::of(transport);
                self.trace.note(self.now, || format!("    connect {peer:?} {way:?}"));
            }
            other => self.trace.note(self.now, || format!("    {other:?}")),
        }
        match output {
            Output::Connect { peer, transport } => {
                let opened = self.connect(life, peer, Way::of(&transport));
                inputs.push_back(match opened {
                    Ok(()) => {
                        let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
                        ("connected", Input::Connected { peer, directions, fence })
                    }
                    Err(error) => ("connect failed", Input::ConnectFailed { peer, error }),
                });
            }
            Output::Disconnect { peer } => self.disconnect(life, peer),
            Output::Send { peer, frame } => self.send(life, peer, frame),
            Output::Post { peer, post } => {
                let id = post.id;
                if let Err(error) = self.post(life, peer, post) {
                    inputs.push_back(("refused", Input::Posted { post: id, result: Err(error) }));
                }
            }
            Output::Permit { peer, .. } => {
                if let Some(Peer::Agent { permitted, .. }) = self.lives[life].peers.get_mut(&peer) {
                    *permitted = true;
                }
            }
            Output::Revoke { .. } => {
                self.violate(
                    "dialect_machines_are_bounded",
                    format!("life {life} revokes a foreign agent's right"),
                );
            }
            Output::Cancel { post } => self.cancel(life, post),
            Output::Lookup { lookup, addr, .. } => self.lookup(life, lookup, &addr),
            Output::Status { session, poll, failure } => {
                self.status(life, session, poll, failure.as_deref());
            }
            Output::Release { session, resource } => self.released(life, session, resource),
        }
    }

    fn connect(&mut self, life: LifeId, peer: PeerId, way: Option<Way>) -> Result<(), TransportError> {
        if self.lives[life].peers.contains_key(&peer) {
            return Err(TransportError::Unsupported("the id is that of a connected peer"));
        }
        let known = match way.ok_or(TransportError::Metadata("the offer holds no way"))? {
            Way::Request { addr } => Peer::Channel(self.open_channel(life, peer, (addr, true))),
            Way::Push { addr } => Peer::Channel(self.open_channel(life, peer, (addr, false))),
            Way::Agent { metadata, regions } => {
                let refused = || TransportError::Foreign("these are no metadata of an agent".to_owned());
                let target =
                    hosts::life_of(&metadata).filter(|at| *at < self.lives.len()).ok_or_else(refused)?;
                for leg in self.legs.iter_mut().filter(|leg| leg.life == life && leg.ended.is_none()) {
                    leg.met.insert(target);
                }
                Peer::Agent { life: target, regions, permitted: false }
            }
        };
        self.lives[life].peers.insert(peer, known);
        Ok(())
    }

    fn disconnect(&mut self, life: LifeId, peer: PeerId) {
        if let Some(Peer::Channel(channel)) = self.lives[life].peers.remove(&peer) {
            self.channels[channel].leaving = true;
        }
    }

    fn send(&mut self, life: LifeId, peer: PeerId, frame: bytes::Bytes) {
        match self.lives[life].peers.get(&peer).cloned() {
            Some(Peer::Channel(channel)) => self.say(channel, &frame),
            Some(Peer::Agent { life: to, .. }) => self.notify(life, peer, to, frame),
            None => {}
        }
    }

    /// Reports the end of a way to its machine.
    pub(super) fn gone(&mut self, life: LifeId, peer: PeerId, end: WayEnd) {
        if self.lives[life].peers.remove(&peer).is_none() {
            return;
        }
        match end {
            WayEnd::Lost => self.counters.lost += 1,
            WayEnd::Dead { .. } => self.counters.deaths += 1,
        }
        self.tell(life, "peer gone", Input::PeerGone { peer, end });
    }

    fn set_timer(&mut self, life: LifeId) {
        let lateness = self.rng.below(self.params.lateness + 1);
        let record = &mut self.lives[life];
        let next = match self.planted {
            Some(Planted::TimersSpin) => Some(record.clock.local(self.now)),
            _ => record.machine.next_timeout(),
        };
        if record.timer == next {
            return;
        }
        record.timer = next;
        record.set += 1;
        let set = record.set;
        let Some(next) = next else { return };
        let due = record.clock.global(next);
        if due < u64::MAX / 2 {
            self.enter(due.saturating_sub(self.now) + lateness, Event::Timer { life, set });
        }
    }

    /// Looks at what one input has cost.
    fn check_step(&mut self, life: LifeId, what: &'static str, outputs: usize) {
        let record = &mut self.lives[life];
        let most = OUTPUTS.0 * record.sessions.len() + OUTPUTS.1;
        let mut wrong = None;
        if outputs > most {
            wrong = Some(format!("life {life} answers {what} with {outputs} outputs; allowed are {most}"));
        }
        if what == "timeout" {
            let (at, times) = record.timeouts;
            record.timeouts = if at == self.now { (at, times + 1) } else { (self.now, 1) };
            if record.timeouts.1 > 8 {
                wrong = Some(format!("the timer of life {life} spins"));
            }
        }
        let (peers, prefill) = (record.peers.len(), record.place.prefill);
        // A machine needs a channel and an agent for each life of a rank of the other side that it has met.
        let most = 3 * self.lives.iter().filter(|other| other.place.prefill != prefill).count() + 4;
        if peers > most {
            wrong = Some(format!("life {life} has {peers} peers; allowed are {most}"));
        }
        if let Some(wrong) = wrong {
            self.violate("dialect_machines_are_bounded", wrong);
        }
    }

    fn lookup(&mut self, life: LifeId, lookup: LookupId, addr: &str) {
        // Each prefill engine has a bootstrap server of its own.
        let engine = addr.strip_prefix("bootstrap-").and_then(|rest| rest.split(':').next()?.parse().ok());
        let delay = self.rng.tail(self.params.channel_delay.0, self.params.channel_delay.1);
        let asked = self.now;
        match engine.filter(|engine| *engine < self.engines.len()) {
            Some(engine) => self.enter(delay, Event::Answer { life, lookup, engine, asked }),
            None => {
                let error = BootstrapError::Address(addr.to_owned());
                let input = Input::LookupFailed { lookup, error };
                self.enter(delay, Event::Told { life, what: "lookup failed", input });
            }
        }
    }

    fn answer_lookup(&mut self, life: LifeId, lookup: LookupId, engine: usize, asked: u64) {
        let fails = !self.healed && self.rng.chance(self.params.lookup_fail);
        let stale = !self.healed && self.rng.chance(self.params.lookup_stale);
        let lives = self.engines[engine].lives.clone();
        let known = |life: &LifeId| {
            let record = &self.lives[*life];
            record.alive || stale || record.died_at.is_some_and(|died| died > asked)
        };
        let ranks: Vec<_> = lives
            .into_iter()
            .filter(known)
            .filter_map(|life| hosts::record(self.lives[life].place, life))
            .collect();
        let expected = self.params.prefill_tp as usize;
        if fails || ranks.len() < expected {
            let error = if fails {
                BootstrapError::Status(503)
            } else {
                BootstrapError::NotReady { registered: ranks.len() as u32, expected: expected as u32 }
            };
            return self.tell(life, "lookup failed", Input::LookupFailed { lookup, error });
        }
        self.tell(life, "found", Input::Found { lookup, ranks });
    }
}
