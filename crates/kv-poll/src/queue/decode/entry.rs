//! A request in decode queues, in each of its stages.

use kv_core::{AuxIndex, Backpressure, KvPoll, KvReceiver, Pages, RequestCacheGroups};

use super::types::Ready;
use crate::queue::admission::Demand;
use crate::queue::desk::InLine;
use crate::queue::error::RequestError;
use crate::queue::gate::{self, AuxMemory};

/// A request with a session that has not ended.
pub(super) struct Entry<R, S> {
    pub(super) request: R,
    pub(super) session: S,
    pub(super) priority: i32,
    pub(super) demand: Demand,
    pub(super) stage: Stage,
    pub(super) aborted: bool,
    /// Why the request has failed, if this queue has found the cause.
    pub(super) error: Option<RequestError>,
}

/// The stages of a request whose session has not ended.
///
/// | from | to | when |
/// |---|---|---|
/// | `Handshake` | `Ready` | all ranks are `WaitingForInput` |
/// | `Ready` | `Transfer` | admission |
/// | `Ready` | `Handshake` | `abort`: the request will not be admitted |
pub(super) enum Stage {
    Handshake,
    /// The request is in the `ready` line.
    Ready,
    Transfer {
        /// How many pages the request has.
        pages: usize,
        row: Option<AuxIndex>,
        /// The pages, until the worker's ring has had room for them.
        init: Option<Pages>,
        /// The items of cache groups, until the worker's ring has had room for them. They go before the
        /// pages.
        groups: Option<RequestCacheGroups>,
        /// True once the aux row has passed the gate.
        passed: bool,
    },
}

/// The session of a failed request, until no data operation can touch its pages.
pub(super) struct Quarantined<S> {
    pub(super) session: S,
    /// How many pages the request was given.
    pub(super) pages: usize,
    pub(super) row: Option<AuxIndex>,
    /// All pages of the request, if the worker's ring had no room for them.
    pub(super) unsent: Option<Pages>,
    /// The items of cache groups, if the worker's ring had no room for them.
    pub(super) groups: Option<RequestCacheGroups>,
}

impl<S> Quarantined<S> {
    /// A session that was given neither pages nor items.
    pub(super) fn nothing(session: S) -> Quarantined<S> {
        Quarantined { session, pages: 0, row: None, unsent: None, groups: None }
    }
}

pub(super) struct Waiting<R> {
    pub(super) priority: i32,
    pub(super) ready: Ready<R>,
}

pub(super) struct Retracted<R> {
    pub(super) request: R,
    pub(super) priority: i32,
    /// How many pages the request needs to go on.
    pub(super) pages: usize,
}

impl<R, S: KvReceiver> Entry<R, S> {
    pub(super) fn awaits_pages(&self) -> bool {
        matches!(self.stage, Stage::Handshake) && !self.aborted
    }

    pub(super) fn is_in_line(&self) -> InLine {
        match self.stage {
            Stage::Ready => InLine::Yes,
            Stage::Handshake if !self.aborted => InLine::Later,
            Stage::Handshake | Stage::Transfer { .. } => InLine::Never,
        }
    }

    /// The state to propose to the other ranks when the session reports `poll`. The aux row is checked before
    /// the ranks agree, so that all ranks fail a request if one rank's row is wrong.
    pub(super) fn observe(&mut self, poll: KvPoll, aux: &impl AuxMemory<R>) -> KvPoll {
        if poll == KvPoll::Success && self.error.is_none() {
            let room = self.session.room();
            match &mut self.stage {
                Stage::Transfer { init: None, passed: true, .. } => {}
                Stage::Transfer { init: None, passed, row, .. } => {
                    let checked = row.map_or(Ok(()), |row| gate::check(room, row, aux));
                    *passed = checked.is_ok();
                    self.error = checked.err().map(RequestError::Gate);
                }
                _ => self.error = Some(RequestError::OutOfOrder { room: room.clone(), poll }),
            }
        }
        if self.error.is_some() { KvPoll::Failed } else { poll }
    }

    /// Gives the session its items and pages, if it has not taken them yet. Returns how many pages it has
    /// taken now, or `None` if there is still no room.
    pub(super) fn flush(&mut self) -> Option<usize> {
        let Stage::Transfer { row, init, groups, .. } = &mut self.stage else { return Some(0) };
        if let Some(unsent) = groups.take()
            && let Err(Backpressure(unsent)) = self.session.give_groups(unsent)
        {
            *groups = Some(unsent);
            return None;
        }
        let Some(pages) = init.take() else { return Some(0) };
        let given = pages.len();
        match self.session.init(pages, *row) {
            Ok(()) => Some(given),
            Err(Backpressure(pages)) => {
                *init = Some(pages);
                None
            }
        }
    }
}
