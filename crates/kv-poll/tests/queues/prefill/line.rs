//! Who is taken, and in which order.

use kv_core::{KvPoll, OpenError, Room};
use kv_poll::queue::{Outgoing, PrefillPolicy, PushRefusal};

use super::{push, queues, step};
use crate::fake::pages;

#[test]
fn eager_requests_do_not_wait_for_the_decode_side() {
    let (mut queues, fake) = queues(PrefillPolicy::Eager);
    let key = push(&mut queues, 1);
    assert_eq!(queues.pop_waiting(|_, _| true), Some(key));
    queues.init(key, 1, None).unwrap();
    queues.send_chunk(key, pages([0])).unwrap();
    queues.finish(key).unwrap();
    for (poll, reclaimable) in [(KvPoll::Transferring, false), (KvPoll::Success, true)] {
        fake.set(1, poll, reclaimable);
        step(&mut queues, &fake);
    }
    assert_eq!(queues.drain_finished().unwrap().outcome, Ok(()));
}

#[test]
fn the_line_is_by_priority_then_by_push_order_and_nobody_overtakes_its_head() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    for (room, priority) in [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)] {
        let mut outgoing = Outgoing::new("p:1", Room::Number(room));
        outgoing.priority = priority;
        queues.push(room, outgoing).unwrap();
    }
    for room in [5, 4, 3, 2, 1] {
        fake.set(room, KvPoll::WaitingForInput, false);
    }
    step(&mut queues, &fake);
    assert_eq!(queues.pop_waiting(|_, room| *room != 2), None);
    let mut order: Vec<u64> = Vec::new();
    while let Some(key) = queues.pop_waiting(|_, _| true) {
        order.extend(queues.request(key));
    }
    assert_eq!(order, [2, 4, 1, 3, 5]);
}

#[test]
fn requests_that_a_queue_refuses_are_handed_back() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let full = OpenError::TooManySessions { open: 1, max: 1 };
    fake.world(|world| world.refuse = Some(full.clone()));
    let error = queues.push(77, Outgoing::new("p:1", Room::Number(1))).unwrap_err();
    assert_eq!((error.request, error.reason), (77, PushRefusal::Open(full)));
    fake.world(|world| world.refuse = None);
    push(&mut queues, 1);
    let error = queues.push(78, Outgoing::new("p:1", Room::Number(1))).unwrap_err();
    assert!(matches!(error.reason, PushRefusal::RoomBusy(busy) if busy.room == Room::Number(1)));
    assert_eq!(queues.len(), 1);
}

#[test]
fn a_step_without_changes_does_not_look_at_requests_in_flight() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    for room in 0..100_000 {
        push(&mut queues, room);
    }
    step(&mut queues, &fake);
    let polls = fake.world(|world| world.polls);
    let started = std::time::Instant::now();
    for _ in 0..10_000 {
        queues.step([]).unwrap();
    }
    assert_eq!(fake.world(|world| world.polls), polls);
    // Passing by each of the 100 000 would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
}
