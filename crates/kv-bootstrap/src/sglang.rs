//! SGLang's table of prefill ranks, as its `/route` speaks of it.
//!
//! SGLang's own server counts registrations; here distinct ranks are counted, so that a repeated
//! registration never hides a missing rank.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::Time;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::client_addr::ClientAddr;

/// The body of `PUT /route`. Unknown fields are ignored.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct RouteJson {
    attn_tp_size: Int,
    attn_tp_rank: Int,
    attn_cp_size: Int,
    attn_cp_rank: Int,
    attn_dp_size: Int,
    attn_dp_rank: Int,
    pp_size: Int,
    pp_rank: Int,
    system_dp_size: Int,
    system_dp_rank: Int,
    rank_ip: String,
    rank_port: Int,
    page_size: Int,
    #[serde(deserialize_with = "Option::deserialize")]
    kv_cache_dtype: Option<String>,
    kv_layout: Option<String>,
    dsv41_spec_layout: Option<Value>,
    load_balance_method: Option<String>,
    enable_dsa_cache_layer_split: Option<bool>,
    enable_kv_cache_sharding: Option<bool>,
    prefill_http_port: Option<Int>,
    decode_allocation_policy: Option<String>,
    /// Ours: the entry leaves after this time unless registered again. SGLang's ranks register
    /// once and for all, so that without it an entry stays.
    lease_ttl_s: Option<f64>,
}

/// An integer as Python's `int()` takes it: a number or its decimal text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Int(pub(crate) i128);

/// What a decode worker is told about the engine (SGLang: `PrefillServerInfo`).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ServerInfo {
    attn_tp_size: u32,
    attn_cp_size: u32,
    dp_size: u32,
    pp_size: u32,
    page_size: i64,
    kv_cache_dtype: Option<String>,
    follow_bootstrap_room: bool,
    enable_dsa_cache_layer_split: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    dsv41_spec_layout: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_layout: Option<String>,
    decode_allocation_policy: String,
    enable_kv_cache_sharding: bool,
    prefill_http_port: Option<i64>,
    // Computed by the decode side; always null here.
    target_tp_rank: Option<u32>,
    target_tp_ranks: Option<u32>,
    target_cp_ranks: Option<u32>,
    target_pp_ranks: Option<u32>,
    required_dst_info_num: Option<u32>,
    required_prefill_response_num: Option<u32>,
}

/// Where one rank listens (SGLang: `PrefillRankInfo`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct RankInfo {
    rank_ip: String,
    rank_port: u16,
}

/// Longest host name or address (`rank_ip`), in bytes: that of a domain name.
const MAX_HOST: usize = 255;
/// Longest name of a data type, layout, policy or load balancing method, in bytes.
const MAX_WORD: usize = 128;
/// Longest `dsv41_spec_layout`, in bytes of JSON.
const MAX_SPEC_LAYOUT: usize = 4096;
/// What a rank costs beside its host name: its share of the maps. An upper bound, not a measurement.
const RANK_BYTES: usize = 512;
/// An engine of which nothing was heard for so long, and which is not complete, makes way for
/// another. SGLang's ranks repeat a refused registration for at least 11 s.
const STALLED: Duration = Duration::from_secs(5);

/// Why a registration was refused. The texts of the first two are part of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("DeepSeek-V4.1 DSpark PD layout differs across prefill ranks")]
    SpecLayout,
    #[error("Inconsistent prefill allocation policies")]
    AllocationPolicy,
    #[error("{field} is {claimed}, but the ranks already registered have {registered}")]
    Topology { field: &'static str, registered: u32, claimed: u32 },
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range { field: &'static str, got: i128, min: i128, max: i128 },
    #[error("{field} has {got} bytes; at most {max} are allowed")]
    Length { field: &'static str, got: usize, max: usize },
    #[error("lease_ttl_s must be a positive number of seconds")]
    Lease,
    #[error("the places of this client would be {would_be}, the limit is {max}")]
    ClientFull { would_be: usize, max: usize },
    #[error("the table is full: bytes would be {would_be}, the limit is {max}")]
    Full { would_be: usize, max: usize },
}

impl RouteError {
    pub(crate) fn status(&self) -> u16 {
        match self {
            RouteError::ClientFull { .. } => 429,
            RouteError::Full { .. } => 507,
            _ => 400,
        }
    }
}

/// Why a question has no answer yet, or none at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RouteMiss {
    NotReady { registered: usize },
    Unknown,
}

/// A rank's place: data, context, tensor and pipeline group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) dp: u32,
    pub(crate) cp: u32,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
}

