//! The framework's own rank records: who is registered, for how long, and which replicas are
//! complete. No I/O and no clock: `now` is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use kv_core::{EngineId, Incarnation, Parallel, RankRecord, Replica, Time, WorkerId, WorkerRole};

use crate::client_addr::ClientAddr;
use crate::config::RegistryConfig;
use crate::record::RankJson;

/// Lives of one worker that are remembered as replaced.
const MAX_SUPERSEDED: usize = 16;
/// What a rank costs beside its JSON text: its share of the maps. An upper bound, not a measurement.
const RANK_BYTES: usize = 2048;
/// Engines of which only some replicas are complete that a search for `number % dp_size` looks at.
const MAX_PARTIAL: usize = 16;

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
///
/// What is kept is counted in bytes, over all and by client, until the last answer that holds it is
/// gone too: a client that does not read its answers cannot keep records in memory uncounted.
#[derive(Debug)]
pub struct Registry {
    config: RegistryConfig,
    engines: BTreeMap<EngineId, Engine>,
    index: Index,
    expiries: BTreeSet<(Time, EngineId, u32)>,
    ranks: usize,
    bytes: Arc<AtomicUsize>,
    /// The bytes of each client that has any.
    clients: BTreeMap<ClientAddr, Weak<AtomicUsize>>,
    /// At how many clients those without bytes are looked for.
    sweep_at: usize,
    steps: u64,
}

/// Engines by what they can answer, so that a search looks at none that cannot.
#[derive(Debug, Default)]
struct Index {
    /// Replicas of which all ranks are there.
    complete: Groups<(WorkerRole, u32)>,
    /// Replicas of which some ranks are there.
    begun: Groups<(WorkerRole, u32)>,
    /// Engines by the number of their replicas.
    sized: Groups<(WorkerRole, u32)>,
    /// Engines with all replicas complete.
    whole: Groups<WorkerRole>,
    /// Engines with some replicas complete.
    partial: Groups<WorkerRole>,
    all: Groups<WorkerRole>,
}

/// Sets of engines; none is empty.
#[derive(Debug)]
struct Groups<K>(BTreeMap<K, BTreeSet<EngineId>>);

/// A record's JSON text, counted for as long as anybody holds it.
#[derive(Debug)]
struct Kept {
    text: Vec<u8>,
    all: Arc<AtomicUsize>,
    client: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Engine {
    role: WorkerRole,
    sizes: Sizes,
    ranks: BTreeMap<u32, Rank>,
    /// Ordered as a replica is handed out.
    places: BTreeMap<Place, u32>,
    /// How many ranks of each replica are there.
    replicas: BTreeMap<u32, u32>,
    /// Replicas of which all are.
    complete: u32,
}

#[derive(Debug)]
struct Rank {
    incarnation: Incarnation,
    place: Place,
    client: ClientAddr,
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
    /// This client has no room left. Withdraw ranks that have gone, or raise the server's bound.
    #[error("the client's share is full: {field} would be {would_be}, the limit is {max}")]
    ClientFull {
        /// Which bound.
        field: &'static str,
        /// What it would have come to.
        would_be: usize,
        /// The bound.
        max: usize,
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
            index: Index::default(),
            expiries: BTreeSet::new(),
            ranks: 0,
            bytes: Arc::default(),
            clients: BTreeMap::new(),
            sweep_at: 64,
            steps: 0,
        }
    }

