//! Requests as a router sends them, and what schedulers have yet to do with each half.

use std::ops::Range;
use std::time::Duration;

use kv_core::{ChunkId, Lease, TransferMode};

use crate::kv::ledger::Side;
use crate::net::lives::{HoldId, Slot};

/// One request, as the router sent it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) number: u64,
    /// Named by a request id with a suffix per engine, not by a number.
    pub(crate) by_id: bool,
    /// The number of the request that this one tries again; its own number otherwise.
    pub(crate) family: usize,
    /// The suffix of the request's id, where both sides use the same one.
    pub(crate) suffix: u32,
    /// The prefill slots and the decode slots that exchange the request's pages.
    pub(crate) groups: Vec<(Vec<Slot>, Vec<Slot>)>,
    /// Tokens, where engines differ; pages, where they do not.
    pub(crate) tokens: usize,
    /// The key of the request's content, where engines differ: each rank has a part of the content.
    pub(crate) key: u64,
    pub(crate) wants_aux: bool,
    /// The number of slots of state that the request has.
    pub(crate) slots: usize,
    /// The number of tokens of draft pages that the request has, where engines differ; otherwise the number
    /// of pages.
    pub(crate) drafts: usize,
    /// Where engines differ: the first of these that every receiver may want.
    pub(crate) window: usize,
    pub(crate) one_sided: Option<Side>,
    pub(crate) disagree: bool,
    pub(crate) retry: bool,
    pub(crate) must_succeed: bool,
    /// True if the request's pages are read (pull).
    pub(crate) pulls: bool,
    /// The transfer modes that the request's senders accept.
    pub(crate) accepts: TransferMode,
}

impl Request {
    /// A request that is read, and of which nothing else is known.
    pub(crate) fn number(number: u64) -> Request {
        Request {
            number,
            by_id: false,
            family: 0,
            suffix: 0,
            groups: Vec::new(),
            tokens: 0,
            key: 0,
            wants_aux: false,
            slots: 0,
            drafts: 0,
            window: 0,
            one_sided: None,
            disagree: false,
            retry: false,
            must_succeed: false,
            pulls: true,
            accepts: TransferMode::Pull,
        }
    }
}

/// What the scheduler of one half has yet to do.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    /// The sizes of the chunks that are left to send, with the next one last.
    pub(crate) chunks: Vec<usize>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) replica: Option<u32>,
    pub(crate) early_init: bool,
    pub(crate) lease: Option<Lease>,
    /// True if the sender is not told how many receivers there are.
    pub(crate) learns: bool,
    /// The number of chunks that were given.
    pub(crate) given: u32,
    /// Chunks given that are not computed to the end.
    pub(crate) computing: Vec<Computing>,
}

/// A chunk that is being computed.
#[derive(Debug, Clone)]
pub(crate) struct Computing {
    pub(super) number: ChunkId,
    pub(super) hold: HoldId,
    pub(super) pages: Vec<u32>,
    /// The position of the chunk's first page in the request.
    pub(super) start: u32,
    /// The layers that are not computed, cut as they will be announced, with the next ones last.
    pub(super) left: Vec<Range<u32>>,
}
