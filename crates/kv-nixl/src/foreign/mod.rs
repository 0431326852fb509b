//! Foreign agents: NIXL agents of programs that do not speak this crate's frames, such as vLLM's and SGLang's
//! workers.
//!
//! Such a program has a side channel of its own. Over the side channel both ends hand each other the metadata
//! of their agents, as NIXL writes metadata, and the addresses of their KV caches. A transport and a foreign
//! agent then work together in three ways:
//!
//! - The agent gets the transport's [`agent_metadata`](crate::NixlTransport::agent_metadata). From then on
//!   the agent reads and writes the transport's regions and sends notifications, possibly without the
//!   transport's knowledge.
//! - [`connect_foreign`](crate::NixlTransport::connect_foreign) makes the agent a peer, which the transport
//!   can read, write and notify. [`post`](kv_core::Transport::post) moves bytes between the transport's
//!   regions and the [`ForeignRegion`](crate::ForeignRegion)s; [`send`](kv_core::Transport::send) and the
//!   `notify` of a post send their bytes as a raw notification;
//!   [`PeerGone`](kv_core::TransportEvent::PeerGone) ends the peer. Writes need
//!   [`permit`](kv_core::Transport::permit), as with every peer.
//! - [`next_notification`](crate::NixlTransport::next_notification) returns the agent's notifications, with
//!   the agent's name.
//!
//! The transport sends a foreign agent nothing of its own: no probe, no confirmation, no farewell, no datagram.
//! Hence these limits:
//!
//! - The end of a foreign agent is seen when UCX gives up the connection: over TCP at once; over other routes
//!   when something is on its way, or when UCX looks by itself (`UCX_KEEPALIVE_INTERVAL`, 20 s). Without
//!   regions the end is seen only when something that is sent fails. A foreign agent always ends as
//!   [`WayEnd::Lost`](kv_core::WayEnd::Lost), because nothing is known of the agent's process.
//! - The restart of a foreign agent is seen in new metadata: under the name of a connected agent, other
//!   addresses of its backends are [`Restarted`](crate::ForeignError::Restarted), and other registrations
//!   [`Reregistered`](crate::ForeignError::Reregistered). The address of a UCX worker has a number that is
//!   drawn at random for each life; other backends may give a new life the old address. Without new metadata,
//!   a new life is not seen until the connection to the old life fails, and the notifications of the new life
//!   come under the name of the old. A server that lends pages to an agent therefore repeats the handshake
//!   after [`PeerGone`](kv_core::TransportEvent::PeerGone).
//! - A foreign agent confirms nothing, so `send` answers `WouldBlock` beyond
//!   [`outbound_bytes`](crate::NixlConfig::outbound_bytes) within ten seconds.
//! - Nothing is known of the [`Route`](crate::Route) to a foreign agent. So no READ and no WRITE is refused, whatever
//!   [`reads_over_tcp`](crate::NixlConfig::reads_over_tcp) and [`gpu_over_tcp`](crate::NixlConfig::gpu_over_tcp) say.
//! - Notifications of a foreign agent wait for the transport's next look, at most
//!   [`idle_poll`](crate::NixlConfig::idle_poll).
//!
//! An agent with NIXL's own listener hands out and takes in metadata by IP address and port;
//! [`fetch_metadata`] and [`send_metadata`] talk to such a listener. The transport's own agent has no
//! listener. Everybody who reached its port could drop connections and load metadata, unchecked, in a thread
//! beside the transport's, and neither the transport's proofs nor its bounds would hold. Neither vLLM nor
//! SGLang uses the listener.

pub(crate) mod agent_metadata;
mod connecting;
pub(crate) mod error;
mod exchange;
pub(crate) mod region;
mod registered;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod sample;
#[cfg(test)]
mod tests;

pub use exchange::{fetch_metadata, send_metadata};
