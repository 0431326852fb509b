//! A rank record as JSON: what `PUT /v1/ranks` takes and `GET /v1/ranks` gives.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kv_core::{
    Incarnation, Parallel, RankRecord, RecordError, ServiceOffer, TransportOffer, WorkerId, WorkerRole,
};
use serde::{Deserialize, Serialize};

/// The JSON form of a [`RankRecord`]: the same fields, bytes in base64, and on the way to the server the
/// lease. Fields that are not known are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankJson {
    /// Engine and rank.
    pub worker: WorkerId,
    /// The life of the worker that the record describes.
    pub incarnation: Incarnation,
    /// What the worker does.
    pub role: WorkerRole,
    /// The rank's place in the engine's parallel groups; a single rank if it is left out.
    #[serde(default)]
    pub parallel: Parallel,
    /// The ways to reach the worker.
    pub transports: Vec<TransportJson>,
    /// The services of the worker.
    pub offers: Vec<OfferJson>,
    /// How long the registration lives unless renewed, in milliseconds. Requests only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
}

/// The JSON form of a [`TransportOffer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportJson {
    /// The transport's name.
    pub name: String,
    /// The version of the metadata's form.
    pub version: u16,
    /// The metadata, standard base64 with padding.
    pub metadata: String,
}

/// The JSON form of a [`ServiceOffer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferJson {
    /// The service's name.
    pub service: String,
    /// The oldest version of the service's protocol that the worker speaks.
    pub min: u16,
    /// The newest.
    pub max: u16,
    /// The text that must be the same on both sides.
    #[serde(default)]
    pub compatibility: String,
    /// The service's data, standard base64 with padding.
    #[serde(default)]
    pub data: String,
}

/// Which registration: the body of `DELETE /v1/ranks`, and with a lease of `POST /v1/ranks/renew`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseJson {
    /// Engine and rank.
    pub worker: WorkerId,
    /// The life of the worker that registered.
    pub incarnation: Incarnation,
    /// How much longer the registration shall live, in milliseconds.
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

/// JSON that is no record of a worker. Fix the sender.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankJsonError {
    /// Bytes that are not base64.
    #[error("{field} is not base64: {error}")]
    Base64 {
        /// The field.
        field: &'static str,
        /// What is wrong with the text.
        error: base64::DecodeError,
    },
    /// A record that no worker can have.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl RankJson {
    /// The JSON form of a record.
    pub fn new(record: &RankRecord, lease_ms: Option<u64>) -> RankJson {
        let transports = record.transports.iter().map(|transport| TransportJson {
            name: transport.name.clone(),
            version: transport.version,
            metadata: STANDARD.encode(&transport.metadata),
        });
        let offers = record.offers.iter().map(|offer| OfferJson {
            service: offer.service.clone(),
            min: offer.min,
            max: offer.max,
            compatibility: offer.compatibility.clone(),
            data: STANDARD.encode(&offer.data),
        });
        RankJson {
            worker: record.worker.clone(),
            incarnation: record.incarnation,
            role: record.role,
            parallel: record.parallel,
            transports: transports.collect(),
            offers: offers.collect(),
            lease_ms,
        }
    }

    /// The record, if a worker could have sent it.
    pub fn into_record(self) -> Result<RankRecord, RankJsonError> {
        let transports = self.transports.into_iter().map(|json| {
            let metadata = bytes("transports.metadata", &json.metadata)?;
            Ok(TransportOffer { name: json.name, version: json.version, metadata })
        });
        let offers = self.offers.into_iter().map(|json| {
            let OfferJson { service, min, max, compatibility, data } = json;
            Ok(ServiceOffer { service, min, max, compatibility, data: bytes("offers.data", &data)? })
        });
        Ok(RankRecord::new(
            (self.worker, self.incarnation),
            self.role,
            self.parallel,
            transports.collect::<Result<_, RankJsonError>>()?,
            offers.collect::<Result<_, RankJsonError>>()?,
        )?)
    }
}

fn bytes(field: &'static str, text: &str) -> Result<Bytes, RankJsonError> {
    STANDARD.decode(text).map(Bytes::from).map_err(|error| RankJsonError::Base64 { field, error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::record;
    use kv_core::{MAX_NAME, MAX_OFFER_BYTES, MAX_OFFERS};

    #[test]
    fn rank_records_are_equal_after_a_trip_through_json() {
        let mut sent = record("engine é", 3, 7, (2, 1), (2, 1), (1, 0));
        sent.transports[0].metadata = Bytes::from((0..=255).collect::<Vec<u8>>());
        sent.offers.push(ServiceOffer { service: "ec".to_owned(), ..sent.offers[0].clone() });
        let text = serde_json::to_string(&RankJson::new(&sent, Some(5000))).unwrap();
        let got: RankJson = serde_json::from_str(&text).unwrap();
        assert_eq!(got.lease_ms, Some(5000));
        assert_eq!(got.into_record(), Ok(sent));
    }

    #[test]
    fn unknown_fields_of_a_rank_record_are_ignored_at_every_level() {
        let sent = record("e", 0, 1, (1, 0), (1, 0), (1, 0));
        let mut json = serde_json::to_value(RankJson::new(&sent, None)).unwrap();
        for path in ["", "/worker", "/parallel", "/transports/0", "/offers/0"] {
            json.pointer_mut(path).unwrap()["of_a_later_version"] = serde_json::json!({"x": [1, null]});
        }
        let got: RankJson = serde_json::from_value(json).unwrap();
        assert_eq!(got.into_record(), Ok(sent));
    }

    #[test]
    fn impossible_records_are_refused_by_field_with_the_bound() {
        type Change = fn(&mut RankJson);
        let changes: [(&str, u64, Change); 4] = [
            ("transports (count)", MAX_OFFERS as u64, |json| {
                json.transports = vec![json.transports[0].clone(); MAX_OFFERS + 1];
            }),
            ("offers.service (length)", MAX_NAME as u64, |json| {
                json.offers[0].service = "x".repeat(MAX_NAME + 1);
            }),
            ("offers.data (bytes)", MAX_OFFER_BYTES as u64, |json| {
                json.offers[0].data = STANDARD.encode(vec![0; MAX_OFFER_BYTES + 1]);
            }),
            ("transports.metadata (bytes)", MAX_OFFER_BYTES as u64, |json| {
                json.transports[0].metadata = STANDARD.encode(vec![0; MAX_OFFER_BYTES + 1]);
            }),
        ];
        for (field, max, change) in changes {
            let mut json = RankJson::new(&record("e", 0, 1, (2, 1), (1, 0), (1, 0)), None);
            change(&mut json);
            match json.into_record() {
                Err(RankJsonError::Record(RecordError::Range { field: of, got, max: most, .. })) => {
                    assert_eq!((of, got, most), (field, max + 1, max));
                }
                other => panic!("{field}: {other:?}"),
            }
        }
        let mut json = RankJson::new(&record("e", 0, 1, (2, 1), (1, 0), (1, 0)), None);
        json.offers[0].data = "*".to_owned();
        assert!(matches!(json.into_record(), Err(RankJsonError::Base64 { field: "offers.data", .. })));
    }
}
