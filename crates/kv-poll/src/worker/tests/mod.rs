//! The worker's thread under a scripted machine, transport and client.

mod client;
mod clock;
mod draining;
mod life;
mod listening;
mod quarantine;
mod ready_events;
mod script;
mod sessions;
mod transport;
mod turns;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    BootstrapClient, Incarnation, KvArgs, KvManager, PageList, Pages, RankRecord, ReadyEvent,
    ReadyEventError, Region, RegionRole, Room, SessionOptions, Transport, WorkerRole,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::client::FakeClient;
use self::script::Script;
use self::transport::{Wire, fake_transport};
use super::clock::BootTime;
use super::shared::Shared;
use super::{Clock, Driver, Port};
use crate::kv::{KvMachine, Manager, Worker, WorkerConfig};

/// Long enough for any machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A ready event whose destructor panics.
pub(crate) struct Broken;

impl ReadyEvent for Broken {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        Ok(false)
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        panic!("a bug in the destructor of a ready event");
    }
}

/// A small valid worker.
pub(crate) fn args() -> KvArgs {
    KvArgs::builder("engine", 0)
        .pages(64, 16)
        .region(Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64))
        .build()
        .unwrap()
}

pub(crate) fn pages(list: &[u32]) -> Pages {
    Pages::unpooled(PageList::from_pages(list.iter().copied()).unwrap()).unwrap()
}

/// What the fakes have seen, in order.
#[derive(Debug, PartialEq, Eq, Clone)]
enum Seen {
    Opened(u64),
    Sent(u64),
    Final(u64, u32, u32),
    Aborted(u64),
    Frame(&'static str),
    Posted(u64, bool),
    ConnectFailed,
    LookupFailed(u64),
    PeerGone,
    Shutdown,
    Drain,
    Left,
    Published(String),
    Withdrawn,
    TransportSend,
    /// The transport was told of so many bytes for the peer.
    Roused(u64, u64),
    /// The transport was told that its events are handled from now on.
    BegunHandling,
    /// A hello has reached the machine.
    Hello(u64),
    Cancelled,
    Disconnected,
    /// The machine was asked what is in quarantine.
    Looked,
}

/// What the bootstrap server is told of a worker.
fn record(config: &WorkerConfig) -> RankRecord {
    let who = (config.args.worker().clone(), Incarnation::from_random(1));
    let way = ("fake", Bytes::from_static(b"metadata"));
    RankRecord::serving_kv(who, config.role, way, config.args.geometry()).unwrap()
}

type Log = Arc<Mutex<Vec<Seen>>>;

/// A worker without its thread.
fn driver(
    machine: KvMachine,
    config: WorkerConfig,
    transport: impl Transport + Send + 'static,
    client: impl BootstrapClient + 'static,
    clock: impl Clock + 'static,
) -> Driver<KvMachine> {
    let record = record(&config);
    let (transport, client) = (Box::new(transport), Box::new(client));
    Driver::new(machine, config.setup(record), transport, client, Box::new(clock)).unwrap()
}

/// A worker that does nothing by itself, for small queues, and a scheduler's way to it.
pub(crate) fn queues(max_sessions: usize, commands: usize) -> (Arc<Shared<KvMachine>>, Manager) {
    let shared = Arc::new(Shared::new(max_sessions, commands).unwrap());
    let manager = Manager::new(Port::new(Arc::clone(&shared)), args(), Incarnation::from_random(1));
    (shared, manager)
}

/// The same with room for eight of each.
pub(crate) fn idle() -> (Arc<Shared<KvMachine>>, Manager) {
    queues(8, 8)
}

/// A scheduler's way to a worker of [`args`].
pub(crate) fn manager(driver: &Driver<KvMachine>) -> Manager {
    Manager::new(driver.port(), args(), Incarnation::from_random(1))
}

/// A running worker over fakes, and what they have seen.
struct Rig {
    worker: Worker,
    wire: Arc<Wire>,
    log: Log,
}

impl Rig {
    fn start() -> Rig {
        Rig::with(WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| config.max_sessions = 64))
    }

    fn with(config: WorkerConfig) -> Rig {
        let (log, wire) = (Log::default(), Wire::new());
        let node = Script::new(&log);
        let transport = fake_transport(&log, &wire);
        let client = FakeClient::new(&log);
        let args = config.args.clone();
        let driver = driver(Box::new(node), config, transport, client, BootTime);
        let thread = super::Worker::spawn(0, driver).unwrap();
        Rig { worker: Worker::of(thread, args, Incarnation::from_random(1)), wire, log }
    }

    fn sender(&self, room: u64) -> crate::Sender {
        self.worker.manager().sender("", Room::from(room), &[], SessionOptions::default()).unwrap()
    }

    fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().clone()
    }

    /// Sleeps on the poll set's descriptor until `done` holds.
    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let manager = self.worker.manager();
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < PATIENCE, "never: {what}; seen {:?}", self.seen());
            let mut fds = [PollFd::new(manager.poll_set(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 2_000_000 })).unwrap();
            manager.poll_set().drain(|_| ());
        }
    }

    fn until_seen(&self, seen: &Seen) {
        self.until("an input", || self.log.lock().unwrap().contains(seen));
    }
}
