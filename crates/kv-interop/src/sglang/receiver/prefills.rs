//! The ways to prefill ranks. Each life of a rank is told this worker's registration once on every connection,
//! before anything else.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use kv_core::{PeerId, SessionId, Time};

use super::engine::Place;
use crate::effects::Effects;
use crate::message::{Way, host_port};

/// All prefill ranks on which a session depends, and those to which the way is open.
#[derive(Debug, Default)]
pub(crate) struct Prefills {
    ranks: BTreeMap<Place, Prefill>,
    peers: BTreeMap<PeerId, Place>,
}

#[derive(Debug)]
struct Prefill {
    way: State,
    /// The address of the bootstrap server that named the rank.
    addr: String,
    /// The sessions that have told the rank something, or will.
    sessions: BTreeSet<SessionId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Opening(PeerId),
    Up(PeerId),
    /// The way is lost, and is opened again at this time.
    Lost(Time),
}

/// What a lost or failed way meant.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) place: Place,
    pub(super) addr: String,
    pub(super) sessions: Vec<SessionId>,
}

impl Prefills {
    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(super) fn contains(&self, place: &Place) -> bool {
        self.ranks.contains_key(place)
    }

    /// Notes that a session needs a rank, and opens the way if there is none.
    pub(super) fn join(&mut self, effects: &mut Effects, place: &Place, addr: &str, session: SessionId) {
        let rank = self.ranks.entry(place.clone()).or_insert_with(|| Prefill {
            way: State::Lost(Time::ZERO),
            addr: addr.to_owned(),
            sessions: BTreeSet::new(),
        });
        rank.sessions.insert(session);
        if matches!(rank.way, State::Lost(_)) {
            self.open(effects, place);
        }
    }

    fn open(&mut self, effects: &mut Effects, place: &Place) {
        let Some(rank) = self.ranks.get_mut(place) else { return };
        let addr = host_port(&place.ip, place.port);
        let peer = effects.connect(&Way::Push { addr });
        rank.way = State::Opening(peer);
        self.peers.insert(peer, place.clone());
    }

    /// A session needs a rank no more. A way that is lost is then not opened again.
    pub(super) fn leave(&mut self, place: &Place, session: SessionId) {
        let Some(rank) = self.ranks.get_mut(place) else { return };
        rank.sessions.remove(&session);
        if rank.sessions.is_empty() && matches!(rank.way, State::Lost(_)) {
            self.ranks.remove(place);
        }
    }

    /// The way is open. The registration goes first; then the sessions of the rank may speak.
    pub(super) fn connected(
        &mut self,
        effects: &mut Effects,
        peer: PeerId,
        registration: Vec<Bytes>,
    ) -> Vec<SessionId> {
        let Some(rank) = self.peers.get(&peer).and_then(|place| self.ranks.get_mut(place)) else {
            return Vec::new();
        };
        rank.way = State::Up(peer);
        effects.say(peer, registration);
        rank.sessions.iter().copied().collect()
    }

    pub(super) fn is_up(&self, place: &Place) -> bool {
        self.ranks.get(place).is_some_and(|rank| matches!(rank.way, State::Up(_)))
    }

    /// Sends a message to a rank. Nothing is sent on a way that is not open.
    pub(super) fn say(&self, effects: &mut Effects, place: &Place, parts: Vec<Bytes>) {
        if let Some(State::Up(peer)) = self.ranks.get(place).map(|rank| rank.way) {
            effects.say(peer, parts);
        }
    }

    /// The way has ended, or could not be opened.
    pub(super) fn gone(&mut self, retry_at: Time, peer: PeerId) -> Option<Gone> {
        let place = self.peers.remove(&peer)?;
        let rank = self.ranks.get_mut(&place)?;
        rank.way = State::Lost(retry_at);
        let (addr, sessions) = (rank.addr.clone(), rank.sessions.iter().copied().collect::<Vec<_>>());
        if sessions.is_empty() {
            self.ranks.remove(&place);
        }
        Some(Gone { place, addr, sessions })
    }

    /// Opens lost ways again, which sessions still need.
    pub(super) fn tick(&mut self, effects: &mut Effects, now: Time) {
        let due = |rank: &Prefill| matches!(rank.way, State::Lost(at) if at <= now);
        let due: Vec<Place> =
            self.ranks.iter().filter(|(_, rank)| due(rank)).map(|(place, _)| place.clone()).collect();
        for place in due {
            self.open(effects, &place);
        }
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        let lost = |rank: &Prefill| if let State::Lost(at) = rank.way { Some(at) } else { None };
        self.ranks.values().filter_map(lost).min().filter(|at| *at < Time::MAX)
    }

    /// Closes the ways that no session needs, because their place was taken: ranks with the address, but not the
    /// incarnation, of a rank that serves now, and whatever exceeds the bound.
    pub(super) fn prune(&mut self, effects: &mut Effects, max: usize) {
        let excess = self.ranks.len().saturating_sub(max);
        let unused = self.ranks.iter().filter(|(_, rank)| rank.sessions.is_empty());
        let unused: Vec<Place> = unused.map(|(place, _)| place.clone()).take(excess).collect();
        for place in unused {
            if let Some(Prefill { way: State::Opening(peer) | State::Up(peer), .. }) =
                self.ranks.remove(&place)
            {
                self.peers.remove(&peer);
                effects.disconnect(peer);
            }
        }
    }
}
