//! A rank record as JSON: what `PUT /v1/ranks` takes and `GET /v1/ranks` gives.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kv_core::{Geometry, Incarnation, MAX_REGIONS, Parallel, RankRecord, WorkerId, WorkerRole};
use serde::{Deserialize, Serialize};

/// Longest name of a plane, data type or model, in bytes.
pub const MAX_NAME: usize = 512;
/// Most groups of state regions of a record.
const MAX_GROUPS: usize = 64;
/// Most pipeline stages of which a record says what they hold.
const MAX_STAGES: usize = 1024;

/// The JSON form of a [`RankRecord`]: the same fields, the plane's metadata in base64, and on the
/// way to the server the lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankJson {
    /// Engine and rank.
    pub worker: WorkerId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// What it does.
    pub role: WorkerRole,
    /// The plane's name.
    pub plane: String,
    /// The plane's metadata, standard base64 with padding.
    pub metadata: String,
    /// The cache.
    pub geometry: Geometry,
    /// How long the registration lives unless renewed, in milliseconds. Requests only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
}

/// Which registration: the body of `DELETE /v1/ranks`, and with a lease of `POST /v1/ranks/renew`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseJson {
    /// Engine and rank.
    pub worker: WorkerId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// How much longer it shall live, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
}

/// The answer to a registration or renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantJson {
    /// How long the registration lives from the request on, in milliseconds.
    pub lease_ms: u64,
}

/// The answer 503 of `GET /v1/ranks`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotReadyJson {
    /// For people.
    pub error: String,
    /// Ranks of the replica that have registered.
    pub registered: u32,
    /// Ranks of the replica.
    pub expected: u32,
}

/// A record that no worker can have. Fix the sender.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The metadata is not base64.
    #[error("metadata is not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// A text or list that is too long, or a number out of range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its length or value.
        got: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A rank outside its group.
    #[error("{field} is {rank}, but the group has {size} ranks")]
    RankOutOfGroup {
        /// The field.
        field: &'static str,
        /// The rank.
        rank: u32,
        /// The size of the group.
        size: u32,
    },
}

impl RankJson {
    /// The JSON form of a record.
    pub fn new(record: &RankRecord, lease_ms: Option<u64>) -> RankJson {
        RankJson {
            worker: record.worker.clone(),
            incarnation: record.incarnation,
            role: record.role,
            plane: record.plane.clone(),
            metadata: STANDARD.encode(&record.metadata),
            geometry: record.geometry.clone(),
            lease_ms,
        }
    }

    /// The record, if a worker could have sent it.
    pub fn into_record(self) -> Result<RankRecord, RecordError> {
        range("plane (length)", self.plane.len(), 1, MAX_NAME)?;
        range("dtype (length)", self.geometry.dtype.len(), 0, MAX_NAME)?;
        range("model (length)", self.geometry.model.len(), 0, MAX_NAME)?;
        range("regions (count)", self.geometry.regions.len(), 0, MAX_REGIONS)?;
        range("layout.groups (count)", self.geometry.layout.groups.len(), 0, MAX_GROUPS)?;
        range("layout.stages (count)", self.geometry.layout.stages.len(), 0, MAX_STAGES)?;
        check_parallel(&self.geometry.parallel)?;
        let metadata = STANDARD.decode(&self.metadata)?;
        // The bound that `Plane::metadata` promises.
        range("metadata (bytes)", metadata.len(), 0, (64 << 10) + 64 * self.geometry.regions.len())?;
        Ok(RankRecord {
            worker: self.worker,
            incarnation: self.incarnation,
            role: self.role,
            plane: self.plane,
            metadata: Bytes::from(metadata),
            geometry: self.geometry,
        })
    }
}

fn range(field: &'static str, got: usize, min: usize, max: usize) -> Result<(), RecordError> {
    if (min..=max).contains(&got) {
        return Ok(());
    }
    Err(RecordError::Range { field, got: got as u64, min: min as u64, max: max as u64 })
}

fn check_parallel(parallel: &Parallel) -> Result<(), RecordError> {
    for (_, field, size, rank) in parallel.groups() {
        if rank >= size {
            return Err(RecordError::RankOutOfGroup { field, rank, size });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::tests::record;
    use kv_core::StateGroup;

    #[test]
    fn records_survive_json() {
        let mut sent = record("engine é", 3, 7, (2, 1), (2, 1), (1, 0));
        sent.metadata = Bytes::from((0..=255).collect::<Vec<u8>>());
        let text = serde_json::to_string(&RankJson::new(&sent, Some(5000))).unwrap();
        let got: RankJson = serde_json::from_str(&text).unwrap();
        assert_eq!(got.lease_ms, Some(5000));
        assert_eq!(got.into_record(), Ok(sent));
    }

    #[test]
    fn every_list_and_text_of_a_record_is_bounded() {
        let good = record("e", 0, 1, (2, 1), (1, 0), (1, 0));
        let group = StateGroup::slots(1, 1);
        type Change = fn(&mut RankJson, usize, StateGroup);
        let changes: [(&str, usize, Change); 6] = [
            ("plane (length)", MAX_NAME, |json, n, _| json.plane = "x".repeat(n)),
            ("dtype (length)", MAX_NAME, |json, n, _| json.geometry.dtype = "x".repeat(n)),
            ("model (length)", MAX_NAME, |json, n, _| json.geometry.model = "x".repeat(n)),
            ("regions (count)", MAX_REGIONS, |json, n, _| {
                json.geometry.regions = vec![json.geometry.regions[0].clone(); n];
            }),
            ("layout.groups (count)", MAX_GROUPS, |json, n, group| {
                json.geometry.layout.groups = vec![group; n]
            }),
            ("layout.stages (count)", MAX_STAGES, |json, n, _| json.geometry.layout.stages = vec![(0, 1); n]),
        ];
        for (field, max, change) in changes {
            let mut json = RankJson::new(&good, None);
            change(&mut json, max, group);
            assert!(json.clone().into_record().is_ok(), "{field}");
            change(&mut json, max + 1, group);
            let (got, max) = (max as u64 + 1, max as u64);
            match json.into_record() {
                Err(RecordError::Range { field: of, got: is, max: most, .. }) => {
                    assert_eq!((of, is, most), (field, got, max));
                }
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn impossible_records_are_refused_by_field() {
        let good = record("e", 0, 1, (2, 1), (1, 0), (1, 0));
        let mut json = RankJson::new(&good, None);
        json.geometry.parallel.tp_rank = 2;
        assert_eq!(
            json.into_record(),
            Err(RecordError::RankOutOfGroup { field: "tp_rank", rank: 2, size: 2 })
        );
        let mut json = RankJson::new(&good, None);
        json.metadata = "*".into();
        assert!(matches!(json.into_record(), Err(RecordError::Base64(_))));
        let mut json = RankJson::new(&good, None);
        json.metadata = STANDARD.encode(vec![0; (64 << 10) + 64 * good.geometry.regions.len() + 1]);
        assert!(matches!(json.into_record(), Err(RecordError::Range { field: "metadata (bytes)", .. })));
        let mut json = RankJson::new(&good, None);
        json.plane.clear();
        assert!(matches!(json.into_record(), Err(RecordError::Range { field: "plane (length)", .. })));
    }
}