    /// Registers a rank, or renews it with a new record, in the name of `client`. Returns the lease
    /// granted: the one asked for, or the longest allowed.
    ///
    /// The record's place in its parallel groups is taken as valid
    /// ([`RankJson::into_record`] checks it).
    pub fn register(
        &mut self,
        now: Time,
        client: ClientAddr,
        record: &RankRecord,
        lease: Duration,
    ) -> Result<Duration, RegisterError> {
        self.expire(now);
        let worker = &record.worker;
        let sizes = Sizes::of(record.parallel());
        let place = Place::of(record.parallel());
        let mut superseded = Vec::new();
        let mut old = None;
        if let Some(engine) = self.engines.get(&worker.engine) {
            engine.check(record, sizes, place)?;
            if let Some(rank) = engine.ranks.get(&worker.rank) {
                superseded = rank.superseded(record)?;
                old = Some((rank.client, RANK_BYTES + rank.body.len()));
            }
        }
        let text = serde_json::to_vec(&RankJson::new(record, None)).map_err(|_| RegisterError::Encoding)?;
        let len = RANK_BYTES + text.len();
        check_room("ranks", self.ranks + usize::from(old.is_none()), self.config.max_ranks)?;
        let share = self.share(client);
        let freed = |of: Option<ClientAddr>| match old {
            Some((holder, bytes)) if of.is_none_or(|client| client == holder) => bytes,
            _ => 0,
        };
        let own = (share.load(Ordering::Relaxed) + len).saturating_sub(freed(Some(client)));
        let max = self.config.max_bytes_per_client;
        if own > max {
            return Err(RegisterError::ClientFull { field: "bytes", would_be: own, max });
        }
        check_room("bytes", (self.bytes() + len).saturating_sub(freed(None)), self.config.max_bytes)?;

        self.remove(&worker.engine, worker.rank);
        let lease = lease.min(self.config.max_lease);
        let expires = now + lease;
        let body = Kept::count(text, &self.bytes, &share);
        let engine = self.engines.entry(worker.engine.clone()).or_insert_with(|| {
            self.index.insert(record.role, sizes, &worker.engine);
            Engine {
                role: record.role,
                sizes,
                ranks: BTreeMap::new(),
                places: BTreeMap::new(),
                replicas: BTreeMap::new(),
                complete: 0,
            }
        });
        self.expiries.insert((expires, worker.engine.clone(), worker.rank));
        self.ranks += 1;
        engine.places.insert(place, worker.rank);
        let rank = Rank { incarnation: record.incarnation, place, client, body, expires, superseded };
        engine.ranks.insert(worker.rank, rank);
        self.index.added(&worker.engine, engine, place.dp);
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
    /// Without `engine`, the engine with the smallest id of those in the role whose replica is
    /// complete. For `number % dp_size`, which is another replica in every engine, the smallest
    /// engine with all replicas complete comes first, then up to 16 with some. If none can answer,
    /// an engine that could once its ranks are there decides how many are reported missing.
    ///
    /// No search looks at more than these few engines, and at no rank but those of the answer.
    pub fn lookup(
        &mut self,
        now: Time,
        role: WorkerRole,
        replica: Replica,
        engine: Option<&EngineId>,
    ) -> Result<Vec<Bytes>, LookupError> {
        self.expire(now);
        let mut missing = LookupError::Unknown;
        for id in self.index.candidates(role, replica, engine) {
            self.steps += 1;
            let Some(engine) = self.engines.get(&id).filter(|engine| engine.role == role) else { continue };
            match engine.replica(replica) {
                Ok(bodies) => {
                    self.steps += bodies.len() as u64;
                    return Ok(bodies);
                }
                Err(error) if missing == LookupError::Unknown => missing = error,
                Err(_) => {}
            }
        }
        Err(missing)
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

    /// Bytes of all records, with what it takes to keep them: an upper bound. Records that have left
    /// count until the last answer with them is sent.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Engines and ranks that all lookups so far have looked at.
    pub fn steps(&self) -> u64 {
        self.steps
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

    /// The counter of a client's bytes.
    fn share(&mut self, client: ClientAddr) -> Arc<AtomicUsize> {
        if let Some(share) = self.clients.get(&client).and_then(Weak::upgrade) {
            return share;
        }
        if self.clients.len() >= self.sweep_at {
            self.clients.retain(|_, share| share.strong_count() > 0);
            self.sweep_at = (2 * self.clients.len()).max(64);
        }
        let share = Arc::default();
        self.clients.insert(client, Arc::downgrade(&share));
        share
    }

    fn remove(&mut self, id: &EngineId, number: u32) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let Some(rank) = engine.ranks.remove(&number) else { return };
        engine.places.remove(&rank.place);
        self.index.removed(id, engine, rank.place.dp);
        self.expiries.remove(&(rank.expires, id.clone(), number));
        self.ranks -= 1;
        if engine.ranks.is_empty() {
            self.index.remove(engine.role, engine.sizes, id);
            self.engines.remove(id);
        }
    }
}

impl Index {
    /// The engines that may answer, best first, without those that cannot. Few.
    fn candidates(&self, role: WorkerRole, replica: Replica, engine: Option<&EngineId>) -> Vec<EngineId> {
        if let Some(only) = engine {
            return vec![only.clone()];
        }
        let mut found = Vec::new();
        match replica {
            Replica::Rank(dp) => {
                found.extend(self.complete.of(&(role, dp)).next());
                found.extend(self.begun.of(&(role, dp)).next());
                // If no engine has begun with this replica, the one with the most may have it.
                let most = self.sized.0.range((role, 0)..=(role, u32::MAX)).next_back();
                found.extend(most.and_then(|(_, engines)| engines.first()));
            }
            Replica::Modulo(_) => {
                found.extend(self.whole.of(&role).next());
                found.extend(self.partial.of(&role).take(MAX_PARTIAL));
                found.extend(self.all.of(&role).next());
            }
        }
        found.into_iter().cloned().collect()
    }

    fn insert(&mut self, role: WorkerRole, sizes: Sizes, id: &EngineId) {
        self.all.insert(role, id);
        self.sized.insert((role, sizes.dp), id);
    }

    fn remove(&mut self, role: WorkerRole, sizes: Sizes, id: &EngineId) {
        self.all.remove(&role, id);
        self.sized.remove(&(role, sizes.dp), id);
    }

    /// A rank of a replica has come.
    fn added(&mut self, id: &EngineId, engine: &mut Engine, dp: u32) {
        let there = engine.replicas.entry(dp).or_default();
        *there += 1;
        self.begun.insert((engine.role, dp), id);
        if u64::from(*there) == engine.sizes.replica() {
            engine.complete += 1;
            self.complete.insert((engine.role, dp), id);
            self.partial.insert(engine.role, id);
            if engine.complete == engine.sizes.dp {
                self.whole.insert(engine.role, id);
            }
        }
    }

    /// A rank of a replica has left.
    fn removed(&mut self, id: &EngineId, engine: &mut Engine, dp: u32) {
        let Some(there) = engine.replicas.get_mut(&dp) else { return };
        if u64::from(*there) == engine.sizes.replica() {
            engine.complete -= 1;
            self.complete.remove(&(engine.role, dp), id);
            self.whole.remove(&engine.role, id);
            if engine.complete == 0 {
                self.partial.remove(&engine.role, id);
            }
        }
        *there -= 1;
        if *there == 0 {
            engine.replicas.remove(&dp);
            self.begun.remove(&(engine.role, dp), id);
        }
    }
}

impl<K> Default for Groups<K> {
    fn default() -> Groups<K> {
        Groups(BTreeMap::new())
    }
}

impl<K: Ord> Groups<K> {
    fn of(&self, key: &K) -> impl Iterator<Item = &EngineId> {
        self.0.get(key).into_iter().flatten()
    }

    fn insert(&mut self, key: K, id: &EngineId) {
        self.0.entry(key).or_default().insert(id.clone());
    }

    fn remove(&mut self, key: &K, id: &EngineId) {
        let Some(ids) = self.0.get_mut(key) else { return };
        ids.remove(id);
        if ids.is_empty() {
            self.0.remove(key);
        }
    }
}

impl Kept {
    fn count(text: Vec<u8>, all: &Arc<AtomicUsize>, client: &Arc<AtomicUsize>) -> Bytes {
        let kept = Kept { text, all: Arc::clone(all), client: Arc::clone(client) };
        kept.all.fetch_add(RANK_BYTES + kept.text.len(), Ordering::Relaxed);
        kept.client.fetch_add(RANK_BYTES + kept.text.len(), Ordering::Relaxed);
        Bytes::from_owner(kept)
    }
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.fetch_sub(RANK_BYTES + self.text.len(), Ordering::Relaxed);
        self.client.fetch_sub(RANK_BYTES + self.text.len(), Ordering::Relaxed);
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
        let registered = self.replicas.get(&dp).copied().unwrap_or(0);
        let expected = self.sizes.replica();
        if u64::from(registered) != expected {
            let expected = u32::try_from(expected).unwrap_or(u32::MAX);
            return Err(LookupError::NotReady { registered, expected });
        }
        let first = Place { dp, pp: 0, cp: 0, tp: 0 };
        let last = Place { dp, pp: u32::MAX, cp: u32::MAX, tp: u32::MAX };
        let ranks = self.places.range(first..=last).filter_map(|(_, rank)| self.ranks.get(rank));
        Ok(ranks.map(|rank| rank.body.clone()).collect())
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

    /// Ranks of a replica; nothing is ever sized by it.
    fn replica(self) -> u64 {
        u64::from(self.tp).saturating_mul(u64::from(self.pp)).saturating_mul(u64::from(self.cp))
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
