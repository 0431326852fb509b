//! This library's own rank records: which ranks are registered, for how long, and which replicas are
//! complete. No I/O and no clock: `now` is an argument. The registry does not look into the data of services.

mod engine;
mod error;
mod index;
mod kept;
mod replica;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::{EngineId, Incarnation, RankRecord, Replica, Time, WorkerId, WorkerRole};

use self::engine::{Engine, Profile, Rank};
pub use self::error::{LeaseError, LookupError, RegisterError};
use self::index::Index;
use self::kept::Memory;
use self::replica::Change;
use crate::client_addr::ClientAddr;
use crate::config::RegistryConfig;
use crate::expiry::Expiry;
use crate::place::Place;
use crate::record::RankJson;

/// Bytes counted for a rank beside its JSON text: its share of the maps. An upper bound, not a measurement.
const RANK_BYTES: usize = 2048;
/// Bytes counted for each service of a rank.
const SERVICE_BYTES: usize = 1024;

/// The table of rank records with leases, behind `/v1/ranks`.
///
/// An engine is the set of registered ranks with one engine id. All of them have the same role, the same
/// parallel sizes and the same services, and no two of them have the same place in the parallel groups. The
/// ranks of one data-parallel replica are answered together or not at all, in the order of
/// `(pp_rank, pcp_rank, tp_rank)`.
///
/// A worker that registers with another incarnation replaces its earlier registration at once, and the
/// earlier incarnation cannot register again while the newer one is registered.
///
/// Every method with an argument `now` first forgets the ranks whose lease has ended by then.
///
/// The memory of records is counted in bytes, in total and by client. A record counts until the last answer
/// that contains it is sent, so that a client that does not read its answers cannot keep records in memory
/// uncounted.
#[derive(Debug)]
pub struct Registry {
    config: RegistryConfig,
    engines: BTreeMap<EngineId, Engine>,
    index: Index,
    expiry: Expiry<(EngineId, u32)>,
    ranks: usize,
    memory: Memory,
    steps: u64,
}

impl Registry {
    /// An empty registry with these bounds.
    pub fn new(config: RegistryConfig) -> Registry {
        Registry {
            config,
            engines: BTreeMap::new(),
            index: Index::default(),
            expiry: Expiry::default(),
            ranks: 0,
            memory: Memory::default(),
            steps: 0,
        }
    }

    /// Registers a rank for the time `lease`, or replaces its registration. `client` is the address that the
    /// record's bytes are counted for. Returns the lease granted, which is at most
    /// [`RegistryConfig::max_lease`].
    pub fn register(
        &mut self,
        now: Time,
        client: ClientAddr,
        record: &RankRecord,
        lease: Duration,
    ) -> Result<Duration, RegisterError> {
        self.expire(now);
        let WorkerId { engine: id, rank: number } = &record.worker;
        let (profile, place) = (Profile::of(record), Place::of(&record.parallel));
        let (mut superseded, mut old) = (Vec::new(), None);
        if let Some(engine) = self.engines.get(id) {
            engine.check(&record.worker, &profile, place)?;
            if let Some(rank) = engine.ranks.get(number) {
                superseded = rank.superseded(record)?;
                old = Some((rank.client, rank.cost));
            }
        }
        let text = serde_json::to_vec(&RankJson::new(record, None)).map_err(|_| RegisterError::Encoding)?;
        let cost = RANK_BYTES + SERVICE_BYTES * record.offers.len() + text.len();
        let (would_be, max) = (self.ranks + usize::from(old.is_none()), self.config.max_ranks);
        if would_be > max {
            return Err(RegisterError::Full { field: "ranks", would_be, max });
        }
        self.memory.check(&self.config, client, cost, old)?;

        self.remove(id, *number);
        let lease = lease.min(self.config.max_lease);
        let (incarnation, expires) = (record.incarnation, now + lease);
        let body = self.memory.keep(client, text, cost);
        let rank = Rank { incarnation, place, client, body, cost, expires, superseded, left: false };
        self.insert(id, *number, profile, rank);
        Ok(lease)
    }

