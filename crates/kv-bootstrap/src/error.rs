//! Why a bootstrap server or a bootstrap client could not be started.

use std::io;
use std::net::SocketAddr;

/// Why a bootstrap server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapServerError {
    /// The address is not `host:port`, or the host name has no address. Check the configuration.
    #[error("cannot listen on {addr:?}: {source}")]
    Address {
        /// The address as it was given.
        addr: String,
        /// Why the address cannot be used.
        source: io::Error,
    },
    /// The address is in use, or is not an address of this machine. Choose another, or port 0 for a free
    /// port.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// The socket address that was refused.
        addr: SocketAddr,
        /// Why the system refused the address.
        source: io::Error,
    },
    /// The operating system refused a resource. Raise the limit on descriptors or threads.
    #[error("{call} failed: {source}")]
    Os {
        /// Name of the system call.
        call: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Why a bootstrap client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapClientError {
    /// The operating system refused a resource. Raise the limit on descriptors.
    #[error("{call} failed: {source}")]
    Os {
        /// Name of the system call.
        call: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}
