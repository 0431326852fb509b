//! What a transport tells its peers about itself: addresses, regions, and the metadata of its NIXL agent.

use bytes::Bytes;
use kv_core::hash::Fnv1a;
use kv_core::wire::lengths_fit;
use kv_core::{MAX_REGIONS, TransportError};
use kv_host::{Host, ProcessIdentity};
use serde::{Deserialize, Serialize};

use crate::agent::name::agent_name;
use crate::connections::route::Reach;
use crate::foreign::agent_metadata::AgentMetadata;
use crate::regions::place::Place;

/// The version of the format. Every change of the format gets another number.
const VERSION: u32 = 5;
const MAGIC: &str = "kv-nixl";
/// Longest metadata in bytes: NIXL's part has some 500 and 44 a region, the rest some 200 and at most 33 a
/// region.
const fn longest(regions: usize) -> usize {
    (64 << 10) + 80 * regions
}

/// The description of one transport that its peers get. A value of this type has been checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransportMetadata {
    magic: String,
    version: u32,
    /// Drawn at random for each transport, so that a restarted peer is a different peer.
    pub(crate) token: u64,
    /// NIXL's backend, which is the same at both ends.
    pub(crate) backend: String,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    pub(crate) reach: Reach,
    pub(crate) regions: Vec<Place>,
    /// The digest of NIXL's part.
    digest: u64,
    /// The agent's metadata as NIXL writes it.
    pub(crate) nixl: Bytes,
}

impl TransportMetadata {
    pub(crate) fn new(
        token: u64,
        backend: &str,
        (host, process): (Host, ProcessIdentity),
        reach: Reach,
        regions: Vec<Place>,
        nixl: Bytes,
    ) -> TransportMetadata {
        let (magic, backend) = (MAGIC.to_owned(), backend.to_owned());
        TransportMetadata {
            magic,
            version: VERSION,
            token,
            backend,
            host,
            process,
            reach,
            regions,
            digest: digest(&nixl),
            nixl,
        }
    }

    pub(crate) fn encode(&self) -> Result<Bytes, TransportError> {
        let bytes = rmp_serde::to_vec(self)
            .map_err(|_| TransportError::Metadata("the transport's own metadata cannot be encoded"))?;
        let max = longest(self.regions.len());
        if bytes.len() > max {
            return Err(TransportError::Size { field: "metadata.len", got: bytes.len(), min: 0, max });
        }
        Ok(bytes.into())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<TransportMetadata, TransportError> {
        if bytes.len() > longest(MAX_REGIONS) {
            return Err(TransportError::Metadata(
                "the metadata is longer than that of the largest transport",
            ));
        }
        const FOREIGN: TransportError =
            TransportError::Metadata("the metadata is of another transport, or of another version");
        if !lengths_fit(bytes) {
            return Err(FOREIGN);
        }
        let metadata: TransportMetadata = rmp_serde::from_slice(bytes).map_err(|_| FOREIGN)?;
        if metadata.magic != MAGIC || metadata.version != VERSION {
            return Err(FOREIGN);
        }
        if metadata.regions.len() > MAX_REGIONS {
            return Err(TransportError::Metadata("the metadata has more regions than a transport can have"));
        }
        let wraps = |place: &Place| place.addr.checked_add(place.len).is_none();
        if metadata.regions.iter().any(wraps) {
            return Err(TransportError::Metadata("a region ends beyond the address space"));
        }
        if metadata.backend.len() > 64 {
            return Err(TransportError::Metadata("the name of the backend is longer than 64 bytes"));
        }
        if metadata.digest != digest(&metadata.nixl)
            || !is_of_agent(&metadata.nixl, &agent_name(metadata.token))
        {
            return Err(TransportError::Metadata("NIXL's part is damaged, or describes another agent"));
        }
        Ok(metadata)
    }
}

/// Whether NIXL's part is the metadata of the agent of this name. NIXL's own reader believes what it reads, and
/// a forger makes a digest that fits, so NIXL gets what is checked as a foreign agent's metadata is.
fn is_of_agent(nixl: &[u8], name: &str) -> bool {
    AgentMetadata::parse(nixl).is_ok_and(|agent| agent.name == name)
}

/// A digest against damage; no protection against forgery.
fn digest(bytes: &[u8]) -> u64 {
    Fnv1a::of(bytes)
}

#[cfg(test)]
mod tests {
    use kv_core::MemoryKind;

