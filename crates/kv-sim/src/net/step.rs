//! One step of one host: its machine gets an input, and its outputs are carried out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kv_core::machine::{Input, Machine, Output};
use kv_core::{BootstrapError, Origin, Time, TransportEvent};

use crate::net::calendar::{Event, Report};
use crate::net::cost::Cost;
use crate::net::fact::{Effects, Fact};
use crate::net::host::Engine;
use crate::net::lives::{LifeId, ROADS, metadata_by, road_and_life, roads_of};
use crate::net::rig::Turned;
use crate::net::service::Service;
use crate::net::service::{InputOf, OutputOf};
use crate::net::world::World;
use crate::planted::Planted;

/// The result of the turns of a host's driver.
type TurnedOf<S> = Turned<<S as Service>::Machine, <S as Service>::Gauges>;

impl<S: Service> World<S> {
    /// Gives a machine an input, and carries out its outputs.
    pub fn feed(&mut self, life: LifeId, name: &'static str, input: InputOf<S>) -> Effects {
        let mut effects = Effects::default();
        if self.violation.is_some() {
            return effects;
        }
        self.trace.step(self.now, life, name);
        self.counters.inputs += 1;
        let turned = match self.turn(life, input) {
            Ok(Some(turned)) => turned,
            Ok(None) => return effects,
            Err(message) => {
                self.tell(&Fact::Panicked { life, message: &message });
                return effects;
            }
        };
        let Turned { mut events, mut outputs, now, mut next, mut gauges, mut costs, restless } = turned;
        self.hosts[life].held = S::held(&gauges);
        if restless {
            self.tell(&Fact::Restless);
        }
        if self.planted.is_some() {
            self.amplify(&mut costs);
            self.change_ways(life, &mut outputs);
            events = S::spoil_events(self, life, events);
            outputs = S::spoil_outputs(self, life, outputs);
        }
        for event in &events {
            self.trace.note(self.now, || format!("  life {life} at {event}"));
            S::told(self, life, event);
        }
        for cost in costs {
            self.tell(&Fact::Cost { life, input: name, cost });
        }
        for output in outputs {
            self.carry_out(life, output, &mut effects);
            if self.violation.is_some() {
                return effects;
            }
        }
        if self.planted.is_some() {
            next = self.next_timeout(next, now);
            S::spoil_gauges(self, &mut gauges);
        }
        self.set_timer(life, next);
        self.tell(&Fact::Stepped { life, input: name, now, next, gauges });
        self.note_drain(life, &gauges);
        effects
    }

