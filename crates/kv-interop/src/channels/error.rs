//! Why a side channel cannot be opened.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

/// Why a side channel did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The address to listen on is not `host:port`, or the host has no address.
    #[error("{addr:?} is no address to listen on: {source}")]
    Address {
        /// The address as it was given.
        addr: String,
        /// What the system says.
        source: io::Error,
    },
    /// The address belongs to another process, or to another host.
    #[error("the side channel cannot listen on {addr}: {source}")]
    Bind {
        /// The address that was tried last.
        addr: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The system has no descriptors or threads left. Raise the limits of the process.
    #[error("{call} failed: {source}")]
    Os {
        /// The call that failed.
        call: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

impl ChannelError {
    pub(crate) fn os(call: &'static str) -> impl FnOnce(io::Error) -> ChannelError {
        move |source| ChannelError::Os { call, source }
    }
}

/// A socket that listens on the first address of `addr` that can be bound. A name is resolved here, at the start
/// of a worker.
pub(crate) fn bind(addr: &str) -> Result<mio::net::TcpListener, ChannelError> {
    let fail = |source| ChannelError::Address { addr: addr.to_owned(), source };
    let mut failure = fail(io::ErrorKind::AddrNotAvailable.into());
    for addr in addr.to_socket_addrs().map_err(fail)? {
        let bound = TcpListener::bind(addr).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(mio::net::TcpListener::from_std(listener))
        });
        match bound {
            Ok(listener) => return Ok(listener),
            Err(source) => failure = ChannelError::Bind { addr, source },
        }
    }
    Err(failure)
}
