//! What the router tells the ranks, and what they answer: one JSON object a line.

use std::time::Duration;

use kv_transfer::queue::RequestError;
use kv_transfer::{Cause, TransferError};
use serde::{Deserialize, Serialize};

use super::model::Sample;

/// From the router to a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// To a prefill rank: compute this prompt and send its KV to whoever registers for the room.
    Prefill {
        /// The rendezvous key.
        room: u64,
        /// The prompt.
        prompt: Vec<u32>,
        /// How long the transfer may take.
        deadline_ms: u64,
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
        /// Where the prefill ranks are registered.
        bootstrap: String,
        /// Which of them serves.
        prefill_dp_rank: u32,
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
    /// A prefill rank's half of a request ended.
    Prefilled(Prefilled),
    /// A decode rank's half of a request ended.
    Decoded(Decoded),
    /// After [`Command::Finish`]: every session has ended, or was waited for in vain.
    Finished(Accounting),
}

/// How a prefill rank's half of a request went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prefilled {
    /// The request.
    pub room: u64,
    /// Time spent computing the prompt.
    pub compute_ms: f64,
    /// Bytes that were written into the decode rank's memory, aux row included.
    pub bytes: u64,
    /// Time in which they were on the wire; the rest of the transfer was waiting for computation.
    pub wire_ms: f64,
    /// Why it failed, if it did.
    pub error: Option<NamedError>,
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
            Cause::PeerLost => "PeerLost",
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
