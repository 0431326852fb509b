//! The listeners of two workers hear the whole story of a request, on both sides, and nothing that is not
//! true: over shared memory, pushed and pulled.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_transfer::Timing;
use kv_transfer::prelude::*;
use kv_transfer::trace::{Event, KvWhat, Message};
use kv_transfer::{Listener, Manager, Publication, TransferMode};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;

/// A worker with a cache of eight pages, and the events that it has reported.
struct Host {
    worker: Option<Worker>,
    arena: Arena,
    told: Arc<Mutex<Vec<Event<KvWhat>>>>,
    pool: PagePool,
}

impl Host {
    fn start(engine: &str, role: WorkerRole, addr: &str) -> Host {
        let arena = Arena::new(8 * PAGE).unwrap();
        let args = KvArgs::builder(engine, 0)
            .pages(8, 16)
            .region(Region::dram(RegionRole::Kv, arena.addr(), 8 * PAGE as u64, PAGE as u64))
            .build()
            .unwrap();
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
        // On a busy machine nothing is said twice, either.
        let timing = Timing::default().with(|timing| {
            timing.retry_first = PATIENCE;
            timing.keepalive = PATIENCE;
        });
        let told: Arc<Mutex<Vec<Event<KvWhat>>>> = Arc::default();
        let (name, events) = (engine.to_owned(), Arc::clone(&told));
        let listener = Listener::new(move |worker, event| {
            assert_eq!(worker.engine.as_str(), name);
            events.lock().unwrap().push(event.clone());
        });
        let config = WorkerConfig::new(args, role).with(|config| {
            config.bootstrap = Some(addr.to_owned());
            config.timing = timing;
            config.listener = Some(listener);
        });
        let worker = Worker::start(config, transport, Box::new(client)).unwrap();
        let manager = worker.manager();
        until("the registration", || manager.publication() == Publication::Published);
        Host { worker: Some(worker), arena, told, pool: PagePool::new(8) }
    }

    fn manager(&self) -> Manager {
        self.worker.as_ref().unwrap().manager()
    }

    fn pages(&self, list: [u32; 2]) -> Pages {
        self.pool.adopt(PageList::from_pages(list).unwrap()).unwrap()
    }

    /// Waits until the worker has heard a message of this kind.
    fn until_heard(&self, name: &str) {
        let heard =
            |event: &Event<KvWhat>| matches!(&event.what, KvWhat::Heard(message) if message.name() == name);
        until(name, || self.told.lock().unwrap().iter().any(heard));
    }

