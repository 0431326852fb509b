//! A request's pages on their way to its session, chunk by chunk.

use std::cell::Cell;
use std::rc::Rc;

use kv_core::{AuxIndex, ChunkId, FinalLayers, KvPoll, PageList, PagePool, Pages, Room};
use kv_poll::consensus::{Agreed, RankConsensus, RequestKey, RoomBusy, SingleRank, Standing};
use kv_poll::queue::{Finished, Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues, Refusal};

use super::{popped, push, queues, step};
use crate::fake::{self, Call, Fake, pages};

#[test]
fn a_request_goes_through_all_queues_and_its_pages_come_back_in_order() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = push(&mut queues, 0);
    step(&mut queues, &fake);
    assert_eq!(queues.pop_waiting(|_, _| true), None, "bootstrap is not done");
    assert_eq!(queues.init(key, 4, None), Err(Refusal::NotPopped { key }));
    fake.set(0, KvPoll::WaitingForInput, false);
    step(&mut queues, &fake);
    assert_eq!((queues.counts().bootstrap, queues.counts().waiting), (0, 1));
    assert_eq!(queues.pop_waiting(|_, _| false), None);
    assert_eq!(queues.pop_waiting(|_, request| *request == 0), Some(key));

    assert_eq!(queues.send_chunk(key, pages(0..1)).unwrap_err().reason, Refusal::InitOrder { key });
    queues.init(key, 4, Some(AuxIndex(3))).unwrap();
    assert_eq!(queues.init(key, 4, None), Err(Refusal::InitOrder { key }));
    queues.send_chunk(key, pages([7, 6])).unwrap();
    assert_eq!(queues.finish(key), Err(Refusal::PageCount { key, given: 2, announced: 4 }));
    let refused = queues.send_chunk(key, pages([1, 2, 3])).unwrap_err();
    assert_eq!(refused.reason, Refusal::PageCount { key, given: 5, announced: 4 });
    assert_eq!(refused.pages, pages([1, 2, 3]));
    queues.send_chunk(key, pages([1, 2])).unwrap();
    queues.finish(key).unwrap();
    assert_eq!(queues.counts().inflight, 1);
    let calls = [Call::Init(4), Call::Pages(vec![7, 6]), Call::Pages(vec![1, 2])];
    fake.at(0, |session| assert_eq!((&session.calls[..], session.aux), (&calls[..], Some(AuxIndex(3)))));

    fake.set(0, KvPoll::Success, false);
    step(&mut queues, &fake);
    assert!(queues.drain_finished().is_none(), "a data operation may still read the pages");
    fake.set(0, KvPoll::Success, true);
    step(&mut queues, &fake);
    let Finished { key: ended, request, pages: returned, groups, outcome, .. } =
        queues.drain_finished().unwrap();
    assert!(groups.is_empty());
    assert_eq!((ended, request, outcome), (key, 0, Ok(())));
    assert_eq!(returned, pages([7, 6, 1, 2]));
    assert!(queues.is_empty());
    assert_eq!(queues.counts(), Default::default());
    assert_eq!(queues.finish(key), Err(Refusal::Ended { key }));
}

#[test]
fn a_request_without_pages_still_sends_its_aux_row_once() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 5);
    queues.init(key, 0, Some(AuxIndex(0))).unwrap();
    queues.finish(key).unwrap();
    queues.finish(key).unwrap();
    fake.at(5, |session| assert_eq!(session.calls, [Call::Init(0), Call::Pages(vec![])]));
    fake.set(5, KvPoll::Success, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().outcome, Ok(()));
}

#[test]
fn chunks_and_layers_that_find_the_ring_full_are_kept_in_order() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 1);
    let layers = |chunk, layers| FinalLayers::new(ChunkId(chunk), layers);
    assert_eq!(queues.begin_chunk(key, pages([1])).unwrap_err().reason, Refusal::InitOrder { key });
    queues.init(key, 4, None).unwrap();
    let unknown = Refusal::UnknownChunk { key, chunk: ChunkId(0), given: 0 };
    assert_eq!(queues.layers_final(key, layers(0, 0..1)), Err(unknown));
    assert_eq!(queues.begin_chunk(key, pages([5, 6])).unwrap(), ChunkId(0));
    fake.world(|world| world.ring = 0);
    queues.layers_final(key, layers(0, 1..2)).unwrap();
    assert_eq!(queues.begin_chunk(key, pages([7])).unwrap(), ChunkId(1));
    queues.send_chunk(key, pages([8])).unwrap();
    let refused = queues.begin_chunk(key, pages([9])).unwrap_err();
    assert_eq!(refused.reason, Refusal::PageCount { key, given: 5, announced: 4 });
    queues.layers_final(key, layers(1, 0..2)).unwrap();
    queues.finish(key).unwrap();
    // Also after the forward pass: a ready event may say when.
    queues.layers_final(key, FinalLayers::all(layers(0, 0..1).chunk)).unwrap();
    let mut expected = vec![Call::Init(4), Call::Begin(vec![5, 6])];
    let later = [
        Call::Final(0, Some(1..2)),
        Call::Begin(vec![7]),
        Call::Pages(vec![8]),
        Call::Final(1, Some(0..2)),
        Call::Final(0, None),
    ];
    for call in later {
        fake.at(1, |session| assert_eq!(session.calls, expected));
        fake.world(|world| world.ring = 1);
        step(&mut queues, &fake);
        expected.push(call);
    }
    fake.at(1, |session| assert_eq!(session.calls, expected));
    fake.set(1, KvPoll::Success, true);
    step(&mut queues, &fake);
    let finished = queues.drain_finished().unwrap();
    assert_eq!((finished.pages, finished.outcome), (pages([5, 6, 7, 8]), Ok(())));
}

