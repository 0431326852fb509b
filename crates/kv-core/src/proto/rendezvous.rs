//! Where senders and registrations of one request find each other, whichever comes first.
//!
//! A pair matches if the rooms are equal; failing that, if both are request ids that are equal
//! without their per-engine suffix (seeds/000). Among several candidates under one base the oldest
//! is taken: they are retries of one request, hence of one prompt.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::PeerCause;
use crate::id::{Attempt, PeerId, Room, SessionId};
use crate::time::Time;

/// Who waits, by room.
#[derive(Debug, Clone)]
pub(super) struct Waiters<T> {
    exact: BTreeMap<Room, BTreeSet<T>>,
    base: BTreeMap<String, BTreeSet<(u64, T)>>,
    arrival: BTreeMap<T, u64>,
    next: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Waiters<T> {
        Waiters { exact: BTreeMap::new(), base: BTreeMap::new(), arrival: BTreeMap::new(), next: 0 }
    }
}

impl<T: Copy + Ord> Waiters<T> {
    pub(super) fn insert(&mut self, room: &Room, who: T) {
        let arrival = self.next;
        self.next += 1;
        self.arrival.insert(who, arrival);
        self.exact.entry(room.clone()).or_default().insert(who);
        if let Some(base) = room.base() {
            self.base.entry(base.to_owned()).or_default().insert((arrival, who));
        }
    }

    pub(super) fn remove(&mut self, room: &Room, who: T) {
        let Some(arrival) = self.arrival.remove(&who) else { return };
        if let Some(waiting) = self.exact.get_mut(room) {
            waiting.remove(&who);
            if waiting.is_empty() {
                self.exact.remove(room);
            }
        }
        let Some(base) = room.base() else { return };
        if let Some(waiting) = self.base.get_mut(base) {
            waiting.remove(&(arrival, who));
            if waiting.is_empty() {
                self.base.remove(base);
            }
        }
    }

    /// Whom a newcomer to `room` meets.
    pub(super) fn find(&self, room: &Room) -> Option<T> {
        if let Some(waiting) = self.exact.get(room) {
            return waiting.iter().min_by_key(|who| self.arrival.get(who)).copied();
        }
        let waiting = self.base.get(room.base()?)?;
        waiting.first().map(|&(_, who)| who)
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
    rooms: VecDeque<FailedRoom>,
    next: u64,
}

#[derive(Debug, Clone)]
struct FailedRoom {
    id: u64,
    until: Time,
    room: Room,
    cause: PeerCause,
    latecomers: Latecomers,
}

/// How many latecomers a failed room is good for.
#[derive(Debug, Clone, Copy)]
enum Latecomers {
    Left(u32),
    /// As many as the first of them says there are, but for some that will not come.
    AllBut(u32),
}

impl FailedRooms {
    pub(super) fn insert(&mut self, room: Room, cause: PeerCause, until: Time, max: usize) {
        self.insert_for(Latecomers::Left(1), room, cause, until, max);
    }

    /// As `insert`, for as many latecomers as the first of them says there are, except `gone`.
    pub(super) fn insert_all_but(
        &mut self,
        gone: u32,
        room: Room,
        cause: PeerCause,
        until: Time,
        max: usize,
    ) {
        self.insert_for(Latecomers::AllBut(gone), room, cause, until, max);
    }

    fn insert_for(&mut self, latecomers: Latecomers, room: Room, cause: PeerCause, until: Time, max: usize) {
        while self.rooms.len() >= max.max(1) {
            self.pop();
        }
        self.waiters.insert(&room, self.next);
        self.rooms.push_back(FailedRoom { id: self.next, until, room, cause, latecomers });
        self.next += 1;
    }

    /// Takes the entry that a newcomer to `room` meets, who says that there are `ranks` like it.
    pub(super) fn take(&mut self, room: &Room, ranks: u32) -> Option<PeerCause> {
        loop {
            let id = self.waiters.find(room)?;
            let at = self.rooms.binary_search_by_key(&id, |room| room.id).ok()?;
            let known = self.rooms.get_mut(at)?;
            let left = match known.latecomers {
                Latecomers::Left(left) => left,
                Latecomers::AllBut(gone) => ranks.max(1).saturating_sub(gone),
            };
            if left > 1 {
                known.latecomers = Latecomers::Left(left - 1);
                return Some(known.cause.clone());
            }
            let FailedRoom { id, room, cause, .. } = self.rooms.remove(at)?;
            self.waiters.remove(&room, id);
            if left == 1 {
                return Some(cause);
            }
        }
    }

    /// Forgets every entry that a newcomer to `room` could meet.
    pub(super) fn clear(&mut self, room: &Room) {
        while let Some(id) = self.waiters.find(room) {
            let Ok(at) = self.rooms.binary_search_by_key(&id, |room| room.id) else { return };
            let Some(FailedRoom { id, room, .. }) = self.rooms.remove(at) else { return };
            self.waiters.remove(&room, id);
        }
    }

