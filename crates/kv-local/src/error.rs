//! The errors of making a transport and of giving it memory. Later errors are a
//! [`TransportError`](kv_core::TransportError).

use kv_core::MemoryKind;
use kv_host::{Limit, MemoryError, OsError};

/// Why a transport could not be made, or could not be given memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// The memory is refused: the range is impossible, or the metadata has been asked for already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region lies in a device's memory or in a file, and this transport moves host memory only. NIXL and UCX
    /// move a device's memory, and NIXL moves files.
    #[error("regions[{region}] is in {memory:?} of device {device}; kv-local reaches Dram only")]
    Kind {
        /// Position of the region in the list.
        region: usize,
        /// The kind of the region's memory.
        memory: MemoryKind,
        /// The region's device number.
        device: u64,
    },
    /// The transport has as many arenas as it can have. Put several regions into one arena.
    #[error("the transport would have {got} arenas; a transport takes at most {max}")]
    Arenas {
        /// Arenas that the transport would have.
        got: usize,
        /// Most arenas of one transport.
        max: usize,
    },
    /// A field of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
