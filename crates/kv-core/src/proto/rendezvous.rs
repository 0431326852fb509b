//! Where senders and registrations of one request find each other, whichever comes first.
//!
//! Equal rooms match. Otherwise rooms match if they are equal after the suffixes are removed that engines
//! say they add, and if exactly one waiting room qualifies; with two candidates, all of them fail as
//! ambiguous.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::PeerCause;
use crate::id::{Attempt, PeerId, Room, SessionId};
use crate::meter::{each, step};
use crate::plane::Origin;
use crate::time::Time;

/// A room as one side knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    /// The room.
    pub(super) room: Room,
    /// Without the suffix of that side's engine.
    base: Room,
}

impl Named {
    pub(super) fn new(room: Room, suffixed: bool) -> Named {
        Named { base: room.unsuffixed(suffixed), room }
    }

    /// True if both name one request, as far as the two rooms alone can tell.
    pub(super) fn is_same_request(&self, other: &Named) -> bool {
        self.room == other.room || self.base == other.base
    }
}

/// Two rooms that a third one could mean.
pub(super) type Ambiguity = (Room, Room);

/// Who waits, by room.
#[derive(Debug, Clone)]
pub(super) struct Waiters<T> {
    exact: BTreeMap<Room, BTreeSet<(u64, T)>>,
    /// How many wait, by room, by room without suffix.
    base: BTreeMap<Room, BTreeMap<Room, usize>>,
    arrival: BTreeMap<T, u64>,
    next: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Waiters<T> {
        Waiters { exact: BTreeMap::new(), base: BTreeMap::new(), arrival: BTreeMap::new(), next: 0 }
    }
}

impl<T: Copy + Ord> Waiters<T> {
    pub(super) fn insert(&mut self, named: &Named, who: T) {
        let arrival = self.next;
        self.next += 1;
        self.arrival.insert(who, arrival);
        self.exact.entry(named.room.clone()).or_default().insert((arrival, who));
        let rooms = self.base.entry(named.base.clone()).or_default();
        *rooms.entry(named.room.clone()).or_default() += 1;
    }

    pub(super) fn remove(&mut self, named: &Named, who: T) {
        let Some(arrival) = self.arrival.remove(&who) else { return };
        if let Some(waiting) = self.exact.get_mut(&named.room) {
            waiting.remove(&(arrival, who));
            if waiting.is_empty() {
                self.exact.remove(&named.room);
            }
        }
        let Some(rooms) = self.base.get_mut(&named.base) else { return };
        if let Some(count) = rooms.get_mut(&named.room) {
            *count -= 1;
            if *count == 0 {
                rooms.remove(&named.room);
            }
        }
        if rooms.is_empty() {
            self.base.remove(&named.base);
        }
    }

    /// Whom a newcomer to the room meets: of several in one room the oldest.
    pub(super) fn find(&self, named: &Named) -> Result<Option<T>, Ambiguity> {
        let oldest = |room: &Room| self.exact.get(room).and_then(|waiting| Some(waiting.first()?.1));
        if let Some(found) = oldest(&named.room) {
            return Ok(Some(found));
        }
        let Some(rooms) = self.base.get(&named.base) else { return Ok(None) };
        let mut rooms = rooms.keys();
        match (rooms.next(), rooms.next()) {
            (Some(one), Some(other)) => Err((one.clone(), other.clone())),
            (Some(room), None) => Ok(oldest(room)),
            (None, _) => Ok(None),
        }
    }

    /// Somebody in this room.
    pub(super) fn find_exact(&self, room: &Room) -> Option<T> {
        self.exact.get(room).and_then(|waiting| Some(waiting.first()?.1))
    }

    pub(super) fn len(&self) -> usize {
        self.arrival.len()
    }
}

