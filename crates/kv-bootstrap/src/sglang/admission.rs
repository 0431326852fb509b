//! Which registrations the table takes, and of which engine a registration is.

use kv_core::{Time, WorkerId};

use super::claim::{Int, RANK_BYTES, RankInfo, ServerInfo};
use super::engine::{Engine, Life};
use super::error::RouteError;
use super::rank::{SglangRank, within};
use super::table::RouteTable;
use crate::client_addr::ClientAddr;
use crate::place::Place;

/// A registration that the table will take.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(super) client: ClientAddr,
    pub(super) place: Place,
    pub(super) info: RankInfo,
    pub(super) about: ServerInfo,
    /// True if the registration begins a new engine.
    pub(super) fresh: bool,
}

impl RouteTable {
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
        within("number of ranks", Int(ranks), 1, max)?;
        self.check_vacant(place, &info, owner)?;
        let fresh = self.choose(now, client, place, &info, &about)?;
        self.check_room(client, place, &info, &about, fresh)?;
        Ok(Admitted { client, place, info, about, fresh })
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
}
