//! One world: hosts, wires and clocks, driven by one calendar.
//!
//! ```text
//! calendar ─▶ event ─▶ host's machine ─▶ outputs ─┬▶ transport.rs    frames            ─▶ calendar
//!            (step.rs)                            ├▶ posts.rs    reads and writes  ─▶ calendar
//!                                                 ├▶ lookups.rs  bootstrap servers ─▶ calendar
//!                                                 └▶ the service: states, pages that come back
//! every step ─▶ facts ─▶ the service's invariants
//! ```

use std::collections::BTreeMap;

use kv_core::machine::{Input, Machine};
use kv_core::{RankRecord, Time};

use crate::clock::{Clock, MS, SEC};
use crate::net::calendar::{Calendar, Event};
use crate::net::fact::Fact;
use crate::net::flight::Flight;
use crate::net::host::{Engine, Host};
use crate::net::lives::{LifeId, LifeRecord, Slot};
use crate::net::params::Physics;
use crate::net::rendezvous::BootstrapServers;
use crate::net::rig::Rig;
use crate::net::roads::Roads;
use crate::net::service::Service;
use crate::net::stats::NetCounters;
use crate::net::way::{Revoking, Way};
use crate::planted::Planted;
use crate::rng::Rng;
use crate::trace::Trace;
use crate::violation::Violation;

/// The number of events of one world, at most: far more than any world needs to come to rest.
const MAX_EVENTS: u64 = 2_000_000;
/// How long a healed world may take to come to rest, in nanoseconds.
const MAX_REST: u64 = 120 * SEC;

/// A host of the service.
pub type HostOf<S> = Host<<S as Service>::Machine, <S as Service>::Gauges, <S as Service>::Stranger>;

/// One world of a service.
pub struct World<S: Service> {
    /// The state of the service in this world: its workload, its ledger, its invariants.
    pub service: S,
    pub(crate) params: Physics,
    pub(crate) rng: Rng,
    /// The global time, in nanoseconds, which no host knows.
    pub(crate) now: u64,
    pub(crate) calendar: Calendar<S::Act>,
    pub(crate) hosts: Vec<HostOf<S>>,
    /// What is known of each life from outside.
    pub(crate) lives: Vec<LifeRecord>,
    pub(crate) memories: Vec<S::Memory>,
    /// The present life of each slot; `None` while the slot is down.
    pub(crate) slots: Vec<Option<LifeId>>,
    pub(crate) flights: Vec<Flight>,
    /// Every connection that there ever was.
    pub(crate) ways: Vec<Way>,
    pub(crate) revoking: Vec<Revoking>,
    pub(crate) net: Roads,
    pub(crate) servers: BootstrapServers,
    /// When faults stopped, in global time; `None` before.
    pub(crate) healed: Option<u64>,
    /// When a host that had drained was last replaced in the healed world, in global time.
    pub(crate) replaced: Option<u64>,
    /// Answers of bootstrap servers that are under way, by the life that asked and the life that is named. Answers
    /// that were given after that life was withdrawn are not counted.
    pub(crate) answers: BTreeMap<(LifeId, LifeId), usize>,
    /// When the last answer that is counted reached a life and named another, in global time.
    pub(crate) named: BTreeMap<(LifeId, LifeId), u64>,
    /// When a session last opened, ended, or gave something back, in global time.
    pub(crate) last_change: u64,
    pub(crate) counters: NetCounters,
    pub(crate) trace: Trace,
    pub(crate) planted: Option<Planted>,
    pub(crate) violation: Option<Violation>,
}

impl<S> Clone for World<S>
where
    S: Service<Machine: Clone, Memory: Clone, Act: Clone, Stranger: Clone> + Clone,
{
    fn clone(&self) -> World<S> {
        World {
            service: self.service.clone(),
            params: self.params.clone(),
            rng: self.rng.clone(),
            now: self.now,
            calendar: self.calendar.clone(),
            hosts: self.hosts.clone(),
            lives: self.lives.clone(),
            memories: self.memories.clone(),
            slots: self.slots.clone(),
            flights: self.flights.clone(),
            ways: self.ways.clone(),
            revoking: self.revoking.clone(),
            net: self.net.clone(),
            servers: self.servers.clone(),
            healed: self.healed,
            replaced: self.replaced,
            answers: self.answers.clone(),
            named: self.named.clone(),
            last_change: self.last_change,
            counters: self.counters.clone(),
            trace: self.trace.clone(),
            planted: self.planted,
            violation: self.violation.clone(),
        }
    }
}

