//! How the machine of a life is driven: inputs go in, outputs are carried out, the timer is set.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::{Directions, KvPoll, PeerId, TransferError, TransportError, WayEnd, WriteFence};
use kv_interop::message::Way;

use super::world::{Event, Peer, World};
use super::{LifeId, hosts};
use crate::planted::Planted;

type Out = Output<KvPoll, Resource, TransferError>;

/// Outputs that one input may cause for each session of the host, and beyond.
const OUTPUTS: (usize, usize) = (64, 400);

impl World {
    /// The timer of a machine rings.
    pub(super) fn ring(&mut self, life: LifeId, set: u64) {
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
}
