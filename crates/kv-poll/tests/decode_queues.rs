//! The decode queues, with sessions that do what the test says.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod fake;

use std::collections::{BTreeMap, BTreeSet};

use fake::{Call, Fake, Rng, Rows, pages, seeds};
use kv_core::{AuxIndex, Cause, Groups, KvPoll, OpenError, Pages, Room};
use kv_poll::allocator::{FreeReason, RunAllocator};
use kv_poll::consensus::{RequestKey, SingleRank, ThreadConsensus};
use kv_poll::queue::{
    Accounting, AdmissionRule, Blocked, DecodeConfig, DecodeQueues, Demand, Incoming, Origin, PushRefusal,
    Ready, RequestError, RetractRefusal, Shortage, aux_tag,
};

type Queues = DecodeQueues<u64, Fake>;

/// Pages of 16 tokens; each active request reserves one page.
const CONFIG: DecodeConfig = DecodeConfig {
    rule: AdmissionRule { page_size: 16, reserved_tokens: 16, clip_new_tokens: 4096, retraction: true },
    aux_rows: 4,
};

struct Bench {
    queues: Queues,
    fake: Fake,
    rows: Rows,
}

impl Bench {
    fn new(num_pages: u32, config: DecodeConfig) -> Bench {
        let fake = Fake::new();
        let allocator = RunAllocator::new(num_pages);
        let queues = DecodeQueues::new(fake.clone(), SingleRank::default(), allocator, config);
        Bench { queues, fake, rows: Rows::default() }
    }

    fn push(&mut self, room: u64, pages: usize) -> RequestKey {
        self.queues.push(room, incoming(room, pages)).unwrap()
    }

    fn step(&mut self) {
        self.queues.step(self.fake.changes(), &mut self.rows).unwrap();
        let accounting = self.queues.accounting();
        assert_eq!(accounting.sum(), accounting.capacity, "{accounting:?}");
    }

    /// Pushes a request and lets its handshake succeed.
    fn shake_hands(&mut self, room: u64, pages: usize) -> RequestKey {
        let key = self.push(room, pages);
        self.fake.set(room, KvPoll::WaitingForInput, false);
        self.step();
        key
    }

    /// Lets the transfer of an admitted request succeed.
    fn succeed(&mut self, room: u64) {
        if let Some(row) = self.fake.at(room, |session| session.aux) {
            self.rows.write(row, room);
        }
        self.fake.set(room, KvPoll::Success, true);
        self.step();
    }

    fn in_transfer(&self, room: u64) -> usize {
        self.fake.at(room, |session| session.custody.len())
    }
}

fn incoming(room: u64, pages: usize) -> Incoming<'static> {
    Incoming::new("p:1", Room::Number(room), Demand { pages, max_new_tokens: 16 })
}

fn is_cause(error: &RequestError, cause: &Cause) -> bool {
    matches!(error, RequestError::Transfer(error) if error.cause == *cause)
}

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
    let Ready { key: popped, request, pages, groups, skipped, origin } = bench.queues.pop_waiting().unwrap();
    assert!(groups.is_empty() && skipped.is_empty());
    assert_eq!((popped, request, pages.len(), origin), (key, 0, 4, Origin::Transferred));
    assert_eq!(bench.queues.accounting().with_server, 4);
    let more = bench.queues.allocate(1).unwrap();
    bench.queues.release(more).unwrap();
    bench.queues.finish(key, pages).unwrap();
    assert_eq!(bench.queues.accounting(), Accounting { capacity: 10, free: 10, ..Default::default() });
    assert_eq!(bench.queues.counts(), Default::default());
}

/// The slots in groups.
fn slots(groups: Groups) -> Vec<u32> {
    groups.into_iter().flat_map(|items| items.items.list().iter().collect::<Vec<_>>()).collect()
}

