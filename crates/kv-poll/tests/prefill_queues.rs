//! The prefill queues, with sessions that do what the test says.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod fake;

use std::collections::BTreeSet;

use fake::{Call, Fake, Rng, pages, seeds};
use kv_core::{AuxIndex, Cause, ChunkId, FinalLayers, GroupItems, Groups, KvPoll, OpenError, Room};
use kv_poll::consensus::{RequestKey, SingleRank, ThreadConsensus};
use kv_poll::queue::{Finished, Outgoing, PrefillPolicy, PrefillQueues, PushRefusal, Refusal, RequestError};

type Queues = PrefillQueues<u64, Fake>;

fn queues(policy: PrefillPolicy) -> (Queues, Fake) {
    let fake = Fake::new();
    (PrefillQueues::new(fake.clone(), SingleRank::default(), policy), fake)
}

fn push(queues: &mut Queues, room: u64) -> RequestKey {
    queues.push(room, Outgoing::new("p:1", Room::Number(room))).unwrap()
}

fn step(queues: &mut Queues, fake: &Fake) {
    queues.step(fake.changes()).unwrap();
}

/// Pushes a request and takes it through bootstrap.
fn popped(queues: &mut Queues, fake: &Fake, room: u64) -> RequestKey {
    let key = push(queues, room);
    fake.set(room, KvPoll::WaitingForInput, false);
    step(queues, fake);
    assert_eq!(queues.pop_waiting(|_, _| true), Some(key));
    key
}

fn is_cause(error: &RequestError, cause: &Cause) -> bool {
    matches!(error, RequestError::Transfer(error) if error.cause == *cause)
}

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
    assert!(queues.drain_finished().is_none(), "a wire may still read the pages");
    fake.set(0, KvPoll::Success, true);
    step(&mut queues, &fake);
    let Finished { key: ended, request, pages: returned, groups, outcome } = queues.drain_finished().unwrap();
    assert!(groups.is_empty());
    assert_eq!((ended, request, outcome), (key, 0, Ok(())));
    assert_eq!(returned, pages([7, 6, 1, 2]));
    assert!(queues.is_empty());
    assert_eq!(queues.counts(), Default::default());
    assert_eq!(queues.finish(key), Err(Refusal::Ended { key }));
}

