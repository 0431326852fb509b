//! Agreement of ranks.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod fake;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fake::{Rng, seeds};
use kv_core::{KvPoll, Room};
use kv_poll::consensus::{
    Agreed, Collective, CollectiveConsensus, CollectiveError, RankConsensus, RequestKey, SingleRank,
    Standing, ThreadConsensus,
};

fn standing(poll: KvPoll, reclaimable: bool) -> Standing {
    Standing { poll, reclaimable }
}

fn agree<C: RankConsensus>(rank: &mut C) -> Vec<(u64, KvPoll, bool)> {
    let mut agreed = Vec::new();
    rank.agree(&mut agreed).unwrap();
    agreed.iter().map(|Agreed { key, standing }| (key.0, standing.poll, standing.reclaimable)).collect()
}

#[test]
fn a_single_rank_agrees_at_once() {
    let mut rank = SingleRank::default();
    rank.join(RequestKey(4), &Room::Number(0)).unwrap();
    rank.propose(RequestKey(4), standing(KvPoll::Success, true));
    assert_eq!(agree(&mut rank), [(4, KvPoll::Success, true)]);
    assert_eq!(agree(&mut rank), []);
}

#[test]
fn the_slowest_rank_governs_even_before_it_has_entered_the_room() {
    let mut ranks = ThreadConsensus::group(2);
    let room = Room::Number(0);
    ranks[0].join(RequestKey(1), &room).unwrap();
    ranks[0].propose(RequestKey(1), standing(KvPoll::Success, true));
    assert_eq!(agree(&mut ranks[0]), []);
    ranks[1].join(RequestKey(70), &room).unwrap();
    assert_eq!(agree(&mut ranks[0]), []);
    ranks[1].propose(RequestKey(70), standing(KvPoll::Transferring, false));
    assert_eq!(agree(&mut ranks[1]), [(70, KvPoll::Transferring, false)]);
    assert_eq!(agree(&mut ranks[0]), [(1, KvPoll::Transferring, false)]);
    ranks[1].propose(RequestKey(70), standing(KvPoll::WaitingForInput, false));
    assert_eq!(agree(&mut ranks[1]), [], "states do not go back");
    ranks[1].propose(RequestKey(70), standing(KvPoll::Success, false));
    assert_eq!(agree(&mut ranks[1]), [(70, KvPoll::Success, false)]);
    assert_eq!(ranks[0].open_rooms(), 1);
    assert_eq!(agree(&mut ranks[0]), [(1, KvPoll::Success, true)]);
    assert_eq!(ranks[0].open_rooms(), 0);
    ranks[1].propose(RequestKey(70), standing(KvPoll::Success, true));
    assert_eq!(agree(&mut ranks[1]), [(70, KvPoll::Success, true)], "each rank's pages for itself");
}

/// Enters a request with the same number as room and key.
fn join(rank: &mut ThreadConsensus, number: u64) {
    rank.join(RequestKey(number), &Room::Number(number)).unwrap();
}

fn turn(rank: &mut ThreadConsensus, first: u64) -> Option<u64> {
    rank.turn(Some(RequestKey(first))).map(|key| key.0)
}

#[test]
fn the_rank_that_is_ahead_decides_whose_turn_it_is_on_all_ranks() {
    let mut ranks = ThreadConsensus::group(2);
    for number in [1, 2, 3] {
        join(&mut ranks[0], number);
    }
    assert_eq!(turn(&mut ranks[0], 2), None, "rank 1 has not entered request 2, and may never do so");
    for number in [2, 1, 3] {
        join(&mut ranks[1], number);
    }
    assert_eq!(turn(&mut ranks[0], 2), Some(2));
    assert_eq!(turn(&mut ranks[0], 1), Some(2), "the turn stays until it was taken");
    assert_eq!(turn(&mut ranks[1], 1), Some(2));
    assert_eq!(ranks[1].turn(None), None, "rank 0 has not admitted it");
    ranks[0].took_turn();
    assert_eq!(ranks[1].turn(None), Some(RequestKey(2)));
    ranks[1].took_turn();
    assert_eq!(turn(&mut ranks[1], 3), Some(3), "nobody is ahead of rank 1 now");
    ranks[1].took_turn();
    assert_eq!(turn(&mut ranks[0], 1), Some(3));
}

