//! A worker that drains.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use kv_core::{KvManager, KvPoll, KvSender, KvSession, OpenError, Room, SessionOptions, WorkerRole};

use super::life::{awaited, until_reported};
use super::script::{SLOW, STUCK};
use super::{PATIENCE, Rig, Seen, args, pages};
use crate::kv::{StopReport, WorkerConfig};
use crate::worker::Publication;

/// Has the machine take a word.
fn say(rig: &Rig, word: &'static str) {
    rig.wire.say(word);
    rig.until_seen(&Seen::Frame(word));
}

#[test]
fn a_worker_that_drains_refuses_new_sessions_and_serves_those_that_are_open() {
    let rig = Rig::start();
    let mut open = rig.sender(STUCK);
    open.send(pages(&[1, 2])).unwrap();
    let manager = rig.worker.manager();
    let draining = manager.begin_drain();
    let refused = manager.sender("", Room::from(1), &[], SessionOptions::default());
    assert_eq!(refused.map(drop), Err(OpenError::Draining));
    rig.until_seen(&Seen::Drain);
    assert_eq!(open.send(pages(&[3])), Ok(()), "an open session takes commands");
    rig.until("its chunk", || rig.seen().iter().filter(|seen| **seen == Seen::Sent(0)).count() == 2);
    assert!(!draining.is_empty(), "pages are out");
    assert_eq!(open.poll(), KvPoll::Transferring, "nothing has ended the session");
    rig.wire.say("done");
    rig.until("the end", || open.poll() == KvPoll::Success);
    assert!(!draining.is_empty(), "a data operation may touch the pages");
    rig.wire.say("release");
    rig.until("emptiness", || draining.is_empty());
    assert_eq!(open.reclaim().map(|back| back.pages), Some(pages(&[1, 2, 3])));
    let gauges = manager.gauges();
    assert_eq!((gauges.sessions_open, gauges.pages_in_transfer(), gauges.pages_quarantined()), (0, 0, 0));
    assert!(!rig.seen().contains(&Seen::Shutdown), "it runs until it is stopped");
    assert_eq!(rig.worker.stop(PATIENCE), StopReport::default());
}

#[test]
fn a_worker_that_drains_leaves_its_server_when_no_peer_is_awaited_and_is_empty_without_debts() {
    let config = WorkerConfig::new(args(), WorkerRole::Prefill)
        .with(|config| config.bootstrap = Some("host:1".to_owned()));
    let rig = Rig::with(config);
    let manager = rig.worker.manager();
    rig.until("the publication", || manager.publication() == Publication::Published);
    for word in ["await", "owe"] {
        say(&rig, word);
    }
    let draining = manager.begin_drain();
    rig.until_seen(&Seen::Drain);
    say(&rig, "look");
    assert_eq!((manager.publication(), draining.is_empty()), (Publication::Published, false));
    say(&rig, "await no more");
    rig.until_seen(&Seen::Left);
    assert_eq!(manager.publication(), Publication::Left);
    assert!(!draining.is_empty(), "a peer does not know yet how its request has ended");
    say(&rig, "settle");
    rig.until("emptiness", || draining.is_empty());
    assert!(!rig.seen().contains(&Seen::Withdrawn), "the registration stays until the stop");
    assert_eq!(rig.seen().iter().filter(|seen| **seen == Seen::Left).count(), 1);
}

#[test]
fn a_worker_whose_machine_serves_peers_is_not_empty_and_a_stop_waits_for_them() {
    let rig = Rig::start();
    say(&rig, "serve");
    let draining = rig.worker.manager().begin_drain();
    rig.until_seen(&Seen::Drain);
    say(&rig, "look");
    assert!(!draining.is_empty());
    say(&rig, "rest");
    rig.until("emptiness", || draining.is_empty());

    let rig = Rig::start();
    say(&rig, "serve");
    let wire = Arc::clone(&rig.wire);
    let stopping = pin!(rig.worker.begin_stop(PATIENCE));
    assert_eq!(awaited(stopping, || wire.say("rest")), StopReport::default());
}

