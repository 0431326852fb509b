//! One engine of the registry: its ranks, and which of its replicas are complete.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use kv_core::{Incarnation, Parallel, RankRecord, Replica, Time, WorkerId, WorkerRole};

use super::error::{LookupError, RegisterError};
use super::replica::{Members, State};
use crate::client_addr::ClientAddr;
use crate::place::Place;

/// Most replaced incarnations that are remembered of one worker.
const MAX_SUPERSEDED: usize = 16;

/// The key by which engines are found: their role, and one of their services (`None`: any).
pub(super) type Kind = (WorkerRole, Option<Arc<str>>);

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) profile: Profile,
    pub(super) ranks: BTreeMap<u32, Rank>,
    /// The rank at each place, in the order in which the ranks of a replica are answered.
    pub(super) places: BTreeMap<Place, u32>,
    /// The replicas with registered ranks.
    pub(super) replicas: BTreeMap<u32, Members>,
    pub(super) tally: Tally,
}

/// How many replicas of an engine are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    begun: u32,
    complete: u32,
    drained: u32,
}

/// What all ranks of an engine have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Profile {
    pub(super) role: WorkerRole,
    pub(super) sizes: Sizes,
    pub(super) services: BTreeSet<Arc<str>>,
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) incarnation: Incarnation,
    pub(super) place: Place,
    pub(super) client: ClientAddr,
    pub(super) body: Bytes,
    /// Bytes that are counted for the body.
    pub(super) cost: usize,
    pub(super) expires: Time,
    pub(super) superseded: Vec<Incarnation>,
    /// The rank awaits no further peers.
    pub(super) left: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) dp: u32,
    pub(super) cp: u32,
}

impl Engine {
    pub(super) fn new(profile: Profile) -> Engine {
        let (ranks, places, replicas) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Engine { profile, ranks, places, replicas, tally: Tally::default() }
    }

    /// Refuses a registration that contradicts the other ranks of the engine.
    pub(super) fn check(
        &self,
        worker: &WorkerId,
        profile: &Profile,
        place: Place,
    ) -> Result<(), RegisterError> {
        if self.ranks.keys().all(|rank| *rank == worker.rank) {
            return Ok(());
        }
        let conflict = |field, registered: String, claimed: String| {
            Err(RegisterError::Conflict { worker: worker.clone(), field, registered, claimed })
        };
        let (known, claim) = (&self.profile, profile);
        if known.role != claim.role {
            return conflict("role", format!("{:?}", known.role), format!("{:?}", claim.role));
        }
        let pairs = [
            ("tp_size", known.sizes.tp, claim.sizes.tp),
            ("pp_size", known.sizes.pp, claim.sizes.pp),
            ("dp_size", known.sizes.dp, claim.sizes.dp),
            ("pcp_size", known.sizes.cp, claim.sizes.cp),
        ];
        for (field, registered, claimed) in pairs {
            if registered != claimed {
                return conflict(field, registered.to_string(), claimed.to_string());
            }
        }
        if known.services != claim.services {
            return conflict("services", known.list(), claim.list());
        }
        match self.places.get(&place) {
            Some(holder) if *holder != worker.rank => {
                let holder = WorkerId { engine: worker.engine.clone(), rank: *holder };
                conflict("place", format!("{holder} at {place}"), place.to_string())
            }
            _ => Ok(()),
        }
    }

    /// The ranks of a replica in the order of their places, if all of them are registered and one of them at
    /// least has not left.
    pub(super) fn replica(&self, replica: Replica) -> Result<Vec<Bytes>, LookupError> {
        let sizes = self.profile.sizes;
        let dp = match replica {
            Replica::Rank(dp) => dp,
            // The remainder is smaller than a u32.
            Replica::Modulo(number) => (number % u64::from(sizes.dp.max(1))) as u32,
        };
        if dp >= sizes.dp {
            return Err(LookupError::Unknown);
        }
        self.replicas.get(&dp).copied().unwrap_or_default().check(sizes.replica())?;
        let first = Place { dp, ..Place::FIRST };
        let last = Place { dp, pp: u32::MAX, cp: u32::MAX, tp: u32::MAX };
        let ranks = self.places.range(first..=last).filter_map(|(_, rank)| self.ranks.get(rank));
        Ok(ranks.map(|rank| rank.body.clone()).collect())
    }
}

impl Tally {
    /// The numbers after a replica has gone from one state to another; `None` if it had or has no ranks.
    pub(super) fn moved(mut self, from: Option<State>, to: Option<State>) -> Tally {
        if let Some(from) = from {
            let of = self.of(from);
            *of = of.saturating_sub(1);
        }
        if let Some(to) = to {
            let of = self.of(to);
            *of = of.saturating_add(1);
        }
        self
    }

    fn of(&mut self, state: State) -> &mut u32 {
        match state {
            State::Begun => &mut self.begun,
            State::Complete => &mut self.complete,
            State::Drained => &mut self.drained,
        }
    }

    /// Of an engine with `dps` replicas: whether all are complete, some are complete, some have ranks and have not
    /// drained, some have drained.
    pub(super) fn traits(self, dps: u32) -> [bool; 4] {
        let Tally { begun, complete, drained } = self;
        [complete > 0 && complete == dps, complete > 0, begun > 0 || complete > 0, drained > 0]
    }
}

impl Profile {
    pub(super) fn of(record: &RankRecord) -> Profile {
        let services = record.offers.iter().map(|offer| Arc::from(offer.service.as_str())).collect();
        Profile { role: record.role, sizes: Sizes::of(&record.parallel), services }
    }

    /// Every key by which the engine can be found.
    pub(super) fn kinds(&self) -> impl Iterator<Item = Kind> {
        let services = self.services.iter().cloned().map(Some);
        std::iter::once(None).chain(services).map(|service| (self.role, service))
    }

    /// True if a lookup for this role and service may be answered by the engine.
    pub(super) fn serves(&self, role: WorkerRole, service: Option<&str>) -> bool {
        self.role == role && service.is_none_or(|service| self.services.contains(service))
    }

    fn list(&self) -> String {
        let services: Vec<&str> = self.services.iter().map(AsRef::as_ref).collect();
        format!("[{}]", services.join(", "))
    }
}

impl Rank {
    /// The replaced incarnations after this registration. Refused if the registration is itself of a replaced
    /// incarnation.
    pub(super) fn superseded(&self, record: &RankRecord) -> Result<Vec<Incarnation>, RegisterError> {
        let mut list = self.superseded.clone();
        if self.incarnation == record.incarnation {
            return Ok(list);
        }
        if list.contains(&record.incarnation) {
            return Err(RegisterError::Conflict {
                worker: record.worker.clone(),
                field: "incarnation",
                registered: format!("the later {}", self.incarnation),
                claimed: record.incarnation.to_string(),
            });
        }
        if list.len() == MAX_SUPERSEDED {
            list.remove(0);
        }
        list.push(self.incarnation);
        Ok(list)
    }
}

impl Sizes {
    fn of(parallel: &Parallel) -> Sizes {
        Sizes { tp: parallel.tp_size, pp: parallel.pp_size, dp: parallel.dp_size, cp: parallel.pcp_size }
    }

    /// Ranks that a replica has when complete. Peers set the factors, so nothing may be allocated by this
    /// number.
    pub(super) fn replica(self) -> u64 {
        u64::from(self.tp).saturating_mul(u64::from(self.pp)).saturating_mul(u64::from(self.cp))
    }
}
