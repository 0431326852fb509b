//! The prefill engine that a lookup has found: whether its cache fits, and which of its ranks serve this worker.
//!
//! A prefill rank of SGLang stops serving everybody when a registration does not fit. What a rank tells the bootstrap
//! server is therefore compared before the rank hears anything. The rank does not tell the number of its layers and
//! heads: both sides must be configured with the same model.

use kv_bootstrap::SglangRank;
use kv_core::{BootstrapError, Cause, Incarnation, MemoryKind, Mismatch, Parallel, RankRecord, WorkerId};

use crate::cache::differs;
use crate::sglang::cache::OurCache;
use crate::sglang::ranks::{Targets, unique_rank};

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
pub(super) fn serving(ours: &OurCache, records: &[RankRecord]) -> Result<(Vec<Serving>, u32), Cause> {
    let first = records.first().ok_or(Cause::Bootstrap(BootstrapError::UnknownRank))?;
    let targets = Targets::new(&ours.geometry.parallel, &first.parallel, ours.latent);
    let targets = targets.map_err(Cause::Incompatible)?;
    check_memory(ours, &first.parallel).map_err(Cause::Incompatible)?;
    let mut serving = Vec::new();
    for record in records {
        let rank = SglangRank::of(record).ok_or(Cause::Bootstrap(BootstrapError::UnknownRank))?;
        let malformed = |_| Cause::Bootstrap(BootstrapError::Malformed("the sglang offer of a rank"));
        let rank = rank.map_err(malformed)?;
        check(ours, &rank).map_err(Cause::Incompatible)?;
        let Some(dummy) = targets.role_of(&rank.parallel) else { continue };
        let place = Place { ip: rank.rank_ip, port: rank.rank_port, incarnation: record.incarnation };
        let (worker, unique) = (record.worker.clone(), unique_rank(&rank.parallel));
        serving.push(Serving { place, worker, unique, dummy });
    }
    if serving.len() != targets.count() {
        let found = differs("ranks that serve this rank", targets.count(), serving.len());
        return Err(Cause::Incompatible(found));
    }
    Ok((serving, targets.required))
}

/// SGLang cuts heads only for memory of devices.
fn check_memory(ours: &OurCache, theirs: &Parallel) -> Result<(), Mismatch> {
    let kv = &ours.geometry.regions[ours.geometry.kv_regions()];
    let host = kv.iter().any(|region| region.memory != MemoryKind::Vram);
    let (here, there) = (ours.geometry.parallel.tp_size, theirs.tp_size);
    if here != there && host && !ours.latent {
        let theirs = format!("VRAM, where attn_tp_size differs ({here} here, {there} there)");
        return Err(differs("kv_data_mem_kinds", "DRAM", theirs));
    }
    Ok(())
}

fn check(ours: &OurCache, rank: &SglangRank) -> Result<(), Mismatch> {
    let page_size = u64::from(ours.geometry.page_size);
    if rank.page_size != page_size {
        return Err(differs("page_size (--page-size)", page_size, rank.page_size));
    }
    if let Some(dtype) = rank.kv_cache_dtype.as_ref().filter(|dtype| **dtype != ours.dtype) {
        return Err(differs("kv_cache_dtype (--kv-cache-dtype)", &ours.dtype, dtype));
    }
    if let (Some(here), Some(there)) = (&ours.kv_layout, &rank.kv_layout)
        && here != there
    {
        return Err(differs("kv_layout", here, there));
    }
    if let Some(layout) = &rank.dsv41_spec_layout {
        return Err(differs("dsv41_spec_layout", "none", layout));
    }
    for (field, set) in [
        ("enable_kv_cache_sharding (--enable-kv-cache-sharding)", rank.kv_cache_sharding),
        ("enable_dsa_cache_layer_split", rank.dsa_cache_layer_split),
    ] {
        if set {
            return Err(differs(field, false, true));
        }
    }
    if rank.decode_allocation_policy != "early" {
        let field = "decode_allocation_policy (--disaggregation-decode-allocation-policy)";
        return Err(differs(field, "early", &rank.decode_allocation_policy));
    }
    Ok(())
}
