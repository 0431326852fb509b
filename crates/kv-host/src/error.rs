//! The errors of memory, of processes, of configurations, and of calls of the operating system.

pub use kv_core::OsError;
use std::path::PathBuf;

use kv_core::TransportError;

/// Why memory could not be made, reached, or given to a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The length is zero, or more than an address space has.
    #[error("memory length is {got} bytes; it must be 1 to {max}")]
    Length {
        /// Length asked for, in bytes.
        got: usize,
        /// Largest possible, in bytes.
        max: usize,
    },
    /// The range asked for is not inside the memory.
    #[error("the memory has {len} bytes; {size} bytes at offset {offset} are not inside")]
    OutOfBounds {
        /// Length of the memory, in bytes.
        len: usize,
        /// Offset of the range asked for, in bytes.
        offset: usize,
        /// Length of the range asked for, in bytes.
        size: usize,
    },
    /// The source and the target of a copy share bytes.
    #[error("a copy of {len} bytes from {from:#x} to {to:#x}: source and target overlap")]
    Overlap {
        /// Address of the first byte to be read.
        from: u64,
        /// Address of the first byte to be written.
        to: u64,
        /// Bytes to be copied.
        len: usize,
    },
    /// An adopted range has the address zero, has no bytes, or ends outside of the address space.
    #[error("{len} bytes at {addr:#x} are not a range of memory that can be adopted")]
    Range {
        /// Address of the range.
        addr: u64,
        /// Length of the range, in bytes.
        len: u64,
    },
    /// Memory came after the transport's metadata was asked for. Peers may know the metadata, so the memory
    /// cannot change any more.
    #[error("memory must be given to a transport before its metadata is asked for")]
    Frozen,
    /// The operating system failed: most often the host does not have that much memory.
    #[error("{len} bytes of memory could not be had: {cause}")]
    Os {
        /// Length asked for, in bytes.
        len: usize,
        /// The call and its error number.
        cause: OsError,
    },
}

/// A field of a configuration is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {got}; it must be {min} to {max}")]
pub struct Limit {
    /// Name of the configuration's field.
    pub field: &'static str,
    /// Value of the field.
    pub got: usize,
    /// Smallest value that is allowed.
    pub min: usize,
    /// Largest value that is allowed.
    pub max: usize,
}

/// Why the process at the other end of a socket is not accepted, or cannot be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The process belongs to another user.
    #[error("the peer belongs to user {peer}, this process to user {ours}")]
    OtherUser {
        /// Effective user of the peer.
        peer: u32,
        /// Effective user of this process.
        ours: u32,
    },
    /// The process, like this one, runs as the overflow user id of a user namespace, under which the kernel shows every
    /// user that the namespace does not know. Give the workers a user of their own there.
    #[error(
        "the peer and this process run as {peer}, the overflow user id of this user namespace, so that the peer may be any \
         user"
    )]
    UnmappedUser {
        /// Effective user of both processes, as the kernel shows it.
        peer: u32,
    },
    /// The process is in a PID namespace that this process cannot see, and the kernel is older than Linux
    /// 6.5. Put both into one PID namespace, or use a newer kernel.
    #[error("the peer is in a PID namespace that this process cannot see; Linux 6.5 or newer is needed")]
    Unseen,
    /// The process has ended.
    #[error("the peer's process has ended")]
    Gone,
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Why a library that was found by a search is not loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerError {
    /// Another user can change the library, or a folder in which it was found.
    #[error(
        "{path:?} belongs to user {owner} and has mode {mode:o}; it must belong to user {ours}, as whom this process runs, \
         or to root, and others must not be able to write it"
    )]
    Foreign {
        /// The library, or the folder.
        path: PathBuf,
        /// Owner of the path, as a user id.
        owner: u32,
        /// Effective user of this process.
        ours: u32,
        /// Its mode: who may read and write it.
        mode: u32,
    },
    /// The owner could not be read.
    #[error("the owner of {path:?} could not be read: {cause}")]
    Os {
        /// The library, or the folder.
        path: PathBuf,
        /// The call and its error number.
        cause: OsError,
    },
}

impl From<PeerError> for TransportError {
    fn from(error: PeerError) -> TransportError {
        match error {
            PeerError::OtherUser { peer, ours } => TransportError::OtherUser { peer, ours },
            PeerError::UnmappedUser { .. } => TransportError::Unsupported(
                "a peer that may be any user, because both run as the overflow user id",
            ),
            PeerError::Unseen => {
                TransportError::Unsupported("a peer in a PID namespace that this process cannot see")
            }
            PeerError::Gone => TransportError::PeerGone,
            PeerError::Os(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn errors_keep_the_number_of_the_operating_system_and_name_both_values() {
        let error = OsError::new("mmap", Errno::NOMEM);
        assert_eq!((error.errno, error.kind), (Some(12), io::ErrorKind::OutOfMemory));
        assert_eq!(error.to_string(), "mmap failed: Cannot allocate memory (os error 12)");
        let error = MemoryError::Os { len: 4096, cause: OsError::new("mmap", Errno::NOMEM) };
        assert_eq!(
            error.to_string(),
            "4096 bytes of memory could not be had: mmap failed: Cannot allocate memory (os error 12)"
        );
        assert_eq!(OsError::new("read", io::ErrorKind::InvalidData).errno, None);
        let error = PeerError::OtherUser { peer: 7, ours: 0 };
        assert_eq!(error.to_string(), "the peer belongs to user 7, this process to user 0");
    }

    #[test]
    fn a_transport_reports_the_kind_and_the_number_of_the_operating_system() {
        let os = TransportError::Os(OsError {
            call: "mmap",
            kind: io::ErrorKind::OutOfMemory,
            errno: Some(Errno::NOMEM.raw_os_error()),
        });
        assert_eq!(TransportError::from(OsError::new("mmap", Errno::NOMEM)), os);
        assert_eq!(TransportError::from(PeerError::Os(OsError::new("mmap", Errno::NOMEM))), os);
        assert_eq!(TransportError::from(PeerError::Gone), TransportError::PeerGone);
        assert!(matches!(PeerError::Unseen.into(), TransportError::Unsupported(_)));
        let other = TransportError::OtherUser { peer: 7, ours: 0 };
        assert_eq!(TransportError::from(PeerError::OtherUser { peer: 7, ours: 0 }), other);
    }
}
