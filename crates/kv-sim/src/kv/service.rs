//! The KV cache service as the network of a simulated world sees it.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeGauges, Output, Resource};
use kv_core::wire::VERSIONS;
use kv_core::{KvPoll, Op, PeerId, SessionId, TransferError};

use crate::clock::MS;
use crate::kv::act::KvAct;
use crate::kv::attempts::Attempts;
use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::frames::show;
use crate::kv::host::{Conversations, Stock, held_of};
use crate::kv::invariants::Invariants;
use crate::kv::ledger::Ledger;
use crate::kv::memory::Memory;
use crate::kv::params::{Faults, Params};
use crate::kv::request::{Plan, Request};
use crate::kv::sabotage::Sabotage;
use crate::kv::seen::Seen;
use crate::kv::stats::KvCounters;
use crate::net::calendar::Event;
use crate::net::cost::Held;
use crate::net::drains::Ties;
use crate::net::flight::Piece;
use crate::net::lives::{LifeId, Slot};
use crate::net::service::{EventOf, Service};
use crate::net::world::World;
use crate::planted::Planted;
use crate::rng::Rng;
use crate::trace::Trace;
use crate::violation::Violation;

/// A world whose hosts run the KV cache service.
pub(crate) type KvWorld = World<Kv>;

/// The state of the KV cache service in one world.
#[derive(Clone)]
pub(crate) struct Kv {
    pub(crate) params: Params,
    pub(crate) ledger: Ledger,
    /// The resources of the scheduler of each life.
    pub(crate) stock: Vec<Stock>,
    pub(crate) requests: Vec<Request>,
    /// For each leg, what its scheduler has yet to do.
    pub(crate) plans: Vec<Plan>,
    pub(crate) to_serve: usize,
    pub(crate) counters: KvCounters,
    pub(crate) seen: Seen,
    pub(crate) sabotage: Sabotage,
    /// When a life was first refused by another that drains, in global time.
    pub(crate) refused: BTreeMap<(LifeId, LifeId), u64>,
    /// In worlds with drains: the attempts at which hosts have registered.
    pub(crate) attempts: Attempts,
    invariants: Invariants,
}

impl Kv {
    /// A service without requests.
    pub(crate) fn new(params: Params, invariants: Invariants) -> Kv {
        Kv {
            ledger: Ledger::new(),
            stock: Vec::new(),
            requests: Vec::new(),
            plans: Vec::new(),
            to_serve: params.heal_requests,
            counters: KvCounters {
                lossless: u64::from(params.faults == Faults::None),
                drizzle: u64::from(params.faults == Faults::Losses),
                frayed: u64::from(params.faults == Faults::Breaks),
                unequal: u64::from(params.unequal.is_some()),
                ..KvCounters::default()
            },
            seen: Seen::default(),
            sabotage: Sabotage::default(),
            refused: BTreeMap::new(),
            attempts: Attempts::default(),
            invariants,
            params,
        }
    }
}

impl KvWorld {
    /// The world of a seed, with all parameters drawn.
    pub(crate) fn drawn(params: Params, planted: Option<Planted>, trace: Trace) -> KvWorld {
        let physics = params.physics.clone();
        World::new(Kv::new(params, Invariants::all()), physics, planted, trace)
    }

    /// A world of transports only: no nodes, no schedulers, nothing that is promised.
    pub(crate) fn of_transports(params: Params) -> KvWorld {
        let physics = params.physics.clone();
        World::new(Kv::new(params, Invariants::none()), physics, None, Trace::keeping(0))
    }

    /// A world in which nothing is drawn at random, for the exhaustive check. With a planted bug, only the
    /// invariant that must catch the bug is checked.
    pub(crate) fn still(params: Params, planted: Option<Planted>) -> KvWorld {
        let physics = params.physics.clone();
        let meant = planted.map_or_else(Invariants::all, |planted| Invariants::only(planted.caught_by()));
        let world = World::new(Kv::new(params, meant), physics, planted, Trace::keeping(0));
        World { rng: Rng::still(), ..world }
    }

    /// Plans an act for this moment.
    pub(crate) fn enter(&mut self, at: u64, act: KvAct) {
        self.calendar.enter(at, Event::Act(act));
    }
}

impl Service for Kv {
    type Machine = Node;
    type Memory = Memory;
    type Act = KvAct;
    type Gauges = NodeGauges;
    type Own<'a> = KvFact<'a>;
    type Stranger = Conversations;

    fn boot(world: &mut KvWorld, slot: Slot) {
        world.boot_kv(slot);
    }

    fn act(world: &mut KvWorld, act: KvAct) {
        match act {
            KvAct::Do { leg, act } => world.act(leg, act),
            KvAct::Check(check) => world.check(check),
            KvAct::Serve => world.serve_one(),
        }
    }

    fn status(
        world: &mut KvWorld,
        life: LifeId,
        session: SessionId,
        to: KvPoll,
        why: Option<&TransferError>,
    ) {
        world.status(life, session, to, why);
    }

    fn release(world: &mut KvWorld, life: LifeId, session: SessionId, resource: Resource) {
        match resource {
            Resource::Pages(pages) => world.release(life, session, pages),
            Resource::RequestCacheGroups { groups, skipped } => {
                world.release_items(life, session, groups, &skipped)
            }
        }
    }

    fn gauges(node: &Node) -> NodeGauges {
        node.gauges()
    }

    fn held(gauges: &NodeGauges) -> Held {
        held_of(gauges)
    }

