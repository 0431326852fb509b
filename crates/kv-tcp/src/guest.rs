//! [`Guest`]: a peer's way to this transport, as this side serves it.

use std::collections::{BTreeMap, HashMap};

use kv_host::Token;

use crate::connection::ConnectionId;
use crate::metadata::Identity;

/// Number of a guest; never used again. The owner of the transport knows it as the origin of frames.
pub(crate) type GuestId = u64;

/// The connections that one peer has opened as one way.
#[derive(Debug)]
pub(crate) struct Guest {
    /// Who the peer says it is, on each of the connections.
    pub(crate) from: Identity,
    /// The peer's name of the way.
    pub(crate) way: Token,
    /// The connections, by their numbers in the way.
    pub(crate) connections: BTreeMap<u32, ConnectionId>,
    /// True if the peer may not write any more through these connections.
    pub(crate) revoked: bool,
}

/// All guests.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    guests: HashMap<GuestId, Guest>,
    by_way: HashMap<(Token, Token), GuestId>,
}

impl Guests {
    pub(crate) fn insert(&mut self, id: GuestId, guest: Guest) {
        self.by_way.insert((guest.from.token, guest.way), id);
        self.guests.insert(id, guest);
    }

    pub(crate) fn remove(&mut self, id: GuestId) -> Option<Guest> {
        let guest = self.guests.remove(&id)?;
        self.by_way.remove(&(guest.from.token, guest.way));
        Some(guest)
    }

    pub(crate) fn get(&self, id: GuestId) -> Option<&Guest> {
        self.guests.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: GuestId) -> Option<&mut Guest> {
        self.guests.get_mut(&id)
    }

    /// The guest that has opened this way.
    pub(crate) fn by_way(&self, from: Token, way: Token) -> Option<GuestId> {
        self.by_way.get(&(from, way)).copied()
    }

    /// The guests that are this life of a transport, oldest first.
    pub(crate) fn of(&self, token: Token) -> Vec<GuestId> {
        let same = self.guests.iter().filter(|(_, guest)| guest.from.token == token);
        let mut ids: Vec<GuestId> = same.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    pub(crate) fn len(&self) -> usize {
        self.guests.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_a_guest_that_was_removed() {
        let [token, way] = [0; 2].map(|_| Token::random().unwrap());
        let mut guests = Guests::default();
        let guest =
            Guest { from: Identity::of(token, b""), way, connections: BTreeMap::new(), revoked: false };
        guests.insert(7, guest);
        assert_eq!((guests.by_way(token, way), guests.of(token)), (Some(7), vec![7]));
        assert!(guests.remove(7).is_some() && guests.remove(7).is_none());
        assert!(guests.guests.is_empty() && guests.by_way.is_empty());
    }
}
