//! Requests as a router sends them, and what schedulers still mean to do with each half.

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
    /// The one of which it is another attempt; its own number otherwise.
    pub(crate) family: usize,
    /// Of its id, where both sides have the same one.
    pub(crate) suffix: u32,
    /// Prefill slots and decode slots that exchange its pages.
    pub(crate) groups: Vec<(Vec<Slot>, Vec<Slot>)>,
    /// Tokens, where engines differ; pages, where they do not.
    pub(crate) tokens: usize,
    /// Of its content, where engines differ: each rank has a part of it.
    pub(crate) key: u64,
    pub(crate) wants_aux: bool,
    /// Slots of state that it has.
    pub(crate) slots: usize,
    /// Tokens of draft pages that it has, where engines differ; pages, where they do not.
    pub(crate) drafts: usize,
    /// Where engines differ: the first of these that every receiver may want.
    pub(crate) window: usize,
    pub(crate) one_sided: Option<Side>,
    pub(crate) disagree: bool,
    pub(crate) retry: bool,
    pub(crate) must_succeed: bool,
    /// Its pages are read.
    pub(crate) pulls: bool,
    /// What its senders accept.
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

/// What the scheduler of one half still means to do.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    /// Chunks to send, the next one last.
    pub(crate) chunks: Vec<usize>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) replica: Option<u32>,
    pub(crate) early_init: bool,
    pub(crate) lease: Option<Lease>,
    /// A sender is not told how many receivers there are.
    pub(crate) learns: bool,
    /// Chunks given.
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
    /// Number of the first page in its request.
    pub(super) start: u32,
    /// Layers that are not computed, cut as they will be announced, the next ones last.
    pub(super) left: Vec<Range<u32>>,
}
