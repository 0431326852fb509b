//! The JSON of this library's own routes: a rank record as `PUT /v1/ranks` takes it and `GET /v1/ranks`
//! returns it, and the bodies of the other requests and answers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kv_core::{
    Incarnation, Parallel, RankRecord, RecordError, ServiceOffer, TransportOffer, WorkerId, WorkerRole,
};
use serde::{Deserialize, Serialize};

/// The JSON form of a [`RankRecord`]: the same fields, with bytes in base64. A request to the server has the
/// lease beside them. Unknown fields are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankJson {
    /// The engine's id, and the rank's number within the engine.
    pub worker: WorkerId,
    /// The incarnation of the worker that the record describes.
    pub incarnation: Incarnation,
    /// Whether the worker computes prompts, generates tokens, or encodes.
    pub role: WorkerRole,
    /// The rank's place in the engine's parallel groups. A record without this field is of a single rank.
    #[serde(default)]
    pub parallel: Parallel,
    /// The transports by which the worker can be reached, the preferred one first.
    pub transports: Vec<TransportJson>,
    /// The services that the worker offers to peers.
    pub offers: Vec<OfferJson>,
    /// How long the registration lasts unless renewed, in milliseconds. Only in requests; without this field
    /// the server chooses five seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// True for a rank that has left: it awaits no further peers. Only in requests. A replica is no longer found
    /// once all of its ranks have left. A server that does not know the field goes on naming the rank.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
}

/// The JSON form of a [`TransportOffer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportJson {
    /// The transport's name: `local`, for instance.
    pub name: String,
    /// The version of the form of `metadata`.
    pub version: u16,
    /// The transport's metadata, in standard base64 with padding.
    pub metadata: String,
}

/// The JSON form of a [`ServiceOffer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferJson {
    /// The service's name: `kv`, for instance.
    pub service: String,
    /// The oldest version of the service's protocol that the worker speaks.
    pub min: u16,
    /// The newest version of the service's protocol that the worker speaks.
    pub max: u16,
    /// A text that must be the same on both sides, or the peers refuse each other.
    #[serde(default)]
    pub compatibility: String,
    /// The service's data, in standard base64 with padding. For the KV service: the worker's geometry.
    #[serde(default)]
    pub data: String,
}

/// Names one registration: the body of `DELETE /v1/ranks`, and with a lease the body of
/// `POST /v1/ranks/renew`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseJson {
    /// The engine's id, and the rank's number within the engine.
    pub worker: WorkerId,
    /// The incarnation of the worker that registered.
    pub incarnation: Incarnation,
    /// How long the registration lasts from this request on, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
}

/// The answer 200 to a registration or renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantJson {
    /// How long the registration lasts from the request on, in milliseconds: the server may have shortened
    /// what was asked for.
    pub lease_ms: u64,
}

/// The answer 404 of `GET /v1/ranks`. A client that does not know the field `left` takes every 404 for an unknown
/// rank, and asks again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFoundJson {
    /// Why there is no answer, as a sentence, for logs.
    pub error: String,
    /// True if the replica is registered, and all of its ranks have left.
    #[serde(default)]
    pub left: bool,
}

/// The answer 503 of `GET /v1/ranks`: ranks of the replica are missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotReadyJson {
    /// The same as a sentence, for logs.
    pub error: String,
    /// Ranks of the replica that have registered.
    pub registered: u32,
    /// Ranks that the replica has when complete.
    pub expected: u32,
}

/// Why JSON is not a valid rank record. The sender must be corrected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankJsonError {
    /// The text of a field is not base64.
    #[error("{field} is not standard base64 with padding: {error}")]
    Base64 {
        /// Name of the JSON field.
        field: &'static str,
        /// What is wrong with the text.
        error: base64::DecodeError,
    },
    /// The fields contradict each other, or one of them is out of its range.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl RankJson {
    /// The JSON form of a record; `lease_ms` is the lease in milliseconds, for requests only.
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
            left: false,
        }
    }

    /// The record that the JSON describes, if the record is valid.
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
