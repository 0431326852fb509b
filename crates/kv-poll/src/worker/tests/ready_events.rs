//! Announcements behind ready events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kv_core::{
    Cause, ChunkId, FinalLayers, KvPoll, KvSender, KvSession, PageList, PagePool, Pages, ReadyEvent,
    ReadyEventError, WorkerRole,
};

use super::script::SLOW;
use super::{Broken, PATIENCE, Rig, Seen, args, pages};
use crate::kv::{StopReport, WorkerConfig};

/// A device that a test lets go on, and that counts how often it was asked.
#[derive(Clone, Default)]
struct Device {
    passed: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
}

struct Event(Device);

impl ReadyEvent for Event {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        Ok(self.0.passed.load(Ordering::SeqCst))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

impl Device {
    fn event(&self) -> Event {
        Event(self.clone())
    }

    fn go_on(&self) {
        self.passed.store(true, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }
}

/// A slow session with a chunk of one page under way.
fn begun(rig: &Rig, page: u32) -> crate::Sender {
    let mut sender = rig.sender(SLOW);
    sender.init(2, None).unwrap();
    assert_eq!(sender.begin_chunk(pages(&[page])), Ok(ChunkId(0)));
    sender
}

fn reclaimed(rig: &Rig, mut sender: crate::Sender) -> Pages {
    let mut back = None;
    rig.until("the pages", || {
        back = sender.reclaim();
        back.is_some()
    });
    back.unwrap().pages
}

#[test]
fn an_announcement_reaches_the_machine_when_its_ready_event_passes_and_keeps_its_place() {
    let rig = Rig::start();
    let (first, second) = (Device::default(), Device::default());
    let mut sender = begun(&rig, 1);
    sender.layers_final(FinalLayers::new(ChunkId(0), 0..1)).unwrap();
    sender.layers_final(FinalLayers::new(ChunkId(0), 1..2).after(first.event())).unwrap();
    assert_eq!(sender.begin_chunk(pages(&[2])), Ok(ChunkId(1)));
    sender.layers_final(FinalLayers::new(ChunkId(1), 0..1).after(second.event())).unwrap();
    sender.layers_final(FinalLayers::new(ChunkId(1), 1..2)).unwrap();
    // Another session overtakes the one that waits.
    let mut other = rig.sender(SLOW);
    other.send(pages(&[9])).unwrap();
    rig.until_seen(&Seen::Sent(1));
    rig.until("a question", || first.asked() > 3);
    second.go_on();
    let of = |seen: Vec<Seen>| -> Vec<Seen> {
        seen.into_iter().filter(|seen| matches!(seen, Seen::Sent(0) | Seen::Final(0, ..))).collect()
    };
    assert_eq!(of(rig.seen()), [Seen::Sent(0), Seen::Final(0, 0, 0)]);
    assert_eq!(second.asked(), 0, "it waits behind the first");
    first.go_on();
    rig.until_seen(&Seen::Final(0, 1, 1));
    let finals = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(chunk, layer)| Seen::Final(0, chunk, layer));
    let mut expected = finals.to_vec();
    expected.insert(0, Seen::Sent(0));
    expected.insert(3, Seen::Sent(0));
    assert_eq!(of(rig.seen()), expected);
    assert_eq!((first.dropped(), second.dropped()), (1, 1));
    rig.wire.say("done");
    assert_eq!(reclaimed(&rig, sender), pages(&[1, 2]));
    assert_eq!(reclaimed(&rig, other), pages(&[9]));
}

#[test]
fn an_abort_does_not_wait_for_the_ready_event_and_what_waited_comes_back() {
    let rig = Rig::start();
    let device = Device::default();
    let mut sender = begun(&rig, 1);
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(device.event())).unwrap();
    assert_eq!(sender.begin_chunk(pages(&[2])), Ok(ChunkId(1)));
    rig.until("a question", || device.asked() > 0);
    sender.abort();
    rig.until_seen(&Seen::Aborted(0));
    assert_eq!(reclaimed(&rig, sender), pages(&[1, 2]));
    assert_eq!(device.dropped(), 1);
    assert!(!rig.seen().iter().any(|seen| matches!(seen, Seen::Final(..))));
    assert_eq!(rig.worker.manager().gauges().pages_in_transfer(), 0);
}

