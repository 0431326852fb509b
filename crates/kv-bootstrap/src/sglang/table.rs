//! [`RouteTable`]: the ranks of one prefill engine, and what decode workers are told about them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::{Time, WorkerId};

use super::admission::Admitted;
use super::claim::{RankInfo, RouteJson, ServerInfo};
use super::engine::{Engine, Life, Owner, Rank};
use super::error::{RouteError, RouteMiss};
use super::ports::WatchOrder;
use crate::client_addr::ClientAddr;
use crate::expiry::Expiry;
use crate::place::Place;

/// Bounds of a [`RouteTable`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouteLimits {
    /// Most ranks of an engine.
    pub(crate) max_ranks: usize,
    /// Most places of an engine that one client may have registered.
    pub(crate) max_per_client: usize,
    pub(crate) max_bytes: usize,
    pub(crate) max_lease: Duration,
    /// True if the ports of ranks without a lease are to be watched.
    pub(crate) watch: bool,
}

/// The ranks of SGLang's prefill engine.
///
/// SGLang's ranks register once and send nothing afterwards. A registration ends when it is replaced, by its
/// lease if it asked for one, or when its port is found dead ([`RouteTable::judge`]). These rules keep a live
/// engine in the table, and remove the ports of a former life of the engine:
///
/// - The same place, address and port again is the same registration.
/// - A place that is registered with another address or port has restarted, unless the process at the former
///   port is known to live: then the registration is of a second engine, and is refused.
/// - The ranks of an engine restart together: ranks that the same client registered *before the previous
///   registration of this place* belong to the former life. Ranks registered after it may belong to either
///   life, and stay.
/// - While ranks of the new life are missing, the last complete set of ranks is answered, if there
///   was one; afterwards nothing of that set is left. So a single stray registration costs a live engine
///   at most its own place, and only where it was the engine's first to register.
/// - A place that is registered with other sizes, another policy or layout begins a second engine beside
///   the first, which takes over once it is complete. An engine of one rank that registers again with another
///   policy has restarted, even at the same port.
/// - After a rank has been found dead, nothing of the engine is answered until all its ranks are there again.
///
/// No registration of one client removes what another client has registered at another place. A place belongs
/// to the client that registered it last, as in SGLang.
#[derive(Debug)]
pub(crate) struct RouteTable {
    pub(super) limits: RouteLimits,
    pub(super) engine: Option<Engine>,
    /// An engine with other sizes or another policy, until it is complete.
    pub(super) rival: Option<Engine>,
    /// Leases of ranks, by their engine's number and their place.
    pub(super) expiry: Expiry<(u64, Place)>,
    /// Where the entry of a worker's rank record is.
    pub(super) owned: BTreeMap<WorkerId, (u64, Place)>,
    /// Where the entry of a watched port is, by the entry's `seq`.
    pub(super) watched: BTreeMap<u64, (u64, Place)>,
    /// Watched ports that have refused once, or are silent.
    pub(super) unwell: BTreeSet<u64>,
    /// What the watcher is still to be told.
    pub(super) orders: Vec<WatchOrder>,
    /// The rank that left last, and how, until the engine is complete again.
    pub(super) lost: Option<String>,
    pub(super) bytes: usize,
    pub(super) next_seq: u64,
}

impl RouteTable {
    pub(crate) fn new(limits: RouteLimits) -> RouteTable {
        RouteTable {
            limits,
            engine: None,
            rival: None,
            expiry: Expiry::default(),
            owned: BTreeMap::new(),
            watched: BTreeMap::new(),
            unwell: BTreeSet::new(),
            orders: Vec::new(),
            lost: None,
            bytes: 0,
            next_seq: 0,
        }
    }

    /// Registers a rank, or replaces its registration.
    pub(crate) fn register(
        &mut self,
        now: Time,
        client: ClientAddr,
        claim: RouteJson,
    ) -> Result<(), RouteError> {
        let ttl = claim.lease_ttl_s;
        let rank = claim.into_rank()?;
        let expires = match ttl {
            None => None,
            Some(secs) if secs > 0.0 => {
                let lease = Duration::try_from_secs_f64(secs).map_err(|_| RouteError::Lease)?;
                Some(now + lease.min(self.limits.max_lease))
            }
            Some(_) => return Err(RouteError::Lease),
        };
        let admitted = self.admit(now, client, &rank, None)?;
        self.enter(now, admitted, expires, None);
        Ok(())
    }