/// Bounds of a [`RouteTable`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouteLimits {
    /// Ranks of an engine.
    pub(crate) max_ranks: usize,
    /// Places held by registrations of one client.
    pub(crate) max_per_client: usize,
    pub(crate) max_bytes: usize,
    pub(crate) max_lease: Duration,
}

/// The ranks of SGLang's prefill engine.
///
/// SGLang's ranks register once and send nothing afterwards, so that silence says nothing about
/// them: a registration ends by replacement (or by its lease, if it asked for one). The rules see
/// to it that a live engine stays, and that the ports of a former life of it leave:
///
/// - The same place, address and port again is the same registration.
/// - A place that comes with another address or port has restarted. Its engine's ranks restart
///   together: those that the same client registered *before the former registration of this
///   place* belong to the former life. Those registered after it may belong to either and stay.
/// - While ranks of the new life are missing, the last complete set of ranks is answered, if there
///   was one; afterwards nothing of it is left. So a single stray registration costs a live engine
///   at most its own place, and only where it was the engine's first to register.
/// - A place that comes with other sizes, another policy or layout begins a second engine beside
///   the first, which takes over once it is complete.
///
/// No registration of one client removes what another has registered at another place; a place
/// itself belongs to who registered it last, as in SGLang.
#[derive(Debug)]
pub(crate) struct RouteTable {
    limits: RouteLimits,
    engine: Option<Engine>,
    /// An engine with other sizes or another policy, until it is complete.
    rival: Option<Engine>,
    expiries: BTreeSet<(Time, u64, Place)>,
    bytes: usize,
    next_seq: u64,
}

#[derive(Debug)]
struct Engine {
    id: u64,
    /// What its ranks said about it, and which of them was the first.
    info: ServerInfo,
    founder: Place,
    ranks: BTreeMap<Place, Rank>,
    /// By client and age, those that have not left.
    ages: BTreeSet<(ClientAddr, u64, Place)>,
    /// How often all ranks were there anew: what a rank remembers of an earlier time is void.
    epoch: u64,
    /// Whether all ranks were there in this epoch, so that the set can be answered still.
    whole_once: bool,
    grown: Time,
    /// Places by who registered them.
    clients: BTreeMap<ClientAddr, usize>,
    bytes: usize,
}

#[derive(Debug)]
struct Rank {
    info: RankInfo,
    client: ClientAddr,
    seq: u64,
    expires: Option<Time>,
    /// It belongs to a former life of the engine.
    left: bool,
    /// What stood at this place when all ranks were last there, and in which epoch.
    former: Option<(u64, RankInfo)>,
}

impl RouteTable {
    pub(crate) fn new(limits: RouteLimits) -> RouteTable {
        RouteTable { limits, engine: None, rival: None, expiries: BTreeSet::new(), bytes: 0, next_seq: 0 }
    }

