//! SGLang's table of prefill ranks, behind the route `/route`.
//!
//! SGLang's own server counts registrations. This table counts distinct ranks, so that a repeated
//! registration never hides a missing rank.

mod claim;
mod engine;
mod error;
mod rooms;

use std::time::Duration;

use kv_core::Time;

pub(crate) use self::claim::{Int, RouteJson};
use self::claim::{RANK_BYTES, RankInfo, ServerInfo};
use self::engine::{Engine, Rank};
pub(crate) use self::error::{RouteError, RouteMiss};
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
}

/// The ranks of SGLang's prefill engine.
///
/// SGLang's ranks register once and send nothing afterwards, so a silent rank may well be alive: a
/// registration ends when it is replaced, or by its lease if it asked for one. These rules keep a live engine
/// in the table, and remove the ports of a former life of the engine:
///
/// - The same place, address and port again is the same registration.
/// - A place that is registered with another address or port has restarted. The ranks of an engine restart
///   together: ranks that the same client registered *before the previous registration of this place* belong
///   to the former life. Ranks registered after it may belong to either life, and stay.
/// - While ranks of the new life are missing, the last complete set of ranks is answered, if there
///   was one; afterwards nothing of that set is left. So a single stray registration costs a live engine
///   at most its own place, and only where it was the engine's first to register.
/// - A place that is registered with other sizes, another policy or layout begins a second engine beside
///   the first, which takes over once it is complete.
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
    bytes: usize,
    next_seq: u64,
}

impl RouteTable {
    pub(crate) fn new(limits: RouteLimits) -> RouteTable {
        RouteTable { limits, engine: None, rival: None, expiry: Expiry::default(), bytes: 0, next_seq: 0 }
    }

    /// Registers a rank, or replaces its registration.
    pub(crate) fn register(
        &mut self,
        now: Time,
        client: ClientAddr,
        claim: RouteJson,
    ) -> Result<(), RouteError> {
        self.expire(now);
        claim.check_lengths()?;
        let (place, info) = claim.rank()?;
        let expires = match claim.lease_ttl_s {
            None => None,
            Some(secs) if secs > 0.0 => {
                let lease = Duration::try_from_secs_f64(secs).map_err(|_| RouteError::Lease)?;
                Some(now + lease.min(self.limits.max_lease))
            }
            Some(_) => return Err(RouteError::Lease),
        };
        let about = claim.info(self.limits.max_ranks)?;
        let fresh = self.choose(now, client, place, &info, &about)?;
        self.check_room(client, place, &info, &about, fresh)?;

        let seq = self.next_seq;
        self.next_seq += 1;
        if fresh {
            let slot = if self.engine.is_none() { &mut self.engine } else { &mut self.rival };
            let former = slot.replace(Engine::new(seq, place, about.clone(), now));
            former.into_iter().for_each(|engine| self.forget(engine));
        }
        let in_engine = self.engine.as_ref().is_some_and(|engine| engine.contradiction(&about).is_none());
        let slot = if in_engine { &mut self.engine } else { &mut self.rival };
        let Some(engine) = slot else { return Ok(()) };
        let (id, before) = (engine.id, if fresh { 0 } else { engine.bytes });
        let rank = Rank { info, client, seq, expires, left: false, former: None };
        let old = engine.put(now, place, rank, &about);
        self.bytes = self.bytes - before + engine.bytes;
        let takes_over = !in_engine && engine.is_whole();
        if let Some(old) = old {
            self.expiry.remove(old, (id, place));
        }
        if let Some(expires) = expires {
            self.expiry.insert(expires, (id, place));
        }
        if takes_over {
            let former = std::mem::replace(&mut self.engine, self.rival.take());
            former.into_iter().for_each(|engine| self.forget(engine));
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
        if known.is_some_and(|rank| rank.info == *info) {
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
        self.expire(now);
        match &self.engine {
            Some(engine) if engine.whole_once => Ok(&engine.info),
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

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((id, place)) = self.expiry.pop_due(now) {
            let slot = [&mut self.engine, &mut self.rival]
                .into_iter()
                .find(|slot| slot.as_ref().is_some_and(|engine| engine.id == id));
            let Some(slot) = slot else { continue };
            let Some(engine) = slot else { continue };
            self.bytes -= engine.bytes;
            engine.remove(place);
            if engine.ranks.is_empty() {
                *slot = None;
            } else {
                self.bytes += engine.bytes;
            }
        }
        if self.engine.is_none() {
            self.engine = self.rival.take();
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

    fn forget(&mut self, engine: Engine) {
        self.bytes -= engine.bytes;
        for (place, rank) in engine.ranks {
            if let Some(expires) = rank.expires {
                self.expiry.remove(expires, (engine.id, place));
            }
        }
    }
}

#[cfg(test)]
mod tests;
