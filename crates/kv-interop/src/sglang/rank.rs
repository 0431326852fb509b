//! What an SGLang prefill rank has told the bootstrap server about itself.

use kv_core::{BootstrapError, Cause, Parallel, RankRecord};
use serde::Deserialize;

/// The name of SGLang's service in lookups and rank records.
pub(crate) const SERVICE: &str = "sglang";

/// The body of `PUT /route`, as far as a decode worker needs the body.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Rank {
    pub(crate) rank_ip: String,
    pub(crate) rank_port: u16,
    pub(crate) page_size: u64,
    #[serde(default)]
    pub(crate) kv_cache_dtype: Option<String>,
    #[serde(default)]
    pub(crate) kv_layout: Option<String>,
    #[serde(default)]
    pub(crate) load_balance_method: Option<String>,
    #[serde(default)]
    pub(crate) enable_kv_cache_sharding: Option<bool>,
    #[serde(default)]
    pub(crate) enable_dsa_cache_layer_split: Option<bool>,
    #[serde(default)]
    pub(crate) decode_allocation_policy: Option<String>,
    #[serde(skip)]
    pub(crate) parallel: Parallel,
}

impl Rank {
    /// The rank in the record's offer.
    pub(crate) fn of(record: &RankRecord) -> Result<Rank, Cause> {
        let offer = record.offers.iter().find(|offer| offer.service == SERVICE);
        let offer = offer.ok_or(Cause::Bootstrap(BootstrapError::UnknownRank))?;
        let malformed = |_| Cause::Bootstrap(BootstrapError::Malformed("the sglang offer of a rank"));
        let rank: Rank = serde_json::from_slice(&offer.data).map_err(malformed)?;
        Ok(Rank { parallel: record.parallel, ..rank })
    }
}
