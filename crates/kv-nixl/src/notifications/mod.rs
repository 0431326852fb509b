//! Frames and raw notifications: NIXL notifications, with an envelope among transports of ours and without one
//! to and from foreign agents.
//!
//! ```text
//! outgoing, incoming     what is sent, and what has come
//! envelope               how notifications of ours look      speech      what is said to whom
//! arrivals, allowance    how much may be under way: to transports of ours, who confirm, and to foreign agents
//! inbox                  raw notifications that wait for their reader
//! doorbell               a peer on this host is woken
//! ```

pub(crate) mod allowance;
pub(crate) mod arrivals;
pub(crate) mod doorbell;
pub(crate) mod envelope;
pub(crate) mod inbox;
pub(crate) mod incoming;
pub(crate) mod outgoing;
pub(crate) mod speech;
