//! A third service on the same worker as the KV cache: its own machine, commands, states, resources and
//! handles, over the embedded plane, and the same machine again in virtual time without any worker.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod counter;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use counter::machine::Counter;
use counter::{Command, Failure, Leased, Resource, Slot, Status};
use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient};
use kv_transfer::local::{LocalConfig, LocalPlane};
use kv_transfer::machine::{Amounts, Input, Machine, Output, Submit};
use kv_transfer::worker::{self, Handle, Port, Setup, StopReport, Worker};
use kv_transfer::{EngineId, Fence, FenceError, OpenError, Origin, SessionId, Time, WorkerId};

/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_millis(300);
/// A lease that is still there after a pause of the machine that the test runs on.
const LONG_LEASE: Duration = Duration::from_secs(3);

/// A worker of the service: what a crate for it would offer.
struct Service {
    worker: Worker<Counter>,
    metadata: Bytes,
}

/// A client's session.
struct Client(Handle<Counter>);

impl Service {
    fn start(engine: &str) -> Service {
        let mut plane = LocalPlane::new(LocalConfig::default()).unwrap();
        // The service has no memory that peers touch.
        let metadata = worker::attach(&mut plane, []).unwrap();
        let setup = Setup::new(WorkerId { engine: EngineId::new(engine).unwrap(), rank: 0 });
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default()).unwrap());
        let machine = Counter::new(metadata.clone());
        Service { worker: Worker::start(machine, setup, plane, client).unwrap(), metadata }
    }

    fn port(&self) -> Port<Counter> {
        self.worker.port()
    }

    fn hold(&self, numbers: &[u64], lease: Duration) -> Result<Handle<Counter>, OpenError> {
        let numbers = numbers.to_vec();
        self.port().open(|session| Command::Hold { session, numbers, lease })
    }

    /// Asks a holder for a number, at once or when an event has passed.
    fn ask(&self, holder: &Service, ready: Option<Box<dyn Fence>>) -> Client {
        let mut handle = self.port().open(|session| Command::Open { session }).unwrap();
        let (session, holder) = (handle.id(), holder.metadata.clone());
        let ask = Command::Ask { session, holder, slot: Slot::default(), within: PATIENCE, ready };
        handle.submit(ask).expect("the ring has room");
        handle.submit(Command::Shutdown).expect_err("no command to a session");
        Client(handle)
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < deadline, "{what}: waited in vain; {:?}", self.port());
            self.port().poll_set().drain(|_| ());
            std::thread::yield_now();
        }
    }
}

impl Client {
    /// The number, once its lease is over.
    fn number(&mut self) -> Option<u64> {
        match self.0.reclaim()?.as_slice() {
            [Resource::Slot(Slot(number))] => *number,
            other => panic!("one slot was lent, not {other:?}"),
        }
    }
}

#[test]
fn numbers_are_leased_across_workers_and_each_returns_when_its_lease_ends() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    let held = holding.hold(&[7, 8, 9], LEASE).unwrap();
    holding.until("the holder", || held.poll() == Status::Open);
    let start = Instant::now();
    let mut clients: Vec<Client> = (0..4).map(|_| asking.ask(&holding, None)).collect();
    asking.until("all leases", || clients.iter().all(|client| client.0.poll() == Status::Over));
    // Three numbers for four clients: one of them waited for the end of another one's lease.
    assert!(start.elapsed() >= LEASE, "{:?}", start.elapsed());
    let mut numbers = Vec::new();
    asking.until("all slots", || {
        numbers.extend(clients.iter_mut().filter_map(Client::number));
        numbers.len() == clients.len()
    });
    assert_eq!(numbers.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([7, 8, 9]), "{numbers:?}");
    let gauges = asking.port().gauges();
    assert_eq!(
        (gauges.in_transfer, gauges.quarantined, gauges.commands),
        (Amounts::default(), Amounts::default(), 8)
    );
    assert!(gauges.frames_sent >= 4 && holding.port().gauges().frames_received >= 4, "{gauges:?}");
    assert_eq!(holding.port().gauges().in_transfer, Amounts::of(0, 3));
    assert_eq!(asking.worker.stop(PATIENCE), StopReport::default());
}

