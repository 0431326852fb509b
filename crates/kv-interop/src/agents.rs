//! The data transport under a dialect: what the transport must do with NIXL agents of other programs.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::{PeerId, Transport, TransportError};

use crate::message::AgentRegion;

/// A transport that works together with foreign NIXL agents, and sends them nothing of its own.
///
/// [`Transport::post`], [`send`](Transport::send) and [`permit`](Transport::permit) work with foreign agents as with
/// other peers: frames, and the `notify` of posts, arrive as raw notifications.
pub trait Agents: Transport {
    /// The name of this transport's own agent, by which foreign agents address the transport.
    fn agent_name(&self) -> String;

    /// The metadata of this transport's agent, with all regions that were registered before, as NIXL writes them
    /// (`get_agent_metadata`).
    fn agent_metadata(&self) -> Result<Bytes, TransportError>;

    /// Makes a foreign agent a peer, with these regions of its memory. Metadata or regions that are refused are
    /// [`TransportError::Foreign`].
    fn connect_agent(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        regions: &[AgentRegion],
    ) -> Result<(), TransportError>;

    /// Takes the oldest notification that was not taken: the name of the agent that sent the notification, and the
    /// bytes. [`Transport::poll`] brings notifications in.
    fn next_notification(&mut self) -> Option<(Arc<str>, Bytes)>;
}

#[cfg(feature = "nixl")]
impl Agents for kv_nixl::NixlTransport {
    fn agent_name(&self) -> String {
        kv_nixl::NixlTransport::agent_name(self)
    }

    fn agent_metadata(&self) -> Result<Bytes, TransportError> {
        kv_nixl::NixlTransport::agent_metadata(self)
    }

    fn connect_agent(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        regions: &[AgentRegion],
    ) -> Result<(), TransportError> {
        let region = |region: &AgentRegion| {
            let AgentRegion { addr, len, stride, memory, device } = *region;
            kv_nixl::ForeignRegion { addr, len, item_len: stride, memory, device }
        };
        let regions: Vec<_> = regions.iter().map(region).collect();
        self.connect_foreign(peer, metadata, &regions).map_err(|error| match error {
            kv_nixl::ForeignError::Transport(error) => error,
            error => TransportError::Foreign(error.to_string()),
        })
    }

    fn next_notification(&mut self) -> Option<(Arc<str>, Bytes)> {
        kv_nixl::NixlTransport::next_notification(self).map(|raw| (raw.agent, raw.message))
    }
}
