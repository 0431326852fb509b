//! The worker's thread under a scripted machine, plane and client.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Output};
use kv_core::{
    BootstrapError, BootstrapEvent, Cause, Desc, KvArgs, KvManager, KvPoll, KvReceiver, KvSender, KvSession,
    LookupId, Op, OpenError, PageList, Pages, PeerId, Phase, PlaneError, PlaneEvent, PlaneWait, Post, PostId,
    RankQuery, Region, RegionRole, Replica, Room, SessionId, SessionOptions, TransferError, WorkerRole,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::*;

mod fences;

/// Long enough for any machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small valid worker.
pub(crate) fn args() -> KvArgs {
    KvArgs::builder("engine", 0)
        .pages(64, 16)
        .region(Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64))
        .build()
        .unwrap()
}

pub(crate) fn pages(list: &[u32]) -> Pages {
    Pages::claim(PageList::from_pages(list.iter().copied()).unwrap()).unwrap()
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
    Published(String),
    Withdrawn,
    PlaneSend,
    Cancelled,
    Disconnected,
}

type Log = Arc<Mutex<Vec<Seen>>>;

/// A machine that obeys at once: what it does is decided by the room of the session and by
/// one-word frames.
struct Script {
    log: Log,
    outputs: VecDeque<Output>,
    rooms: BTreeMap<SessionId, Room>,
    held: Vec<(SessionId, Pages)>,
    timeout: Option<Time>,
    shutdown: bool,
}

/// In this room the machine waits for the word `done`; in all others it succeeds at once.
const SLOW: u64 = 1000;
/// In this room the pages stay with the machine after the end.
const STUCK: u64 = 2000;

impl Script {
    fn see(&self, seen: Seen) {
        self.log.lock().unwrap().push(seen);
    }

    fn end(&mut self, session: SessionId, failure: Option<Cause>) {
        let Some(room) = self.rooms.remove(&session) else { return };
        let poll = if failure.is_some() { KvPoll::Failed } else { KvPoll::Success };
        let failure = failure.map(|cause| {
            Box::new(TransferError { room: room.clone(), peer: None, phase: Phase::Transfer, cause })
        });
        self.outputs.push_back(Output::Status { session, poll, failure });
        if room != Room::from(STUCK) {
            self.release(Some(session));
        }
    }