    /// Registers a rank, or replaces what is known of it.
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
            self.expiries.remove(&(old, id, place));
        }
        self.expiries.extend(expires.map(|expires| (expires, id, place)));
        if takes_over {
            let former = std::mem::replace(&mut self.engine, self.rival.take());
            former.into_iter().for_each(|engine| self.forget(engine));
        }
        Ok(())
    }

    /// Whether the claim begins an engine (true) or belongs to one that is known (false).
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
        // What is replaced is still counted, so that a table that is full to the brim refuses it.
        let bytes = self.bytes + RANK_BYTES + info.rank_ip.len() + about.bytes();
        if bytes > self.limits.max_bytes {
            return Err(RouteError::Full { would_be: bytes, max: self.limits.max_bytes });
        }
        Ok(())
    }

    /// The engine, once all its ranks are there.
    pub(crate) fn info(&mut self, now: Time) -> Result<&ServerInfo, RouteMiss> {
        self.expire(now);
        match &self.engine {
            Some(engine) if engine.whole_once => Ok(&engine.info),
            Some(engine) => Err(RouteMiss::NotReady { registered: engine.ages.len() }),
            None => Err(RouteMiss::NotReady { registered: 0 }),
        }
    }

    /// One rank, once all are there.
    pub(crate) fn rank(&mut self, now: Time, place: Option<Place>) -> Result<&RankInfo, RouteMiss> {
        self.info(now)?;
        let engine = self.engine.as_ref();
        let rank = engine.zip(place).and_then(|(engine, place)| engine.answer(&place));
        rank.ok_or(RouteMiss::Unknown)
    }

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((expires, id, place)) = self.expiries.first().copied()
            && expires <= now
        {
            self.expiries.pop_first();
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
        self.expiries.first().map(|(expires, ..)| *expires)
    }

    /// Places held, of both engines.
    pub(crate) fn places(&self) -> usize {
        self.engine.iter().chain(&self.rival).map(|engine| engine.ranks.len()).sum()
    }

    /// Bytes kept: an upper bound.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn forget(&mut self, engine: Engine) {
        self.bytes -= engine.bytes;
        for (place, rank) in engine.ranks {
            if let Some(expires) = rank.expires {
                self.expiries.remove(&(expires, engine.id, place));
            }
        }
    }
}

impl Engine {
    fn new(id: u64, founder: Place, info: ServerInfo, now: Time) -> Engine {
        Engine {
            id,
            bytes: info.bytes(),
            clients: BTreeMap::new(),
            info,
            founder,
            ranks: BTreeMap::new(),
            ages: BTreeSet::new(),
            epoch: 0,
            whole_once: false,
            grown: now,
        }
    }

    /// Takes in a rank that agrees with the others. Returns when the registration that it replaces
    /// was to end.
    fn put(&mut self, now: Time, place: Place, mut rank: Rank, about: &ServerInfo) -> Option<Time> {
        self.bytes -= self.info.bytes();
        if self.founder == place {
            let known = std::mem::replace(&mut self.info, about.clone());
            self.info.fill(&known);
        } else {
            self.info.fill(about);
        }
        self.bytes += self.info.bytes();
        let old = self.take(place);
        let replaced = old.as_ref().and_then(|old| old.expires);
        if let Some(old) = old {
            if old.info == rank.info {
                rank.seq = old.seq;
            } else if old.client == rank.client {
                self.leave_before(rank.client, old.seq);
            }
            rank.former = match old.former {
                Some((epoch, former)) if epoch == self.epoch => Some((epoch, former)),
                _ if self.whole_once => Some((self.epoch, old.info)),
                _ => None,
            };
        }
        self.ages.insert((rank.client, rank.seq, place));
        *self.clients.entry(rank.client).or_default() += 1;
        self.bytes += rank.bytes();
        self.ranks.insert(place, rank);
        self.grown = now;
        if self.is_whole() {
            self.epoch += 1;
            self.whole_once = true;
        }
        replaced
    }

    fn take(&mut self, place: Place) -> Option<Rank> {
        let rank = self.ranks.remove(&place)?;
        self.ages.remove(&(rank.client, rank.seq, place));
        self.bytes -= rank.bytes();
        if let Some(held) = self.clients.get_mut(&rank.client) {
            *held -= 1;
            if *held == 0 {
                self.clients.remove(&rank.client);
            }
        }
        Some(rank)
    }

    /// Marks what this client registered earlier than `seq`. Each rank is marked once.
    fn leave_before(&mut self, client: ClientAddr, seq: u64) {
        while let Some((of, age, place)) =
            self.ages.range((client, 0, Place::FIRST)..(client, seq, Place::FIRST)).next().copied()
        {
            self.ages.remove(&(of, age, place));
            if let Some(rank) = self.ranks.get_mut(&place) {
                rank.left = true;
            }
        }
    }