#[test]
fn chunks_that_find_the_ring_full_are_kept_in_order() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let (a, b) = (popped(&mut queues, &fake, 1), popped(&mut queues, &fake, 2));
    fake.world(|world| world.ring = 0);
    queues.init(a, 3, None).unwrap();
    queues.send_chunk(a, pages([10])).unwrap();
    queues.init(b, 1, None).unwrap();
    queues.send_chunk(b, pages([20])).unwrap();
    queues.send_chunk(a, pages([9])).unwrap();
    for free in [0, 1, 1, 0] {
        fake.world(|world| world.ring = free);
        step(&mut queues, &fake);
    }
    fake.at(1, |session| assert_eq!(session.calls, [Call::Init(3), Call::Pages(vec![10])]));
    // The ring has room again, but the kept chunks go first.
    fake.world(|world| world.ring = usize::MAX);
    queues.send_chunk(a, pages([8])).unwrap();
    queues.finish(a).unwrap();
    step(&mut queues, &fake);
    let pages_of = |session: &mut fake::Session| session.custody.list().iter().collect::<Vec<_>>();
    assert_eq!(fake.at(1, pages_of), [10, 9, 8]);
    assert_eq!(fake.at(2, pages_of), [20]);
    fake.set(1, KvPoll::Success, true);
    step(&mut queues, &fake);
    assert_eq!(queues.drain_finished().unwrap().pages, pages([10, 9, 8]));
}

/// Ranks that agree for as long as the test says so.
struct Joined(SingleRank, Rc<Cell<bool>>);

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the ranks are parted")]
struct Parted;

impl RankConsensus for Joined {
    type Error = Parted;

    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy> {
        self.0.join(key, room)
    }

    fn propose(&mut self, key: RequestKey, standing: Standing) {
        self.0.propose(key, standing);
    }

    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Parted> {
        let Ok(()) = self.0.agree(agreed);
        if self.1.get() { Ok(()) } else { Err(Parted) }
    }

    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey> {
        first
    }

    fn took_turn(&mut self) {}
}

#[test]
fn a_step_in_which_ranks_cannot_agree_moves_nothing_on_and_forgets_nothing() {
    let (fake, together) = (Fake::new(), Rc::new(Cell::new(true)));
    let consensus = Joined(SingleRank::default(), Rc::clone(&together));
    let mut queues = PrefillQueues::new(fake.clone(), consensus, PrefillConfig::new(PrefillPolicy::Eager));
    let sending = queues.push(1, Outgoing::new("p:1", Room::Number(1))).unwrap();
    queues.push(2, Outgoing::new("p:1", Room::Number(2))).unwrap();
    assert_eq!(queues.pop_waiting(|_, _| true), Some(sending));
    fake.world(|world| world.ring = 0);
    queues.init(sending, 2, None).unwrap();
    queues.send_chunk(sending, pages([7, 6])).unwrap();
    fake.world(|world| world.ring = usize::MAX);
    together.set(false);
    fake.set(2, KvPoll::Failed, true);
    assert_eq!(queues.step(fake.changes()), Err(Parted));
    fake.at(1, |session| assert_eq!(session.calls, []));
    assert_eq!((queues.newly_failed().len(), queues.counts().waiting), (0, 1));
    together.set(true);
    queues.step(fake.changes()).unwrap();
    fake.at(1, |session| assert_eq!(session.calls, [Call::Init(2), Call::Pages(vec![7, 6])]));
    assert_eq!((queues.newly_failed().len(), queues.counts().waiting), (1, 0));
}

#[test]
fn a_chunk_of_another_pool_than_the_requests_first_is_refused_and_comes_back() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    let key = popped(&mut queues, &fake, 5);
    let (own, other) = (PagePool::new(8), PagePool::new(8));
    let adopt = |pool: &PagePool, page| pool.adopt(PageList::from_pages([page]).unwrap()).unwrap();
    queues.init(key, 3, None).unwrap();
    queues.send_chunk(key, Pages::none()).unwrap();
    queues.send_chunk(key, adopt(&own, 3)).unwrap();
    let refused = queues.send_chunk(key, adopt(&other, 4)).unwrap_err();
    assert_eq!(refused.reason, Refusal::OtherPool { key });
    assert_eq!(other.release(refused.pages).unwrap().iter().collect::<Vec<_>>(), [4]);
    queues.send_chunk(key, adopt(&own, 5)).unwrap();
    fake.at(5, |session| assert_eq!(session.calls.len(), 4));
}
