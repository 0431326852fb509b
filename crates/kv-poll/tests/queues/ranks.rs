//! Queues of several ranks that go at their own speeds, and are given the same requests in orders of their own.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::rc::Rc;

use kv_core::{AuxIndex, KvPoll, RequestCacheGroups, Room};
use kv_poll::allocator::RunAllocator;
use kv_poll::consensus::{
    Agreed, RankConsensus, RequestKey, RoomBusy, SingleRank, Standing, ThreadConsensus,
};
use kv_poll::queue::{
    AdmissionRule, AuxMemory, DecodeConfig, DecodeQueues, Demand, Incoming, NoAux, Outgoing, PrefillConfig,
    PrefillPolicy, PrefillQueues, aux_tag,
};

use crate::fake::{Fake, Rng, Rows, Session, pages, seeds};

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

/// What a decode rank's server has.
#[derive(Default)]
struct Server {
    rank: u64,
    /// The tag in each aux row.
    rows: BTreeMap<AuxIndex, u64>,
    /// The requests that were admitted, in order.
    admitted: Vec<u64>,
    /// How often requests have lacked items of cache groups, on this rank alone.
    lacked: BTreeMap<u64, u32>,
}

impl AuxMemory<u64> for Server {
    fn take_groups(&mut self, room: &mut u64) -> Option<RequestCacheGroups> {
        let lacked = self.lacked.entry(*room).or_default();
        if *room % (2 * RANKS as u64) == self.rank && *lacked < 20 {
            *lacked += 1;
            return None;
        }
        self.admitted.push(*room);
        Some(RequestCacheGroups::none())
    }

    fn clear(&mut self, row: AuxIndex) {
        self.rows.insert(row, 0);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        self.rows[&row]
    }

    fn read(&mut self, row: AuxIndex, room: &mut u64) {
        assert_eq!(self.rows[&row], aux_tag(&Room::Number(*room)));
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
        let mut servers: Vec<_> =
            (0..RANKS as u64).map(|rank| Server { rank, ..Server::default() }).collect();
        while let Some((rank, room)) = engine.turn() {
            let (queues, server) = (&mut ranks[rank], &mut servers[rank]);
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
                    server.rows.insert(row, aux_tag(&Room::Number(room)));
                }
                engine.go_on(rank, room, KvPoll::Success);
            } else {
                engine.go_on(rank, room, KvPoll::WaitingForInput);
            }
            queues.step(engine.fakes[rank].changes(), server).unwrap();
            engine.admitted[rank].clone_from(&server.admitted);
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

type Prefill = PrefillQueues<u64, Fake, ThreadConsensus>;

fn prefill_ranks(policy: PrefillPolicy) -> ([Fake; 2], Vec<Prefill>) {
    let fakes = [Fake::new(), Fake::new()];
    let handles = ThreadConsensus::group(2).into_iter().zip(fakes.clone());
    let queues = handles.map(|(handle, fake)| PrefillQueues::new(fake, handle, PrefillConfig::new(policy)));
    let queues = queues.collect();
    (fakes, queues)
}

/// Rank 0 has admitted a request whose agreement waits for the next step of rank 1.
#[test]
fn a_rank_admits_nobody_before_the_request_of_which_it_is_yet_to_be_told() {
    let (fakes, mut ranks) = prefill_ranks(PrefillPolicy::AfterBootstrap);
    for queues in &mut ranks {
        for (room, priority) in [(0, 0), (1, 1)] {
            let outgoing = Outgoing::new("p:1", Room::Number(room)).with(|of| of.priority = priority);
            queues.push(room, outgoing).unwrap();
        }
    }
    let meets = |ranks: &mut [Prefill], rank: usize, rooms: &[u64]| {
        rooms.iter().for_each(|room| fakes[rank].set(*room, KvPoll::WaitingForInput, false));
        ranks[rank].step(fakes[rank].changes()).unwrap();
    };
    meets(&mut ranks, 1, &[0, 1]);
    meets(&mut ranks, 0, &[0]);
    meets(&mut ranks, 1, &[]);
    meets(&mut ranks, 0, &[1]);
    let admitted = |queues: &mut Prefill| {
        let key = queues.pop_waiting(|_, _| true)?;
        queues.request(key).copied()
    };
    assert_eq!(admitted(&mut ranks[0]), Some(1));
    assert_eq!(admitted(&mut ranks[1]), None, "it is the turn of request 1");
    meets(&mut ranks, 1, &[]);
    assert_eq!([admitted(&mut ranks[1]), admitted(&mut ranks[1])], [Some(1), Some(0)]);
}

#[test]
fn a_request_that_one_rank_was_never_given_stops_no_other_request() {
    let (fakes, mut ranks) = prefill_ranks(PrefillPolicy::Eager);
    ranks[0].push(0, Outgoing::new("p:1", Room::Number(0))).unwrap();
    for (queues, fake) in ranks.iter_mut().zip(&fakes) {
        queues.push(1, Outgoing::new("p:1", Room::Number(1))).unwrap();
        queues.step(fake.changes()).unwrap();
    }
    assert_eq!(ranks[0].pop_waiting(|_, _| true), None, "rank 1 may never compute request 0");
    for queues in ranks.iter_mut().rev() {
        let key = queues.pop_waiting(|_, _| true).unwrap();
        assert_eq!(queues.request(key), Some(&1));
    }
}

/// Rank 0 has admitted a request, and then lacks pages for one that runs; both ranks take the latter back.
#[test]
fn what_another_rank_has_admitted_gets_pages_before_what_was_taken_back() {
    let config = DecodeConfig::new(AdmissionRule::new(16).with(|rule| rule.reserved_tokens = 0));
    let fakes = [Fake::new(), Fake::new()];
    let handles = ThreadConsensus::group(2).into_iter().zip(fakes.clone());
    let mut ranks: Vec<_> = handles
        .map(|(handle, fake)| DecodeQueues::<u64, _, _>::new(fake, handle, RunAllocator::new(10), config))
        .collect();
    let all = |ranks: &mut [DecodeQueues<u64, Fake, ThreadConsensus>], order: [usize; 4], room, poll| {
        fakes.iter().for_each(|fake| fake.set(room, poll, poll == KvPoll::Success));
        order.iter().for_each(|rank| ranks[*rank].step(fakes[*rank].changes(), &mut NoAux).unwrap());
    };
    for (room, pages) in [(0, 8), (1, 2)] {
        for queues in &mut ranks {
            queues.push(room, Incoming::new("p:1", Room::Number(room), Demand::new(pages, 0))).unwrap();
        }
    }
    all(&mut ranks, [0, 1, 0, 1], 0, KvPoll::WaitingForInput);
    all(&mut ranks, [0, 1, 0, 1], 0, KvPoll::Success);
    let running: Vec<_> = ranks.iter_mut().map(|queues| queues.pop_waiting().unwrap()).collect();
    // Rank 1 proposes, rank 0 agrees and admits; rank 1 has not been told.
    all(&mut ranks, [1, 0, 0, 0], 1, KvPoll::WaitingForInput);
    assert!(ranks[0].allocate(1).is_none());
    for (queues, ready) in ranks.iter_mut().zip(running) {
        queues.retract(ready.key, 0, ready.pages, 9).unwrap();
    }
    all(&mut ranks, [1, 0, 1, 0], 1, KvPoll::WaitingForInput);
    assert_eq!(
        [0, 1].map(|rank| (ranks[rank].counts().transfer, ranks[rank].counts().retracted)),
        [(1, 1); 2]
    );
    all(&mut ranks, [1, 0, 1, 0], 1, KvPoll::Success);
    for queues in &mut ranks {
        let arrived = queues.pop_waiting().unwrap();
        assert_eq!(arrived.request, 1);
        queues.finish(arrived.key, arrived.pages).unwrap();
        queues.step([], &mut NoAux).unwrap();
        assert_eq!(queues.pop_waiting().map(|resumed| resumed.pages.len()), Some(9));
    }
}

/// A rank beside one that has passed this request.
struct Behind(SingleRank, Rc<Cell<Option<RequestKey>>>);

impl RankConsensus for Behind {
    type Error = Infallible;

    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy> {
        self.0.join(key, room)
    }

