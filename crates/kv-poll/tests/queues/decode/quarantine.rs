//! A quarantine that fills the cache stops admission, and nothing else.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::mpsc::{Receiver, Sender, channel};

use kv_core::{EngineId, KvPoll, Quarantine, QuarantineReason, WorkerId};
use kv_poll::allocator::RunAllocator;
use kv_poll::consensus::{Collective, CollectiveConsensus};
use kv_poll::queue::{Accounting, DecodeQueues, Origin, QuarantineRule, Stopped};

use super::{Bench, CONFIG, incoming};
use crate::fake::{Fake, Rows};

/// What the manager says of pages that wait for a silent prefill worker.
fn silent(pages: usize) -> Quarantine {
    let peer = WorkerId { engine: EngineId::new("prefill").unwrap(), rank: 2 };
    Quarantine::new(Some(peer), QuarantineReason::Unacknowledged, 1, pages)
}

/// Lets the request in this room fail with its pages in quarantine.
fn lose(bench: &mut Bench, room: u64, pages: usize) {
    bench.fake.world(|world| world.quarantine = vec![silent(pages)]);
    bench.fake.set(room, KvPoll::Failed, false);
    bench.step();
}

#[test]
fn admission_stops_at_half_of_the_pool_names_the_peer_and_resumes_below() {
    let mut bench = Bench::new(20, CONFIG);
    for (room, pages) in [(1, 4), (2, 6)] {
        bench.shake_hands(room, pages);
    }
    lose(&mut bench, 1, 4);
    assert_eq!((bench.queues.stopped(), bench.queues.blocked()), (None, None));
    lose(&mut bench, 2, 10);
    bench.shake_hands(3, 1);
    let stopped = Stopped { quarantined: 10, pool: 20, by: vec![silent(10)] };
    assert_eq!(bench.queues.stopped(), Some(&stopped));
    assert_eq!(
        stopped.to_string(),
        "admission has stopped: 10 of 20 pages are in quarantine; 10 pages of 1 sessions, peer prefill/2: \
         the peer was told to stop writing and has not said that it has; kill that process or drain that peer"
    );
    assert_eq!(bench.queues.blocked(), None, "nothing that is evicted or retracted lets it in");
    assert_eq!(bench.queues.counts().ready, 1);
    let free = Accounting { capacity: 20, free: 10, quarantined: 10, ..Default::default() };
    assert_eq!((bench.queues.accounting(), bench.in_transfer(3)), (free, 0));
    // The peer has spoken for the smaller one: 6 of 20 is less than half.
    bench.fake.set(1, KvPoll::Failed, true);
    bench.step();
    assert_eq!((bench.queues.stopped(), bench.queues.blocked()), (None, None));
    let taken = Accounting { free: 13, in_transfer: 1, quarantined: 6, ..free };
    assert_eq!((bench.queues.accounting(), bench.in_transfer(3)), (taken, 1));
}

#[test]
fn admitted_requests_go_on_while_admission_is_stopped() {
    let mut bench = Bench::new(20, CONFIG);
    for (room, pages) in [(1, 2), (2, 2), (3, 10), (4, 1)] {
        bench.shake_hands(room, pages);
    }
    bench.succeed(1);
    bench.succeed(2);
    let (first, second) = (bench.queues.pop_waiting().unwrap(), bench.queues.pop_waiting().unwrap());
    lose(&mut bench, 3, 10);
    assert!(bench.queues.stopped().is_some());
    // One runs on and grows, one is retracted and comes back, one arrives, one ends.
    let own: Vec<u32> = first.pages.list().iter().collect();
    let grown = bench.queues.allocate(2).unwrap();
    bench.queues.retract(second.key, second.request, second.pages, 1).unwrap();
    bench.succeed(4);
    assert!(bench.queues.stopped().is_some());
    let origins: Vec<_> = (0..2).map(|_| bench.queues.pop_waiting().unwrap().origin).collect();
    assert_eq!(origins, [Origin::Transferred, Origin::Retracted]);
    assert_eq!(first.pages.list().iter().collect::<Vec<_>>(), own);
    let books = Accounting { capacity: 20, free: 4, quarantined: 10, with_server: 6, ..Default::default() };
    assert_eq!(bench.queues.accounting(), books);
    bench.queues.release(grown).unwrap();
    bench.queues.finish(first.key, first.pages).unwrap();
    assert_eq!(bench.queues.accounting(), Accounting { free: 8, with_server: 2, ..books });
}