    fn observe(world: &mut KvWorld, fact: &Fact<'_>) -> Result<(), Violation> {
        let Kv { params, ledger, invariants, .. } = &mut world.service;
        let view = View {
            now: world.now,
            params,
            lives: &world.lives,
            last_change: world.last_change,
            ledger,
            memories: &world.memories,
            flights: &world.flights,
            ways: &world.ways,
            healed: world.healed.is_some(),
        };
        invariants.observe(&view, fact)
    }

    fn show(frame: &[u8]) -> String {
        show(frame)
    }

    fn told(world: &mut KvWorld, life: LifeId, event: &EventOf<Kv>) {
        world.tell(&Fact::Own(KvFact::Told { life, event }));
    }

    fn begin(world: &mut KvWorld) {
        world.plan_requests();
    }

    fn place(world: &KvWorld, act: &KvAct) -> Option<LifeId> {
        let KvAct::Do { leg, .. } = *act else { return None };
        let leg = &world.service.ledger.legs[leg];
        leg.life.or(world.slots[leg.slot])
    }

    fn go_on(world: &mut KvWorld) -> bool {
        let more = world.service.to_serve > 0;
        world.serve_one();
        more
    }

    fn patience(world: &KvWorld) -> u64 {
        1 + world.service.params.heal_requests as u64
    }

    fn is_gentle(world: &KvWorld) -> bool {
        world.service.params.is_gentle()
    }

    fn spares_hosts(world: &KvWorld) -> bool {
        world.service.params.spares_hosts()
    }

    fn heal(world: &mut KvWorld) {
        world.end_liars();
    }

    fn healed(world: &mut KvWorld) {
        if world.service.params.heal_eager {
            for serve in 0..world.service.to_serve as u64 {
                world.enter(world.now + world.grace() + 10 * MS * serve, KvAct::Serve);
            }
        }
    }

    fn shut_down(world: &mut KvWorld, life: LifeId) {
        world.feed(life, "shutdown", Input::Command(Command::Shutdown));
    }

    fn drain(world: &mut KvWorld, life: LifeId) {
        world.begin_drain(life);
    }

    fn left(world: &mut KvWorld, life: LifeId) {
        world.tell(&Fact::Own(KvFact::Left { life }));
    }

    fn ties(gauges: &NodeGauges) -> Ties {
        Ties { awaits_peers: gauges.awaiting > 0, is_busy: false, owes_answers: gauges.owed > 0 }
    }

    /// A host whose clock limits what it may do (a reader) may have a clock that jumps ahead. A host that
    /// waits for a time to pass (a sender with a lease) may not.
    fn may_jump(world: &KvWorld, slot: Slot) -> bool {
        let params = &world.service.params;
        params.sched.pull == if slot < params.physics.prefills { 0 } else { 1000 }
    }

    fn sent(world: &mut KvWorld, life: LifeId, frame: &Bytes) {
        world.tell_granted(life, frame);
    }

    fn overheard(world: &mut KvWorld, from: Slot, to: LifeId, frame: &Bytes) {
        const HELLO: u8 = 1;
        let liars = world.service.params.physics.net.liars;
        if frame.get(2) == Some(&HELLO) && world.healed.is_none() && world.rng.chance(liars) {
            world.greet_as_liar(from, to, frame);
        }
    }

    fn tell_stranger(world: &mut KvWorld, from: LifeId, liar: LifeId, frame: &Bytes) {
        world.tell_liar(from, liar, frame);
    }

    fn arrives(world: &mut KvWorld, from: LifeId, at: LifeId, frame: &Bytes) {
        world.cover_frame(from, at, frame);
        world.cover_lease(at, frame);
    }

    fn disguise(noise: &mut [u8]) {
        if let [first, second, third, ..] = noise {
            (*first, *second, *third) = (0x94, VERSIONS.max * (*second % 2), *third % 24);
        }
    }

    fn spoil_outputs(world: &mut KvWorld, life: LifeId, outputs: Vec<Output>) -> Vec<Output> {
        world.sabotage_outputs(life, outputs)
    }

    fn spoil_events(world: &mut KvWorld, _life: LifeId, events: Vec<EventOf<Kv>>) -> Vec<EventOf<Kv>> {
        world.sabotage_events(events)
    }

    fn spoil_gauges(world: &KvWorld, gauges: &mut NodeGauges) {
        if world.planted == Some(Planted::LeakedSession) {
            gauges.senders += 1;
        }
    }

    fn spoil_sent(
        world: &mut KvWorld,
        (from, to): (LifeId, LifeId),
        _peer: PeerId,
        frame: Bytes,
    ) -> Option<Bytes> {
        world.tell_registered(from, to, &frame);
        world.sabotage_frame(from, to, frame)
    }

    fn spoil_arrival(world: &mut KvWorld, way: (LifeId, LifeId), at: LifeId, frame: Bytes) -> Option<Bytes> {
        world.sabotage_delivery(way, at, frame)
    }

    fn spoil_pieces(world: &KvWorld, (life, target): (LifeId, LifeId), op: Op, pieces: &mut [Piece]) {
        match world.planted {
            Some(Planted::NeighboursShare) => world.take_neighbours_share(life, target, op, pieces),
            Some(Planted::PlaceForgotten) => world.forget_places(life, target, op, pieces),
            _ => {}
        }
    }

    fn loses(world: &KvWorld, life: LifeId, piece: &Piece) -> bool {
        world.loses_state(life, piece)
    }

    fn is_deaf(world: &KvWorld, life: LifeId) -> bool {
        world.is_deaf(life)
    }
}