    /// Who answers at this place: of the present life if all of it is there, else of the last
    /// time when all were.
    fn answer(&self, place: &Place) -> Option<&RankInfo> {
        let rank = self.ranks.get(place)?;
        Some(match &rank.former {
            Some((epoch, former)) if *epoch == self.epoch => former,
            _ => &rank.info,
        })
    }

    fn remove(&mut self, place: Place) {
        if self.take(place).is_some() {
            self.whole_once = false;
        }
    }

    fn is_whole(&self) -> bool {
        self.ages.len() as u64 >= self.info.ranks()
    }

    fn stalled(&self, now: Time) -> bool {
        !self.whole_once && now.since(self.grown) >= STALLED
    }

    /// Whether nobody else has registered any of it.
    fn is_of(&self, client: ClientAddr) -> bool {
        let of = |age: Option<&(ClientAddr, u64, Place)>| age.is_none_or(|(of, ..)| *of == client);
        of(self.ages.first()) && of(self.ages.last())
    }

    fn contradiction(&self, claim: &ServerInfo) -> Option<RouteError> {
        if self.info.dsv41_spec_layout != claim.dsv41_spec_layout {
            return Some(RouteError::SpecLayout);
        }
        if self.info.decode_allocation_policy != claim.decode_allocation_policy {
            return Some(RouteError::AllocationPolicy);
        }
        self.info.contradiction(claim)
    }
}

impl Rank {
    fn bytes(&self) -> usize {
        let former = self.former.as_ref().map_or(0, |(_, info)| info.rank_ip.len());
        RANK_BYTES + self.info.rank_ip.len() + former
    }
}

impl Place {
    const FIRST: Place = Place { dp: 0, cp: 0, tp: 0, pp: 0 };
}

impl ServerInfo {
    fn ranks(&self) -> u64 {
        [self.dp_size, self.attn_cp_size, self.attn_tp_size, self.pp_size]
            .iter()
            .fold(1, |product: u64, size| product.saturating_mul(u64::from(*size)))
    }

    fn contradiction(&self, claim: &ServerInfo) -> Option<RouteError> {
        let sizes = [
            ("attn_tp_size", self.attn_tp_size, claim.attn_tp_size),
            ("attn_cp_size", self.attn_cp_size, claim.attn_cp_size),
            ("dp_size", self.dp_size, claim.dp_size),
            ("pp_size", self.pp_size, claim.pp_size),
        ];
        sizes
            .into_iter()
            .find(|(_, registered, claimed)| registered != claimed)
            .map(|(field, registered, claimed)| RouteError::Topology { field, registered, claimed })
    }

    /// Fills what it leaves open with what another rank said.
    fn fill(&mut self, other: &ServerInfo) {
        let fill = |known: &mut Option<String>, said: &Option<String>| {
            if known.is_none() {
                known.clone_from(said);
            }
        };
        fill(&mut self.kv_cache_dtype, &other.kv_cache_dtype);
        fill(&mut self.kv_layout, &other.kv_layout);
        self.prefill_http_port = self.prefill_http_port.or(other.prefill_http_port);
    }

    /// What it costs to keep: an upper bound. A value of JSON takes 64 times its text at most.
    fn bytes(&self) -> usize {
        let words =
            [self.kv_cache_dtype.as_ref(), self.kv_layout.as_ref(), Some(&self.decode_allocation_policy)];
        let words: usize = words.into_iter().flatten().map(String::len).sum();
        RANK_BYTES + words + self.dsv41_spec_layout.as_ref().map_or(0, |layout| 64 * json_len(layout))
    }
}

