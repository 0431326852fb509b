//! A prompt on a prefill rank.

use std::time::Duration;

use kv_transfer::{AuxIndex, Pages, SessionOptions};

use super::control::History;
use super::pull_back::PullBack;

/// A prompt on its way through the queues.
pub struct Prompt {
    /// Its rendezvous key.
    pub room: u64,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What its session is opened with.
    pub options: SessionOptions,
    /// The numbers of all its pages; empty until the forward pass begins.
    pub pages: Vec<u32>,
    /// The pages that have not been given to the transfer yet.
    pub unsent: Pages,
    /// The aux row that goes with its last page.
    pub aux: Option<AuxIndex>,
    /// Tokens whose KV is in its pages.
    pub computed: usize,
    /// Time spent computing it.
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
}