#[test]
fn state_is_taken_at_admission_given_before_the_pages_and_handed_out_with_them() {
    for free in 0..=2 {
        let mut bench = Bench::new(10, CONFIG);
        bench.rows.1 = Some(vec![5]);
        bench.fake.world(|world| world.ring = free);
        bench.shake_hands(1, 4);
        let second = bench.shake_hands(2, 2);
        assert_eq!(bench.rows.1, Some(vec![]));
        assert_eq!(bench.queues.blocked(), Some(Blocked { key: second, shortage: Shortage::Groups }));
        assert_eq!(bench.queues.accounting().free, 6, "what the blocked one has taken is back");
        bench.fake.world(|world| world.ring = usize::MAX);
        bench.step();
        let calls = bench.fake.at(1, |session| std::mem::take(&mut session.calls));
        assert!(matches!(&calls[..], [Call::Groups(1), Call::Pages(_)]), "{calls:?}");
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
        bench.queues.push(room, Incoming { priority, ..incoming(room, 7) }).unwrap();
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
    let mut bench = Bench::new(60, DecodeConfig { aux_rows: 2, ..CONFIG });
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
fn wrong_room_data_never_goes_on() {
    for wrong in [0, aux_tag(&Room::Number(8))] {
        let mut bench = Bench::new(10, CONFIG);
        let key = bench.shake_hands(7, 4);
        let row = bench.fake.at(7, |session| session.aux).unwrap();
        bench.rows.0.insert(row, wrong);
        bench.fake.set(7, KvPoll::Success, false);
        bench.step();
        let failed = bench.queues.drain_failed().unwrap();
        assert_eq!((failed.key, failed.request), (key, 7));
        let RequestError::Gate(gate) = failed.error else { panic!("{}", failed.error) };
        assert_eq!((gate.expected, gate.found, gate.row), (aux_tag(&Room::Number(7)), wrong, row));
        assert!(bench.queues.pop_waiting().is_none());
        assert_eq!(bench.queues.accounting().quarantined, 4);
        bench.rows.write(row, 7);
        bench.fake.set(7, KvPoll::Success, true);
        bench.step();
        assert!(bench.queues.pop_waiting().is_none(), "too late");
        assert_eq!(bench.queues.accounting().free, 10);
    }
}

#[test]
fn a_failed_request_comes_out_at_once_and_its_pages_when_they_are_quiet() {
    let mut bench = Bench::new(10, DecodeConfig { aux_rows: 1, ..CONFIG });
    bench.shake_hands(1, 4);
    let next = bench.shake_hands(2, 1);
    bench.fake.set(1, KvPoll::Failed, false);
    bench.step();
    assert!(is_cause(&bench.queues.drain_failed().unwrap().error, &Cause::PeerLost));
    assert_eq!(bench.queues.accounting().quarantined, 4);
    let shortage = Shortage::AuxRow;
    assert_eq!(bench.queues.blocked(), Some(Blocked { key: next, shortage }), "the row is in quarantine too");
    bench.fake.set(1, KvPoll::Failed, true);
    bench.step();
    assert_eq!(bench.queues.accounting().quarantined, 0);
    assert_eq!(bench.in_transfer(2), 1);
    assert!(bench.queues.drain_failed().is_none());
}

#[test]
fn abort_ends_a_request_at_every_stage() {
    for stage in ["handshake", "ready", "backlog", "transfer", "waiting", "retracted"] {
        let mut bench = Bench::new(10, CONFIG);
        let blocker = (stage == "ready").then(|| bench.shake_hands(9, 8));
        if stage == "backlog" {
            bench.fake.world(|world| world.ring = 0);
        }
        let key = if stage == "handshake" { bench.push(1, 4) } else { bench.shake_hands(1, 4) };
        if ["waiting", "retracted"].contains(&stage) {
            bench.succeed(1);
        }
        if stage == "retracted" {
            let ready = bench.queues.pop_waiting().unwrap();
            assert!(!bench.queues.abort(key), "the server has it");
            bench.queues.retract(key, ready.request, ready.pages, 4).unwrap();
        }
        assert!(bench.queues.abort(key), "{stage}");
        if !["waiting", "retracted"].contains(&stage) {
            assert!(bench.fake.at(1, |session| session.aborted), "{stage}");
            bench.fake.set(1, KvPoll::Failed, true);
            bench.step();
        }
        let failed = bench.queues.drain_failed().unwrap();
        assert!(is_cause(&failed.error, &Cause::Aborted) || failed.error == RequestError::Aborted, "{stage}");
        bench.step();
        let busy = if blocker.is_some() { 8 } else { 0 };
        assert_eq!(bench.queues.accounting().free, 10 - busy, "{stage}");
        assert!(bench.queues.pop_waiting().is_none());
        assert!(!bench.queues.abort(key), "{stage}");
    }
}

#[test]
fn an_aborted_request_gets_no_pages_and_a_late_success_does_not_run() {
    let mut bench = Bench::new(10, CONFIG);
    let key = bench.push(1, 4);
    bench.queues.abort(key);
    bench.fake.set(1, KvPoll::WaitingForInput, false);
    bench.step();
    assert_eq!(bench.queues.accounting().free, 10);
    let late = bench.shake_hands(2, 4);
    bench.queues.abort(late);
    bench.succeed(2);
    assert_eq!(bench.queues.drain_failed().unwrap().error, RequestError::Aborted);
    assert!(bench.queues.pop_waiting().is_none());
    assert_eq!(bench.queues.accounting().free, 10);
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
fn impossible_retractions_change_nothing() {
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

#[test]
fn requests_that_are_not_taken_come_back() {
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
fn success_without_pages_is_no_success() {
    let mut bench = Bench::new(10, CONFIG);
    bench.push(1, 1);
    bench.fake.set(1, KvPoll::Success, true);
    bench.step();
    let failed = bench.queues.drain_failed().unwrap();
    assert!(matches!(failed.error, RequestError::OutOfOrder { poll: KvPoll::Success, .. }));
    assert_eq!(bench.queues.counts(), Default::default());
}

#[test]
fn pages_that_a_session_swallows_are_counted_and_named() {
    let mut bench = Bench::new(10, CONFIG);
    bench.shake_hands(1, 4);
    drop(bench.fake.at(1, |session| session.custody.split_off(3)));
    bench.succeed(1);
    let failed = bench.queues.drain_failed().unwrap();
    assert!(matches!(failed.error, RequestError::PagesLost { given: 4, returned: 3, .. }));
    let accounting = bench.queues.accounting();
    assert_eq!((accounting.free, accounting.lost), (9, 1));
}

#[test]
fn a_wrong_row_on_one_rank_fails_the_request_on_all() {
    let (fakes, mut ranks): (Vec<_>, Vec<_>) = ThreadConsensus::group(2)
        .into_iter()
        .map(|handle| {
            let fake = Fake::new();
            (fake.clone(), DecodeQueues::new(fake, handle, RunAllocator::new(10), CONFIG))
        })
        .unzip();
    let mut rows = [Rows::default(), Rows::default()];
    let mut round = |ranks: &mut [DecodeQueues<u64, Fake, ThreadConsensus>]| {
        for _ in 0..2 {
            for (rank, queues) in ranks.iter_mut().enumerate() {
                queues.step(fakes[rank].changes(), &mut rows[rank]).unwrap();
            }
        }
        // Room 3's data arrives on rank 0 only.
        if let Some(row) = fakes[0].at(3, |session| session.aux) {
            rows[0].write(row, 3);
        }
    };
    for (queues, fake) in ranks.iter_mut().zip(&fakes) {
        queues.push(3, incoming(3, 4)).unwrap();
        fake.set(3, KvPoll::WaitingForInput, false);
    }
    round(&mut ranks);
    fakes.iter().for_each(|fake| fake.set(3, KvPoll::Success, true));
    round(&mut ranks);
    assert_eq!(ranks[0].drain_failed().unwrap().error, RequestError::OtherRank { room: Room::Number(3) });
    assert!(matches!(ranks[1].drain_failed().unwrap().error, RequestError::Gate(_)));
    for queues in &mut ranks {
        assert!(queues.pop_waiting().is_none());
        assert_eq!(queues.accounting().free, 10);
    }
}

#[test]
fn random_schedules_keep_the_pages_accounted_and_end_every_request_once() {
    seeds(60, |seed| {
        let mut rng = Rng(seed);
        let mut bench = Bench::new(60, CONFIG);
        let mut server: BTreeMap<RequestKey, (u64, Pages)> = BTreeMap::new();
        let (mut pushed, mut ended, mut corrupt) = (0_u64, BTreeSet::new(), BTreeSet::new());
        for turn in 0..3_000 {
            let healing = turn > 2_000;
            match rng.below(10) {
                0 | 1 if !healing => {
                    let incoming =
                        Incoming { priority: rng.below(3) as i32, ..incoming(pushed, rng.below(14)) };
                    bench.fake.world(|world| {
                        world.refuse = (rng.below(9) == 0).then_some(OpenError::Backpressure);
                    });
                    pushed += u64::from(bench.queues.push(pushed, incoming).is_ok());
                }
                2 | 3 => {
                    if let Some(ready) = bench.queues.pop_waiting() {
                        assert!(!corrupt.contains(&ready.request), "seed {seed}: corrupt data runs");
                        server.insert(ready.key, (ready.request, ready.pages));
                    }
                }
                4 => {
                    let keys: Vec<_> = server.keys().copied().collect();
                    if let Some(key) = rng.pick(&keys) {
                        let (request, mut pages) = server.remove(key).unwrap();
                        match rng.below(if healing { 1 } else { 3 }) {
                            0 => {
                                bench.queues.finish(*key, pages).unwrap();
                                assert!(ended.insert(request), "seed {seed}");
                            }
                            1 => bench.queues.retract(*key, request, pages, rng.below(16)).unwrap(),
                            _ => {
                                if let Some(more) = bench.queues.allocate(rng.below(4)) {
                                    pages.append(more).unwrap();
                                }
                                server.insert(*key, (request, pages));
                            }
                        }
                    }
                }
                5 if rng.below(10) == 0 && pushed > 0 => {
                    bench.queues.abort(RequestKey(rng.next() % pushed));
                }
                _ => {
                    bench.fake.world(|world| world.ring = if healing { usize::MAX } else { rng.below(3) });
                    let open: Vec<_> = bench.fake.world(|world| {
                        let open = world.sessions.iter().filter(|(_, session)| !session.reclaimable);
                        open.map(|(id, s)| (*id, s.poll, s.aborted, s.calls.len(), s.room.clone())).collect()
                    });
                    if let Some((id, poll, aborted, calls, Room::Number(room))) = rng.pick(&open).cloned() {
                        let row = bench.fake.world(|world| world.sessions[&id].aux);
                        match poll {
                            KvPoll::Failed | KvPoll::Success => bench.fake.set_session(id, poll, true),
                            _ if aborted || rng.below(40) == 0 => {
                                bench.fake.set_session(id, KvPoll::Failed, rng.below(2) == 0);
                            }
                            KvPoll::Bootstrapping => {
                                bench.fake.set_session(id, KvPoll::WaitingForInput, false)
                            }
                            _ if calls > 0 => {
                                if rng.below(20) == 0 {
                                    corrupt.insert(room);
                                } else if let Some(row) = row {
                                    bench.rows.write(row, room);
                                }
                                bench.fake.set_session(id, KvPoll::Success, rng.below(2) == 0);
                            }
                            _ => {}
                        }
                    }
                    bench.step();
                }
            }
            while let Some(failed) = bench.queues.drain_failed() {
                assert!(ended.insert(failed.request), "seed {seed}: {} ended twice", failed.request);
            }
            check_pages(&bench, &server, seed);
        }
        // Everything ends.
        bench.fake.world(|world| world.ring = usize::MAX);
        for _ in 0..pushed + 1 {
            let open: Vec<_> = bench.fake.world(|world| {
                world.sessions.iter().filter(|(_, s)| !s.reclaimable).map(|(id, s)| (*id, s.poll)).collect()
            });
            for (id, poll) in open {
                let poll = if poll == KvPoll::Success { poll } else { KvPoll::Failed };
                bench.fake.set_session(id, poll, true);
            }
            bench.step();
            while let Some(ready) = bench.queues.pop_waiting() {
                server.insert(ready.key, (ready.request, ready.pages));
            }
            for (key, (request, pages)) in std::mem::take(&mut server) {
                bench.queues.finish(key, pages).unwrap();
                assert!(ended.insert(request), "seed {seed}");
            }
            while let Some(failed) = bench.queues.drain_failed() {
                assert!(ended.insert(failed.request), "seed {seed}");
            }
        }
        assert_eq!(ended.len() as u64, pushed, "seed {seed}: {:?}", bench.queues.counts());
        assert_eq!(bench.queues.counts(), Default::default(), "seed {seed}");
        assert_eq!(bench.queues.accounting().free, 60, "seed {seed}");
        // All aux rows are free again.
        bench.fake.world(|world| world.refuse = None);
        let rows: BTreeSet<AuxIndex> = (0..4)
            .map(|n| {
                bench.shake_hands(1_000_000 + n, 1);
                bench.fake.at(1_000_000 + n, |session| session.aux).unwrap()
            })
            .collect();
        assert_eq!(rows.len(), 4);
    });
}

/// No page is in two places, and the books say what is where.
fn check_pages(bench: &Bench, server: &BTreeMap<RequestKey, (u64, Pages)>, seed: u64) {
    let accounting = bench.queues.accounting();
    assert_eq!(accounting.sum(), accounting.capacity, "seed {seed}: {accounting:?}");
    assert_eq!(accounting.lost, 0, "seed {seed}");
    let mut seen = bench.fake.custody();
    assert_eq!(seen.len(), accounting.in_transfer + accounting.quarantined, "seed {seed}: {accounting:?}");
    let mut with_server = 0;
    for page in server.values().flat_map(|(_, pages)| pages.list().iter()) {
        with_server += 1;
        assert!(seen.insert(page), "seed {seed}: page {page} is in two places");
    }
    assert_eq!(with_server, accounting.with_server, "seed {seed}: {accounting:?}");
    let rows = bench.fake.world(|world| {
        let live = world.sessions.values().filter(|session| !session.reclaimable);
        live.filter_map(|session| session.aux).collect::<Vec<_>>()
    });
    assert_eq!(rows.len(), rows.iter().collect::<BTreeSet<_>>().len(), "seed {seed}: a row has two requests");
}

#[test]
fn a_step_without_changes_does_not_look_at_requests_in_flight() {
    let mut bench = Bench::new(4, DecodeConfig { aux_rows: 0, ..CONFIG });
    for room in 0..100_000 {
        bench.push(room, 1);
        bench.fake.set(room, KvPoll::WaitingForInput, false);
    }
    bench.step();
    assert!(bench.queues.blocked().is_some());
    let started = std::time::Instant::now();
    for _ in 0..10_000 {
        bench.queues.step([], &mut bench.rows).unwrap();
    }
    // Looking at each of the 100 000 would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(2), "{:?}", started.elapsed());
}
