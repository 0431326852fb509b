//! A second service in simulated worlds, written against public names only: a counter. Clients ask a server to
//! add amounts; frames are lost, doubled and late, hosts crash and are paused, and no amount counts twice.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Amounts, Input, Machine, Output, SessionCommand, SessionResource, SessionStatus};
use kv_core::{
    Incarnation, KvArgs, LookupId, PeerId, RankQuery, RankRecord, Region, RegionRole, Replica, SessionId,
    Time, WorkerRole,
};
use kv_sim::net::{
    ChaosParams, Fact, FailureOf, Held, HoldId, LifeId, LookupParams, Memory, NetParams, Outcome, PLANE,
    Physics, ResourceOf, Service, Slot, World, metadata,
};
use kv_sim::{Clock, Trace, Violation};

const SERVER: Slot = 0;
const CLIENTS: usize = 2;
const ADDR: &str = "counter:1";
const RETRY: Duration = Duration::from_millis(5);
const DEADLINE: Duration = Duration::from_secs(2);

// ---- the machine -----------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Open,
    Counted,
    Failed,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl SessionStatus for State {
    const OPENED: State = State::Open;
    const FAILED: State = State::Failed;

    fn is_terminal(self) -> bool {
        self > State::Open
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn from_u8(number: u8) -> Option<State> {
        [State::Open, State::Counted, State::Failed].get(usize::from(number)).copied()
    }
}

#[derive(Debug)]
struct Stake(u32);

impl SessionResource for Stake {
    const KINDS: &'static [&'static str] = &["stakes"];

    fn amounts(&self) -> Amounts {
        Amounts::of(0, 1)
    }
}

#[derive(Debug)]
enum Ask {
    Add { session: SessionId, digit: u32, stake: Stake },
    Abort(SessionId),
    Shutdown,
}

impl SessionCommand for Ask {
    type Resource = Stake;

    fn abort(session: SessionId) -> Ask {
        Ask::Abort(session)
    }

    fn shutdown() -> Ask {
        Ask::Shutdown
    }

    fn lends(&self) -> Option<Amounts> {
        matches!(self, Ask::Add { .. }).then(|| Amounts::of(0, 1))
    }

    fn into_resource(self) -> Option<Stake> {
        match self {
            Ask::Add { stake, .. } => Some(stake),
            Ask::Abort(_) | Ask::Shutdown => None,
        }
    }
}

#[derive(Debug, Clone)]
struct TooLate;

impl fmt::Display for TooLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody has counted it in time")
    }
}

impl std::error::Error for TooLate {}

/// Client and server in one. `total` has a digit of base four for each amount.
struct Counter {
    name: Bytes,
    /// With a planted bug: what was counted is not remembered.
    forgetful: bool,
    now: Time,
    total: u64,
    counted: BTreeSet<(Bytes, u64)>,
    peers: BTreeMap<Bytes, PeerId>,
    server: Option<PeerId>,
    asking: bool,
    open: BTreeMap<SessionId, (u32, Stake, Time)>,
    retry: Option<Time>,
    outputs: VecDeque<Output<State, Stake, TooLate>>,
}

impl Counter {
    fn connect(&mut self, name: &Bytes) -> PeerId {
        let next = PeerId(self.peers.len() as u64 + 1);
        if let Some(&peer) = self.peers.get(name) {
            return peer;
        }
        self.peers.insert(name.clone(), next);
        self.outputs.push_back(Output::Connect { peer: next, metadata: name.clone() });
        next
    }