    /// In reverse order, to be awkward.
    fn release(&mut self, of: Option<SessionId>) {
        for (session, pages) in std::mem::take(&mut self.held).into_iter().rev() {
            if of.is_none_or(|of| of == session) {
                self.outputs.push_back(Output::Release { session, pages });
            } else {
                self.held.insert(0, (session, pages));
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::OpenSender { session, room, .. } | Command::OpenReceiver { session, room, .. } => {
                self.see(Seen::Opened(session.0));
                self.rooms.insert(session, room);
                let poll = KvPoll::WaitingForInput;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
                if self.shutdown {
                    self.end(session, Some(Cause::WorkerStopped));
                }
            }
            Command::InitSender { .. } => {}
            Command::BeginChunk { session, chunk } => {
                self.see(Seen::Sent(session.0));
                self.held.push((session, chunk));
                let poll = KvPoll::Transferring;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
            }
            Command::LayersFinal { session, chunk, layers } => {
                self.see(Seen::Final(session.0, chunk.0, layers.map_or(0, |layers| layers.start)));
            }
            Command::FenceFailed { session, chunk, error } => {
                self.end(session, Some(Cause::Fence { chunk, error }));
            }
            Command::Groups { session, groups } => {
                self.outputs.push_back(Output::ReleaseGroups { session, groups, skipped: Vec::new() });
            }
            Command::Send { session, chunk: pages } | Command::InitReceiver { session, pages, .. } => {
                self.see(Seen::Sent(session.0));
                self.held.push((session, pages));
                let poll = KvPoll::Transferring;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
                let slow = [Room::from(SLOW), Room::from(STUCK)];
                if self.rooms.get(&session).is_some_and(|room| !slow.contains(room)) {
                    self.end(session, None);
                }
            }
            Command::Abort { session } => {
                self.see(Seen::Aborted(session.0));
                self.end(session, Some(Cause::Aborted));
            }
            Command::Shutdown => {
                self.see(Seen::Shutdown);
                self.shutdown = true;
                for session in self.rooms.keys().copied().collect::<Vec<_>>() {
                    self.end(session, Some(Cause::WorkerStopped));
                }
            }
        }
    }

    fn word(&mut self, now: Time, word: &[u8]) {
        let peer = PeerId(1);
        let frame = Bytes::from_static(b"frame");
        match word {
            b"done" => {
                self.see(Seen::Frame("done"));
                for session in self.rooms.keys().copied().collect::<Vec<_>>() {
                    self.end(session, None);
                }
            }
            b"release" => self.release(None),
            b"nothing" => {}
            b"outputs" => {
                let descs = vec![Desc {
                    local_region: 0,
                    remote_region: 0,
                    local_offset: 0,
                    remote_offset: 0,
                    len: 1,
                }];
                let post = |id| Post { id: PostId(id), op: Op::Write, descs: descs.clone(), notify: None };
                let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Rank(0) };
                self.outputs.extend([
                    Output::Connect { peer, metadata: Bytes::from_static(b"bad") },
                    Output::Send { peer, frame: frame.clone() },
                    Output::Send { peer: PeerId(2), frame },
                    Output::Post { peer, post: post(1) },
                    Output::Post { peer: PeerId(2), post: post(2) },
                    Output::Cancel { post: PostId(1) },
                    Output::Lookup { lookup: LookupId(5), addr: "nowhere".to_owned(), query },
                    Output::Disconnect { peer },
                ]);
            }
            b"panic" => panic!("a bug in the machine"),
            b"timer" => self.timeout = Some(now + Duration::from_millis(30)),
            other => panic!("unknown word {other:?}"),
        }
    }
}

impl Machine for Script {
    fn handle(&mut self, now: Time, input: Input) {
        assert!(self.outputs.is_empty(), "outputs are drained after every input");
        match input {
            Input::Command(command) => self.command(command),
            Input::Frame(frame) => self.word(now, &frame),
            Input::Posted { post, result } => self.see(Seen::Posted(post.0, result.is_ok())),
            Input::ConnectFailed { .. } => self.see(Seen::ConnectFailed),
            Input::PeerGone { .. } => self.see(Seen::PeerGone),
            Input::Connected { .. } | Input::Found { .. } => {}
            Input::LookupFailed { lookup, .. } => self.see(Seen::LookupFailed(lookup.0)),
            Input::Timeout => {
                assert!(self.timeout.take().is_some_and(|at| at <= now), "not before it is due");
                self.word(now, b"done");
                let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Rank(0) };
                let (lookup, addr) = (LookupId(6), "nowhere".to_owned());
                self.outputs.push_back(Output::Lookup { lookup, addr, query });
            }
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.timeout
    }
}

/// A plane whose events a test writes. Peer 1 exists, peer 2 refuses everything.
struct FakePlane {
    log: Log,
    wire: Arc<Wire>,
    ended: Vec<PlaneEvent>,
    regions: usize,
}

struct Wire {
    event: OwnedFd,
    events: Mutex<Vec<PlaneEvent>>,
    /// Done once on the worker's thread, between its last look at the commands and its sleep.
    before_sleep: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Wire {
    fn new() -> Arc<Wire> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        Arc::new(Wire { event, events: Mutex::default(), before_sleep: Mutex::default() })
    }

    fn deliver(&self, event: PlaneEvent) {
        self.events.lock().unwrap().push(event);
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
    }

    fn say(&self, word: &'static str) {
        self.deliver(PlaneEvent::Frame(Bytes::from_static(word.as_bytes())));
    }
}