impl RouteJson {
    /// Every text is bounded; the body as a whole is by the server.
    fn check_lengths(&self) -> Result<(), RouteError> {
        let check = |field, got: Option<usize>, max| match got {
            Some(got) if got > max => Err(RouteError::Length { field, got, max }),
            _ => Ok(()),
        };
        check("rank_ip", Some(self.rank_ip.len()), MAX_HOST)?;
        let words = [
            ("kv_cache_dtype", &self.kv_cache_dtype),
            ("kv_layout", &self.kv_layout),
            ("load_balance_method", &self.load_balance_method),
            ("decode_allocation_policy", &self.decode_allocation_policy),
        ];
        for (field, word) in words {
            check(field, word.as_ref().map(String::len), MAX_WORD)?;
        }
        check("dsv41_spec_layout", self.dsv41_spec_layout.as_ref().map(json_len), MAX_SPEC_LAYOUT)
    }

    fn rank(&self) -> Result<(Place, RankInfo), RouteError> {
        let (dp_field, dp_rank, dp_size) = self.dp();
        let place = Place {
            dp: below(dp_field, dp_rank, dp_size)?,
            cp: below("attn_cp_rank", self.attn_cp_rank, self.attn_cp_size)?,
            tp: below("attn_tp_rank", self.attn_tp_rank, self.attn_tp_size)?,
            pp: below("pp_rank", self.pp_rank, self.pp_size)?,
        };
        let port = within("rank_port", self.rank_port, 0, i128::from(u16::MAX))?;
        Ok((place, RankInfo { rank_ip: self.rank_ip.clone(), rank_port: port as u16 }))
    }

    fn info(self, max_ranks: usize) -> Result<ServerInfo, RouteError> {
        let max = i128::from(u32::MAX);
        let (_, _, dp_size) = self.dp();
        let port = self.prefill_http_port.map(|port| within("prefill_http_port", port, 0, 65535));
        let info = ServerInfo {
            attn_tp_size: within("attn_tp_size", self.attn_tp_size, 1, max)? as u32,
            attn_cp_size: within("attn_cp_size", self.attn_cp_size, 1, max)? as u32,
            dp_size: within("dp_size", dp_size, 1, max)? as u32,
            pp_size: within("pp_size", self.pp_size, 1, max)? as u32,
            page_size: within("page_size", self.page_size, 0, i128::from(i64::MAX))? as i64,
            kv_cache_dtype: self.kv_cache_dtype,
            follow_bootstrap_room: self
                .load_balance_method
                .is_none_or(|method| method == "follow_bootstrap_room"),
            enable_dsa_cache_layer_split: self.enable_dsa_cache_layer_split.unwrap_or(false),
            dsv41_spec_layout: self.dsv41_spec_layout,
            kv_layout: self.kv_layout,
            decode_allocation_policy: self.decode_allocation_policy.unwrap_or_else(|| "early".to_owned()),
            enable_kv_cache_sharding: self.enable_kv_cache_sharding.unwrap_or(false),
            prefill_http_port: port.transpose()?.map(|port| port as i64),
            target_tp_rank: None,
            target_tp_ranks: None,
            target_cp_ranks: None,
            target_pp_ranks: None,
            required_dst_info_num: None,
            required_prefill_response_num: None,
        };
        within("number of ranks", Int(i128::from(info.ranks())), 1, max_ranks as i128)?;
        Ok(info)
    }

    /// Data parallelism is either within attention or of whole systems; SGLang tells by
    /// `system_dp_size`.
    fn dp(&self) -> (&'static str, Int, Int) {
        if self.system_dp_size == Int(1) {
            ("attn_dp_rank", self.attn_dp_rank, self.attn_dp_size)
        } else {
            ("system_dp_rank", self.system_dp_rank, self.system_dp_size)
        }
    }
}

fn json_len(value: &Value) -> usize {
    value.to_string().len()
}

fn within(field: &'static str, got: Int, min: i128, max: i128) -> Result<i128, RouteError> {
    if (min..=max).contains(&got.0) {
        Ok(got.0)
    } else {
        Err(RouteError::Range { field, got: got.0, min, max })
    }
}

