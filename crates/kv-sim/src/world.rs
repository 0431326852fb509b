//! One world: hosts, wires and clocks, driven by one calendar.
//!
//! ```text
//! calendar ─▶ event ─▶ host's node ─▶ outputs ─┬▶ plane.rs      frames and posts ─▶ calendar
//!                                              ├▶ rendezvous.rs lookups          ─▶ calendar
//!                                              └▶ scheduler.rs  states, pages    ─▶ calendar
//! every step ─▶ facts ─▶ invariants
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_core::proto::{Input, NodeGauges, Output, Resource};
use kv_core::{KvPoll, Origin, PlaneEvent, SessionId, Time, TransferError};

use crate::calendar::{Calendar, Check, Event, Report};
use crate::chaos::Net;
use crate::clock::{MS, SEC};
use crate::cost::{Cost, Held};
use crate::cover::Seen;
use crate::fact::{Effects, Fact, View};
use crate::flight::Flight;
use crate::host::{Engine, Host};
use crate::invariants::{Invariants, Violation};
use crate::ledger::{Ledger, LegId, LifeId};
use crate::memory::Memory;
use crate::params::Params;
use crate::planted::{Planted, Sabotage};
use crate::rendezvous::BootstrapServers;
use crate::rig::Turned;
use crate::rng::Rng;
use crate::scheduler::{Plan, Request};
use crate::stats::{Counters, cause_name};
use crate::trace::Trace;
use crate::ways::{Revoking, Way};

/// Most events of one world: far more than any needs that comes to rest.
const MAX_EVENTS: u64 = 2_000_000;
/// Longest time that a world may need to come to rest once it is healed.
const MAX_REST: u64 = 120 * SEC;

/// One world.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) params: Params,
    pub(crate) rng: Rng,
    /// Global time, which nobody in the world knows.
    pub(crate) now: u64,
    pub(crate) calendar: Calendar,
    pub(crate) hosts: Vec<Host>,
    /// The life of each slot; `None` while it is down.
    pub(crate) slots: Vec<Option<LifeId>>,
    pub(crate) memories: Vec<Memory>,
    pub(crate) ledger: Ledger,
    pub(crate) flights: Vec<Flight>,
    /// Every connection there ever was.
    pub(crate) ways: Vec<Way>,
    pub(crate) revoking: Vec<Revoking>,
    pub(crate) net: Net,
    pub(crate) servers: BootstrapServers,
    pub(crate) requests: Vec<Request>,
    /// Of each leg, what its scheduler still means to do.
    pub(crate) plans: Vec<Plan>,
    /// When faults stopped.
    pub(crate) healed: Option<u64>,
    pub(crate) to_serve: usize,
    pub(crate) counters: Counters,
    pub(crate) trace: Trace,
    pub(crate) planted: Option<Planted>,
    pub(crate) seen: Seen,
    pub(crate) sabotage: Sabotage,
    invariants: Invariants,
    pub(crate) violation: Option<Violation>,
}

/// What became of a world.
pub(crate) struct Outcome {
    pub(crate) violation: Option<Violation>,
    pub(crate) counters: Counters,
    pub(crate) trace: Trace,
    pub(crate) ended_at: u64,
}

impl World {
    /// A world in which nothing has happened yet.
    pub(crate) fn new(params: Params, planted: Option<Planted>, trace: Trace) -> World {
        let rng = Rng::new(params.seed);
        let hosts = params.hosts();
        World {
            rng,
            now: 0,
            calendar: Calendar::default(),
            hosts: Vec::new(),
            slots: vec![None; hosts],
            memories: Vec::new(),
            ledger: Ledger::new(),
            flights: Vec::new(),
            ways: Vec::new(),
            revoking: Vec::new(),
            net: Net::new(hosts, &params.net),
            servers: BootstrapServers::default(),
            requests: Vec::new(),
            plans: Vec::new(),
            healed: None,
            to_serve: params.heal_requests,
            counters: Counters {
                seeds: 1,
                lossless: u64::from(params.lossless),
                drizzle: u64::from(params.drizzle),
                driven: u64::from(params.driven),
                unequal: u64::from(params.unequal.is_some()),
                ..Counters::default()
            },
            trace,
            planted,
            seen: Seen::default(),
            sabotage: Sabotage::default(),
            invariants: Invariants::all(),
            violation: None,
            params,
        }
    }

    /// A world of planes only: no nodes, no schedulers, nothing that is promised.
    pub(crate) fn of_planes(params: Params) -> World {
        World { invariants: Invariants::none(), ..World::new(params, None, Trace::keeping(0)) }
    }