    /// When the oldest entry is to be forgotten.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.rooms.front().map(|room| room.until)
    }

    pub(super) fn expire(&mut self, now: Time) {
        while self.next_expiry().is_some_and(|until| until <= now) {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(FailedRoom { id, room, .. }) = self.rooms.pop_front() {
            self.waiters.remove(&room, id);
        }
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
    /// Registrations that lack a sender.
    pub(super) registrations: Waiters<(PeerId, Attempt)>,
    /// Runs of pages in them: what they cost.
    pub(super) waiting_runs: usize,
    /// Rooms whose sender failed before all receivers registered.
    pub(super) failed_senders: FailedRooms,
    /// Rooms whose receiver gave up before it registered.
    pub(super) failed_receivers: FailedRooms,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(id: &str) -> Room {
        Room::request(id).unwrap()
    }

    #[test]
    fn exact_id_comes_before_base_id_and_the_oldest_before_the_rest() {
        let mut waiters = Waiters::default();
        waiters.insert(&room("r-00000001"), 9);
        waiters.insert(&room("r-00000002"), 5);
        waiters.insert(&room("r-00000003"), 7);
        assert_eq!(waiters.find(&room("r-00000003")), Some(7));
        assert_eq!(waiters.find(&room("r-0000000a")), Some(9));
        waiters.remove(&room("r-00000001"), 9);
        assert_eq!(waiters.find(&room("r-0000000a")), Some(5));
        assert_eq!(waiters.find(&room("s-0000000a")), None);
        waiters.remove(&room("r-00000002"), 5);
        waiters.remove(&room("r-00000003"), 7);
        assert_eq!(waiters.len(), 0);
        assert!(waiters.exact.is_empty() && waiters.base.is_empty());
    }

    #[test]
    fn of_several_in_one_room_the_oldest_is_met() {
        let mut waiters = Waiters::default();
        for who in [9, 5, 7] {
            waiters.insert(&Room::Number(1), who);
        }
        assert_eq!(waiters.find(&Room::Number(1)), Some(9));
        waiters.remove(&Room::Number(1), 9);
        assert_eq!(waiters.find(&Room::Number(1)), Some(5));
    }

    #[test]
    fn numbers_match_exactly_or_not_at_all() {
        let mut waiters = Waiters::default();
        waiters.insert(&Room::Number(7), 1);
        assert_eq!(waiters.find(&Room::Number(7)), Some(1));
        assert_eq!(waiters.find(&room("7")), None);
    }

    #[test]
    fn a_failed_room_that_was_pushed_out_does_not_hide_a_later_one() {
        let mut rooms = FailedRooms::default();
        for cause in [PeerCause::Aborted, PeerCause::DeadlineExceeded] {
            rooms.insert(Room::Number(1), cause, Time::MAX, 1);
        }
        assert_eq!(rooms.take(&Room::Number(1), 1), Some(PeerCause::DeadlineExceeded));
        assert_eq!((rooms.len(), rooms.waiters.len()), (0, 0));
    }

    #[test]
    fn a_failed_room_of_which_nobody_knew_the_size_serves_as_many_as_the_first_says() {
        let mut rooms = FailedRooms::default();
        rooms.insert_all_but(0, Room::Number(1), PeerCause::Aborted, Time::MAX, 3);
        for ranks in [3, 1, 7] {
            assert_eq!(rooms.take(&Room::Number(1), ranks), Some(PeerCause::Aborted));
        }
        assert_eq!(rooms.take(&Room::Number(1), 3), None);
        rooms.insert_all_but(1, Room::Number(1), PeerCause::Aborted, Time::MAX, 3);
        assert_eq!(rooms.take(&Room::Number(1), 2), Some(PeerCause::Aborted));
        assert_eq!(rooms.take(&Room::Number(1), 2), None);
        rooms.insert_all_but(1, Room::Number(1), PeerCause::Aborted, Time::MAX, 3);
        assert_eq!(rooms.take(&Room::Number(1), 1), None, "the only one has gone: this is another");
        assert_eq!((rooms.len(), rooms.waiters.len()), (0, 0));
    }

    #[test]
    fn failed_rooms_are_bounded_expire_and_serve_one_latecomer_each() {
        let mut rooms = FailedRooms::default();
        for number in 0..5 {
            let until = Time::from_nanos(number);
            rooms.insert(Room::Number(number), PeerCause::Aborted, until, 3);
        }
        assert_eq!(rooms.len(), 3);
        assert_eq!(rooms.take(&Room::Number(1), 1), None);
        assert_eq!(rooms.take(&Room::Number(3), 1), Some(PeerCause::Aborted));
        assert_eq!(rooms.take(&Room::Number(3), 1), None);
        rooms.expire(Time::from_nanos(2));
        assert_eq!(rooms.next_expiry(), Some(Time::from_nanos(4)));
        rooms.expire(Time::MAX);
        assert_eq!(rooms.len(), 0);
    }
}
