//! The rank record: what a worker tells the bootstrap server about itself, and the bounds of each
//! field.
//!
//! A record names the worker, its role and its place in the engine. Two lists of *offers* follow:
//! the transports by which peers reach the worker, and the services that the worker gives to peers.
//! The data of an offer are opaque to the bootstrap server and to every other service, so that a
//! new service or transport changes neither the record nor the server.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::id::{Incarnation, WorkerId};
use crate::layout::Parallel;
use crate::meter::each;

/// Most transports, and most services, of one record.
pub const MAX_OFFERS: usize = 16;
/// Most bytes of one transport's metadata, and most bytes of one service's data.
pub const MAX_OFFER_BYTES: usize = 64 << 10;
/// Longest name of a transport or service, and longest compatibility text, in bytes.
pub const MAX_NAME: usize = 512;
/// The version of the form in which this library's transports write their metadata.
pub const TRANSPORT_VERSION: u16 = 1;

/// What a worker does for requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum WorkerRole {
    /// Computes prompts and sends their KV.
    Prefill,
    /// Receives KV and generates tokens.
    Decode,
    /// Computes embeddings of images and other media.
    Encode,
}

impl WorkerRole {
    /// The name of the role in lower case: `prefill`, `decode` or `encode`.
    pub const fn name(self) -> &'static str {
        match self {
            WorkerRole::Prefill => "prefill",
            WorkerRole::Decode => "decode",
            WorkerRole::Encode => "encode",
        }
    }
}

/// One rank, as it registers itself with a bootstrap server.
///
/// [`RankRecord::new`] makes a record that peers accept. A record that came from elsewhere may hold
/// anything until [`check`](RankRecord::check) has passed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRecord {
    /// The engine of the worker, and its rank there.
    pub worker: WorkerId,
    /// The incarnation of the worker that the record describes.
    pub incarnation: Incarnation,
    /// What the worker does for requests.
    pub role: WorkerRole,
    /// The rank's place in the engine's parallel groups.
    pub parallel: Parallel,
    /// The transports by which peers can reach the worker, at most [`MAX_OFFERS`], in the worker's
    /// own order of preference. A peer takes the first transport in the *peer's* order that both
    /// have.
    pub transports: Vec<TransportOffer>,
    /// The services of the worker, at most [`MAX_OFFERS`].
    pub offers: Vec<ServiceOffer>,
}

/// One transport by which a worker can be reached.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransportOffer {
    /// The transport's name (`local`, `nixl`), 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// The version of the form of `metadata`. Both ends of a connection must use the same version.
    pub version: u16,
    /// The bytes that a peer's transport needs to connect; at most [`MAX_OFFER_BYTES`].
    pub metadata: Bytes,
}

/// One service of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceOffer {
    /// The service's name (`kv`, `ec`), 1 to [`MAX_NAME`] bytes.
    pub service: String,
    /// The oldest version of the service's protocol that the worker speaks.
    pub min: u16,
    /// The newest version of the protocol that the worker speaks; not below `min`.
    pub max: u16,
    /// A text that must be the same on both sides, such as a hash; 0 to [`MAX_NAME`] bytes. Empty
    /// for a service that compares its data instead.
    pub compatibility: String,
    /// What the service tells its peers, in the service's own form; at most [`MAX_OFFER_BYTES`].
    pub data: Bytes,
}

/// Why a record is not valid. The worker that wrote the record must be corrected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A number, or the length of a text or list, is outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The name of the field, and what was counted.
        field: &'static str,
        /// The value, or the length.
        got: u64,
        /// The smallest value allowed.
        min: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// A rank is not below the size of its parallel group.
    #[error("{field} is {rank}, but the group has {size} ranks")]
    RankOutOfGroup {
        /// The name of the rank's field.
        field: &'static str,
        /// The rank that was given.
        rank: u32,
        /// The size of the parallel group.
        size: u32,
    },
    /// The data of a service could not be encoded.
    #[error("the data of service {service} cannot be encoded")]
    Encoding {
        /// The name of the service.
        service: &'static str,
    },
}

impl TransportOffer {
    /// An offer of one of this library's transports, with the metadata that the transport gave.
    pub fn new(name: &str, metadata: Bytes) -> TransportOffer {
        TransportOffer { name: name.to_owned(), version: TRANSPORT_VERSION, metadata }
    }
}

impl fmt::Display for TransportOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} version {}", self.name, self.version)
    }
}

