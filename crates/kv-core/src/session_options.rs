//! What a session is told when it is opened.

use std::time::Duration;

use crate::lease::{Lease, LeaseRef, TransferMode};
use crate::record::WorkerRole;

/// What a session may be told when it is opened, beyond address and room.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionOptions {
    /// How long the session may take from opening to its end; `None` for the worker's default.
    pub deadline: Option<Duration>,
    /// On a receiver: which data-parallel replica of the prefill engine serves the request.
    /// `None` follows the room: number modulo replicas, as SGLang does.
    pub prefill_dp_rank: Option<u32>,
    /// Which side moves the bytes; `None` for the worker's [`KvArgs::transfer_mode`](crate::KvArgs::transfer_mode).
    pub mode: Option<TransferMode>,
    /// On a sender: how long its pages stay pinned for readers; `None` for the worker's
    /// `kv_lease_duration`, renewable.
    pub lease: Option<Lease>,
    /// On a receiver that pulls: the sender's session, as the router was told it; of an engine of
    /// several ranks one, or each rank's. Without any, whichever sender there is for the room.
    pub lease_refs: Vec<LeaseRef>,
    /// On a receiver: in which role its source is registered; `None` for prefill. A prefill worker
    /// that takes back what a decode worker kept of a conversation asks for `Decode`.
    pub source: Option<WorkerRole>,
    /// On a receiver: how many pages of the request it has already. Those given with `init` are the
    /// ones after them, and nothing is moved for the ones before.
    pub prefix_pages: usize,
    /// How many tokens the request has, as both sides count them. It matters where pages are dealt to
    /// ranks in turn (decode context parallelism): a group of such ranks needs it, to know which of
    /// them have a page for its end; and by it a receiver that reads, and was not told of a prefix,
    /// knows how many pages the sender must hold.
    pub tokens: Option<usize>,
}
