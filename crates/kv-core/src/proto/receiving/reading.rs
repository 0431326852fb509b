//! What one source has granted to a reading session, and how far the session has read it.
//!
//! | state | from | when |
//! |---|---|---|
//! | `Waiting` | – | the source has granted its pages; the session has no pages to read into yet |
//! | `Reading` | `Waiting` | lease and pages are there: the reads are planned, and posted in their turn |
//! | `Ended` | `Waiting` | there is nothing to read |
//! | `Ended` | `Reading` | the last read has succeeded, and nothing waits for its turn |
//!
//! Reads that have ended are right if the pages were intact until the end of the last read:
//! `is_proven`.

use std::time::Duration;

use crate::groups::CacheGroupLists;
use crate::id::{AuxIndex, SessionId};
use crate::meter::step;
use crate::page_list::PageList;
use crate::plan::Plan;
use crate::time::Time;
use crate::transport::Descriptor;
use crate::wire::Granted;

/// A lease on the pages of one source, and the reads under it.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    /// The lease id: the sender's session.
    lease: SessionId,
    pages: PageList,
    aux: Option<AuxIndex>,
    groups: CacheGroupLists,
    /// How often heartbeats are sent for the lease; `None` if the lease is not renewed.
    interval: Option<Duration>,
    /// Before this moment, the pages are known to be intact. From this moment on they may be
    /// overwritten.
    intact_until: Time,
    progress: Progress,
}

#[derive(Debug, Clone)]
enum Progress {
    Waiting,
    Reading {
        /// Plans not yet handed out, in reverse order.
        plans: Vec<Plan>,
        queued: bool,
        next_part: u32,
        outstanding: u32,
    },
    Ended(Time),
}

/// The next part of the reads from one source.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) number: u32,
    /// The descriptors to read, at least one.
    pub(super) descriptors: Vec<Descriptor>,
    /// True if more can be posted afterwards.
    pub(super) more: bool,
}

impl Reading {
    /// The reading under a lease that a source has granted. `interval` is how often heartbeats are
    /// sent for it.
    pub(super) fn new(granted: Granted, interval: Option<Duration>, intact_until: Time) -> Reading {
        let Granted { lease_id: lease, pages, aux, groups, .. } = granted;
        Reading { lease, pages, aux, groups, interval, intact_until, progress: Progress::Waiting }
    }

    /// The lease id: the sender's session.
    pub(super) fn lease(&self) -> SessionId {
        self.lease
    }

    /// The source's pages of the request, in request order.
    pub(super) fn pages(&self) -> &PageList {
        &self.pages
    }

    /// The source's aux row.
    pub(super) fn aux(&self) -> Option<AuxIndex> {
        self.aux
    }

    /// The source's items of cache groups.
    pub(super) fn groups(&self) -> &CacheGroupLists {
        &self.groups
    }

