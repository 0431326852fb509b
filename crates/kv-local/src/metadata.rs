//! What a peer must know to reach this transport: four magic bytes with the version, then msgpack.
//!
//! The same bytes travel twice: by way of the bootstrap server, and in the hello of every connection. Both
//! must be equal. So a region table that was changed on its way is never used, and posts are checked against
//! the bounds that the peer itself gave.

use bytes::Bytes;
use kv_core::{MAX_REGIONS, TransportError};
use kv_host::{Host, OsError, ProcessIdentity, Token, metadata, random};
use serde::{Deserialize, Serialize};

/// Most arenas of one transport: their descriptors travel in one message, which carries 253 at most.
pub(crate) const MAX_ARENAS: usize = 64;
/// Longest name of an abstract socket, in bytes.
const MAX_SOCKET_NAME: usize = 107;
/// "KV local", version 3: there is a message that wakes.
const MAGIC: [u8; 4] = *b"KVL\x03";

/// A socket name that nobody can guess or occupy in advance.
pub(crate) fn random_socket_name() -> Result<String, OsError> {
    Ok(format!("kv-local-{:032x}", u128::from_le_bytes(random()?)))
}

/// Where a region is in its owner's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Number of the arena; `None` for adopted memory.
    pub(crate) arena: Option<u32>,
    /// Offset in the arena, or address in adopted memory, in bytes.
    pub(crate) start: u64,
    /// Length of the region, in bytes.
    pub(crate) len: u64,
}

/// Parts of an arena are mapped in multiples of so many bytes: one huge page.
pub(crate) const EXTENT: u64 = 2 << 20;

/// A range of an arena's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    /// Number of the arena.
    pub(crate) arena: usize,
    /// Offset of the first byte.
    pub(crate) start: u64,
    /// Offset of the byte after the last one.
    pub(crate) end: u64,
}

/// What a transport tells its peers. A decoded value is consistent: [`Metadata::decode`] checks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) host: Host,
    pub(crate) token: Token,
    /// The process that the transport lives in.
    pub(crate) process: ProcessIdentity,
    /// Name of the abstract socket on which the transport listens.
    pub(crate) socket: String,
    /// Length of each arena's file, in bytes.
    pub(crate) arenas: Vec<u64>,
    pub(crate) regions: Vec<Place>,
}

impl Metadata {
    /// The bytes that are given to peers.
    pub(crate) fn encode(&self) -> Result<Bytes, TransportError> {
        metadata::encode(MAGIC, self)
    }

    /// Reads and checks bytes that a peer, or a stranger, sent.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Metadata, TransportError> {
        let foreign = "it is not that of the local transport in this version";
        let metadata: Metadata = metadata::decode(MAGIC, foreign, bytes)?;
        metadata.check()?;
        Ok(metadata)
    }

    /// The registered parts of the arenas: disjoint ranges in units of [`EXTENT`], ordered by arena and
    /// offset.
    pub(crate) fn extents(&self) -> Vec<Extent> {
        let mut ranges: Vec<Extent> = Vec::with_capacity(self.regions.len());
        for region in &self.regions {
            let Some((arena, file)) =
                region.arena.and_then(|arena| Some((arena as usize, *self.arenas.get(arena as usize)?)))
            else {
                continue;
            };
            if region.len != 0 {
                let start = region.start / EXTENT * EXTENT;
                let end = (region.start + region.len).next_multiple_of(EXTENT).min(file);
                ranges.push(Extent { arena, start, end });
            }
        }
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joined = next.arena == last.arena && next.start <= last.end;
            if joined {
                last.end = last.end.max(next.end);
            }
            joined
        });
        ranges
    }

    fn check(&self) -> Result<(), TransportError> {
        if self.socket.is_empty() || self.socket.len() > MAX_SOCKET_NAME {
            return Err(TransportError::Metadata("the socket name does not have 1 to 107 bytes"));
        }
        if self.arenas.len() > MAX_ARENAS {
            return Err(TransportError::Metadata("it has more than 64 arenas"));
        }
        if self.regions.len() > MAX_REGIONS {
            return Err(TransportError::Metadata("it has too many regions"));
        }
        let fits = |len: u64| len != 0 && len <= isize::MAX as u64;
        if !self.arenas.iter().all(|len| fits(*len)) {
            return Err(TransportError::Metadata("an arena has no bytes, or more than an address space"));
        }
        for region in &self.regions {
            let space = match region.arena {
                None => isize::MAX as u64,
                Some(arena) => match self.arenas.get(arena as usize) {
                    Some(len) => *len,
                    None => {
                        return Err(TransportError::Metadata("a region is in an arena that does not exist"));
                    }
                },
            };
            if region.start.checked_add(region.len).is_none_or(|end| end > space) {
                return Err(TransportError::Metadata("a region leaves its arena or the address space"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(regions: usize) -> Metadata {
        Metadata {
            host: Host::here().unwrap(),
            token: Token::random().unwrap(),
            process: ProcessIdentity::here().unwrap(),
            socket: random_socket_name().unwrap(),
            arenas: vec![u64::MAX >> 1; MAX_ARENAS],
            regions: vec![Place { arena: Some(63), start: u64::MAX >> 2, len: u64::MAX >> 3 }; regions],
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
    fn tables_that_contradict_themselves_are_refused() {
        let refused = |change: fn(&mut Metadata)| {
            let mut metadata = sample(1);
            change(&mut metadata);
            Metadata::decode(&metadata.encode().unwrap()).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|metadata| metadata.regions[0].arena = Some(64)));
        assert!(refused(|metadata| metadata.arenas[63] = 10));
        assert!(refused(|metadata| metadata.arenas[0] = 0));
        assert!(refused(|metadata| metadata.regions[0].start = u64::MAX));
        assert!(refused(|metadata| metadata.regions[0] = Place { arena: None, start: u64::MAX, len: 2 }));
        assert!(refused(|metadata| metadata.arenas.push(1)));
        assert!(refused(|metadata| metadata.socket = "x".repeat(108)));
        assert!(refused(|metadata| metadata.regions = vec![metadata.regions[0]; MAX_REGIONS + 1]));
    }
}
