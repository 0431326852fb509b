//! The framework's own rank records: who is registered, for how long, and which replicas are
//! complete. No I/O and no clock: `now` is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::{EngineId, Incarnation, Parallel, RankRecord, Replica, Time, WorkerId, WorkerRole};

use crate::config::RegistryConfig;
use crate::record::RankJson;

/// Lives of one worker that are remembered as replaced.
const MAX_SUPERSEDED: usize = 16;

/// Rank records with leases.
///
/// An engine is the set of live ranks with one engine id. All of them have the same role and the
/// same sizes of parallel groups, and no two the same place in them. The ranks of one
/// data-parallel replica are handed out together or not at all, in the order of
/// `(pp_rank, cp_rank, tp_rank)`.
///
/// A worker that registers with another incarnation replaces its former life at once, and the
/// former life cannot come back while the newer one is registered.
///
/// Every method first forgets the ranks whose lease has ended by `now`.
#[derive(Debug)]
pub struct Registry {
    config: RegistryConfig,
    engines: BTreeMap<EngineId, Engine>,
    roles: BTreeSet<(WorkerRole, EngineId)>,
    expiries: BTreeSet<(Time, EngineId, u32)>,
    ranks: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Engine {
    role: WorkerRole,
    sizes: Sizes,
    ranks: BTreeMap<u32, Rank>,
    /// Ordered as a replica is handed out.
    places: BTreeMap<Place, u32>,
}

#[derive(Debug)]
struct Rank {
    incarnation: Incarnation,
    place: Place,
    body: Bytes,
    expires: Time,
    superseded: Vec<Incarnation>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    tp: u32,
    pp: u32,
    dp: u32,
    cp: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    dp: u32,
    pp: u32,
    cp: u32,
    tp: u32,
}

/// Why a registration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// It contradicts what is registered. Restart the engine with one configuration; ranks of a
    /// former life leave when their leases end.
    #[error("{worker}: {field} is {claimed}, but {registered} is registered")]
    Conflict {
        /// Who wanted to register.
        worker: WorkerId,
        /// The field in question.
        field: &'static str,
        /// What is registered.
        registered: String,
        /// What was claimed.
        claimed: String,
    },
    /// No room. Retry later, or raise the server's bounds.
    #[error("the registry is full: {field} would be {would_be}, the limit is {max}")]
    Full {
        /// Which bound.
        field: &'static str,
        /// What it would have come to.
        would_be: usize,
        /// The bound.
        max: usize,
    },
    /// The record cannot be written as JSON.
    #[error("the record cannot be written as JSON")]
    Encoding,
}

/// Why a registration was not renewed or removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The worker is not registered (any more). Register it again.
    #[error("{0} is not registered")]
    Unknown(WorkerId),
    /// Another life of the worker is registered.
    #[error("{worker}: incarnation is {claimed}, but {registered} is registered")]
    OtherIncarnation {
        /// The worker.
        worker: WorkerId,
        /// The life that is registered.
        registered: Incarnation,
        /// The life that asked.
        claimed: Incarnation,
    },
}

/// Why no replica can be handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No engine with this role and replica is registered.
    #[error("no engine with this role and replica is registered")]
    Unknown,
    /// Some ranks are missing. Ask again later.
    #[error("{registered} of {expected} ranks of the replica have registered")]
    NotReady {
        /// Ranks of the replica that have registered.
        registered: u32,
        /// Ranks of the replica.
        expected: u32,
    },
}

impl Registry {
    /// An empty registry.
    pub fn new(config: RegistryConfig) -> Registry {
        Registry {
            config,
            engines: BTreeMap::new(),
            roles: BTreeSet::new(),
            expiries: BTreeSet::new(),
            ranks: 0,
            bytes: 0,
        }
    }