impl Plane for FakePlane {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn register(&mut self, region: &Region) -> Result<(), PlaneError> {
        self.regions += 1;
        match region.addr {
            0xbad000 => Err(PlaneError::UnknownMemory { region: 1, addr: region.addr, len: region.len }),
            _ => Ok(()),
        }
    }

    fn metadata(&self) -> Result<Bytes, PlaneError> {
        assert!(self.regions > 0, "regions come first");
        Ok(Bytes::from_static(b"metadata"))
    }

    fn connect(&mut self, _: PeerId, _: &[u8]) -> Result<(), PlaneError> {
        Err(PlaneError::Metadata("bad"))
    }

    fn disconnect(&mut self, _: PeerId) {
        self.log.lock().unwrap().push(Seen::Disconnected);
    }

    fn send(&mut self, peer: PeerId, _: Bytes) -> Result<(), PlaneError> {
        if peer == PeerId(2) {
            return Err(PlaneError::WouldBlock);
        }
        self.log.lock().unwrap().push(Seen::PlaneSend);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), PlaneError> {
        if peer == PeerId(2) {
            return Err(PlaneError::PeerGone);
        }
        self.ended.push(PlaneEvent::Posted { post: post.id, result: Ok(()) });
        Ok(())
    }

    fn cancel(&mut self, _: PostId) {
        self.log.lock().unwrap().push(Seen::Cancelled);
    }

    fn poll(&mut self, _: Time, events: &mut Vec<PlaneEvent>) {
        let _ = rustix::io::read(&self.wire.event, &mut [0; 8]);
        events.append(&mut self.ended);
        events.append(&mut self.wire.events.lock().unwrap());
    }

    fn wait(&self) -> PlaneWait {
        if let Some(act) = self.wire.before_sleep.lock().unwrap().take() {
            act();
        }
        match self.ended.is_empty() {
            true => PlaneWait::Readable(vec![self.wire.event.as_raw_fd()]),
            false => PlaneWait::Now,
        }
    }
}

/// A client that refuses every question, and has no descriptor: only being polled again after a
/// question brings out its answer.
struct FakeClient {
    log: Log,
    answers: VecDeque<BootstrapEvent>,
}

impl BootstrapClient for FakeClient {
    fn publish(&mut self, _: Time, addr: &str, record: RankRecord) {
        assert_eq!((record.plane.as_str(), &record.metadata[..]), ("fake", &b"metadata"[..]));
        self.log.lock().unwrap().push(Seen::Published(addr.to_owned()));
        let addr = addr.to_owned();
        let (error, retry_in) = (BootstrapError::TimedOut, Duration::ZERO);
        self.answers.push_back(BootstrapEvent::PublishFailed { addr: addr.clone(), error, retry_in });
        self.answers.push_back(BootstrapEvent::Published { addr });
    }

    fn withdraw(&mut self, _: Time) {
        self.log.lock().unwrap().push(Seen::Withdrawn);
    }

    fn lookup(&mut self, _: Time, lookup: LookupId, _: &str, _: &RankQuery) {
        self.answers.push_back(BootstrapEvent::Failed { lookup, error: BootstrapError::UnknownRank });
    }

    fn poll(&mut self, _: Time) -> Option<BootstrapEvent> {
        self.answers.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        None
    }
}

/// A running worker over fakes, and what they have seen.
struct Rig {
    worker: Worker,
    wire: Arc<Wire>,
    log: Log,
}

impl Rig {
    fn start() -> Rig {
        Rig::with(WorkerConfig::new(args(), WorkerRole::Prefill).max_sessions(64))
    }