    /// How often heartbeats are sent for the lease; `None` if the lease is not renewed.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.interval
    }

    /// The source has proven that the pages are intact until this moment.
    pub(super) fn prove(&mut self, until: Time) {
        self.intact_until = self.intact_until.max(until);
    }

    /// How many runs of pages and items the lease has; 0 once the reads are planned.
    pub(super) fn waiting_runs(&self) -> usize {
        if self.is_planned() { 0 } else { self.pages.runs().len() + self.groups.runs() }
    }

    /// True once the reads are planned.
    pub(super) fn is_planned(&self) -> bool {
        !matches!(self.progress, Progress::Waiting)
    }

    /// The pages to read into are there. Takes the plans, the last of which is read first. True if
    /// there is something to read, which then waits for its turn.
    pub(super) fn plan(&mut self, plans: Vec<Plan>, now: Time) -> bool {
        let reads = !plans.is_empty();
        self.progress = match reads {
            true => Progress::Reading { plans, queued: true, next_part: 0, outstanding: 0 },
            false => Progress::Ended(now),
        };
        reads
    }

    /// Hands out the next part, of at most this many descriptors and bytes, when the turn of these
    /// reads has come. Its post counts as started. `None` if there is nothing to post.
    pub(super) fn next_part(&mut self, max_sge: usize, max_bytes: u64) -> Option<Part> {
        let Progress::Reading { plans, queued, next_part, outstanding } = &mut self.progress else {
            return None;
        };
        let mut descriptors: Vec<Descriptor> = Vec::new();
        let mut bytes = 0;
        while let Some(plan) = plans.last_mut() {
            step(1);
            let room = max_sge - descriptors.len();
            let progress = plan.fill(&mut descriptors, room, max_bytes.saturating_sub(bytes));
            bytes += progress.bytes;
            if !progress.done {
                break;
            }
            plans.pop();
        }
        *queued = !(descriptors.is_empty() || plans.is_empty());
        if descriptors.is_empty() {
            return None;
        }
        *outstanding += 1;
        let number = *next_part;
        *next_part += 1;
        Some(Part { number, descriptors, more: *queued })
    }

    /// A post has ended. `well` is true if it succeeded.
    pub(super) fn post_ended(&mut self, well: bool, now: Time) {
        let Progress::Reading { queued, outstanding, .. } = &mut self.progress else { return };
        *outstanding = outstanding.saturating_sub(1);
        if well && *outstanding == 0 && !*queued {
            self.progress = Progress::Ended(now);
        }
    }

    /// Whether reads wait for their turn, and how many posts have not ended.
    pub(super) fn posting(&self) -> (bool, u32) {
        match self.progress {
            Progress::Reading { queued, outstanding, .. } => (queued, outstanding),
            Progress::Waiting | Progress::Ended(_) => (false, 0),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.progress, Progress::Ended(_))
    }

    /// True if everything is read, and the pages were intact until the end of the last read.
    pub(super) fn is_proven(&self) -> bool {
        matches!(self.progress, Progress::Ended(ended) if ended < self.intact_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Attempt;

    fn reading() -> Reading {
        let granted = Granted {
            attempt: Attempt(1),
            number: 1,
            lease_id: SessionId(9),
            pages: PageList::default(),
            aux: None,
            lease_ms: 10,
            interval_ms: 0,
            groups: CacheGroupLists::default(),
        };
        Reading::new(granted, None, Time::from_nanos(10))
    }

    fn at(nanos: u64) -> Time {
        Time::from_nanos(nanos)
    }

    /// The table at the top, row by row.
    #[test]
    fn a_reading_waits_then_reads_then_has_ended_and_only_then_can_be_proven() {
        let mut nothing = reading();
        assert!(!nothing.is_planned() && !nothing.has_ended() && !nothing.is_proven());
        assert!(!nothing.plan(Vec::new(), at(5)));
        assert!(nothing.is_planned() && nothing.has_ended() && nothing.is_proven());

        let mut reading = reading();
        reading.progress = Progress::Reading { plans: vec![], queued: false, next_part: 2, outstanding: 2 };
        reading.post_ended(true, at(4));
        assert_eq!((reading.posting(), reading.has_ended()), ((false, 1), false));
        reading.post_ended(true, at(10));
        assert!(reading.has_ended() && !reading.is_proven(), "at the end of the lease the pages may be gone");
        reading.prove(at(8));
        assert!(!reading.is_proven(), "an older answer proves nothing new");
        reading.prove(at(11));
        assert!(reading.is_proven());
    }

    #[test]
    fn a_read_does_not_end_while_posts_wait_or_after_a_failure() {
        let mut reading = reading();
        reading.progress = Progress::Reading { plans: vec![], queued: true, next_part: 1, outstanding: 1 };
        reading.post_ended(true, at(1));
        assert_eq!((reading.posting(), reading.has_ended()), ((true, 0), false));
        reading.progress = Progress::Reading { plans: vec![], queued: false, next_part: 1, outstanding: 1 };
        reading.post_ended(false, at(1));
        assert_eq!((reading.posting(), reading.has_ended()), ((false, 0), false));
    }
}
