//! What can go wrong with memory, processes and calls of the operating system.

use std::io;

use kv_core::TransportError;
use rustix::io::Errno;

/// A call of the operating system failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {}", self.io())]
pub struct OsError {
    /// The call.
    pub call: &'static str,
    /// The error number as Linux counts them (`ENOMEM` is 12); `EIO` where the call failed without one.
    pub errno: i32,
}

impl OsError {
    /// The error of a call.
    pub fn new(call: &'static str, error: impl Into<io::Error>) -> OsError {
        OsError { call, errno: error.into().raw_os_error().unwrap_or(Errno::IO.raw_os_error()) }
    }

    /// The kind that the standard library gives the error number.
    pub fn kind(&self) -> io::ErrorKind {
        self.io().kind()
    }

    fn io(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

impl From<OsError> for TransportError {
    fn from(error: OsError) -> TransportError {
        TransportError::Os { call: error.call, kind: error.kind() }
    }
}

/// Why memory could not be made, reached, or given to a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Memory has at least one byte and fits the address space.
    #[error("memory length is {got}; it must be 1 to {max}")]
    Length {
        /// Length asked for, in bytes.
        got: usize,
        /// Largest possible, in bytes.
        max: usize,
    },
    /// The range is not inside the memory.
    #[error("the memory has {len} bytes, {offset}+{size} was asked for")]
    OutOfBounds {
        /// Bytes in the memory.
        len: usize,
        /// Offset asked for, in bytes.
        offset: usize,
        /// Bytes asked for.
        size: usize,
    },
    /// A copy between two ranges that share bytes.
    #[error("{len} bytes from {from:#x} and from {to:#x} overlap")]
    Overlap {
        /// Address of the first byte to be read.
        from: u64,
        /// Address of the first byte to be written.
        to: u64,
        /// Bytes asked for.
        len: usize,
    },
    /// An adopted range must have an address and a length, and end inside the address space.
    #[error("adopted range {addr:#x}+{len} is not a range of memory")]
    Range {
        /// Address of the range.
        addr: u64,
        /// Length of the range, in bytes.
        len: u64,
    },
    /// Peers know the transport already: its memory cannot change any more.
    #[error("memory must be given to a transport before its metadata is asked for")]
    Frozen,
    /// The operating system failed: most often there is not that much memory.
    #[error("{len} bytes of memory: {cause}")]
    Os {
        /// Length asked for, in bytes.
        len: usize,
        /// The call and its error number.
        cause: OsError,
    },
}

/// A limit of a configuration is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {got}; it must be {min} to {max}")]
pub struct Limit {
    /// Name of the configuration's field.
    pub field: &'static str,
    /// Value of the field.
    pub got: usize,
    /// Smallest value allowed.
    pub min: usize,
    /// Largest value allowed.
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
    /// The process is in a PID namespace that cannot be seen from here, and the kernel is older than
    /// Linux 6.5.
    #[error("the peer is in a PID namespace that cannot be seen")]
    Unseen,
    /// The process has ended.
    #[error("the peer's process has ended")]
    Gone,
    /// The operating system failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl From<PeerError> for TransportError {
    fn from(error: PeerError) -> TransportError {
        match error {
            PeerError::OtherUser { .. } => TransportError::Metadata("the peer belongs to another user"),
            PeerError::Unseen => {
                TransportError::Unsupported("the peer is in a PID namespace that cannot be seen")
            }
            PeerError::Gone => TransportError::PeerGone,
            PeerError::Os(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_the_number_of_the_operating_system_and_name_both_values() {
        let error = OsError::new("mmap", Errno::NOMEM);
        assert_eq!((error.errno, error.kind()), (12, io::ErrorKind::OutOfMemory));
        assert_eq!(error.to_string(), "mmap failed: Cannot allocate memory (os error 12)");
        let error = MemoryError::Os { len: 4096, cause: OsError::new("mmap", Errno::NOMEM) };
        assert_eq!(
            error.to_string(),
            "4096 bytes of memory: mmap failed: Cannot allocate memory (os error 12)"
        );
        assert_eq!(OsError::new("read", io::ErrorKind::InvalidData).errno, Errno::IO.raw_os_error());
        let error = PeerError::OtherUser { peer: 7, ours: 0 };
        assert_eq!(error.to_string(), "the peer belongs to user 7, this process to user 0");
    }

    #[test]
    fn a_transport_reports_the_same_kinds_of_errors_as_before() {
        let os = TransportError::Os { call: "mmap", kind: io::ErrorKind::OutOfMemory };
        assert_eq!(TransportError::from(OsError::new("mmap", Errno::NOMEM)), os);
        assert_eq!(TransportError::from(PeerError::Os(OsError::new("mmap", Errno::NOMEM))), os);
        assert_eq!(TransportError::from(PeerError::Gone), TransportError::PeerGone);
        assert!(matches!(PeerError::Unseen.into(), TransportError::Unsupported(_)));
        assert!(matches!(PeerError::OtherUser { peer: 7, ours: 0 }.into(), TransportError::Metadata(_)));
    }
}