    /// A world whose events somebody else chooses: nothing is drawn. With a bug planted, only what it must
    /// break is looked at.
    pub(crate) fn still(params: Params, planted: Option<Planted>) -> World {
        let meant = planted.map_or_else(Invariants::all, |planted| Invariants::only(planted.caught_by()));
        World { rng: Rng::still(), invariants: meant, ..World::new(params, planted, Trace::keeping(0)) }
    }

    /// Lets this much time pass.
    pub(crate) fn advance(&mut self, span: u64) {
        let until = self.now + span;
        while let Some((at, event)) = self.calendar.next_until(until) {
            self.now = self.now.max(at);
            self.dispatch(event);
        }
        self.now = until;
    }

    /// Lets everything happen.
    pub(crate) fn run(mut self, max_events: Option<u64>) -> Outcome {
        for slot in 0..self.params.hosts() {
            self.boot(slot);
        }
        self.plan_requests();
        self.plan_chaos();
        self.calendar.enter(self.params.fault_span, Event::Heal);
        while self.violation.is_none() {
            if max_events.is_some_and(|most| self.counters.events >= most) {
                break;
            }
            let Some((at, event)) = self.calendar.next() else {
                self.settled(self.params.lossless || self.params.drizzle);
                if self.to_serve == 0 || self.violation.is_some() {
                    break;
                }
                self.serve_one();
                continue;
            };
            debug_assert!(at >= self.now);
            self.now = at;
            self.counters.events += 1;
            let rest_by = self.healed.map_or(u64::MAX, |healed| {
                healed + self.params.chaos.stop_max + MAX_REST * (1 + self.params.heal_requests as u64)
            });
            if self.counters.events > MAX_EVENTS || self.now > rest_by {
                self.tell(&Fact::Restless);
                break;
            }
            self.dispatch(event);
        }
        Outcome { violation: self.violation, counters: self.counters, trace: self.trace, ended_at: self.now }
    }

