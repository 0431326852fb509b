//! What a peer must know to reach this transport: four magic bytes with the version, then msgpack; and the
//! name of one life of a transport, which every connection carries.

use std::net::SocketAddr;

use bytes::Bytes;
use kv_core::{MAX_REGIONS, TransportError};
use kv_host::{Token, metadata};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Most addresses of one transport.
pub(crate) const MAX_ADDRESSES: usize = 16;
/// "KV TCP", version 2.
const MAGIC: [u8; 4] = *b"KVT\x02";

/// One life of a transport, and a hash of the metadata that it has given out. Two sides that name each other
/// alike use the same tables of regions and addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Identity {
    pub(crate) token: Token,
    pub(crate) hash: [u8; Identity::HASH],
}

impl Identity {
    pub(crate) const HASH: usize = 32;
    pub(crate) const LEN: usize = Token::LEN + Identity::HASH;

    pub(crate) fn of(token: Token, metadata: &[u8]) -> Identity {
        Identity { token, hash: Sha256::digest(metadata).into() }
    }
}

/// What a transport tells its peers. A decoded value is consistent: [`Metadata::decode`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) token: Token,
    /// Where the transport can be reached, in the order in which peers try.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Length of each region, in bytes.
    pub(crate) regions: Vec<u64>,
    /// True if all connections of the transport are encrypted.
    pub(crate) tls: bool,
}

impl Metadata {
    /// The bytes that are given to peers.
    pub(crate) fn encode(&self) -> Result<Bytes, TransportError> {
        metadata::encode(MAGIC, self)
    }

    /// Reads and checks bytes that a peer, or a stranger, sent.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Metadata, TransportError> {
        let foreign = "it is not that of the TCP transport in this version";
        let metadata: Metadata = metadata::decode(MAGIC, foreign, bytes)?;
        metadata.check()?;
        Ok(metadata)
    }

    fn check(&self) -> Result<(), TransportError> {
        if self.addresses.is_empty() || self.addresses.len() > MAX_ADDRESSES {
            return Err(TransportError::Metadata("it does not have 1 to 16 addresses"));
        }
        let is_nowhere =
            |address: &SocketAddr| address.port() == 0 || address.ip().to_canonical().is_unspecified();
        if self.addresses.iter().any(is_nowhere) {
            return Err(TransportError::Metadata("an address names no host or no port"));
        }
        if self.regions.len() > MAX_REGIONS {
            return Err(TransportError::Metadata("it has too many regions"));
        }
        if self.regions.iter().any(|len| *len > isize::MAX as u64) {
            return Err(TransportError::Metadata("a region is longer than an address space"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(regions: usize) -> Metadata {
        Metadata {
            token: Token::random().unwrap(),
            addresses: vec!["127.0.0.1:1".parse().unwrap(), "[fe80::1]:65535".parse().unwrap()],
            regions: vec![u64::MAX >> 1; regions],
            tls: regions.is_multiple_of(2),
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
    fn metadata_without_a_place_to_connect_to_is_refused() {
        let refused = |change: fn(&mut Metadata)| {
            let mut metadata = sample(1);
            change(&mut metadata);
            Metadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|metadata| metadata.addresses.clear()));
        assert!(refused(|metadata| metadata.addresses = vec![metadata.addresses[0]; MAX_ADDRESSES + 1]));
        assert!(refused(|metadata| metadata.addresses[1].set_port(0)));
        assert!(refused(|metadata| metadata.addresses[0] = "0.0.0.0:7".parse().unwrap()));
        assert!(refused(|metadata| metadata.addresses[0] = "[::ffff:0.0.0.0]:7".parse().unwrap()));
        assert!(refused(|metadata| metadata.regions[0] = u64::MAX));
        assert!(refused(|metadata| metadata.regions = vec![1; MAX_REGIONS + 1]));
    }

    #[test]
    fn transports_with_other_metadata_or_another_life_have_another_identity() {
        let token = Token::random().unwrap();
        assert_eq!(Identity::of(token, b"a"), Identity::of(token, b"a"));
        assert_ne!(Identity::of(token, b"a"), Identity::of(token, b"b"));
        assert_ne!(Identity::of(token, b"a"), Identity::of(Token::random().unwrap(), b"a"));
        assert_eq!(Token::from_bytes(token.to_bytes()), token);
    }
}