#[test]
fn numbers_of_a_closed_holder_are_in_quarantine_until_their_leases_end() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    let mut held = holding.hold(&[1, 2], LONG_LEASE).unwrap();
    let client = asking.ask(&holding, None);
    asking.until("the lease", || client.0.poll() == Status::Open);
    held.abort();
    holding.until("the end", || held.poll() == Status::Failed);
    assert!(held.failure().is_some_and(|failure| failure.to_string() == Failure::Aborted.to_string()));
    assert_eq!((held.reclaim().is_none(), holding.port().gauges().quarantined), (true, Amounts::of(0, 2)));
    holding.until("the report", || holding.port().quarantine() == [Leased { numbers: 1 }]);
    let mut back = None;
    holding.until("the numbers", || {
        back = held.reclaim();
        back.is_some()
    });
    assert_eq!(back.unwrap(), [Resource::Numbers(vec![2, 1])]);
    // The client's lease is over before the holder's; its worker may notice a little later.
    asking.until("the end of the lease", || client.0.poll() == Status::Over);
    assert_eq!(holding.port().gauges().quarantined, Amounts::default());
}

#[test]
fn a_question_waits_for_its_event_and_a_failed_event_fails_it() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    let held = holding.hold(&[5], LEASE).unwrap();
    let passed = Arc::new(AtomicBool::new(false));
    let event = Arc::clone(&passed);
    let mut client = asking.ask(&holding, Some(Box::new(move || Ok(event.load(Ordering::SeqCst)))));
    let mut failing = asking.ask(&holding, Some(Box::new(|| Err(FenceError::Device { code: 700 }))));
    asking.until("the failure", || failing.0.poll() == Status::Failed);
    let failure = failing.0.failure().unwrap().to_string();
    assert_eq!(failure, Failure::NotReady(FenceError::Device { code: 700 }).to_string());
    asking.until("the slot", || failing.0.reclaim().is_some());
    assert_eq!((client.0.poll(), holding.port().gauges().frames_received), (Status::Waiting, 0));
    passed.store(true, Ordering::SeqCst);
    asking.until("the number", || client.number() == Some(5));
    drop(held);
}

#[test]
fn what_a_dropped_handle_was_lent_goes_to_the_port_and_a_stopped_worker_fails_the_rest() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    drop(holding.hold(&[3, 4], LEASE).unwrap());
    let port = holding.port();
    let mut orphans = Vec::new();
    holding.until("the orphan", || {
        orphans.extend(port.take_orphans(|resource| match resource {
            Resource::Numbers(numbers) => Ok(numbers),
            slot @ Resource::Slot(_) => Err(slot),
        }));
        !orphans.is_empty()
    });
    assert_eq!(orphans, [vec![3, 4]]);
    let (mut client, port) = (asking.ask(&holding, None), asking.port());
    let report = asking.worker.stop(PATIENCE);
    assert_eq!((report.sessions_ended, report.quarantined), (1, Amounts::default()));
    assert_eq!((client.0.poll(), port.is_stopped()), (Status::Failed, true));
    assert_eq!(client.0.reclaim(), Some(vec![Resource::Slot(Slot(None))]));
    assert!(matches!(port.open(|session| Command::Open { session }), Err(OpenError::WorkerStopped)));
}