    /// A registered rank leaves: it awaits no further peers. A replica is no longer found once all of its ranks
    /// have left, so that ranks may leave one after the other. A lookup that names no engine is led to another
    /// engine then. A rank that registers again has not left; a replica that has drained is found again once
    /// every rank that had left is registered anew or gone, and no rank is missing.
    pub fn leave(
        &mut self,
        now: Time,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<(), LeaseError> {
        self.expire(now);
        self.check_life(worker, incarnation)?;
        if let Some(engine) = self.engines.get_mut(&worker.engine)
            && let Some(rank) = engine.ranks.get_mut(&worker.rank).filter(|rank| !rank.left)
        {
            rank.left = true;
            let dp = rank.place.dp;
            self.index.changed(&worker.engine, engine, dp, Change::Leaves);
        }
        Ok(())
    }

    /// Prolongs a registration to `lease` from `now` on. Returns the lease granted, which is at most
    /// [`RegistryConfig::max_lease`].
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
            self.expiry.remove(rank.expires, (worker.engine.clone(), worker.rank));
            rank.expires = now + lease;
            self.expiry.insert(rank.expires, (worker.engine.clone(), worker.rank));
        }
        Ok(lease)
    }

    /// Removes a registration. Only the incarnation that registered can do so.
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

    /// All ranks of a replica, each as the JSON text of a [`RankJson`], in the order of
    /// `(pp_rank, pcp_rank, tp_rank)`.
    ///
    /// `service` and `engine` narrow the search. Without `engine`, the engine with the smallest id answers,
    /// of the engines with this role and service whose replica is complete and has not drained. [`Replica::Modulo`] may mean
    /// another replica in every engine: the smallest engine with all replicas complete comes first, then up
    /// to 16 engines with some complete.
    ///
    /// A lookup costs time for these few engines and the ranks of the answer, however many are registered.
    ///
    /// # Errors
    ///
    /// [`LookupError::NotReady`] if an engine has the replica but ranks of it are missing; otherwise
    /// [`LookupError::Left`] if an engine has the replica and all ranks of the replica have left;
    /// [`LookupError::Unknown`] if there is no such engine.
    pub fn lookup(
        &mut self,
        now: Time,
        role: WorkerRole,
        service: Option<&str>,
        replica: Replica,
        engine: Option<&EngineId>,
    ) -> Result<Vec<Bytes>, LookupError> {
        self.expire(now);
        let candidates = match engine {
            Some(only) => vec![only.clone()],
            None => self.index.candidates(role, service, replica),
        };
        let mut missing = LookupError::Unknown;
        for id in candidates {
            self.steps += 1;
            let engine = self.engines.get(&id).filter(|engine| engine.profile.serves(role, service));
            match engine.map(|engine| engine.replica(replica)) {
                Some(Ok(bodies)) => {
                    self.steps += bodies.len() as u64;
                    return Ok(bodies);
                }
                Some(Err(error)) if error.is_better_than(&missing) => missing = error,
                _ => {}
            }
        }
        Err(missing)
    }

    /// Forgets the ranks whose lease has ended.
    pub fn expire(&mut self, now: Time) {
        while let Some((engine, rank)) = self.expiry.pop_due(now) {
            self.remove(&engine, rank);
        }
    }

    /// When the next lease ends; `None` if no rank is registered.
    pub fn next_timeout(&self) -> Option<Time> {
        self.expiry.next()
    }

    /// How many ranks are registered, over all engines.
    pub fn len(&self) -> usize {
        self.ranks
    }

    /// Bytes that all records take, their share of the maps included: an upper bound. A record that was
    /// removed counts until the last answer that contains it is sent.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Engines and ranks that all lookups so far have looked at: a measure of their cost, which only rises.
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

    fn insert(&mut self, id: &EngineId, number: u32, profile: Profile, rank: Rank) {
        let engine = self.engines.entry(id.clone()).or_insert_with(|| {
            self.index.insert(&profile, id);
            Engine::new(profile)
        });
        self.expiry.insert(rank.expires, (id.clone(), number));
        self.ranks += 1;
        let place = rank.place;
        engine.places.insert(place, number);
        engine.ranks.insert(number, rank);
        self.index.changed(id, engine, place.dp, Change::Registers);
    }

    fn remove(&mut self, id: &EngineId, number: u32) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let Some(rank) = engine.ranks.remove(&number) else { return };
        engine.places.remove(&rank.place);
        self.index.changed(id, engine, rank.place.dp, Change::Goes { had_left: rank.left });
        self.expiry.remove(rank.expires, (id.clone(), number));
        self.ranks -= 1;
        if engine.ranks.is_empty() {
            self.index.remove(&engine.profile, id);
            self.engines.remove(id);
        }
    }
}

#[cfg(test)]
mod tests;
