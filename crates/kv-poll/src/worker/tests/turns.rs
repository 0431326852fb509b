//! The worker's turns: what wakes it, what lets it sleep, and where the machine's outputs go.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::{KvManager, KvPoll, KvSender, KvSession, PeerId, PlaneEvent, Room, SessionOptions, WayEnd};

use super::script::SLOW;
use super::{PATIENCE, Rig, Seen, pages};

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
    rig.wire
        .deliver(PlaneEvent::PeerGone { peer: PeerId(1), end: WayEnd::Dead { quiet_after: Duration::ZERO } });
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
fn a_way_that_a_frame_asks_for_is_opened_to_the_memory_of_its_own_sender_only() {
    let rig = Rig::start();
    rig.wire.say("connects");
    // Connection 3 may speak for what it brings, connection 2 may not, and the worker itself for anybody.
    rig.until_seen(&Seen::Connected(4));
    let ways = [Seen::PlaneConnect(3), Seen::PlaneConnect(4)];
    let told = [Seen::ConnectFailed, Seen::Connected(3), Seen::Connected(4)];
    assert_eq!(rig.seen(), [&ways[..], &told[..]].concat());
}
