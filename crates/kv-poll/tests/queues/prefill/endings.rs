//! Requests that fail or are aborted, and when their pages come back.

use kv_core::{
    CacheGroupItems, Cause, ChunkId, FinalLayers, KvPoll, OpenError, PageList, PagePool, RequestCacheGroups,
    Room,
};
use kv_poll::consensus::ThreadConsensus;
use kv_poll::queue::{Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues, Refusal, RequestError};

use super::{popped, push, queues, step};
use crate::fake::{Fake, pages};
use crate::is_cause;

#[test]
fn a_request_that_fails_gives_back_chunks_that_were_begun_and_kept() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 1);
    queues.init(key, 3, None).unwrap();
    queues.begin_chunk(key, pages([5])).unwrap();
    fake.world(|world| world.ring = 0);
    queues.layers_final(key, FinalLayers::all(ChunkId(0))).unwrap();
    queues.begin_chunk(key, pages([6, 7])).unwrap();
    queues.abort(key);
    fake.set(1, KvPoll::Failed, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().pages, pages([5, 6, 7]));
    assert_eq!(queues.layers_final(key, FinalLayers::all(ChunkId(1))), Err(Refusal::Ended { key }));
}

#[test]
fn failures_before_the_forward_pass_come_out_without_pages() {
    for bootstrapped in [false, true] {
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let key = push(&mut queues, 1);
        if bootstrapped {
            fake.set(1, KvPoll::WaitingForInput, false);
            step(&mut queues, &fake);
        }
        fake.set(1, KvPoll::Failed, true);
        step(&mut queues, &fake);
        assert_eq!(queues.newly_failed(), [key]);
        assert_eq!(queues.pop_waiting(|_, _| true), None);
        let finished = queues.drain_finished().unwrap();
        assert!(finished.pages.is_empty());
        assert!(is_cause(&finished.outcome.unwrap_err(), &Cause::PeerLost));
        assert!(queues.is_empty());
    }
}

#[test]
fn a_failure_is_reported_at_once_and_the_pages_when_quiet() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 1);
    queues.init(key, 3, None).unwrap();
    queues.send_chunk(key, pages([4])).unwrap();
    fake.world(|world| world.ring = 0);
    queues.send_chunk(key, pages([3])).unwrap();
    fake.set(1, KvPoll::Failed, false);
    step(&mut queues, &fake);
    assert_eq!(queues.newly_failed(), [key]);
    assert!(is_cause(queues.failure(key).unwrap(), &Cause::PeerLost));
    let refused = queues.send_chunk(key, pages([2])).unwrap_err();
    assert_eq!((refused.pages, refused.reason), (pages([2]), Refusal::Ended { key }));
    assert!(!queues.abort(key));
    fake.world(|world| world.ring = usize::MAX);
    step(&mut queues, &fake);
    assert!(queues.newly_failed().is_empty());
    assert!(queues.drain_finished().is_none(), "quarantine");
    fake.at(1, |session| assert_eq!(session.calls.len(), 2, "a failed session gets nothing more"));
    fake.set(1, KvPoll::Failed, true);
    step(&mut queues, &fake);
    let finished = queues.drain_finished().unwrap();
    assert_eq!(finished.pages, pages([4, 3]));
    assert!(queues.drain_finished().is_none());
}

#[test]
fn abort_ends_a_request_at_every_stage() {
    for stage in 0..4 {
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let key = push(&mut queues, 1);
        if stage > 0 {
            fake.set(1, KvPoll::WaitingForInput, false);
            step(&mut queues, &fake);
        }
        if stage > 1 {
            queues.pop_waiting(|_, _| true).unwrap();
            queues.init(key, 1, None).unwrap();
        }
        if stage > 2 {
            queues.send_chunk(key, pages([4])).unwrap();
            queues.finish(key).unwrap();
        }
        assert!(queues.abort(key));
        assert!(fake.at(1, |session| session.aborted));
        fake.set(1, KvPoll::WaitingForInput, false);
        step(&mut queues, &fake);
        assert_eq!(queues.pop_waiting(|_, _| true), None, "stage {stage}");
        fake.set(1, KvPoll::Failed, true);
        step(&mut queues, &fake);
        let finished = queues.drain_finished().unwrap();
        assert!(is_cause(&finished.outcome.unwrap_err(), &Cause::Aborted));
        assert_eq!(finished.pages.len(), usize::from(stage > 2));
        assert!(!queues.abort(key));
        assert_eq!(queues.counts(), Default::default());
    }
}

