//! A quarantine that fills the cache stops admission, and nothing else. The cache has 64 pages.

use kv_core::{EngineId, KvPoll, Quarantine, QuarantineReason, WorkerId};
use kv_poll::consensus::SingleRank;
use kv_poll::queue::{PrefillConfig, PrefillPolicy, PrefillQueues, QuarantineRule, Stopped};

use super::{Queues, popped, push, queues, step};
use crate::fake::{Fake, pages};

fn reader() -> Quarantine {
    let peer = WorkerId { engine: EngineId::new("decode").unwrap(), rank: 0 };
    Quarantine::new(Some(peer), QuarantineReason::ReaderLease, 2, 32)
}

/// A request that fails during its forward pass; its pages stay in quarantine.
fn lose(queues: &mut Queues, fake: &Fake, room: u64, list: std::ops::Range<u32>) {
    let key = popped(queues, fake, room);
    queues.init(key, list.len(), None).unwrap();
    queues.send_chunk(key, pages(list)).unwrap();
    fake.set(room, KvPoll::Failed, false);
    step(queues, fake);
}

#[test]
fn no_request_is_offered_while_half_of_the_cache_is_in_quarantine() {
    let (mut queues, fake) = queues(PrefillPolicy::Eager);
    fake.world(|world| world.quarantine = vec![reader()]);
    let running = popped(&mut queues, &fake, 9);
    queues.init(running, 1, None).unwrap();
    lose(&mut queues, &fake, 1, 0..31);
    assert_eq!(queues.stopped(), None);
    lose(&mut queues, &fake, 2, 31..32);
    let next = push(&mut queues, 3);
    assert_eq!(queues.stopped(), Some(&Stopped { quarantined: 32, pool: 64, by: vec![reader()] }));
    assert_eq!(queues.pop_waiting(|_, _| panic!("offered")), None);
    // A forward pass under way ends as usual, and its pages come back.
    queues.send_chunk(running, pages([40])).unwrap();
    queues.finish(running).unwrap();
    fake.set(9, KvPoll::Success, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().pages, pages([40]));
    assert!(queues.stopped().is_some());
    fake.set(2, KvPoll::Failed, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().pages, pages([31]));
    assert_eq!(queues.stopped(), None);
    assert_eq!(queues.pop_waiting(|_, _| true), Some(next));
    fake.set(1, KvPoll::Failed, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().pages, pages(0..31));
}

#[test]
fn the_share_is_the_servers_to_choose() {
    for (stop_percent, stops) in [(50, true), (51, false)] {
        let (_, fake) = queues(PrefillPolicy::Eager);
        let config = PrefillConfig::new(PrefillPolicy::Eager)
            .with(|config| config.quarantine = QuarantineRule::at(stop_percent));
        let mut queues = PrefillQueues::new(fake.clone(), SingleRank::default(), config);
        lose(&mut queues, &fake, 1, 0..32);
        assert_eq!(queues.stopped().is_some(), stops);
    }
}
