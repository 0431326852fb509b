//! [`ThreadConsensus`]: agreement among ranks that are threads of one process.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{KvPoll, Room};

use super::agreement::{Agreed, OPENING, RankConsensus, RequestKey, RoomBusy, Standing, advance};
use super::order::{Order, Place};

/// One rank's handle on the agreement of a group of threads.
///
/// Ranks may run at different speeds and enter a room at different times: a rank that has not entered a room
/// counts as `Bootstrapping`. All ranks get the same agreements in the same order, and admit requests in the
/// same order: the rank that is ahead decides, by its own line. A step without news costs one atomic load; a
/// step with news, and each look at the first in line, takes a short lock, O(changes). A room is forgotten when
/// every rank has been told its end, and cannot be entered again before.
///
/// The [poll set](crate::PollSet) of a rank does not tell what other ranks report: a scheduler that sleeps on its
/// descriptor must take a step every few milliseconds all the same, as long as it has requests. A rank that takes no
/// steps, and whose handle lives, stops the others.
///
/// **Not for decode ranks whose running batches depend on each other**, as those of tensor parallelism do, if requests
/// that run can lack pages: admissions are in one order on all ranks, and growth and retractions of running requests are
/// the server's. If one rank gives its last pages to a new request, and another one to a request that grows, both wait
/// for each other until a session's deadline. Such ranks are in lock-step anyway, and agree by
/// [`CollectiveConsensus`](super::CollectiveConsensus).
///
/// Dropping a handle fails the requests whose end its rank has not been told, and every later request: the
/// other ranks do not wait for a rank that is gone.
#[derive(Debug)]
pub struct ThreadConsensus {
    rank: usize,
    shared: Arc<Shared>,
    requests: BTreeMap<RequestKey, Request>,
    /// Proposals that are not in the shared table yet.
    proposed: Vec<(RequestKey, KvPoll)>,
    /// Requests whose pages have become free after the end was agreed.
    released: Vec<Agreed>,
}

impl ThreadConsensus {
    /// The handles of a group of `ranks` threads, in the order of ranks. Give one to each thread's queues.
    pub fn group(ranks: usize) -> Vec<ThreadConsensus> {
        let shared = Arc::new(Shared {
            table: Mutex::new(Table {
                rooms: BTreeMap::new(),
                entered: 0,
                order: Order::new(ranks),
                mail: (0..ranks).map(|_| VecDeque::new()).collect(),
                gone: vec![false; ranks],
            }),
            news: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
        });
        let handle = |rank| ThreadConsensus {
            rank,
            shared: shared.clone(),
            requests: BTreeMap::new(),
            proposed: Vec::new(),
            released: Vec::new(),
        };
        (0..ranks).map(handle).collect()
    }

    /// How many rooms are open: at least one rank has not been told their end.
    pub fn open_rooms(&self) -> usize {
        self.shared.lock().rooms.len()
    }
}

impl RankConsensus for ThreadConsensus {
    type Error = Infallible;

    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy> {
        let mut table = self.shared.lock();
        let Table { rooms, entered, mail, gone, .. } = &mut *table;
        let vote = rooms.entry(room.clone()).or_insert_with(|| {
            *entered += 1;
            Vote::new(*entered, gone)
        });
        let Some(seat) = vote.seats.get_mut(self.rank).filter(|seat| seat.key.is_none()) else {
            return Err(RoomBusy { room: room.clone() });
        };
        seat.key = Some(key);
        if vote.agreed != OPENING.poll {
            mail[self.rank].push_back((key, vote.agreed));
            self.shared.news[self.rank].store(true, Ordering::Release);
        }
        self.requests.insert(key, Request { room: room.clone(), reclaimable: false, end: None });
        Ok(())
    }