#[test]
fn a_drain_with_a_deadline_stops_when_it_is_empty_or_when_its_time_is_over() {
    let (done, late) = (("done", PATIENCE, 0), ("look", Duration::from_millis(50), 1));
    for (drains_before, (word, within, sessions_ended)) in
        [(false, done), (false, late), (true, done), (true, late)]
    {
        let rig = Rig::start();
        let mut open = rig.sender(SLOW);
        open.send(pages(&[1, 2])).unwrap();
        rig.until_seen(&Seen::Sent(0));
        if drains_before {
            let draining = rig.worker.manager().begin_drain();
            rig.until_seen(&Seen::Drain);
            assert!(!draining.is_empty());
        }
        let wire = Arc::clone(&rig.wire);
        let mut stopping = rig.worker.drain_then_stop(within, PATIENCE);
        wire.say(word);
        let report = StopReport { sessions_ended, ..StopReport::default() };
        assert_eq!(until_reported(&mut stopping), report, "{word}");
        assert_eq!(open.failure().is_some(), sessions_ended > 0);
        assert_eq!(open.reclaim().map(|back| back.pages), Some(pages(&[1, 2])));
    }
}

#[test]
fn a_drain_is_awaited_and_wakes_its_task_when_the_worker_is_empty_or_stops() {
    for stops in [false, true] {
        let rig = Rig::start();
        let mut open = rig.sender(STUCK);
        open.send(pages(&[1])).unwrap();
        rig.until_seen(&Seen::Sent(0));
        let draining = pin!(rig.worker.manager().begin_drain());
        awaited(draining, || match stops {
            true => drop(rig.worker.stop(Duration::ZERO)),
            false => {
                rig.wire.say("done");
                rig.wire.say("release");
            }
        });
    }
}

#[test]
fn a_drain_that_is_asked_for_twice_or_let_go_of_is_the_same_drain() {
    let rig = Rig::start();
    let mut open = rig.sender(STUCK);
    open.send(pages(&[1])).unwrap();
    rig.until_seen(&Seen::Sent(0));
    let manager = rig.worker.manager();
    {
        let mut first = pin!(manager.begin_drain());
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let (second, third) = (manager.begin_drain(), manager.begin_drain());
    let refused = manager.sender("", Room::from(1), &[], SessionOptions::default());
    assert_eq!(refused.map(drop), Err(OpenError::Draining), "a drain that nobody holds goes on");
    rig.until_seen(&Seen::Drain);
    say(&rig, "look");
    assert_eq!(rig.seen().iter().filter(|seen| **seen == Seen::Drain).count(), 1, "the machine is told once");
    assert!(!second.is_empty() && !third.is_empty());
    rig.wire.say("done");
    rig.wire.say("release");
    rig.until("emptiness", || second.is_empty() && third.is_empty());
    assert!(manager.begin_drain().is_empty(), "and whoever asks later is told at once");
    assert_eq!(open.reclaim().map(|back| back.pages), Some(pages(&[1])));
}

#[test]
fn sessions_that_are_aborted_or_dropped_while_their_worker_drains_give_their_pages_back_first() {
    for drops in [false, true] {
        let rig = Rig::start();
        let mut open = rig.sender(STUCK);
        open.send(pages(&[1, 2])).unwrap();
        rig.until_seen(&Seen::Sent(0));
        let manager = rig.worker.manager();
        let draining = manager.begin_drain();
        rig.until_seen(&Seen::Drain);
        let mut kept = Some(open);
        match drops {
            true => drop(kept.take()),
            false => kept.iter_mut().for_each(KvSession::abort),
        }
        rig.until_seen(&Seen::Aborted(0));
        assert!(!draining.is_empty(), "a data operation may touch the pages");
        rig.wire.say("release");
        rig.until("emptiness", || draining.is_empty());
        match &mut kept {
            Some(open) => assert_eq!(open.reclaim().map(|back| back.pages), Some(pages(&[1, 2]))),
            None => assert_eq!(manager.gauges().pages_orphaned(), 2, "the caller takes them back"),
        }
    }
}
