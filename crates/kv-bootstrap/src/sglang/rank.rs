//! [`SglangRank`]: what a rank of SGLang's prefill engine says about itself.

use bytes::Bytes;
use kv_core::{Parallel, RankRecord, ServiceOffer, WorkerRole};
use serde_json::{Value, json};

use super::claim::{Int, RouteJson};
use super::error::SglangRankError;

/// The name of the service under which a rank record holds a [`SglangRank`].
pub const SGLANG_SERVICE: &str = "sglang";
/// Longest host name or address (`rank_ip`), in bytes: that of a domain name.
pub(crate) const MAX_HOST: usize = 255;
/// Longest name of a data type, layout, policy or load balancing method, in bytes.
pub(crate) const MAX_WORD: usize = 128;
/// Longest `dsv41_spec_layout`, in bytes of JSON.
pub(crate) const MAX_SPEC_LAYOUT: usize = 4096;

/// A prefill rank as SGLang's decode workers know the rank: the body of `PUT /route`, and the data of an offer
/// with the service name [`SGLANG_SERVICE`] in a [`RankRecord`]. The bytes are the same JSON in both.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SglangRank {
    /// The rank's place: `attn_tp` as tensor, `attn_cp` as prefill-context, `pp` as pipeline and `attn_dp` (or
    /// `system_dp`) as data parallelism.
    pub parallel: Parallel,
    /// True if whole systems are the replicas (`system_dp_size` above 1), false if the replicas are those of
    /// attention.
    pub system_dp: bool,
    /// The host or address of the rank's ZeroMQ PULL socket; at most 255 bytes.
    pub rank_ip: String,
    /// The port of the rank's ZeroMQ PULL socket.
    pub rank_port: u16,
    /// Tokens of a page; at most `i64::MAX`. A decode worker with another page size refuses the engine.
    pub page_size: u64,
    /// The data type of the cache, as SGLang writes the type (`torch.bfloat16`); at most 128 bytes. A decode
    /// worker with another type refuses the engine; `None` passes.
    pub kv_cache_dtype: Option<String>,
    /// The layout of the cache, for models with several; at most 128 bytes.
    pub kv_layout: Option<String>,
    /// The layout of speculative decoding with DeepSeek V4.1; at most 4096 bytes of JSON.
    pub dsv41_spec_layout: Option<Value>,
    /// True if the replica of a request is its room modulo the number of replicas. If false, the prefill worker
    /// says by `/register_dp_rank` which replica serves a room.
    pub follow_bootstrap_room: bool,
    /// True if a cache of sparse attention is split by layers between ranks (SGLang's `enable_dsa_cache_layer_split`).
    pub dsa_cache_layer_split: bool,
    /// True if each rank holds only a part of the pages (SGLang's `enable_kv_cache_sharding`).
    pub kv_cache_sharding: bool,
    /// The port of the engine's own HTTP server, where a decode worker can have a prompt computed again.
    pub prefill_http_port: Option<u16>,
    /// When a decode worker allocates its pages: `early`, or `prefill_complete`; at most 128 bytes. Both sides
    /// must have the same policy.
    pub decode_allocation_policy: String,
}

impl SglangRank {
    /// A rank at this address, alone in its engine, that follows the room and allocates early.
    pub fn new(rank_ip: impl Into<String>, rank_port: u16, page_size: u64) -> SglangRank {
        SglangRank {
            parallel: Parallel::default(),
            system_dp: false,
            rank_ip: rank_ip.into(),
            rank_port,
            page_size,
            kv_cache_dtype: None,
            kv_layout: None,
            dsv41_spec_layout: None,
            follow_bootstrap_room: true,
            dsa_cache_layer_split: false,
            kv_cache_sharding: false,
            prefill_http_port: None,
            decode_allocation_policy: "early".to_owned(),
        }
    }

