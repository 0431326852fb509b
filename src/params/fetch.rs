//! The decision what a reader does with KV that another worker holds: read all, a part, or nothing.

use std::cmp::Ordering;
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
    /// Read `pages` pages of the request. The pages before `first` are in the reader's own cache: `first` is
    /// the session's [`prefix_pages`](kv_core::SessionOptions::prefix_pages). Both are counted in pages of
    /// the reader, of [`FetchPolicy::page_size`] tokens.
    ///
    /// An engine of vLLM may list more pages than the prompt takes, such as those of a longer answer. The
    /// pages at the end of its list are not read: a token's place in the request says in which page of the
    /// list the token is.
    Read {
        /// Position of the first page to read, counted from the request's first page (0).
        first: usize,
        /// How many pages to read, from `first` to the last page of the prompt that the holder has.
        pages: usize,
    },
    /// Read nothing, but open a session and end it, so that the holder's pages are free at once. A server
    /// does the same for a request that was aborted before it was scheduled.
    Release(ReleaseReason),
    /// Compute everything, and open no session: the holder has no token of the prompt, and keeps no page.
    Nothing,
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
    /// The holder keeps pages, and does not say that any token of the prompt is in them.
    NothingThere,
    /// The prompt ends before the holder's last page. Between workers of this library a session always reads
    /// up to the holder's last page: the receiver's pages are the last ones of those that the sender
    /// announced, which lets the receiver leave out a prefix without a word. The pages can therefore not be
    /// read for this prompt. From engines of vLLM, whose readers choose the pages, they can.
    OtherPrompt {
        /// Pages of the holder that the prompt takes.
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
    /// Tokens that one page number of the reader stands for: its page size times its
    /// decode-context-parallel ranks.
    pub page_size: u32,
    /// The same number of the holder, if the reader knows the number: from the handshake with an engine of
    /// vLLM (its block size times its decode-context-parallel ranks), because vLLM's parameters do not have
    /// it. Our holders' parameters do ([`Leases::page_size`](super::Leases::page_size)), and `None` leaves it
    /// to them. Where neither is known, the number of the holder's pages is not checked.
    pub holder_page_size: Option<u32>,
    /// What counts if the holder does not say how many tokens it has: with true the whole prompt, with false
    /// nothing.
    pub whole_prompt: bool,
    /// A reader that misses fewer tokens than this computes them; with 0 the reader always reads.
    pub recompute_threshold: u32,
    /// The reader reads only pages that the holder keeps for longer than this.
    pub expiry_margin: Duration,
}

impl FetchPolicy {
    /// The policy of a decode worker that fetches from a prefill worker, which has the whole prompt:
    /// everything that is missing is read, under a lease that heartbeats renew. `page_size` is the reader's.
    pub const fn decode(page_size: u32) -> FetchPolicy {
        FetchPolicy {
            page_size,
            holder_page_size: None,
            whole_prompt: true,
            recompute_threshold: 0,
            expiry_margin: Duration::ZERO,
        }
    }

    /// The policy of a prefill worker that fetches from a decode worker on the next turn: fewer than
    /// [`KV_RECOMPUTE_THRESHOLD`] missing tokens are computed, and so is everything if the decode worker
    /// keeps its pages for no longer than [`EXPIRY_MARGIN`]. A decode worker that does not say how many tokens
    /// it has may have any part of the prompt, and nothing is read. `page_size` is the reader's.
    pub const fn next_turn(page_size: u32) -> FetchPolicy {
        FetchPolicy {
            page_size,
            holder_page_size: None,
            whole_prompt: false,
            recompute_threshold: KV_RECOMPUTE_THRESHOLD,
            expiry_margin: EXPIRY_MARGIN,
        }
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
    /// A page of which the reader has a part is read whole. The page sizes of the two sides may differ: the
    /// result is in pages of the reader.
    ///
    /// # Errors
    ///
    /// [`ParamsError::Conflict`] if the holder has fewer pages than `remote_num_tokens` tokens take. A reader
    /// that does not know the holder's page size gets no such error.
    pub fn fetch(
        &self,
        prompt_tokens: u32,
        computed_tokens: u32,
        remaining: Option<Duration>,
        policy: &FetchPolicy,
    ) -> Result<Fetch, ParamsError> {
        let there = self.tokens_there(prompt_tokens, policy);
        if there == 0 && prompt_tokens > 0 {
            let keeps = self.leases.is_some() || self.held().is_some_and(|pages| pages > 0);
            return Ok(if keeps { Fetch::Release(ReleaseReason::NothingThere) } else { Fetch::Nothing });
        }
        let too_many = self.pages_beyond(there, policy)?;
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
        if let Some(reason) = too_many.filter(|_| self.leases.is_some()) {
            return Ok(Fetch::Release(reason));
        }
        let page_size = policy.page_size.max(1);
        let first = (computed_tokens / page_size) as usize;
        Ok(Fetch::Read { first, pages: there.div_ceil(page_size) as usize - first })
    }

    /// Tokens of the prompt whose KV the holder has.
    fn tokens_there(&self, prompt_tokens: u32, policy: &FetchPolicy) -> u32 {
        match self.num_tokens {
            Some(tokens) => tokens.min(prompt_tokens),
            None if policy.whole_prompt && self.held() != Some(0) => prompt_tokens,
            None => 0,
        }
    }

    /// [`ReleaseReason::OtherPrompt`] if the holder has more pages than `there` tokens take; an error if the
    /// holder has fewer.
    fn pages_beyond(&self, there: u32, policy: &FetchPolicy) -> Result<Option<ReleaseReason>, ParamsError> {
        let said = self.leases.as_ref().and_then(|leases| leases.page_size);
        let (Some(held), Some(page_size)) = (self.held(), policy.holder_page_size.or(said)) else {
            return Ok(None);
        };
        let needed = there.div_ceil(page_size.max(1)) as usize;
        match held.cmp(&needed) {
            Ordering::Equal => Ok(None),
            Ordering::Greater => Ok(Some(ReleaseReason::OtherPrompt { needed, held })),
            Ordering::Less => Err(ParamsError::Conflict {
                field: "remote_num_tokens",
                got: u64::from(there).into(),
                other: if self.leases.is_some() { "kv_leases.num_pages" } else { "remote_block_ids" },
                expected: (held as u64).into(),
            }),
        }
    }
}
