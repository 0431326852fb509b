//! Queues of several ranks that go at their own speeds, and are given the same requests in orders of their own.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{AuxIndex, KvPoll, RequestCacheGroups, Room};
use kv_poll::allocator::RunAllocator;
use kv_poll::consensus::{RequestKey, ThreadConsensus};
use kv_poll::queue::{
    AdmissionRule, AuxMemory, DecodeConfig, DecodeQueues, Demand, Incoming, Outgoing, PrefillConfig,
    PrefillPolicy, PrefillQueues, aux_tag,
};

use crate::fake::{Fake, Rng, Session, pages, seeds};

const RANKS: usize = 3;
const REQUESTS: u64 = 40;
/// Far more turns of single ranks than all requests need.
const TURNS: usize = 200_000;
/// Requests that have room on a rank at the same time.
const ROOM: usize = 2;

/// The requests of an engine, and what has become of them on each rank.
struct Engine {
    rng: Rng,
    fakes: Vec<Fake>,
    priorities: Vec<i32>,
    /// Requests that the scheduler of one rank gives up.
    aborted: BTreeMap<u64, usize>,
    /// The requests that each rank has yet to be given.
    to_come: Vec<Vec<u64>>,
    keys: Vec<BTreeMap<u64, RequestKey>>,
    /// The requests that each rank has admitted, in order.
    admitted: Vec<Vec<u64>>,
    ended: Vec<BTreeSet<u64>>,
    turns: usize,
}

impl Engine {
    fn new(seed: u64) -> Engine {
        let mut rng = Rng::new(seed);
        let shuffled = (0..RANKS).map(|_| {
            let mut order: Vec<u64> = (0..REQUESTS).collect();
            (1..order.len()).for_each(|at| order.swap(at, rng.below(at + 1)));
            order
        });
        let to_come = shuffled.collect();
        let aborted: Vec<u64> = (0..REQUESTS).filter(|_| rng.below(8) == 0).collect();
        Engine {
            priorities: (0..REQUESTS).map(|_| rng.below(2) as i32).collect(),
            aborted: aborted.into_iter().map(|room| (room, rng.below(RANKS))).collect(),
            rng,
            fakes: (0..RANKS).map(|_| Fake::new()).collect(),
            to_come,
            keys: vec![BTreeMap::new(); RANKS],
            admitted: vec![Vec::new(); RANKS],
            ended: vec![BTreeSet::new(); RANKS],
            turns: 0,
        }
    }

    /// The rank and the request of the next turn; `None` once everything has ended.
    fn turn(&mut self) -> Option<(usize, u64)> {
        self.turns += 1;
        assert!(self.turns < TURNS, "it stands still: {:?} admitted, {:?} ended", self.admitted, self.ended);
        let is_open = self.ended.iter().any(|ended| (ended.len() as u64) < REQUESTS);
        is_open.then(|| (self.rng.below(RANKS), self.rng.next() % REQUESTS))
    }

    /// The next request that a rank is given, if it is given one in this turn.
    fn comes(&mut self, rank: usize) -> Option<u64> {
        if self.rng.below(3) > 0 { None } else { self.to_come[rank].pop() }
    }

    /// The key of a request that the scheduler of this rank gives up in this turn.
    fn gives_up(&mut self, rank: usize, room: u64) -> Option<RequestKey> {
        let gives_up = self.aborted.get(&room) == Some(&rank) && self.rng.below(10) == 0;
        self.keys[rank].get(&room).copied().filter(|_| gives_up)
    }

    /// True if all ranks have admitted a request.
    fn is_everywhere(&self, room: u64) -> bool {
        self.admitted.iter().all(|admitted| admitted.contains(&room))
    }

    /// The session of a request goes on to `next`, from the state before. One that was given up fails.
    fn go_on(&self, rank: usize, room: u64, next: KvPoll) {
        if !self.keys[rank].contains_key(&room) {
            return;
        }
        let (poll, aborted) = self.fakes[rank].at(room, |session| (session.poll, session.aborted));
        let next = if aborted { KvPoll::Failed } else { next };
        if !poll.is_terminal() && (aborted || next > poll) {
            self.fakes[rank].set(room, next, next.is_terminal());
        }
    }

    fn ends(&mut self, rank: usize, room: u64, is_ok: bool) {
        assert!(self.ended[rank].insert(room), "request {room} ends twice on rank {rank}");
        assert!(is_ok || self.aborted.contains_key(&room), "request {room} fails on rank {rank}");
    }

    /// The ranks have admitted the requests that they have in common in one order.
    fn check_order(&self) {
        let common: Vec<u64> = (0..REQUESTS).filter(|&room| self.is_everywhere(room)).collect();
        assert!(common.len() > REQUESTS as usize / 2, "{common:?}");
        let order = |rank: usize| -> Vec<u64> {
            self.admitted[rank].iter().copied().filter(|room| common.contains(room)).collect()
        };
        (1..RANKS).for_each(|rank| assert_eq!(order(rank), order(0), "rank {rank}"));
    }
}

