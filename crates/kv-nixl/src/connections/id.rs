//! The numbers of connections.

use kv_core::TransportError;
use kv_host::random;

/// A connection to an agent; random, and thus also the connection's number in notifications, which
/// only that agent is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RemoteId(pub(crate) u64);

impl RemoteId {
    /// A new one; never the number of the doorbell.
    pub(crate) fn random() -> Result<RemoteId, TransportError> {
        Ok(RemoteId(u64::from_le_bytes(random()?) >> 1))
    }
}