/// Rooms whose one half has failed before the other came, so that the other is told when it comes.
/// Bounded in number and in time; each entry is good for one latecomer, unless nobody knew how many
/// there would be.
#[derive(Debug, Clone, Default)]
pub(super) struct FailedRooms {
    waiters: Waiters<u64>,
    rooms: BTreeMap<u64, FailedRoom>,
    /// The entries that a connection has to answer for, oldest first.
    by_origin: BTreeMap<Option<Origin>, VecDeque<u64>>,
    next: u64,
}

#[derive(Debug, Clone)]
struct FailedRoom {
    until: Time,
    named: Named,
    cause: PeerCause,
    latecomers: Latecomers,
    origin: Option<Origin>,
}

/// How many latecomers a failed room is good for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Latecomers {
    /// So many.
    Left(usize),
    /// The number of ranks that the first latecomer tells, less this number of ranks that have ended.
    AllBut(usize),
}

impl FailedRooms {
    /// Remembers a room on account of a connection, or of this worker's own scheduler. Each of them has
    /// `max` entries at most, of which the oldest makes room; all have `most` together, of which whoever
    /// has the most gives up the oldest.
    pub(super) fn insert(
        &mut self,
        (named, cause): (Named, PeerCause),
        latecomers: Latecomers,
        until: Time,
        (origin, max, most): (Option<Origin>, usize, usize),
    ) {
        while self.by_origin.get(&origin).is_some_and(|rooms| rooms.len() >= max.max(1)) {
            self.remove_oldest(origin);
        }
        while self.rooms.len() >= most.max(1)
            && let Some((&largest, _)) = each(&self.by_origin).max_by_key(|(_, rooms)| rooms.len())
        {
            self.remove_oldest(largest);
        }
        self.waiters.insert(&named, self.next);
        self.by_origin.entry(origin).or_default().push_back(self.next);
        self.rooms.insert(self.next, FailedRoom { until, named, cause, latecomers, origin });
        self.next += 1;
    }

    /// Takes the entry that a newcomer to the room meets, who says that there are `ranks` like it.
    pub(super) fn take(&mut self, named: &Named, ranks: u32) -> Option<PeerCause> {
        loop {
            let id = self.waiters.find(named).ok()??;
            let known = self.rooms.get_mut(&id)?;
            let left = match known.latecomers {
                Latecomers::Left(left) => left,
                Latecomers::AllBut(gone) => (ranks.max(1) as usize).saturating_sub(gone),
            };
            if left > 1 {
                known.latecomers = Latecomers::Left(left - 1);
                return Some(known.cause.clone());
            }
            let FailedRoom { cause, .. } = self.remove(id)?;
            if left == 1 {
                return Some(cause);
            }
        }
    }

    /// Forgets every entry that a newcomer to the room could meet.
    pub(super) fn clear(&mut self, named: &Named) {
        while let Ok(Some(id)) = self.waiters.find(named) {
            step(1);
            self.remove(id);
        }
    }

    /// When the oldest entry is to be forgotten.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.rooms.first_key_value().map(|(_, room)| room.until)
    }

    pub(super) fn expire(&mut self, now: Time) {
        while let Some((&oldest, _)) = self.rooms.first_key_value().filter(|(_, room)| room.until <= now) {
            step(1);
            self.remove(oldest);
        }
    }

    fn remove_oldest(&mut self, of: Option<Origin>) {
        let oldest = self.by_origin.get(&of).and_then(|rooms| rooms.front().copied());
        oldest.map(|oldest| self.remove(oldest));
    }

    fn remove(&mut self, id: u64) -> Option<FailedRoom> {
        let room = self.rooms.remove(&id)?;
        self.waiters.remove(&room.named, id);
        if let Some(rooms) = self.by_origin.get_mut(&room.origin) {
            if let Ok(at) = rooms.binary_search(&id) {
                rooms.remove(at);
            }
            if rooms.is_empty() {
                self.by_origin.remove(&room.origin);
            }
        }
        Some(room)
    }

    pub(super) fn len(&self) -> usize {
        self.rooms.len()
    }
}

