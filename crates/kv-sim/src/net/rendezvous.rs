//! The virtual bootstrap server: which ranks are registered at which address.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{BootstrapError, OsError, RankQuery, RankRecord, Replica};

use crate::net::lives::LifeId;

/// All bootstrap servers of a world, by address.
#[derive(Debug, Default, Clone)]
pub(crate) struct BootstrapServers {
    engines: BTreeMap<String, BTreeMap<[u32; 4], Entry>>,
    /// Replicas whose ranks had all left, by address and `dp_rank`, until every such rank is registered anew.
    drained: BTreeSet<(String, u32)>,
}

#[derive(Debug, Clone)]
struct Entry {
    life: LifeId,
    record: RankRecord,
    /// When the registration ends, in global time.
    until: u64,
    /// The rank awaits no peer any more. The replica is found until all of its ranks have left.
    left: bool,
}

impl BootstrapServers {
    /// Registers a rank, in place of its former life.
    pub(crate) fn publish(&mut self, addr: &str, life: LifeId, record: RankRecord) {
        let parallel = record.parallel;
        let key = [parallel.dp_rank, parallel.pp_rank, parallel.pcp_rank, parallel.tp_rank];
        let entry = Entry { life, record, until: u64::MAX, left: false };
        let engine = self.engines.entry(addr.to_owned()).or_default();
        engine.insert(key, entry);
        let mut replica = engine.values().filter(|entry| entry.record.parallel.dp_rank == parallel.dp_rank);
        if replica.all(|entry| !entry.left) {
            self.drained.remove(&(addr.to_owned(), parallel.dp_rank));
        }
    }

    /// Ends the registration of a dead rank when its lease ends.
    pub(crate) fn expire(&mut self, life: LifeId, until: u64) {
        for entry in
            self.engines.values_mut().flat_map(BTreeMap::values_mut).filter(|entry| entry.life == life)
        {
            entry.until = until;
        }
    }

    /// A rank leaves. Returns the lives that are not found any more: those of its replica, once all have
    /// left. With `names`, as a planted bug, they are found nonetheless.
    pub(crate) fn leave(&mut self, life: LifeId, names: bool) -> Vec<LifeId> {
        let mut gone = Vec::new();
        for (addr, engine) in &mut self.engines {
            let Some(entry) = engine.values_mut().find(|entry| entry.life == life) else { continue };
            entry.left = true;
            let dp_rank = entry.record.parallel.dp_rank;
            let mut replica: Vec<&mut Entry> =
                engine.values_mut().filter(|entry| entry.record.parallel.dp_rank == dp_rank).collect();
            if replica.iter().all(|entry| entry.left) {
                gone.extend(replica.iter().map(|entry| entry.life));
                if names {
                    replica.iter_mut().for_each(|entry| entry.left = false);
                } else {
                    self.drained.insert((addr.clone(), dp_rank));
                }
            }
        }
        gone
    }

    /// Answers a lookup with the records of the ranks that are registered.
    pub(crate) fn lookup(
        &self,
        now: u64,
        addr: &str,
        query: &RankQuery,
    ) -> Result<Vec<RankRecord>, BootstrapError> {
        let unreachable =
            BootstrapError::Unreachable(OsError::new("connect", std::io::ErrorKind::ConnectionRefused));
        let engine = self.engines.get(addr).ok_or(unreachable)?;
        let asked = |record: &RankRecord| {
            record.role == query.role && record.offers.iter().any(|offer| offer.service == query.service)
        };
        let alive = || engine.values().filter(|entry| now < entry.until && asked(&entry.record));
        let parallel = alive().next().ok_or(BootstrapError::UnknownRank)?.record.parallel;
        let (expected, registered) = (parallel.ranks(), alive().count() as u32);
        if registered < expected {
            return Err(BootstrapError::NotReady { registered, expected });
        }
        let replica = match query.replica {
            Replica::Rank(rank) => rank,
            Replica::Modulo(number) => (number % u64::from(parallel.dp_size)) as u32,
        };
        let of_replica = || alive().filter(|entry| entry.record.parallel.dp_rank == replica);
        let ranks: Vec<_> = of_replica().map(|entry| entry.record.clone()).collect();
        if !ranks.is_empty() && self.drained.contains(&(addr.to_owned(), replica)) {
            let registered = of_replica().filter(|entry| !entry.left).count() as u32;
            let missing = BootstrapError::NotReady { registered, expected: ranks.len() as u32 };
            return Err(if registered == 0 { BootstrapError::Draining } else { missing });
        }
        if ranks.is_empty() { Err(BootstrapError::UnknownRank) } else { Ok(ranks) }
    }
}
