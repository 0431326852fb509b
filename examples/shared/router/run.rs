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
    /// How long ranks wait for the pages of ended requests before they account for them.
    pub finish_within: Duration,
    /// How long a rank may be stopped before it is killed.
    pub bury_after: Duration,
    /// What is to be done to a rank, if anything.
    pub harm: Option<PlannedHarm>,
}

/// What is to be done to a rank.
#[derive(Debug, Clone, Copy)]
pub struct PlannedHarm {
    /// What.
    pub harm: Harm,
    /// To a rank of which side.
    pub side: Side,
    /// So long after the first request, whatever goes on then; otherwise as soon as a request is in
    /// transfer.
    pub at: Option<Duration>,
    /// A rank that is stopped goes on after this time.
    pub resume: Option<Duration>,
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
    /// It was the first that had not ended, at a moment that was told.
    At {
        /// Milliseconds after the first request.
        millis: u128,
        /// Requests that had not ended.
        open: usize,
    },
    /// Its decode rank had no room for it yet: so many requests waited there, and as many prompts at
    /// prefill ranks.
    Waiting {
        /// How many.
        requests: usize,
    },
}

/// Why a request was routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To answer a user.
    Answer,
    /// The same, since an earlier one can be answered no more.
    AnswerAgain {
        /// From 2.
        attempt: usize,
    },
    /// To see that its ranks serve after another one was harmed.
    Proof,
}

/// One turn of a conversation, and what became of its halves.
pub struct Routed {
    /// Which conversation.
    pub conversation: usize,
    /// Which turn of it, from 0.
    pub turn: usize,
    /// Why it was routed.
    pub purpose: Purpose,
    /// Which request took its place when it was lost.
    pub again: Option<usize>,
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
        let silent = |rank: usize| ranks.get(rank).is_some_and(Rank::is_silent);
        let prefill = self.prefilled.is_some() || silent(self.prefill);
        let decode = self.decoded.is_some() || silent(self.decode) || !self.passed_on;
        prefill && decode
    }

    /// True if its user gets no answer to it any more.
    pub(super) fn is_lost(&self, ranks: &[Rank]) -> bool {
        let silent = |rank: usize| ranks.get(rank).is_some_and(Rank::is_silent);
        match &self.decoded {
            Some(decoded) => decoded.error.is_some(),
            None if self.passed_on => silent(self.decode),
            None => self.prefilled.is_some() || silent(self.prefill) || silent(self.decode),
        }
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
