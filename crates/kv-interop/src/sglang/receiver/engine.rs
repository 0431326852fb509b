//! The prefill engine that a lookup has found: whether its cache fits, and which of its ranks serve this worker.

use kv_core::{BootstrapError, Cause, Incarnation, Mismatch, RankRecord, WorkerId};

use crate::sglang::cache::OurCache;
use crate::sglang::rank::Rank;
use crate::sglang::ranks::{Targets, mismatch, unique_rank};

/// One life of a prefill rank, by its address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) ip: String,
    pub(crate) port: u16,
    pub(crate) incarnation: Incarnation,
}

/// A prefill rank that a session has to tell its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Serving {
    pub(crate) place: Place,
    pub(crate) worker: WorkerId,
    /// The rank's number in its messages.
    pub(crate) unique: u32,
    /// True if the rank writes nothing.
    pub(crate) dummy: bool,
}

/// The prefill ranks that serve this worker, and how many decode ranks register with each of them. Fails if the
/// engine's cache does not fit, or if a rank is missing.
pub(super) fn serving(
    ours: &OurCache,
    records: &[RankRecord],
    replica_given: bool,
) -> Result<(Vec<Serving>, u32), Cause> {
    let first = records.first().ok_or(Cause::Bootstrap(BootstrapError::UnknownRank))?;
    let targets = Targets::new(&ours.geometry.parallel, &first.parallel, ours.latent);
    let targets = targets.map_err(Cause::Incompatible)?;
    let mut serving = Vec::new();
    for record in records {
        let rank = Rank::of(record)?;
        check(ours, &rank, replica_given).map_err(Cause::Incompatible)?;
        let Some(dummy) = targets.role_of(&rank.parallel) else { continue };
        let place = Place { ip: rank.rank_ip, port: rank.rank_port, incarnation: record.incarnation };
        let (worker, unique) = (record.worker.clone(), unique_rank(&rank.parallel));
        serving.push(Serving { place, worker, unique, dummy });
    }
    if serving.len() != targets.count() {
        let found = mismatch("ranks that serve this rank", targets.count(), serving.len());
        return Err(Cause::Incompatible(found));
    }
    Ok((serving, targets.required))
}

fn check(ours: &OurCache, rank: &Rank, replica_given: bool) -> Result<(), Mismatch> {
    let page_size = u64::from(ours.geometry.page_size);
    if rank.page_size != page_size {
        return Err(mismatch("page_size (--page-size)", page_size, rank.page_size));
    }
    if let Some(dtype) = rank.kv_cache_dtype.as_ref().filter(|dtype| **dtype != ours.dtype) {
        return Err(mismatch("kv_cache_dtype (--kv-cache-dtype)", &ours.dtype, dtype));
    }
    if let (Some(here), Some(there)) = (&ours.kv_layout, &rank.kv_layout)
        && here != there
    {
        return Err(mismatch("kv_layout", here, there));
    }
    for (field, set) in [
        ("enable_kv_cache_sharding (--enable-kv-cache-sharding)", rank.enable_kv_cache_sharding),
        ("enable_dsa_cache_layer_split", rank.enable_dsa_cache_layer_split),
    ] {
        if set == Some(true) {
            return Err(mismatch(field, false, true));
        }
    }
    if let Some(policy) = rank.decode_allocation_policy.as_ref().filter(|policy| *policy != "early") {
        let field = "decode_allocation_policy (--disaggregation-decode-allocation-policy)";
        return Err(mismatch(field, "early", policy));
    }
    let method = rank.load_balance_method.as_deref().unwrap_or("follow_bootstrap_room");
    if rank.parallel.dp_size > 1 && !replica_given && method != "follow_bootstrap_room" {
        let ours = "follow_bootstrap_room, or prefill_dp_rank in the session's options";
        return Err(mismatch("load_balance_method (--load-balance-method)", ours, method));
    }
    Ok(())
}
