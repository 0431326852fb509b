//! The virtual bootstrap server: which ranks are registered at which address.

use std::collections::BTreeMap;

use kv_core::{BootstrapError, OsError, RankQuery, RankRecord, Replica};

use crate::net::lives::LifeId;

/// All bootstrap servers of a world, by address.
#[derive(Debug, Default, Clone)]
pub(crate) struct BootstrapServers {
    engines: BTreeMap<String, BTreeMap<[u32; 4], Entry>>,
}

#[derive(Debug, Clone)]
struct Entry {
    life: LifeId,
    record: RankRecord,
    /// When the registration ends, in global time.
    until: u64,
}

impl BootstrapServers {
    /// Registers a rank, in place of its former life.
    pub(crate) fn publish(&mut self, addr: &str, life: LifeId, record: RankRecord) {
        let parallel = record.parallel;
        let key = [parallel.dp_rank, parallel.pp_rank, parallel.pcp_rank, parallel.tp_rank];
        let entry = Entry { life, record, until: u64::MAX };
        self.engines.entry(addr.to_owned()).or_default().insert(key, entry);
    }

    /// Ends the registration of a dead rank when its lease ends.
    pub(crate) fn expire(&mut self, life: LifeId, until: u64) {
        for entry in
            self.engines.values_mut().flat_map(BTreeMap::values_mut).filter(|entry| entry.life == life)
        {
            entry.until = until;
        }
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
        let ranks: Vec<_> = alive()
            .filter(|entry| entry.record.parallel.dp_rank == replica)
            .map(|entry| entry.record.clone())
            .collect();
        if ranks.is_empty() { Err(BootstrapError::UnknownRank) } else { Ok(ranks) }
    }
}
