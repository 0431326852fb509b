//! The worker's turns: what wakes it, what lets it sleep, and where the machine's outputs go.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::wire::{Body, ConversationId, Frame, Hello, VERSIONS};
use kv_core::{
    Incarnation, KvManager, KvPoll, KvSender, KvSession, Origin, PeerId, Room, SessionOptions,
    TransportEvent, WayEnd, WorkerRole,
};

use super::client::FakeClient;
use super::script::{SLOW, Script, WRITES};
use super::transport::{Wire, fake_transport};
use super::{BootTime, Log, PATIENCE, Rig, Seen, args, driver, manager, pages};
use crate::kv::{KvMachine, WorkerConfig};
use crate::worker::{Driver, Rest, Turn};

/// A worker of a scripted machine without its thread, what its parts have seen, and the other end of its transport.
fn scripted() -> (Driver<KvMachine>, Log, Arc<Wire>) {
    scripted_with(|_, _| ())
}

fn scripted_with(
    change: impl FnOnce(&mut WorkerConfig, &mut FakeClient),
) -> (Driver<KvMachine>, Log, Arc<Wire>) {
    let (log, wire) = (Log::default(), Wire::new());
    let (node, transport) = (Script::new(&log), fake_transport(&log, &wire));
    let (mut config, mut client) = (WorkerConfig::new(args(), WorkerRole::Prefill), FakeClient::new(&log));
    change(&mut config, &mut client);
    (driver(Box::new(node), config, transport, client, BootTime), log, wire)
}

/// A worker that has published its record, and rests.
fn published(withdraws_for: Option<Duration>) -> Driver<KvMachine> {
    let (mut driver, ..) = scripted_with(|config, client| {
        config.bootstrap = Some("host:1".to_owned());
        client.withdraws_for = withdraws_for;
    });
    until_rest(&mut driver);
    driver
}

/// Turns until the worker would sleep.
fn until_rest(driver: &mut Driver<KvMachine>) -> Rest {
    until_rest_or_end(driver).expect("it has ended")
}

fn until_rest_or_end(driver: &mut Driver<KvMachine>) -> Option<Rest> {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE);
        match driver.turn() {
            Turn::Again => {}
            Turn::Rest(rest) => return Some(rest),
            Turn::Ended(_) => return None,
        }
    }
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
    assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[1])));
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

/// The caller of a stop or a drain would wait until something else wakes the worker.
#[test]
fn an_order_to_end_given_at_the_moment_of_falling_asleep_is_taken() {
    for order in ["stop", "drain", "drain then stop"] {
        let (mut driver, ..) = scripted();
        if order == "drain then stop" {
            drop(driver.port().begin_drain());
        }
        let rest = Rest { at_most: Some(Duration::from_secs(4)), ..until_rest(&mut driver) };
        match order {
            "stop" => driver.stop(PATIENCE),
            "drain" => drop(driver.port().begin_drain()),
            _ => driver.port().request_drain_then_stop(PATIENCE, PATIENCE),
        }
        let start = Instant::now();
        driver.sleep(&rest);
        assert!(start.elapsed() < Duration::from_secs(3), "{order}");
    }
}

#[test]
fn sessions_of_a_dropped_driver_fail_before_the_transport_closes() {
    let (driver, _, wire) = scripted();
    let sender = manager(&driver).sender("", Room::from(SLOW), &[], SessionOptions::default()).unwrap();
    assert!(!sender.poll().is_terminal());
    // A transport may take its time to close, and the scheduler does not wait for that.
    let at_close = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&at_close);
    *wire.at_close.lock().unwrap() = Some(Box::new(move || *seen.lock().unwrap() = Some(sender.poll())));
    drop(driver);
    assert_eq!(*at_close.lock().unwrap(), Some(KvPoll::Failed));
}

#[test]
fn sessions_that_were_opened_before_a_stop_are_counted_however_many_commands_wait() {
    let (mut driver, ..) = scripted();
    let manager = manager(&driver);
    // More than one turn takes.
    let open = |_| manager.sender("", Room::from(SLOW), &[], SessionOptions::default()).unwrap();
    let senders: Vec<_> = (0..300).map(open).collect();
    driver.stop(PATIENCE);
    let start = Instant::now();
    let ended = loop {
        assert!(start.elapsed() < PATIENCE);
        if let Turn::Ended(ended) = driver.turn() {
            break ended;
        }
    };
    assert_eq!(ended.sessions, senders.len());
    assert!(senders.iter().all(|sender| sender.poll() == KvPoll::Failed));
}

/// A worker that drains refuses new sessions. Requests that the scheduler was told are accepted would fail.
#[test]
fn sessions_that_were_opened_before_a_drain_reach_the_machine_before_it() {
    let (mut driver, log, _) = scripted();
    let manager = manager(&driver);
    // More than one turn takes.
    let open = |_| manager.sender("", Room::from(SLOW), &[], SessionOptions::default()).unwrap();
    let _senders: Vec<_> = (0..300).map(open).collect();
    drop(driver.port().begin_drain());
    for _ in 0..5 {
        driver.turn();
    }
    let log = log.lock().unwrap();
    let drain = log.iter().position(|seen| *seen == Seen::Drain).unwrap();
    assert_eq!(log[..drain].iter().filter(|seen| matches!(seen, Seen::Opened(_))).count(), 300);
}

/// The record would stay at the bootstrap server, and name a worker that is gone.
#[test]
fn a_stop_gives_the_bootstrap_client_a_turn_to_withdraw_the_record() {
    let mut driver = published(None);
    driver.stop(PATIENCE);
    let turn = driver.turn();
    assert!(!matches!(turn, Turn::Ended(_)), "the client was told, and has not been polled since");
}

