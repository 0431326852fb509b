//! Frames and raw notifications. Frames among transports of this crate have an envelope, and go as NIXL notifications or as
//! datagrams. What goes to foreign agents and comes from them is raw: NIXL notifications without an envelope.
//!
//! ```text
//! outgoing, incoming     what is sent, and what has arrived
//! envelope               the form of this crate's notifications
//! speech                 what is said to a transport of this crate, and to a foreign agent
//! arrivals, allowance    how much may be under way: to transports of this crate, and to foreign agents
//! inbox                  raw notifications that wait for their reader
//! datagrams              frames, confirmations and rings to a peer on this host, beside NIXL
//! ```

pub(crate) mod allowance;
pub(crate) mod arrivals;
pub(crate) mod datagrams;
pub(crate) mod envelope;
pub(crate) mod inbox;
pub(crate) mod incoming;
pub(crate) mod outgoing;
pub(crate) mod speech;
