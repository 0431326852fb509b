//! What a peer must know to reach this transport: four magic bytes with the version, then msgpack.

use bytes::Bytes;
use kv_core::{MAX_REGIONS, MemoryKind, TransportError};
use kv_host::{Host, ProcessIdentity, Token, metadata};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Longest address of a UCX worker, in bytes. An address grows with the number of devices.
pub(crate) const MAX_ADDRESS: usize = 48 << 10;
/// "KV UCX", version 3.
const MAGIC: [u8; 4] = *b"KVU\x03";

/// One life of a transport: its incarnation, and the address of its UCX worker. What is sent to the name arrives at
/// that worker, or nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Name {
    pub(crate) token: Token,
    /// UCX's own form, which only UCX can read.
    pub(crate) address: Bytes,
}

/// Where a region lies: in which memory, and its address and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) kind: MemoryKind,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

impl Place {
    /// True for memory of a GPU.
    pub(crate) fn is_of_gpu(&self) -> bool {
        self.kind == MemoryKind::Vram
    }
}

/// What a transport tells its peers. A decoded value is consistent: [`Metadata::decode`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) name: Name,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    pub(crate) regions: Vec<Place>,
}

/// A hash of metadata. Two sides that have the same hash use the same table of regions.
pub(crate) type Hash = [u8; 32];

/// The hash of metadata as they travel.
pub(crate) fn hash(metadata: &[u8]) -> Hash {
    Sha256::digest(metadata).into()
}

impl Metadata {
    /// The bytes that are given to peers.
    pub(crate) fn encode(&self) -> Result<Bytes, TransportError> {
        metadata::encode(MAGIC, self)
    }

    /// Reads and checks bytes that a peer, or a stranger, sent.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Metadata, TransportError> {
        let foreign = "it is not that of the UCX transport in this version";
        let metadata: Metadata = metadata::decode(MAGIC, foreign, bytes)?;
        metadata.check()?;
        Ok(metadata)
    }

    fn check(&self) -> Result<(), TransportError> {
        if self.name.address.is_empty() || self.name.address.len() > MAX_ADDRESS {
            return Err(TransportError::Metadata("the worker's address is empty or too long"));
        }
        if self.regions.len() > MAX_REGIONS {
            return Err(TransportError::Metadata("it has too many regions"));
        }
        let wraps =
            |place: &Place| place.addr.checked_add(place.len).is_none() || place.len > isize::MAX as u64;
        if self.regions.iter().any(wraps) {
            return Err(TransportError::Metadata("a region leaves the address space"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { kind: MemoryKind::Vram, addr: u64::MAX >> 1, len: u64::MAX >> 2 };

    fn sample(regions: usize) -> Metadata {
        Metadata {
            name: Name { token: Token::random().unwrap(), address: Bytes::from(vec![7; 300]) },
            host: Host::here().unwrap(),
            process: ProcessIdentity::here().unwrap(),
            regions: vec![PLACE; regions],
        }
    }

    #[test]
    fn metadata_survives_the_trip_and_stays_within_the_bound_of_transports() {
        for (regions, address) in [(0, 1), (1, MAX_ADDRESS), (MAX_REGIONS, MAX_ADDRESS)] {
            let mut metadata = sample(regions);
            metadata.name.address = Bytes::from(vec![1; address]);
            let bytes = metadata.encode().unwrap();
            assert!(bytes.len() <= (64 << 10) + 64 * regions);
            assert_eq!(Metadata::decode(&bytes).unwrap(), metadata);
        }
    }

    #[test]
    fn every_truncation_is_refused_and_no_damage_panics() {
        let bytes = sample(3).encode().unwrap();
        for len in 0..bytes.len() {
            assert!(Metadata::decode(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            for value in [0, 0x7f, 0xc1, 0xdd, 0xff] {
                let mut damaged = bytes.to_vec();
                damaged[at] = value;
                let _ = Metadata::decode(&damaged);
            }
        }
    }

    #[test]
    fn metadata_without_an_address_or_with_regions_beyond_the_address_space_is_refused() {
        let refused = |change: fn(&mut Metadata)| {
            let mut metadata = sample(1);
            change(&mut metadata);
            Metadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|metadata| metadata.name.address.clear()));
        assert!(refused(|metadata| metadata.name.address = vec![0; MAX_ADDRESS + 1].into()));
        assert!(refused(|metadata| metadata.regions[0] = Place { addr: u64::MAX, len: 1, ..PLACE }));
        assert!(refused(|metadata| metadata.regions[0] = Place { addr: 0, len: u64::MAX, ..PLACE }));
        assert!(refused(|metadata| metadata.regions = vec![PLACE; MAX_REGIONS + 1]));
    }
}
