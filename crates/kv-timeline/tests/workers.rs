//! Two real workers over shared memory, pushed and pulled: what their recorders keep is joined into the requests that
//! were served.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_core::{
    Cause, KvArgs, KvManager, KvPoll, KvReceiver, KvSender, KvSession, Lease, PageList, PagePool, Region,
    RegionRole, Room, SessionOptions, TransferMode, WorkerRole,
};
use kv_local::{Arena, LocalConfig, LocalTransport};
use kv_poll::{Publication, Worker, WorkerConfig};
use kv_timeline::{IncidentKind, Outcome, Phase, Record, Recorder, Side, Timeline};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;

/// A worker with a cache of eight pages, and what it has recorded.
struct Host {
    worker: Worker,
    arena: Arena,
    recorder: Recorder,
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
        let recorder = Recorder::new(args.worker());
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
        let config = WorkerConfig::new(args, role).with(|config| {
            config.bootstrap = Some(addr.to_owned());
            config.listener = Some(recorder.listener());
        });
        let worker = Worker::start(config, transport, Box::new(client)).unwrap();
        until("the registration", || worker.manager().publication() == Publication::Published);
        Host { worker, arena, recorder, pool: PagePool::new(8) }
    }

    /// Stops the worker. Returns its record, as another process reads it.
    fn stop(self) -> Record {
        let incarnation = self.worker.incarnation();
        self.worker.stop(PATIENCE);
        let json = self.recorder.record(incarnation).to_json().unwrap();
        Record::from_json(json.as_bytes()).unwrap()
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the pages of a session that has ended, and gives them back to the pool.
fn back(session: &mut dyn KvSession, host: &Host) {
    let mut reclaimed = None;
    until("the pages", || {
        reclaimed = session.reclaim();
        reclaimed.is_some()
    });
    host.pool.release(reclaimed.unwrap().pages).unwrap();
}

/// Moves two pages from one worker to the other.
fn serve(prefill: &Host, decode: &Host, addr: &str, room: &Room, mode: TransferMode) {
    let options = || SessionOptions::default().with(|options| options.mode = Some(mode));
    prefill.arena.write(3 * PAGE, &[7; 2 * PAGE]).unwrap();
    let adopt = |host: &Host, pages| host.pool.adopt(PageList::from_pages(pages).unwrap()).unwrap();
    let mut sender = prefill.worker.manager().sender(addr, room.clone(), &[], options()).unwrap();
    sender.init(2, None).unwrap();
    sender.send(adopt(prefill, [3, 4])).unwrap();
    let mut receiver = decode.worker.manager().receiver(addr, room.clone(), options()).unwrap();
    receiver.init(adopt(decode, [6, 0]), None).unwrap();
    until("the receiver", || receiver.poll().is_terminal());
    until("the sender", || sender.poll().is_terminal());
    assert_eq!((sender.poll(), receiver.poll()), (KvPoll::Success, KvPoll::Success));
    let mut bytes = vec![0; PAGE];
    for page in [6, 0] {
        decode.arena.read(page * PAGE, &mut bytes).unwrap();
        assert_eq!(bytes, [7; PAGE]);
    }
    back(&mut sender, prefill);
    back(&mut receiver, decode);
    assert_eq!((prefill.pool.num_out(), decode.pool.num_out()), (0, 0));
}

#[test]
fn two_workers_requests_are_joined_and_a_lease_that_nobody_took_is_an_incident() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let (prefill, decode) = (
        Host::start("prefill", WorkerRole::Prefill, &addr),
        Host::start("decode", WorkerRole::Decode, &addr),
    );
    let pushed = Room::Number(42);
    let pulled = Room::request("</script><b>chat</b>").unwrap();
    serve(&prefill, &decode, &addr, &pushed, TransferMode::Push);
    serve(&prefill, &decode, &addr, &pulled, TransferMode::Pull);
    // The two go on serving while their records are taken.
    let taken = |host: &Host| {
        let json = host.recorder.latest(host.worker.incarnation(), 2).to_json().unwrap();
        Record::from_lines(json.as_bytes(), 1).unwrap().remove(0)
    };
    let options = || SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push));
    let waiting = Room::Number(41);
    let mut waits = prefill.worker.manager().sender(&addr, waiting.clone(), &[], options()).unwrap();
    waits.init(2, None).unwrap();
    let mut receives = decode.worker.manager().receiver(&addr, waiting.clone(), options()).unwrap();
    receives.init(decode.pool.adopt(PageList::from_pages([6, 0]).unwrap()).unwrap(), None).unwrap();
    until("the meeting", || waits.poll() == KvPoll::WaitingForInput);
    let early = Timeline::join_latest(vec![taken(&prefill), taken(&decode)], 1).unwrap();
    let [request] = early.requests() else { panic!("{:?}", early.requests()) };
    assert_eq!(request.room, waiting);
    let seen: Vec<(Side, &Outcome)> = request.lanes.iter().map(|lane| (lane.side, &lane.outcome)).collect();
    assert_eq!(seen, [(Side::Sender, &Outcome::Open), (Side::Receiver, &Outcome::Open)]);
    assert!(early.html().unwrap().contains("\"open\"") && early.perfetto().is_ok());
    waits.send(prefill.pool.adopt(PageList::from_pages([3, 4]).unwrap()).unwrap()).unwrap();
    for session in [&mut waits as &mut dyn KvSession, &mut receives] {
        until("the end", || session.poll() == KvPoll::Success);
    }
    back(&mut waits, &prefill);
    back(&mut receives, &decode);

    // Nobody comes for the pages of this request.
    let options = SessionOptions::default().with(|options| {
        options.mode = Some(TransferMode::Pull);
        options.lease = Some(Lease::Renewable(Duration::from_millis(20)));
    });
    let forgotten = Room::Number(43);
    let mut sender = prefill.worker.manager().sender(&addr, forgotten.clone(), &[], options).unwrap();
    sender.init(1, None).unwrap();
    sender.send(prefill.pool.adopt(PageList::from_pages([5]).unwrap()).unwrap()).unwrap();
    until("the end of the lease", || sender.poll() == KvPoll::Failed);
    assert_eq!(sender.failure().map(|failure| failure.cause), Some(Cause::LeaseExpired));
    let mut reclaimed = None;
    until("the page", || {
        reclaimed = sender.reclaim();
        reclaimed.is_some()
    });
    prefill.pool.release(reclaimed.unwrap().pages).unwrap();

    let records = vec![prefill.stop(), decode.stop()];
    server.stop();
    let timeline = Timeline::join(records).unwrap();
    let rooms: Vec<&Room> = timeline.requests().iter().map(|request| &request.room).collect();
    assert_eq!(rooms, [&pushed, &pulled, &waiting, &forgotten]);
    for (request, moves) in timeline.requests().iter().zip([Side::Sender, Side::Receiver]) {
        let sides: Vec<Side> = request.lanes.iter().map(|lane| lane.side).collect();
        assert_eq!(sides, [Side::Sender, Side::Receiver]);
        for lane in &request.lanes {
            assert_eq!((&lane.outcome, lane.pages), (&Outcome::Succeeded, 2));
            assert_eq!(lane.bytes(), if lane.side == moves { 2 * PAGE as u64 } else { 0 });
            assert!(lane.spans.iter().any(|span| span.phase == Phase::Transferring));
            assert!(lane.spans.is_sorted_by_key(|span| span.from));
        }
    }
    assert!(timeline.requests()[1].lanes.iter().all(|lane| lane.lease.is_some()));
    // Both read the clock of one host, so that the true shift is nothing.
    for actor in timeline.workers() {
        let clock = actor.recorded.as_ref().unwrap().clock;
        let unsure = clock.uncertainty.expect("the two have spoken with each other");
        assert!(clock.shift.unsigned_abs() <= u128::from(unsure), "{clock:?}");
    }
    let expired =
        timeline.incidents().iter().find(|incident| incident.kind == IncidentKind::LeaseExpired).unwrap();
    assert_eq!(expired.request, Some((3, 0)));
    assert_eq!(timeline.workers()[expired.worker].worker.to_string(), "prefill/0");
    let failed = matches!(&timeline.requests()[3].lanes[0].outcome, Outcome::Failed(failure)
        if failure.name.as_str() == "LeaseExpired");
    assert!(failed, "{:?}", timeline.requests()[3].lanes[0].outcome);
}