/// Two machines in virtual time, whose frames are lost, repeated and delayed.
struct World {
    machines: [Counter; 2],
    now: u64,
    seed: u64,
    frames: Vec<(u64, usize, Bytes)>,
    status: BTreeMap<SessionId, Status>,
    /// Who uses which number at the moment.
    used: BTreeMap<u64, SessionId>,
    numbers: Vec<u64>,
    slots: BTreeMap<SessionId, Option<u64>>,
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % below
    }

    fn feed(&mut self, at: usize, input: Input<Command>) {
        self.machines[at].handle(Time::from_nanos(self.now), input);
        while let Some(output) = self.machines[at].poll_output() {
            match output {
                Output::Send { frame, .. } => {
                    for _ in 0..self.random(3) {
                        let due = self.now + self.random(400_000_000);
                        self.frames.push((due, 1 - at, frame.clone()));
                    }
                }
                Output::Status { session, poll, .. } => self.status(session, poll),
                Output::Release { resource: Resource::Numbers(numbers), .. } => {
                    assert!(self.used.is_empty(), "numbers come back while {:?} are used", self.used);
                    self.numbers.extend(numbers);
                }
                Output::Release { session, resource: Resource::Slot(Slot(number)) } => {
                    assert!(self.status[&session] != Status::Waiting, "{session} has not ended");
                    assert_eq!(self.slots.insert(session, number), None, "a slot comes back once");
                }
                _ => {}
            }
        }
        self.note_numbers();
    }

    fn status(&mut self, session: SessionId, status: Status) {
        let before = self.status.insert(session, status).unwrap_or(Status::Waiting);
        assert!(before < Status::Over && before != Status::Failed, "{session} goes on after its end");
        if status != Status::Open {
            self.used.retain(|_, user| *user != session);
        }
    }

    /// A number that a client reads is its own for as long as the session is open.
    fn note_numbers(&mut self) {
        for (session, number) in self.machines[1].numbers() {
            let user = *self.used.entry(number).or_insert(session);
            assert_eq!(user, session, "{number} is leased twice");
        }
    }

    fn run(seed: u64) -> usize {
        let metadata = [Bytes::from_static(b"holder"), Bytes::from_static(b"client")];
        let mut world = World {
            machines: metadata.clone().map(Counter::new),
            now: 0,
            seed,
            frames: Vec::new(),
            status: BTreeMap::new(),
            used: BTreeMap::new(),
            numbers: Vec::new(),
            slots: BTreeMap::new(),
        };
        let hold = Command::Hold { session: SessionId(1000), numbers: vec![1, 2, 3], lease: LEASE };
        world.feed(0, Input::Command(hold));
        for id in 0..12 {
            let (session, holder) = (SessionId(id), metadata[0].clone());
            world.feed(1, Input::Command(Command::Open { session }));
            let (slot, within) = (Slot::default(), Duration::from_secs(2));
            world.feed(1, Input::Command(Command::Ask { session, holder, slot, within, ready: None }));
        }
        let close = 1_000_000_000 + world.random(1_000_000_000);
        while world.numbers.is_empty() || world.slots.len() < 12 {
            world.now += 1_000_000;
            assert!(world.now < 20_000_000_000, "no end in sight");
            if world.now / 1_000_000 == close / 1_000_000 {
                world.feed(0, Input::Command(Command::Abort { session: SessionId(1000) }));
            }
            let (due, later) =
                std::mem::take(&mut world.frames).into_iter().partition(|(at, ..)| *at <= world.now);
            world.frames = later;
            for (_, to, frame) in due {
                world.feed(to, Input::Frame { from: Origin(0), frame });
            }
            for at in 0..2 {
                if world.machines[at].next_timeout().is_some_and(|due| due.as_nanos() <= world.now) {
                    world.feed(at, Input::Timeout);
                }
            }
        }
        world.numbers.sort_unstable();
        assert_eq!(world.numbers, [1, 2, 3]);
        world.slots.values().flatten().count()
    }
}

#[test]
fn no_number_is_leased_twice_in_virtual_time_whatever_becomes_of_the_frames() {
    let served: usize = (0..300)
        .map(|seed| {
            println!("seed {seed}");
            World::run(seed)
        })
        .sum();
    assert!(served > 300, "{served} of 3600 questions were answered in time");
}
