//! Reasons why a foreign agent is not connected.

use std::io;
use std::net::SocketAddr;

use kv_core::{MemoryKind, TransportError};

use crate::foreign::region::ForeignRegion;

/// Why a foreign agent was not connected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// The metadata is not what NIXL 1.5 writes: cut off, damaged, of another version, or not an agent's
    /// metadata at all. Ask the agent's side channel again.
    #[error("the agent's metadata has no valid {field:?} at byte {at} of {len}")]
    Damaged {
        /// The tag that was expected.
        field: &'static str,
        /// Offset in the metadata, in bytes.
        at: usize,
        /// Length of the metadata, in bytes.
        len: usize,
    },
    /// A length or a count is out of its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Size {
        /// The name of the length or the count.
        field: &'static str,
        /// The value that was found.
        got: usize,
        /// The smallest value that is allowed.
        min: usize,
        /// The largest value that is allowed.
        max: usize,
    },
    /// The agent does not have this transport's backend. Both ends need the same backend.
    #[error("the agent has the backends {theirs:?}; this transport uses {ours:?}")]
    Backend {
        /// The backend of this transport.
        ours: String,
        /// The backends of the agent.
        theirs: Vec<String>,
    },
    /// The peer is connected, and the metadata is of another agent. Disconnect the peer first.
    #[error("the metadata is of the agent {found:?}, and the peer's agent is {asked:?}")]
    Name {
        /// The name of the peer's agent.
        asked: String,
        /// The name in the metadata.
        found: String,
    },
    /// The agent has a name that only transports of this crate have. A transport is connected by
    /// [`connect`](kv_core::Transport::connect), with the metadata that it gives to its peers.
    #[error("the agent is called {found:?}, and the names {reserved:?} are those of this crate's transports")]
    Reserved {
        /// The name of the agent.
        found: String,
        /// The form of the names of transports' agents.
        reserved: &'static str,
    },
    /// An agent of this name is connected, and the metadata has other addresses of its backends: the agent
    /// was started again, or two agents have one name. Disconnect the peers of the connected agent first.
    #[error(
        "the agent {name:?} was started again: the addresses of the connected agent have the digest \
         {connected:#018x}, those in the metadata {found:#018x}"
    )]
    Restarted {
        /// The name of the agent.
        name: String,
        /// Digest of the connected agent's addresses.
        connected: u64,
        /// Digest of the addresses in the metadata.
        found: u64,
    },
    /// The agent is connected, and the metadata has other registrations of memory than the agent had then.
    /// Disconnect the agent's peers first.
    #[error(
        "the agent {name:?} has other registrations than when it was connected: their digest was \
         {connected:#018x}, and is {found:#018x} in the metadata"
    )]
    Reregistered {
        /// The name of the agent.
        name: String,
        /// Digest of the registrations, with their keys, with which the agent was connected.
        connected: u64,
        /// Digest of the registrations in the metadata.
        found: u64,
    },
    /// The agent is connected with other regions than the call names. Disconnect the agent's peers first.
    #[error(
        "the agent {name:?} is connected with other regions: region {region} is {connected:?}, and \
         {asked:?} is asked for"
    )]
    Differs {
        /// The name of the agent.
        name: String,
        /// The number of the first region that differs.
        region: usize,
        /// The connected region of that number; `None` if fewer regions are connected.
        connected: Option<ForeignRegion>,
        /// The region of that number in the call; `None` if the call names fewer regions.
        asked: Option<ForeignRegion>,
    },
    /// The agent has not registered this range with NIXL, in one piece.
    #[error(
        "region {region} ({memory:?} of device {device}, {len} bytes at {addr:#x}) is not inside one \
         registration of the agent"
    )]
    Region {
        /// The number of the region in the call.
        region: usize,
        /// The kind of memory.
        memory: MemoryKind,
        /// The device's number, as NIXL counts devices.
        device: u64,
        /// The address of the first byte.
        addr: u64,
        /// The length in bytes.
        len: u64,
    },
    /// The agent's listener cannot be reached, ends the connection, or takes too long.
    #[error("the agent's listener at {address}: {call} failed: {kind}")]
    Listener {
        /// The listener's address.
        address: SocketAddr,
        /// The call that failed.
        call: &'static str,
        /// The kind of the error; `TimedOut` if the time was up.
        kind: io::ErrorKind,
    },
    /// An error of any peer: the agent's connection has just failed, or a call of NIXL has.
    #[error(transparent)]
    Transport(#[from] TransportError),
}
