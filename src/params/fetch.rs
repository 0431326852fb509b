//! The decision what a reader does with KV that another worker holds: read all, a part, or nothing.

use std::time::Duration;

use super::error::ParamsError;
use super::remote::RemoteKv;

/// On the next turn, a prefill worker that misses fewer tokens than this computes these tokens instead of
/// reading them from the decode worker. The value is the default of vLLM's `kv_recompute_threshold`.
pub const KV_RECOMPUTE_THRESHOLD: u32 = 64;
/// On the next turn, a prefill worker does not ask for pages that the decode worker keeps for no longer than
/// this. The value is vLLM's margin.
pub const EXPIRY_MARGIN: Duration = Duration::from_secs(5);

/// What a reader does with the KV of a request that another worker holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fetch {
    /// Read the last `pages` pages of the request. The pages before `first` are in the reader's own cache:
    /// `first` is the session's [`prefix_pages`](kv_core::SessionOptions::prefix_pages).
    Read {
        /// Position of the first page to read, counted from the request's first page (0).
        first: usize,
        /// How many pages to read, from `first` to the end of the request.
        pages: usize,
    },
    /// Read nothing, but open a session and end it, so that the holder's pages are free at once. A server
    /// does the same for a request that was aborted before it was scheduled.
    Release(ReleaseReason),
    /// Compute everything: the lease has ended, or is about to end. The holder frees the pages by itself and
    /// may have done so already, so nothing may be read.
    Expired {
        /// For how long the holder still keeps the pages, according to the parameters.
        remaining: Duration,
    },
}

/// Why a reader reads nothing and gives up the holder's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReason {
    /// The reader's own cache has every token that the holder has (a full prefix hit).
    AllHere,
    /// The prompt ends before the holder's last page. A session always reads up to the holder's last page, so
    /// the pages cannot be read for this prompt.
    OtherPrompt {
        /// Pages that the prompt takes.
        needed: usize,
        /// Pages that the holder has.
        held: usize,
    },
    /// So few tokens are missing that computing them is cheaper than a transfer.
    BelowThreshold {
        /// Tokens that the holder has and the reader has not.
        tokens: u32,
        /// Missing tokens from which on a transfer is worth its cost.
        threshold: u32,
    },
}

/// The reader's settings for [`RemoteKv::fetch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FetchPolicy {
    /// Tokens in a page, as in the reader's cache.
    pub page_size: u32,
    /// A reader that misses fewer tokens than this computes them; with 0 the reader always reads.
    pub recompute_threshold: u32,
    /// The reader reads only pages that the holder keeps for longer than this.
    pub expiry_margin: Duration,
}

impl FetchPolicy {
    /// The policy of a decode worker that fetches from a prefill worker: everything that is missing is read,
    /// under a lease that heartbeats renew.
    pub const fn decode(page_size: u32) -> FetchPolicy {
        FetchPolicy { page_size, recompute_threshold: 0, expiry_margin: Duration::ZERO }
    }

    /// The policy of a prefill worker that fetches from a decode worker on the next turn: fewer than
    /// [`KV_RECOMPUTE_THRESHOLD`] missing tokens are computed, and so is everything if the decode worker
    /// keeps its pages for no longer than [`EXPIRY_MARGIN`].
    pub const fn next_turn(page_size: u32) -> FetchPolicy {
        FetchPolicy { page_size, recompute_threshold: KV_RECOMPUTE_THRESHOLD, expiry_margin: EXPIRY_MARGIN }
    }

    /// The same with some fields changed:
    /// `FetchPolicy::decode(16).with(|policy| policy.recompute_threshold = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl RemoteKv {
    /// What the reader does for a prompt of `prompt_tokens` tokens, of which its own cache has the first
    /// `computed_tokens`. `remaining` is what [`remaining`](Self::remaining) returns: for how long the holder
    /// keeps its pages.
    ///
    /// A page of which the reader has a part is read whole.
    ///
    /// # Errors
    ///
    /// [`ParamsError::Conflict`] if the holder has fewer pages than `remote_num_tokens` tokens take.
    pub fn fetch(
        &self,
        prompt_tokens: u32,
        computed_tokens: u32,
        remaining: Option<Duration>,
        policy: &FetchPolicy,
    ) -> Result<Fetch, ParamsError> {
        let page_size = policy.page_size.max(1);
        let there = self.num_tokens.map_or(prompt_tokens, |tokens| tokens.min(prompt_tokens));
        let needed = there.div_ceil(page_size) as usize;
        if let Some(pages) = self.num_pages().filter(|pages| *pages < needed) {
            return Err(ParamsError::Conflict {
                field: "remote_num_tokens",
                got: u64::from(there).into(),
                other: if self.leases.is_some() { "kv_leases.num_pages" } else { "remote_block_ids" },
                expected: (pages as u64).into(),
            });
        }
        if let Some(remaining) = remaining.filter(|left| *left <= policy.expiry_margin) {
            return Ok(Fetch::Expired { remaining });
        }
        let missing = there.saturating_sub(computed_tokens);
        if missing == 0 {
            return Ok(Fetch::Release(ReleaseReason::AllHere));
        }
        if missing < policy.recompute_threshold {
            let threshold = policy.recompute_threshold;
            return Ok(Fetch::Release(ReleaseReason::BelowThreshold { tokens: missing, threshold }));
        }
        if let Some(held) = self.num_pages().filter(|held| *held > needed) {
            return Ok(Fetch::Release(ReleaseReason::OtherPrompt { needed, held }));
        }
        let first = (computed_tokens / page_size) as usize;
        Ok(Fetch::Read { first, pages: needed - first })
    }
}
