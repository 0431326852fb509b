//! The attempts of one peer at this worker: the attempts that are not over, and the results of the
//! last ones that are over.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::PeerCause;
use crate::id::{Attempt, SessionId};
use crate::in_order::InOrder;
use crate::meter::{each, step};
use crate::proto::conversation::Registration;
use crate::proto::run_set::RunSet;
use crate::time::Time;

/// Most results that are kept for a peer. A correct peer takes note of each result within a round
/// trip.
const MAX_RESULTS: usize = 1024;
/// Most gaps among the attempts that are over.
const MAX_GAPS: usize = 1 << 14;

/// An attempt of the peer at this worker.
///
/// | from | to | when |
/// |---|---|---|
/// | – | `Waiting` | a registration arrives before its sender |
/// | –, `Waiting` | `Active` | sender and registration meet |
/// | –, `Waiting` | `Reading` | sender and acquire message meet |
/// | `Active` | `Served` | all parts of the attempt are in place |
/// | –, `Waiting`, `Active`, `Reading` | `Failed` | see [`PeerCause`]; no post is in flight, no lease runs |
/// | any | – (closed) | the peer releases or aborts the attempt, or raises its low watermark |
/// | `Served`, `Failed` | – (closed) | the result is the oldest of more than 1024 |
#[derive(Debug, Clone)]
pub(in crate::proto) enum Incoming {
    /// A registration that has met no sender yet.
    Waiting(Box<Registration>),
    /// Written by this session, to the target at this position.
    Active(SessionId, usize),
    /// The peer reads this session's pages, as the target at this position.
    Reading {
        /// The sending session whose pages are read.
        session: SessionId,
        /// The position among the session's targets.
        target: usize,
        /// The end of this reader's lease: the session's own end when the lease was last told,
        /// extended by heartbeats since then.
        until: Time,
        /// By how much a heartbeat extends the lease; `None` before the lease, for a fixed lease,
        /// and after the session has failed.
        extension: Option<std::time::Duration>,
        /// True while the pages are as they were granted.
        intact: bool,
    },
    /// Completely written. Kept for a receiver that missed the message.
    Served {
        /// How many parts the attempt had.
        total: u32,
        /// The groups of the attempt that were left out.
        skipped: Vec<u16>,
    },
    /// Failed, and no write is in flight. Kept for a receiver that missed the message.
    Failed {
        /// The cause, as the peer is told it.
        cause: PeerCause,
    },
}

/// All attempts of one peer. What is kept is bounded, however many attempts the peer names.
#[derive(Debug, Clone)]
pub(in crate::proto) struct Attempts {
    /// All attempts below this number are over.
    low_watermark: Attempt,
    /// Attempts from the low watermark on that are over and forgotten.
    closed: RunSet,
    /// Attempts that are not over and do not read.
    live: BTreeMap<Attempt, Incoming>,
    /// Attempts that read. They have a map of their own, because heartbeats walk along them.
    reading: BTreeMap<Attempt, Incoming>,
    /// At most [`MAX_RESULTS`]: a peer whose numbers do not rise moves few.
    results: InOrder<Attempt, Incoming>,
}

impl Default for Attempts {
    fn default() -> Attempts {
        Attempts {
            low_watermark: Attempt(0),
            closed: RunSet::default(),
            live: BTreeMap::new(),
            reading: BTreeMap::new(),
            results: InOrder::default(),
        }
    }
}

impl Attempts {
    pub(in crate::proto) fn low_watermark(&self) -> Attempt {
        self.low_watermark
    }

    /// True if the attempt is over and forgotten: messages about it are ignored.
    pub(in crate::proto) fn is_closed(&self, attempt: Attempt) -> bool {
        attempt < self.low_watermark || self.closed.contains(attempt.0)
    }

    /// True if a new attempt with this number may be noted. Numbers must stay within a window above
    /// the low watermark, and leave few gaps.
    pub(in crate::proto) fn has_room(&self, attempt: Attempt, window: u64) -> bool {
        attempt >= self.low_watermark
            && attempt.0 - self.low_watermark.0 < window
            && self.closed.runs_len() < MAX_GAPS
    }

    pub(in crate::proto) fn get(&self, attempt: Attempt) -> Option<&Incoming> {
        let over = || self.results.get(attempt);
        self.live.get(&attempt).or_else(|| self.reading.get(&attempt)).or_else(over)
    }

    /// The attempt, if it is not over.
    pub(in crate::proto) fn get_mut(&mut self, attempt: Attempt) -> Option<&mut Incoming> {
        self.live.get_mut(&attempt).or_else(|| self.reading.get_mut(&attempt))
    }

    /// Sets the state of the attempt.
    pub(in crate::proto) fn insert(&mut self, attempt: Attempt, incoming: Incoming) {
        self.remove(attempt);
        match &incoming {
            Incoming::Served { .. } | Incoming::Failed { .. } => {
                self.results.insert(attempt, incoming);
                if self.results.len() > MAX_RESULTS
                    && let Some((oldest, _)) = self.results.pop_first()
                {
                    self.close(oldest);
                }
            }
            Incoming::Reading { .. } => drop(self.reading.insert(attempt, incoming)),
            Incoming::Waiting(_) | Incoming::Active(..) => drop(self.live.insert(attempt, incoming)),
        }
    }

    pub(in crate::proto) fn remove(&mut self, attempt: Attempt) -> Option<Incoming> {
        let live = self.live.remove(&attempt).or_else(|| self.reading.remove(&attempt));
        live.or_else(|| self.results.remove(attempt))
    }

