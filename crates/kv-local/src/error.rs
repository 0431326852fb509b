//! What can go wrong while transports are made; what goes wrong later is a
//! [`TransportError`](kv_core::TransportError).

use kv_host::{Limit, MemoryError, OsError};

/// Why a transport could not be made, or memory not be given to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// Memory is refused: an impossible range, or peers know the transport already.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Too many arenas.
    #[error("{got} arenas given; a transport takes at most {max}")]
    Arenas {
        /// How many there would be.
        got: usize,
        /// How many there may be.
        max: usize,
    },
    /// A limit of the configuration is out of its range.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}
