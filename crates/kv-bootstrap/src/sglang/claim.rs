//! SGLang's JSON: what a prefill rank says about itself, and what a decode worker is told.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::error::RouteError;
use crate::place::Place;

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
    /// Not in SGLang: the entry ends after so many seconds unless the rank registers again. Without this
    /// field an entry stays, because SGLang's ranks register only once.
    pub(super) lease_ttl_s: Option<f64>,
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
    pub(super) rank_ip: String,
    pub(super) rank_port: u16,
}

/// Longest host name or address (`rank_ip`), in bytes: that of a domain name.
pub(super) const MAX_HOST: usize = 255;
/// Longest name of a data type, layout, policy or load balancing method, in bytes.
pub(super) const MAX_WORD: usize = 128;
/// Longest `dsv41_spec_layout`, in bytes of JSON.
pub(super) const MAX_SPEC_LAYOUT: usize = 4096;
/// Bytes counted for a rank beside its host name: its share of the maps. An upper bound, not a measurement.
pub(super) const RANK_BYTES: usize = 512;
impl ServerInfo {
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

impl RouteJson {
    /// Refuses a text that is too long. (The server bounds the body as a whole.)
    pub(super) fn check_lengths(&self) -> Result<(), RouteError> {
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

    pub(super) fn rank(&self) -> Result<(Place, RankInfo), RouteError> {
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

    pub(super) fn info(self, max_ranks: usize) -> Result<ServerInfo, RouteError> {
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

    /// The data-parallel rank and size, with the field's name. Data parallelism is either within attention or
    /// of whole systems; SGLang says which by `system_dp_size`.
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
