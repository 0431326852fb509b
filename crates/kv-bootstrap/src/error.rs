//! Why a server or a client could not be started.

use std::io;
use std::net::SocketAddr;

/// Why a bootstrap server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapServerError {
    /// The address is not `host:port`, or the host has no address. Check the configuration.
    #[error("cannot listen on {addr:?}: {source}")]
    Address {
        /// The address as it was given.
        addr: String,
        /// Why it cannot be used.
        source: io::Error,
    },
    /// The address is taken, or not of this machine. Choose another, or port 0 for any.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why it cannot be used.
        source: io::Error,
    },
    /// The operating system refused a resource: raise the limit on descriptors or threads.
    #[error("{call} failed: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Why a bootstrap client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapClientError {
    /// The operating system refused a resource: raise the limit on descriptors.
    #[error("{call} failed: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}
