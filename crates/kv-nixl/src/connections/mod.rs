//! Peers' agents: what is known of each, and how the way to it is opened and closed.
//!
//! ```text
//! remote           a peer's agent: what is known of it, and what is on the way to it
//! opening          a connection to a transport of ours          transport_metadata  what such a transport says of itself
//! closing          how connections end                      transport        how the bytes get to a peer
//! id, origins      numbers of connections, and of agents that send frames
//! ```

pub(crate) mod closing;
pub(crate) mod id;
pub(crate) mod opening;
pub(crate) mod origins;
pub(crate) mod remote;
pub(crate) mod route;
pub(crate) mod transport_metadata;
