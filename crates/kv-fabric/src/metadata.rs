//! What a peer must know to reach this transport: four magic bytes with the version, then msgpack; and the name of one
//! life of a transport, which every greeting carries.

use bytes::Bytes;
use kv_core::{MAX_REGIONS, TransportError};
use kv_host::{Host, ProcessIdentity, Token, metadata};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::MAX_DEVICES;

/// Longest name of an endpoint, and of a provider, in bytes.
pub(crate) const MAX_NAME: usize = 256;
/// "KV Fabric", version 2.
const MAGIC: [u8; 4] = *b"KVF\x02";

/// One life of a transport, and a hash of the metadata that it has given out. Two sides that name each other alike use
/// the same regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Identity {
    pub(crate) token: Token,
    pub(crate) hash: [u8; Identity::HASH],
}

impl Identity {
    pub(crate) const HASH: usize = 32;

    pub(crate) fn of(token: Token, metadata: &[u8]) -> Identity {
        Identity { token, hash: Sha256::digest(metadata).into() }
    }
}

/// An endpoint, as peers reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Port {
    pub(crate) name: Bytes,
    /// The NUMA node of the device, where it is known.
    pub(crate) node: Option<u16>,
}

/// A registered region, as peers address it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// What the provider adds an offset to.
    pub(crate) base: u64,
    /// Length of the region in bytes.
    pub(crate) len: u64,
    /// The region's key at each endpoint, or one that it has at all of them.
    keys: Vec<u64>,
    /// The NUMA node of the memory, where it is known.
    pub(crate) node: Option<u16>,
}

impl Place {
    /// A region with these keys, one for each endpoint.
    pub(crate) fn new(base: u64, len: u64, mut keys: Vec<u64>, node: Option<u16>) -> Place {
        if keys.windows(2).all(|pair| pair.first() == pair.last()) {
            keys.truncate(1);
        }
        Place { base, len, keys, node }
    }

    /// The region's key at an endpoint.
    pub(crate) fn key(&self, endpoint: usize) -> Option<u64> {
        let place = if self.keys.len() == 1 { 0 } else { endpoint };
        self.keys.get(place).copied()
    }
}

/// What a transport tells its peers. A decoded value is consistent: [`Metadata::decode`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) token: Token,
    /// libfabric's provider, which is the same at both ends.
    pub(crate) provider: String,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    /// The endpoints. The first one takes the messages.
    pub(crate) ports: Vec<Port>,
    /// Bytes of data that a write may carry to each of them.
    pub(crate) immediate: u8,
    pub(crate) regions: Vec<Place>,
}

impl Metadata {
    /// The bytes that are given to peers.
    pub(crate) fn encode(&self) -> Result<Bytes, TransportError> {
        let bytes = metadata::encode(MAGIC, self)?;
        if bytes.len() > metadata::MAX {
            return Err(TransportError::Metadata("this transport has too many regions for so many devices"));
        }
        Ok(bytes)
    }