#[test]
fn the_turn_of_a_request_that_has_ended_is_passed_also_where_its_room_is_used_again() {
    let mut ranks = ThreadConsensus::group(2);
    for number in [1, 2, 3] {
        ranks.iter_mut().for_each(|rank| join(rank, number));
    }
    for number in [1, 2] {
        assert_eq!(turn(&mut ranks[0], number), Some(number));
        ranks[0].took_turn();
    }
    // Request 2 ends while it is the turn of request 1 on rank 1.
    ranks[0].propose(RequestKey(2), standing(KvPoll::Failed, true));
    ranks[0].agree(&mut Vec::new()).unwrap();
    assert_eq!(turn(&mut ranks[1], 3), Some(1));
    ranks[1].propose(RequestKey(2), standing(KvPoll::Failed, true));
    ranks[1].agree(&mut Vec::new()).unwrap();
    for (rank, key) in [(0, 11), (1, 12)] {
        ranks[rank].join(RequestKey(key), &Room::Number(2)).unwrap();
    }
    assert_eq!(turn(&mut ranks[1], 3), Some(1));
    ranks[1].took_turn();
    assert_eq!(turn(&mut ranks[1], 3), Some(3), "the room's next request was given no turn");
    ranks[1].took_turn();
    assert_eq!(turn(&mut ranks[0], 11), Some(3));
}

#[test]
fn a_request_that_has_ended_is_given_no_turn_before_its_rank_is_told() {
    let mut ranks = ThreadConsensus::group(2);
    ranks.iter_mut().for_each(|rank| join(rank, 1));
    ranks[1].propose(RequestKey(1), standing(KvPoll::Failed, true));
    ranks[1].agree(&mut Vec::new()).unwrap();
    assert_eq!(turn(&mut ranks[0], 1), None);
}

#[test]
fn one_failed_rank_fails_all_and_the_room_stays_busy_meanwhile() {
    let mut ranks = ThreadConsensus::group(3);
    let room = Room::Number(9);
    for (rank, key) in [(0, 5), (1, 6)] {
        ranks[rank].join(RequestKey(key), &room).unwrap();
        ranks[rank].propose(RequestKey(key), standing(KvPoll::Transferring, false));
    }
    ranks[1].propose(RequestKey(6), standing(KvPoll::Failed, true));
    assert_eq!(agree(&mut ranks[1]), [(6, KvPoll::Failed, true)]);
    assert_eq!(agree(&mut ranks[0]), [(5, KvPoll::Failed, false)]);
    assert!(ranks[1].join(RequestKey(8), &room).is_err());
    ranks[2].join(RequestKey(7), &room).unwrap();
    assert_eq!(agree(&mut ranks[2]), [(7, KvPoll::Failed, false)], "a late rank hears of it");
    assert_eq!(ranks[2].open_rooms(), 0);
    ranks[0].propose(RequestKey(5), standing(KvPoll::Failed, true));
    assert_eq!(agree(&mut ranks[0]), [(5, KvPoll::Failed, true)]);
    ranks[1].join(RequestKey(8), &room).unwrap();
}

#[test]
fn a_lost_rank_fails_requests_it_had_not_seen_ended_and_all_later_ones() {
    let mut ranks = ThreadConsensus::group(2);
    let last = ranks.pop().unwrap();
    let mut first = ranks.pop().unwrap();
    first.join(RequestKey(0), &Room::Number(0)).unwrap();
    first.propose(RequestKey(0), standing(KvPoll::Failed, true));
    assert_eq!(agree(&mut first), [(0, KvPoll::Failed, true)]);
    first.join(RequestKey(1), &Room::Number(1)).unwrap();
    drop(last);
    assert_eq!(first.open_rooms(), 1, "nobody waits for the end of room 0 any more");
    assert_eq!(agree(&mut first), [(1, KvPoll::Failed, false)]);
    first.join(RequestKey(2), &Room::Number(2)).unwrap();
    assert_eq!(agree(&mut first), [(2, KvPoll::Failed, false)]);
    assert_eq!(first.open_rooms(), 0);
}

