//! An engine of one process: model, cache, workers, and what prefill and decode share.

mod batch;
mod decode;
mod forward;
mod prefill;
mod prefix;
mod pull_back;
mod setup;
mod store;

pub use decode::{Continue, DecodeEngine, Event, FinishReason, refusal};
pub use prefill::{PrefillEngine, Prompt};
pub use setup::{Engine, RankSpec, Side};
pub use store::PageCounts;

use kv_transfer::{OpenError, TransferError};

/// Why an engine did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No session can be opened now.
    #[error("the worker opens no session: {0}")]
    Open(Box<OpenError>),
    /// The transfer of the KV has failed.
    #[error(transparent)]
    Transfer(Box<TransferError>),
    /// The KV that has arrived is not that of the request, or not that of its prompt.
    #[error("aux row of room {room} and its prompt carries tag {found:#018x}, expected {expected:#018x}")]
    OtherRequest {
        /// The room of the request.
        room: String,
        /// The tag of the room and the prompt.
        expected: u64,
        /// The tag in the row.
        found: u64,
    },
    /// What another engine offers is not the KV of the prompt.
    #[error("room {room} is not an offer of the KV of this prompt")]
    OtherPrompt {
        /// The room of the offer.
        room: String,
    },
    /// The model has failed.
    #[error("the forward pass failed: {0}")]
    Model(String),
    /// The engine ends.
    #[error("the engine is stopping")]
    Stopping,
    /// Whoever asked for the request is gone.
    #[error("the client has hung up")]
    HungUp,
}

impl From<OpenError> for EngineError {
    fn from(error: OpenError) -> Self {
        Self::Open(Box::new(error))
    }
}

impl From<TransferError> for EngineError {
    fn from(error: TransferError) -> Self {
        Self::Transfer(Box::new(error))
    }
}

impl EngineError {
    /// The model, its cache or its surroundings have failed.
    fn model(error: impl std::fmt::Display) -> Self {
        Self::Model(error.to_string())
    }
}