    /// Registers a rank, or renews it with a new record. Returns the lease granted: the one asked
    /// for, or the longest allowed.
    ///
    /// The record's place in its parallel groups is taken as valid
    /// ([`RankJson::into_record`] checks it).
    pub fn register(
        &mut self,
        now: Time,
        record: &RankRecord,
        lease: Duration,
    ) -> Result<Duration, RegisterError> {
        self.expire(now);
        let worker = &record.worker;
        let sizes = Sizes::of(record.parallel());
        let place = Place::of(record.parallel());
        let mut superseded = Vec::new();
        let mut old_bytes = 0;
        let mut known = false;
        if let Some(engine) = self.engines.get(&worker.engine) {
            engine.check(record, sizes, place)?;
            if let Some(old) = engine.ranks.get(&worker.rank) {
                known = true;
                old_bytes = old.body.len();
                superseded = old.superseded(record)?;
            }
        }
        let body = serde_json::to_vec(&RankJson::new(record, None)).map_err(|_| RegisterError::Encoding)?;
        let body = Bytes::from(body);
        let bytes = self.bytes - old_bytes + body.len();
        check_room("ranks", self.ranks + usize::from(!known), self.config.max_ranks)?;
        check_room("bytes", bytes, self.config.max_bytes)?;

        self.remove(&worker.engine, worker.rank);
        let lease = lease.min(self.config.max_lease);
        let expires = now + lease;
        let engine = self.engines.entry(worker.engine.clone()).or_insert_with(|| Engine {
            role: record.role,
            sizes,
            ranks: BTreeMap::new(),
            places: BTreeMap::new(),
        });
        self.roles.insert((record.role, worker.engine.clone()));
        self.expiries.insert((expires, worker.engine.clone(), worker.rank));
        self.ranks += 1;
        self.bytes += body.len();
        engine.places.insert(place, worker.rank);
        let rank = Rank { incarnation: record.incarnation, place, body, expires, superseded };
        engine.ranks.insert(worker.rank, rank);
        Ok(lease)
    }

    /// Prolongs a lease.
    pub fn renew(
        &mut self,
        now: Time,
        worker: &WorkerId,
        incarnation: Incarnation,
        lease: Duration,
    ) -> Result<Duration, LeaseError> {
        self.expire(now);
        self.check_life(worker, incarnation)?;
        let lease = lease.min(self.config.max_lease);
        if let Some(rank) =
            self.engines.get_mut(&worker.engine).and_then(|engine| engine.ranks.get_mut(&worker.rank))
        {
            self.expiries.remove(&(rank.expires, worker.engine.clone(), worker.rank));
            rank.expires = now + lease;
            self.expiries.insert((rank.expires, worker.engine.clone(), worker.rank));
        }
        Ok(lease)
    }