    /// Stops the worker. Returns all events that it has reported.
    fn stop(mut self) -> Vec<Event<KvWhat>> {
        self.worker.take().unwrap().stop(PATIENCE);
        std::mem::take(&mut *self.told.lock().unwrap())
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends two pages from one worker to another. Returns the events of both.
fn serve(mode: TransferMode) -> [Vec<Event<KvWhat>>; 2] {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let prefill = Host::start("prefill", WorkerRole::Prefill, &addr);
    let decode = Host::start("decode", WorkerRole::Decode, &addr);
    prefill.arena.write(3 * PAGE, &[7; 2 * PAGE]).unwrap();
    let options = || SessionOptions::default().with(|options| options.mode = Some(mode));
    let mut sender = prefill.manager().sender(&addr, Room::Number(42), &[], options()).unwrap();
    sender.init(2, None).unwrap();
    if mode == TransferMode::Pull {
        sender.send(prefill.pages([3, 4])).unwrap();
        until("the lease", || sender.poll() == KvPoll::Transferring);
    }
    let mut receiver = decode.manager().receiver(&addr, Room::Number(42), options()).unwrap();
    if mode == TransferMode::Pull {
        decode.until_heard("granted");
        receiver.init(decode.pages([6, 0]), None).unwrap();
    } else {
        until("the welcome", || receiver.poll() == KvPoll::WaitingForInput);
        receiver.init(decode.pages([6, 0]), None).unwrap();
        decode.until_heard("registered");
        sender.send(prefill.pages([3, 4])).unwrap();
    }
    until("the receiver", || receiver.poll().is_terminal());
    until("the sender", || sender.poll().is_terminal());
    let mut bytes = vec![0; PAGE];
    for page in [6, 0] {
        decode.arena.read(page * PAGE, &mut bytes).unwrap();
        assert_eq!(bytes, [7; PAGE]);
    }
    prefill.pool.release(sender.reclaim().unwrap().pages).unwrap();
    decode.pool.release(receiver.reclaim().unwrap().pages).unwrap();
    assert_eq!((prefill.pool.num_out(), decode.pool.num_out()), (0, 0));
    let told = [prefill.stop(), decode.stop()];
    server.stop();
    told
}

/// The names of the events up to the close of the session.
fn names(events: &[Event<KvWhat>]) -> Vec<String> {
    let name = |event: &Event<KvWhat>| match &event.what {
        KvWhat::Said(message) => format!("says {}", message.name()),
        KvWhat::Heard(message) => format!("hears {}", message.name()),
        KvWhat::State(poll) => format!("is {poll}"),
        what => what.name().to_owned(),
    };
    let closed = events.iter().position(|event| event.what == KvWhat::Closed).unwrap();
    let writes = events.iter().any(|event| matches!(event.what, KvWhat::Heard(Message::Register { .. })));
    let timed = |event: &&Event<KvWhat>| match event.what {
        // How often signs of life are asked for, and when a permission is renewed, is a matter of time.
        KvWhat::Said(Message::Heartbeat { .. } | Message::HeartbeatAnswered { .. })
        | KvWhat::Heard(Message::Heartbeat { .. } | Message::HeartbeatAnswered { .. })
        | KvWhat::PermissionBegan { .. }
        | KvWhat::PermissionEnded => false,
        // It may come before the sender's worker has looked at its own post.
        KvWhat::Heard(Message::Release { .. }) => !writes,
        _ => true,
    };
    events[..=closed].iter().filter(timed).map(name).collect()
}

/// Checks that times do not go back, that posts begin and end with the same bytes, and that room and pages
/// are those of the request.
fn check(events: &[Event<KvWhat>], posts: usize) {
    assert!(events.is_sorted_by_key(|event| event.at));
    assert!(events.iter().all(|event| event.missed == 0));
    let mut moved = 0;
    for event in events {
        match &event.what {
            KvWhat::Opened { room, .. } => assert_eq!(*room, Room::Number(42)),
            KvWhat::PostStarted { bytes, .. } => assert_eq!(*bytes, 2 * PAGE as u64),
            KvWhat::PostEnded { bytes, error, .. } => {
                moved += bytes;
                assert_eq!(*error, None);
            }
            KvWhat::PagesBack { pages } => assert_eq!(*pages, 2),
            _ => {}
        }
    }
    assert_eq!(moved, (posts * 2 * PAGE) as u64);
}

#[test]
fn listeners_on_both_sides_hear_the_whole_story_of_a_push() {
    let [prefill, decode] = serve(TransferMode::Push);
    check(&prefill, 1);
    check(&decode, 0);
    assert_eq!(names(&prefill), PUSH_PREFILL);
    assert_eq!(names(&decode), PUSH_DECODE);
}

#[test]
fn listeners_on_both_sides_hear_the_whole_story_of_a_pull() {
    let [prefill, decode] = serve(TransferMode::Pull);
    check(&prefill, 0);
    check(&decode, 1);
    assert_eq!(names(&prefill), PULL_PREFILL);
    assert_eq!(names(&decode), PULL_DECODE);
}

const PUSH_PREFILL: &[&str] = &[
    "opened",
    "peer_met",
    "way_chosen",
    "hears hello",
    "says welcome",
    "way_opened",
    "hears register",
    "receiver_came",
    "is WaitingForInput",
    "says registered",
    "chunk_given",
    "is Transferring",
    "post_started",
    "post_ended",
    "ended",
    "pages_back",
    "closed",
];

const PUSH_DECODE: &[&str] = &[
    "opened",
    "asked",
    "answered",
    "peer_met",
    "way_chosen",
    "says hello",
    "sources_known",
    "way_opened",
    "peer_answers",
    "is WaitingForInput",
    "pages_given",
    "is Transferring",
    "says register",
    "hears registered",
    "hears in_place",
    "says release",
    "ended",
    "pages_back",
    "closed",
];

const PULL_PREFILL: &[&str] = &[
    "opened",
    "is WaitingForInput",
    "chunk_given",
    "is Transferring",
    "peer_met",
    "way_chosen",
    "hears hello",
    "says welcome",
    "way_opened",
    "hears acquire",
    "receiver_came",
    "says granted",
    "hears release",
    "ended",
    "pages_back",
    "closed",
];

const PULL_DECODE: &[&str] = &[
    "opened",
    "asked",
    "answered",
    "peer_met",
    "way_chosen",
    "says hello",
    "sources_known",
    "way_opened",
    "peer_answers",
    "is WaitingForInput",
    "says acquire",
    "hears granted",
    "pages_given",
    "is Transferring",
    "post_started",
    "post_ended",
    "says release",
    "ended",
    "pages_back",
    "closed",
];