/// With a bootstrap server that does not answer, every stop would take as long as it may.
#[test]
fn a_worker_that_stops_does_not_sleep_through_the_time_for_the_withdrawal() {
    let rested = || {
        let mut driver = published(Some(Duration::from_secs(3600)));
        driver.stop(PATIENCE);
        until_rest_or_end(&mut driver)
    };
    // A busy host may take the processor away until that time is over.
    let rest = (0..20).find_map(|_| rested()).expect("it has ended each time");
    assert!(rest.at_most.is_some_and(|at_most| at_most <= Duration::from_millis(250)), "{rest:?}");
}

#[test]
fn the_peer_of_the_last_command_that_waits_is_roused_before_the_command_is_carried_out() {
    let (mut driver, log, _) = scripted();
    let manager = manager(&driver);
    let open = |_| manager.sender("", Room::from(WRITES), &[], SessionOptions::default()).unwrap();
    let mut senders: Vec<_> = (0..2).map(open).collect();
    driver.turn();
    for (sender, list) in senders.iter_mut().zip([&[1, 2][..], &[3, 4, 5]]) {
        sender.send(pages(list)).unwrap();
    }
    log.lock().unwrap().clear();
    driver.turn();
    assert_eq!(log.lock().unwrap()[..3], [Seen::Sent(0), Seen::Roused(1, 3), Seen::Sent(1)]);
}

/// The frame may be a peer's answer to these commands.
#[test]
fn a_frame_is_handled_after_the_commands_that_were_given_while_the_transport_was_asked() {
    let (mut driver, log, wire) = scripted();
    let (manager, kept) = (manager(&driver), Arc::new(Mutex::new(Vec::new())));
    let (opened, end) = (Arc::clone(&kept), Arc::clone(&wire));
    *wire.during_poll.lock().unwrap() = Some(Box::new(move || {
        // More than a turn takes without a frame.
        let open = |_| manager.sender("", Room::from(SLOW), &[], SessionOptions::default()).unwrap();
        let mut opened = opened.lock().unwrap();
        opened.extend((0..300).map(open));
        opened[0].abort();
        end.say("done");
    }));
    driver.turn();
    let mut expected: Vec<Seen> = (0..300).map(Seen::Opened).collect();
    expected.insert(1, Seen::Aborted(0));
    expected.extend([Seen::BegunHandling, Seen::Frame("done")]);
    assert_eq!(*log.lock().unwrap(), expected);
}

#[test]
fn a_transport_is_not_told_of_work_before_its_events_where_there_was_none() {
    let (mut driver, log, wire) = scripted();
    wire.say("done");
    driver.turn();
    assert_eq!(*log.lock().unwrap(), [Seen::Frame("done")]);
}

#[test]
fn the_bootstrap_client_is_heard_in_every_second_turn_however_often_the_scheduler_is_told() {
    let (mut driver, log, wire) = scripted();
    let manager = manager(&driver);
    wire.say("outputs");
    let mut turn_with_a_success = || {
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1])).unwrap();
        driver.turn();
        manager.poll_set().drain(|_| ());
        assert_eq!(sender.poll(), KvPoll::Success);
        log.lock().unwrap().contains(&Seen::LookupFailed(5))
    };
    assert!(!turn_with_a_success(), "the scheduler was told first");
    assert!(
        turn_with_a_success(),
        "the worker may have told the scheduler before anything else twice in a row"
    );
}

/// The worker would use up a core from its first question on.
#[test]
fn a_worker_that_has_asked_the_bootstrap_server_rests_after_the_answer() {
    let (mut driver, log, wire) = scripted();
    wire.say("outputs");
    let last = (0..20).map(|_| driver.turn()).last();
    assert!(log.lock().unwrap().contains(&Seen::LookupFailed(5)));
    assert!(matches!(last, Some(Turn::Rest(_))), "{last:?}");
}

#[test]
fn an_idle_worker_takes_no_turns() {
    let rig = Rig::start();
    let sender = rig.sender(SLOW);
    rig.until_seen(&Seen::Opened(0));
    rig.until("rest", || {
        let before = rig.worker.manager().gauges().turns;
        std::thread::sleep(Duration::from_millis(100));
        rig.worker.manager().gauges().turns == before
    });
    drop(sender);
    rig.until_seen(&Seen::Aborted(0));
}

#[test]
fn every_output_reaches_its_place_and_its_consequence_the_machine() {
    let rig = Rig::start();
    rig.wire.say("outputs");
    rig.wire.deliver(TransportEvent::PeerGone {
        peer: PeerId(1),
        end: WayEnd::Dead { quiet_after: Duration::ZERO },
    });
    let expected = [
        Seen::TransportSend,
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
fn a_hello_reaches_the_machine_only_from_a_connection_that_may_speak_for_its_memory() {
    let rig = Rig::start();
    let args = args();
    for (from, metadata) in [(2, "memory of 3"), (3, "memory of 4"), (3, "memory of 3")] {
        let hello = Hello {
            versions: VERSIONS,
            to: Incarnation::from_random(1),
            worker: args.worker().clone(),
            incarnation: Incarnation::from_random(2),
            conversation: ConversationId::new(1, 1),
            nonce: 1,
            transport: "fake".to_owned(),
            metadata: metadata.into(),
            geometry: Some(Box::new(args.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        let frame = Frame { conversation: ConversationId::NONE, body: Body::Hello(hello) }.encode().unwrap();
        rig.wire.deliver(TransportEvent::Frame { from: Origin(from), frame });
    }
    rig.until_seen(&Seen::Hello(3));
    assert_eq!(rig.seen(), [Seen::Hello(3)]);
    let gauges = rig.worker.manager().gauges();
    assert_eq!((gauges.frames_received, gauges.frames_dropped), (3, 2));
}