impl RankRecord {
    /// A record whose lists, texts and numbers are within their bounds.
    pub fn new(
        (worker, incarnation): (WorkerId, Incarnation),
        role: WorkerRole,
        parallel: Parallel,
        transports: Vec<TransportOffer>,
        offers: Vec<ServiceOffer>,
    ) -> Result<RankRecord, RecordError> {
        let record = RankRecord { worker, incarnation, role, parallel, transports, offers };
        record.check()?;
        Ok(record)
    }

    /// Checks that every list, text and number is within its bounds. The data of a service are
    /// checked by the service itself.
    pub fn check(&self) -> Result<(), RecordError> {
        for (_, field, size, rank) in self.parallel.groups() {
            if rank >= size {
                return Err(RecordError::RankOutOfGroup { field, rank, size });
            }
        }
        range("transports (count)", self.transports.len(), 0, MAX_OFFERS)?;
        for transport in each(&self.transports) {
            range("transports.name (length)", transport.name.len(), 1, MAX_NAME)?;
            range("transports.metadata (bytes)", transport.metadata.len(), 0, MAX_OFFER_BYTES)?;
        }
        range("offers (count)", self.offers.len(), 0, MAX_OFFERS)?;
        for offer in each(&self.offers) {
            range("offers.service (length)", offer.service.len(), 1, MAX_NAME)?;
            range("offers.max", offer.max.into(), offer.min.into(), u16::MAX.into())?;
            range("offers.compatibility (length)", offer.compatibility.len(), 0, MAX_NAME)?;
            range("offers.data (bytes)", offer.data.len(), 0, MAX_OFFER_BYTES)?;
        }
        Ok(())
    }
}

fn range(field: &'static str, got: usize, min: usize, max: usize) -> Result<(), RecordError> {
    if (min..=max).contains(&got) {
        return Ok(());
    }
    Err(RecordError::Range { field, got: got as u64, min: min as u64, max: max as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::EngineId;

    fn record() -> RankRecord {
        let worker = WorkerId { engine: EngineId::new("p").unwrap(), rank: 0 };
        let who = (worker, Incarnation::from_random(1));
        let transport = TransportOffer { name: "local".to_owned(), version: 1, metadata: Bytes::new() };
        let offer = ServiceOffer {
            service: "kv".to_owned(),
            min: 3,
            max: 4,
            compatibility: String::new(),
            data: Bytes::new(),
        };
        RankRecord::new(who, WorkerRole::Prefill, Parallel::default(), vec![transport], vec![offer]).unwrap()
    }

    #[test]
    fn every_list_text_and_piece_of_data_has_a_bound_that_its_error_names() {
        type Change = fn(&mut RankRecord, usize);
        let changes: [(&str, usize, Change); 7] = [
            ("transports (count)", MAX_OFFERS, |r, n| r.transports = vec![r.transports[0].clone(); n]),
            ("transports.name (length)", MAX_NAME, |r, n| r.transports[0].name = "x".repeat(n)),
            ("transports.metadata (bytes)", MAX_OFFER_BYTES, |r, n| {
                r.transports[0].metadata = vec![0; n].into();
            }),
            ("offers (count)", MAX_OFFERS, |r, n| r.offers = vec![r.offers[0].clone(); n]),
            ("offers.service (length)", MAX_NAME, |r, n| r.offers[0].service = "x".repeat(n)),
            ("offers.compatibility (length)", MAX_NAME, |r, n| r.offers[0].compatibility = "x".repeat(n)),
            ("offers.data (bytes)", MAX_OFFER_BYTES, |r, n| r.offers[0].data = vec![0; n].into()),
        ];
        for (field, max, change) in changes {
            let mut record = record();
            change(&mut record, max);
            assert_eq!(record.check(), Ok(()), "{field}");
            change(&mut record, max + 1);
            let min = u64::from(field == "transports.name (length)" || field == "offers.service (length)");
            let (got, max) = (max as u64 + 1, max as u64);
            assert_eq!(record.check(), Err(RecordError::Range { field, got, min, max }));
        }
    }

    #[test]
    fn empty_names_reversed_versions_and_ranks_beyond_their_group_are_refused() {
        let refused = |change: fn(&mut RankRecord)| {
            let mut record = record();
            change(&mut record);
            record.check().unwrap_err().to_string()
        };
        assert_eq!(
            refused(|record| record.transports[0].name.clear()),
            "transports.name (length) is 0; it must be 1 to 512"
        );
        assert_eq!(
            refused(|record| record.offers[0].service.clear()),
            "offers.service (length) is 0; it must be 1 to 512"
        );
        assert_eq!(refused(|record| record.offers[0].max = 2), "offers.max is 2; it must be 3 to 65535");
        assert_eq!(refused(|record| record.parallel.tp_rank = 1), "tp_rank is 1, but the group has 1 ranks");
    }
}