    /// Reads and checks bytes that a peer, or a stranger, sent.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Metadata, TransportError> {
        let foreign = "it is not that of the libfabric transport in this version";
        let metadata: Metadata = metadata::decode(MAGIC, foreign, bytes)?;
        metadata.check()?;
        Ok(metadata)
    }

    fn check(&self) -> Result<(), TransportError> {
        if self.ports.is_empty() || self.ports.len() > MAX_DEVICES {
            return Err(TransportError::Metadata("it has no endpoint, or too many"));
        }
        if self.ports.iter().any(|port| port.name.len() > MAX_NAME) || self.provider.len() > MAX_NAME {
            return Err(TransportError::Metadata("the name of an endpoint or of the provider is too long"));
        }
        if self.regions.len() > MAX_REGIONS {
            return Err(TransportError::Metadata("it has too many regions"));
        }
        if self.regions.iter().any(|place| place.base.checked_add(place.len).is_none()) {
            return Err(TransportError::Metadata("a region ends beyond the address space"));
        }
        let keys = [1, self.ports.len()];
        if self.regions.iter().any(|place| !keys.contains(&place.keys.len())) {
            return Err(TransportError::Metadata("a region has not one key for each endpoint"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(regions: usize) -> Metadata {
        let port = Port { name: Bytes::from(vec![7; MAX_NAME]), node: Some(u16::MAX) };
        // Network cards give keys of 32 bits. Where this side chooses longer ones, a region has one for all devices.
        let keys: Vec<u64> = (0..MAX_DEVICES as u64).map(|port| u64::from(u32::MAX) - port).collect();
        let place = Place::new(u64::MAX >> 1, u64::MAX >> 1, keys, Some(7));
        Metadata {
            token: Token::random().unwrap(),
            provider: "tcp;ofi_rxm".to_owned(),
            host: Host { boot: (u64::MAX, u64::MAX), network: u64::MAX },
            process: ProcessIdentity {
                inode: u64::MAX,
                namespace: u64::MAX,
                pid: i32::MIN,
                started: u64::MAX,
            },
            ports: vec![port; MAX_DEVICES],
            immediate: 8,
            regions: vec![place; regions],
        }
    }

    #[test]
    fn metadata_survives_the_trip_and_stays_within_the_bound_of_transports() {
        for regions in [0, 1, MAX_REGIONS] {
            let metadata = sample(regions);
            let bytes = metadata.encode().unwrap();
            assert!(bytes.len() <= (64 << 10) + 64 * regions);
            assert_eq!(Metadata::decode(&bytes).unwrap(), metadata);
        }
    }

    #[test]
    fn a_region_has_a_key_at_every_endpoint_and_one_key_is_for_all() {
        let place = |keys: &[u64]| Place::new(0, 1, keys.to_vec(), None);
        assert_eq!(place(&[5, 5, 5]), place(&[5]), "told once");
        assert_eq!([0, 1, 7].map(|port| place(&[5, 5, 5]).key(port)), [Some(5); 3]);
        assert_eq!([0, 1, 2, 3].map(|port| place(&[5, 5, 6]).key(port)), [Some(5), Some(5), Some(6), None]);
    }

    #[test]
    fn metadata_that_peers_would_refuse_for_its_length_is_not_given_out() {
        let mut metadata = sample(MAX_REGIONS);
        for place in &mut metadata.regions {
            place.keys = (0..MAX_DEVICES as u64).map(|port| u64::MAX - port).collect();
        }
        assert!(matches!(metadata.encode(), Err(TransportError::Metadata(_))));
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
    fn metadata_of_impossible_regions_and_names_is_refused() {
        let refused = |change: fn(&mut Metadata)| {
            let mut metadata = sample(1);
            change(&mut metadata);
            Metadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|metadata| metadata.ports[1].name = Bytes::from(vec![0; MAX_NAME + 1])));
        assert!(refused(|metadata| metadata.ports.clear()));
        assert!(refused(|metadata| metadata.ports.push(metadata.ports[0].clone())));
        assert!(refused(|metadata| drop(metadata.ports.pop())), "keys of endpoints that there are not");
        assert!(refused(|metadata| metadata.regions[0].keys.clear()));
        assert!(!refused(|metadata| metadata.regions[0].keys.truncate(1)));
        assert!(refused(|metadata| metadata.provider = "x".repeat(MAX_NAME + 1)));
        assert!(refused(|metadata| metadata.regions[0].len = u64::MAX));
        assert!(refused(|metadata| metadata.regions = vec![metadata.regions[0].clone(); MAX_REGIONS + 1]));
    }

    #[test]
    fn transports_with_other_metadata_or_another_life_have_another_identity() {
        let token = Token::random().unwrap();
        assert_eq!(Identity::of(token, b"a"), Identity::of(token, b"a"));
        assert_ne!(Identity::of(token, b"a"), Identity::of(token, b"b"));
        assert_ne!(Identity::of(token, b"a"), Identity::of(Token::random().unwrap(), b"a"));
    }
}