    /// The same with some fields changed: `SglangRank::new(ip, port, 16).with(|rank| rank.parallel.tp_size = 2)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The JSON of `PUT /route`, as SGLang 0.5.23 sends it.
    pub fn encode(&self) -> Bytes {
        let Parallel { tp_size, tp_rank, pp_size, pp_rank, dp_size, dp_rank, pcp_size, pcp_rank, .. } =
            self.parallel;
        let (attn_dp, system_dp) =
            if self.system_dp { ((1, 0), (dp_size, dp_rank)) } else { ((dp_size, dp_rank), (1, 0)) };
        let method = if self.follow_bootstrap_room { "follow_bootstrap_room" } else { "round_robin" };
        let body = json!({
            "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": pcp_size, "attn_cp_rank": pcp_rank,
            "attn_dp_size": attn_dp.0, "attn_dp_rank": attn_dp.1, "pp_size": pp_size, "pp_rank": pp_rank,
            "system_dp_size": system_dp.0, "system_dp_rank": system_dp.1,
            "rank_ip": self.rank_ip, "rank_port": self.rank_port, "page_size": self.page_size,
            "kv_cache_dtype": self.kv_cache_dtype, "kv_layout": self.kv_layout,
            "dsv41_spec_layout": self.dsv41_spec_layout, "load_balance_method": method,
            "enable_dsa_cache_layer_split": self.dsa_cache_layer_split,
            "enable_kv_cache_sharding": self.kv_cache_sharding,
            "prefill_http_port": self.prefill_http_port,
            "decode_allocation_policy": self.decode_allocation_policy,
        });
        Bytes::from(body.to_string())
    }

    /// The rank that the JSON describes, with every field in its range. Unknown fields are ignored.
    pub fn decode(bytes: &[u8]) -> Result<SglangRank, SglangRankError> {
        let claim: RouteJson =
            serde_json::from_slice(bytes).map_err(|error| SglangRankError::Json(error.to_string()))?;
        claim.into_rank()
    }

    /// The rank as an offer of the service [`SGLANG_SERVICE`], version 1, for a [`RankRecord`].
    pub fn offer(&self) -> ServiceOffer {
        let (service, compatibility) = (SGLANG_SERVICE.to_owned(), String::new());
        ServiceOffer { service, min: 1, max: 1, compatibility, data: self.encode() }
    }

    /// The rank that a prefill worker's record offers to SGLang's decode workers; `None` for a record without
    /// such an offer, and for a worker of another role.
    pub fn of(record: &RankRecord) -> Option<Result<SglangRank, SglangRankError>> {
        let offer = record.offers.iter().find(|offer| offer.service == SGLANG_SERVICE)?;
        (record.role == WorkerRole::Prefill).then(|| {
            let rank = SglangRank::decode(&offer.data)?;
            for (offered, recorded) in rank.parallel.groups().into_iter().zip(record.parallel.groups()) {
                for (field, offered, recorded) in
                    [(offered.0, offered.2, recorded.2), (offered.1, offered.3, recorded.3)]
                {
                    if offered != recorded {
                        return Err(SglangRankError::Place { field, offered, recorded });
                    }
                }
            }
            Ok(rank)
        })
    }
}

impl RouteJson {
    /// The rank that the body describes, if every field is in its range.
    pub(crate) fn into_rank(self) -> Result<SglangRank, SglangRankError> {
        self.check_lengths()?;
        let (dp_size, dp_rank_field, dp_rank) = self.dp();
        let max = i128::from(u32::MAX);
        let below = |field, rank: Int, size: Int| {
            within(field, rank, 0, size.0.min(max).saturating_sub(1)).map(|rank| rank as u32)
        };
        let size = |field, size| within(field, size, 1, max).map(|size| size as u32);
        let (tp_rank, tp_size) = (self.attn_tp_rank, self.attn_tp_size);
        let (cp_rank, cp_size) = (self.attn_cp_rank, self.attn_cp_size);
        let mut parallel = Parallel::default();
        parallel.tp_rank = below("attn_tp_rank", tp_rank, tp_size)?;
        parallel.tp_size = size("attn_tp_size", tp_size)?;
        parallel.pcp_rank = below("attn_cp_rank", cp_rank, cp_size)?;
        parallel.pcp_size = size("attn_cp_size", cp_size)?;
        parallel.dp_rank = below(dp_rank_field, dp_rank, dp_size)?;
        parallel.dp_size = size("dp_size", dp_size)?;
        parallel.pp_rank = below("pp_rank", self.pp_rank, self.pp_size)?;
        parallel.pp_size = size("pp_size", self.pp_size)?;
        let port = |field, port| within(field, port, 0, i128::from(u16::MAX)).map(|port| port as u16);
        Ok(SglangRank {
            parallel,
            system_dp: self.system_dp_size != Int(1),
            rank_port: port("rank_port", self.rank_port)?,
            rank_ip: self.rank_ip,
            page_size: within("page_size", self.page_size, 0, i128::from(i64::MAX))? as u64,
            kv_cache_dtype: self.kv_cache_dtype,
            kv_layout: self.kv_layout,
            dsv41_spec_layout: self.dsv41_spec_layout,
            follow_bootstrap_room: self
                .load_balance_method
                .is_none_or(|method| method == "follow_bootstrap_room"),
            dsa_cache_layer_split: self.enable_dsa_cache_layer_split.unwrap_or(false),
            kv_cache_sharding: self.enable_kv_cache_sharding.unwrap_or(false),
            prefill_http_port: self
                .prefill_http_port
                .map(|number| port("prefill_http_port", number))
                .transpose()?,
            decode_allocation_policy: self.decode_allocation_policy.unwrap_or_else(|| "early".to_owned()),
        })
    }

