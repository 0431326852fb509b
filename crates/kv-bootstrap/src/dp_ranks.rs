//! SGLang's second table: which data-parallel rank serves a room.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::Time;

/// Rooms and their ranks, each for a limited time, the youngest `max` of them.
#[derive(Debug)]
pub(crate) struct DpRanks {
    ttl: Duration,
    max: usize,
    rooms: BTreeMap<i128, Entry>,
    /// By age: the sequence number rises with the time of registration.
    ages: BTreeMap<u64, i128>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    dp_rank: i64,
    age: u64,
    expires: Time,
}

impl DpRanks {
    pub(crate) fn new(ttl: Duration, max: usize) -> DpRanks {
        DpRanks { ttl, max: max.max(1), rooms: BTreeMap::new(), ages: BTreeMap::new(), next: 0 }
    }

    /// Remembers the rank of a room; a full table forgets its oldest room, the one most likely to
    /// have been asked for already.
    pub(crate) fn insert(&mut self, now: Time, room: i128, dp_rank: i64) {
        self.expire(now);
        let age = self.next;
        self.next += 1;
        if let Some(old) = self.rooms.insert(room, Entry { dp_rank, age, expires: now + self.ttl }) {
            self.ages.remove(&old.age);
        }
        self.ages.insert(age, room);
        while self.rooms.len() > self.max {
            let Some((_, oldest)) = self.ages.pop_first() else { break };
            self.rooms.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, now: Time, room: i128) -> Option<i64> {
        self.rooms.get(&room).filter(|entry| entry.expires > now).map(|entry| entry.dp_rank)
    }

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((_, room)) = self.ages.first_key_value()
            && self.rooms.get(room).is_none_or(|entry| entry.expires <= now)
        {
            self.rooms.remove(room);
            self.ages.pop_first();
        }
    }

    /// When the next room is due to be forgotten.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let (_, room) = self.ages.first_key_value()?;
        self.rooms.get(room).map(|entry| entry.expires)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::ZERO + Duration::from_secs(secs)
    }

    #[test]
    fn rooms_are_forgotten_after_their_time_and_refreshed_by_registration() {
        let mut table = DpRanks::new(Duration::from_secs(120), 10);
        table.insert(at(0), 1, 5);
        table.insert(at(1), 2, 6);
        table.insert(at(100), 1, 7);
        assert_eq!(table.get(at(119), 2), Some(6));
        assert_eq!(table.get(at(121), 2), None);
        assert_eq!(table.next_timeout(), Some(at(121)));
        table.expire(at(121));
        assert_eq!((table.rooms.len(), table.ages.len()), (1, 1));
        assert_eq!(table.get(at(219), 1), Some(7));
        table.expire(at(220));
        assert_eq!((table.rooms.len(), table.ages.len()), (0, 0));
        assert_eq!(table.next_timeout(), None);
    }

    #[test]
    fn a_full_table_forgets_the_oldest_room_only() {
        let mut table = DpRanks::new(Duration::from_secs(120), 3);
        for room in 0..3 {
            table.insert(at(0), room, 1);
        }
        table.insert(at(0), 0, 2);
        table.insert(at(0), 9, 1);
        let known: Vec<i128> = (0..10).filter(|room| table.get(at(0), *room).is_some()).collect();
        assert_eq!(known, [0, 2, 9]);
        assert_eq!(table.ages.len(), 3);
    }
}
