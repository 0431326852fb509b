//! Who is let in, when, and in which order.

use kv_core::{KvPoll, OpenError};
use kv_poll::queue::{Accounting, Blocked, Origin, PushRefusal, Ready, Shortage};

use super::{Bench, CONFIG, incoming};

#[test]
fn a_request_goes_through_all_queues_even_in_room_zero() {
    let mut bench = Bench::new(10, CONFIG);
    let key = bench.push(0, 4);
    bench.step();
    assert_eq!(bench.queues.counts().handshake, 1);
    assert_eq!(bench.queues.accounting().free, 10, "no pages before the handshake");
    bench.fake.set(0, KvPoll::WaitingForInput, false);
    bench.step();
    assert_eq!(bench.queues.counts().transfer, 1);
    assert_eq!(
        bench.queues.accounting(),
        Accounting { capacity: 10, free: 6, in_transfer: 4, ..Default::default() }
    );
    assert!(bench.fake.at(0, |session| session.aux).is_some());
    bench.fake.set(0, KvPoll::Transferring, false);
    bench.step();
    assert!(bench.queues.pop_waiting().is_none());
    bench.succeed(0);
    assert_eq!(bench.queues.accounting().held, 4);
    let Ready { key: popped, request, pages, groups, skipped, origin, .. } =
        bench.queues.pop_waiting().unwrap();
    assert!(groups.is_empty() && skipped.is_empty());
    assert_eq!((popped, request, pages.len(), origin), (key, 0, 4, Origin::Transferred));
    assert_eq!(bench.queues.accounting().with_server, 4);
    let more = bench.queues.allocate(1).unwrap();
    bench.queues.release(more).unwrap();
    bench.queues.finish(key, pages).unwrap();
    assert_eq!(bench.queues.accounting(), Accounting { capacity: 10, free: 10, ..Default::default() });
    assert_eq!(bench.queues.counts(), Default::default());
}

#[test]
fn the_head_of_the_line_waits_for_room_and_nobody_overtakes_it() {
    let mut bench = Bench::new(10, CONFIG);
    bench.shake_hands(1, 4);
    let big = bench.shake_hands(2, 6);
    bench.shake_hands(3, 1);
    // 6 free, 1 reserved for the active one; 6 + 1 needed.
    assert_eq!(bench.queues.blocked(), Some(Blocked { key: big, shortage: Shortage::Pages(2) }));
    assert_eq!((bench.in_transfer(2), bench.in_transfer(3)), (0, 0));
    bench.succeed(1);
    let first = bench.queues.pop_waiting().unwrap();
    bench.queues.finish(first.key, first.pages).unwrap();
    bench.step();
    assert_eq!((bench.in_transfer(2), bench.in_transfer(3)), (6, 1));
    assert_eq!(bench.queues.blocked(), None);
}

#[test]
fn priority_goes_first_and_equal_ones_in_push_order() {
    let mut bench = Bench::new(9, CONFIG);
    bench.shake_hands(1, 7);
    for (room, priority) in [(2, 0), (3, 0), (4, 9)] {
        let mut incoming = incoming(room, 7);
        incoming.priority = priority;
        bench.queues.push(room, incoming).unwrap();
    }
    for room in [3, 4, 2] {
        bench.fake.set(room, KvPoll::WaitingForInput, false);
    }
    let mut order = vec![];
    for _ in 0..4 {
        bench.step();
        let room = (1..=4).find(|room| bench.in_transfer(*room) > 0).unwrap();
        order.push(room);
        bench.succeed(room);
        let ready = bench.queues.pop_waiting().unwrap();
        bench.queues.finish(ready.key, ready.pages).unwrap();
    }
    assert_eq!(order, [1, 4, 2, 3]);
}

#[test]
fn aux_rows_bound_the_transfers_and_are_cleared_before_use() {
    let mut bench = Bench::new(60, CONFIG.with(|config| config.aux_rows = 2));
    bench.shake_hands(1, 1);
    bench.shake_hands(2, 1);
    let third = bench.shake_hands(3, 1);
    assert_eq!(bench.queues.blocked(), Some(Blocked { key: third, shortage: Shortage::AuxRow }));
    bench.succeed(1);
    bench.step();
    let row = bench.fake.at(3, |session| session.aux).unwrap();
    assert_eq!(bench.fake.at(1, |session| session.aux), Some(row));
    assert_eq!(bench.rows.0[&row], 0, "nothing of room 1 is left");
}

#[test]
fn pages_that_find_the_ring_full_are_kept_and_given_later() {
    let mut bench = Bench::new(20, CONFIG);
    bench.fake.world(|world| world.ring = 0);
    bench.shake_hands(1, 4);
    bench.shake_hands(2, 5);
    assert_eq!(bench.queues.accounting().held, 9);
    bench.fake.world(|world| world.ring = 1);
    bench.step();
    assert_eq!((bench.in_transfer(1), bench.in_transfer(2)), (4, 0));
    bench.fake.set(2, KvPoll::Failed, false);
    bench.step();
    assert_eq!(bench.queues.accounting().quarantined, 0, "the session never had them");
    assert_eq!(bench.queues.accounting().free, 16);
}

#[test]
fn requests_that_a_queue_refuses_are_handed_back() {
    let mut bench = Bench::new(10, CONFIG);
    let error = bench.queues.push(5, incoming(1, 10)).unwrap_err();
    assert_eq!((error.request, error.reason), (5, PushRefusal::TooLarge { needed: 11, capacity: 10 }));
    bench.fake.world(|world| world.refuse = Some(OpenError::WorkerStopped));
    let error = bench.queues.push(6, incoming(1, 1)).unwrap_err();
    assert_eq!((error.request, error.reason), (6, PushRefusal::Open(OpenError::WorkerStopped)));
    bench.fake.world(|world| world.refuse = None);
    bench.push(1, 1);
    let error = bench.queues.push(7, incoming(1, 1)).unwrap_err();
    assert!(matches!(error.reason, PushRefusal::RoomBusy(_)));
    bench.fake.set(1, KvPoll::Failed, false);
    bench.step();
    bench.push(1, 1);
}

#[test]
fn a_step_without_changes_does_not_look_at_requests_in_flight() {
    let mut bench = Bench::new(4, CONFIG.with(|config| config.aux_rows = 0));
    for room in 0..100_000 {
        bench.push(room, 1);
        bench.fake.set(room, KvPoll::WaitingForInput, false);
    }
    bench.step();
    assert!(bench.queues.blocked().is_some());
    let polls = bench.fake.world(|world| world.polls);
    let started = std::time::Instant::now();
    for _ in 0..10_000 {
        bench.queues.step([], &mut bench.rows).unwrap();
    }
    assert_eq!(bench.fake.world(|world| world.polls), polls);
    // Passing by each of the 100 000 would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
}
