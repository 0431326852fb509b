//! The encoder cache as the network of a simulated world sees it.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::wire::{Body, Frame};
use kv_core::{PeerId, Room, SessionId, Time};
use kv_ec::{Command, EcError, EcMachine, EcMachineGauges, EcPoll, EntryGuard, Resource};

use super::ledger::{Heard, Ledger, RequestId, Sent, Session, State, is_lasting, item_of, refusal};
use super::oracle::broken;
use super::params::{EcParams, MAX_BLOCKS};
use super::planted::Plants;
use super::rounds::Round;
use super::stats::EcCounters;
use super::workload::EcAct;
use crate::kv::frames::show;
use crate::kv::host::held_of;
use crate::kv::memory::Memory;
use crate::net::cost::Held;
use crate::net::drains::Ties;
use crate::net::fact::Fact;
use crate::net::lives::{LifeId, Slot};
use crate::net::service::{InputOf, OutputOf, Service};
use crate::net::world::World;
use crate::planted::Planted;
use crate::rng::Rng;
use crate::trace::Trace;
use crate::violation::Violation;

/// A world whose hosts run the encoder cache.
pub(crate) type EcWorld = World<Ec>;

/// The state of the encoder cache in one world.
pub(crate) struct Ec {
    pub(crate) params: EcParams,
    pub(crate) ledger: Ledger,
    pub(crate) counters: EcCounters,
    pub(crate) rounds_left: usize,
    pub(crate) round: Option<Round>,
    pub(crate) plants: Plants,
    /// The moment of the last timeout of each life, and the number of timeouts at that moment.
    pub(crate) timeouts: BTreeMap<LifeId, (Time, u32)>,
}

/// The transfers of a machine: of each block, the number of the transfer that fills it; zero for none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moving {
    pub(crate) blocks: [u16; MAX_BLOCKS],
}

impl Default for Moving {
    fn default() -> Moving {
        Moving { blocks: [0; MAX_BLOCKS] }
    }
}

/// What a machine reports that it holds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EcGauges {
    pub(crate) machine: EcMachineGauges,
    pub(crate) moving: Moving,
}

