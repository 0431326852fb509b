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
    #[error("lease_ttl_s must be a positive number of seconds")]
    Lease,
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

/// The engine's ranks.
#[derive(Debug)]
pub(crate) struct RouteTable {
    max_ranks: usize,
    /// What the first rank said about the engine, and where that rank stands. `Some` exactly
    /// while a rank is registered.
    engine: Option<(Place, ServerInfo)>,
    ranks: BTreeMap<Place, (RankInfo, Option<Time>)>,
    expiries: BTreeSet<(Time, Place)>,
}

impl RouteTable {
    pub(crate) fn new(max_ranks: usize) -> RouteTable {
        RouteTable { max_ranks, engine: None, ranks: BTreeMap::new(), expiries: BTreeSet::new() }
    }

    /// Registers a rank, or replaces what is known of it.
    ///
    /// The first rank fixes the sizes. A rank that is registered already and now claims other
    /// sizes belongs to a restarted engine: all ranks of the former one leave.
    pub(crate) fn register(&mut self, now: Time, claim: RouteJson) -> Result<(), RouteError> {
        self.expire(now);
        let (place, rank) = claim.rank()?;
        let expires = match claim.lease_ttl_s {
            None => None,
            Some(secs) if secs > 0.0 => {
                Some(now + Duration::try_from_secs_f64(secs).map_err(|_| RouteError::Lease)?)
            }
            Some(_) => return Err(RouteError::Lease),
        };
        let mut info = claim.info(self.max_ranks)?;
        let mut founder = place;
        if let Some((first, known)) = &self.engine {
            if known.dsv41_spec_layout != info.dsv41_spec_layout {
                return Err(RouteError::SpecLayout);
            }
            if known.decode_allocation_policy != info.decode_allocation_policy {
                return Err(RouteError::AllocationPolicy);
            }
            match known.contradiction(&info) {
                Some(_) if self.ranks.contains_key(&place) => self.clear(),
                Some(contradiction) => return Err(contradiction),
                None => {
                    founder = *first;
                    info = if founder == place { info.or(known) } else { known.clone().or(&info) };
                }
            }
        }
        self.remove(place);
        self.engine = Some((founder, info));
        self.ranks.insert(place, (rank, expires));
        self.expiries.extend(expires.map(|expires| (expires, place)));
        Ok(())
    }

    /// The engine, once all its ranks are there.
    pub(crate) fn info(&mut self, now: Time) -> Result<&ServerInfo, RouteMiss> {
        self.expire(now);
        let registered = self.ranks.len();
        match &self.engine {
            Some((_, info)) if registered as u64 >= info.ranks() => Ok(info),
            _ => Err(RouteMiss::NotReady { registered }),
        }
    }

    /// One rank, once all are there.
    pub(crate) fn rank(&mut self, now: Time, place: Option<Place>) -> Result<&RankInfo, RouteMiss> {
        self.info(now)?;
        let rank = place.and_then(|place| self.ranks.get(&place));
        rank.map(|(rank, _)| rank).ok_or(RouteMiss::Unknown)
    }

    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((expires, place)) = self.expiries.first().copied()
            && expires <= now
        {
            self.remove(place);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.expiries.first().map(|(expires, _)| *expires)
    }

    fn remove(&mut self, place: Place) {
        if let Some((_, Some(expires))) = self.ranks.remove(&place) {
            self.expiries.remove(&(expires, place));
        }
        if self.ranks.is_empty() {
            self.engine = None;
        }
    }

    fn clear(&mut self) {
        self.engine = None;
        self.ranks.clear();
        self.expiries.clear();
    }
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
    fn or(mut self, other: &ServerInfo) -> ServerInfo {
        self.kv_cache_dtype = self.kv_cache_dtype.or_else(|| other.kv_cache_dtype.clone());
        self.kv_layout = self.kv_layout.or_else(|| other.kv_layout.clone());
        self.prefill_http_port = self.prefill_http_port.or(other.prefill_http_port);
        self
    }
}

impl RouteJson {
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
        table.register(now, serde_json::from_value(claim).unwrap())
    }

    fn place(tp: u32) -> Option<Place> {
        Some(Place { dp: 0, cp: 0, tp, pp: 0 })
    }

    #[test]
    fn a_repeated_registration_never_makes_the_engine_ready() {
        let mut table = RouteTable::new(64);
        for _ in 0..5 {
            put(&mut table, Time::ZERO, claim((2, 0), 1000)).unwrap();
            assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 1 }));
        }
        put(&mut table, Time::ZERO, claim((2, 1), 1001)).unwrap();
        assert!(table.info(Time::ZERO).is_ok());
        assert_eq!(table.rank(Time::ZERO, place(1)).unwrap().rank_port, 1001);
        put(&mut table, Time::ZERO, claim((2, 1), 2001)).unwrap();
        assert_eq!(table.rank(Time::ZERO, place(1)).unwrap().rank_port, 2001);
        assert_eq!(table.rank(Time::ZERO, place(2)), Err(RouteMiss::Unknown));
    }

    #[test]
    fn entries_stay_unless_they_ask_for_a_lease() {
        let mut table = RouteTable::new(64);
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
        let mut table = RouteTable::new(64);
        put(&mut table, Time::ZERO, claim((2, 0), 1)).unwrap();
        put(&mut table, Time::ZERO, claim((2, 1), 2)).unwrap();
        let refused = RouteError::Topology { field: "attn_tp_size", registered: 2, claimed: 4 };
        assert_eq!(put(&mut table, Time::ZERO, claim((4, 3), 3)), Err(refused));
        put(&mut table, Time::ZERO, claim((4, 0), 4)).unwrap();
        put(&mut table, Time::ZERO, claim((4, 3), 3)).unwrap();
        assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 2 }));
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_field() {
        let mut table = RouteTable::new(64);
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