    use super::*;
    use crate::config::NixlConfig;

    fn sample(regions: usize) -> TransportMetadata {
        let range = [u64::MAX >> 1, u64::MAX >> 2, 300];
        let nixl = crate::foreign::sample::sample(agent_name(7).as_bytes(), &vec![range; regions.max(1)]);
        let reach = Reach::here(&NixlConfig::default(), "", None);
        let host = Host { boot: (u64::MAX, u64::MAX), network: u64::MAX };
        let process =
            ProcessIdentity { inode: u64::MAX, namespace: u64::MAX, pid: i32::MIN, started: u64::MAX };
        let (addr, len, item_len) = (u64::MAX >> 1, u64::MAX >> 2, u64::MAX >> 3);
        let place = Place { addr, len, item_len, kind: MemoryKind::Vram, device: 300 };
        TransportMetadata::new(7, "LIBFABRIC", (host, process), reach, vec![place; regions], nixl.into())
    }

    #[test]
    fn metadata_survives_the_trip_and_stays_within_the_bound_of_transports() {
        for regions in [0, 1, MAX_REGIONS] {
            let metadata = sample(regions);
            let bytes = metadata.encode().unwrap();
            assert!(bytes.len() <= longest(regions), "{}", bytes.len());
            assert_eq!(TransportMetadata::decode(&bytes).unwrap(), metadata);
        }
    }

    #[test]
    fn every_truncation_and_every_damage_of_nixls_part_is_refused() {
        let bytes = sample(3).encode().unwrap();
        for len in 0..bytes.len() {
            assert!(TransportMetadata::decode(&bytes[..len]).is_err(), "{len}");
        }
        let nixl = bytes.len() - sample(3).nixl.len();
        for at in 0..bytes.len() {
            for value in [0, 0x7f, 0xc1, 0xdd, 0xff] {
                let mut damaged = bytes.to_vec();
                damaged[at] = value;
                let read = TransportMetadata::decode(&damaged);
                assert!(at < nixl || bytes[at] == value || read.is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn metadata_that_contradicts_itself_is_refused() {
        let refused = |change: fn(&mut TransportMetadata)| {
            let mut metadata = sample(1);
            change(&mut metadata);
            TransportMetadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|metadata| metadata.version += 1));
        assert!(refused(|metadata| metadata.token += 1));
        assert!(refused(|metadata| metadata.regions[0].addr = u64::MAX));
        assert!(refused(|metadata| metadata.regions = vec![metadata.regions[0]; MAX_REGIONS + 1]));
        assert!(refused(|metadata| metadata.backend = "x".repeat(65)));
        assert!(refused(|metadata| metadata.nixl = Bytes::from_static(b"nixlSerDes|Agent")));
    }

    #[test]
    fn a_forged_part_for_nixl_is_refused_although_its_digest_and_its_name_are_right() {
        let forged = |change: fn(&mut Vec<u8>)| {
            let mut metadata = sample(3);
            let mut nixl = metadata.nixl.to_vec();
            change(&mut nixl);
            metadata.digest = digest(&nixl);
            metadata.nixl = nixl.into();
            TransportMetadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!forged(|_| {}));
        assert!(forged(|nixl| nixl.truncate(60)), "an agent without memory and without an end");
        assert!(forged(|nixl| nixl.push(0)), "bytes after the end");
        // The length of the last value reaches beyond the end.
        assert!(forged(|nixl| {
            let at = nixl.len() - 1 - 27 - 8;
            nixl[at] = 0xff;
        }));
    }
}