    fn propose(&mut self, key: RequestKey, standing: Standing) {
        let Some(request) = self.requests.get_mut(&key) else { return };
        request.reclaimable |= standing.reclaimable;
        match request.end {
            None => self.proposed.push((key, standing.poll)),
            Some(poll) if request.reclaimable => {
                self.released.push(Agreed { key, standing: Standing { poll, reclaimable: true } });
                self.requests.remove(&key);
            }
            Some(_) => {}
        }
    }

    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Infallible> {
        agreed.append(&mut self.released);
        if self.proposed.is_empty() && !self.shared.news[self.rank].load(Ordering::Acquire) {
            return Ok(());
        }
        let mut table = self.shared.lock();
        for (key, poll) in self.proposed.drain(..) {
            if let Some(request) = self.requests.get(&key) {
                table.propose(self.rank, &request.room, poll, &self.shared.news);
            }
        }
        self.shared.news[self.rank].store(false, Ordering::Release);
        while let Some((key, poll)) = table.mail[self.rank].pop_front() {
            let Some(request) = self.requests.get_mut(&key) else { continue };
            let reclaimable = poll.is_terminal() && request.reclaimable;
            agreed.push(Agreed { key, standing: Standing { poll, reclaimable } });
            if poll.is_terminal() {
                table.retire(self.rank, &request.room);
                request.end = Some(poll);
            }
            if reclaimable {
                self.requests.remove(&key);
            }
        }
        table.pass_ended(self.rank);
        Ok(())
    }

    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey> {
        let first = first.and_then(|key| self.requests.get(&key)).map(|request| &request.room);
        self.shared.lock().turn(self.rank, first)
    }

    fn took_turn(&mut self) {
        self.shared.lock().order.pass(self.rank);
    }

    fn is_lock_step(&self) -> bool {
        false
    }
}

impl Drop for ThreadConsensus {
    fn drop(&mut self) {
        let mut table = self.shared.lock();
        table.gone[self.rank] = true;
        table.mail[self.rank].clear();
        let Table { rooms, mail, .. } = &mut *table;
        rooms.retain(|_, vote| {
            vote.propose(self.rank, KvPoll::Failed, mail, &self.shared.news);
            vote.retire(self.rank);
            !vote.is_over()
        });
    }
}

/// What only this rank knows about a request.
#[derive(Debug)]
struct Request {
    room: Room,
    reclaimable: bool,
    /// The agreed end, once this rank has been told.
    end: Option<KvPoll>,
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    /// For each rank: true if its mail is not empty. Written under the lock.
    news: Box<[AtomicBool]>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code panics while the table is half changed, so a poisoned table is still valid.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Mail = VecDeque<(RequestKey, KvPoll)>;

#[derive(Debug)]
struct Table {
    rooms: BTreeMap<Room, Vote>,
    /// How many requests were entered by their first rank.
    entered: u64,
    order: Order,
    /// For each rank: agreements that it has not been told.
    mail: Vec<Mail>,
    gone: Vec<bool>,
}

impl Table {
    fn propose(&mut self, rank: usize, room: &Room, poll: KvPoll, news: &[AtomicBool]) {
        if let Some(vote) = self.rooms.get_mut(room) {
            vote.propose(rank, poll, &mut self.mail, news);
        }
    }

    /// Whose turn it is on a rank: that of `first`, if this rank has passed all places. Without `first`, only a place that
    /// another rank has passed counts.
    fn turn(&mut self, rank: usize, first: Option<&Room>) -> Option<RequestKey> {
        self.pass_ended(rank);
        match first {
            None if !self.order.is_behind(rank) => return None,
            Some(first) if self.order.next(rank).is_none() => {
                let vote = self.rooms.get(first).filter(|vote| vote.may_have_turn())?;
                self.order.give(Place { room: first.clone(), number: vote.number });
            }
            _ => {}
        }
        self.of(self.order.next(rank)?)?.seats.get(rank)?.key
    }

    /// Lets a rank pass the places of requests that have ended: it need not admit these.
    fn pass_ended(&mut self, rank: usize) {
        while let Some(place) = self.order.next(rank)
            && self.of(place).is_none_or(|vote| vote.agreed.is_terminal())
        {
            self.order.pass(rank);
        }
    }

