//! A second service in simulated worlds, written against public names only: a counter. Clients ask a server to
//! add amounts; frames are lost, doubled and late, hosts crash and are paused, and no amount counts twice.

#![allow(clippy::unwrap_used)]

mod machine;

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::machine::{Input, SessionStatus};
use kv_core::{
    Incarnation, KvArgs, RankRecord, Region, RegionRole, ServiceOffer, SessionId, TransportOffer, WorkerRole,
};
use kv_sim::net::{
    ChaosParams, Fact, FailureOf, Held, HoldId, LifeId, LookupParams, Memory, NetParams, Outcome, PLANE,
    Physics, ResourceOf, Service, Slot, World, metadata,
};
use kv_sim::{Clock, Trace, Violation};
use machine::{ADDR, Ask, Counter, SERVICE, Stake, State};

const SERVER: Slot = 0;
const CLIENTS: usize = 2;

// ---- its world: a workload and what is promised ----------------------------------------------

/// No post ever moves.
struct Nothing;

impl Memory for Nothing {
    fn piece(&self, _: u32, _: u64, _: u64) -> Option<&[u8]> {
        None
    }

    fn overwrite(&mut self, _: u32, _: u64, _: &[u8]) -> bool {
        false
    }

    fn holder(&self, _: u32, _: u64) -> HoldId {
        0
    }

    fn item_len(&self, _: u32) -> u64 {
        1
    }
}

#[derive(Default)]
struct Counting {
    forgetful: bool,
    /// Of each session its client's life, its digit, its state, and whether its stake came back.
    sessions: BTreeMap<(LifeId, SessionId), (u32, State, bool)>,
    totals: BTreeMap<LifeId, u64>,
}

#[derive(Debug)]
struct Add(Slot, u32);

#[derive(Debug)]
enum Seen {
    Told(LifeId, SessionId, State),
    Back(LifeId, SessionId, u32),
}

fn broken(what: String) -> Result<(), Violation> {
    Err(Violation { invariant: "each_amount_counts_once", what })
}

