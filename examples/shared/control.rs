//! The messages between the router and the ranks: one JSON object in each line.

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
    /// To a prefill rank: compute this prompt, and hand its KV over.
    Prefill {
        /// The room of the request, the same on both sides.
        room: u64,
        /// The tokens of the prompt.
        prompt: Vec<u32>,
        /// How long the transfer may take.
        deadline_ms: u64,
        /// The `kv_transfer_params` of the prefill side: how the KV is handed over, and what a decode rank
        /// keeps of the turn before.
        params: Value,
    },
    /// To a decode rank: receive this prompt's KV and continue.
    Decode {
        /// The room of the request, the same on both sides.
        room: u64,
        /// The tokens of the prompt.
        prompt: Vec<u32>,
        /// The number of tokens to generate.
        max_new_tokens: usize,
        /// How long the transfer may take.
        deadline_ms: u64,
        /// The `kv_transfer_params` of the decode side: which rank has the KV, or is about to compute it.
        params: Value,
        /// Keep the KV of the whole chat for the prefill rank of the next turn, under this
        /// room.
        keep_as: Option<u64>,
    },
    /// To a prefill rank: the decode rank of this request is gone. It may never have registered, so that only
    /// the router knows.
    Cancel {
        /// The room of the request.
        room: u64,
    },
    /// Take no new requests, serve those that are there, then report and exit.
    Drain,
    /// No more requests come: end all requests, count the pages, and report.
    Finish,
}

/// From a rank to the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The rank is ready for requests.
    Ready {
        /// The engine and rank of the worker.
        worker: String,
        /// A name of the model that the rank runs.
        model: String,
        /// Bytes of a page, over all regions.
        page_bytes: u64,
        /// Where decode ranks find the rank, if no bootstrap server says it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reach: Option<Reach>,
    },
    /// A prefill rank gave pages to the transfer.
    Chunk {
        /// The room of the request.
        room: u64,
        /// The number of pages given so far.
        sent: usize,
        /// The number of pages of the request.
        of: usize,
    },
    /// A prefill rank has computed a prompt, and keeps its KV until the decode rank has read it.
    Answer {
        /// The room of the request.
        room: u64,
        /// The `kv_transfer_params` for the decode rank.
        params: Value,
    },
    /// A decode rank begins to read.
    Reading {
        /// The room of the request.
        room: u64,
    },
    /// A prefill rank's half of a request ended.
    Prefilled(Prefilled),
    /// A decode rank's half of a request ended.
    Decoded(Decoded),
    /// Before [`Event::Finished`], if the router asked for records: what one worker of the rank has recorded.
    Recorded {
        /// A [`kv_timeline::Record`] as JSON.
        record: String,
    },
    /// After [`Command::Drain`], when the rank is empty, and after [`Command::Finish`]: every session has ended,
    /// or was waited for in vain.
    Finished(Accounting),
}

/// Where decode ranks find a prefill engine that is registered nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// The name of the engine.
    pub engine: String,
    /// Its side channel, `host:port`.
    pub addr: String,
}

impl Event {
    /// The room of the request that the event is about, if any.
    pub fn room(&self) -> Option<u64> {
        match self {
            Event::Chunk { room, .. } | Event::Answer { room, .. } | Event::Reading { room } => Some(*room),
            Event::Prefilled(prefilled) => Some(prefilled.room),
            Event::Decoded(decoded) => Some(decoded.room),
            Event::Ready { .. } | Event::Recorded { .. } | Event::Finished(_) => None,
        }
    }
}

/// How a prefill rank's half of a request went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prefilled {
    /// The room of the request.
    pub room: u64,
    /// How long the computation of the prompt took, in milliseconds.
    pub compute_ms: f64,
    /// The bytes that this rank moved: those it wrote into the decode rank's memory, aux row included, and
    /// those it read back from there.
    pub bytes: u64,
    /// Time in which they were on the wire; the rest of the transfer was waiting for computation.
    pub wire_ms: f64,
    /// Where the KV of the turns before came from, if there were any.
    pub history: Option<History>,
    /// If the request failed: the time from the last heartbeat that named it until its pages were free again,
    /// in milliseconds.
    pub freed_after_ms: Option<f64>,
    /// Why the request failed, if it did.
    pub error: Option<NamedError>,
}

/// Where a prefill rank got the KV of the turns before from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "history", rename_all = "snake_case")]
pub enum History {
    /// The prefill rank read the KV from the decode rank that had kept it.
    PulledBack {
        /// The number of tokens that were read.
        tokens: usize,
    },
    /// The prefill rank computed the KV again.
    Recomputed {
        /// Why the KV was not read.
        why: String,
    },
}

/// How a decode rank's half of a request went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Decoded {
    /// The room of the request.
    pub room: u64,
    /// The tokens that were generated.
    pub samples: Vec<Sample>,
    /// How often the pages of the request were taken back because the cache was full, and computed again
    /// later.
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
    /// Tokens of the prompt that the prefill rank did not compute, as its aux row says.
    #[serde(default)]
    pub cached_tokens: u32,
    /// The `kv_transfer_params` for the next turn, if this rank keeps the KV.
    pub params: Option<Value>,
    /// Why the request failed, if it did.
    pub error: Option<NamedError>,
}

/// The pages of a rank at the end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounting {
    /// The number of pages in the cache.
    pub pages: usize,
    /// The number of these pages that are free.
    pub free_pages: usize,
}

impl Accounting {
    /// The number of pages that were never given back.
    pub fn leaked(&self) -> usize {
        self.pages.saturating_sub(self.free_pages)
    }
}

/// An error: its name, for tables, and its full text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedError {
    /// The name of the error, such as `PeerLost`.
    pub name: String,
    /// The full message: which session failed, why, and what to do.
    pub text: String,
}

impl NamedError {
    /// An error from its name and its text.
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
            Cause::Draining => "Draining",
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

/// The length of a duration, in milliseconds.
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
