//! How far a worker that drains has come.

use std::time::Duration;

use kv_core::Time;

/// How long a worker without sessions waits for peers that have not acknowledged how their requests ended.
/// Peers that answer do so within a round trip, or are given up after `Timing::peer_timeout`. A peer whose way is lost is
/// told over the next one.
const UNHEARD: Duration = Duration::from_secs(5);

/// How far a worker that drains has come.
#[derive(Debug)]
pub(super) struct Ebb {
    /// True once no open session awaits a peer.
    pub(super) left: bool,
    /// Until when peers may acknowledge; `None` while sessions are open.
    answers_by: Option<Time>,
    empty: bool,
    /// When the worker stops although it is not empty, and with which grace.
    stop: Option<(Time, Duration)>,
}

impl Ebb {
    /// A worker that begins to drain.
    pub(super) fn new() -> Ebb {
        Ebb { left: false, answers_by: None, empty: false, stop: None }
    }

    /// The worker is to stop when it is empty, or after the first of these times, with the second as its grace. The
    /// order may come long after the drain has begun; later orders have no effect.
    pub(super) fn stop_after(&mut self, now: Time, order: Option<(Duration, Duration)>) {
        self.stop = self.stop.or(order.map(|(within, grace)| (now + within, grace)));
    }

    /// True once an order to stop was taken.
    pub(super) fn has_order(&self) -> bool {
        self.stop.is_some()
    }

    /// True if the worker has just become empty. `quiet`: everything lent is back, no command
    /// waits, and nothing is under way for peers.
    pub(super) fn is_empty(&mut self, now: Time, quiet: bool, owes_answers: impl FnOnce() -> bool) -> bool {
        if self.empty || !quiet || !self.left {
            self.answers_by = None;
            return false;
        }
        let by = *self.answers_by.get_or_insert(now + UNHEARD);
        self.empty = now >= by || !owes_answers();
        self.empty
    }

    /// The grace of the stop that follows now, if one follows.
    pub(super) fn stops(&self, now: Time) -> Option<Duration> {
        self.stop.filter(|&(at, _)| self.empty || now >= at).map(|(_, grace)| grace)
    }

    /// When the worker must look again.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let answers = self.answers_by.filter(|_| !self.empty);
        answers.into_iter().chain(self.stop.map(|(at, _)| at)).min()
    }
}
