//! The options of one session, given when the session is opened.

use std::time::Duration;

use crate::asked::ContentRequest;
use crate::lease::{Lease, LeaseRef, TransferMode};
use crate::record::WorkerRole;
use crate::remote_request::RemoteRequest;

/// What a server may tell a session when it opens the session, beyond the address and the room.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SessionOptions {
    /// How long the session may take from its opening to its end; `None` for the worker's default.
    pub deadline: Option<Duration>,
    /// On a receiver: the data-parallel replica of the prefill engine that serves the request.
    /// `None` follows the room as SGLang does: the room's number modulo the number of replicas; for a
    /// request id, the FNV-1a hash of the id without its suffix.
    pub prefill_dp_rank: Option<u32>,
    /// Which side moves the bytes; `None` for the worker's own
    /// [`transfer_mode`](crate::KvArgs::transfer_mode).
    pub mode: Option<TransferMode>,
    /// On a sender: how long the pages stay pinned for readers; `None` for a renewable lease of the
    /// worker's `kv_lease_duration`. The session's `deadline` counts, too: the session fails if the deadline
    /// comes before the lease is over.
    pub lease: Option<Lease>,
    /// On a receiver that pulls: the reference to the sender's pages that the router carried. For
    /// an engine of several ranks, either one reference or one of each rank. If the list is empty,
    /// the receiver reads from any sender of the room.
    pub lease_refs: Vec<LeaseRef>,
    /// On a receiver: what the router says of the request at the engine that holds its KV. Workers of this
    /// library do not look at this; a receiver from an engine of another framework (kv-interop) needs it.
    /// `RemoteKv::reader_options` of kv-transfer fills it in.
    pub remote: Option<Box<RemoteRequest>>,
    /// On a receiver: the role in which the source is registered; `None` for prefill. A prefill
    /// worker that takes back the pages that a decode worker kept of a chat's earlier turn asks for `Decode`.
    pub source: Option<WorkerRole>,
    /// On a receiver: how many pages of the request are in the receiver's own cache already, in the pages of
    /// this worker's engine. The pages given with `init` are those after the prefix, and nothing is moved for
    /// the prefix.
    ///
    /// In push mode, a receiver with a prefix must set this: the sender fails the session if prefix and given
    /// pages together are not all pages of the request
    /// ([`Cause::PageCount`](crate::Cause::PageCount)). In pull mode, a receiver must set this where the two
    /// engines differ in page size or in decode context parallelism. Where they do not, 0 is enough: the
    /// given pages are the last ones of those that the sender holds. A receiver that always sets the prefix is
    /// right in every mode.
    pub prefix_pages: usize,
    /// On a receiver of a service that is asked [by content](crate::Service::by_content): the entry that
    /// the receiver asks for. `None` on every other receiver, which asks for its room.
    pub content: Option<ContentRequest>,
    /// How many tokens the request has, as both sides count them; `None` if the server does not
    /// say. Needed where pages are dealt to ranks in turn (decode context parallelism): the ranks
    /// compute from it which of them hold a page of the request's end. A receiver that reads
    /// without a prefix also computes from it how many pages the sender must hold.
    pub tokens: Option<usize>,
}

impl SessionOptions {
    /// The same with some fields changed: `SessionOptions::default().with(|options| options.tokens = Some(40))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