/// The result of running a world.
pub struct Outcome<S> {
    /// The broken promise, if any.
    pub violation: Option<Violation>,
    /// The state of the service at the end.
    pub service: S,
    /// Counts of what happened in the network.
    pub counters: NetCounters,
    /// The record of what happened.
    pub trace: Trace,
    /// When the world ended, in virtual nanoseconds.
    pub ended_at: u64,
}

impl<S: Service> World<S> {
    /// A world in which nothing has happened yet.
    pub fn new(service: S, params: Physics, planted: Option<Planted>, trace: Trace) -> World<S> {
        let hosts = params.hosts();
        World {
            service,
            rng: Rng::new(params.seed),
            now: 0,
            calendar: Calendar::default(),
            hosts: Vec::new(),
            lives: Vec::new(),
            memories: Vec::new(),
            slots: vec![None; hosts],
            flights: Vec::new(),
            ways: Vec::new(),
            revoking: Vec::new(),
            net: Roads::new(hosts, &params.net),
            servers: BootstrapServers::default(),
            healed: None,
            replaced: None,
            answers: BTreeMap::new(),
            named: BTreeMap::new(),
            last_change: 0,
            counters: NetCounters { seeds: 1, driven: u64::from(params.driven), ..NetCounters::default() },
            trace,
            planted,
            violation: None,
            params,
        }
    }

    /// Starts a life in a slot that is down. With `published`, peers find its record at that bootstrap
    /// server. Peers reach it by the [`metadata`](super::metadata) of the life's number, which is
    /// [`next_life`](World::next_life).
    pub fn start(
        &mut self,
        slot: Slot,
        (machine, memory): (S::Machine, S::Memory),
        (record, published): (RankRecord, Option<String>),
        clock: Clock,
    ) {
        let (life, worker) = (self.next_life(), record.worker.clone());
        let engine = if self.params.driven {
            let salt = self.params.seed ^ life as u64;
            let rig = Rig::new(
                (machine, worker),
                (S::gauges, S::held),
                &self.params,
                (life, clock, salt),
                self.planted,
            );
            rig.map_or(Engine::Dead, |rig| Engine::Rig(Box::new(rig)))
        } else {
            Engine::Node(Box::new(machine))
        };
        self.begin_life(Host::new(slot, engine, record, published), memory, clock);
    }

    /// The number that the next life will have.
    pub fn next_life(&self) -> LifeId {
        self.hosts.len()
    }

    /// Adds a host at the beginning of a life, with its memory and its clock. Its record is published soon
    /// after.
    pub(crate) fn begin_life(&mut self, host: HostOf<S>, memory: S::Memory, clock: Clock) {
        let (life, slot) = (self.next_life(), host.slot);
        self.trace.note(self.now, || {
            format!("boot      life {life} in slot {slot}, incarnation {}", host.incarnation)
        });
        self.add_host(host, memory, clock);
        self.lives[life].seated = true;
        self.slots[slot] = Some(life);
        self.publish_later(life);
    }

    /// Adds a host that no slot leads to.
    pub(crate) fn add_host(&mut self, host: HostOf<S>, memory: S::Memory, clock: Clock) {
        let slot = host.slot;
        self.hosts.push(host);
        self.memories.push(memory);
        self.lives.push(LifeRecord::new(slot, clock));
    }

    /// The life of a slot, unless it is down.
    pub fn life(&self, slot: Slot) -> Option<LifeId> {
        self.slots.get(slot).copied().flatten()
    }

    /// What is known of a life from outside.
    pub fn record(&self, life: LifeId) -> &LifeRecord {
        &self.lives[life]
    }

    /// Plans an act of the service, to happen after `delay` nanoseconds.
    pub fn act_in(&mut self, delay: u64, act: S::Act) {
        self.calendar.enter(self.now + delay, Event::Act(act));
    }

    /// Global time in nanoseconds, which no machine knows.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// The only source of chance in the world.
    pub fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// The memory of a life.
    pub fn memory(&mut self, life: LifeId) -> &mut S::Memory {
        &mut self.memories[life]
    }

    /// Lets this many nanoseconds pass.
    pub fn advance(&mut self, span: u64) {
        let until = self.now + span;
        while let Some((at, event)) = self.calendar.next_until(until) {
            self.now = self.now.max(at);
            self.dispatch(event);
        }
        self.now = until;
    }

