//! Requests that fail or are aborted, and where their pages go.

use kv_core::{Cause, KvPoll, Room};
use kv_poll::allocator::RunAllocator;
use kv_poll::consensus::ThreadConsensus;
use kv_poll::queue::{Blocked, DecodeQueues, RequestError, Shortage, aux_tag};

use super::{Bench, CONFIG, incoming};
use crate::fake::{Fake, Rows};
use crate::is_cause;

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
fn a_failed_request_is_reported_at_once_and_its_pages_when_quiet() {
    let mut bench = Bench::new(10, CONFIG.with(|config| config.aux_rows = 1));
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
fn pages_lost_by_a_session_are_counted_and_named() {
    let mut bench = Bench::new(10, CONFIG);
    bench.shake_hands(1, 4);
    let swallowed = bench.fake.at(1, |session| session.custody.split_off(3));
    let named = swallowed.list().clone();
    drop(swallowed);
    bench.succeed(1);
    let failed = bench.queues.drain_failed().unwrap();
    assert!(matches!(failed.error, RequestError::PagesLost { given: 4, returned: 3, .. }));
    let accounting = bench.queues.accounting();
    assert_eq!((accounting.free, accounting.lost), (9, 1));
    assert_eq!(bench.queues.lost(), named);
}

#[test]
fn a_wrong_aux_row_on_one_rank_fails_the_request_on_all() {
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