    fn dispatch(&mut self, event: Event) {
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
            Event::Frame { from, to, bytes } => self.deliver(from, to, bytes),
            Event::Report { life, report } => self.report(life, report),
            Event::Move { flight, upto } => self.move_pieces(flight, upto),
            Event::Begin { flight } => self.begin_slice(flight),
            Event::End { flight } => self.end_slice(flight),
            Event::Land { flight } => self.land(flight),
            Event::Turn { life } => {
                self.feed(life, "turn", Input::Timeout);
            }
            Event::Act { leg, act } => self.act(leg, act),
            Event::Strike(strike) => self.strike(strike),
            Event::Check(check) => self.check(check),
            Event::Heal => self.heal(),
            Event::Serve => self.serve_one(),
        }
    }

    fn paused(&self, event: &Event) -> Option<u64> {
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
            Event::Act { leg, .. } => self.ledger.legs[leg].life.or(self.slots[self.ledger.legs[leg].slot])?,
            _ => return None,
        };
        let until = self.ledger.lives[life].paused_until;
        (until > self.now && self.ledger.lives[life].alive).then_some(until)
    }

    /// Gives a node an input and carries out what it wants.
    pub(crate) fn feed(&mut self, life: LifeId, name: &'static str, input: Input) -> Effects {
        if self.violation.is_some() {
            return Effects::default();
        }
        let now = self.ledger.lives[life].clock.local(self.now);
        self.trace.step(self.now, life, name);
        self.counters.inputs += 1;
        let inputs = self.counters.inputs;
        let planted = self.planted;
        let global = self.now;
        let record = &self.ledger.lives[life];
        let (clock, paused) = (record.clock, record.paused_until > global);
        let host = &mut self.hosts[life];
        let stopped = host.stopped;
        let turned = match &mut host.engine {
            Engine::Dead | Engine::Liar(_) => return Effects::default(),
            Engine::Plane(inbox) => {
                inbox.extend(event_of(input));
                return Effects::default();
            }
            Engine::Rig(rig) if paused => {
                rig.tell(global, input);
                return Effects::default();
            }
            Engine::Rig(rig) => {
                host.stopped = None;
                catch_unwind(AssertUnwindSafe(|| {
                    planted.inspect(|planted| planted.panic_at(inputs));
                    rig.tell(global, input);
                    rig.turn(global, clock, stopped)
                }))
            }
            Engine::Node(node) => catch_unwind(AssertUnwindSafe(|| {
                planted.inspect(|planted| planted.panic_at(inputs));
                let mut cost = Cost::of(&input, host.held);
                node.handle(now, input);
                let outputs: Vec<Output> = std::iter::from_fn(|| node.poll_output()).collect();
                outputs.iter().for_each(|output| cost.add(output));
                let (next, gauges) = (node.next_timeout(), node.gauges());
                cost.held = cost.held.or(Held::of(&gauges));
                Turned { outputs, now, next, gauges, costs: vec![cost], restless: false }
            })),
        };
        let turned = match turned {
            Ok(turned) => turned,
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let message = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
                self.tell(&Fact::Panicked { life, message });
                return Effects::default();
            }
        };
        let Turned { mut outputs, now, mut next, mut gauges, mut costs, restless } = turned;
        self.hosts[life].held = Held::of(&gauges);
        if restless {
            self.tell(&Fact::Restless);
        }
        if let Some(planted) = planted {
            planted.costs(&mut costs);
            outputs = self.sabotage_outputs(life, outputs);
        }
        for cost in costs {
            self.tell(&Fact::Cost { life, input: name, cost });
        }
        let mut effects = Effects::default();
        for output in outputs {
            self.carry_out(life, output, &mut effects);
            if self.violation.is_some() {
                return effects;
            }
        }
        if let Some(planted) = planted {
            next = planted.next_timeout(next, now);
            planted.gauges(&mut gauges);
        }
        self.set_timer(life, next);
        self.tell(&Fact::Stepped { life, input: name, now, next, gauges });
        effects
    }

    fn carry_out(&mut self, life: LifeId, output: Output, effects: &mut Effects) {
        match output {
            Output::Connect { peer, metadata } => self.connect(life, peer, &metadata),
            Output::Disconnect { peer } => {
                self.trace.note(self.now, || format!("  life {life} disconnects peer {peer}"));
                self.hosts[life].conns.remove(&peer);
            }
            Output::Send { peer, frame } => self.send(life, peer, frame),
            Output::Post { peer, post } => {
                effects.posts += 1;
                self.post(life, peer, post);
            }
            Output::Permit { peer, until } => self.permit(life, peer, until),
            Output::Revoke { peer } => self.revoke(life, peer),
            Output::Cancel { post } => {
                effects.cancels += 1;
                self.cancel(life, post);
            }
            Output::Lookup { lookup, addr, query } => self.lookup(life, lookup, &addr, &query),
            Output::Status { session, poll, failure } => {
                effects.statuses += 1;
                self.status(life, session, poll, failure.as_deref());
            }
            Output::Release { session, resource: Resource::Pages(pages) } => {
                effects.releases += 1;
                self.release(life, session, pages);
            }
            Output::Release { session, resource: Resource::Groups { groups, skipped } } => {
                effects.releases += 1;
                self.release_items(life, session, groups, &skipped);
            }
        }
    }

    fn status(&mut self, life: LifeId, session: SessionId, to: KvPoll, failure: Option<&TransferError>) {
        self.trace.status(self.now, life, session, to, failure);
        let Some(&leg) = self.hosts[life].sessions.get(&session) else {
            return self.tell(&Fact::StrangeStatus { life, session, to });
        };
        self.tell(&Fact::Status { leg, to, failure });
        let known = &mut self.ledger.legs[leg];
        known.before = known.poll;
        known.poll = to;
        if !to.is_terminal() {
            return self.state_changed(leg, to);
        }
        known.ended_at = Some(self.now);
        self.ledger.last_change = self.now;
        self.ledger.lives[life].open_sessions = self.ledger.lives[life].open_sessions.saturating_sub(1);
        if to == KvPoll::Success {
            self.counters.successes += 1;
        } else {
            self.counters.failed += 1;
        }
        if let Some(failure) = failure {
            self.ledger.legs[leg].told = Some(failure.cause.for_peer());
            *self.counters.failures.entry(cause_name(&failure.cause)).or_default() += 1;
        }
        self.state_changed(leg, to);
    }

    fn set_timer(&mut self, life: LifeId, next: Option<Time>) {
        let host = &mut self.hosts[life];
        if host.timer == next {
            return;
        }
        host.timer = next;
        host.timer_generation += 1;
        let Some(next) = next else { return };
        let generation = host.timer_generation;
        let due = self.ledger.lives[life].clock.global(next);
        if due == u64::MAX {
            return;
        }
        let late = self.rng.below(self.params.lateness + 1);
        self.calendar.enter(due.max(self.now) + late, Event::Timer { life, generation });
    }

    fn ring(&mut self, life: LifeId, generation: u32) {
        let host = &mut self.hosts[life];
        if matches!(host.engine, Engine::Dead) || host.timer_generation != generation {
            return;
        }
        self.due(life);
    }

    /// The moment has come for which a node has set its timer.
    pub(crate) fn due(&mut self, life: LifeId) {
        self.hosts[life].timer = None;
        if !self.is_deaf(life) {
            self.feed(life, "timeout", Input::Timeout);
        }
        self.tell(&Fact::Due { life });
    }

    /// What surrounds a node tells it something.
    pub(crate) fn report(&mut self, life: LifeId, report: Report) {
        if matches!(self.hosts[life].engine, Engine::Dead) {
            return;
        }
        match report {
            Report::Posted { post, result } => {
                self.ledger.lives[life].posts_failed += u64::from(result.is_err());
                self.trace.note(self.now, || format!("  post {post} of life {life}: {result:?}"));
                self.feed(life, "posted", Input::Posted { post, result });
            }
            Report::Connected { peer, way } => self.report_connected(life, peer, way),
            Report::ConnectFailed { peer, way } => self.report_connect_failed(life, peer, way),
            Report::PeerGone { peer, way } => self.report_peer_gone(life, peer, way),
            Report::Revoked { peer } => {
                self.feed(life, "revoked", Input::Revoked { peer });
            }
            Report::Found { lookup, ranks } => {
                self.feed(life, "found", Input::Found { lookup, ranks });
            }
            Report::LookupFailed { lookup, error } => {
                self.feed(life, "lookup failed", Input::LookupFailed { lookup, error });
            }
            Report::SpuriousTimeout => {
                self.counters.spurious_timeouts += 1;
                self.feed(life, "spurious timeout", Input::Timeout);
            }
            Report::Garbage { bytes } => {
                self.counters.garbage += 1;
                self.feed(life, "garbage", Input::Frame { from: Origin(0), frame: bytes });
            }
        }
    }

    fn check(&mut self, check: Check) {
        if let Check::Deadline { leg } | Check::Told { leg, .. } = check
            && let Some(life) = self.ledger.legs[leg].life
        {
            // A host that was paused over its deadline notices when it continues.
            let resumed = self.ledger.lives[life].paused_until + self.slack();
            if self.ledger.lives[life].alive && resumed > self.now {
                self.calendar.enter(resumed, Event::Check(check));
                return;
            }
        }
        self.tell(&Fact::Check(check));
    }

    /// How late a timer may take effect.
    pub(crate) fn slack(&self) -> u64 {
        2 * self.params.lateness + MS
    }

    /// The moment after which a session must have ended.
    pub(crate) fn watch_deadline(&mut self, leg: LegId, life: LifeId, deadline: Time) {
        let due = self.ledger.lives[life].clock.global(deadline);
        let at = due.saturating_add(self.slack());
        self.calendar.enter(at, Event::Check(Check::Deadline { leg }));
    }

    /// Nothing will happen any more. `gently` says that nobody has a reason to remember a peer that has lost
    /// its last words.
    pub(crate) fn settled(&mut self, gently: bool) {
        let gauges: Vec<(LifeId, NodeGauges, Option<Time>)> = self
            .hosts
            .iter()
            .enumerate()
            .filter_map(|(life, host)| {
                let (mut gauges, next) = match &host.engine {
                    Engine::Node(node) => (node.gauges(), node.next_timeout()),
                    Engine::Rig(rig) => (rig.gauges(), host.timer),
                    Engine::Plane(_) | Engine::Liar(_) | Engine::Dead => return None,
                };
                if let Some(planted) = self.planted {
                    planted.gauges(&mut gauges);
                }
                Some((life, gauges, next))
            })
            .collect();
        self.tell(&Fact::Settled { gauges: &gauges, gently });
    }

    /// Tells all invariants, and stops the world if one is broken.
    pub(crate) fn tell(&mut self, fact: &Fact<'_>) {
        if self.violation.is_some() {
            return;
        }
        let view = View {
            now: self.now,
            params: &self.params,
            ledger: &self.ledger,
            memories: &self.memories,
            flights: &self.flights,
            ways: &self.ways,
            healed: self.healed.is_some(),
        };
        if let Err(violation) = self.invariants.observe(&view, fact) {
            self.trace.note(self.now, || format!("VIOLATION {}: {}", violation.invariant, violation.what));
            self.violation = Some(violation);
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.violation.is_some()
    }
}

/// What a plane tells its owner, where a node would be told this.
fn event_of(input: Input) -> Option<PlaneEvent> {
    match input {
        Input::Frame { from, frame } => Some(PlaneEvent::Frame { from, frame }),
        Input::Posted { post, result } => Some(PlaneEvent::Posted { post, result }),
        Input::PeerGone { peer, end } => Some(PlaneEvent::PeerGone { peer, end }),
        Input::Revoked { peer } => Some(PlaneEvent::Revoked { peer }),
        _ => None,
    }
}
