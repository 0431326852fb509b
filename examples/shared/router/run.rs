//! What a router is to do, and what became of it.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::rank::{Harm, Rank, Side};
use crate::shared::cli::Mode;
use crate::shared::control::{Decoded, NamedError, Prefilled};

/// What to do with the conversations.
pub struct Plan {
    /// Who starts the data operations.
    pub mode: Mode,
    /// Where the ranks are registered, `host:port`.
    pub bootstrap: String,
    /// Tokens to generate in each turn.
    pub max_new_tokens: usize,
    /// Time for each transfer.
    pub deadline: Duration,
    /// For how long prefill ranks keep pages that nobody asks for.
    pub lease: Duration,
    /// Harm a rank of this side as soon as one of its requests is in transfer.
    pub harm: Option<(Harm, Side)>,
}

/// What became of everything.
pub struct Run {
    /// The requests, in the order in which they were sent.
    pub requests: Vec<Routed>,
    /// The ranks, with their accounts.
    pub ranks: Vec<Rank>,
    /// The harm, if some was done.
    pub harm: Option<Harmed>,
    /// From the first request until the last had ended.
    pub wall: Duration,
    /// Bytes of a page, over all regions.
    pub page_bytes: u64,
    /// As planned.
    pub lease: Duration,
}

/// Harm that was done.
#[derive(Debug, Clone, Serialize)]
pub struct Harmed {
    /// Which.
    pub harm: Harm,
    /// To which rank.
    pub rank: String,
    /// Whose transfer was under way.
    pub request: usize,
    /// How far it was.
    pub moment: Moment,
}

/// How far a request was when a rank was harmed.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Some of its pages had been sent.
    Sending {
        /// How many.
        sent: usize,
        /// How many it has.
        of: usize,
    },
    /// Its decode rank had begun to read.
    Reading,
    /// Its decode rank had no room for it yet: so many requests waited there, and as many prompts at
    /// prefill ranks.
    Waiting {
        /// How many.
        requests: usize,
    },
}

/// One turn of a conversation, and what became of its halves.
pub struct Routed {
    /// Which conversation.
    pub conversation: usize,
    /// Which turn of it, from 0.
    pub turn: usize,
    /// Its rendezvous key, drawn by the router.
    pub room: u64,
    /// The whole prompt, earlier turns included.
    pub prompt: Vec<u32>,
    /// The room under which its KV is kept for the next turn.
    pub keep_as: Option<u64>,
    /// Position of its prefill rank in [`Run::ranks`].
    pub prefill: usize,
    /// Position of its decode rank in [`Run::ranks`].
    pub decode: usize,
    /// `kv_transfer_params` for the decode rank have been passed on.
    pub passed_on: bool,
    /// The decode rank has begun to read.
    pub reading: bool,
    /// What the prefill rank said.
    pub prefilled: Option<Prefilled>,
    /// What the decode rank said.
    pub decoded: Option<Decoded>,
    /// Set if a half's rank died before it could say anything.
    pub orphaned: Option<NamedError>,
}

impl Routed {
    /// True if no more word of it is to come.
    pub(super) fn ended(&self, ranks: &[Rank]) -> bool {
        let gone = |rank: usize| ranks.get(rank).is_some_and(Rank::is_gone);
        let prefill = self.prefilled.is_some() || gone(self.prefill);
        let decode = self.decoded.is_some() || gone(self.decode) || !self.passed_on;
        prefill && decode
    }

    /// True if its pages wait for its decode rank to have room.
    pub(super) fn waits(&self) -> bool {
        self.passed_on && !self.reading && self.decoded.is_none()
    }

    /// What the decode rank offers to the next turn.
    pub(super) fn kept(&self) -> Option<&Value> {
        self.decoded.as_ref()?.params.as_ref()
    }
}
