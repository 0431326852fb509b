//! Why a rendezvous at the bootstrap server failed, and whether asking again may help.

use super::os::OsError;
use crate::id::WorkerId;

/// Why a lookup or a registration at the bootstrap server failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The server could not be reached. Check the address, and that the server runs.
    #[error("cannot reach the bootstrap server: {0}")]
    Unreachable(OsError),
    /// The client asks as many servers, or has as many requests waiting, as its configuration allows. Ask again
    /// when some have been answered.
    #[error("the bootstrap client has as many servers or requests as its configuration allows")]
    Busy,
    /// The address is not `host:port`.
    #[error("bootstrap address {0:?} is not host:port")]
    Address(String),
    /// Not all ranks of the engine have registered yet. Wait and ask again.
    #[error("the engine is not ready: {registered} of {expected} ranks have registered")]
    NotReady {
        /// How many ranks have registered.
        registered: u32,
        /// How many ranks the engine has.
        expected: u32,
    },
    /// The server has no rank of this engine, role and service, or has it no longer.
    #[error("no rank of this engine, role and service is registered")]
    UnknownRank,
    /// All ranks of the replica drain: they serve the requests that they have, and take no new ones. Route the
    /// request to another worker; asking again does not help.
    #[error("the ranks of this engine drain, and take no new requests")]
    Draining,
    /// The server asks for a secret that this worker does not have. Configure the same secret on both; asking
    /// again does not help.
    #[error("the bootstrap server does not accept this worker's secret")]
    Unauthorized,
    /// The server answered with an HTTP status that this protocol does not use. Check that the
    /// address is that of a bootstrap server.
    #[error("the bootstrap server answered with status {0}")]
    Status(u16),
    /// The server refused a registration: another worker has registered for the same rank, or the
    /// engine has registered with another topology.
    #[error("the bootstrap server refused the registration with status {status}: {reason}")]
    Refused {
        /// The HTTP status of the answer.
        status: u16,
        /// The server's own words, cut to one line.
        reason: String,
    },
    /// The server's answer could not be decoded.
    #[error("the bootstrap server's answer is not valid: {0}")]
    Malformed(&'static str),
    /// A rank has two offers that this worker could use. Take one of them out of the rank's configuration;
    /// asking again does not help.
    #[error("{worker} has two offers that fit: {first} and {second}")]
    Ambiguous {
        /// The rank that has two offers.
        worker: WorkerId,
        /// The first offer in the rank's record that fits, by name and versions.
        first: String,
        /// The second such offer, by name and versions.
        second: String,
    },
    /// The server did not answer in time. Ask again.
    #[error("the bootstrap server did not answer in time")]
    TimedOut,
}

impl BootstrapError {
    /// True if the same question may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            BootstrapError::Address(_)
                | BootstrapError::Draining
                | BootstrapError::Unauthorized
                | BootstrapError::Ambiguous { .. }
        )
    }
}
