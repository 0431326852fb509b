//! What a prefill server gives to its queues, and gets from them.

use kv_core::{Pages, RequestGroups, Room, SessionOptions};

use crate::consensus::RequestKey;
use crate::queue::error::RequestError;

/// When the forward pass of a request may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefillPolicy {
    /// When the decode side has registered its pages, as in SGLang: no work for requests that
    /// nobody will fetch.
    #[default]
    AfterBootstrap,
    /// At once: the decode side may register while the prompt is computed.
    Eager,
}

/// A request as its sender needs to know it.
#[derive(Debug, Clone)]
pub struct Outgoing<'a> {
    /// The room that the router gave it.
    pub room: Room,
    /// Where this worker is registered.
    pub bootstrap_addr: &'a str,
    /// The decode ranks that will register; empty: as many as the worker was configured for.
    pub dest_ranks: &'a [u32],
    /// Deadline and the like.
    pub options: SessionOptions,
    /// Higher goes first; equal ones in order of `push`.
    pub priority: i32,
}

impl<'a> Outgoing<'a> {
    /// A request with the worker's defaults.
    pub fn new(bootstrap_addr: &'a str, room: Room) -> Outgoing<'a> {
        Outgoing { room, bootstrap_addr, dest_ranks: &[], options: SessionOptions::default(), priority: 0 }
    }
}

/// A request whose pages are free again.
#[derive(Debug)]
pub struct Finished<R> {
    /// Its key.
    pub key: RequestKey,
    /// The request.
    pub request: R,
    /// All pages given to `send_chunk` and `begin_chunk`, in that order.
    pub pages: Pages,
    /// The items given to `give_groups`.
    pub groups: RequestGroups,
    /// Whether the decode side has them.
    pub outcome: Result<(), RequestError>,
}

/// How many requests are where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillCounts {
    /// Waiting for the decode side to register.
    pub bootstrap: usize,
    /// Waiting for `pop_waiting`.
    pub waiting: usize,
    /// Popped, not all chunks given.
    pub forward: usize,
    /// All chunks given, transfer not ended.
    pub inflight: usize,
    /// Failed, pages not free yet.
    pub failing: usize,
}
