//! The errors of making a transport and of giving it memory. Later errors are a
//! [`TransportError`](kv_core::TransportError).

use std::net::SocketAddr;

use kv_core::MemoryKind;
use kv_host::{Limit, MemoryError, OsError};

/// Why a transport could not be made, or could not be given memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The transport cannot listen on this address: the address is another host's, or taken. Give an address
    /// of this host, with port 0 for any free port.
    #[error("bind is {address}, where this process cannot listen: {cause}")]
    Bind {
        /// [`TcpConfig::bind`](crate::TcpConfig::bind).
        address: SocketAddr,
        /// The call and its error number.
        cause: OsError,
    },
    /// Peers cannot connect to this address: it names no host, or is link-local IPv6, or multicast. Say in
    /// [`TcpConfig::advertise`](crate::TcpConfig::advertise) how peers reach this one.
    #[error("advertise has {address}, which names no host that a peer could connect to")]
    Advertise {
        /// The address; that of `bind` if `advertise` is empty.
        address: SocketAddr,
    },
    /// The memory is refused: the range is impossible, or the metadata has been asked for already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region lies in a device's memory or in a file, and this transport moves host memory only. NIXL
    /// and UCX move a device's memory, and NIXL moves files.
    #[error("regions[{region}] is in {memory:?} of device {device}; kv-tcp reaches Dram only")]
    Kind {
        /// Position of the region in the list.
        region: usize,
        /// The kind of the region's memory.
        memory: MemoryKind,
        /// The region's device number.
        device: u64,
    },
    /// A field of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
