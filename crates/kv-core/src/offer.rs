//! Which offers of a rank a machine can use, and what the KV service offers.
//!
//! Matching is a pure function of both sides' words: the transport by name and version, the service by
//! name, compatibility and a common version, of which the highest is spoken. Two offers that fit are refused, because
//! the two ends of a conversation could choose differently.

use std::ops::RangeInclusive;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::Mismatch;
use crate::error::peer::cut;
use crate::id::{Incarnation, WorkerId};
use crate::layout::MAX_REGIONS;
use crate::layout::{Geometry, GeometryError, Holds, Layout, RegionShape};
use crate::layout::{MemoryKind, Parallel, RegionRole};
use crate::meter::each;
use crate::record::{RankRecord, RecordError, ServiceOffer, TransportOffer, WorkerRole};
use crate::wire::{VERSIONS, read_tolerant};

/// The name of the KV service in rank records and lookups.
pub const KV_SERVICE: &str = "kv";
/// The versions of the KV service's protocol that this library speaks.
pub const KV_VERSIONS: RangeInclusive<u16> = VERSIONS.min as u16..=VERSIONS.max as u16;
/// The form of the metadata that this library's transports give.
pub const TRANSPORT_VERSION: u16 = 1;

/// What a machine looks for in a rank record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The transport's name and the version of its metadata's form.
    pub transport: (&'a str, u16),
    /// The service's name.
    pub service: &'a str,
    /// The versions of the service's protocol that the machine speaks.
    pub versions: RangeInclusive<u16>,
    /// The text that must be the same on both sides.
    pub compatibility: &'a str,
}

/// The one transport and the one service offer of a record that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen<'a> {
    /// The way to reach the rank.
    pub transport: &'a TransportOffer,
    /// The service.
    pub offer: &'a ServiceOffer,
    /// The highest version that both sides speak.
    pub version: u16,
}

/// Why a rank cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// Nothing that the rank offers fits. Configure both sides alike, or run versions that overlap.
    #[error(transparent)]
    Differs(#[from] Mismatch),
    /// Two offers of the rank fit. Take one of them out of the rank's configuration.
    #[error("{worker} has two offers that fit: {first} and {second}")]
    Ambiguous {
        /// The rank.
        worker: WorkerId,
        /// The first offer in the record that fits.
        first: String,
        /// The second.
        second: String,
    },
}

impl Wanted<'_> {
    /// What the KV service looks for, over the named transport.
    pub fn kv(transport: &str) -> Wanted<'_> {
        let (service, versions) = (KV_SERVICE, KV_VERSIONS);
        Wanted { transport: (transport, TRANSPORT_VERSION), service, versions, compatibility: "" }
    }

    /// The offers of a rank that fit; exactly one transport and one service must.
    pub fn choose<'a>(&self, rank: &'a RankRecord) -> Result<Chosen<'a>, OfferError> {
        let mut transports = each(&rank.transports).filter(|transport| self.takes(transport));
        let transport = only(rank, &mut transports, name_transport)?.ok_or_else(|| {
            let ours = named(self.transport.0, self.transport.1);
            mismatch("transport", ours, list(&rank.transports, name_transport))
        })?;
        let mut offers = each(&rank.offers).filter(|offer| self.common(offer).is_some());
        let offer = only(rank, &mut offers, name_offer)?.ok_or_else(|| self.missing_service(rank))?;
        let version = self.common(offer).unwrap_or(offer.max);
        Ok(Chosen { transport, offer, version })
    }

    fn takes(&self, transport: &TransportOffer) -> bool {
        (transport.name.as_str(), transport.version) == self.transport
    }

    /// The highest version that both sides speak of a service that is compatible.
    fn common(&self, offer: &ServiceOffer) -> Option<u16> {
        let same = offer.service == self.service && offer.compatibility == self.compatibility;
        let highest = offer.max.min(*self.versions.end());
        (same && highest >= offer.min && highest >= *self.versions.start()).then_some(highest)
    }

    /// The first of name, compatibility and versions in which no offer agrees.
    fn missing_service(&self, rank: &RankRecord) -> OfferError {
        let named: Vec<&ServiceOffer> =
            each(&rank.offers).filter(|offer| offer.service == self.service).collect();
        if named.is_empty() {
            return mismatch("service", self.service.to_owned(), list(&rank.offers, name_offer));
        }
        if named.iter().all(|offer| offer.compatibility != self.compatibility) {
            let theirs = list(named, |offer| format!("{:?}", offer.compatibility));
            return mismatch("compatibility", format!("{:?}", self.compatibility), theirs);
        }
        let ours = versions(*self.versions.start(), *self.versions.end());
        mismatch("version", format!("{} {ours}", self.service), list(named, name_offer))
    }
}

/// The only one; an error that names the first two if there are more.
fn only<'a, T>(
    rank: &RankRecord,
    found: &mut dyn Iterator<Item = &'a T>,
    name: fn(&T) -> String,
) -> Result<Option<&'a T>, OfferError> {
    let first = found.next();
    if let (Some(first), Some(second)) = (first, found.next()) {
        let (first, second) = (name(first), name(second));
        return Err(OfferError::Ambiguous { worker: rank.worker.clone(), first, second });
    }
    Ok(first)
}

