//! SGLang's table of prefill ranks, behind the route `/route`.
//!
//! SGLang's own server counts registrations. This table counts distinct ranks, so that a repeated
//! registration never hides a missing rank.

mod claim;
mod engine;
mod error;
mod rank;
mod rooms;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use kv_core::{Incarnation, Time, WorkerId};

pub(crate) use self::claim::{InfoJson, Int, RankInfoJson, RouteJson};
use self::claim::{RANK_BYTES, RankInfo, ServerInfo};
use self::engine::{Engine, Life, Owner, Rank};
pub(crate) use self::error::{RouteError, RouteMiss};
pub use self::rank::{SGLANG_SERVICE, SglangRank, SglangRankError};
pub(crate) use self::rooms::{ROOM_BYTES, Rooms};
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
    limits: RouteLimits,
    engine: Option<Engine>,
    /// An engine with other sizes or another policy, until it is complete.
    rival: Option<Engine>,
    /// Leases of ranks, by their engine's number and their place.
    expiry: Expiry<(u64, Place)>,
    /// Where the entry of a worker's rank record is.
    owned: BTreeMap<WorkerId, (u64, Place)>,
    /// Where the entry of a watched port is, by the entry's `seq`.
    watched: BTreeMap<u64, (u64, Place)>,
    /// Watched ports that have refused once, or are silent.
    unwell: BTreeSet<u64>,
    /// What the watcher is still to be told.
    orders: Vec<WatchOrder>,
    /// The rank that left last, and how, until the engine is complete again.
    lost: Option<String>,
    bytes: usize,
    next_seq: u64,
}

/// What the table asks of the watcher. `seq` names the entry, and is never used again for another port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchOrder {
    Begin { seq: u64, addr: SocketAddr, client: ClientAddr },
    End { seq: u64 },
}

/// What the watcher has found at a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A process has greeted, and the connection is open.
    Lives,
    /// The connection has ended, and another is being tried.
    Unknown,
    /// The port has refused a connection once.
    Refused,
    /// The port cannot be reached, or accepts connections and says nothing. The process may come back.
    Silent,
    /// The port has refused twice in a row: the process has ended.
    Dead,
}

/// A registration that the table will take.
#[derive(Debug)]
pub(crate) struct Admitted {
    client: ClientAddr,
    place: Place,
    info: RankInfo,
    about: ServerInfo,
    fresh: bool,
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