    /// Notes that the attempt is over, and forgets it.
    pub(in crate::proto) fn close(&mut self, attempt: Attempt) {
        self.remove(attempt);
        if attempt >= self.low_watermark
            && (self.closed.runs_len() < MAX_GAPS || self.closed.touches(attempt.0))
        {
            self.closed.insert(attempt.0, 1);
        }
    }

    /// Raises the low watermark. Attempts below it are kept until they are taken.
    pub(in crate::proto) fn raise_low_watermark(&mut self, low_watermark: Attempt) {
        self.low_watermark = low_watermark;
        self.closed.forget_below(low_watermark.0);
        // Results below the low watermark are of no use any more.
        while self.results.first().is_some_and(|oldest| oldest < low_watermark) {
            step(1);
            self.results.pop_first();
        }
    }

    /// The first attempt in this range that is not over.
    pub(in crate::proto) fn first_live(&self, range: Range<Attempt>) -> Option<Attempt> {
        if range.start >= range.end {
            return None;
        }
        let first = |attempts: &BTreeMap<Attempt, Incoming>| {
            attempts.range(range.clone()).next().map(|(&attempt, _)| attempt)
        };
        first(&self.live).into_iter().chain(first(&self.reading)).min()
    }

    /// Forgets the results in this range.
    pub(in crate::proto) fn close_results(&mut self, range: Range<Attempt>) {
        if range.start >= range.end {
            return;
        }
        let mut next = range.start;
        while let Some(attempt) = self.results.first_from(next).filter(|attempt| *attempt < range.end) {
            step(1);
            self.close(attempt);
            next = Attempt(attempt.0 + 1);
        }
    }

    /// Forgets all results.
    pub(in crate::proto) fn forget_results(&mut self) {
        self.close_results(Attempt(0)..Attempt(u64::MAX));
    }

    /// The attempts that are not over: first those that do not read, then those that read.
    pub(in crate::proto) fn live(&self) -> impl Iterator<Item = (Attempt, &Incoming)> {
        each(self.live.iter().chain(&self.reading)).map(|(&attempt, incoming)| (attempt, incoming))
    }

    /// The attempts in this range that read.
    pub(in crate::proto) fn reading_mut(
        &mut self,
        range: Range<Attempt>,
    ) -> impl Iterator<Item = (Attempt, &mut Incoming)> {
        let range = range.start..range.end.max(range.start);
        each(self.reading.range_mut(range)).map(|(&attempt, incoming)| (attempt, incoming))
    }

    /// How many attempts are not over.
    pub(in crate::proto) fn live_len(&self) -> usize {
        self.live.len() + self.reading.len()
    }

    /// How many results are kept.
    pub(in crate::proto) fn results_len(&self) -> usize {
        self.results.len()
    }

    /// True if the peer may not know yet that an attempt was served.
    pub(super) fn has_served(&self) -> bool {
        each(self.results.values()).any(|result| matches!(result, Incoming::Served { .. }))
    }

    /// How many runs of attempts are noted as over.
    pub(in crate::proto) fn closed_len(&self) -> usize {
        self.closed.runs_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> Incoming {
        Incoming::Failed { cause: PeerCause::Aborted }
    }

    #[test]
    fn the_oldest_result_of_too_many_is_closed_and_not_forgotten() {
        let mut attempts = Attempts::default();
        for number in 1..=MAX_RESULTS as u64 + 2 {
            attempts.insert(Attempt(number), failed());
        }
        assert_eq!(attempts.results_len(), MAX_RESULTS);
        assert!(attempts.is_closed(Attempt(2)) && !attempts.is_closed(Attempt(3)));
        assert_eq!(attempts.closed_len(), 1);
    }

    #[test]
    fn gaps_are_bounded_and_end_with_the_low_watermark() {
        let mut attempts = Attempts::default();
        for number in 0..2 * MAX_GAPS as u64 {
            attempts.close(Attempt(number * 2));
        }
        assert_eq!(attempts.closed_len(), MAX_GAPS);
        assert!(!attempts.has_room(Attempt(7), 1 << 30));
        attempts.raise_low_watermark(Attempt(4 * MAX_GAPS as u64));
        assert_eq!(attempts.closed_len(), 0);
        assert!(attempts.has_room(Attempt(4 * MAX_GAPS as u64 + 7), 1 << 30));
    }

    #[test]
    fn only_leases_are_walked_for_heartbeats() {
        let mut attempts = Attempts::default();
        let reading = |session| Incoming::Reading {
            session: SessionId(session),
            target: 0,
            until: Time::ZERO,
            extension: None,
            intact: true,
        };
        attempts.insert(Attempt(3), reading(3));
        attempts.insert(Attempt(4), Incoming::Active(SessionId(4), 0));
        attempts.insert(Attempt(5), reading(5));
        let walked = |attempts: &mut Attempts| -> Vec<Attempt> {
            attempts.reading_mut(Attempt(0)..Attempt(9)).map(|(attempt, _)| attempt).collect()
        };
        assert_eq!(walked(&mut attempts), [Attempt(3), Attempt(5)]);
        assert_eq!(attempts.first_live(Attempt(4)..Attempt(9)), Some(Attempt(4)));
        assert_eq!(attempts.first_live(Attempt(3)..Attempt(9)), Some(Attempt(3)), "whichever kind is first");
        attempts.insert(Attempt(5), failed());
        assert_eq!(walked(&mut attempts), [Attempt(3)]);
        assert_eq!(attempts.reading_mut(Attempt(9)..Attempt(3)).count(), 0);
        assert_eq!((attempts.live_len(), attempts.results_len()), (2, 1));
    }
}