    /// Enters a rank that was admitted: until `expires`, or until its port is found dead.
    pub(crate) fn enter(
        &mut self,
        now: Time,
        admitted: Admitted,
        expires: Option<Time>,
        owner: Option<Owner>,
    ) {
        let Admitted { client, place, info, about, fresh } = admitted;
        let seq = self.next_seq;
        self.next_seq += 1;
        if fresh {
            let slot = if self.engine.is_none() { &mut self.engine } else { &mut self.rival };
            let former = slot.replace(Engine::new(seq, place, about.clone(), now));
            former.into_iter().for_each(|engine| self.forget(engine));
        }
        let in_engine = self.engine.as_ref().is_some_and(|engine| engine.contradiction(&about).is_none());
        let slot = if in_engine { &mut self.engine } else { &mut self.rival };
        let Some(engine) = slot else { return };
        let (id, before) = (engine.id, if fresh { 0 } else { engine.bytes });
        let watch = self.limits.watch && expires.is_none();
        let port = info.socket_addr().filter(|_| watch);
        let (watched, life) = (port.is_some(), Life::Unknown);
        let worker = owner.as_ref().map(|(worker, _)| worker.clone());
        let rank = Rank {
            info,
            client,
            seq,
            expires,
            left: false,
            leaving: false,
            former: None,
            owner,
            watched,
            life,
        };
        let old = engine.put(now, place, rank, &about);
        self.bytes = self.bytes - before + engine.bytes;
        let takes_over = !in_engine && engine.is_whole();
        // The entry of the same address and port keeps its number, and the watch that goes on.
        let seq = engine.ranks.get(&place).map_or(seq, |rank| rank.seq);
        let goes_on = old.as_ref().is_some_and(|old| old.watched && watched && old.seq == seq);
        if let Some(old) = old {
            self.gone(id, place, &old, !goes_on);
        }
        if let Some(expires) = expires {
            self.expiry.insert(expires, (id, place));
        }
        if let Some(worker) = worker {
            self.owned.insert(worker, (id, place));
        }
        if let Some(addr) = port.filter(|_| !goes_on) {
            self.watched.insert(seq, (id, place));
            self.orders.push(WatchOrder::Begin { seq, addr, client });
        }
        if takes_over {
            let former = std::mem::replace(&mut self.engine, self.rival.take());
            former.into_iter().for_each(|engine| self.forget(engine));
        }
        if self.engine.as_ref().is_some_and(|engine| engine.whole_once) {
            self.lost = None;
        }
    }

    /// What is known about the engine, once all its ranks are registered.
    pub(crate) fn info(&mut self, now: Time) -> Result<&ServerInfo, RouteMiss> {
        let health = self.health(now);
        match &self.engine {
            Some(engine) if engine.ranks.values().all(|rank| rank.leaving) => {
                Err(RouteMiss::NotReady { registered: 0 })
            }
            Some(engine) if engine.whole_once => health.map(|()| &engine.info).map_err(RouteMiss::Unwell),
            Some(engine) => Err(RouteMiss::NotReady { registered: engine.ages.len() }),
            None => Err(RouteMiss::NotReady { registered: 0 }),
        }
    }

    /// The rank at a place, once all ranks of the engine are registered.
    pub(crate) fn rank(&mut self, now: Time, place: Option<Place>) -> Result<&RankInfo, RouteMiss> {
        self.info(now)?;
        let engine = self.engine.as_ref();
        let rank = engine.zip(place).and_then(|(engine, place)| engine.answer(&place));
        rank.ok_or(RouteMiss::Unknown)
    }

    /// Whether the engine of the table lives, as far as is known; `Err` says which rank does not. A table in
    /// which no engine was ever complete, or is being filled, is well.
    pub(crate) fn health(&mut self, now: Time) -> Result<(), String> {
        self.expire(now);
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let Some(engine) = &self.engine else { return Ok(()) };
        let unwell = self.unwell.iter().filter_map(|seq| self.watched.get(seq));
        let mut unwell = unwell.filter(|(id, _)| *id == engine.id);
        let rank = unwell.find_map(|(_, place)| Some((place, engine.ranks.get(place)?)));
        match rank {
            Some((place, Rank { info, life: Life::Refused, .. })) => {
                Err(format!("{place} at {info} does not live: its port has refused a connection"))
            }
            Some((place, Rank { info, .. })) => Err(format!("{place} at {info} does not answer")),
            None => Ok(()),
        }
    }

    /// What the watcher is to be told since the last call.
    pub(crate) fn take_orders(&mut self) -> Vec<WatchOrder> {
        std::mem::take(&mut self.orders)
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.expiry.next()
    }

    /// Places that are registered, of both engines.
    pub(crate) fn places(&self) -> usize {
        self.engine.iter().chain(&self.rival).map(|engine| engine.ranks.len()).sum()
    }

    /// Bytes of the table: an upper bound.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
