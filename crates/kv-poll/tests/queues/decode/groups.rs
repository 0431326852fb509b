//! The items of cache groups that go with a request.

use kv_core::{KvPoll, RequestCacheGroups};
use kv_poll::queue::{Blocked, Shortage};

use super::{Bench, CONFIG};
use crate::fake::Call;

#[test]
fn state_is_taken_at_admission_given_before_the_pages_and_handed_out_with_them() {
    for free in 0..=2 {
        let mut bench = Bench::new(10, CONFIG);
        bench.rows.1 = Some(vec![5]);
        bench.fake.world(|world| world.ring = free);
        bench.shake_hands(1, 4);
        let second = bench.shake_hands(2, 2);
        assert_eq!(bench.rows.1, Some(vec![]));
        assert_eq!(
            bench.queues.blocked(),
            Some(Blocked { key: second, shortage: Shortage::RequestCacheGroups })
        );
        assert_eq!(bench.queues.accounting().free, 6, "what the blocked one has taken is back");
        bench.fake.world(|world| world.ring = usize::MAX);
        bench.step();
        let calls = bench.fake.at(1, |session| std::mem::take(&mut session.calls));
        assert!(matches!(&calls[..], [Call::RequestCacheGroups(1), Call::Pages(_)]), "{calls:?}");
        bench.succeed(1);
        let ready = bench.queues.pop_waiting().unwrap();
        assert_eq!(slots(ready.groups), [5]);
        bench.rows.1 = Some(vec![7]);
        bench.step();
        assert_eq!((bench.in_transfer(2), bench.queues.blocked()), (2, None));
        bench.queues.finish(ready.key, ready.pages).unwrap();
    }
}

#[test]
fn state_of_a_failed_request_comes_back_when_no_wire_can_touch_it() {
    for free in 0..=2 {
        let mut bench = Bench::new(10, CONFIG);
        bench.rows.1 = Some(vec![5]);
        bench.fake.world(|world| world.ring = free);
        bench.shake_hands(1, 4);
        bench.fake.set(1, KvPoll::Failed, false);
        bench.step();
        // What the session never saw is free at once.
        let early = bench.queues.drain_groups();
        assert_eq!(early.is_some(), free == 0);
        bench.fake.set(1, KvPoll::Failed, true);
        bench.step();
        let late = bench.queues.drain_groups();
        assert_eq!(early.or(late).map(slots), Some(vec![5]));
        assert!(bench.queues.drain_groups().is_none());
    }
    // One that has arrived, and is not wanted any more.
    let mut bench = Bench::new(10, CONFIG);
    bench.rows.1 = Some(vec![5]);
    let key = bench.shake_hands(1, 4);
    bench.succeed(1);
    assert!(bench.queues.abort(key));
    assert_eq!(bench.queues.drain_groups().map(slots), Some(vec![5]));
}

/// The slots in groups.
fn slots(groups: RequestCacheGroups) -> Vec<u32> {
    groups.into_iter().flat_map(|items| items.items.list().iter().collect::<Vec<_>>()).collect()
}
