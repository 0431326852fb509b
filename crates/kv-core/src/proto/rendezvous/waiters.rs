//! Waiting senders or registrations, by room.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::named::{Ambiguity, Named};
use crate::id::Room;

/// Waiting senders or registrations, by room.
#[derive(Debug, Clone)]
pub(super) struct Waiters<T> {
    /// By whole room and then by arrival.
    exact: BTreeMap<(Room, u64), T>,
    /// How many wait in a room, by room without suffix and then by whole room. A number is never anything but whole:
    /// `exact` suffices for it.
    base: BTreeMap<(Room, Room), usize>,
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
        self.exact.insert((named.room.clone(), arrival), who);
        if let Room::Request(_) = named.base {
            *self.base.entry((named.base.clone(), named.room.clone())).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, named: &Named, who: T) {
        let Some(arrival) = self.arrival.remove(&who) else { return };
        self.exact.remove(&(named.room.clone(), arrival));
        if let Room::Request(_) = named.base
            && let Entry::Occupied(mut count) = self.base.entry((named.base.clone(), named.room.clone()))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// The waiter that a newcomer to the room meets; the oldest if several wait in one room.
    pub(super) fn find(&self, named: &Named) -> Result<Option<T>, Ambiguity> {
        if let Some(found) = self.find_exact(&named.room) {
            return Ok(Some(found));
        }
        if let Room::Number(_) = named.base {
            return Ok(None);
        }
        // No room is less than a number.
        let rooms =
            self.base.range((named.base.clone(), Room::Number(0))..).map(|((base, room), _)| (base, room));
        let mut rooms = rooms.take_while(|(base, _)| **base == named.base).map(|(_, room)| room);
        match (rooms.next(), rooms.next()) {
            (Some(one), Some(other)) => Err((one.clone(), other.clone())),
            (Some(room), None) => Ok(self.find_exact(room)),
            (None, _) => Ok(None),
        }
    }

    /// A waiter in exactly this room; the oldest if several wait there.
    pub(super) fn find_exact(&self, room: &Room) -> Option<T> {
        let (found, &who) = self.exact.range((room.clone(), 0)..).next()?;
        (found.0 == *room).then_some(who)
    }

    pub(super) fn len(&self) -> usize {
        self.arrival.len()
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
    }

    #[test]
    fn of_several_waiters_in_a_room_the_oldest_is_met_first() {
        let mut waiters = Waiters::default();
        for who in [9, 5, 7] {
            waiters.insert(&number(1), who);
        }
        assert_eq!(waiters.find(&number(1)), Ok(Some(9)));
        waiters.remove(&number(1), 9);
        assert_eq!(waiters.find(&number(1)), Ok(Some(5)));
        assert_eq!(waiters.find(&room("1")), Ok(None));
    }
}