    /// Runs the world to its end: all hosts begin to live, faults strike, the world is healed, and comes to
    /// rest. With `max_events`, the world ends after that many events.
    pub fn run(mut self, max_events: Option<u64>) -> Outcome<S> {
        for slot in 0..self.slots.len() {
            S::boot(&mut self, slot);
        }
        S::begin(&mut self);
        self.plan_chaos();
        self.calendar.enter(self.params.fault_span, Event::Heal);
        while self.violation.is_none() && max_events.is_none_or(|most| self.counters.events < most) {
            let Some((at, event)) = self.calendar.next() else {
                self.settled(S::is_gentle(&self));
                if self.violation.is_some() || !S::go_on(&mut self) {
                    break;
                }
                continue;
            };
            debug_assert!(at >= self.now);
            self.now = at;
            self.counters.events += 1;
            let rest_by = self.healed.map_or(u64::MAX, |healed| {
                healed + self.params.chaos.stop_max + MAX_REST * S::patience(&self)
            });
            if self.counters.events > MAX_EVENTS || self.now > rest_by {
                self.tell(&Fact::Restless);
                break;
            }
            self.dispatch(event);
        }
        let World { violation, service, counters, trace, now, .. } = self;
        Outcome { violation, service, counters, trace, ended_at: now }
    }

    fn dispatch(&mut self, event: Event<S::Act>) {
        // A paused host does nothing; what reaches it waits until it continues.
        if let Some(until) = self.paused(&event) {
            let late = self.rng.below(MS / 5);
            if let Event::Begin { flight } = event {
                self.stop_before_slice(flight);
            }
            self.calendar.enter(until + late, event);
            return;
        }
        match event {
            Event::Timer { life, generation } => self.ring(life, generation),
            Event::Frame { from, to, road, bytes } => self.deliver((from, to), road, bytes),
            Event::Report { life, report } => self.report(life, report),
            Event::Move { flight, upto } => self.move_pieces(flight, upto),
            Event::Begin { flight } => self.begin_slice(flight),
            Event::End { flight } => self.end_slice(flight),
            Event::Land { flight } => self.land(flight),
            Event::Turn { life } => {
                self.feed(life, "turn", Input::Timeout);
            }
            Event::Act(act) => S::act(self, act),
            Event::Strike(strike) => self.strike(strike),
            Event::Heal => self.heal(),
        }
    }

    fn paused(&self, event: &Event<S::Act>) -> Option<u64> {
        let life = match *event {
            Event::Timer { life, .. } | Event::Turn { life } => life,
            Event::Frame { to, .. } | Event::Report { life: to, .. } if self.hosts[to].is_driven() => {
                return None;
            }
            Event::Frame { to, .. } | Event::Report { life: to, .. } => to,
            Event::Begin { flight } => self.flights[flight].life,
            // Hardware goes on while its host is stopped.
            Event::End { flight } if self.ways[self.flights[flight].way].copies() => {
                self.flights[flight].life
            }
            Event::Act(ref act) => S::place(self, act)?,
            _ => return None,
        };
        let until = self.lives[life].paused_until;
        (until > self.now && self.lives[life].alive).then_some(until)
    }

    /// How late a timer may take effect.
    pub(crate) fn slack(&self) -> u64 {
        2 * self.params.lateness + MS
    }

    /// Tells the invariants that the world has come to rest. `gently` is true if no machine has a reason to
    /// remember a peer whose last frames were lost.
    pub(crate) fn settled(&mut self, gently: bool) {
        let gauges: Vec<(LifeId, S::Gauges, Option<Time>)> = self
            .hosts
            .iter()
            .enumerate()
            .filter_map(|(life, host)| {
                let (mut gauges, next) = match &host.engine {
                    Engine::Node(node) => (S::gauges(node), node.next_timeout()),
                    Engine::Rig(rig) => (rig.gauges(), host.timer),
                    Engine::Transport(_) | Engine::Stranger(_) | Engine::Dead => return None,
                };
                S::spoil_gauges(self, &mut gauges);
                Some((life, gauges, next))
            })
            .collect();
        self.tell(&Fact::Settled { gauges: &gauges, gently });
    }

    /// Tells the invariants a fact, and stops the world if the fact breaks a promise.
    pub fn tell(&mut self, fact: &Fact<'_, S::Gauges, S::Own<'_>>) {
        if self.violation.is_some() {
            return;
        }
        if let Err(violation) = S::observe(self, fact) {
            self.trace.note(self.now, || format!("VIOLATION {}: {}", violation.invariant, violation.what));
            self.violation = Some(violation);
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.violation.is_some()
    }
}