fn slot(index: u32) -> Groups {
    let mut groups = Groups::none();
    groups.push(GroupItems::new(0, pages([index]))).unwrap();
    groups
}

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
        let calls = [Call::Init(2), Call::Pages(vec![7]), Call::Groups(1), Call::Pages(vec![6])];
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
        assert!(queues.drain_finished().is_none(), "a wire may still read them");
        fake.set(0, KvPoll::Failed, true);
        step(&mut queues, &fake);
        let finished = queues.drain_finished().unwrap();
        assert_eq!((finished.pages, finished.groups), (pages([7]), slot(1)), "{free} free places");
        assert!(finished.outcome.is_err());
    }
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
        let outgoing = Outgoing { priority, ..Outgoing::new("p:1", Room::Number(room)) };
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
    // Also after the forward pass: a fence may say when.
    queues.layers_final(key, FinalLayers { layers: None, ..layers(0, 0..1) }).unwrap();
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
fn a_failure_is_told_at_once_and_the_pages_come_when_they_are_quiet() {
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
fn requests_that_are_not_taken_come_back() {
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
fn a_rank_that_cannot_serve_a_request_fails_it_on_the_others() {
    let mut group = ThreadConsensus::group(2).into_iter();
    let (fakes, mut ranks): (Vec<_>, Vec<_>) = group
        .by_ref()
        .map(|handle| {
            let fake = Fake::new();
            (fake.clone(), PrefillQueues::new(fake, handle, PrefillPolicy::AfterBootstrap))
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
fn random_schedules_return_every_request_and_every_page_once() {
    seeds(60, |seed| {
        let mut rng = Rng(seed);
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let mut free: Vec<u32> = (0..200).collect();
        let (mut pushed, mut active) = (0_u64, Vec::<(RequestKey, usize)>::new());
        let mut ended = BTreeSet::new();
        for turn in 0..2_000 {
            let healing = turn > 1_500;
            match rng.below(8) {
                0 | 1 if !healing => {
                    fake.world(|world| world.refuse = (rng.below(9) == 0).then_some(OpenError::Backpressure));
                    let result = queues.push(pushed, Outgoing::new("p:1", Room::Number(pushed)));
                    if result.is_ok() {
                        pushed += 1;
                    }
                }
                2 => {
                    if let Some(key) = queues.pop_waiting(|_, _| true) {
                        let total = rng.below(12);
                        queues.init(key, total, None).unwrap();
                        active.push((key, total));
                    }
                }
                3 | 4 if !active.is_empty() => {
                    let index = rng.below(active.len());
                    let (key, left) = &mut active[index];
                    let n = rng.below(4).min(*left).min(free.len());
                    let chunk: Vec<u32> = free.drain(free.len() - n..).collect();
                    match queues.send_chunk(*key, pages(chunk)) {
                        Ok(()) => *left -= n,
                        Err(refused) => {
                            free.extend(refused.pages.list().iter());
                            *left = 0;
                        }
                    }
                    if *left == 0 {
                        let _ = queues.finish(*key);
                        active.swap_remove(index);
                    }
                }
                5 if rng.below(20) == 0 && pushed > 0 => {
                    queues.abort(RequestKey(rng.next() % pushed));
                }
                _ => {
                    fake.world(|world| world.ring = if healing { usize::MAX } else { rng.below(4) });
                    let sessions: Vec<_> = fake.world(|world| {
                        let open = world.sessions.iter().filter(|(_, session)| !session.reclaimable);
                        open.map(|(id, session)| (*id, session.poll, session.aborted)).collect()
                    });
                    if let Some((id, poll, aborted)) = rng.pick(&sessions).copied() {
                        let complete = fake.world(|world| match &world.sessions[&id].calls[..] {
                            [Call::Init(n), chunk, ..] => {
                                matches!(chunk, Call::Pages(_)) && world.sessions[&id].custody.len() == *n
                            }
                            _ => false,
                        });
                        match poll {
                            KvPoll::Failed | KvPoll::Success => fake.set_session(id, poll, true),
                            _ if aborted || rng.below(30) == 0 => {
                                fake.set_session(id, KvPoll::Failed, rng.below(2) == 0);
                            }
                            KvPoll::Bootstrapping => fake.set_session(id, KvPoll::WaitingForInput, false),
                            _ if complete => fake.set_session(id, KvPoll::Success, rng.below(2) == 0),
                            _ => {}
                        }
                    }
                    queues.step(fake.changes()).unwrap();
                }
            }
            while let Some(finished) = queues.drain_finished() {
                assert!(ended.insert(finished.request), "seed {seed}: {} ended twice", finished.request);
                free.extend(finished.pages.list().iter());
            }
            let counts = queues.counts();
            let sum = counts.bootstrap + counts.waiting + counts.forward + counts.inflight + counts.failing;
            assert_eq!(sum, queues.len(), "seed {seed}");
            fake.custody();
        }
        fake.world(|world| world.ring = usize::MAX);
        for id in fake.world(|world| world.sessions.keys().copied().collect::<Vec<_>>()) {
            if fake.world(|world| world.sessions[&id].poll != KvPoll::Success) {
                fake.set_session(id, KvPoll::Failed, true);
            } else {
                fake.set_session(id, KvPoll::Success, true);
            }
        }
        step(&mut queues, &fake);
        while let Some(finished) = queues.drain_finished() {
            assert!(ended.insert(finished.request), "seed {seed}: {} ended twice", finished.request);
            free.extend(finished.pages.list().iter());
        }
        assert_eq!(ended.len() as u64, pushed, "seed {seed}");
        free.sort_unstable();
        assert_eq!(free, (0..200).collect::<Vec<_>>(), "seed {seed}: pages are missing or double");
        assert!(queues.is_empty());
    });
}

#[test]
fn a_step_without_changes_does_not_look_at_requests_in_flight() {
    let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
    for room in 0..100_000 {
        push(&mut queues, room);
    }
    step(&mut queues, &fake);
    let started = std::time::Instant::now();
    for _ in 0..10_000 {
        queues.step([]).unwrap();
    }
    // Looking at each of the 100 000 would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(2), "{:?}", started.elapsed());
}