#[test]
fn a_session_that_ends_while_its_ready_event_waits_gets_everything_back() {
    let rig = Rig::start();
    let device = Device::default();
    let mut sender = begun(&rig, 1);
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(device.event())).unwrap();
    sender.send(pages(&[2])).unwrap();
    rig.until("a question", || device.asked() > 0);
    // The machine's own deadline.
    rig.wire.say("timer");
    assert_eq!(reclaimed(&rig, sender), pages(&[1, 2]));
    assert_eq!(device.dropped(), 1);
    rig.until("the free place", || rig.worker.manager().gauges().sessions_open == 0);
}

#[test]
fn a_ready_event_that_fails_or_panics_fails_its_session_and_no_other() {
    let rig = Rig::start();
    let mut other = begun(&rig, 7);
    let mut failing = begun(&rig, 1);
    failing
        .layers_final(FinalLayers::all(ChunkId(0)).after(|| Err(ReadyEventError::Device { code: 700 })))
        .unwrap();
    failing.send(pages(&[2])).unwrap();
    let mut panicking = begun(&rig, 3);
    panicking
        .layers_final(FinalLayers::all(ChunkId(0)).after(|| panic!("a bug in the ready event")))
        .unwrap();
    let device = Device::default();
    other.layers_final(FinalLayers::new(ChunkId(0), 0..1).after(device.event())).unwrap();
    for (sender, error, back) in [
        (failing, ReadyEventError::Device { code: 700 }, pages(&[1, 2])),
        (panicking, ReadyEventError::Panicked, pages(&[3])),
    ] {
        rig.until("the failure", || sender.poll() == KvPoll::Failed);
        let cause = sender.failure().map(|failure| failure.cause);
        assert_eq!(cause, Some(Cause::ReadyEvent { chunk: ChunkId(0), error }));
        assert_eq!(reclaimed(&rig, sender), back);
    }
    assert_eq!(other.poll(), KvPoll::Transferring);
    device.go_on();
    rig.until_seen(&Seen::Final(0, 0, 0));
}

#[test]
fn stopping_with_ready_events_in_line_returns_their_pages_at_once() {
    let rig = Rig::start();
    let device = Device::default();
    let mut sender = begun(&rig, 1);
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(device.event())).unwrap();
    sender.send(pages(&[2])).unwrap();
    rig.until("a question", || device.asked() > 0);
    let start = Instant::now();
    let report = rig.worker.stop(PATIENCE);
    assert!(start.elapsed() < PATIENCE / 2, "no need to wait for the whole grace");
    assert_eq!(report, StopReport { sessions_ended: 1, ..StopReport::default() });
    assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[1, 2])));
    assert_eq!(device.dropped(), 1);
}

#[test]
fn ready_events_that_panic_when_they_are_dropped_lose_no_page_and_end_no_worker() {
    let rig = Rig::start();
    let pool = PagePool::new(8);
    let adopt = |page| pool.adopt(PageList::from_pages([page]).unwrap()).unwrap();
    let waiting = |page| {
        let mut sender = rig.sender(SLOW);
        sender.layers_final(FinalLayers::all(ChunkId(0)).after(Broken)).unwrap();
        sender.send(adopt(page)).unwrap();
        sender
    };
    // One event is dropped when its session ends, the others with the worker.
    let mut first = waiting(1);
    first.abort();
    pool.release(reclaimed(&rig, first)).unwrap();
    let others = [2, 3].map(waiting);
    assert_eq!(rig.worker.stop(PATIENCE), StopReport { sessions_ended: 2, ..StopReport::default() });
    for mut sender in others {
        pool.release(sender.reclaim().unwrap().pages).unwrap();
    }
    assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));
}