#[test]
fn the_share_is_the_servers_to_choose() {
    for (stop_percent, stops) in [(20, true), (21, false), (101, false)] {
        let rule = QuarantineRule::at(stop_percent);
        let mut bench = Bench::new(10, CONFIG.with(|config| config.quarantine = rule));
        bench.shake_hands(1, 2);
        lose(&mut bench, 1, 2);
        bench.shake_hands(2, 1);
        assert_eq!((bench.queues.stopped().is_some(), bench.in_transfer(2)), (stops, usize::from(!stops)));
    }
}

/// The minimum of two ranks' bytes: each sends its own and waits for the other's.
struct Two(Sender<Vec<u8>>, Receiver<Vec<u8>>);

impl Collective for Two {
    type Error = Infallible;

    fn all_reduce_min(&mut self, values: &mut [u8]) -> Result<(), Infallible> {
        self.0.send(values.to_vec()).unwrap();
        let other = self.1.recv().unwrap();
        values.iter_mut().zip(other).for_each(|(own, other)| *own = (*own).min(other));
        Ok(())
    }
}

#[test]
fn ranks_in_lock_step_stop_and_go_on_in_the_same_step() {
    let rank = |rank: usize, two: Two| -> Vec<(bool, usize)> {
        let (fake, mut rows) = (Fake::new(), Rows::default());
        let consensus = CollectiveConsensus::new(two);
        let mut queues = DecodeQueues::new(fake.clone(), consensus, RunAllocator::new(10), CONFIG);
        queues.push(1, incoming(1, 5)).unwrap();
        queues.push(2, incoming(2, 1)).unwrap();
        fake.set(1, KvPoll::WaitingForInput, false);
        let mut log = Vec::new();
        for step in 0..4 {
            match step {
                1 => {
                    fake.set(2, KvPoll::WaitingForInput, false);
                    // The pages are quiet at once on one rank only.
                    fake.set(1, KvPoll::Failed, rank == 0);
                }
                3 => fake.set(1, KvPoll::Failed, true),
                _ => {}
            }
            queues.step(fake.changes(), &mut rows).unwrap();
            log.push((queues.stopped().is_some(), queues.accounting().in_transfer));
        }
        log
    };
    assert_eq!(on_both(rank), [(false, 5), (true, 0), (true, 0), (false, 1)]);
}

/// One rank's ring has no room for the pages of a request that fails: they are quiet there, and on the
/// other rank they are not. If they were free on one rank only, the caches would differ from then on.
#[test]
fn pages_that_one_rank_could_not_send_become_free_on_all_ranks() {
    let rank = |rank: usize, two: Two| -> Vec<(usize, usize, usize)> {
        let (fake, mut rows) = (Fake::new(), Rows(BTreeMap::new(), Some(vec![0])));
        let consensus = CollectiveConsensus::new(two);
        let mut queues = DecodeQueues::new(fake.clone(), consensus, RunAllocator::new(10), CONFIG);
        if rank == 1 {
            fake.world(|world| world.ring = 0);
        }
        queues.push(1, incoming(1, 4)).unwrap();
        fake.set(1, KvPoll::WaitingForInput, false);
        let mut log = Vec::new();
        for step in 0..4 {
            match step {
                1 => fake.set(1, KvPoll::Failed, rank == 1),
                3 => fake.set(1, KvPoll::Failed, true),
                _ => {}
            }
            queues.step(fake.changes(), &mut rows).unwrap();
            let accounting = queues.accounting();
            assert_eq!(accounting.sum(), accounting.capacity, "{accounting:?}");
            let items = std::iter::from_fn(|| queues.drain_groups()).count();
            log.push((accounting.free, accounting.quarantined, items));
        }
        assert_eq!(fake.at(1, |session| session.calls.len()), if rank == 1 { 0 } else { 2 });
        log
    };
    assert_eq!(on_both(rank), [(6, 0, 0), (6, 4, 0), (6, 4, 0), (10, 0, 1)]);
}

/// Runs two ranks side by side; what they have noted, which must be the same.
fn on_both<T: Debug + PartialEq + Send + 'static>(
    rank: impl Fn(usize, Two) -> T + Copy + Send + 'static,
) -> T {
    let ((to_second, from_first), (to_first, from_second)) = (channel(), channel());
    let second = std::thread::spawn(move || rank(1, Two(to_first, from_first)));
    let first = rank(0, Two(to_second, from_second));
    assert_eq!(second.join().unwrap(), first);
    first
}