/// Facts that only the encoder cache knows.
#[derive(Debug)]
pub(crate) enum EcFact<'a> {
    /// An encoder or a consumer has changed the cache of a life.
    Changed(LifeId),
    /// A session changed its state. The ledger still shows the state before the change.
    Status { life: LifeId, session: SessionId, to: EcPoll, why: Option<&'a EcError> },
    /// A session handed its slot back, with the entry if there is one.
    Back { life: LifeId, session: SessionId, guard: Option<&'a EntryGuard> },
}

impl EcWorld {
    /// The world of a seed, with all parameters drawn.
    pub(crate) fn of_entries(params: EcParams, planted: Option<Planted>, trace: Trace) -> EcWorld {
        let (physics, rounds_left) = (params.physics.clone(), params.rounds);
        let service = Ec {
            params,
            ledger: Ledger::default(),
            counters: EcCounters::default(),
            rounds_left,
            round: None,
            plants: Plants::default(),
            timeouts: BTreeMap::new(),
        };
        World::new(service, physics, planted, trace)
    }

    /// A world in which nothing is drawn at random, for the exhaustive check.
    pub(crate) fn still_entries(params: EcParams, planted: Option<Planted>) -> EcWorld {
        let world = EcWorld::of_entries(params, planted, Trace::keeping(0));
        World { rng: Rng::still(), ..world }
    }

    pub(super) fn command(&mut self, life: LifeId, name: &'static str, command: Command) {
        self.feed(life, name, InputOf::<Ec>::Command(command));
    }

    /// The invariants are told that an encoder or a consumer has changed a cache.
    pub(crate) fn changed(&mut self, life: LifeId) {
        self.tell(&Fact::Own(EcFact::Changed(life)));
    }

    /// Notes the answer of a producer, and judges a refusal in the moment in which it is told first.
    fn answers(&mut self, (producer, consumer): (LifeId, LifeId), frame: &Frame) {
        let served = match &frame.body {
            Body::Granted(granted) => Some(granted.attempt),
            Body::Progress(progress) => Some(progress.attempt),
            _ => None,
        };
        let served = served.map(|attempt| (consumer, producer, frame.conversation, attempt.0));
        if let Some(id) = served.filter(|id| self.service.ledger.sent.contains_key(id)) {
            let verdict = self.serves_what_came_before(producer, self.service.ledger.heard.get(&id));
            self.break_promise(verdict);
        }
        if let Some(sent) = served.and_then(|id| self.service.ledger.sent.get_mut(&id)) {
            sent.served = true;
        }
        let Body::Failed(failed) = &frame.body else { return };
        let id = (consumer, producer, frame.conversation, failed.attempt.0);
        let Some(sent) = self.service.ledger.sent.get_mut(&id).filter(|sent| !sent.failed) else { return };
        sent.failed = true;
        self.service.counters.refused += 1;
        let (Some(name), Some(heard)) = (refusal(&failed.cause), self.service.ledger.heard.get(&id)) else {
            return;
        };
        let Heard { item, bytes, at } = heard.clone();
        let desk = &self.service.ledger.desks[producer];
        let seen = desk.seen[item];
        let held = self.service.params.items[item];
        let is_true = match name {
            "missing" => seen.was(State::Missing, at),
            "not ready" => seen.was(State::Filling, at),
            _ => seen.was(State::Ready, at) && self.bytes_of(held) != bytes,
        };
        self.service.ledger.said.insert((consumer, producer, item, name));
        if !is_true && !self.did_at_once(producer, at) {
            let what = format!(
                "life {producer} calls image {item} {name} to life {consumer} at {}, which asked for {bytes} bytes: {seen:?}",
                self.now
            );
            self.break_promise(broken("refusals_are_true", what));
        }
    }

    /// True if the life was stopped at that time: when it goes on, it does many things at one moment in an order of its
    /// own, and only the last is seen.
    pub(super) fn did_at_once(&self, life: LifeId, at: u64) -> bool {
        self.params.driven && self.lives[life].paused_until >= at
    }

    /// Notes what a consumer asks of a producer, which is this peer of the consumer.
    fn asks(&mut self, (consumer, producer): (LifeId, LifeId), peer: PeerId, frame: &Frame) {
        let Some(talk) = self.service.ledger.name_of_asker(consumer, peer) else { return };
        if let Body::Abort(abort) = &frame.body
            && let Some(sent) = self.service.ledger.sent.get_mut(&(consumer, producer, talk, abort.attempt.0))
        {
            sent.given_up = true;
        }
        let Body::XferReq(request) = &frame.body else { return };
        let Some(item) = item_of(&request.hash) else { return };
        let as_told = (consumer, producer, frame.conversation, request.attempt.0);
        self.service.ledger.asks_in(as_told, talk);
        let id = (consumer, producer, talk, request.attempt.0);
        if self.service.ledger.sent.contains_key(&id) {
            return;
        }
        self.service.counters.requests += 1;
        let (bytes, of_round) = (request.bytes, self.service.round.is_some());
        let sent = Sent {
            item,
            bytes,
            at: self.now,
            failed: false,
            served: false,
            heard_no: false,
            given_up: false,
            of_round,
        };
        if self.planted == Some(Planted::EachSessionAsks) {
            let again = (consumer, producer, talk, request.attempt.0 + (1 << 40));
            self.service.ledger.sent.insert(again, Sent { served: true, ..sent.clone() });
        }
        self.service.ledger.sent.insert(id, sent);
        let ledger = &self.service.ledger;
        let Some(refused) = ledger.refused.get(&(consumer, producer, item, bytes)) else { return };
        // One refusal may be of a request that was given up already. Two are not.
        let refusals =
            |session: &Session| refused.iter().filter(|asked| **asked >= session.opened_at).count();
        let open = ledger.open(consumer).map(|(_, session)| session).filter(|session| session.item == item);
        if open.map(refusals).min().is_some_and(|fewest| fewest >= 2) {
            let what = format!(
                "life {consumer} asks life {producer} for {bytes} bytes of image {item}, refused for good at {refused:?}"
            );
            self.break_promise(broken("a_lasting_refusal_ends_it", what));
        }
    }

    /// Notes a frame that is about to be given to a machine, as it was sent.
    fn hears(&mut self, from: LifeId, at: LifeId, frame: &Bytes) {
        let Ok(frame) = Frame::decode(frame) else { return };
        match frame.body {
            Body::XferReq(request) => {
                let Some(item) = item_of(&request.hash) else { return };
                let as_told = (from, at, frame.conversation, request.attempt.0);
                let Some(talk) = self.service.ledger.asked_in(as_told) else { return };
                let heard = Heard { item, bytes: request.bytes, at: self.now };
                self.service.ledger.heard.entry((from, at, talk, request.attempt.0)).or_insert(heard);
                // What the producer has now counts for its answer.
                self.changed(at);
            }
            Body::Abort(abort) => {
                // The room is the number of the consumer's transfer.
                if let Room::Number(transfer) = abort.room {
                    self.service.ledger.reads_given_up.insert((from, at, transfer as u16));
                }
            }
            Body::Failed(failed) if is_lasting(&failed.cause) => {
                let id = (at, from, frame.conversation, failed.attempt.0);
                let ledger = &mut self.service.ledger;
                if ledger.called.get(&(at, from)) != Some(&frame.conversation) {
                    return;
                }
                let Some(sent) = ledger.sent.get_mut(&id) else { return };
                let (item, bytes, asked) = (sent.item, sent.bytes, sent.at);
                let again = std::mem::replace(&mut sent.heard_no, true);
                let later = |(other, about): (&RequestId, &Sent)| {
                    let is_later = about.at > asked || (other.2 == id.2 && other.3 > id.3);
                    (other.0, other.1, about.item) == (at, from, item) && is_later
                };
                // A producer that has lost its turn may be asked again: what it says of the former request comes late.
                let given_up = sent.given_up;
                if !again && !given_up && !ledger.sent.iter().any(later) {
                    ledger.refused.entry((at, from, item, bytes)).or_default().push(asked);
                }
            }
            _ => {}
        }
    }

    fn break_promise(&mut self, broken: Result<(), Violation>) {
        if let (Err(violation), None) = (broken, &self.violation) {
            self.trace.note(self.now, || format!("VIOLATION {violation}"));
            self.violation = Some(violation);
        }
    }
}

impl Service for Ec {
    type Machine = EcMachine;
    type Memory = Memory;
    type Act = EcAct;
    type Gauges = EcGauges;
    type Own<'a> = EcFact<'a>;
    type Stranger = ();

    fn boot(world: &mut EcWorld, slot: Slot) {
        world.boot_ec(slot);
    }

    fn act(world: &mut EcWorld, act: EcAct) {
        world.act_ec(act);
    }

    fn status(world: &mut EcWorld, life: LifeId, session: SessionId, to: EcPoll, why: Option<&EcError>) {
        world.tell(&Fact::Own(EcFact::Status { life, session, to, why }));
        world.note_status(life, session, to, why);
    }

    fn release(world: &mut EcWorld, life: LifeId, session: SessionId, resource: Resource) {
        if let Resource::Slot(guard) = &resource {
            world.tell(&Fact::Own(EcFact::Back { life, session, guard: guard.as_ref() }));
        }
        world.note_back(life, session, resource);
    }

    fn gauges(machine: &EcMachine) -> EcGauges {
        let mut moving = Moving::default();
        for (transfer, _, blocks) in machine.moving() {
            for block in blocks.iter() {
                if let Some(place) = moving.blocks.get_mut(block as usize) {
                    *place = transfer.0 as u16;
                }
            }
        }
        EcGauges { machine: machine.gauges(), moving }
    }

    fn held(gauges: &EcGauges) -> Held {
        held_of(&gauges.machine.node)
    }

    fn observe(world: &mut EcWorld, fact: &Fact<'_, EcGauges, EcFact<'_>>) -> Result<(), Violation> {
        world.judge(fact)
    }

    fn show(frame: &[u8]) -> String {
        show(frame)
    }

    fn begin(world: &mut EcWorld) {
        world.plan_entries();
    }

    fn place(world: &EcWorld, act: &EcAct) -> Option<LifeId> {
        world.place_of(act)
    }

    fn go_on(world: &mut EcWorld) -> bool {
        world.begin_round()
    }

    fn patience(world: &EcWorld) -> u64 {
        1 + world.service.params.rounds as u64
    }

    fn is_gentle(world: &EcWorld) -> bool {
        world.service.params.lossless
    }

    fn shut_down(world: &mut EcWorld, life: LifeId) {
        world.command(life, "shutdown", Command::Shutdown);
    }

    fn drain(world: &mut EcWorld, life: LifeId) {
        if world.planted != Some(Planted::DrainUnheardByEntries) {
            world.command(life, "drain", Command::Drain);
        }
    }

    fn ties(gauges: &EcGauges) -> Ties {
        let EcMachineGauges { answers, transfers, node, .. } = gauges.machine;
        Ties { awaits_peers: false, is_busy: answers + transfers > 0, owes_answers: node.owed > 0 }
    }

    fn spoil_outputs(world: &mut EcWorld, life: LifeId, outputs: Vec<OutputOf<Ec>>) -> Vec<OutputOf<Ec>> {
        world.sabotage_entries(life, outputs)
    }

    fn spoil_sent(world: &mut EcWorld, way: (LifeId, LifeId), peer: PeerId, bytes: Bytes) -> Option<Bytes> {
        let Ok(frame) = Frame::decode(&bytes) else { return Some(bytes) };
        let ledger = &mut world.service.ledger;
        match &frame.body {
            Body::Hello(hello) => ledger.tells_name(way, peer, hello.conversation),
            Body::Welcome(welcome) => ledger.tells_name(way, peer, welcome.conversation),
            _ => {}
        }
        let (frame, bytes) = world.sabotage_word(way, frame, bytes);
        world.asks(way, peer, &frame);
        world.answers(way, &frame);
        bytes
    }

    fn spoil_arrival(world: &mut EcWorld, way: (LifeId, LifeId), at: LifeId, bytes: Bytes) -> Option<Bytes> {
        world.hears(way.0, at, &bytes);
        Some(world.sabotage_hearing(way.0, at, bytes))
    }
}
