//! SGLang's JSON: what a prefill rank says about itself, and what a decode worker is told.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::error::{RouteError, SglangRankError};
use super::rank::{MAX_HOST, SglangRank, json_len};

/// The body of `PUT /route`. Unknown fields are ignored.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct RouteJson {
    pub(super) attn_tp_size: Int,
    pub(super) attn_tp_rank: Int,
    pub(super) attn_cp_size: Int,
    pub(super) attn_cp_rank: Int,
    pub(super) attn_dp_size: Int,
    pub(super) attn_dp_rank: Int,
    pub(super) pp_size: Int,
    pub(super) pp_rank: Int,
    pub(super) system_dp_size: Int,
    pub(super) system_dp_rank: Int,
    pub(super) rank_ip: String,
    pub(super) rank_port: Int,
    pub(super) page_size: Int,
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) kv_cache_dtype: Option<String>,
    pub(super) kv_layout: Option<String>,
    pub(super) dsv41_spec_layout: Option<Value>,
    pub(super) load_balance_method: Option<String>,
    pub(super) enable_dsa_cache_layer_split: Option<bool>,
    pub(super) enable_kv_cache_sharding: Option<bool>,
    pub(super) prefill_http_port: Option<Int>,
    pub(super) decode_allocation_policy: Option<String>,
    /// Not in SGLang: the entry ends after so many seconds unless the rank registers again. Without this
    /// field an entry stays, because SGLang's ranks register only once.
    pub(super) lease_ttl_s: Option<f64>,
}

/// The answer to `GET /route` for the engine, as any server may give it.
#[derive(Debug, Deserialize)]
pub(crate) struct InfoJson {
    attn_tp_size: Int,
    attn_cp_size: Int,
    dp_size: Int,
    pp_size: Int,
    page_size: Option<Int>,
    kv_cache_dtype: Option<String>,
    kv_layout: Option<String>,
    dsv41_spec_layout: Option<Value>,
    follow_bootstrap_room: bool,
    enable_dsa_cache_layer_split: Option<bool>,
    enable_kv_cache_sharding: Option<bool>,
    prefill_http_port: Option<Int>,
    decode_allocation_policy: Option<String>,
}

/// The answer to `GET /route` for a rank, as any server may give it.
#[derive(Debug, Deserialize)]
pub(crate) struct RankInfoJson {
    rank_ip: String,
    rank_port: Int,
}

/// An integer as Python's `int()` accepts it: a JSON number, or a text of decimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Int(pub(crate) i128);

/// What a decode worker is told about the engine (SGLang: `PrefillServerInfo`).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ServerInfo {
    attn_tp_size: u32,
    attn_cp_size: u32,
    dp_size: u32,
    pp_size: u32,
    page_size: u64,
    kv_cache_dtype: Option<String>,
    follow_bootstrap_room: bool,
    enable_dsa_cache_layer_split: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    dsv41_spec_layout: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_layout: Option<String>,
    decode_allocation_policy: String,
    enable_kv_cache_sharding: bool,
    prefill_http_port: Option<u16>,
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
    pub(super) rank_ip: String,
    pub(super) rank_port: u16,
}

/// Bytes counted for a rank beside its host name: its share of the maps. An upper bound, not a measurement.
pub(super) const RANK_BYTES: usize = 512;

impl InfoJson {
    /// The first rank of the engine, without its address.
    pub(crate) fn into_rank(self) -> Result<SglangRank, SglangRankError> {
        let (zero, one) = (Int(0), Int(1));
        let method = if self.follow_bootstrap_room { "follow_bootstrap_room" } else { "round_robin" };
        let claim = RouteJson {
            attn_tp_size: self.attn_tp_size,
            attn_tp_rank: zero,
            attn_cp_size: self.attn_cp_size,
            attn_cp_rank: zero,
            attn_dp_size: self.dp_size,
            attn_dp_rank: zero,
            pp_size: self.pp_size,
            pp_rank: zero,
            system_dp_size: one,
            system_dp_rank: zero,
            rank_ip: String::new(),
            rank_port: zero,
            page_size: self.page_size.unwrap_or(zero),
            kv_cache_dtype: self.kv_cache_dtype,
            kv_layout: self.kv_layout,
            dsv41_spec_layout: self.dsv41_spec_layout,
            load_balance_method: Some(method.to_owned()),
            enable_dsa_cache_layer_split: self.enable_dsa_cache_layer_split,
            enable_kv_cache_sharding: self.enable_kv_cache_sharding,
            prefill_http_port: self.prefill_http_port,
            decode_allocation_policy: self.decode_allocation_policy,
            lease_ttl_s: None,
        };
        claim.into_rank()
    }
}

