//! Running requests that are set back to wait for pages.

use kv_poll::allocator::FreeReason;
use kv_poll::consensus::RequestKey;
use kv_poll::queue::{Blocked, Origin, RetractRefusal, Shortage};

use super::{Bench, CONFIG};
use crate::fake::pages;

#[test]
fn retracted_requests_get_pages_before_new_ones() {
    let mut bench = Bench::new(12, CONFIG);
    let mut running = Vec::new();
    for room in [1, 2] {
        bench.shake_hands(room, 4);
        bench.succeed(room);
        running.push(bench.queues.pop_waiting().unwrap());
    }
    let new = bench.shake_hands(3, 4);
    assert!(matches!(bench.queues.blocked(), Some(Blocked { key, .. }) if key == new));
    let victim = running.pop().unwrap();
    let grown = bench.queues.allocate(4).unwrap();
    bench.queues.retract(victim.key, victim.request, victim.pages, 5).unwrap();
    bench.step();
    // 4 free, 1 reserved for the running one; 5 + 1 needed: nothing goes to the new one either.
    assert_eq!(bench.queues.blocked(), Some(Blocked { key: victim.key, shortage: Shortage::Pages(3) }));
    assert_eq!(bench.in_transfer(3), 0);
    bench.queues.release(grown).unwrap();
    bench.step();
    let back = bench.queues.pop_waiting().unwrap();
    assert_eq!(
        (back.key, back.request, back.pages.len(), back.origin),
        (victim.key, 2, 5, Origin::Retracted)
    );
    let first = running.pop().unwrap();
    bench.queues.finish(first.key, first.pages).unwrap();
    bench.step();
    assert_eq!(bench.in_transfer(3), 4);
}

#[test]
fn a_retraction_of_an_unknown_request_changes_nothing() {
    let mut bench = Bench::new(12, CONFIG);
    let key = bench.shake_hands(1, 4);
    bench.succeed(1);
    let ready = bench.queues.pop_waiting().unwrap();
    let error = bench.queues.retract(RequestKey(99), 1, ready.pages, 4).unwrap_err();
    assert_eq!(error.reason, RetractRefusal::NotRunning { key: RequestKey(99) });
    let error = bench.queues.retract(key, 1, error.pages, 13).unwrap_err();
    assert_eq!(error.reason, RetractRefusal::TooLarge { needed: 13, capacity: 12 });
    let error = bench.queues.retract(key, 1, pages([11]), 1).unwrap_err();
    assert_eq!(error.reason, RetractRefusal::Pages(FreeReason::AlreadyFree { page: 11 }));
    assert_eq!(bench.queues.counts().running, 1);
    let error = bench.queues.release(pages(0..12)).unwrap_err();
    assert_eq!(error.reason, FreeReason::NotHeld { given: 12, held: 4 });
}