    /// Whether a rank can be registered, for [`RouteTable::enter`] right afterwards. `owner` is the worker whose
    /// rank record the registration comes from.
    pub(crate) fn admit(
        &mut self,
        now: Time,
        client: ClientAddr,
        rank: &SglangRank,
        owner: Option<&WorkerId>,
    ) -> Result<Admitted, RouteError> {
        self.expire(now);
        let (place, about) = (Place::of(&rank.parallel), ServerInfo::of(rank));
        let info = RankInfo { rank_ip: rank.rank_ip.clone(), rank_port: rank.rank_port };
        let (ranks, max) = (i128::from(about.ranks()), self.limits.max_ranks as i128);
        rank::within("number of ranks", Int(ranks), 1, max)?;
        self.check_vacant(place, &info, owner)?;
        let fresh = self.choose(now, client, place, &info, &about)?;
        self.check_room(client, place, &info, &about, fresh)?;
        Ok(Admitted { client, place, info, about, fresh })
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
        let rank = Rank { info, client, seq, expires, left: false, former: None, owner, watched, life };
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

    /// Refuses a rank whose place belongs to another process that is known to live.
    fn check_vacant(
        &self,
        place: Place,
        info: &RankInfo,
        owner: Option<&WorkerId>,
    ) -> Result<(), RouteError> {
        let holders = self.engine.iter().chain(&self.rival).filter_map(|engine| engine.ranks.get(&place));
        for holder in holders.filter(|holder| holder.info != *info && !holder.left) {
            let lives = match &holder.owner {
                Some((worker, _)) => owner != Some(worker),
                None => holder.life == Life::Lives,
            };
            if lives {
                return Err(RouteError::Occupied { place, addr: holder.info.to_string() });
            }
        }
        Ok(())
    }

    /// True if the registration begins a new engine, false if it belongs to an engine in the table.
    fn choose(
        &self,
        now: Time,
        client: ClientAddr,
        place: Place,
        info: &RankInfo,
        about: &ServerInfo,
    ) -> Result<bool, RouteError> {
        let Some(engine) = &self.engine else { return Ok(true) };
        let Some(contradiction) = engine.contradiction(about) else { return Ok(false) };
        let known = engine.ranks.get(&place);
        let alone = known.is_some() && engine.ranks.len() == 1 && about.ranks() == 1;
        if known.is_some_and(|rank| rank.info == *info) && !alone {
            return Err(contradiction);
        }
        let makes_way = match &self.rival {
            Some(rival) => match rival.contradiction(about) {
                None => return Ok(false),
                Some(_) => rival.stalled(now) || rival.is_of(client),
            },
            None => known.is_some() || engine.stalled(now),
        };
        if makes_way { Ok(true) } else { Err(contradiction) }
    }

    fn check_room(
        &self,
        client: ClientAddr,
        place: Place,
        info: &RankInfo,
        about: &ServerInfo,
        fresh: bool,
    ) -> Result<(), RouteError> {
        let agrees = |engine: &&Engine| !fresh && engine.contradiction(about).is_none();
        let engine = self.engine.iter().chain(&self.rival).find(agrees);
        let holder = engine.and_then(|engine| engine.ranks.get(&place)).map(|rank| rank.client);
        let held = engine.and_then(|engine| engine.clients.get(&client)).copied().unwrap_or(0);
        let held = held + usize::from(holder != Some(client));
        if held > self.limits.max_per_client {
            return Err(RouteError::ClientFull { would_be: held, max: self.limits.max_per_client });
        }
        // The registration that is replaced still counts, so a completely full table refuses a replacement.
        let bytes = self.bytes + RANK_BYTES + info.rank_ip.len() + about.bytes();
        if bytes > self.limits.max_bytes {
            return Err(RouteError::Full { would_be: bytes, max: self.limits.max_bytes });
        }
        Ok(())
    }

    /// What is known about the engine, once all its ranks are registered.
    pub(crate) fn info(&mut self, now: Time) -> Result<&ServerInfo, RouteMiss> {
        let health = self.health(now);
        match &self.engine {
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

    /// Takes what the watcher has found at the port of the entry `seq`.
    pub(crate) fn judge(&mut self, seq: u64, verdict: Verdict) {
        let Some((id, place)) = self.watched.get(&seq).copied() else { return };
        if verdict == Verdict::Dead {
            self.drop_rank(id, place, "is dead: its port refuses connections");
            return;
        }
        let engine = self.engine.iter_mut().chain(&mut self.rival).find(|engine| engine.id == id);
        let Some(rank) = engine.and_then(|engine| engine.ranks.get_mut(&place)) else { return };
        rank.life = match (verdict, rank.life) {
            (Verdict::Lives, _) => Life::Lives,
            (Verdict::Refused, _) => Life::Refused,
            (Verdict::Silent, _) | (_, Life::Silent) => Life::Silent,
            (Verdict::Unknown | Verdict::Dead, _) => Life::Unknown,
        };
        if matches!(rank.life, Life::Refused | Life::Silent) {
            self.unwell.insert(seq);
        } else {
            self.unwell.remove(&seq);
        }
    }

    /// What the watcher is to be told since the last call.
    pub(crate) fn take_orders(&mut self) -> Vec<WatchOrder> {
        std::mem::take(&mut self.orders)
    }

    /// Prolongs the entry of a worker's rank record.
    pub(crate) fn renew(&mut self, worker: &WorkerId, incarnation: Incarnation, expires: Time) {
        let Some((id, place)) = self.owned.get(worker).copied() else { return };
        let engine = self.engine.iter_mut().chain(&mut self.rival).find(|engine| engine.id == id);
        let rank = engine.and_then(|engine| engine.ranks.get_mut(&place));
        if let Some(rank) = rank.filter(|rank| rank.is_of(worker, incarnation))
            && let Some(old) = rank.expires.replace(expires)
        {
            self.expiry.remove(old, (id, place));
            self.expiry.insert(expires, (id, place));
        }
    }

    /// Removes the entry of a worker's rank record: of this incarnation, or of any.
    pub(crate) fn withdraw(&mut self, worker: &WorkerId, incarnation: Option<Incarnation>) {
        let Some((id, place)) = self.owned.get(worker).copied() else { return };
        let engine = self.engine.iter().chain(&self.rival).find(|engine| engine.id == id);
        let rank = engine.and_then(|engine| engine.ranks.get(&place));
        if rank.is_some_and(|rank| incarnation.is_none_or(|incarnation| rank.is_of(worker, incarnation))) {
            self.drop_rank(id, place, "has been withdrawn");
        }
    }

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((id, place)) = self.expiry.pop_due(now) {
            self.drop_rank(id, place, "has not renewed its lease");
        }
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

    /// Removes a rank that has left, and remembers how if the engine that serves has lost the rank.
    fn drop_rank(&mut self, id: u64, place: Place, how: &str) {
        let serves = self.engine.as_ref().is_some_and(|engine| engine.id == id);
        let slot = if serves { &mut self.engine } else { &mut self.rival };
        let Some(engine) = slot.as_mut().filter(|engine| engine.id == id) else { return };
        self.bytes -= engine.bytes;
        let was_whole = engine.whole_once;
        let rank = engine.remove(place);
        if engine.ranks.is_empty() {
            *slot = None;
        } else {
            self.bytes += engine.bytes;
        }
        if let Some(rank) = rank {
            if serves && was_whole {
                self.lost = Some(format!("{place} at {} {how}", rank.info));
            }
            self.gone(id, place, &rank, true);
        }
        if self.engine.is_none() {
            self.engine = self.rival.take();
        }
    }

    fn forget(&mut self, engine: Engine) {
        self.bytes -= engine.bytes;
        for (place, rank) in &engine.ranks {
            self.gone(engine.id, *place, rank, true);
        }
    }

    /// Removes what points to an entry that is no longer in its engine.
    fn gone(&mut self, id: u64, place: Place, rank: &Rank, end_watch: bool) {
        if let Some(expires) = rank.expires {
            self.expiry.remove(expires, (id, place));
        }
        if let Some((worker, _)) = &rank.owner
            && self.owned.get(worker) == Some(&(id, place))
        {
            self.owned.remove(worker);
        }
        if rank.watched && end_watch {
            self.watched.remove(&rank.seq);
            self.unwell.remove(&rank.seq);
            self.orders.push(WatchOrder::End { seq: rank.seq });
        }
    }
}

impl RankInfo {
    /// The port to watch; `None` for a host name, and for an address that is not of one host.
    fn socket_addr(&self) -> Option<SocketAddr> {
        let ip: IpAddr = self.rank_ip.trim_matches(['[', ']']).parse().ok()?;
        let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        let one_host = !ip.is_unspecified() && !ip.is_multicast() && !broadcast;
        (one_host && self.rank_port != 0).then(|| SocketAddr::new(ip, self.rank_port))
    }
}

impl std::fmt::Display for RankInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.rank_ip, self.rank_port)
    }
}

#[cfg(test)]
mod tests;
