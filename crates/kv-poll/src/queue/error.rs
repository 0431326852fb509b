//! The errors of queues: why a request failed, was not taken, or why a call for it was refused.

use std::fmt;

use kv_core::{ChunkId, KvPoll, OpenError, Pages, RequestCacheGroups, Room, TransferError};

use super::gate::GateError;
use crate::consensus::{RequestKey, RoomBusy};

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// This rank's session failed, for the reason given.
    #[error(transparent)]
    Transfer(Box<TransferError>),
    /// The transfer succeeded, but the aux row is another request's. Recompute the request.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// This rank's session did not fail, but another rank's session did. That rank knows the cause.
    #[error("room {room}: another rank failed; its log names the cause")]
    OtherRank {
        /// The room of the request.
        room: Room,
    },
    /// The server aborted the request, and no session had failed by then.
    #[error("the server aborted the request")]
    Aborted,
    /// The session reported success before it had been given all pages. This is a bug in the `KvManager`.
    #[error("room {room}: the session reports {poll} before it was given all pages")]
    OutOfOrder {
        /// The room of the request.
        room: Room,
        /// The state that the session reported.
        poll: KvPoll,
    },
    /// The session gave back another number of pages than it was given. This is a bug in the `KvManager`.
    #[error("room {room}: the session was given {given} pages and gave back {returned}")]
    PagesLost {
        /// The room of the request.
        room: Room,
        /// Pages that the session was given.
        given: usize,
        /// Pages that the session gave back.
        returned: usize,
    },
}

/// A request that a queue did not take. The request comes back, and no session is open for it.
pub struct PushError<R> {
    /// The server's request, as given to `push`.
    pub request: R,
    /// Why the queue did not take the request.
    pub reason: PushRefusal,
}

/// Why a queue did not take a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PushRefusal {
    /// The session could not be opened. The request fails on other ranks that have pushed it.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Another request has the room. Push again when that request has ended.
    #[error(transparent)]
    RoomBusy(#[from] RoomBusy),
    /// The request would not even fit into the empty cache. Refuse the request, or enlarge the cache.
    #[error("the request needs {needed} pages with its reserve; the cache has {capacity}")]
    TooLarge {
        /// Pages that the request needs, the reserve of the [`AdmissionRule`](super::AdmissionRule) included.
        needed: usize,
        /// Pages of the whole cache.
        capacity: usize,
    },
}

/// Why a call for a request was refused. A refused call changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request has failed, or is not in the queues any more. Drop it from the batch.
    #[error("request {key} has ended")]
    Ended {
        /// The key that was given.
        key: RequestKey,
    },
    /// The request has not come out of `pop_waiting`, so its forward pass may not have begun.
    #[error("request {key} has not been popped from the waiting queue")]
    NotPopped {
        /// The key that was given.
        key: RequestKey,
    },
    /// `init` was called a second time, or was not called before the first chunk.
    #[error("request {key}: init must be called exactly once, before the first chunk")]
    InitOrder {
        /// The key that was given.
        key: RequestKey,
    },
    /// More pages were given than announced with `init`, or `finish` came before all of them were given.
    #[error("request {key}: {given} pages given, {announced} announced")]
    PageCount {
        /// The key that was given.
        key: RequestKey,
        /// Pages given so far, with those of the refused chunk.
        given: usize,
        /// Pages announced with `init`.
        announced: usize,
    },
    /// The chunk is of another [`PagePool`](kv_core::PagePool) than the request's first pages.
    #[error("request {key}: the pages of one request must be of one pool")]
    OtherPool {
        /// The key that was given.
        key: RequestKey,
    },
    /// Items of cache groups were given a second time, or after the last chunk.
    #[error("request {key}: items of cache groups must be given once, before the last chunk")]
    GroupsOrder {
        /// The key that was given.
        key: RequestKey,
    },
    /// Layers were said to be final of a chunk that was not given.
    #[error("request {key}: layers of chunk {chunk} are final, but only {given} chunks were given")]
    UnknownChunk {
        /// The key that was given.
        key: RequestKey,
        /// The number of the chunk, from 0.
        chunk: ChunkId,
        /// How many chunks of the request were given.
        given: u32,
    },
}

/// A chunk that was not taken. The pages come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the chunk was not taken: {reason}")]
pub struct ChunkError {
    /// The pages of the chunk.
    pub pages: Pages,
    /// Why the chunk was not taken.
    pub reason: Refusal,
}

/// Items of cache groups that were not taken. The items come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the items of cache groups were not taken: {reason}")]
pub struct CacheGroupsRefused {
    /// The items that were given.
    pub groups: RequestCacheGroups,
    /// Why the items were not taken.
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