fn name_transport(transport: &TransportOffer) -> String {
    named(&transport.name, transport.version)
}

fn named(transport: &str, version: u16) -> String {
    format!("{transport} version {version}")
}

fn name_offer(offer: &ServiceOffer) -> String {
    format!("{} {}", offer.service, versions(offer.min, offer.max))
}

fn versions(min: u16, max: u16) -> String {
    if min == max { format!("version {min}") } else { format!("versions {min} to {max}") }
}

fn list<'a, T: 'a>(items: impl IntoIterator<Item = &'a T>, name: impl Fn(&T) -> String) -> String {
    let names: Vec<String> = items.into_iter().map(name).collect();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

fn mismatch(field: &str, ours: String, theirs: String) -> OfferError {
    let theirs = cut(theirs);
    OfferError::Differs(Mismatch { field: field.to_owned(), ours, theirs })
}

impl RankRecord {
    /// The record of a worker that gives the KV service over one transport.
    pub fn serving_kv(
        (worker, incarnation): (WorkerId, Incarnation),
        role: WorkerRole,
        (transport, metadata): (&str, Bytes),
        geometry: &Geometry,
    ) -> Result<RankRecord, RecordError> {
        let transport = TransportOffer { name: transport.to_owned(), version: TRANSPORT_VERSION, metadata };
        let offer = ServiceOffer::kv(geometry)?;
        RankRecord::new((worker, incarnation), role, geometry.parallel, vec![transport], vec![offer])
    }
}

impl ServiceOffer {
    /// The KV service over a cache of this geometry. The parallel groups are those of the record. About
    /// 1900 regions fit into an offer; [`RankRecord::check`] refuses more.
    pub fn kv(geometry: &Geometry) -> Result<ServiceOffer, RecordError> {
        let encoding = |_| RecordError::Encoding { service: KV_SERVICE };
        let data = rmp_serde::to_vec_named(&KvData::of(geometry)).map_err(encoding)?;
        Ok(ServiceOffer {
            service: KV_SERVICE.to_owned(),
            min: *KV_VERSIONS.start(),
            max: *KV_VERSIONS.end(),
            compatibility: String::new(),
            data: Bytes::from(data),
        })
    }

    /// The geometry that the data of a KV offer describe, checked, in a record with these parallel groups.
    pub fn geometry(&self, parallel: Parallel) -> Result<Geometry, KvDataError> {
        let data: KvData = read_tolerant(&self.data).ok_or(KvDataError::Form)?;
        let geometry = data.geometry(parallel)?;
        geometry.validate()?;
        Ok(geometry)
    }
}

/// The data of a KV offer that no worker can have written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvDataError {
    /// The bytes are not a msgpack map with the fields of a cache.
    #[error("the data of the KV offer are not a description of a cache")]
    Form,
    /// More regions than a worker may have.
    #[error("the KV offer has {got} regions; at most {max} are allowed")]
    Regions {
        /// How many there are.
        got: usize,
        /// The bound.
        max: usize,
    },
    /// The geometry cannot be that of a cache.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// A geometry without the parallel groups. A field that is not known is skipped.
#[derive(Serialize, Deserialize)]
struct KvData {
    num_pages: u32,
    page_size: u32,
    dtype: String,
    kv_heads: u32,
    head_dim: u32,
    #[serde(default)]
    model: String,
    #[serde(default)]
    layout: Layout,
    /// About 30 bytes each. What a later version adds to a region stands in a list of its own.
    regions: Vec<RegionData>,
}

/// The fields of a [`RegionShape`], in order, without their names.
type RegionData = (RegionRole, u64, u64, MemoryKind, Option<u32>, u32, Holds, u16);

impl KvData {
    fn of(geometry: &Geometry) -> KvData {
        let regions = each(&geometry.regions).map(|region| {
            let RegionShape { role, len, item_len, memory, layer, layers, holds, group } = *region;
            (role, len, item_len, memory, layer, layers, holds, group)
        });
        let Geometry { num_pages, page_size, kv_heads, head_dim, .. } = *geometry;
        let (dtype, model, layout) =
            (geometry.dtype.clone(), geometry.model.clone(), geometry.layout.clone());
        let regions = regions.collect();
        KvData { num_pages, page_size, dtype, kv_heads, head_dim, model, layout, regions }
    }

    fn geometry(self, parallel: Parallel) -> Result<Geometry, KvDataError> {
        let KvData { num_pages, page_size, dtype, kv_heads, head_dim, model, layout, regions } = self;
        if regions.len() > MAX_REGIONS {
            return Err(KvDataError::Regions { got: regions.len(), max: MAX_REGIONS });
        }
        let shape = |(role, len, item_len, memory, layer, layers, holds, group): RegionData| RegionShape {
            role,
            len,
            item_len,
            memory,
            layer,
            layers,
            holds,
            group,
        };
        let regions = each(regions).map(shape).collect();
        Ok(Geometry { num_pages, page_size, dtype, kv_heads, head_dim, model, parallel, regions, layout })
    }
}

#[cfg(test)]
mod tests;
