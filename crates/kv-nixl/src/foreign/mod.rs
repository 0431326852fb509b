//! Foreign agents: NIXL agents of programs that do not speak our frames, such as vLLM's and SGLang's
//! workers.
//!
//! Such a program has a side channel of its own, over which both ends hand each other their agents'
//! metadata, as NIXL wrote it, and the addresses of their KV caches. So a foreign agent
//!
//! - is given [`agent_metadata`](crate::NixlTransport::agent_metadata), and then reads and writes our regions
//!   and sends notifications without another word from us, and possibly without our knowing it;
//! - is connected by [`connect_foreign`](crate::NixlTransport::connect_foreign) where we are to read, write or
//!   speak. From then on it is a peer like others: [`post`](kv_core::Transport::post) moves bytes between our
//!   regions and the [`ForeignRegion`](crate::ForeignRegion)s, [`send`](kv_core::Transport::send) and the `notify`
//!   of a post send their bytes as a raw notification, and [`PeerGone`](kv_core::TransportEvent::PeerGone) ends
//!   it. Writes need [`permit`](kv_core::Transport::permit), as always;
//! - is heard by [`next_notification`](crate::NixlTransport::next_notification), by the name of its agent.
//!
//! Nothing of ours is sent to it: no probe, no confirmation, no farewell, no ring. For that reason
//!
//! - its end is seen when UCX gives up the connection: over TCP at once, else when something is on its way
//!   or UCX looks by itself (`UCX_KEEPALIVE_INTERVAL`, 20 s). Without regions it is seen only when something
//!   that is sent fails. The way always ends as [`WayEnd::Lost`](kv_core::WayEnd::Lost), because nothing is
//!   known of the agent's process;
//! - that it was started again is seen by its metadata: under the name of a connected agent, other addresses
//!   of its backends are [`Restarted`](crate::ForeignError::Restarted), and other registrations
//!   [`Reregistered`](crate::ForeignError::Reregistered). A UCX worker's address has a number that is drawn
//!   at random for each life; other backends may give a new life the old address. Without new metadata, a new
//!   life is not seen until the connection to the old one fails, and its notifications come under the old
//!   one's name: whoever lends pages to an agent has its handshake done again after
//!   [`PeerGone`](kv_core::TransportEvent::PeerGone);
//! - it confirms nothing, so `send` answers `WouldBlock` beyond
//!   [`outbound_bytes`](crate::NixlConfig::outbound_bytes) within ten seconds;
//! - its notifications wait for our next look, at most [`idle_poll`](crate::NixlConfig::idle_poll).
//!
//! An agent with NIXL's own listener hands out and takes in metadata by IP address and port:
//! [`fetch_metadata`] and [`send_metadata`] ask it. Our agent has no such listener. Whoever reaches its port says
//! which of our connections is to be dropped and which metadata to be loaded, unchecked, in a thread beside the
//! transport's, so that neither the transport's proofs nor its bounds would hold. Neither vLLM nor SGLang uses it.

pub(crate) mod agent_metadata;
mod connecting;
pub(crate) mod error;
mod exchange;
pub(crate) mod region;
mod registered;
#[cfg(test)]
mod tests;

pub use exchange::{fetch_metadata, send_metadata};
