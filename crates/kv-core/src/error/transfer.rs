//! Why a session failed, as a value: request, peer, phase, cause and advice.

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use crate::id::{Room, WorkerId};

/// Why a session failed: the request, the peer, how far the session had come, and the cause.
/// SGLang's `failure_exception` raises the same as an exception. The text ends with
/// [advice](Cause::advice) for an operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room {room}, {phase}{}: {cause}; {}", with_peer(.peer), .cause.advice())]
#[non_exhaustive]
pub struct TransferError {
    /// The room of the request.
    pub room: Room,
    /// The peer of the session; `None` if the session failed before it knew a peer.
    pub peer: Option<WorkerId>,
    /// How far the session had come.
    pub phase: Phase,
    /// What ended the session.
    pub cause: Cause,
}

impl TransferError {
    /// A failure of which no single peer is the cause.
    pub fn new(room: Room, phase: Phase, cause: Cause) -> TransferError {
        TransferError { room, peer: None, phase, cause }
    }
}

fn with_peer(peer: &Option<WorkerId>) -> String {
    peer.as_ref().map(|peer| format!(" with {peer}")).unwrap_or_default()
}

/// How far a session had come when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Phase {
    /// Looking up the peer at the bootstrap server.
    Bootstrap,
    /// Exchanging geometry and memory with the peer.
    Handshake,
    /// Waiting for the other side: on a sender for a registration, on a receiver for the sender's
    /// pages.
    Rendezvous,
    /// Moving the bytes of pages.
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
