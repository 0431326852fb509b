//! Conversations with peers.

pub(in crate::proto) mod calls;
pub(in crate::proto) mod incoming;
pub(in crate::proto) mod peer;
pub(in crate::proto) mod permission;
