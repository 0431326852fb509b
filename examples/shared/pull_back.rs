//! The way back: a prefill rank reads the pages that a decode rank has kept of a chat.

use kv_transfer::params::{Fetch, FetchPolicy, ReleaseReason, RemoteKv};
use kv_transfer::{
    Backpressure, EngineGroup, EngineReceiver, KvManager, KvPoll, KvReceiver, KvSession, OpenError, Pages,
    SessionOptions, TransferMode, WorkerRole,
};

use super::control::History;

/// The session that fetches the KV of earlier turns, before the rest of a prompt is computed.
pub struct PullBack {
    receiver: EngineReceiver,
    tokens: usize,
    pages: usize,
    /// Pages that the worker's ring had no room for.
    unsent: Option<Pages>,
    /// Pages of the prompt that are not fetched.
    rest: Pages,
}

/// How a prompt gets the KV of its earlier turns.
pub enum Way {
    /// A session reads the KV from the decode rank.
    Pull(Box<PullBack>),
    /// The KV is computed again. A session, if there is one, only releases the decode rank's pages.
    Compute(History, Option<EngineReceiver>),
}

impl PullBack {
    /// Decides, and opens the session at once: the holder's lease is acquired before there is room
    /// for the pages.
    pub fn open(
        manager: &EngineGroup,
        remote: &RemoteKv,
        prompt_tokens: usize,
        options: &SessionOptions,
    ) -> Result<Way, OpenError> {
        let recompute = |why: String, session| Way::Compute(History::Recomputed { why }, session);
        let policy = FetchPolicy::next_turn(manager.args().geometry().page_tokens());
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let fetch = match remote.fetch(prompt_tokens, 0, remote.remaining(None), &policy) {
            Ok(fetch) => fetch,
            Err(error) => return Ok(recompute(error.to_string(), None)),
        };
        let room = match (fetch, &remote.room) {
            (Fetch::Expired { .. }, _) => return Ok(recompute("about to be dropped".to_owned(), None)),
            (Fetch::Nothing, _) | (_, None) => return Ok(recompute("not kept".to_owned(), None)),
            (_, Some(room)) => room.clone(),
        };
        let (source, mode) = (Some(WorkerRole::Decode), Some(TransferMode::Pull));
        let held = remote.num_tokens.unwrap_or(prompt_tokens);
        let tokens = held.min(prompt_tokens) as usize;
        let options = options.clone().with(|options| {
            options.source = source;
            options.mode = mode;
            options.tokens = Some(held as usize);
        });
        let options = remote.reader_options(options);
        let mut receiver = manager.receiver(&remote.bootstrap_addr(), room, options)?;
        match fetch {
            Fetch::Read { pages, .. } => {
                let (unsent, rest) = (None, Pages::none());
                Ok(Way::Pull(Box::new(PullBack { receiver, tokens, pages, unsent, rest })))
            }
            Fetch::Release(reason) => {
                // No pages: nothing is read, and the holder's are free at once. Full queues only
                // leave that to its lease.
                let _ = receiver.init(Pages::none(), None);
                let why = match reason {
                    ReleaseReason::BelowThreshold { threshold, .. } => format!("below {threshold} tokens"),
                    other => format!("{other:?}"),
                };
                Ok(recompute(why, Some(receiver)))
            }
            // What a later version may decide.
            other => Ok(recompute(format!("{other:?}"), None)),
        }
    }

    /// Gives the session the first of the prompt's pages to read into.
    pub fn begin(&mut self, mut pages: Pages) {
        self.rest = pages.split_off(self.pages);
        self.unsent = Some(pages);
        self.flush();
    }

    fn flush(&mut self) {
        if let Some(pages) = self.unsent.take()
            && let Err(Backpressure(pages)) = self.receiver.init(pages, None)
        {
            self.unsent = Some(pages);
        }
    }

    /// Aborts the session.
    pub fn abort(&mut self) {
        self.receiver.abort();
    }

    /// The pages in order, the number of tokens in them, and where the tokens come from; `None` while the
    /// session goes on.
    pub fn end(&mut self) -> Option<(Pages, usize, History)> {
        if !self.receiver.poll().is_terminal() {
            self.flush();
            return None;
        }
        let read = self.receiver.reclaim()?.pages;
        let history = match self.receiver.failure() {
            None if self.receiver.poll() == KvPoll::Success => History::PulledBack { tokens: self.tokens },
            error => {
                let why = error.map_or_else(|| "failed".to_owned(), |error| error.cause.to_string());
                History::Recomputed { why }
            }
        };
        let tokens = if matches!(history, History::PulledBack { .. }) { self.tokens } else { 0 };
        let mut all = self.unsent.take().unwrap_or(read);
        // Two parts of the same `Pages`.
        let refused = all.append(std::mem::take(&mut self.rest));
        debug_assert!(refused.is_ok(), "split pages cannot be joined");
        Some((all, tokens, history))
    }
}