    /// Removes a registration; only the life that made it can.
    pub fn withdraw(
        &mut self,
        now: Time,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<(), LeaseError> {
        self.expire(now);
        self.check_life(worker, incarnation)?;
        self.remove(&worker.engine, worker.rank);
        Ok(())
    }

    /// All ranks of a replica, each as the JSON text of a [`RankJson`], in rank order.
    ///
    /// Without `engine`, the engine with the smallest id of those in the role that are complete;
    /// if none is, the smallest id decides how many ranks are reported missing.
    pub fn lookup(
        &mut self,
        now: Time,
        role: WorkerRole,
        replica: Replica,
        engine: Option<&EngineId>,
    ) -> Result<Vec<Bytes>, LookupError> {
        self.expire(now);
        let mut first = None;
        for (_, id) in
            self.roles.iter().filter(|(of, id)| *of == role && engine.is_none_or(|only| only == id))
        {
            let Some(engine) = self.engines.get(id) else { continue };
            match engine.replica(replica) {
                Ok(bodies) => return Ok(bodies),
                Err(LookupError::Unknown) => {}
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or(LookupError::Unknown))
    }

    /// Forgets the ranks whose lease has ended.
    pub fn expire(&mut self, now: Time) {
        while let Some((expires, engine, rank)) = self.expiries.first().cloned()
            && expires <= now
        {
            self.remove(&engine, rank);
        }
    }

    /// When the next lease ends.
    pub fn next_timeout(&self) -> Option<Time> {
        self.expiries.first().map(|(expires, ..)| *expires)
    }

    /// How many ranks are registered.
    pub fn len(&self) -> usize {
        self.ranks
    }

    /// True if no rank is registered.
    pub fn is_empty(&self) -> bool {
        self.ranks == 0
    }

    fn check_life(&self, worker: &WorkerId, claimed: Incarnation) -> Result<(), LeaseError> {
        let rank = self.engines.get(&worker.engine).and_then(|engine| engine.ranks.get(&worker.rank));
        match rank.map(|rank| rank.incarnation) {
            None => Err(LeaseError::Unknown(worker.clone())),
            Some(registered) if registered == claimed => Ok(()),
            Some(registered) => {
                Err(LeaseError::OtherIncarnation { worker: worker.clone(), registered, claimed })
            }
        }
    }

    fn remove(&mut self, id: &EngineId, number: u32) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let Some(rank) = engine.ranks.remove(&number) else { return };
        engine.places.remove(&rank.place);
        self.expiries.remove(&(rank.expires, id.clone(), number));
        self.ranks -= 1;
        self.bytes -= rank.body.len();
        if engine.ranks.is_empty() {
            self.roles.remove(&(engine.role, id.clone()));
            self.engines.remove(id);
        }
    }
}

impl Engine {
    /// Whether the record agrees with the other ranks.
    fn check(&self, record: &RankRecord, sizes: Sizes, place: Place) -> Result<(), RegisterError> {
        let worker = &record.worker;
        let conflict = |field, registered: String, claimed: String| {
            Err(RegisterError::Conflict { worker: worker.clone(), field, registered, claimed })
        };
        if self.ranks.keys().all(|rank| *rank == worker.rank) {
            return Ok(());
        }
        if self.role != record.role {
            return conflict("role", format!("{:?}", self.role), format!("{:?}", record.role));
        }
        let pairs = [
            ("tp_size", self.sizes.tp, sizes.tp),
            ("pp_size", self.sizes.pp, sizes.pp),
            ("dp_size", self.sizes.dp, sizes.dp),
            ("cp_size", self.sizes.cp, sizes.cp),
        ];
        for (field, registered, claimed) in pairs {
            if registered != claimed {
                return conflict(field, registered.to_string(), claimed.to_string());
            }
        }
        match self.places.get(&place) {
            Some(holder) if *holder != worker.rank => {
                let holder = WorkerId { engine: worker.engine.clone(), rank: *holder };
                let Place { dp, pp, cp, tp } = place;
                let place = format!("dp_rank {dp} pp_rank {pp} cp_rank {cp} tp_rank {tp}");
                conflict("place", format!("{holder} at {place}"), place)
            }
            _ => Ok(()),
        }
    }

    fn replica(&self, replica: Replica) -> Result<Vec<Bytes>, LookupError> {
        let dp = match replica {
            Replica::Rank(dp) => dp,
            // The remainder is smaller than a u32.
            Replica::Modulo(number) => (number % u64::from(self.sizes.dp.max(1))) as u32,
        };
        if dp >= self.sizes.dp {
            return Err(LookupError::Unknown);
        }
        let first = Place { dp, pp: 0, cp: 0, tp: 0 };
        let last = Place { dp, pp: u32::MAX, cp: u32::MAX, tp: u32::MAX };
        let bodies: Vec<Bytes> = self
            .places
            .range(first..=last)
            .filter_map(|(_, rank)| self.ranks.get(rank).map(|rank| rank.body.clone()))
            .collect();
        let expected = self.sizes.tp.saturating_mul(self.sizes.pp).saturating_mul(self.sizes.cp);
        if bodies.len() as u64 == u64::from(expected) {
            return Ok(bodies);
        }
        Err(LookupError::NotReady { registered: bodies.len() as u32, expected })
    }
}

impl Rank {
    /// The former lives after this registration; refused if it is one of them itself.
    fn superseded(&self, record: &RankRecord) -> Result<Vec<Incarnation>, RegisterError> {
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
        Sizes { tp: parallel.tp_size, pp: parallel.pp_size, dp: parallel.dp_size, cp: parallel.cp_size }
    }
}

impl Place {
    fn of(parallel: &Parallel) -> Place {
        Place { dp: parallel.dp_rank, pp: parallel.pp_rank, cp: parallel.cp_rank, tp: parallel.tp_rank }
    }
}

fn check_room(field: &'static str, would_be: usize, max: usize) -> Result<(), RegisterError> {
    if would_be > max { Err(RegisterError::Full { field, would_be, max }) } else { Ok(()) }
}

#[cfg(test)]
pub(crate) mod tests;
