//! [`Guest`]: a peer that has connected this transport, as this side serves it.

use std::collections::HashMap;

use kv_core::Time;
use kv_host::Token;

use crate::ffi::Address;
use crate::incoming::Incoming;
use crate::message::{Header, SLOTS};
use crate::metadata::Identity;

/// Number of a guest; never used again. The owner of the transport knows it as the origin of frames.
pub(crate) type GuestId = u64;

/// What a guest is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reply {
    Welcome,
    /// An answer about the lane of this number.
    Answer(u32),
}

/// A reply that waits to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unanswered {
    pub(crate) header: Header,
    /// When the guest asked, and when the reply is tried next.
    pub(crate) asked: Time,
    pub(crate) again: Time,
}

/// One way of a peer to this transport.
#[derive(Debug)]
pub(crate) struct Guest {
    /// Who the peer says it is.
    pub(crate) from: Identity,
    /// The key of the way, drawn by the peer.
    pub(crate) key: u64,
    /// The peer's first endpoint.
    pub(crate) name: Vec<u8>,
    pub(crate) address: Address,
    /// The number by which data of the peer's writes name the guest.
    pub(crate) slot: usize,
    pub(crate) incoming: Incoming,
    /// The answer about frames that were sent ahead, while more of them than that wait for writes.
    pub(crate) withheld: Option<Header>,
    /// Replies that are being sent.
    pub(crate) replies: usize,
    /// When the peer was heard last.
    pub(crate) heard: Time,
}

/// All guests. A peer's token has one guest at a time.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    guests: HashMap<GuestId, Guest>,
    by_key: HashMap<u64, GuestId>,
    by_token: HashMap<Token, GuestId>,
    slots: Vec<Option<GuestId>>,
}

impl Guests {
    /// The number that data of writes name, if another guest has room.
    pub(crate) fn free_slot(&mut self, max: usize) -> Option<usize> {
        let max = max.min(SLOTS);
        if self.guests.len() >= max {
            return None;
        }
        let free = self.slots.iter().position(Option::is_none);
        free.or_else(|| {
            self.slots.push(None);
            Some(self.slots.len() - 1)
        })
    }

    pub(crate) fn insert(&mut self, id: GuestId, guest: Guest) {
        self.by_key.insert(guest.key, id);
        self.by_token.insert(guest.from.token, id);
        if let Some(slot) = self.slots.get_mut(guest.slot) {
            *slot = Some(id);
        }
        self.guests.insert(id, guest);
    }

    pub(crate) fn remove(&mut self, id: GuestId) -> Option<Guest> {
        let guest = self.guests.remove(&id)?;
        self.by_key.remove(&guest.key);
        self.by_token.remove(&guest.from.token);
        if let Some(slot) = self.slots.get_mut(guest.slot) {
            *slot = None;
        }
        Some(guest)
    }

    pub(crate) fn get(&self, id: GuestId) -> Option<&Guest> {
        self.guests.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: GuestId) -> Option<&mut Guest> {
        self.guests.get_mut(&id)
    }

    pub(crate) fn by_key(&self, key: u64) -> Option<GuestId> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn by_token(&self, token: Token) -> Option<GuestId> {
        self.by_token.get(&token).copied()
    }

    pub(crate) fn by_slot(&self, slot: usize) -> Option<GuestId> {
        self.slots.get(slot).copied().flatten()
    }

    /// The guest that was silent for longest.
    pub(crate) fn most_silent(&self) -> Option<(GuestId, Time)> {
        self.guests.iter().map(|(id, guest)| (*id, guest.heard)).min_by_key(|(id, heard)| (*heard, *id))
    }

    /// All guests, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (GuestId, &Guest)> {
        self.guests.iter().map(|(id, guest)| (*id, guest))
    }
}
