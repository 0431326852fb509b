//! Numbers that nobody can guess.

use std::io::ErrorKind;

use kv_core::PlaneError;
use rustix::rand::{GetRandomFlags, getrandom};

/// A connection to an agent; random, and thus also the connection's number in notifications, which
/// only that agent is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RemoteId(pub(crate) u64);

impl RemoteId {
    /// A new one; never the number of the doorbell.
    pub(crate) fn random() -> Result<RemoteId, PlaneError> {
        let number = random().map_err(|kind| PlaneError::Os { call: "getrandom", kind })?;
        Ok(RemoteId(number >> 1))
    }
}

/// A number of the kernel's.
pub(crate) fn random() -> Result<u64, ErrorKind> {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        Ok(_) => Err(ErrorKind::UnexpectedEof),
        Err(error) => Err(error.kind()),
    }
}
