//! What to do with KV that lies elsewhere: read all of it, a part, or nothing.

use std::time::Duration;

use super::error::ParamsError;
use super::remote::RemoteKv;

/// Fewer tokens are computed rather than pulled back on the next turn (vLLM:
/// `kv_recompute_threshold`).
pub const KV_RECOMPUTE_THRESHOLD: u32 = 64;
/// Pages that are kept for no longer than this are not asked for (vLLM's margin).
pub const EXPIRY_MARGIN: Duration = Duration::from_secs(5);

/// What to do with a request's remote KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// Read the last `pages` pages of the request, from its page `first` on; those before are here.
    Read {
        /// Position of the first page to read, in the request.
        first: usize,
        /// How many.
        pages: usize,
    },
    /// Read nothing, but open the session and end it, so that the holder's pages are free at once.
    /// An abort before the request was scheduled is the same.
    Release(ReleaseReason),
    /// Compute everything. The holder lets go by itself, and may have done so already: nothing of
    /// it may be read.
    Expired {
        /// For how long it still keeps the pages, by the parameters.
        remaining: Duration,
    },
}

/// Why there is nothing to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseReason {
    /// Every token that the holder has is here (a full prefix hit).
    AllHere,
    /// The prompt ends before the holder's last page, and what a session reads ends with it.
    OtherPrompt {
        /// Pages that the prompt takes.
        needed: usize,
        /// Pages that the holder has.
        held: usize,
    },
    /// So few that computing them is cheaper.
    BelowThreshold {
        /// How many are missing.
        tokens: u32,
        /// How many make a transfer worth it.
        threshold: u32,
    },
}

/// What decides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchPolicy {
    /// Tokens in a page.
    pub page_size: u32,
    /// Tokens below which the reader computes; 0: never.
    pub recompute_threshold: u32,
    /// Pages must be kept for longer than this to be asked for.
    pub expiry_margin: Duration,
}

impl FetchPolicy {
    /// A decode worker, which fetches from P: whatever is not here is read, under a lease that
    /// heartbeats renew.
    pub const fn decode(page_size: u32) -> FetchPolicy {
        FetchPolicy { page_size, recompute_threshold: 0, expiry_margin: Duration::ZERO }
    }

    /// A prefill worker on the next turn, which fetches from D: computes what is cheap to compute, and
    /// what D is about to drop.
    pub const fn next_turn(page_size: u32) -> FetchPolicy {
        FetchPolicy { page_size, recompute_threshold: KV_RECOMPUTE_THRESHOLD, expiry_margin: EXPIRY_MARGIN }
    }
}

impl RemoteKv {
    /// What to do for a prompt of `prompt_tokens` tokens of which the reader has the first
    /// `computed_tokens` in its own cache, with `remaining` as [`remaining`](Self::remaining) says.
    ///
    /// A page that is here in part is read whole. Fails if the holder has fewer pages than its
    /// tokens take.
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