/// The meeting place of a node's serving half.
#[derive(Debug, Clone, Default)]
pub(super) struct Rendezvous {
    /// Senders that lack receivers.
    pub(super) senders: Waiters<SessionId>,
    /// Receivers of this worker, if its engine adds suffixes to the ids of requests.
    pub(super) receivers: Waiters<SessionId>,
    /// Registrations that lack a sender.
    pub(super) registrations: Waiters<(PeerId, Attempt)>,
    /// What they cost, in all and by connection.
    pub(super) waiting: Cost,
    pub(super) waiting_of: BTreeMap<Option<Origin>, Cost>,
    /// Rooms whose sender failed before all receivers registered.
    pub(super) failed_senders: FailedRooms,
    /// Rooms whose receiver gave up before it registered.
    pub(super) failed_receivers: FailedRooms,
}

/// What registrations cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// How many.
    pub(super) registrations: usize,
    /// Runs of pages in them.
    pub(super) runs: usize,
}

impl Rendezvous {
    /// A registration begins to wait.
    pub(super) fn wait(
        &mut self,
        named: &Named,
        who: (PeerId, Attempt),
        origin: Option<Origin>,
        runs: usize,
    ) {
        self.registrations.insert(named, who);
        let of = self.waiting_of.entry(origin).or_default();
        for cost in [&mut self.waiting, of] {
            cost.registrations += 1;
            cost.runs += runs;
        }
    }

    /// A registration waits no more.
    pub(super) fn leave(
        &mut self,
        named: &Named,
        who: (PeerId, Attempt),
        origin: Option<Origin>,
        runs: usize,
    ) {
        self.registrations.remove(named, who);
        let Some(of) = self.waiting_of.get_mut(&origin) else { return };
        for cost in [&mut self.waiting, &mut *of] {
            cost.registrations -= 1;
            cost.runs -= runs;
        }
        if of.registrations == 0 {
            self.waiting_of.remove(&origin);
        }
    }