impl RankInfoJson {
    /// The host and the port, if both can be an address.
    pub(crate) fn into_addr(self) -> Option<(String, u16)> {
        let port = u16::try_from(self.rank_port.0).ok().filter(|port| *port != 0)?;
        let host = (1..=MAX_HOST).contains(&self.rank_ip.len());
        (host && self.rank_ip.chars().all(|char| char.is_ascii_graphic())).then_some((self.rank_ip, port))
    }
}

impl ServerInfo {
    pub(super) fn of(rank: &SglangRank) -> ServerInfo {
        ServerInfo {
            attn_tp_size: rank.parallel.tp_size,
            attn_cp_size: rank.parallel.pcp_size,
            dp_size: rank.parallel.dp_size,
            pp_size: rank.parallel.pp_size,
            page_size: rank.page_size,
            kv_cache_dtype: rank.kv_cache_dtype.clone(),
            follow_bootstrap_room: rank.follow_bootstrap_room,
            enable_dsa_cache_layer_split: rank.dsa_cache_layer_split,
            dsv41_spec_layout: rank.dsv41_spec_layout.clone(),
            kv_layout: rank.kv_layout.clone(),
            decode_allocation_policy: rank.decode_allocation_policy.clone(),
            enable_kv_cache_sharding: rank.kv_cache_sharding,
            prefill_http_port: rank.prefill_http_port,
            target_tp_rank: None,
            target_tp_ranks: None,
            target_cp_ranks: None,
            target_pp_ranks: None,
            required_dst_info_num: None,
            required_prefill_response_num: None,
        }
    }

    pub(super) fn ranks(&self) -> u64 {
        [self.dp_size, self.attn_cp_size, self.attn_tp_size, self.pp_size]
            .iter()
            .fold(1, |product: u64, size| product.saturating_mul(u64::from(*size)))
    }

    pub(super) fn contradiction(&self, claim: &ServerInfo) -> Option<RouteError> {
        if self.dsv41_spec_layout != claim.dsv41_spec_layout {
            return Some(RouteError::SpecLayout);
        }
        if self.decode_allocation_policy != claim.decode_allocation_policy {
            return Some(RouteError::AllocationPolicy);
        }
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

    /// Fills the fields that are open with what another rank said.
    pub(super) fn fill(&mut self, other: &ServerInfo) {
        let fill = |known: &mut Option<String>, said: &Option<String>| {
            if known.is_none() {
                known.clone_from(said);
            }
        };
        fill(&mut self.kv_cache_dtype, &other.kv_cache_dtype);
        fill(&mut self.kv_layout, &other.kv_layout);
        self.prefill_http_port = self.prefill_http_port.or(other.prefill_http_port);
    }

    /// Bytes that the value takes: an upper bound. A JSON value takes 64 times its text at most.
    pub(super) fn bytes(&self) -> usize {
        let words =
            [self.kv_cache_dtype.as_ref(), self.kv_layout.as_ref(), Some(&self.decode_allocation_policy)];
        let words: usize = words.into_iter().flatten().map(String::len).sum();
        RANK_BYTES + words + self.dsv41_spec_layout.as_ref().map_or(0, |layout| 64 * json_len(layout))
    }
}

impl std::fmt::Display for RankInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.rank_ip, self.rank_port)
    }
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
mod tests {
    use super::*;
    use serde_json::json;

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
