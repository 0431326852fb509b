//! Why a foreign agent is not connected.

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
        /// Where, in bytes.
        at: usize,
        /// Bytes of the metadata.
        len: usize,
    },
    /// A length or a count is out of its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Size {
        /// What.
        field: &'static str,
        /// Its size.
        got: usize,
        /// Smallest allowed.
        min: usize,
        /// Largest allowed.
        max: usize,
    },
    /// The agent has none of our backend. Both sides choose the same one.
    #[error("the agent has the backends {theirs:?}; this transport uses {ours:?}")]
    Backend {
        /// Ours.
        ours: String,
        /// The agent's.
        theirs: Vec<String>,
    },
    /// The peer is connected, and the metadata is of another agent than that peer's. Disconnect the peer first.
    #[error("the metadata is of the agent {found:?}; expected was {asked:?}")]
    Name {
        /// Whose metadata was expected.
        asked: String,
        /// Whose it is.
        found: String,
    },
    /// The agent has a name that only transports of this crate have. A transport is connected by
    /// [`connect`](kv_core::Transport::connect), with the metadata that it gives to its peers.
    #[error("the agent is called {found:?}, and the names {reserved:?} are those of this crate's transports")]
    Reserved {
        /// The agent's name.
        found: String,
        /// The form of transports' names.
        reserved: &'static str,
    },
    /// An agent of this name is connected, and the metadata has other addresses of its backends: the agent
    /// was started again, or there are two of one name. Disconnect the peers of the connected one first.
    #[error(
        "an agent {name:?} is connected whose addresses have the digest {connected:#018x}; here it is {found:#018x}: \
         the agent was started again"
    )]
    Restarted {
        /// The agent's name.
        name: String,
        /// Digest of the connected agent's addresses.
        connected: u64,
        /// Digest of those in the metadata.
        found: u64,
    },
    /// The agent is connected, and its metadata has other registrations of memory than when it was.
    /// Disconnect its peers first.
    #[error(
        "the agent {name:?} is connected with registrations of the digest {connected:#018x}; here it is {found:#018x}"
    )]
    Reregistered {
        /// The agent's name.
        name: String,
        /// Digest of the registrations, with their keys, with which the agent was connected.
        connected: u64,
        /// Digest of those in the metadata.
        found: u64,
    },
    /// The agent is connected, with other regions than those that are asked for. Disconnect its peers first.
    #[error(
        "the agent {name:?} is connected with other regions: region {region} is {connected:?} there, {asked:?} here"
    )]
    Differs {
        /// The agent's name.
        name: String,
        /// The number of the first region that differs.
        region: usize,
        /// That region, as it is connected; `None` if there are fewer regions.
        connected: Option<ForeignRegion>,
        /// That region, as it is asked for; `None` if fewer are.
        asked: Option<ForeignRegion>,
    },
    /// The agent has not registered this range, in one piece, with NIXL.
    #[error(
        "region {region}: {memory:?} {device}, {addr:#x}+{len} is not in memory that the agent has registered"
    )]
    Region {
        /// Its number.
        region: usize,
        /// Its kind of memory.
        memory: MemoryKind,
        /// Its device.
        device: u64,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
    /// The agent's listener cannot be reached, ends the connection, or takes too long.
    #[error("the agent's listener at {address}: {call} failed: {kind}")]
    Listener {
        /// The address that was asked.
        address: SocketAddr,
        /// What was being done.
        call: &'static str,
        /// The error; `TimedOut` if the time was up.
        kind: io::ErrorKind,
    },
    /// What goes wrong with any peer: the agent's connection has just failed, or a call of NIXL has.
    #[error(transparent)]
    Transport(#[from] TransportError),
}
