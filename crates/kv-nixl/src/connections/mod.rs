//! Peers' agents: what is known of each agent, and how the connection to an agent is opened and closed.
//!
//! ```text
//! remote               a peer's agent: what is known of the agent, and what is on the way to the agent
//! opening              a connection to a transport of this crate
//! transport_metadata   what a transport of this crate says of itself
//! route, cards         how bytes get to a peer, and which RDMA cards UCX may use
//! closing              how connections end
//! id, origins          numbers of connections, and of agents that send frames
//! ```

pub(crate) mod cards;
pub(crate) mod closing;
pub(crate) mod id;
pub(crate) mod opening;
pub(crate) mod origins;
pub(crate) mod remote;
pub(crate) mod route;
pub(crate) mod transport_metadata;
