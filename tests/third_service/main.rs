//! A third service on the same worker as the KV cache: its own machine, commands, states, resources and
//! handles, over kv-local. `simulated.rs` runs the same machine in simulated worlds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod counter;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use counter::machine::Counter;
use counter::{Command, Failure, Leased, Resource, Slot, Status, Whom, record};
use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_transfer::local::{LocalConfig, LocalTransport};
use kv_transfer::unstable::Transport;
use kv_transfer::unstable::machine::{Amounts, Submit};
use kv_transfer::unstable::worker::{self, Handle, Port, Setup, StopReport, Worker};
use kv_transfer::{EngineId, Incarnation, OpenError, ReadyEvent, ReadyEventError, WorkerId};

/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_millis(300);

/// A worker of the service, as a crate for the service would offer it.
struct Service {
    worker: Worker<Counter>,
    metadata: Bytes,
}

/// A client's session.
struct Client(Handle<Counter>);

impl Service {
    fn start(engine: &str) -> Service {
        Service::registered(engine, None)
    }

    /// Starts a worker that this bootstrap server knows.
    fn registered(engine: &str, server: Option<&str>) -> Service {
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        // The service has no memory that peers touch.
        let metadata = worker::attach(&mut transport, []).unwrap();
        let worker = WorkerId { engine: EngineId::new(engine).unwrap(), rank: 0 };
        let life = (worker.clone(), Incarnation::from_random(1));
        let known =
            |server: &str| (server.to_owned(), record(life, transport.name(), metadata.clone()).unwrap());
        let setup = Setup::new(worker).with(|setup| setup.publish = server.map(known));
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default()).unwrap());
        let machine = Counter::new(metadata.clone());
        Service { worker: Worker::start(machine, setup, transport, client).unwrap(), metadata }
    }

    fn port(&self) -> Port<Counter> {
        self.worker.port()
    }

    fn hold(&self, numbers: &[u64], lease: Duration) -> Result<Handle<Counter>, OpenError> {
        let numbers = numbers.to_vec();
        self.port().open(|session| Command::Hold { session, numbers, lease })
    }

    /// Asks a holder for a number, at once or when an event has passed.
    fn ask(&self, holder: &Service, ready: Option<Box<dyn ReadyEvent>>) -> Client {
        self.ask_whom(Whom::Worker(holder.metadata.clone()), ready)
    }

    fn ask_whom(&self, whom: Whom, ready: Option<Box<dyn ReadyEvent>>) -> Client {
        let mut handle = self.port().open(|session| Command::Open { session }).unwrap();
        let (session, slot) = (handle.id(), Slot::default());
        let ask = Command::Ask { session, whom, slot, within: PATIENCE, ready };
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
fn numbers_are_leased_across_workers_and_return_when_leases_end() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let (holding, asking) = (Service::registered("holder", Some(&addr)), Service::start("client"));
    let held = holding.hold(&[7, 8, 9], LEASE).unwrap();
    holding.until("the holder", || held.poll() == Status::Open);
    let start = Instant::now();
    let whom = |client: usize| {
        let known = Whom::Worker(holding.metadata.clone());
        if client < 2 { known } else { Whom::Registered(addr.clone()) }
    };
    let mut clients: Vec<Client> = (0..4).map(|client| asking.ask_whom(whom(client), None)).collect();
    asking.until("all leases", || clients.iter().all(|client| client.0.poll() == Status::Over));
    // Three numbers for four clients: one of them waited for the end of another one's lease.
    assert!(start.elapsed() >= LEASE, "{:?}", start.elapsed());
    let mut numbers = Vec::new();
    asking.until("all slots", || {
        numbers.extend(clients.iter_mut().filter_map(Client::number));
        numbers.len() == clients.len()
    });
    assert!(numbers.iter().all(|number| [7, 8, 9].contains(number)), "{numbers:?}");
    asking.until("the gauges", || {
        let gauges = asking.port().gauges();
        let lent = [0, 1].map(|kind| gauges.in_transfer(kind) + gauges.quarantined(kind));
        (lent, gauges.commands) == ([0, 0], 8) && gauges.frames_sent >= 4
    });
    holding.until("the holder's gauges", || {
        let gauges = holding.port().gauges();
        gauges.frames_received >= 4 && gauges.in_transfer(0) == 3
    });
    assert_eq!(asking.worker.stop(PATIENCE), StopReport::default());
}

#[test]
fn numbers_of_a_closed_holder_are_in_quarantine_until_their_leases_end() {
    // A machine that stands still for a whole lease sees no report of it: then the next one is longer.
    assert!([1, 4, 16].map(Duration::from_secs).into_iter().any(close_while_leased));
}

/// Closes a holder while one of its numbers is leased. True if the quarantine of the number was reported
/// meanwhile.
fn close_while_leased(lease: Duration) -> bool {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    let mut held = holding.hold(&[1, 2], lease).unwrap();
    let start = Instant::now();
    let client = asking.ask(&holding, None);
    asking.until("the lease", || client.0.poll() >= Status::Open);
    held.abort();
    holding.until("the end", || held.poll() == Status::Failed);
    assert!(held.failure().is_some_and(|failure| failure.to_string() == Failure::Aborted.to_string()));
    let (mut back, mut reported) = (None, false);
    holding.until("the numbers", || {
        let quarantine = (holding.port().gauges().quarantined(0), holding.port().quarantine());
        reported |= quarantine == (2, vec![Leased { numbers: 1 }]);
        back = held.reclaim();
        back.is_some()
    });
    assert!(start.elapsed() >= lease, "{:?}", start.elapsed());
    let [Resource::Numbers(numbers)] = back.as_deref_mut().unwrap() else { panic!("{back:?} is lent") };
    numbers.sort_unstable();
    assert_eq!(*numbers, [1, 2]);
    // The client's lease is over before the holder's; its worker may notice a little later.
    asking.until("the end of the lease", || client.0.poll() == Status::Over);
    holding.until("the gauges", || holding.port().gauges().quarantined(0) == 0);
    reported
}

#[test]
fn a_question_waits_for_its_event_and_a_failed_event_fails_it() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    let held = holding.hold(&[5], LEASE).unwrap();
    let passed = Arc::new(AtomicBool::new(false));
    let event = Arc::clone(&passed);
    let mut client = asking.ask(&holding, Some(Box::new(move || Ok(event.load(Ordering::SeqCst)))));
    let mut failing = asking.ask(&holding, Some(Box::new(|| Err(ReadyEventError::Device { code: 700 }))));
    asking.until("the failure", || failing.0.poll() == Status::Failed);
    let failure = failing.0.failure().unwrap().to_string();
    assert_eq!(failure, Failure::NotReady(ReadyEventError::Device { code: 700 }).to_string());
    asking.until("the slot", || failing.0.reclaim().is_some());
    assert_eq!((client.0.poll(), holding.port().gauges().frames_received), (Status::Waiting, 0));
    passed.store(true, Ordering::SeqCst);
    asking.until("the number", || client.number() == Some(5));
    drop(held);
}

#[test]
fn slots_of_dropped_handles_return_and_a_stopped_worker_fails_open_sessions() {
    let (holding, asking) = (Service::start("holder"), Service::start("client"));
    drop(holding.hold(&[3, 4], LEASE).unwrap());
    let port = holding.port();
    let mut orphans = Vec::new();
    holding.until("the orphan", || {
        let taken = port.take_orphans(|resource| matches!(resource, Resource::Numbers(_)));
        orphans.extend(taken.into_iter().filter_map(|orphan| match orphan {
            Resource::Numbers(numbers) => Some(numbers),
            Resource::Slot(_) => None,
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