/// The aux rows of a rank, and the requests that were admitted, in order.
#[derive(Default)]
struct Rows(BTreeMap<AuxIndex, u64>, Vec<u64>);

impl AuxMemory<u64> for Rows {
    fn take_groups(&mut self, room: &mut u64) -> Option<RequestCacheGroups> {
        self.1.push(*room);
        Some(RequestCacheGroups::none())
    }

    fn clear(&mut self, row: AuxIndex) {
        self.0.insert(row, 0);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        self.0[&row]
    }

    fn read(&mut self, row: AuxIndex, room: &mut u64) {
        assert_eq!(self.0[&row], aux_tag(&Room::Number(*room)));
    }
}

#[test]
fn decode_ranks_at_their_own_speeds_admit_in_one_order_and_end_every_request() {
    let rule = AdmissionRule::new(16).with(|rule| rule.reserved_tokens = 0);
    let config = DecodeConfig::new(rule).with(|config| config.aux_rows = ROOM as u32);
    seeds(40, |seed| {
        let mut engine = Engine::new(seed);
        let handles = ThreadConsensus::group(RANKS).into_iter().zip(engine.fakes.clone());
        let mut ranks: Vec<_> = handles
            .map(|(handle, fake)| DecodeQueues::new(fake, handle, RunAllocator::new(12), config))
            .collect();
        let mut rows: Vec<_> = (0..RANKS).map(|_| Rows::default()).collect();
        while let Some((rank, room)) = engine.turn() {
            let (queues, rows) = (&mut ranks[rank], &mut rows[rank]);
            if let Some(room) = engine.comes(rank) {
                let demand = Demand::new(1 + room as usize % 9, 0);
                let mut incoming = Incoming::new("p:1", Room::Number(room), demand);
                incoming.priority = engine.priorities[room as usize];
                engine.keys[rank].insert(room, queues.push(room, incoming).unwrap());
            }
            if let Some(key) = engine.gives_up(rank, room) {
                queues.abort(key);
            }
            // The prefill side sends nothing before all ranks have registered their pages.
            if engine.is_everywhere(room) {
                let is_open = |session: &mut Session| !session.poll.is_terminal();
                if engine.fakes[rank].at(room, is_open)
                    && let Some(row) = engine.fakes[rank].at(room, |session| session.aux)
                {
                    rows.0.insert(row, aux_tag(&Room::Number(room)));
                }
                engine.go_on(rank, room, KvPoll::Success);
            } else {
                engine.go_on(rank, room, KvPoll::WaitingForInput);
            }
            queues.step(engine.fakes[rank].changes(), rows).unwrap();
            engine.admitted[rank].clone_from(&rows.1);
            while let Some(failed) = queues.drain_failed() {
                engine.ends(rank, failed.request, false);
            }
            while let Some(ready) = queues.pop_waiting() {
                engine.ends(rank, ready.request, true);
                queues.finish(ready.key, ready.pages).unwrap();
            }
        }
        engine.check_order();
    });
}

#[test]
fn prefill_ranks_at_their_own_speeds_admit_in_one_order_and_end_every_request() {
    for policy in [PrefillPolicy::AfterBootstrap, PrefillPolicy::Eager] {
        seeds(40, |seed| {
            let mut engine = Engine::new(seed);
            let handles = ThreadConsensus::group(RANKS).into_iter().zip(engine.fakes.clone());
            let mut ranks: Vec<_> = handles
                .map(|(handle, fake)| PrefillQueues::new(fake, handle, PrefillConfig::new(policy)))
                .collect();
            while let Some((rank, room)) = engine.turn() {
                let queues = &mut ranks[rank];
                if let Some(room) = engine.comes(rank) {
                    let mut outgoing = Outgoing::new("p:1", Room::Number(room));
                    outgoing.priority = engine.priorities[room as usize];
                    engine.keys[rank].insert(room, queues.push(room, outgoing).unwrap());
                }
                if let Some(key) = engine.gives_up(rank, room) {
                    queues.abort(key);
                }
                let has_given = engine.admitted[rank].contains(&room);
                let next = if has_given { KvPoll::Success } else { KvPoll::WaitingForInput };
                engine.go_on(rank, room, next);
                queues.step(engine.fakes[rank].changes()).unwrap();
                while let Some(finished) = queues.drain_finished() {
                    engine.ends(rank, finished.request, finished.outcome.is_ok());
                }
                let counts = queues.counts();
                let has_room = counts.forward + counts.inflight < ROOM;
                if let Some(key) = queues.pop_waiting(|_, _| has_room) {
                    let room = *queues.request(key).unwrap();
                    engine.admitted[rank].push(room);
                    queues.init(key, 1, None).unwrap();
                    queues.send_chunk(key, pages([room as u32])).unwrap();
                    queues.finish(key).unwrap();
                }
            }
            engine.check_order();
        });
    }
}
