//! A prompt on a prefill rank.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::{AuxIndex, Pages, SessionOptions};

use crate::control::History;
use crate::model::InputRows;
use crate::pull_back::PullBack;

/// A prompt on its way through the queues of a prefill rank.
pub struct Prompt {
    /// The room of the request.
    pub room: u64,
    /// The tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Rows that take the place of embeddings of tokens.
    pub inputs: Arc<[InputRows]>,
    /// The options with which its session is opened.
    pub options: SessionOptions,
    /// The numbers of all its pages; empty until the forward pass begins.
    pub pages: Vec<u32>,
    /// The pages that have not been given to the transfer yet.
    pub unsent: Pages,
    /// The aux row that is sent with the last page.
    pub aux: Option<AuxIndex>,
    /// The number of tokens whose KV is in the pages.
    pub computed: usize,
    /// How long the computation has taken so far.
    pub compute: Duration,
    /// The session that fetches the KV of earlier turns.
    pub pull_back: Option<Box<PullBack>>,
    /// Where that came from in the end.
    pub history: Option<History>,
}

impl Prompt {
    /// A prompt that has just arrived.
    pub fn new(room: u64, tokens: Vec<u32>, options: SessionOptions) -> Prompt {
        Prompt {
            room,
            tokens,
            inputs: Arc::default(),
            options,
            pages: Vec::new(),
            unsent: Pages::none(),
            aux: None,
            computed: 0,
            compute: Duration::ZERO,
            pull_back: None,
            history: None,
        }
    }

    /// The number of tokens whose KV came from another rank, and was not computed here.
    pub fn cached_tokens(&self) -> usize {
        match self.history {
            Some(History::PulledBack { tokens }) => tokens,
            Some(History::Recomputed { .. }) | None => 0,
        }
    }
}