    /// Refuses a text that is too long. (The server bounds the body as a whole.)
    fn check_lengths(&self) -> Result<(), SglangRankError> {
        let check = |field, got: Option<usize>, max| match got {
            Some(got) if got > max => Err(SglangRankError::Length { field, got, max }),
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

    /// The data-parallel size, and the rank with the rank's field. Data parallelism is either within attention
    /// or of whole systems; SGLang says which by `system_dp_size`.
    fn dp(&self) -> (Int, &'static str, Int) {
        if self.system_dp_size == Int(1) {
            (self.attn_dp_size, "attn_dp_rank", self.attn_dp_rank)
        } else {
            (self.system_dp_size, "system_dp_rank", self.system_dp_rank)
        }
    }
}

pub(super) fn json_len(value: &Value) -> usize {
    value.to_string().len()
}

pub(super) fn within(field: &'static str, got: Int, min: i128, max: i128) -> Result<i128, SglangRankError> {
    if (min..=max).contains(&got.0) {
        Ok(got.0)
    } else {
        Err(SglangRankError::Range { field, got: got.0, min, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::record;

    fn rank() -> SglangRank {
        SglangRank::new("10.0.0.1", 7000, 64).with(|rank| {
            rank.parallel.tp_size = 4;
            rank.parallel.tp_rank = 3;
            rank.parallel.dp_size = 2;
            rank.parallel.dp_rank = 1;
            rank.system_dp = true;
            rank.kv_cache_dtype = Some("torch.bfloat16".to_owned());
            rank.dsv41_spec_layout = Some(json!({"layers": [1, 2]}));
            rank.follow_bootstrap_room = false;
            rank.kv_cache_sharding = true;
            rank.prefill_http_port = Some(30000);
            rank.decode_allocation_policy = "prefill_complete".to_owned();
        })
    }

    #[test]
    fn a_rank_is_equal_after_a_trip_through_sglangs_json() {
        for system_dp in [true, false] {
            let sent = rank().with(|rank| rank.system_dp = system_dp);
            assert_eq!(SglangRank::decode(&sent.encode()), Ok(sent));
        }
        assert!(matches!(SglangRank::decode(b"{}"), Err(SglangRankError::Json(_))));
    }

    #[test]
    fn an_offer_at_another_place_than_its_record_is_refused_by_field() {
        let mut record = record("p", 7, 1, (4, 3), (1, 0), (2, 1));
        assert_eq!(SglangRank::of(&record), None);
        record.offers.push(rank().offer());
        assert_eq!(SglangRank::of(&record), Some(Ok(rank())));
        record.parallel.tp_rank = 2;
        let refused = SglangRankError::Place { field: "tp_rank", offered: 3, recorded: 2 };
        assert_eq!(SglangRank::of(&record), Some(Err(refused)));
        record.role = WorkerRole::Decode;
        assert_eq!(SglangRank::of(&record), None);
    }
}
