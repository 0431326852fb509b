//! A worker's life: its start, its publication, its stop, and its death by a panic.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use kv_core::{
    Cause, ChunkId, FinalLayers, KvArgs, KvManager, KvPoll, KvSender, KvSession, OpenError, Pages, Region,
    RegionRole, Room, SessionOptions, WorkerRole,
};

use super::client::FakeClient;
use super::script::{SLOW, STUCK};
use super::transport::{Wire, fake_transport};
use super::{Log, PATIENCE, Rig, Seen, args, pages};
use crate::kv::{Manager, StopReport, Stopping, Worker, WorkerConfig};
use crate::worker::setup::MAX_QUEUE;
use crate::worker::{Publication, StartError};

#[test]
fn a_region_that_the_transport_refuses_is_named() {
    let args = KvArgs::builder("engine", 0)
        .pages(64, 16)
        .region(Region::dram(RegionRole::Kv, 0x1000, 64 * 64, 64))
        .region(Region::dram(RegionRole::Kv, 0xbad000, 64 * 64, 64))
        .build()
        .unwrap();
    let (log, wire) = (Log::default(), Wire::new());
    let client = FakeClient::new(&log);
    let config = WorkerConfig::new(args, WorkerRole::Decode);
    let error = Worker::start(config, fake_transport(&log, &wire), Box::new(client)).map(drop);
    assert!(matches!(error, Err(StartError::Register { region: 1, .. })), "{error:?}");
}

#[test]
fn empty_queues_are_refused_by_name() {
    let (log, wire) = (Log::default(), Wire::new());
    let client = FakeClient::new(&log);
    let config = WorkerConfig::new(args(), WorkerRole::Decode).with(|config| config.command_queue = 0);
    let error = Worker::start(config, fake_transport(&log, &wire), Box::new(client)).map(drop);
    assert_eq!(error, Err(StartError::Range { field: "command_queue", got: 0, max: MAX_QUEUE }));
}

#[test]
fn incarnations_differ_even_with_the_same_seed() {
    let start = || {
        let (log, wire) = (Log::default(), Wire::new());
        let client = FakeClient::new(&log);
        let config = WorkerConfig::new(args(), WorkerRole::Decode).with(|config| {
            config.seed = Some(1);
            config.max_sessions = 8;
        });
        Worker::start(config, fake_transport(&log, &wire), Box::new(client)).unwrap()
    };
    assert_ne!(start().incarnation(), start().incarnation());
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
fn the_worker_publishes_itself_and_says_how_that_went() {
    let config = WorkerConfig::new(args(), WorkerRole::Prefill)
        .with(|config| config.bootstrap = Some("host:1".to_owned()));
    let rig = Rig::with(config);
    rig.until("the publication", || rig.worker.manager().publication() == Publication::Published);
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
    for (mut sender, page) in senders.into_iter().zip(0..) {
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
        assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[page])));
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
    assert_eq!(sender.reclaim(), None, "nobody can prove them quiet any more");
}

#[test]
fn beginning_a_stop_returns_while_the_thread_is_busy_and_the_report_comes_later() {
    let rig = Rig::start();
    let (entered, has_entered) = channel();
    let (go_on, may_go_on) = channel();
    let mut sender = rig.sender(SLOW);
    let busy = move || {
        entered.send(()).unwrap();
        Ok(may_go_on.recv_timeout(PATIENCE).is_ok())
    };
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(busy)).unwrap();
    has_entered.recv_timeout(PATIENCE).unwrap();
    // The thread is inside the ready event until it is told to go on.
    let manager = rig.worker.manager();
    let mut stopping = rig.worker.begin_stop(PATIENCE);
    assert_eq!((stopping.poll(), manager.is_stopped()), (None, false));
    let refused = manager.sender("", Room::from(1), &[], SessionOptions::default());
    assert_eq!(refused.map(drop), Err(OpenError::WorkerStopped));
    go_on.send(()).unwrap();
    let report = StopReport { sessions_ended: 1, ..StopReport::default() };
    assert_eq!(until_reported(&mut stopping), report);
    assert_eq!((stopping.poll(), stopping.wait()), (Some(report), report), "it stays");
}