    /// What the registrations of one connection cost.
    pub(super) fn cost_of(&self, origin: Option<Origin>) -> Cost {
        self.waiting_of.get(&origin).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A room of an engine that adds suffixes.
    fn room(id: &str) -> Named {
        Named::new(Room::request(id).unwrap(), true)
    }

    fn number(number: u64) -> Named {
        Named::new(Room::Number(number), true)
    }

    fn insert(rooms: &mut FailedRooms, named: Named, latecomers: Latecomers, max: usize) {
        rooms.insert((named, PeerCause::Aborted), latecomers, Time::MAX, (None, max, 99));
    }

    #[test]
    fn the_whole_id_comes_first_and_a_second_candidate_is_ambiguous() {
        let mut waiters = Waiters::default();
        waiters.insert(&room("r-00000001"), 9);
        assert_eq!(waiters.find(&room("r-0000000a")), Ok(Some(9)));
        assert_eq!(waiters.find(&Named::new(Room::request("r-0000000a").unwrap(), false)), Ok(None));
        waiters.insert(&room("r-00000002"), 5);
        assert_eq!(waiters.find(&room("r-00000002")), Ok(Some(5)));
        let both = (Room::request("r-00000001").unwrap(), Room::request("r-00000002").unwrap());
        assert_eq!(waiters.find(&room("r-0000000a")), Err(both));
        waiters.remove(&room("r-00000001"), 9);
        assert_eq!(waiters.find(&room("r-0000000a")), Ok(Some(5)));
        assert_eq!(waiters.find(&room("s-0000000a")), Ok(None));
        waiters.remove(&room("r-00000002"), 5);
        assert_eq!(waiters.len(), 0);
        assert!(waiters.exact.is_empty() && waiters.base.is_empty());
    }

    #[test]
    fn an_engine_without_suffixes_meets_one_with_suffixes_by_the_plain_id() {
        let plain = Named::new(Room::request("r").unwrap(), false);
        let mut waiters = Waiters::default();
        waiters.insert(&plain, 1);
        assert_eq!(waiters.find(&room("r-0000000a")), Ok(Some(1)));
        assert!(plain.is_same_request(&room("r-0000000b")));
        assert!(!plain.is_same_request(&Named::new(Room::request("r-0000000b").unwrap(), false)));
        // A suffix may be all there is.
        assert_eq!(room("-0000000a").base, Room::request("-0000000a").unwrap());
    }

    #[test]
    fn of_several_in_one_room_the_oldest_is_met() {
        let mut waiters = Waiters::default();
        for who in [9, 5, 7] {
            waiters.insert(&number(1), who);
        }
        assert_eq!(waiters.find(&number(1)), Ok(Some(9)));
        waiters.remove(&number(1), 9);
        assert_eq!(waiters.find(&number(1)), Ok(Some(5)));
        assert_eq!(waiters.find(&room("1")), Ok(None));
    }

    #[test]
    fn a_failed_room_that_was_pushed_out_does_not_hide_a_later_one() {
        let mut rooms = FailedRooms::default();
        for cause in [PeerCause::Aborted, PeerCause::DeadlineExceeded] {
            rooms.insert((number(1), cause), Latecomers::Left(1), Time::MAX, (None, 1, 99));
        }
        assert_eq!(rooms.take(&number(1), 1), Some(PeerCause::DeadlineExceeded));
        assert_eq!((rooms.len(), rooms.waiters.len(), rooms.by_origin.len()), (0, 0, 0));
    }

    #[test]
    fn a_failed_room_of_which_nobody_knew_the_size_serves_as_many_as_the_first_says() {
        let mut rooms = FailedRooms::default();
        insert(&mut rooms, number(1), Latecomers::AllBut(0), 3);
        for ranks in [3, 1, 7] {
            assert_eq!(rooms.take(&number(1), ranks), Some(PeerCause::Aborted));
        }
        assert_eq!(rooms.take(&number(1), 3), None);
        insert(&mut rooms, number(1), Latecomers::AllBut(1), 3);
        assert_eq!(rooms.take(&number(1), 2), Some(PeerCause::Aborted));
        assert_eq!(rooms.take(&number(1), 2), None);
        insert(&mut rooms, number(1), Latecomers::AllBut(1), 3);
        assert_eq!(rooms.take(&number(1), 1), None, "the only one has gone: this is another");
        assert_eq!((rooms.len(), rooms.waiters.len()), (0, 0));
    }

    #[test]
    fn failed_rooms_expire_and_serve_as_many_latecomers_as_are_left() {
        let mut rooms = FailedRooms::default();
        for of in 0..3 {
            let until = Time::from_nanos(of);
            rooms.insert((number(of), PeerCause::Aborted), Latecomers::Left(2), until, (None, 3, 99));
        }
        for told in [true, true, false] {
            assert_eq!(rooms.take(&number(1), 1).is_some(), told);
        }
        rooms.expire(Time::from_nanos(1));
        assert_eq!(rooms.next_expiry(), Some(Time::from_nanos(2)));
        rooms.expire(Time::MAX);
        assert_eq!((rooms.len(), rooms.by_origin.len()), (0, 0));
    }

    #[test]
    fn one_connection_pushes_out_its_own_failed_rooms_and_no_others() {
        let mut rooms = FailedRooms::default();
        insert(&mut rooms, number(0), Latecomers::Left(1), 3);
        for of in 1..=9 {
            let origin = Some(Origin(7));
            rooms.insert((number(of), PeerCause::Aborted), Latecomers::Left(1), Time::MAX, (origin, 3, 99));
        }
        assert_eq!(rooms.len(), 4);
        let left: Vec<u64> = (0..=9).filter(|&of| rooms.take(&number(of), 1).is_some()).collect();
        assert_eq!(left, [0, 7, 8, 9]);
    }
}
