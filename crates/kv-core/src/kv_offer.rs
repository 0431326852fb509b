//! The KV service in rank records: its name and versions, and the geometry in the data of its
//! offer.

use std::ops::RangeInclusive;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::asked::Service;
use crate::id::{Incarnation, WorkerId};
use crate::layout::MAX_REGIONS;
use crate::layout::{Content, Geometry, GeometryError, Layout, RegionShape};
use crate::layout::{MemoryKind, Parallel, RegionRole};
use crate::meter::each;
use crate::offer::Wanted;
use crate::record::{RankRecord, RecordError, ServiceOffer, TRANSPORT_VERSION, TransportOffer, WorkerRole};
use crate::wire::{VERSIONS, Versions, read_tolerant};

/// The name of the KV service in rank records and lookups.
pub const KV_SERVICE: &str = "kv";
/// The versions of the KV service's protocol that this library speaks.
pub const KV_VERSIONS: RangeInclusive<u16> = VERSIONS.min as u16..=VERSIONS.max as u16;
impl Wanted<'_> {
    /// What a machine of the KV service looks for in rank records, over the transport of this name.
    pub fn kv(transport: &str) -> Wanted<'_> {
        let (service, versions) = (KV_SERVICE, KV_VERSIONS);
        Wanted { transport: (transport, TRANSPORT_VERSION), service, versions, compatibility: "" }
    }
}

impl RankRecord {
    /// The record of a worker that offers the KV service over one transport.
    pub fn serving_kv(
        (worker, incarnation): (WorkerId, Incarnation),
        role: WorkerRole,
        (transport, metadata): (&str, Bytes),
        geometry: &Geometry,
    ) -> Result<RankRecord, RecordError> {
        let transport = TransportOffer::new(transport, metadata);
        let offer = ServiceOffer::kv(geometry)?;
        RankRecord::new((worker, incarnation), role, geometry.parallel, vec![transport], vec![offer])
    }
}

impl ServiceOffer {
    /// The offer of the KV service over a cache of this geometry. The parallel groups are not part
    /// of the offer, because the record has them. About 1900 regions fit into an offer;
    /// [`RankRecord::check`] refuses more.
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

    /// The same offer in the name of a service whose cache is described in the same form.
    pub fn of_service(self, service: &Service) -> ServiceOffer {
        let Service { name, compatibility, .. } = service.clone();
        ServiceOffer { service: name, compatibility, ..self }
    }

    /// The same offer, limited to these versions of the wire.
    pub fn in_versions(self, versions: Versions) -> ServiceOffer {
        ServiceOffer { min: versions.min.into(), max: versions.max.into(), ..self }
    }

    /// The geometry that a KV offer describes, with the parallel groups of the record. Fails if the
    /// data cannot be decoded, or if the geometry breaks a rule of [`Geometry::validate`].
    pub fn geometry(&self, parallel: Parallel) -> Result<Geometry, KvDataError> {
        let data: KvData = read_tolerant(&self.data).ok_or(KvDataError::Form)?;
        let geometry = data.geometry(parallel)?;
        geometry.validate()?;
        Ok(geometry)
    }
}

/// Why the data of a KV offer are not accepted. No worker of this library writes such data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvDataError {
    /// The bytes are not a msgpack map with the fields of a cache.
    #[error("the data of the KV offer are not a description of a cache")]
    Form,
    /// The offer names more regions than a worker may have.
    #[error("the KV offer has {got} regions; at most {max} are allowed")]
    Regions {
        /// How many regions the offer names.
        got: usize,
        /// The most regions allowed, [`MAX_REGIONS`].
        max: usize,
    },
    /// The geometry breaks a rule that every cache keeps.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// A geometry without the parallel groups, as a msgpack map. Unknown fields are skipped.
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
    /// About 30 bytes each. Fields that a later version adds to a region go into a list of their
    /// own.
    regions: Vec<RegionData>,
}

/// The fields of a [`RegionShape`], in order, without their names.
type RegionData = (RegionRole, u64, u64, MemoryKind, Option<u32>, u32, Content, u16);

impl KvData {
    fn of(geometry: &Geometry) -> KvData {
        let regions = each(&geometry.regions).map(|region| {
            let RegionShape { role, len, item_len, memory, layer, layers, holds, group, form } = *region;
            (role, len, item_len, memory, layer, layers, (holds, form).into(), group)
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
        let shape = |(role, len, item_len, memory, layer, layers, content, group): RegionData| {
            let (holds, form) = content.into();
            RegionShape { role, len, item_len, memory, layer, layers, holds, group, form }
        };
        let regions = each(regions).map(shape).collect();
        Ok(Geometry { num_pages, page_size, dtype, kv_heads, head_dim, model, parallel, regions, layout })
    }
}

#[cfg(test)]
mod tests;
