//! What can go wrong with a request in a queue.

use std::fmt;

use kv_core::{ChunkId, KvPoll, OpenError, Pages, RequestGroups, Room, TransferError};

use super::gate::GateError;
use crate::consensus::{RequestKey, RoomBusy};

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// This rank's session failed.
    #[error(transparent)]
    Transfer(Box<TransferError>),
    /// The bytes came, but they are another request's.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// This rank's session did not fail, but another rank's did; that rank knows the cause.
    #[error("room {room}: another rank failed; its log names the cause")]
    OtherRank {
        /// The request.
        room: Room,
    },
    /// The server aborted the request, and no session had failed by then.
    #[error("aborted here")]
    Aborted,
    /// The session reported success before it had been given all pages: a bug in the `KvManager`.
    #[error("room {room}: the session reports {poll} before it was given all pages")]
    OutOfOrder {
        /// The request.
        room: Room,
        /// What it reported.
        poll: KvPoll,
    },
    /// The session gave back another number of pages than it was given: a bug in the `KvManager`.
    #[error("room {room}: the session was given {given} pages and gave back {returned}")]
    PagesLost {
        /// The request.
        room: Room,
        /// Pages it was given.
        given: usize,
        /// Pages it gave back.
        returned: usize,
    },
}

/// A request that a queue did not take. It comes back, and no session is open for it.
pub struct PushError<R> {
    /// The request.
    pub request: R,
    /// Why.
    pub reason: PushRefusal,
}

/// Why a queue did not take a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PushRefusal {
    /// The session could not be opened. Other ranks that have pushed the request are told that it
    /// failed.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Another request holds the room. Push again when that has ended.
    #[error(transparent)]
    RoomBusy(#[from] RoomBusy),
    /// The request would not even fit into the empty cache. Refuse it, or enlarge the cache.
    #[error("the request needs {needed} pages with its reserve; the cache has {capacity}")]
    TooLarge {
        /// Pages that admission would ask for.
        needed: usize,
        /// Pages of the cache.
        capacity: usize,
    },
}

/// A call for a request that cannot be carried out, and changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request has failed, or is not in the queue (any more). Drop it from the batch.
    #[error("request {key} has ended")]
    Ended {
        /// The request.
        key: RequestKey,
    },
    /// The request has not been popped for its forward pass.
    #[error("request {key} has not been popped from the waiting queue")]
    NotPopped {
        /// The request.
        key: RequestKey,
    },
    /// `init` was called before, or must be called first.
    #[error("request {key}: init must be called exactly once, before the first chunk")]
    InitOrder {
        /// The request.
        key: RequestKey,
    },
    /// The pages given are not the pages announced.
    #[error("request {key}: {given} pages given, {announced} announced")]
    PageCount {
        /// The request.
        key: RequestKey,
        /// Given so far, with the refused chunk.
        given: usize,
        /// Announced with `init`.
        announced: usize,
    },
    /// Items of cache groups were given before, or all pages have been.
    #[error("request {key}: groups must be given once, before the last chunk")]
    GroupsOrder {
        /// The request.
        key: RequestKey,
    },
    /// Layers are final of a chunk that was not given.
    #[error("request {key}: chunk {chunk} is final, but only {given} chunks were given")]
    UnknownChunk {
        /// The request.
        key: RequestKey,
        /// The chunk.
        chunk: ChunkId,
        /// How many were given.
        given: u32,
    },
}

/// A chunk that was not taken: the pages come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the chunk was not taken: {reason}")]
pub struct ChunkError {
    /// The pages.
    pub pages: Pages,
    /// Why.
    pub reason: Refusal,
}

/// Items of cache groups that were not taken: they come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the groups were not taken: {reason}")]
pub struct GroupsRefused {
    /// The items.
    pub groups: RequestGroups,
    /// Why.
    pub reason: Refusal,
}

impl<R> fmt::Debug for PushError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<R> fmt::Display for PushError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the request was not taken: {}", self.reason)
    }
}

impl<R> std::error::Error for PushError<R> {}

impl From<TransferError> for RequestError {
    fn from(error: TransferError) -> RequestError {
        RequestError::Transfer(Box::new(error))
    }
}
