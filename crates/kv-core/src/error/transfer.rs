//! Why a session failed, as a value: who, where in its life, why, what now.

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use crate::id::{Room, WorkerId};

/// Why a session failed (the seed's `failure_exception`, as a value): who, where, why, what now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room {room}, {phase}{}: {cause}; {}", with_peer(.peer), .cause.advice())]
pub struct TransferError {
    /// The request.
    pub room: Room,
    /// The peer, if it was known yet.
    pub peer: Option<WorkerId>,
    /// How far the session had come.
    pub phase: Phase,
    /// What happened.
    pub cause: Cause,
}

fn with_peer(peer: &Option<WorkerId>) -> String {
    peer.as_ref().map(|peer| format!(" with {peer}")).unwrap_or_default()
}

/// Where in its life a session was when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Looking up the peer at the bootstrap server.
    Bootstrap,
    /// Exchanging geometry and memory with the peer.
    Handshake,
    /// Waiting for the other side's half: a registration, or pages.
    Rendezvous,
    /// Moving bytes.
    Transfer,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Bootstrap => "bootstrap",
            Phase::Handshake => "handshake",
            Phase::Rendezvous => "rendezvous",
            Phase::Transfer => "transfer",
        })
    }
}