    /// Lets a machine handle an input. `None` if the host has no machine that can handle the input now; an
    /// error if the machine panics.
    fn turn(&mut self, life: LifeId, input: InputOf<S>) -> Result<Option<TurnedOf<S>>, String> {
        let (global, record) = (self.now, &self.lives[life]);
        let (clock, paused, now) = (record.clock, record.paused_until > global, record.clock.local(global));
        let panics = self.planted == Some(Planted::Panics) && self.counters.inputs == 20;
        let host = &mut self.hosts[life];
        let (stopped, held) = (host.stopped, host.held);
        let planted = || {
            if panics {
                std::panic::resume_unwind(Box::new("planted"));
            }
        };
        let turned = match &mut host.engine {
            Engine::Dead | Engine::Stranger(_) => return Ok(None),
            Engine::Transport(inbox) => {
                inbox.extend(event_of(input));
                return Ok(None);
            }
            Engine::Rig(rig) if paused => {
                rig.tell(global, input);
                return Ok(None);
            }
            Engine::Rig(rig) => {
                host.stopped = None;
                catch_unwind(AssertUnwindSafe(|| {
                    planted();
                    rig.tell(global, input);
                    rig.turn(global, clock, stopped)
                }))
            }
            Engine::Node(node) => catch_unwind(AssertUnwindSafe(|| {
                planted();
                let mut cost = Cost::of(&input, held);
                node.handle(now, input);
                let outputs: Vec<OutputOf<S>> = std::iter::from_fn(|| node.poll_output()).collect();
                outputs.iter().for_each(|output| cost.add(output));
                let events = std::iter::from_fn(|| node.poll_trace()).collect();
                let (next, gauges) = (node.next_timeout(), S::gauges(node));
                cost.held = cost.held.or(S::held(&gauges));
                Turned { events, outputs, now, next, gauges, costs: vec![cost], restless: false }
            })),
        };
        turned.map(Some).map_err(|payload| {
            let text = payload.downcast_ref::<String>().cloned();
            text.or(payload.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
        })
    }

    /// With a planted bug: as if each byte of a question were answered with a frame.
    fn amplify(&self, costs: &mut [Cost]) {
        if self.planted == Some(Planted::Amplifies) {
            for cost in costs.iter_mut().filter(|cost| cost.of_peer) {
                cost.outputs += cost.input;
            }
        }
    }

    /// With the planted bug, opens a connection that was lost over the other transport, if both hosts have
    /// it.
    fn change_ways(&self, life: LifeId, outputs: &mut [OutputOf<S>]) {
        if self.planted != Some(Planted::WayChanged) {
            return;
        }
        let has_both = |life| roads_of(self.params.seed, &self.params.ways, life).len() == ROADS.len();
        for output in outputs {
            if let Output::Connect { peer, transport } = output
                && self.hosts[life].conns.contains_key(peer)
                && let Some((road, target)) = road_and_life(&transport.metadata)
                && has_both(life)
                && has_both(target)
            {
                transport.metadata = metadata_by(ROADS.len() - 1 - road, target);
            }
        }
    }

    /// With a planted bug: another timer than the machine wants.
    fn next_timeout(&self, next: Option<Time>, now: Time) -> Option<Time> {
        match self.planted {
            Some(Planted::SpinningTimer) => next.map(|next| next.min(now)),
            Some(Planted::RestlessTimer) => {
                let always = now + Duration::from_millis(500);
                Some(next.map_or(always, |next| next.min(always)))
            }
            _ => next,
        }
    }

    fn carry_out(&mut self, life: LifeId, output: OutputOf<S>, effects: &mut Effects) {
        match output {
            Output::Connect { peer, transport } => self.connect(life, peer, &transport.metadata),
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
                S::status(self, life, session, poll, failure.as_deref());
            }
            Output::Release { session, resource } => {
                effects.releases += 1;
                S::release(self, life, session, resource);
            }
        }
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
        let due = self.lives[life].clock.global(next);
        if due == u64::MAX {
            return;
        }
        let late = self.rng.below(self.params.lateness + 1);
        self.calendar.enter(due.max(self.now) + late, Event::Timer { life, generation });
    }

    pub(crate) fn ring(&mut self, life: LifeId, generation: u32) {
        let host = &mut self.hosts[life];
        if matches!(host.engine, Engine::Dead) || host.timer_generation != generation {
            return;
        }
        self.due(life);
    }

    /// Rings the timer of a machine that is due.
    pub(crate) fn due(&mut self, life: LifeId) {
        self.hosts[life].timer = None;
        if S::is_deaf(self, life) {
            self.tell(&Fact::Unheard { life });
        } else {
            self.feed(life, "timeout", Input::Timeout);
        }
    }

    /// Gives a machine what its transport or its bootstrap client reports.
    pub(crate) fn report(&mut self, life: LifeId, report: Report) {
        if matches!(self.hosts[life].engine, Engine::Dead) {
            return;
        }
        match report {
            Report::Posted { post, result } => {
                self.lives[life].posts_failed += u64::from(result.is_err());
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
                self.note_answer(life, &ranks);
                self.feed(life, "found", Input::Found { lookup, ranks });
            }
            Report::LookupFailed { lookup, error } => {
                if error == BootstrapError::Draining {
                    self.lives[life].told_of_a_drain = Some(self.now);
                }
                let invented = self.planted == Some(Planted::DrainInvented);
                let error = if invented { BootstrapError::Draining } else { error };
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
}

/// The transport event that corresponds to an input, for a host without a machine.
fn event_of<C>(input: Input<C>) -> Option<TransportEvent> {
    match input {
        Input::Frame { from, frame } => Some(TransportEvent::Frame { from, frame }),
        Input::Posted { post, result } => Some(TransportEvent::Posted { post, result }),
        Input::PeerGone { peer, end } => Some(TransportEvent::PeerGone { peer, end }),
        Input::Revoked { peer } => Some(TransportEvent::Revoked { peer }),
        _ => None,
    }
}
