//! Why a rendezvous at the bootstrap server failed, and whether asking again may help.

use crate::id::WorkerId;

/// Why a rendezvous failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The server could not be reached. Check the address, and that the server runs.
    #[error("cannot reach the bootstrap server: {0}")]
    Unreachable(std::io::ErrorKind),
    /// The address is not `host:port`.
    #[error("bootstrap address {0:?} is not host:port")]
    Address(String),
    /// Not all ranks of the engine have registered yet. Wait and ask again.
    #[error("the engine is not ready: {registered} of {expected} ranks have registered")]
    NotReady {
        /// Ranks that have registered.
        registered: u32,
        /// Ranks the engine has.
        expected: u32,
    },
    /// No such rank is registered (any more).
    #[error("no such rank is registered")]
    UnknownRank,
    /// The server asks for a secret that this worker does not have. Configure the same on both; asking
    /// again does not help.
    #[error("the bootstrap server does not accept this worker's secret")]
    Unauthorized,
    /// The server answered with something that is not ours.
    #[error("the bootstrap server answered with status {0}")]
    Status(u16),
    /// The server refused a registration: another rank claims its place, or another topology.
    #[error("the bootstrap server refused the registration with status {status}: {reason}")]
    Refused {
        /// Its status.
        status: u16,
        /// Its own words, cut to a line.
        reason: String,
    },
    /// The answer was not valid.
    #[error("the bootstrap server's answer is not valid: {0}")]
    Malformed(&'static str),
    /// A rank has two offers that this worker could use. Take one of them out of the rank's configuration;
    /// asking again does not help.
    #[error("{worker} has two offers that fit: {first} and {second}")]
    Ambiguous {
        /// The rank.
        worker: WorkerId,
        /// The first offer in its record that fits: name and versions.
        first: String,
        /// The second.
        second: String,
    },
    /// No answer in time.
    #[error("the bootstrap server did not answer in time")]
    TimedOut,
}

impl BootstrapError {
    /// True if the same question may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            BootstrapError::Address(_) | BootstrapError::Unauthorized | BootstrapError::Ambiguous { .. }
        )
    }
}
