//! Why a server cannot start, a rank cannot use the region of its host, or a request was refused.

use std::time::Duration;

use kv_host::{Limit, OsError, PeerError};
use serde::{Deserialize, Serialize};

use crate::cache::{Absent, ReserveError};
use crate::region::RegionError;

/// Why a server could not start, or a rank's call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The server refused the request, or the connection. A connection goes on after a refused request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The server and the rank compute different embeddings: see [`Compatibility`](crate::Compatibility).
    #[error("compatibility differs: {ours:?} at this rank, {theirs:?} at the server of the region")]
    Incompatible {
        /// The hash that the rank gave.
        ours: String,
        /// The hash that the server gave.
        theirs: String,
    },
    /// The server speaks another version of the protocol.
    #[error("the server speaks version {theirs} of the protocol, this rank version {ours}")]
    Version {
        /// The version that the rank speaks.
        ours: u32,
        /// The version that the server speaks.
        theirs: u32,
    },
    /// The cache and the region of a server have different numbers of blocks.
    #[error("the region has {region} blocks, and the cache {cache}")]
    Blocks {
        /// Blocks of the region.
        region: u32,
        /// Blocks of the cache.
        cache: u32,
    },
    /// The cache and the region of a server have blocks of different lengths.
    #[error("the region's blocks have {region} bytes, and the cache's {cache}")]
    BlockBytes {
        /// Bytes of a block of the region.
        region: u32,
        /// Bytes of a block of the cache.
        cache: u32,
    },
    /// The peer broke the protocol. The connection is over.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server ended the connection, or an earlier call of this client failed.
    #[error("the connection is over")]
    Closed,
    /// The server did not answer in time. The connection is over.
    #[error("the server did not answer within {after:?}")]
    TimedOut {
        /// The time that the client waited.
        after: Duration,
    },
    /// The region could not be mapped, or the bytes of a read or write are not inside the entry.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A setting of [`HostConfig`](super::HostConfig) is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The process at the other end belongs to another user, has ended, or is in a PID namespace that this
    /// process cannot see.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// A call of the operating system failed. For the call `connect`, the kind `ConnectionRefused` or
    /// `NotFound` says that no server listens at the address.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Why a server refused a request of a rank, or its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The cache reserved no blocks.
    #[error(transparent)]
    Reserve(ReserveError),
    /// The cache has no committed entry with the hash.
    #[error(transparent)]
    Absent(Absent),
    /// The connection has as many reservations and pins as [`HostConfig::max_held`](super::HostConfig::max_held)
    /// allows.
    #[error("the connection has {max} reservations and pins, the most that max_held allows")]
    TooManyHeld {
        /// The limit that the server's configuration sets.
        max: u32,
    },
    /// The server has as many connections as
    /// [`HostConfig::max_connections`](super::HostConfig::max_connections) allows. This refusal ends the
    /// connection.
    #[error("the server has {max} connections, the most that max_connections allows")]
    TooManyConnections {
        /// The limit that the server's configuration sets.
        max: u32,
    },
    /// The connection has no reservation or pin with this number.
    #[error("the connection has no reservation or pin with the number {handle}")]
    NotHeld {
        /// The number that the request named.
        handle: u64,
    },
}