    fn propose(&mut self, key: RequestKey, standing: Standing) {
        self.0.propose(key, standing);
    }

    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Infallible> {
        self.0.agree(agreed)
    }

    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey> {
        self.1.get().or(first)
    }

    fn took_turn(&mut self) {
        self.1.set(None);
    }

    fn is_lock_step(&self) -> bool {
        false
    }
}

#[test]
fn what_was_taken_back_waits_for_pages_of_the_request_whose_turn_it_is_and_for_nothing_else() {
    for lacks_items in [false, true] {
        let config = DecodeConfig::new(AdmissionRule::new(16).with(|rule| rule.reserved_tokens = 0));
        let (fake, passed) = (Fake::new(), Rc::new(Cell::new(None)));
        let consensus = Behind(SingleRank::default(), Rc::clone(&passed));
        let mut queues =
            DecodeQueues::<u64, _, _>::new(fake.clone(), consensus, RunAllocator::new(10), config);
        let mut rows = Rows::default();
        let incoming = |room, pages| Incoming::new("p:1", Room::Number(room), Demand::new(pages, 0));
        queues.push(0, incoming(0, 8)).unwrap();
        for poll in [KvPoll::WaitingForInput, KvPoll::Success] {
            fake.set(0, poll, poll.is_terminal());
            queues.step(fake.changes(), &mut rows).unwrap();
        }
        let running = queues.pop_waiting().unwrap();
        passed.set(Some(queues.push(1, incoming(1, 2)).unwrap()));
        queues.retract(running.key, 0, running.pages, 9).unwrap();
        queues.step([], &mut rows).unwrap();
        assert_eq!(queues.counts().retracted, 1, "the request whose turn it is comes into the line soon");
        rows.1 = lacks_items.then(Vec::new);
        fake.set(1, KvPoll::WaitingForInput, false);
        queues.step(fake.changes(), &mut rows).unwrap();
        let counts = queues.counts();
        assert_eq!((counts.transfer, counts.retracted), if lacks_items { (0, 0) } else { (1, 1) });
    }
}
