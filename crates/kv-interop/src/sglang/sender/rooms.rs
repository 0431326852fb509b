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
    /// How many requests rooms without a sender have, and how many pages these name.
    requests: usize,
    pages: usize,
    /// How many of these requests each agent has made.
    asking: BTreeMap<String, usize>,
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

    /// How many rooms wait for a sender, how many requests wait there, and how many pages these name.
    pub(super) fn unclaimed(&self) -> (usize, usize, usize) {
        (self.unclaimed.len(), self.requests, self.pages)
    }

    /// Keeps a request for which no sender has come yet. A request after an abort is a new try.
    pub(super) fn ask(&mut self, until: Time, number: u64, request: Request) {
        self.count(&request);
        let room = self.keep(until, number);
        room.refusal = None;
        if let Some(before) = room.requests.insert(request.agent.clone(), request) {
            self.discount(&before);
        }
    }

    /// Notes why the sender of a room will fail, which has not come yet.
    pub(super) fn refuse(&mut self, until: Time, number: u64, refusal: (Option<WorkerId>, Cause)) {
        self.keep(until, number).refusal = Some(refusal);
    }

    fn keep(&mut self, until: Time, number: u64) -> &mut Room {
        let room = self.rooms.entry(number).or_default();
        self.unclaimed.remove(&(room.until, number));
        room.until = until;
        self.unclaimed.insert((until, number));
        room
    }

    fn count(&mut self, request: &Request) {
        self.requests += 1;
        self.pages += request.pages.len();
        *self.asking.entry(request.agent.clone()).or_default() += 1;
    }

    fn discount(&mut self, request: &Request) {
        self.requests -= 1;
        self.pages -= request.pages.len();
        if let Some(count) = self.asking.get_mut(&request.agent) {
            *count -= 1;
            if *count == 0 {
                self.asking.remove(&request.agent);
            }
        }
    }

    /// A sender takes a room, with everything that is known of the room.
    pub(super) fn claim(&mut self, number: u64, session: SessionId) -> Room {
        let known = self.forget(number).unwrap_or_default();
        self.rooms.insert(number, Room { session: Some(session), ..Room::default() });
        known
    }

    /// A decode rank gives up a room for which no sender has come; the room, if the rank had
    /// asked for the room.
    pub(super) fn withdraw(&mut self, number: u64, (ip, port): &(String, u16)) -> Option<&mut Room> {
        let room = self.rooms.get_mut(&number).filter(|room| room.session.is_none())?;
        let of_rank = |(_, request): &(String, Request)| (&request.ip, &request.port) == (ip, port);
        let (gone, kept): (BTreeMap<_, _>, _) =
            std::mem::take(&mut room.requests).into_iter().partition(of_rank);
        room.requests = kept;
        gone.values().for_each(|request| self.discount(request));
        self.rooms.get_mut(&number).filter(|_| !gone.is_empty())
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
        let room = self.rooms.remove(&number)?;
        room.requests.values().for_each(|request| self.discount(request));
        Some(room)
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

    /// How many rooms something is known of.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert!(self.asking.len() <= self.requests && self.unclaimed.len() <= self.rooms.len());
        self.rooms.len()
    }

    /// Whether a room without a sender waits for this agent.
    pub(super) fn uses(&self, agent: &str) -> bool {
        self.asking.contains_key(agent)
    }
}