    /// The request that has a place; `None` if all ranks have been told its end.
    fn of(&self, place: &Place) -> Option<&Vote> {
        self.rooms.get(&place.room).filter(|vote| vote.number == place.number)
    }

    fn retire(&mut self, rank: usize, room: &Room) {
        let Some(vote) = self.rooms.get_mut(room) else { return };
        vote.retire(rank);
        if vote.is_over() {
            self.rooms.remove(room);
        }
    }
}

/// The states of all ranks in one room, and what is agreed.
#[derive(Debug)]
struct Vote {
    /// How many requests had been entered, with this one.
    number: u64,
    seats: Box<[Seat]>,
    /// How many ranks are in each state, so that the minimum is found without looking at every rank.
    tally: [u32; 5],
    agreed: KvPoll,
    /// How many ranks have not been told the end.
    watching: usize,
}

#[derive(Debug, Clone, Copy)]
struct Seat {
    /// The rank's key, once it has entered the room.
    key: Option<RequestKey>,
    poll: KvPoll,
    retired: bool,
}

impl Vote {
    fn new(number: u64, gone: &[bool]) -> Vote {
        let state = |gone| if gone { KvPoll::Failed } else { KvPoll::Bootstrapping };
        let seats: Box<[Seat]> =
            gone.iter().map(|&gone| Seat { key: None, poll: state(gone), retired: gone }).collect();
        let mut tally = [0; 5];
        for seat in &seats {
            tally[seat.poll as usize] += 1;
        }
        let watching = seats.iter().filter(|seat| !seat.retired).count();
        Vote { number, agreed: lowest(&tally), seats, tally, watching }
    }

    fn propose(&mut self, rank: usize, poll: KvPoll, mail: &mut [Mail], news: &[AtomicBool]) {
        let Some(seat) = self.seats.get_mut(rank).filter(|seat| !seat.retired) else { return };
        let current = Standing { poll: seat.poll, reclaimable: false };
        let next = advance(current, Standing { poll, reclaimable: false }).poll;
        self.tally[seat.poll as usize] -= 1;
        self.tally[next as usize] += 1;
        seat.poll = next;
        let agreed = lowest(&self.tally);
        if agreed == self.agreed {
            return;
        }
        self.agreed = agreed;
        for (rank, seat) in self.seats.iter().enumerate().filter(|(_, seat)| !seat.retired) {
            if let Some(key) = seat.key {
                mail[rank].push_back((key, agreed));
                news[rank].store(true, Ordering::Release);
            }
        }
    }

    /// True if the request can be admitted on every rank. What only some ranks have entered would block the others.
    fn may_have_turn(&self) -> bool {
        !self.agreed.is_terminal() && self.seats.iter().all(|seat| seat.key.is_some())
    }

    fn retire(&mut self, rank: usize) {
        if let Some(seat) = self.seats.get_mut(rank).filter(|seat| !seat.retired) {
            seat.retired = true;
            self.watching -= 1;
        }
    }

    fn is_over(&self) -> bool {
        self.watching == 0
    }
}

fn lowest(tally: &[u32; 5]) -> KvPoll {
    let lowest = tally.iter().position(|&ranks| ranks > 0).unwrap_or(0);
    u8::try_from(lowest).ok().and_then(KvPoll::from_u8).unwrap_or(KvPoll::Failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_admits_nothing_keeps_no_places_of_requests_that_have_ended() {
        let mut ranks = ThreadConsensus::group(2);
        for number in 0..100 {
            for rank in &mut ranks {
                rank.join(RequestKey(number), &Room::Number(number)).unwrap();
            }
            assert_eq!(ranks[0].turn(Some(RequestKey(number))), Some(RequestKey(number)));
            ranks[0].took_turn();
            ranks[1].propose(RequestKey(number), Standing { poll: KvPoll::Failed, reclaimable: true });
            ranks[1].agree(&mut Vec::new()).unwrap();
            assert_eq!(ranks[1].shared.lock().order.next(1), None);
        }
    }
}
