//! What can go wrong while memory and planes are made; what goes wrong later is a
//! [`PlaneError`](kv_core::PlaneError).

use std::io;

/// Why an arena could not be made or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// An arena has at least one byte and fits the address space.
    #[error("arena length is {got}; it must be 1 to {max}")]
    Length {
        /// Length asked for.
        got: usize,
        /// Largest possible.
        max: usize,
    },
    /// The range is not inside the arena.
    #[error("the arena has {len} bytes, {offset}+{size} was asked for")]
    OutOfBounds {
        /// Bytes in the arena.
        len: usize,
        /// Offset asked for.
        offset: usize,
        /// Bytes asked for.
        size: usize,
    },
    /// The operating system failed: most often there is not that much memory.
    #[error("{call} of {len} bytes failed: {kind}")]
    Os {
        /// The call.
        call: &'static str,
        /// Length of the arena.
        len: usize,
        /// The error.
        kind: io::ErrorKind,
    },
}

/// Why a plane could not be made, or memory not be given to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// Peers know the plane already: its memory cannot change any more.
    #[error("memory must be given to a plane before its metadata is asked for")]
    Frozen,
    /// Too many arenas.
    #[error("{got} arenas given; a plane takes at most {max}")]
    Arenas {
        /// How many there would be.
        got: usize,
        /// How many there may be.
        max: usize,
    },
    /// An adopted range must have an address and end inside the address space.
    #[error("adopted range {addr:#x}+{len} is not a range of memory")]
    Range {
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
    /// A limit is out of its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Limit {
        /// The field of the configuration.
        field: &'static str,
        /// Its value.
        got: usize,
        /// Smallest allowed.
        min: usize,
        /// Largest allowed.
        max: usize,
    },
    /// The operating system failed.
    #[error("{call} failed: {kind}")]
    Os {
        /// The call.
        call: &'static str,
        /// The error.
        kind: io::ErrorKind,
    },
}
