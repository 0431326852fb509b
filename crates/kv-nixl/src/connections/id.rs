//! The numbers of connections.

use kv_core::TransportError;
use kv_host::random;

/// The number of a connection to an agent. The number is random, and only that agent is told it: in
/// notifications the number proves who the sender is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RemoteId(pub(crate) u64);

impl RemoteId {
    /// A new number, which is never the number of the datagram socket.
    pub(crate) fn random() -> Result<RemoteId, TransportError> {
        Ok(RemoteId(u64::from_le_bytes(random()?) >> 1))
    }
}
