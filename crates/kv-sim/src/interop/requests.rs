//! Requests and their legs, as they are known from outside.

use std::collections::BTreeSet;

use kv_core::{KvPoll, SessionId};

use super::{LegId, LifeId};

/// The number of a request, counted over the whole world.
pub(super) type RequestNo = usize;

/// One try of one request at two engines.
#[derive(Debug)]
pub(super) struct Request {
    /// The number that names the request: the room of SGLang, the base of vLLM's ids.
    pub(super) name: u64,
    /// From which the content of the pages is made.
    pub(super) key: u64,
    /// The prefill engine and the decode engine, by their positions.
    pub(super) engines: (usize, usize),
    /// The lives of the prefill ranks that compute the request.
    pub(super) sources: Vec<LifeId>,
    pub(super) senders: Vec<LegId>,
    pub(super) receivers: Vec<LegId>,
    /// The pages on every prefill rank.
    pub(super) pages: Vec<u32>,
    /// How many of them were given.
    pub(super) given: usize,
    /// When all of them were given.
    pub(super) complete_at: u64,
    /// Pages that the decode engine has already.
    pub(super) prefix: usize,
    /// True if the request must succeed.
    pub(super) must: bool,
}

/// One rank's session for one request.
#[derive(Debug)]
pub(super) struct Leg {
    pub(super) life: LifeId,
    pub(super) session: SessionId,
    pub(super) request: RequestNo,
    pub(super) receives: bool,
    /// The lives whose agents the host has had as peers since the session was opened.
    pub(super) met: BTreeSet<LifeId>,
    /// The pages that were lent to the session, in the order of the request.
    pub(super) pages: Vec<u32>,
    pub(super) row: Option<u32>,
    /// The lives that have told the session that they have written its pages.
    pub(super) told_by: BTreeSet<LifeId>,
    /// How many commands have lent something that has not come back.
    pub(super) lent: usize,
    pub(super) ended: Option<Ended>,
    /// When everything has come back, in global time.
    pub(super) back: Option<u64>,
}

/// How a session has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) at: u64,
    pub(super) poll: KvPoll,
}

impl Leg {
    pub(super) fn has_failed(&self) -> bool {
        self.ended.as_ref().is_some_and(|ended| ended.poll == KvPoll::Failed)
    }

    pub(super) fn has_succeeded(&self) -> bool {
        self.ended.as_ref().is_some_and(|ended| ended.poll == KvPoll::Success)
    }
}
