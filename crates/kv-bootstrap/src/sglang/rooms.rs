//! SGLang's second table: which data-parallel rank serves a room.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::Time;

use crate::client_addr::ClientAddr;
use crate::expiry::Expiry;

/// Bytes counted for a room: its share of the maps. An upper bound, not a measurement.
pub(crate) const ROOM_BYTES: usize = 256;

/// Rooms and their data-parallel ranks, each for a limited time, at most `max` rooms and at most
/// `max_per_client` of one client. For one room more, the client's own oldest room is forgotten, which most
/// likely has been asked for already; never a room of another client.
#[derive(Debug)]
pub(crate) struct Rooms {
    ttl: Duration,
    max: usize,
    max_per_client: usize,
    rooms: BTreeMap<i128, Entry>,
    expiry: Expiry<i128>,
    /// The rooms of each client, in the order of registration.
    clients: BTreeMap<ClientAddr, BTreeSet<(u64, i128)>>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    dp_rank: i64,
    age: u64,
    expires: Time,
    client: ClientAddr,
}

/// The table is full of other clients' rooms, and the client has no room of its own to forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the table is full: rooms would be {would_be}, the limit is {max}")]
pub(crate) struct RoomsFull {
    would_be: usize,
    max: usize,
}

impl Rooms {
    pub(crate) fn new(ttl: Duration, max: usize, max_per_client: usize) -> Rooms {
        Rooms {
            ttl,
            max: max.max(1),
            max_per_client: max_per_client.max(1),
            rooms: BTreeMap::new(),
            expiry: Expiry::default(),
            clients: BTreeMap::new(),
            next: 0,
        }
    }

    /// Remembers the data-parallel rank of a room.
    pub(crate) fn insert(
        &mut self,
        now: Time,
        client: ClientAddr,
        room: i128,
        dp_rank: i64,
    ) -> Result<(), RoomsFull> {
        self.expire(now);
        let own = self.clients.get(&client);
        let own_full = own.is_some_and(|rooms| rooms.len() >= self.max_per_client);
        let holder = self.rooms.get(&room).map(|entry| entry.client);
        if (holder != Some(client) && own_full) || (holder.is_none() && self.rooms.len() >= self.max) {
            let Some((_, oldest)) = own.and_then(|rooms| rooms.first()).copied() else {
                return Err(RoomsFull { would_be: self.rooms.len() + 1, max: self.max });
            };
            self.remove(oldest);
        }
        self.remove(room);
        let (age, expires) = (self.next, now + self.ttl);
        self.next += 1;
        self.rooms.insert(room, Entry { dp_rank, age, expires, client });
        self.expiry.insert(expires, room);
        self.clients.entry(client).or_default().insert((age, room));
        Ok(())
    }

    fn remove(&mut self, room: i128) {
        let Some(entry) = self.rooms.remove(&room) else { return };
        self.expiry.remove(entry.expires, room);
        if let Some(rooms) = self.clients.get_mut(&entry.client) {
            rooms.remove(&(entry.age, room));
            if rooms.is_empty() {
                self.clients.remove(&entry.client);
            }
        }
    }

    /// How many rooms are remembered.
    pub(crate) fn len(&self) -> usize {
        self.rooms.len()
    }

    pub(crate) fn get(&self, now: Time, room: i128) -> Option<i64> {
        self.rooms.get(&room).filter(|entry| entry.expires > now).map(|entry| entry.dp_rank)
    }

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some(room) = self.expiry.pop_due(now) {
            self.remove(room);
        }
    }

    /// When the next room will be forgotten.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.expiry.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::ZERO + Duration::from_secs(secs)
    }

    fn client(last: u8) -> ClientAddr {
        ClientAddr::from(std::net::IpAddr::from([10, 0, 0, last]))
    }

    fn sizes(table: &Rooms) -> (usize, usize, usize) {
        (table.rooms.len(), table.expiry.len(), table.clients.values().map(BTreeSet::len).sum())
    }

    fn known(table: &Rooms) -> Vec<i128> {
        (0..10).filter(|room| table.get(at(0), *room).is_some()).collect()
    }

    #[test]
    fn rooms_are_forgotten_after_their_time_and_refreshed_by_registration() {
        let mut table = Rooms::new(Duration::from_secs(120), 10, 10);
        table.insert(at(0), client(1), 1, 5).unwrap();
        table.insert(at(1), client(1), 2, 6).unwrap();
        table.insert(at(100), client(2), 1, 7).unwrap();
        assert_eq!(table.get(at(119), 2), Some(6));
        assert_eq!(table.get(at(121), 2), None);
        assert_eq!(table.next_timeout(), Some(at(121)));
        table.expire(at(121));
        assert_eq!(sizes(&table), (1, 1, 1));
        assert_eq!(table.get(at(219), 1), Some(7));
        table.expire(at(220));
        assert_eq!(sizes(&table), (0, 0, 0));
        assert!(table.clients.is_empty());
        assert_eq!(table.next_timeout(), None);
    }

    #[test]
    fn a_client_beyond_its_share_forgets_its_own_oldest_room() {
        let mut table = Rooms::new(Duration::from_secs(120), 10, 3);
        table.insert(at(0), client(9), 8, 1).unwrap();
        for room in 0..3 {
            table.insert(at(0), client(1), room, 1).unwrap();
        }
        table.insert(at(0), client(1), 0, 2).unwrap();
        table.insert(at(0), client(1), 9, 1).unwrap();
        assert_eq!(known(&table), [0, 2, 8, 9]);
        assert_eq!(sizes(&table), (4, 4, 4));
    }

    #[test]
    fn a_full_table_never_forgets_another_clients_room() {
        let mut table = Rooms::new(Duration::from_secs(120), 3, 3);
        table.insert(at(0), client(1), 0, 1).unwrap();
        table.insert(at(0), client(2), 1, 1).unwrap();
        table.insert(at(0), client(2), 2, 1).unwrap();
        assert_eq!(table.insert(at(0), client(3), 3, 1), Err(RoomsFull { would_be: 4, max: 3 }));
        table.insert(at(0), client(2), 4, 1).unwrap();
        assert_eq!(known(&table), [0, 2, 4]);
        assert_eq!(sizes(&table), (3, 3, 3));
    }
}
