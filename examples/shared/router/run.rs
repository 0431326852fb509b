//! The plan of a router, and the result.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::rank::{Harm, Rank, Side};
use crate::cli::Mode;
use crate::control::{Decoded, NamedError, Prefilled};

/// The plan for all chats.
pub struct Plan {
    /// Which side moves the bytes.
    pub mode: Mode,
    /// Where the ranks are registered, `host:port`.
    pub bootstrap: String,
    /// Tokens to generate in each turn.
    pub max_new_tokens: usize,
    /// How long each transfer may take.
    pub deadline: Duration,
    /// How long prefill ranks keep pages that are not acquired.
    pub lease: Duration,
    /// How long ranks wait at the end for the pages of ended requests.
    pub finish_within: Duration,
    /// How long a rank may be stopped before it is killed.
    pub bury_after: Duration,
    /// The rank to kill or stop, if any.
    pub harm: Option<PlannedHarm>,
}

/// A rank to kill or stop, and when.
#[derive(Debug, Clone, Copy)]
pub struct PlannedHarm {
    /// Whether to kill or stop the rank.
    pub harm: Harm,
    /// To a rank of which side.
    pub side: Side,
    /// So long after the first request, whatever goes on then; otherwise as soon as a request is in
    /// transfer.
    pub at: Option<Duration>,
    /// A rank that is stopped goes on after this time.
    pub resume: Option<Duration>,
}

/// The result of a run.
pub struct Run {
    /// The requests, in the order in which they were sent.
    pub requests: Vec<Routed>,
    /// The ranks, with their reports.
    pub ranks: Vec<Rank>,
    /// The harm, if some was done.
    pub harm: Option<Harmed>,
    /// What the workers have recorded, each as JSON, if that was asked for.
    pub records: Vec<String>,
    /// From the first request until the last had ended.
    pub wall: Duration,
    /// Bytes of a page, over all regions.
    pub page_bytes: u64,
    /// The lease of prefill ranks, as planned.
    pub lease: Duration,
}

/// The kill or stop that was done.
#[derive(Debug, Clone, Serialize)]
pub struct Harmed {
    /// Whether the rank was killed or stopped.
    pub harm: Harm,
    /// The name of the rank.
    pub rank: String,
    /// The request whose transfer was in flight.
    pub request: usize,
    /// How far the transfer was.
    pub moment: Moment,
}

impl fmt::Display for Harmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Harmed { harm, rank, request, moment } = self;
        let what = if *harm == Harm::Kill { "killed" } else { "stopped" };
        match moment {
            Moment::Sending { sent, of } => {
                write!(f, "{what} {rank} when {sent} of {of} pages of request {request} had been sent")
            }
            Moment::At { millis, open } => {
                write!(f, "{what} {rank} after {millis} ms, when {open} requests had not ended")
            }
            Moment::Reading => {
                write!(f, "{what} {rank} when the pages of request {request} began to be read")
            }
            Moment::Waiting { requests } => write!(
                f,
                "{what} {rank} when {requests} requests waited for room there, with their pages kept under leases"
            ),
        }
    }
}

/// How far a request was when a rank was harmed.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Some pages of the request had been sent.
    Sending {
        /// The number of pages sent.
        sent: usize,
        /// The number of pages of the request.
        of: usize,
    },
    /// The decode rank of the request had begun to read.
    Reading,
    /// The moment was given by `--at`; the request is the first that had not ended.
    At {
        /// Milliseconds after the first request.
        millis: u128,
        /// The number of requests that had not ended.
        open: usize,
    },
    /// The decode rank had no room for the request yet.
    Waiting {
        /// The number of requests that waited there.
        requests: usize,
    },
}

/// Why a request was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To answer a user.
    Answer,
    /// To answer a user whose earlier request can no longer be answered.
    AnswerAgain {
        /// The number of the attempt, from 2.
        attempt: usize,
    },
    /// To see that its ranks serve after another rank was killed or stopped.
    Proof,
}

/// One turn of a chat, and the reports of both halves.
pub struct Routed {
    /// The number of the chat.
    pub chat: usize,
    /// The number of the turn in the chat, from 0.
    pub turn: usize,
    /// Why the request was sent.
    pub purpose: Purpose,
    /// The number of the request that was sent in place of this request.
    pub again: Option<usize>,
    /// The room of the request, drawn by the router.
    pub room: u64,
    /// The whole prompt, earlier turns included.
    pub prompt: Vec<u32>,
    /// The room under which the KV is kept for the next turn.
    pub keep_as: Option<u64>,
    /// The position of the prefill rank in [`Run::ranks`].
    pub prefill: usize,
    /// The position of the decode rank in [`Run::ranks`].
    pub decode: usize,
    /// `kv_transfer_params` for the decode rank have been passed on.
    pub passed_on: bool,
    /// The decode rank has begun to read.
    pub reading: bool,
    /// The report of the prefill rank.
    pub prefilled: Option<Prefilled>,
    /// The report of the decode rank.
    pub decoded: Option<Decoded>,
    /// Set if the rank of a half died before it could report.
    pub orphaned: Option<NamedError>,
}

impl Routed {
    /// True if no more events of the request are to come.
    pub(super) fn ended(&self, ranks: &[Rank]) -> bool {
        let silent = |rank: usize| ranks.get(rank).is_some_and(Rank::is_silent);
        let prefill = self.prefilled.is_some() || silent(self.prefill);
        let decode = self.decoded.is_some() || silent(self.decode) || !self.passed_on;
        prefill && decode
    }

    /// True if the user gets no answer to this request any more.
    pub(super) fn is_lost(&self, ranks: &[Rank]) -> bool {
        let silent = |rank: usize| ranks.get(rank).is_some_and(Rank::is_silent);
        match &self.decoded {
            Some(decoded) => decoded.error.is_some(),
            None if self.passed_on => silent(self.decode),
            None => self.prefilled.is_some() || silent(self.prefill) || silent(self.decode),
        }
    }

    /// True if the pages of the request wait for the decode rank to have room.
    pub(super) fn waits(&self) -> bool {
        self.passed_on && !self.reading && self.decoded.is_none()
    }

    /// What the decode rank keeps for the next turn.
    pub(super) fn kept(&self) -> Option<&Value> {
        self.decoded.as_ref()?.params.as_ref()
    }
}