    fn say(&mut self) {
        let Some(peer) = self.server else {
            if !std::mem::replace(&mut self.asking, true) {
                let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Rank(0) };
                self.outputs.push_back(Output::Lookup { lookup: LookupId(1), addr: ADDR.to_owned(), query });
            }
            return;
        };
        for (session, (digit, ..)) in &self.open {
            let mut frame = vec![1];
            frame.extend(session.0.to_le_bytes());
            frame.extend(digit.to_le_bytes());
            frame.extend(&self.name);
            self.outputs.push_back(Output::Send { peer, frame: frame.into() });
        }
    }

    fn hear(&mut self, frame: &Bytes) {
        if frame.len() < 9 {
            return;
        }
        let number = u64::from_le_bytes(frame[1..9].try_into().unwrap());
        match frame[0] {
            1 if frame.len() == 21 => {
                let digit = u32::from_le_bytes(frame[9..13].try_into().unwrap());
                let name = frame.slice(13..);
                if self.counted.insert((name.clone(), number)) || self.forgetful {
                    self.total += 1 << (2 * digit);
                }
                let peer = self.connect(&name);
                let answer = [&[2], &frame[1..9]].concat();
                self.outputs.push_back(Output::Send { peer, frame: answer.into() });
            }
            2 => self.end(SessionId(number), State::Counted),
            _ => {}
        }
    }

    fn end(&mut self, session: SessionId, poll: State) {
        let Some((_, resource, _)) = self.open.remove(&session) else { return };
        let failure = (poll == State::Failed).then(|| Box::new(TooLate));
        self.outputs.push_back(Output::Status { session, poll, failure });
        self.outputs.push_back(Output::Release { session, resource });
    }

    fn tick(&mut self) {
        let late = self.open.iter().filter(|(_, (.., until))| *until <= self.now);
        let late: Vec<SessionId> = late.map(|(session, _)| *session).collect();
        late.into_iter().for_each(|session| self.end(session, State::Failed));
        if self.retry.is_none_or(|at| at <= self.now) {
            self.say();
            self.retry = Some(self.now + RETRY);
        }
        if self.open.is_empty() {
            self.retry = None;
        }
    }
}

impl Machine for Counter {
    type Command = Ask;
    type Status = State;
    type Resource = Stake;
    type Failure = TooLate;
    type Quarantine = ();

    fn handle(&mut self, now: Time, input: Input<Ask>) {
        self.now = now;
        match input {
            Input::Command(Ask::Add { session, digit, stake }) => {
                self.open.insert(session, (digit, stake, now + DEADLINE));
                self.retry = None;
            }
            Input::Command(Ask::Abort(session)) => self.end(session, State::Failed),
            Input::Command(Ask::Shutdown) => {
                let open: Vec<SessionId> = self.open.keys().copied().collect();
                open.into_iter().for_each(|session| self.end(session, State::Failed));
            }
            Input::Frame { frame, .. } => self.hear(&frame),
            Input::Found { ranks, .. } => {
                self.asking = false;
                self.server = ranks.first().map(|rank| self.connect(&rank.metadata));
                self.retry = None;
            }
            Input::LookupFailed { .. } => self.asking = false,
            Input::PeerGone { peer, .. } | Input::ConnectFailed { peer, .. } => {
                self.peers.retain(|_, known| *known != peer);
                self.server = self.server.filter(|server| *server != peer);
                self.outputs.push_back(Output::Disconnect { peer });
            }
            Input::Connected { .. } | Input::Posted { .. } | Input::Revoked { .. } | Input::Timeout => {}
        }
        self.tick();
    }

    fn poll_output(&mut self) -> Option<Output<State, Stake, TooLate>> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.retry
    }
}

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
        let record = RankRecord {
            worker: args.worker().clone(),
            incarnation: Incarnation::from_random(world.rng().bits()),
            role,
            plane: PLANE.to_owned(),
            metadata: name.clone(),
            geometry: args.geometry().clone(),
        };
        let machine = Counter {
            name,
            forgetful: world.service.forgetful,
            now: Time::ZERO,
            total: 0,
            counted: BTreeSet::new(),
            peers: BTreeMap::new(),
            server: None,
            asking: false,
            open: BTreeMap::new(),
            retry: None,
            outputs: VecDeque::new(),
        };
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