fn below(field: &'static str, rank: Int, size: Int) -> Result<u32, RouteError> {
    let max = size.0.min(i128::from(u32::MAX)) - 1;
    Ok(within(field, rank, 0, max)? as u32)
}

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Int, D::Error> {
        struct IntVisitor;

        impl Visitor<'_> for IntVisitor {
            type Value = Int;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an integer")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Int, E> {
                Ok(Int(value.into()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Int, E> {
                Ok(Int(value.into()))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Int, E> {
                let number = text.trim().parse::<i64>().map(i128::from);
                let number = number.or_else(|_| text.trim().parse::<u64>().map(i128::from));
                number.map(Int).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(IntVisitor)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    fn claim(tp: (u32, u32), port: u16) -> Value {
        json!({
            "attn_tp_size": tp.0, "attn_tp_rank": tp.1, "attn_cp_size": 1, "attn_cp_rank": 0,
            "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
            "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port,
            "page_size": 16, "kv_cache_dtype": "bfloat16", "load_balance_method": "follow_bootstrap_room",
        })
    }

    fn put(table: &mut RouteTable, now: Time, claim: Value) -> Result<(), RouteError> {
        put_from("10.0.0.1", table, now, claim)
    }

    fn put_from(client: &str, table: &mut RouteTable, now: Time, claim: Value) -> Result<(), RouteError> {
        let client = ClientAddr::from(client.parse::<std::net::IpAddr>().unwrap());
        let result = table.register(now, client, serde_json::from_value(claim).unwrap());
        table.check();
        result
    }

    impl RouteTable {
        /// What is counted is what is there.
        fn check(&self) {
            let engines = || self.engine.iter().chain(&self.rival);
            for engine in engines() {
                let ranks: usize = engine.ranks.values().map(Rank::bytes).sum();
                assert_eq!(engine.bytes, engine.info.bytes() + ranks);
                assert_eq!(engine.clients.values().sum::<usize>(), engine.ranks.len());
                assert_eq!(engine.ages.len(), engine.ranks.values().filter(|rank| !rank.left).count());
                assert!(!engine.ranks.is_empty());
            }
            assert_eq!(self.bytes, engines().map(|engine| engine.bytes).sum::<usize>());
            let leased =
                engines().flat_map(|engine| engine.ranks.values()).filter(|rank| rank.expires.is_some());
            assert_eq!(self.expiries.len(), leased.count());
        }
    }

    fn table() -> RouteTable {
        let max_lease = Duration::from_secs(3600);
        RouteTable::new(RouteLimits { max_ranks: 64, max_per_client: 64, max_bytes: 1 << 20, max_lease })
    }

    /// The ports answered, or how many ranks are there.
    fn ports(table: &mut RouteTable, ranks: u32) -> Result<Vec<u16>, RouteMiss> {
        (0..ranks).map(|tp| table.rank(Time::ZERO, place(tp)).map(|rank| rank.rank_port)).collect()
    }

    fn place(tp: u32) -> Option<Place> {
        Some(Place { dp: 0, cp: 0, tp, pp: 0 })
    }

    #[test]
    fn a_repeated_registration_never_makes_the_engine_ready() {
        let mut table = table();
        for _ in 0..5 {
            put(&mut table, Time::ZERO, claim((2, 0), 1000)).unwrap();
            assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 1 }));
        }
        put(&mut table, Time::ZERO, claim((2, 1), 1001)).unwrap();
        assert!(table.info(Time::ZERO).is_ok());
        assert_eq!(table.rank(Time::ZERO, place(1)).unwrap().rank_port, 1001);
        assert_eq!(table.places(), 2);
        assert_eq!(table.rank(Time::ZERO, place(2)), Err(RouteMiss::Unknown));
    }

    #[test]
    fn entries_stay_unless_they_ask_for_a_lease() {
        let mut table = table();
        let mut leased = claim((2, 1), 1001);
        leased["lease_ttl_s"] = json!(2.5);
        put(&mut table, Time::ZERO, claim((2, 0), 1000)).unwrap();
        put(&mut table, Time::ZERO, leased).unwrap();
        assert!(table.info(Time::from_nanos(2_499_999_999)).is_ok());
        let end = Time::from_nanos(2_500_000_000);
        assert_eq!(table.next_timeout(), Some(end));
        assert_eq!(table.info(end), Err(RouteMiss::NotReady { registered: 1 }));
        for bad in [json!(0), json!(-1), json!(1e300)] {
            let mut claim = claim((2, 1), 1001);
            claim["lease_ttl_s"] = bad;
            assert_eq!(put(&mut table, end, claim), Err(RouteError::Lease));
        }
    }

    #[test]
    fn other_sizes_are_refused_until_a_known_rank_restarts_with_them() {
        let mut table = table();
        put(&mut table, Time::ZERO, claim((2, 0), 1)).unwrap();
        put(&mut table, Time::ZERO, claim((2, 1), 2)).unwrap();
        let refused = RouteError::Topology { field: "attn_tp_size", registered: 2, claimed: 4 };
        assert_eq!(put(&mut table, Time::ZERO, claim((4, 3), 3)), Err(refused));
        for rank in 0..4 {
            assert_eq!(ports(&mut table, 2), Ok(vec![1, 2]), "the former engine serves until it is replaced");
            put(&mut table, Time::ZERO, claim((4, rank), 40 + rank as u16)).unwrap();
        }
        assert_eq!(ports(&mut table, 4), Ok(vec![40, 41, 42, 43]));
        assert_eq!(table.places(), 4, "nothing is left of the former engine");
    }

    #[test]
    fn a_restarted_engine_with_another_policy_takes_over_once_complete() {
        let mut table = table();
        put(&mut table, Time::ZERO, claim((2, 0), 1)).unwrap();
        put(&mut table, Time::ZERO, claim((2, 1), 2)).unwrap();
        let other = |rank, port| {
            let mut claim = claim((2, rank), port);
            claim["decode_allocation_policy"] = json!("prefill_complete");
            claim
        };
        assert_eq!(
            put(&mut table, Time::ZERO, other(0, 1)),
            Err(RouteError::AllocationPolicy),
            "the same life"
        );
        put(&mut table, Time::ZERO, other(0, 11)).unwrap();
        assert_eq!(ports(&mut table, 2), Ok(vec![1, 2]));
        put(&mut table, Time::ZERO, other(1, 12)).unwrap();
        assert_eq!(ports(&mut table, 2), Ok(vec![11, 12]));
    }

    #[test]
    fn old_ports_leave_whatever_the_order_of_restarts_and_none_are_lost() {
        // Two ranks, killed after any number of registrations, restarted in either order.
        for (first, before, second) in [[0, 1], [1, 0]]
            .into_iter()
            .flat_map(|first| (0..=2).flat_map(move |n| [[0, 1], [1, 0]].map(|second| (first, n, second))))
        {
            let mut table = table();
            for rank in first.into_iter().take(before) {
                put(&mut table, Time::ZERO, claim((2, rank), 10 + rank as u16)).unwrap();
            }
            for rank in second {
                put(&mut table, Time::ZERO, claim((2, rank), 20 + rank as u16)).unwrap();
            }
            assert_eq!(ports(&mut table, 2), Ok(vec![20, 21]), "{first:?} {before} {second:?}");
        }
    }

    #[test]
    fn ports_known_to_be_old_are_answered_only_as_a_whole_set() {
        let mut table = table();
        for rank in 0..3 {
            put(&mut table, Time::ZERO, claim((3, rank), 10 + rank as u16)).unwrap();
        }
        // The last of them comes first: the others are older than its former life.
        put(&mut table, Time::ZERO, claim((3, 2), 22)).unwrap();
        assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]), "all of the former life");
        put(&mut table, Time::ZERO, claim((3, 0), 20)).unwrap();
        assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
        put(&mut table, Time::ZERO, claim((3, 1), 21)).unwrap();
        assert_eq!(ports(&mut table, 3), Ok(vec![20, 21, 22]));
    }

    #[test]
    fn another_clients_registration_makes_nobody_leave() {
        let mut table = table();
        put(&mut table, Time::ZERO, claim((3, 0), 10)).unwrap();
        put(&mut table, Time::ZERO, claim((3, 1), 11)).unwrap();
        put_from("10.9.9.9", &mut table, Time::ZERO, claim((3, 1), 666)).unwrap();
        put(&mut table, Time::ZERO, claim((3, 1), 11)).unwrap();
        put(&mut table, Time::ZERO, claim((3, 2), 12)).unwrap();
        assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
        // Nor does an engine of theirs push out one of ours that is not complete yet.
        put(&mut table, Time::ZERO, claim((4, 0), 40)).unwrap();
        let refused = put_from("10.9.9.9", &mut table, Time::ZERO, claim((5, 0), 50));
        assert_eq!(refused, Err(RouteError::Topology { field: "attn_tp_size", registered: 3, claimed: 5 }));
        let later = Time::ZERO + STALLED;
        put_from("10.9.9.9", &mut table, later, claim((5, 0), 50)).unwrap();
        assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
    }

    #[test]
    fn texts_places_and_bytes_are_bounded_with_both_values_named() {
        let mut small = table();
        let fields = [
            ("rank_ip", MAX_HOST),
            ("kv_cache_dtype", MAX_WORD),
            ("kv_layout", MAX_WORD),
            ("load_balance_method", MAX_WORD),
            ("decode_allocation_policy", MAX_WORD),
            ("dsv41_spec_layout", MAX_SPEC_LAYOUT - 2),
        ];
        for (field, max) in fields {
            let mut claim = claim((1, 0), 1);
            claim[field] = json!("x".repeat(max + 1));
            let json = if field == "dsv41_spec_layout" { 2 } else { 0 };
            let refused = RouteError::Length { field, got: max + 1 + json, max: max + json };
            assert_eq!(put(&mut small, Time::ZERO, claim.clone()), Err(refused));
            claim[field] = json!("x".repeat(max));
            assert_eq!(put(&mut table(), Time::ZERO, claim), Ok(()), "{field}");
        }
        assert_eq!((small.places(), small.bytes()), (0, 0));

        small.limits.max_per_client = 2;
        for rank in [0, 1, 1, 0] {
            put(&mut small, Time::ZERO, claim((4, rank), 1)).unwrap();
        }
        let full = RouteError::ClientFull { would_be: 3, max: 2 };
        assert_eq!(put(&mut small, Time::ZERO, claim((4, 2), 1)), Err(full));
        put_from("10.0.0.2", &mut small, Time::ZERO, claim((4, 2), 1)).unwrap();
        small.limits.max_bytes = small.bytes();
        let refused = put_from("10.0.0.2", &mut small, Time::ZERO, claim((4, 3), 1));
        assert!(matches!(refused, Err(RouteError::Full { would_be, max }) if would_be > max), "{refused:?}");
        assert_eq!(small.places(), 3);
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_field() {
        let mut table = table();
        for (field, value) in [
            ("attn_tp_rank", json!(2)),
            ("attn_tp_size", json!(0)),
            ("pp_rank", json!(-1)),
            ("rank_port", json!(70000)),
            ("attn_cp_size", json!(u64::MAX)),
            ("attn_tp_size", json!(65)),
        ] {
            let mut claim = claim((2, 0), 1);
            claim[field] = value;
            assert!(matches!(put(&mut table, Time::ZERO, claim), Err(RouteError::Range { .. })), "{field}");
        }
        assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 0 }));
    }

    #[test]
    fn integers_are_read_as_python_reads_them() {
        let read = |value| serde_json::from_value::<Int>(value).ok();
        assert_eq!(read(json!("8998")), Some(Int(8998)));
        assert_eq!(read(json!(-1)), Some(Int(-1)));
        assert_eq!(read(json!(u64::MAX)), Some(Int(u64::MAX.into())));
        assert_eq!(read(json!("18446744073709551615")), Some(Int(u64::MAX.into())));
        assert_eq!(read(json!("x")), None);
        assert_eq!(read(json!(null)), None);
        assert_eq!(read(json!(1.5)), None);
    }
}