#[test]
fn pages_lent_when_a_stop_begins_come_back_once_no_wire_touches_them_and_not_before() {
    for watched in [true, false] {
        let rig = Rig::start();
        let mut sender = rig.sender(STUCK);
        sender.send(pages(&[1, 2, 3])).unwrap();
        rig.until_seen(&Seen::Sent(0));
        let (manager, wire) = (rig.worker.manager(), Arc::clone(&rig.wire));
        let mut stopping = Some(rig.worker.begin_stop(PATIENCE)).filter(|_| watched);
        until(|| sender.poll() == KvPoll::Failed);
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
        until(|| manager.gauges().pages_quarantined() == 3);
        assert_eq!(sender.reclaim(), None, "a data operation may touch the pages");
        assert!(!manager.is_stopped() && stopping.as_mut().is_none_or(|stopping| stopping.poll().is_none()));
        wire.say("release");
        until(|| manager.is_stopped());
        assert_eq!(manager.gauges().pages_quarantined(), 0);
        assert_eq!(sender.send(pages(&[4])), Ok(()), "what a stopped worker is given is free at once");
        assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[1, 2, 3, 4])));
        if let Some(stopping) = &mut stopping {
            let report = StopReport { sessions_ended: 1, ..StopReport::default() };
            assert_eq!(until_reported(stopping), report);
        }
    }
}

#[test]
fn pages_that_are_not_quiet_when_the_grace_is_over_are_reported_and_never_handed_back() {
    let rig = Rig::start();
    let mut sender = rig.sender(STUCK);
    sender.send(pages(&[1, 2, 3])).unwrap();
    rig.until_seen(&Seen::Sent(0));
    let (manager, wire) = (rig.worker.manager(), Arc::clone(&rig.wire));
    let mut stopping = rig.worker.begin_stop(Duration::ZERO);
    let report = StopReport { sessions_ended: 1, pages_quarantined: 3, ..StopReport::default() };
    assert_eq!(until_reported(&mut stopping), report);
    wire.say("release");
    assert_eq!(sender.reclaim(), None, "nothing is left to prove them quiet");
    assert_eq!((manager.orphans(), manager.gauges().pages_quarantined()), (vec![], 3));
}

#[test]
fn a_stop_is_awaited_and_wakes_its_task_when_the_thread_has_ended() {
    let rig = Rig::start();
    let mut sender = rig.sender(STUCK);
    sender.send(pages(&[1, 2, 3])).unwrap();
    rig.until_seen(&Seen::Sent(0));
    let wire = Arc::clone(&rig.wire);
    let stopping = pin!(rig.worker.begin_stop(PATIENCE));
    until(|| sender.poll() == KvPoll::Failed);
    // The first look finds the thread running, because a data operation may touch the pages.
    let report = StopReport { sessions_ended: 1, ..StopReport::default() };
    assert_eq!(awaited(stopping, || wire.say("release")), report);
}

/// Awaits a future as an executor does, which looks again only after the task was woken. The first look must find the
/// future pending; `then` makes what the future awaits come.
pub(super) fn awaited<F: Future>(mut future: Pin<&mut F>, then: impl FnOnce()) -> F::Output {
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&woken));
    let mut cx = Context::from_waker(&waker);
    assert!(future.as_mut().poll(&mut cx).is_pending());
    then();
    loop {
        until(|| woken.0.swap(false, Ordering::SeqCst));
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
    }
}

/// Lets other threads run until something holds.
pub(super) fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "never");
        std::thread::yield_now();
    }
}

pub(super) fn until_reported(stopping: &mut Stopping) -> StopReport {
    until(|| stopping.poll().is_some());
    stopping.poll().unwrap()
}

#[test]
fn a_panic_in_the_thread_fails_every_session_and_frees_no_page() {
    let rig = Rig::start();
    let mut held = rig.sender(SLOW);
    held.send(pages(&[1, 2])).unwrap();
    let mut idle = rig.sender(SLOW);
    rig.until_seen(&Seen::Opened(1));
    rig.wire.say("panic");
    rig.until("the failure", || held.poll() == KvPoll::Failed && idle.poll() == KvPoll::Failed);
    assert_eq!(held.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
    assert_eq!(idle.reclaim().map(|back| back.pages), Some(Pages::none()));
    assert_eq!(held.reclaim(), None);
    rig.until("the mark", || rig.worker.manager().is_stopped());
    let report = rig.worker.stop(PATIENCE);
    assert_eq!((report.panicked, report.pages_quarantined), (true, 2));
}
