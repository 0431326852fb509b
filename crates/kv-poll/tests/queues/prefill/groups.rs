//! The items of cache groups that go with a request.

use kv_core::{CacheGroupItems, KvPoll, RequestCacheGroups};
use kv_poll::queue::{PrefillPolicy, Refusal};

use super::{popped, push, queues, step};
use crate::fake::{Call, pages};

#[test]
fn state_goes_before_the_last_chunk_whatever_the_ring_has_room_for_and_comes_back() {
    for free in 0..=4 {
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let key = push(&mut queues, 0);
        assert_eq!(queues.give_groups(key, slot(1)).unwrap_err().reason, Refusal::NotPopped { key });
        fake.set(0, KvPoll::WaitingForInput, false);
        step(&mut queues, &fake);
        queues.pop_waiting(|_, _| true).unwrap();
        fake.world(|world| world.ring = free);
        queues.init(key, 2, None).unwrap();
        queues.send_chunk(key, pages([7])).unwrap();
        queues.give_groups(key, slot(1)).unwrap();
        let refused = queues.give_groups(key, slot(2)).unwrap_err();
        assert_eq!((refused.groups, refused.reason), (slot(2), Refusal::GroupsOrder { key }));
        queues.send_chunk(key, pages([6])).unwrap();
        queues.finish(key).unwrap();
        assert_eq!(queues.give_groups(key, slot(2)).unwrap_err().reason, Refusal::GroupsOrder { key });
        fake.world(|world| world.ring = usize::MAX);
        step(&mut queues, &fake);
        let calls = [Call::Init(2), Call::Pages(vec![7]), Call::RequestCacheGroups(1), Call::Pages(vec![6])];
        fake.at(0, |session| assert_eq!(session.calls, calls, "{free} free places"));
        fake.set(0, KvPoll::Success, true);
        step(&mut queues, &fake);
        let finished = queues.drain_finished().unwrap();
        assert_eq!((finished.pages, finished.groups, finished.outcome), (pages([7, 6]), slot(1), Ok(())));
        assert_eq!(queues.give_groups(key, slot(2)).unwrap_err().reason, Refusal::Ended { key });
    }
}

#[test]
fn state_of_a_failed_request_comes_back_with_its_pages_given_or_kept() {
    for free in 0..=3 {
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let key = popped(&mut queues, &fake, 0);
        fake.world(|world| world.ring = free);
        queues.init(key, 2, None).unwrap();
        queues.send_chunk(key, pages([7])).unwrap();
        queues.give_groups(key, slot(1)).unwrap();
        fake.set(0, KvPoll::Failed, false);
        step(&mut queues, &fake);
        assert!(queues.drain_finished().is_none(), "a data operation may still read them");
        fake.set(0, KvPoll::Failed, true);
        step(&mut queues, &fake);
        let finished = queues.drain_finished().unwrap();
        assert_eq!((finished.pages, finished.groups), (pages([7]), slot(1)), "{free} free places");
        assert!(finished.outcome.is_err());
    }
}

fn slot(index: u32) -> RequestCacheGroups {
    let mut groups = RequestCacheGroups::none();
    groups.push(CacheGroupItems::new(0, pages([index]))).unwrap();
    groups
}
