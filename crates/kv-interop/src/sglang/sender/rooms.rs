//! Rooms: what decode ranks have asked for, whether or not a sender has been opened.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{Cause, SessionId, Time, WorkerId};

use crate::sglang::codec::Request;

/// All rooms of which something is known.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    rooms: BTreeMap<u64, Room>,
    /// The rooms without a sender, by the time at which they are forgotten.
    unclaimed: BTreeSet<(Time, u64)>,
    /// How many pages the requests of rooms without a sender name.
    pages: usize,
}

/// One room.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The sender: a session that has not ended, or whose posts have not.
    pub(super) session: Option<SessionId>,
    /// The requests of decode ranks for which no sender has come yet, by the names of their agents.
    pub(super) requests: BTreeMap<String, Request>,
    /// Why the sender that is opened next fails at once.
    pub(super) refusal: Option<(Option<WorkerId>, Cause)>,
    until: Time,
}

impl Rooms {
    pub(super) fn session(&self, room: u64) -> Option<SessionId> {
        self.rooms.get(&room)?.session
    }

    /// How many rooms wait for a sender, and how many pages were named for them.
    pub(super) fn unclaimed(&self) -> (usize, usize) {
        (self.unclaimed.len(), self.pages)
    }

    /// Notes something of a room for which no sender has come yet.
    pub(super) fn note(&mut self, until: Time, number: u64, note: impl FnOnce(&mut Room)) {
        let room = self.rooms.entry(number).or_default();
        let before = pages(room);
        if room.session.is_none() {
            self.unclaimed.remove(&(room.until, number));
            room.until = until;
            self.unclaimed.insert((until, number));
        }
        note(room);
        let after = pages(room);
        self.pages = (self.pages + after).saturating_sub(before);
    }

    /// A sender takes a room, with everything that is known of the room.
    pub(super) fn claim(&mut self, number: u64, session: SessionId) -> Room {
        let mut room = self.rooms.remove(&number).unwrap_or_default();
        self.unclaimed.remove(&(room.until, number));
        self.pages = self.pages.saturating_sub(pages(&room));
        let known = Room {
            requests: std::mem::take(&mut room.requests),
            refusal: room.refusal.take(),
            ..Room::default()
        };
        self.rooms.insert(number, Room { session: Some(session), ..Room::default() });
        known
    }

    /// A decode rank gives up a room for which no sender has come; the room, if the rank had
    /// asked for the room.
    pub(super) fn withdraw(&mut self, number: u64, (ip, port): &(String, u16)) -> Option<&mut Room> {
        let room = self.rooms.get_mut(&number).filter(|room| room.session.is_none())?;
        let before = pages(room);
        let known = room.requests.len();
        room.requests.retain(|_, request| (&request.ip, &request.port) != (ip, port));
        self.pages = (self.pages + pages(room)).saturating_sub(before);
        (room.requests.len() < known).then_some(room)
    }

    /// The session that had claimed a room is over.
    pub(super) fn leave(&mut self, number: u64, session: SessionId) {
        if self.session(number) == Some(session) {
            self.rooms.remove(&number);
        }
    }

    /// Forgets a room without a sender.
    pub(super) fn forget(&mut self, number: u64) -> Option<Room> {
        let room = self.rooms.get(&number).filter(|room| room.session.is_none())?;
        self.unclaimed.remove(&(room.until, number));
        self.pages = self.pages.saturating_sub(pages(room));
        self.rooms.remove(&number)
    }

    /// The next room without a sender whose time is over.
    pub(super) fn overdue(&self, now: Time) -> Option<u64> {
        self.unclaimed.first().filter(|(until, _)| *until <= now).map(|(_, room)| *room)
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        self.unclaimed.first().map(|(until, _)| *until)
    }

    /// The rooms that no sender has claimed.
    pub(super) fn all_unclaimed(&self) -> Vec<u64> {
        self.unclaimed.iter().map(|(_, room)| *room).collect()
    }

    /// Whether a room without a sender waits for this agent.
    pub(super) fn uses(&self, agent: &str) -> bool {
        self.unclaimed
            .iter()
            .filter_map(|(_, room)| self.rooms.get(room))
            .any(|room| room.requests.contains_key(agent))
    }
}

fn pages(room: &Room) -> usize {
    if room.session.is_some() { 0 } else { room.requests.values().map(|request| request.pages.len()).sum() }
}