#[test]
fn what_waits_behind_a_ready_event_is_free_after_a_panic_of_the_thread() {
    let rig = Rig::start();
    let device = Device::default();
    let mut sender = rig.sender(SLOW);
    // A ready event before any page: all of them are behind it.
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(device.event())).unwrap();
    sender.send(pages(&[1, 2])).unwrap();
    rig.until("a question", || device.asked() > 0);
    rig.wire.say("panic");
    rig.until("the failure", || sender.poll() == KvPoll::Failed);
    assert_eq!(reclaimed(&rig, sender), pages(&[1, 2]));
    assert_eq!(device.dropped(), 1);
}

#[test]
fn a_ready_event_that_does_not_pass_is_asked_ever_less_often() {
    let rig = Rig::start();
    let device = Device::default();
    let mut sender = begun(&rig, 1);
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(device.event())).unwrap();
    rig.until("a question", || device.asked() > 0);
    let (start, before, turns) = (Instant::now(), device.asked(), rig.worker.manager().gauges().turns);
    std::thread::sleep(Duration::from_millis(200));
    rig.until("another question", || device.asked() > before);
    let (asked, turns) = (device.asked() - before, rig.worker.manager().gauges().turns - turns);
    let most = start.elapsed().as_millis() as usize + 10;
    assert!(asked <= most, "asked {asked} times in {:?}", start.elapsed());
    assert!(turns as usize <= 2 * most, "{turns} turns in {:?}", start.elapsed());
    sender.abort();
    rig.until("the pages", || device.dropped() == 1);
    // Nothing is waited for any more.
    rig.wire.say("nothing");
    rig.until("rest", || {
        let turns = rig.worker.manager().gauges().turns;
        std::thread::sleep(Duration::from_millis(100));
        rig.worker.manager().gauges().turns == turns
    });
}

#[test]
fn more_sessions_than_one_turn_asks_all_get_their_turn() {
    let rig =
        Rig::with(WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| config.max_sessions = 2000));
    let device = Device::default();
    let mut senders: Vec<_> = (0..1000).map(|_| rig.sender(SLOW)).collect();
    for sender in &mut senders {
        sender.layers_final(FinalLayers::new(ChunkId(0), 0..1).after(device.event())).unwrap();
    }
    device.go_on();
    rig.until("all", || device.dropped() == senders.len());
    let finals = |seen: &Seen| matches!(seen, Seen::Final(..));
    rig.until("all", || rig.seen().iter().filter(|seen| finals(seen)).count() == senders.len());
}

#[test]
fn a_full_ring_returns_the_announcement_with_its_ready_event() {
    let rig = Rig::with(WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| {
        config.max_sessions = 8;
        config.command_queue = 1;
    }));
    let (device, mut sender) = (Device::default(), rig.sender(SLOW));
    rig.until_seen(&Seen::Opened(0));
    // Fill the ring while the worker is busy with a ready event that takes its time.
    let (hold, held) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
    let (busy, entered) = (Arc::clone(&hold), Arc::clone(&held));
    sender
        .layers_final(FinalLayers::new(ChunkId(0), 0..1).after(move || {
            entered.store(true, Ordering::SeqCst);
            while busy.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            Ok(true)
        }))
        .unwrap();
    rig.until("the worker to be busy", || held.load(Ordering::SeqCst));
    sender.init(1, None).unwrap();
    let refused = sender.layers_final(FinalLayers::new(ChunkId(0), 1..2).after(device.event()));
    let kv_core::Backpressure(back) = refused.unwrap_err();
    assert_eq!((back.chunk, back.layers.clone(), back.ready_event.is_some()), (ChunkId(0), Some(1..2), true));
    assert_eq!(device.dropped(), 0);
    hold.store(false, Ordering::SeqCst);
    device.go_on();
    let mut back = Some(back);
    rig.until("room", || match sender.layers_final(back.take().unwrap()) {
        Ok(()) => true,
        Err(kv_core::Backpressure(layers)) => {
            back = Some(layers);
            false
        }
    });
    rig.until_seen(&Seen::Final(0, 0, 1));
}
