//! What the router tells the ranks, and what they answer: one JSON object a line.

use std::time::Duration;

use kv_transfer::queue::RequestError;
use kv_transfer::{Cause, TransferError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::model::Sample;

/// From the router to a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// To a prefill rank: compute this prompt and hand its KV over.
    Prefill {
        /// The rendezvous key.
        room: u64,
        /// The prompt.
        prompt: Vec<u32>,
        /// How long the transfer may take.
        deadline_ms: u64,
        /// `kv_transfer_params`: how it is handed over, and what a decode rank keeps of the turn
        /// before.
        params: Value,
    },
    /// To a decode rank: receive this prompt's KV and continue.
    Decode {
        /// The rendezvous key.
        room: u64,
        /// The prompt.
        prompt: Vec<u32>,
        /// How many tokens to generate.
        max_new_tokens: usize,
        /// How long the transfer may take.
        deadline_ms: u64,
        /// `kv_transfer_params`: who has its KV, or is about to compute it.
        params: Value,
        /// Keep the KV of the whole conversation for the prefill rank of the next turn, under this
        /// room.
        keep_as: Option<u64>,
    },
    /// To a prefill rank: the decode rank of this request is gone, and may never have registered, so
    /// that nobody but the router can know.
    Cancel {
        /// The rendezvous key.
        room: u64,
    },
    /// No more requests: end all of them, account for the pages, and say so.
    Finish,
}

/// From a rank to the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The rank is up.
    Ready {
        /// Engine and rank.
        worker: String,
        /// The model it runs.
        model: String,
        /// Bytes of a page, over all regions.
        page_bytes: u64,
    },
    /// A prefill rank gave pages to the transfer.
    Chunk {
        /// The request.
        room: u64,
        /// Pages given so far.
        sent: usize,
        /// Pages in all.
        of: usize,
    },
    /// A prefill rank has computed a prompt, and keeps its KV until the decode rank has read it.
    Answer {
        /// The request.
        room: u64,
        /// `kv_transfer_params` for the decode rank.
        params: Value,
    },
    /// A decode rank begins to read.
    Reading {
        /// The request.
        room: u64,
    },
    /// A prefill rank's half of a request ended.
    Prefilled(Prefilled),
    /// A decode rank's half of a request ended.
    Decoded(Decoded),
    /// After [`Command::Finish`]: every session has ended, or was waited for in vain.
    Finished(Accounting),
}

impl Event {
    /// The request that it is about.
    pub fn room(&self) -> Option<u64> {
        match self {
            Event::Chunk { room, .. } | Event::Answer { room, .. } | Event::Reading { room } => Some(*room),
            Event::Prefilled(prefilled) => Some(prefilled.room),
            Event::Decoded(decoded) => Some(decoded.room),
            Event::Ready { .. } | Event::Finished(_) => None,
        }
    }
}

/// How a prefill rank's half of a request went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prefilled {
    /// The request.
    pub room: u64,
    /// Time spent computing the prompt.
    pub compute_ms: f64,
    /// Bytes that this rank moved: what it wrote into the decode rank's memory, aux row included, and
    /// what it pulled back from it.
    pub bytes: u64,
    /// Time in which they were on the wire; the rest of the transfer was waiting for computation.
    pub wire_ms: f64,
    /// Where the KV of the turns before came from, if there were any.
    pub history: Option<History>,
    /// If it failed: from the last heartbeat that named it until its pages were free again.
    pub freed_after_ms: Option<f64>,
    /// Why it failed, if it did.
    pub error: Option<NamedError>,
}

/// Where a prefill rank got the KV of the turns before from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "history", rename_all = "snake_case")]
pub enum History {
    /// From the decode rank that had it.
    PulledBack {
        /// How many tokens.
        tokens: usize,
    },
    /// It computed it again.
    Recomputed {
        /// Why.
        why: String,
    },
}

/// How a decode rank's half of a request went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Decoded {
    /// The request.
    pub room: u64,
    /// What was generated.
    pub samples: Vec<Sample>,
    /// How often its pages were taken back because the cache was full, and filled anew.
    pub retractions: u32,
    /// From the request's arrival until the handshake was done.
    pub bootstrap_ms: f64,
    /// From there until pages were allocated and registered.
    pub prealloc_ms: f64,
    /// From there until every byte was in place.
    pub transfer_ms: f64,
    /// Bytes that this rank read from the prefill rank's memory, aux row included.
    pub bytes: u64,
    /// Time in which they were on the wire.
    pub wire_ms: f64,
    /// `kv_transfer_params` for the next turn, if this rank keeps the KV for it.
    pub params: Option<Value>,
    /// Why it failed, if it did.
    pub error: Option<NamedError>,
}

/// What a rank has at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounting {
    /// Pages in its cache.
    pub pages: usize,
    /// Of those, free.
    pub free_pages: usize,
}

impl Accounting {
    /// Pages that nobody gave back.
    pub fn leaked(&self) -> usize {
        self.pages.saturating_sub(self.free_pages)
    }
}

/// An error by its name, for tables, and in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedError {
    /// The name.
    pub name: String,
    /// The whole message: who, where, why, and what to do.
    pub text: String,
}

impl NamedError {
    /// An error from its parts.
    pub fn new(name: &str, text: impl std::fmt::Display) -> NamedError {
        NamedError { name: name.to_owned(), text: text.to_string() }
    }
}

impl From<&RequestError> for NamedError {
    fn from(error: &RequestError) -> NamedError {
        let name = match error {
            RequestError::Transfer(error) => return NamedError::from(&**error),
            RequestError::Gate(_) => "Gate",
            RequestError::OtherRank { .. } => "OtherRank",
            RequestError::OutOfOrder { .. } => "OutOfOrder",
            RequestError::PagesLost { .. } => "PagesLost",
            RequestError::Aborted => "Aborted",
            _ => "Other",
        };
        NamedError::new(name, error)
    }
}

impl From<&TransferError> for NamedError {
    fn from(error: &TransferError) -> NamedError {
        let name = match &error.cause {
            Cause::Aborted => "Aborted",
            Cause::WorkerStopped => "WorkerStopped",
            Cause::DeadlineExceeded { .. } => "DeadlineExceeded",
            Cause::Bootstrap(_) => "Bootstrap",
            Cause::Connect(_) => "Connect",
            Cause::Incompatible(_) => "Incompatible",
            Cause::Versions { .. } => "Versions",
            Cause::PeerLost => "PeerLost",
            Cause::WayLost => "WayLost",
            Cause::AmbiguousRoom { .. } => "AmbiguousRoom",
            Cause::PeerRestarted => "PeerRestarted",
            Cause::PeerUnresponsive { .. } => "PeerUnresponsive",
            Cause::ByPeer(_) => "ByPeer",
            Cause::PageCount { .. } => "PageCount",
            Cause::TooManyPages { .. } => "TooManyPages",
            Cause::InitOrder => "InitOrder",
            Cause::BadPages(_) => "BadPages",
            Cause::BadAux { .. } => "BadAux",
            Cause::AuxOneSided { .. } => "AuxOneSided",
            Cause::Post(_) => "Post",
            Cause::LeaseExpired => "LeaseExpired",
            Cause::LeasePages { .. } => "LeasePages",
            Cause::LeaseOutOfRange(_) => "LeaseOutOfRange",
            Cause::StaleLease { .. } => "StaleLease",
            Cause::Protocol(_) => "Protocol",
            _ => "Other",
        };
        NamedError::new(name, error)
    }
}

/// A duration in milliseconds.
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