/// Ranks on threads, at random speeds: each gets the same sequence, and no state too early.
#[test]
fn threads_at_different_speeds_see_the_same_agreements_in_the_same_order() {
    const ROOMS: u64 = 60;
    seeds(8, |seed| {
        let run = |rank: usize, mut handle: ThreadConsensus| {
            let mut rng = Rng::new(seed * 31 + rank as u64);
            // Room n fails on rank n % 16.
            let mut local: BTreeMap<u64, KvPoll> = BTreeMap::new();
            // The furthest state proposed: what was agreed before this rank failed is still told.
            let mut furthest: BTreeMap<u64, KvPoll> = BTreeMap::new();
            let (mut opened, mut ended, mut log) = (0, BTreeSet::new(), Vec::new());
            let started = Instant::now();
            let mut open_order: Vec<u64> = (0..ROOMS).collect();
            if rank == 1 {
                open_order.reverse();
            }
            let mut rooms = BTreeMap::new();
            while ended.len() < ROOMS as usize {
                assert!(started.elapsed() < Duration::from_secs(60), "rank {rank} waits for ever");
                if opened < ROOMS && rng.below(3) > 0 {
                    let room = open_order[opened as usize];
                    handle.join(RequestKey(opened), &Room::Number(room)).unwrap();
                    rooms.insert(opened, room);
                    local.insert(opened, KvPoll::Bootstrapping);
                    opened += 1;
                }
                for (key, poll) in &mut local {
                    let next = KvPoll::from_u8(*poll as u8 + 1);
                    if let Some(next) = next.filter(|_| rng.below(4) == 0 && !poll.is_terminal()) {
                        let fails = next == KvPoll::Success && rooms[key] % 16 == rank as u64;
                        *poll = if fails { KvPoll::Failed } else { next };
                        furthest.entry(*key).and_modify(|most| *most = (*most).max(*poll)).or_insert(*poll);
                        handle.propose(RequestKey(*key), standing(*poll, poll.is_terminal()));
                    }
                }
                for (key, poll, _) in agree(&mut handle) {
                    let most = furthest.get(&key).copied().unwrap_or(KvPoll::Bootstrapping);
                    assert!(poll <= most, "agreed {poll} too early");
                    if poll.is_terminal() && ended.insert(key) {
                        log.push((rooms[&key], poll));
                    }
                }
                if rng.below(8) == 0 {
                    thread::yield_now();
                }
            }
            (handle, log)
        };
        let ranks = ThreadConsensus::group(3);
        let logs: Vec<_> = thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = ranks
                .into_iter()
                .enumerate()
                .map(|(rank, handle)| scope.spawn(move || run(rank, handle)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let successes = |log: &[(u64, KvPoll)]| -> Vec<u64> {
            log.iter().filter(|(_, poll)| *poll == KvPoll::Success).map(|(room, _)| *room).collect()
        };
        for (_, log) in &logs {
            for (room, poll) in log {
                assert_eq!(*poll == KvPoll::Failed, room % 16 < 3, "seed {seed}, room {room}");
            }
            assert_eq!(successes(log), successes(&logs[0].1), "seed {seed}");
        }
        assert_eq!(logs[0].0.open_rooms(), 0);
    });
}

/// An all-reduce among threads.
struct Threads {
    barrier: Arc<Barrier>,
    values: Arc<Mutex<Vec<u8>>>,
    reductions: usize,
}

impl Collective for Threads {
    type Error = Infallible;

    fn all_reduce_min(&mut self, values: &mut [u8]) -> Result<(), Infallible> {
        self.reductions += 1;
        if self.barrier.wait().is_leader() {
            *self.values.lock().unwrap() = vec![u8::MAX; values.len()];
        }
        self.barrier.wait();
        {
            let mut shared = self.values.lock().unwrap();
            assert_eq!(shared.len(), values.len(), "vectors of different lengths met");
            shared.iter_mut().zip(values.iter()).for_each(|(all, own)| *all = (*all).min(*own));
        }
        self.barrier.wait();
        values.copy_from_slice(&self.values.lock().unwrap());
        self.barrier.wait();
        Ok(())
    }
}

fn lockstep<T: Send>(ranks: usize, run: impl Fn(usize, CollectiveConsensus<Threads>) -> T + Sync) -> Vec<T> {
    let barrier = Arc::new(Barrier::new(ranks));
    let values = Arc::new(Mutex::new(Vec::new()));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let collective = Threads { barrier: barrier.clone(), values: values.clone(), reductions: 0 };
                let run = &run;
                scope.spawn(move || run(rank, CollectiveConsensus::new(collective)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_collective_consensus_agrees_in_one_step_on_all_ranks() {
    use KvPoll::{Failed, Success, Transferring, WaitingForInput};
    let logs = lockstep(2, |rank, mut consensus| {
        for key in 0..3 {
            consensus.join(RequestKey(key), &Room::Number(key)).unwrap();
        }
        let scripts: [&[(u64, Standing)]; 2] = if rank == 0 {
            [
                &[(0, standing(Success, true)), (1, standing(Transferring, false))],
                &[(1, standing(Failed, false)), (0, standing(Failed, true))],
            ]
        } else {
            [
                &[(0, standing(WaitingForInput, false)), (1, standing(WaitingForInput, false))],
                &[(0, standing(Success, true)), (1, standing(Success, true))],
            ]
        };
        let mut log = Vec::new();
        for script in scripts {
            for (key, standing) in script {
                consensus.propose(RequestKey(*key), *standing);
            }
            log.push(agree(&mut consensus));
        }
        if rank == 0 {
            consensus.propose(RequestKey(1), standing(Failed, true));
        }
        log.push(agree(&mut consensus));
        log.push(agree(&mut consensus));
        assert_eq!(consensus.open_rooms(), 1);
        log
    });
    let expected = [
        vec![(0, WaitingForInput, false), (1, WaitingForInput, false)],
        vec![(0, Success, true), (1, Failed, false)],
        vec![(1, Failed, true)],
        vec![],
    ];
    assert_eq!(logs[0], expected);
    assert_eq!(logs[1], expected);
}

#[test]
fn ranks_out_of_order_get_an_error_together_and_never_mix_rooms() {
    let errors = lockstep(2, |rank, mut consensus| {
        let (first, second) = (Room::Number(rank as u64), Room::Number(1 - rank as u64));
        consensus.join(RequestKey(0), &first).unwrap();
        consensus.propose(RequestKey(0), standing(KvPoll::Success, true));
        let mut agreed = Vec::new();
        let different_rooms = consensus.agree(&mut agreed).unwrap_err();
        consensus.join(RequestKey(1), &second).unwrap();
        let different_order = consensus.agree(&mut agreed).unwrap_err();
        assert!(agreed.is_empty());
        (different_rooms, different_order)
    });
    for (rooms, order) in errors {
        assert!(matches!(rooms, CollectiveError::Diverged { open: 1, .. }));
        assert!(matches!(order, CollectiveError::Diverged { open: 2, .. }));
    }
}

#[test]
fn a_rank_that_is_a_step_late_catches_up() {
    let logs = lockstep(2, |rank, mut consensus| {
        let mut agreed = Vec::new();
        if rank == 0 {
            consensus.join(RequestKey(0), &Room::Number(7)).unwrap();
            consensus.propose(RequestKey(0), standing(KvPoll::WaitingForInput, false));
        }
        let early = consensus.agree(&mut agreed).is_err();
        if rank == 1 {
            consensus.join(RequestKey(40), &Room::Number(7)).unwrap();
            consensus.propose(RequestKey(40), standing(KvPoll::WaitingForInput, false));
        }
        consensus.agree(&mut agreed).unwrap();
        (early, agreed.len())
    });
    assert_eq!(logs, [(true, 1), (true, 1)]);
}