impl Counting {
    fn judge(&mut self, fact: &Fact<'_, u64, Seen>, alive: impl Fn(LifeId) -> bool) -> Result<(), Violation> {
        match *fact {
            Fact::Stepped { life, gauges, .. } => {
                self.totals.insert(life, gauges);
                match (0..32).find(|digit| gauges >> (2 * digit) & 3 > 1) {
                    Some(digit) => {
                        broken(format!("life {life} has counted digit {digit} twice: {gauges:#x}"))
                    }
                    None => Ok(()),
                }
            }
            Fact::Own(Seen::Told(life, session, to)) => {
                let counted = |digit: u32| self.totals.values().any(|total| total >> (2 * digit) & 1 == 1);
                match self.sessions.get(&(life, session)) {
                    Some(&(digit, State::Open, _)) if to != State::Counted || counted(digit) => Ok(()),
                    known => broken(format!("session {session} of life {life} becomes {to}: {known:?}")),
                }
            }
            Fact::Own(Seen::Back(life, session, digit)) => match self.sessions.get(&(life, session)) {
                Some(&(lent, state, false)) if lent == digit && state.is_terminal() => Ok(()),
                known => broken(format!("stake {digit} of session {session} comes back: {known:?}")),
            },
            Fact::Panicked { life, message } => broken(format!("life {life} panics: {message}")),
            Fact::Restless => broken("it never comes to rest".to_owned()),
            Fact::Settled { .. } => {
                let mut sessions = self.sessions.iter().filter(|((life, _), _)| alive(*life));
                match sessions.find(|(_, (_, state, back))| !state.is_terminal() || !back) {
                    Some(open) => broken(format!("at rest: {open:?}")),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

impl Service for Counting {
    type Machine = Counter;
    type Memory = Nothing;
    type Act = Add;
    type Gauges = u64;
    type Own<'a> = Seen;
    type Stranger = ();

    fn boot(world: &mut World<Counting>, slot: Slot) {
        let name = metadata(world.next_life());
        let region = Region::dram(RegionRole::Kv, 0x1000, 16, 16);
        let args =
            KvArgs::builder(&format!("counter-{slot}"), 0).pages(1, 16).region(region).build().unwrap();
        let role = if slot == SERVER { WorkerRole::Prefill } else { WorkerRole::Decode };
        let who = (args.worker().clone(), Incarnation::from_random(world.rng().bits()));
        let transport = TransportOffer { name: PLANE.to_owned(), version: 1, metadata: name.clone() };
        let offer = ServiceOffer {
            service: SERVICE.to_owned(),
            min: 1,
            max: 1,
            compatibility: String::new(),
            data: Bytes::new(),
        };
        let parallel = args.geometry().parallel;
        let record = RankRecord::new(who, role, parallel, vec![transport], vec![offer]).unwrap();
        let machine = Counter::new(name, world.service.forgetful);
        let clock = Clock::new(world.now(), world.rng().below(1_000_000_000), 1_000_000);
        let published = (slot == SERVER).then(|| ADDR.to_owned());
        world.start(slot, (machine, Nothing), (record, published), clock);
    }

    fn begin(world: &mut World<Counting>) {
        for digit in 0..16 {
            let (at, client) = (world.rng().below(300_000_000), 1 + world.rng().index(CLIENTS));
            world.act_in(at, Add(client, digit));
        }
    }

    fn act(world: &mut World<Counting>, Add(client, digit): Add) {
        let Some(life) = world.life(client) else { return };
        let session = SessionId(u64::from(digit) + 1);
        world.service.sessions.insert((life, session), (digit, State::Open, false));
        world.feed(life, "add", Input::Command(Ask::Add { session, digit, stake: Stake(digit) }));
    }

    fn place(world: &World<Counting>, act: &Add) -> Option<LifeId> {
        world.life(act.0)
    }

    fn status(
        world: &mut World<Counting>,
        life: LifeId,
        session: SessionId,
        to: State,
        _: Option<&FailureOf<Counting>>,
    ) {
        world.tell(&Fact::Own(Seen::Told(life, session, to)));
        if let Some(known) = world.service.sessions.get_mut(&(life, session)) {
            known.1 = to;
        }
    }

    fn release(world: &mut World<Counting>, life: LifeId, session: SessionId, stake: ResourceOf<Counting>) {
        world.tell(&Fact::Own(Seen::Back(life, session, stake.0)));
        if let Some(known) = world.service.sessions.get_mut(&(life, session)) {
            known.2 = true;
        }
    }

    fn gauges(machine: &Counter) -> u64 {
        machine.total
    }

    fn held(_: &u64) -> Held {
        Held::default()
    }

    fn observe(world: &mut World<Counting>, fact: &Fact<'_, u64, Seen>) -> Result<(), Violation> {
        let alive: Vec<bool> = (0..world.next_life()).map(|life| world.record(life).alive).collect();
        world.service.judge(fact, |life| alive[life])
    }
}

// ---- worlds ----------------------------------------------------------------------------------

fn run(seed: u64, driven: bool, forgetful: bool) -> Outcome<Counting> {
    let (us, ms) = (1_000, 1_000_000);
    let net = NetParams {
        drop: 200,
        duplicate: 300,
        tail: 200,
        delay: 100 * us,
        delay_max: 50 * ms,
        ..NetParams::default()
    };
    let chaos = ChaosParams {
        crashes: 2,
        pauses: 2,
        partitions: 2,
        breaks: 1,
        detect_max: 20 * ms,
        ..ChaosParams::default()
    };
    let lookup = LookupParams { fail: 200, delay: ms, delay_max: 20 * ms, lease: 50 * ms, stale: 100 };
    let physics = Physics {
        driven,
        fault_span: 400 * ms,
        lateness: 50 * us,
        drift_ppm: 100,
        net,
        chaos,
        lookup,
        ..Physics::calm(seed, (1, CLIENTS))
    };
    let service = Counting { forgetful, ..Counting::default() };
    World::new(service, physics, None, Trace::keeping(0)).run(None)
}

#[test]
fn amounts_count_once_whatever_the_network_and_the_hosts_do() {
    let (mut counted, mut crashes, mut dropped, mut duplicated) = (0, 0, 0, 0);
    for seed in 0..300 {
        for driven in [false, true] {
            let outcome = run(seed, driven, false);
            assert_eq!(outcome.violation, None, "seed {seed}, driven {driven}");
            counted +=
                outcome.service.sessions.values().filter(|(_, state, _)| *state == State::Counted).count();
            crashes += outcome.counters.crashes;
            dropped += outcome.counters.dropped;
            duplicated += outcome.counters.duplicated;
        }
    }
    assert!(
        counted > 5000 && crashes > 500 && dropped > 5000 && duplicated > 5000,
        "{counted} {crashes} {dropped} {duplicated}"
    );
}

#[test]
fn a_server_that_forgets_what_it_has_counted_is_caught() {
    let found = (0..50).filter(|&seed| run(seed, false, true).violation.is_some()).count();
    assert!(found > 25, "in {found} of 50 worlds");
}

#[test]
fn worlds_of_a_second_service_are_the_same_in_every_run_of_a_seed() {
    for seed in 0..20 {
        assert_eq!(run(seed, true, false).trace.hash(), run(seed, true, false).trace.hash(), "seed {seed}");
    }
    assert_ne!(run(0, false, false).trace.hash(), run(1, false, false).trace.hash());
}
