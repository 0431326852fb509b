//! Rooms in which one side has failed before the other side came.

use std::collections::{BTreeMap, VecDeque};

use super::named::Named;
use super::waiters::Waiters;
use crate::error::PeerCause;
use crate::meter::{each, step};
use crate::time::Time;
use crate::transport::Origin;

/// Rooms in which one side has failed before the other side came, so that the other side is told
/// when it comes. Bounded in number and in time. Each entry is for one latecomer, unless the number
/// of latecomers is unknown.
#[derive(Debug, Clone, Default)]
pub(super) struct FailedRooms {
    waiters: Waiters<u64>,
    rooms: BTreeMap<u64, FailedRoom>,
    /// The entries on the account of each connection, oldest first.
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

/// For how many latecomers a failed room is kept.
#[derive(Debug, Clone, Copy)]
pub(in crate::proto) enum Latecomers {
    /// For this many latecomers.
    Left(usize),
    /// For the number of ranks that the first latecomer tells, less this number of ranks that have
    /// ended.
    AllBut(usize),
}

impl FailedRooms {
    /// Remembers a room on the account of a connection, or of this worker's own scheduler (`None`).
    /// Each account has at most `max` entries, of which the oldest is dropped. All accounts
    /// together have at most `most` entries; beyond that, the account with the most entries drops
    /// its oldest.
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

    /// Takes the entry that a newcomer to the room meets. The newcomer says that it is one of
    /// `ranks`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Room;

    fn number(number: u64) -> Named {
        Named::new(Room::Number(number), true)
    }

    fn insert(rooms: &mut FailedRooms, named: Named, latecomers: Latecomers, max: usize) {
        rooms.insert((named, PeerCause::Aborted), latecomers, Time::MAX, (None, max, 99));
    }

    #[test]
    fn an_evicted_failed_room_does_not_hide_a_later_failure() {
        let mut rooms = FailedRooms::default();
        for cause in [PeerCause::Aborted, PeerCause::DeadlineExceeded] {
            rooms.insert((number(1), cause), Latecomers::Left(1), Time::MAX, (None, 1, 99));
        }
        assert_eq!(rooms.take(&number(1), 1), Some(PeerCause::DeadlineExceeded));
        assert_eq!((rooms.len(), rooms.waiters.len(), rooms.by_origin.len()), (0, 0, 0));
    }

    #[test]
    fn a_failed_room_of_unknown_size_serves_as_many_receivers_as_announced() {
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
    fn a_connection_evicts_only_its_own_failed_rooms() {
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