#[test]
fn success_before_all_pages_were_given_is_no_success() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 1);
    queues.init(key, 2, None).unwrap();
    queues.send_chunk(key, pages([4])).unwrap();
    fake.set(1, KvPoll::Success, true);
    step(&mut queues, &fake);
    let finished = queues.drain_finished().unwrap();
    assert!(matches!(finished.outcome, Err(RequestError::OutOfOrder { poll: KvPoll::Success, .. })));
    assert_eq!(finished.pages, pages([4]));
}

#[test]
fn a_rank_that_cannot_serve_a_request_fails_the_other_ranks() {
    let mut group = ThreadConsensus::group(2).into_iter();
    let (fakes, mut ranks): (Vec<_>, Vec<_>) = group
        .by_ref()
        .map(|handle| {
            let fake = Fake::new();
            (
                fake.clone(),
                PrefillQueues::new(fake, handle, PrefillConfig::new(PrefillPolicy::AfterBootstrap)),
            )
        })
        .unzip();
    let key = ranks[0].push(1, Outgoing::new("p:1", Room::Number(1))).unwrap();
    fakes[1].world(|world| world.refuse = Some(OpenError::Backpressure));
    ranks[1].push(1, Outgoing::new("p:1", Room::Number(1))).unwrap_err();
    fakes[0].set(1, KvPoll::WaitingForInput, false);
    ranks[1].step([]).unwrap();
    ranks[0].step(fakes[0].changes()).unwrap();
    assert_eq!(ranks[0].newly_failed(), [key]);
    assert_eq!(ranks[0].failure(key), Some(&RequestError::OtherRank { room: Room::Number(1) }));
    assert!(fakes[0].at(1, |session| session.aborted), "its session ends too");
    fakes[0].set(1, KvPoll::Failed, true);
    ranks[0].step(fakes[0].changes()).unwrap();
    assert!(ranks[0].drain_finished().is_some());
}

#[test]
fn dropped_queues_leave_every_page_that_no_session_has_with_the_manager() {
    let pool = PagePool::new(64);
    let adopt = |pages: [u32; 2]| pool.adopt(PageList::from_pages(pages).unwrap()).unwrap();
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let done = popped(&mut queues, &fake, 1);
    queues.init(done, 2, None).unwrap();
    queues.send_chunk(done, adopt([1, 2])).unwrap();
    queues.finish(done).unwrap();
    let running = popped(&mut queues, &fake, 2);
    queues.init(running, 6, None).unwrap();
    queues.send_chunk(running, adopt([3, 4])).unwrap();
    // The ring is full: a chunk and the items of a cache group are kept.
    fake.world(|world| world.ring = 0);
    queues.send_chunk(running, adopt([5, 6])).unwrap();
    let mut groups = RequestCacheGroups::none();
    groups.push(CacheGroupItems::new(0, pages([9]))).unwrap();
    queues.give_groups(running, groups).unwrap();
    // Nobody takes the request that has ended.
    fake.set(1, KvPoll::Success, true);
    step(&mut queues, &fake);
    drop(queues);
    let (left, items) = fake.world(|world| std::mem::take(&mut world.left));
    let left: Vec<_> = left.into_iter().map(|pages| pool.release(pages).unwrap()).collect();
    assert_eq!(left, [[5, 6], [1, 2]].map(|pages| PageList::from_pages(pages).unwrap()));
    assert_eq!((items, pool.num_out(), pool.lost().len()), (1, 2, 0), "two pages are the session's");
}

/// The session's last pages came back after its report, and nothing else is reported.
#[test]
fn a_session_that_still_holds_pages_when_they_are_reported_back_is_tried_at_every_step() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 1);
    queues.init(key, 1, None).unwrap();
    queues.send_chunk(key, pages([4])).unwrap();
    fake.set(1, KvPoll::Failed, true);
    fake.at(1, |session| session.reclaimable = false);
    for _ in 0..3 {
        step(&mut queues, &fake);
        assert!(queues.drain_finished().is_none());
    }
    fake.at(1, |session| session.reclaimable = true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().map(|finished| finished.pages), Some(pages([4])));
    assert!(queues.is_empty());
}
