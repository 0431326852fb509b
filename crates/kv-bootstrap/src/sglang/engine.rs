//! SGLang's prefill engine: the ranks of its present life, and those that are left of a former life.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::{Incarnation, Time, WorkerId};

use super::claim::{RANK_BYTES, RankInfo, ServerInfo};
use super::error::RouteError;
use crate::client_addr::ClientAddr;
use crate::place::Place;

/// An incomplete engine for which no rank has registered for this time makes way for another engine. SGLang's
/// ranks repeat a refused registration for at least 11 s.
pub(super) const STALLED: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) id: u64,
    /// What the ranks said about the engine; the rank at `founder` decides where they differ.
    pub(super) info: ServerInfo,
    /// The place that registered first.
    pub(super) founder: Place,
    pub(super) ranks: BTreeMap<Place, Rank>,
    /// The ranks that have not left, by client and order of registration.
    pub(super) ages: BTreeSet<(ClientAddr, u64, Place)>,
    /// How often the set of ranks has become complete. What a rank remembers of an earlier epoch is void.
    pub(super) epoch: u64,
    /// True if the set of ranks was complete in this epoch, so that the set can still be answered.
    pub(super) whole_once: bool,
    pub(super) grown: Time,
    /// Number of places that each client has registered.
    pub(super) clients: BTreeMap<ClientAddr, usize>,
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) info: RankInfo,
    pub(super) client: ClientAddr,
    pub(super) seq: u64,
    pub(super) expires: Option<Time>,
    /// True if the rank belongs to a former life of the engine.
    pub(super) left: bool,
    /// True if the worker of the rank drains and awaits no further peers.
    pub(super) leaving: bool,
    /// The rank at this place when the set was last complete, with the epoch of that set.
    pub(super) former: Option<(u64, RankInfo)>,
    /// The worker whose rank record the entry comes from; `None` for a rank that came by `PUT /route`.
    pub(super) owner: Option<Owner>,
    /// True if the rank's port is being watched.
    pub(super) watched: bool,
    pub(super) life: Life,
}

/// The worker and the incarnation whose rank record an entry comes from.
pub(super) type Owner = (WorkerId, Incarnation);

/// What is known of the process behind a rank's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// Nothing: the port is not watched, or is being tried.
    Unknown,
    /// The port's connection is open.
    Lives,
    /// The port has refused once: most likely the process is dead.
    Refused,
    /// The port can be reached no longer, or its process does not greet.
    Silent,
}

impl Engine {
    pub(super) fn new(id: u64, founder: Place, info: ServerInfo, now: Time) -> Engine {
        Engine {
            id,
            bytes: info.bytes(),
            clients: BTreeMap::new(),
            info,
            founder,
            ranks: BTreeMap::new(),
            ages: BTreeSet::new(),
            epoch: 0,
            whole_once: false,
            grown: now,
        }
    }

    /// Enters a rank that agrees with the others. Returns the registration that was replaced.
    pub(super) fn put(
        &mut self,
        now: Time,
        place: Place,
        mut rank: Rank,
        about: &ServerInfo,
    ) -> Option<Rank> {
        self.bytes -= self.info.bytes();
        if self.founder == place {
            let known = std::mem::replace(&mut self.info, about.clone());
            self.info.fill(&known);
        } else {
            self.info.fill(about);
        }
        self.bytes += self.info.bytes();
        let old = self.take(place);
        if let Some(old) = &old {
            if old.info == rank.info {
                rank.seq = old.seq;
                if old.watched && rank.watched {
                    rank.life = old.life;
                }
            } else if old.client == rank.client {
                self.leave_before(rank.client, old.seq);
            }
            rank.former = match &old.former {
                Some((epoch, former)) if *epoch == self.epoch => Some((*epoch, former.clone())),
                _ if self.whole_once => Some((self.epoch, old.info.clone())),
                _ => None,
            };
        }
        self.ages.insert((rank.client, rank.seq, place));
        *self.clients.entry(rank.client).or_default() += 1;
        self.bytes += rank.bytes();
        self.ranks.insert(place, rank);
        self.grown = now;
        if self.is_whole() {
            self.epoch += 1;
            self.whole_once = true;
        }
        old
    }

    fn take(&mut self, place: Place) -> Option<Rank> {
        let rank = self.ranks.remove(&place)?;
        self.ages.remove(&(rank.client, rank.seq, place));
        self.bytes -= rank.bytes();
        if let Some(held) = self.clients.get_mut(&rank.client) {
            *held -= 1;
            if *held == 0 {
                self.clients.remove(&rank.client);
            }
        }
        Some(rank)
    }

    /// Marks the ranks that this client registered before `seq` as left. Each rank is marked once.
    fn leave_before(&mut self, client: ClientAddr, seq: u64) {
        while let Some((of, age, place)) =
            self.ages.range((client, 0, Place::FIRST)..(client, seq, Place::FIRST)).next().copied()
        {
            self.ages.remove(&(of, age, place));
            if let Some(rank) = self.ranks.get_mut(&place) {
                rank.left = true;
            }
        }
    }

    /// The rank that is answered for a place: the present one if the set is complete, else the rank of the
    /// last complete set.
    pub(super) fn answer(&self, place: &Place) -> Option<&RankInfo> {
        let rank = self.ranks.get(place)?;
        Some(match &rank.former {
            Some((epoch, former)) if *epoch == self.epoch => former,
            _ => &rank.info,
        })
    }

    pub(super) fn remove(&mut self, place: Place) -> Option<Rank> {
        let rank = self.take(place)?;
        self.whole_once = false;
        Some(rank)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.ages.len() as u64 >= self.info.ranks()
    }

    pub(super) fn stalled(&self, now: Time) -> bool {
        !self.whole_once && now.since(self.grown) >= STALLED
    }

    /// True if no other client has registered a rank of the engine.
    pub(super) fn is_of(&self, client: ClientAddr) -> bool {
        let of = |age: Option<&(ClientAddr, u64, Place)>| age.is_none_or(|(of, ..)| *of == client);
        of(self.ages.first()) && of(self.ages.last())
    }

    pub(super) fn contradiction(&self, claim: &ServerInfo) -> Option<RouteError> {
        self.info.contradiction(claim)
    }
}

impl Rank {
    /// True if the entry comes from this worker's rank record.
    pub(super) fn is_of(&self, worker: &WorkerId, incarnation: Incarnation) -> bool {
        self.owner.as_ref().is_some_and(|(of, life)| of == worker && *life == incarnation)
    }

    pub(super) fn bytes(&self) -> usize {
        let former = self.former.as_ref().map_or(0, |(_, info)| info.rank_ip.len());
        RANK_BYTES + self.info.rank_ip.len() + former
    }
}
