//! A request in prefill queues: its stage, and the commands that its session is given.

use std::collections::VecDeque;

use kv_core::proto::Command;
use kv_core::{ChunkId, KvPoll, KvSender, Pages};

use crate::consensus::RequestKey;
use crate::queue::desk::InLine;
use crate::queue::error::{Refusal, RequestError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Bootstrap,
    Waiting,
    Forward,
    Inflight,
    Failing,
}

pub(super) struct Entry<R, S> {
    pub(super) request: R,
    pub(super) session: S,
    pub(super) priority: i32,
    pub(super) stage: Stage,
    /// Pages announced with `init`; `None` before `init`.
    pub(super) announced: Option<usize>,
    /// Pages given with chunks, those in `kept` included.
    pub(super) given: usize,
    /// `Pages` without a page, of the pool of the first pages given; `None` before them.
    pub(super) pool: Option<Pages>,
    /// True once items of cache groups were given.
    pub(super) grouped: bool,
    /// True once the session has taken a chunk, even one without pages.
    pub(super) sent_any: bool,
    /// Chunks given, those in `kept` included.
    pub(super) chunks: u32,
    /// Commands for which the worker's ring had no room, in order.
    pub(super) kept: VecDeque<Command>,
    pub(super) in_backlog: bool,
    pub(super) aborted: bool,
    /// Why the request has failed: set when this queue finds the cause, and at the latest in `Failing`.
    pub(super) error: Option<RequestError>,
}

impl<R, S: KvSender> Entry<R, S> {
    /// The state to propose to the other ranks when the session reports `poll`.
    pub(super) fn observe(&mut self, poll: KvPoll) -> KvPoll {
        let complete = self.sent_any && self.kept.is_empty() && self.announced == Some(self.given);
        if poll == KvPoll::Success && !complete && self.error.is_none() {
            self.error = Some(RequestError::OutOfOrder { room: self.session.room().clone(), poll });
        }
        if self.error.is_some() { KvPoll::Failed } else { poll }
    }

    pub(super) fn is_in_line(&self) -> InLine {
        match self.stage {
            Stage::Waiting => InLine::Yes,
            Stage::Bootstrap if !self.aborted => InLine::Later,
            Stage::Bootstrap | Stage::Forward | Stage::Inflight | Stage::Failing => InLine::Never,
        }
    }

    pub(super) fn check_popped(&self, key: RequestKey) -> Result<(), Refusal> {
        match self.stage {
            Stage::Forward | Stage::Inflight => Ok(()),
            Stage::Bootstrap | Stage::Waiting => Err(Refusal::NotPopped { key }),
            Stage::Failing => Err(Refusal::Ended { key }),
        }
    }

    pub(super) fn check_chunk(&self, key: RequestKey, pages: &Pages) -> Result<(), Refusal> {
        self.check_popped(key)?;
        let announced = self.announced.ok_or(Refusal::InitOrder { key })?;
        if !pages.is_empty() && self.pool.as_ref().is_some_and(|pool| !pool.is_of_same_pool(pages)) {
            return Err(Refusal::OtherPool { key });
        }
        let given = self.given.saturating_add(pages.len());
        let over = given > announced || self.stage == Stage::Inflight;
        if over { Err(Refusal::PageCount { key, given, announced }) } else { Ok(()) }
    }

    /// Counts a chunk that is given. Returns the chunk's number.
    pub(super) fn next_chunk(&mut self) -> ChunkId {
        let number = ChunkId(self.chunks);
        self.chunks = self.chunks.saturating_add(1);
        number
    }

    /// Does what `flush` does for a request in the backlog. True if the request leaves the backlog.
    pub(super) fn retry(&mut self) -> bool {
        self.in_backlog = self.stage != Stage::Failing && !self.flush();
        !self.in_backlog
    }

    /// Gives the session the kept commands; false if the ring had no room for all of them.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(command) = self.kept.pop_front() {
            let pages = command.pages().is_some();
            if let Err(command) = self.session.submit(command) {
                self.kept.push_front(command);
                return false;
            }
            self.sent_any |= pages;
        }
        true
    }
}