    fn with(config: WorkerConfig) -> Rig {
        let (log, wire) = (Log::default(), Wire::new());
        let node = Script {
            log: Arc::clone(&log),
            outputs: VecDeque::new(),
            rooms: BTreeMap::new(),
            held: Vec::new(),
            timeout: None,
            shutdown: false,
        };
        let plane = fake_plane(&log, &wire);
        let client = FakeClient { log: Arc::clone(&log), answers: VecDeque::new() };
        let record = RankRecord {
            worker: config.args.worker().clone(),
            incarnation: Incarnation::from_random(1),
            role: config.role,
            plane: "fake".to_owned(),
            metadata: Bytes::from_static(b"metadata"),
            geometry: config.args.geometry().clone(),
        };
        let worker =
            Worker::launch(config, record, Box::new(node), Box::new(plane), Box::new(client)).unwrap();
        Rig { worker, wire, log }
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

fn fake_plane(log: &Log, wire: &Arc<Wire>) -> FakePlane {
    FakePlane { log: Arc::clone(log), wire: Arc::clone(wire), ended: Vec::new(), regions: 1 }
}

#[test]
fn pages_go_through_and_come_back_in_order() {
    let rig = Rig::start();
    let mut sender = rig.sender(SLOW);
    sender.init(4, None).unwrap();
    for chunk in [&[7, 8][..], &[1], &[], &[30]] {
        sender.send(pages(chunk)).unwrap();
    }
    rig.until("the chunks", || rig.seen().len() == 5);
    assert_eq!(rig.worker.manager().gauges().pages_in_transfer, 4);
    let mut sender = sender.reclaim().expect_err("the session has not ended");
    sender.init(4, None).unwrap();
    rig.wire.say("done");
    rig.until("success", || sender.poll() == KvPoll::Success);
    let mut left = Some(sender);
    rig.until("the pages", || match left.take().map(KvSession::reclaim) {
        Some(Ok(back)) => back == pages(&[7, 8, 1, 30]),
        Some(Err(not_yet)) => {
            left = Some(not_yet);
            false
        }
        None => panic!("other pages came back"),
    });
    let gauges = rig.worker.manager().gauges();
    assert_eq!((gauges.pages_in_transfer, gauges.pages_quarantined, gauges.pages_orphaned), (0, 0, 0));
    rig.until("the free place", || rig.worker.manager().gauges().sessions_open == 0);
}

#[test]
fn an_inbound_frame_wakes_a_sleeping_worker_and_a_timer_does() {
    let rig = Rig::start();
    let mut sender = rig.sender(SLOW);
    sender.send(pages(&[1])).unwrap();
    rig.until_seen(&Seen::Sent(0));
    std::thread::sleep(Duration::from_millis(20));
    rig.wire.say("timer");
    let start = Instant::now();
    // Nobody but the machine's own timer ends this session.
    while sender.poll() != KvPoll::Success {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(sender.reclaim().ok(), Some(pages(&[1])));
    // The question that the timer raised is answered without anything else happening.
    rig.until_seen(&Seen::LookupFailed(6));
}

#[test]
fn a_command_given_at_the_moment_of_falling_asleep_is_taken() {
    let rig = Rig::start();
    let (manager, kept) = (rig.worker.manager(), Arc::new(Mutex::new(None)));
    let opened = Arc::clone(&kept);
    *rig.wire.before_sleep.lock().unwrap() = Some(Box::new(move || {
        let sender = manager.sender("", Room::from(SLOW), &[], SessionOptions::default());
        *opened.lock().unwrap() = sender.ok();
    }));
    rig.wire.say("nothing");
    rig.until_seen(&Seen::Opened(0));
    let mut sender = kept.lock().unwrap().take().unwrap();
    *rig.wire.before_sleep.lock().unwrap() = Some(Box::new(move || sender.abort()));
    rig.wire.say("nothing");
    rig.until_seen(&Seen::Aborted(0));
}

#[test]
fn an_idle_worker_takes_no_turns() {
    let rig = Rig::start();
    let sender = rig.sender(SLOW);
    rig.until_seen(&Seen::Opened(0));
    std::thread::sleep(Duration::from_millis(50));
    let before = rig.worker.manager().gauges().turns;
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(rig.worker.manager().gauges().turns, before);
    drop(sender);
    rig.until_seen(&Seen::Aborted(0));
}

#[test]
fn every_output_reaches_its_place_and_its_consequence_the_machine() {
    let rig = Rig::start();
    rig.wire.say("outputs");
    rig.wire.deliver(PlaneEvent::PeerGone { peer: PeerId(1), quiet_after: Duration::ZERO });
    let expected = [
        Seen::PlaneSend,
        Seen::Cancelled,
        Seen::Disconnected,
        Seen::ConnectFailed,
        Seen::Posted(2, false),
        Seen::PeerGone,
        Seen::LookupFailed(5),
        Seen::Posted(1, true),
    ];
    rig.until("all of it", || expected.iter().all(|seen| rig.seen().contains(seen)));
    assert_eq!(rig.seen().len(), expected.len(), "each exactly once: {:?}", rig.seen());
    let gauges = rig.worker.manager().gauges();
    assert_eq!((gauges.frames_sent, gauges.frames_dropped, gauges.frames_received), (1, 1, 1));
    assert_eq!((gauges.posts, gauges.posts_failed, gauges.posts_in_flight), (1, 1, 0));
}

#[test]
fn an_abort_that_overtakes_the_opening_still_counts() {
    for _ in 0..200 {
        let rig = Rig::start();
        let mut sender = rig.sender(SLOW);
        sender.abort();
        rig.until("the abort", || sender.poll() == KvPoll::Failed);
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::Aborted));
        assert_eq!(rig.seen(), [Seen::Opened(0), Seen::Aborted(0)]);
    }
}

#[test]
fn pages_given_to_an_ended_session_come_back_without_the_machine() {
    let rig = Rig::start();
    let mut sender = rig.sender(1);
    sender.send(pages(&[1])).unwrap();
    rig.until("success", || sender.poll() == KvPoll::Success);
    sender.send(pages(&[2, 3])).unwrap();
    sender.init(9, None).unwrap();
    let mut all = Vec::new();
    let mut left = Some(sender);
    rig.until("the pages", || match left.take().map(KvSession::reclaim) {
        Some(Ok(back)) => {
            all.extend(back.list().iter());
            true
        }
        Some(Err(not_yet)) => {
            left = Some(not_yet);
            false
        }
        None => true,
    });
    assert_eq!(all, [1, 2, 3]);
    assert_eq!(rig.seen(), [Seen::Opened(0), Seen::Sent(0)]);
}

#[test]
fn quarantined_pages_are_reported_when_they_become_reclaimable() {
    let rig = Rig::start();
    let manager = rig.worker.manager();
    let mut receiver = manager.receiver("a:1", Room::from(STUCK), SessionOptions::default()).unwrap();
    receiver.init(pages(&[4, 5]), None).unwrap();
    let id = receiver.id();
    rig.until_seen(&Seen::Sent(0));
    rig.wire.say("done");
    rig.until("the end", || receiver.poll() == KvPoll::Success);
    let receiver = receiver.reclaim().expect_err("a wire may touch them");
    rig.until("the gauge", || manager.gauges().pages_quarantined == 2);
    manager.poll_set().drain(|_| ());
    rig.wire.say("release");
    let mut changes = Vec::new();
    while changes.is_empty() {
        let mut fds = [PollFd::new(manager.poll_set(), PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1));
        manager.poll_set().drain(|change| changes.push(change));
    }
    assert_eq!(changes, [crate::Change { session: id, poll: KvPoll::Success, reclaimable: true }]);
    assert_eq!(receiver.reclaim().ok(), Some(pages(&[4, 5])));
    rig.until("the gauge", || manager.gauges().pages_quarantined == 0);
}

#[test]
fn a_dropped_session_is_aborted_and_its_pages_become_orphans() {
    let rig = Rig::start();
    let mut sender = rig.sender(SLOW);
    sender.send(pages(&[1, 2])).unwrap();
    drop(sender);
    let manager = rig.worker.manager();
    let mut orphans = Vec::new();
    rig.until("the orphans", || {
        orphans.extend(manager.orphans());
        !orphans.is_empty()
    });
    assert_eq!(orphans, [pages(&[1, 2])]);
    rig.until("the free place", || manager.gauges().sessions_open == 0);
}

#[test]
fn the_worker_publishes_itself_and_says_how_that_went() {
    let config = WorkerConfig::new(args(), WorkerRole::Prefill).bootstrap("host:1");
    let rig = Rig::with(config);
    rig.until("the registration", || rig.worker.manager().registration() == Registration::Published);
    assert_eq!(rig.seen(), [Seen::Published("host:1".to_owned())]);
    let (log, manager) = (Arc::clone(&rig.log), rig.worker.manager());
    drop(rig);
    assert!(log.lock().unwrap().contains(&Seen::Withdrawn));
    assert!(manager.is_stopped());
}

#[test]
fn stopping_ends_all_sessions_and_returns_their_pages() {
    let rig = Rig::start();
    let mut senders: Vec<_> = (0..10).map(|_| rig.sender(SLOW)).collect();
    for (sender, page) in senders.iter_mut().zip(0..) {
        sender.send(pages(&[page])).unwrap();
    }
    rig.until("the chunks", || rig.seen().len() == 20);
    let manager = rig.worker.manager();
    let start = Instant::now();
    let report = rig.worker.stop(PATIENCE);
    assert!(start.elapsed() < PATIENCE / 2, "no need to wait for the whole grace");
    assert_eq!(report, StopReport { sessions_ended: 10, ..StopReport::default() });
    for (sender, page) in senders.into_iter().zip(0..) {
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
        assert_eq!(sender.reclaim().ok(), Some(pages(&[page])));
    }
    let refused = manager.sender("", Room::from(1), &[], SessionOptions::default());
    assert_eq!(refused.map(drop), Err(OpenError::WorkerStopped));
    assert_eq!(manager.gauges().sessions_open, 0);
}

#[test]
fn stopping_gives_up_on_stuck_pages_after_the_grace_and_counts_them() {
    let rig = Rig::start();
    let mut sender = rig.sender(STUCK);
    sender.send(pages(&[1, 2, 3])).unwrap();
    rig.until_seen(&Seen::Sent(0));
    let report = rig.worker.stop(Duration::from_millis(50));
    assert_eq!(report, StopReport { sessions_ended: 1, pages_quarantined: 3, ..StopReport::default() });
    assert_eq!(sender.poll(), KvPoll::Failed);
    assert!(sender.reclaim().is_err(), "nobody can prove them quiet any more");
}

#[test]
fn a_panic_in_the_thread_fails_every_session_and_frees_no_page() {
    let rig = Rig::start();
    let mut held = rig.sender(SLOW);
    held.send(pages(&[1, 2])).unwrap();
    let idle = rig.sender(SLOW);
    rig.until_seen(&Seen::Opened(1));
    rig.wire.say("panic");
    rig.until("the failure", || held.poll() == KvPoll::Failed && idle.poll() == KvPoll::Failed);
    assert_eq!(held.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
    assert_eq!(idle.reclaim().ok(), Some(Pages::none()));
    assert!(held.reclaim().is_err());
    rig.until("the mark", || rig.worker.manager().is_stopped());
    let report = rig.worker.stop(PATIENCE);
    assert_eq!((report.panicked, report.pages_quarantined), (true, 2));
}

#[test]
fn handles_may_move_between_threads_and_managers_be_shared() {
    fn sent<T: Send>() {}
    fn shared<T: Send + Sync>() {}
    sent::<crate::Sender>();
    sent::<crate::Receiver>();
    shared::<Manager>();
    sent::<Worker>();
}

#[test]
fn a_region_that_the_plane_refuses_is_named() {
    let args = KvArgs::builder("engine", 0)
        .pages(64, 16)
        .region(Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64))
        .region(Region::dram(RegionRole::Kv, 0xbad000, 64 * 64, 64))
        .build()
        .unwrap();
    let (log, wire) = (Log::default(), Wire::new());
    let client = FakeClient { log: Arc::clone(&log), answers: VecDeque::new() };
    let config = WorkerConfig::new(args, WorkerRole::Decode);
    let error = Worker::start(config, fake_plane(&log, &wire), Box::new(client)).map(drop);
    assert!(matches!(error, Err(StartError::Register { region: 1, .. })), "{error:?}");
}

#[test]
fn incarnations_differ_even_with_the_same_seed() {
    let start = || {
        let (log, wire) = (Log::default(), Wire::new());
        let client = FakeClient { log: Arc::clone(&log), answers: VecDeque::new() };
        let config = WorkerConfig::new(args(), WorkerRole::Decode).seed(1).max_sessions(8);
        Worker::start(config, fake_plane(&log, &wire), Box::new(client)).unwrap()
    };
    assert_ne!(start().incarnation(), start().incarnation());
}

#[test]
fn empty_queues_are_refused_by_name() {
    let (log, wire) = (Log::default(), Wire::new());
    let client = FakeClient { log: Arc::clone(&log), answers: VecDeque::new() };
    let config = WorkerConfig::new(args(), WorkerRole::Decode).command_queue(0);
    let error = Worker::start(config, fake_plane(&log, &wire), Box::new(client)).map(drop);
    assert_eq!(error, Err(StartError::Range { field: "command_queue", got: 0, max: MAX_QUEUE }));
}

/// Several schedulers open, feed, abort, drop and reclaim sessions against one worker with a tiny
/// ring: at the end every page is accounted for, once.
#[test]
fn no_page_is_lost_between_many_schedulers_and_one_worker() {
    const PAGES: u32 = 64;
    const SCHEDULERS: u32 = 4;
    let config = WorkerConfig::new(args(), WorkerRole::Prefill).max_sessions(16).command_queue(4);
    let rig = Rig::with(config);
    let schedulers: Vec<_> = (0..SCHEDULERS)
        .map(|number| {
            let manager = rig.worker.manager();
            std::thread::spawn(move || {
                let share = PAGES / SCHEDULERS;
                let mut free = pages(&(number * share..(number + 1) * share).collect::<Vec<_>>());
                let mut open = Vec::new();
                for step in 0..3_000_u32 {
                    let room = if step % 7 == 0 { SLOW } else { u64::from(step % 900) };
                    let opened = manager.sender("", Room::from(room), &[], SessionOptions::default());
                    if let Ok(mut sender) = opened {
                        let chunk = free.split_off(free.len().saturating_sub(3));
                        if let Err(refused) = sender.send(chunk) {
                            free.append(refused.0).unwrap();
                        }
                        if step % 5 == 0 {
                            sender.abort();
                        }
                        open.push(sender);
                        if step % 7 == 1 {
                            drop(open.swap_remove(step as usize % open.len()));
                        }
                    }
                    open = open
                        .into_iter()
                        .filter_map(|sender| match sender.reclaim() {
                            Ok(back) => {
                                free.append(back).unwrap();
                                None
                            }
                            Err(not_yet) => Some(not_yet),
                        })
                        .collect();
                    if step % 16 == 0 {
                        manager.poll_set().drain(|_| ());
                        for orphan in manager.orphans() {
                            free.append(orphan).unwrap();
                        }
                        std::thread::yield_now();
                    }
                }
                drop(open);
                free.list().iter().collect::<Vec<_>>()
            })
        })
        .collect();
    let mut back: Vec<u32> = schedulers.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let manager = rig.worker.manager();
    let report = rig.worker.stop(PATIENCE);
    assert_eq!((report.pages_quarantined, report.panicked), (0, false));
    back.extend(manager.orphans().iter().flat_map(|orphan| orphan.list().iter()));
    back.sort_unstable();
    assert_eq!(back, (0..PAGES).collect::<Vec<_>>());
    assert_eq!(manager.gauges().sessions_open, 0);
}
