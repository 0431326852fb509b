//! Which pages of ended sessions cannot be used again yet, what each of them waits for, and because
//! of which peer.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::id::WorkerId;

/// Pages and items of cache groups of ended sessions that may not be used again yet: one entry for
/// each reason and each peer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quarantine {
    /// The peer that may still touch the memory; `None` if no single peer is waited for.
    pub peer: Option<WorkerId>,
    /// The event that the memory waits for.
    pub reason: QuarantineReason,
    /// How many pages are in quarantine.
    pub pages: usize,
    /// How many items of cache groups are in quarantine.
    pub items: usize,
    /// How many sessions the pages and items belong to.
    pub sessions: usize,
    /// The time after which all of the memory is free whatever the peer does; `None` where time
    /// alone frees nothing.
    pub ends_within: Option<Duration>,
}

impl Quarantine {
    /// `pages` pages of `sessions` sessions, no items of cache groups, and no time that releases them.
    pub fn new(
        peer: Option<WorkerId>,
        reason: QuarantineReason,
        sessions: usize,
        pages: usize,
    ) -> Quarantine {
        Quarantine { peer, reason, pages, items: 0, sessions, ends_within: None }
    }
}

/// What quarantined pages wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum QuarantineReason {
    /// The peer was told to stop writing, and has not acknowledged.
    Unacknowledged,
    /// This worker's way to the peer is lost. The peer may go on writing through a way of its own.
    WayLost,
    /// The peer's right to write was revoked. A write that the peer had begun before has not ended.
    Revoking,
    /// The peer may write until its permission ends. Writes begun before that end may arrive
    /// shortly afterwards.
    PermissionEnds,
    /// A data operation of this worker has not ended.
    OwnPosts,
    /// The peer may read until its lease ends.
    ReaderLease,
    /// This worker stopped while a data operation could still touch the pages. Only a restart of the process
    /// frees them.
    WorkerStopped,
}

impl QuarantineReason {
    /// All reasons, in the order of their declaration.
    pub const ALL: &[QuarantineReason] = &[
        QuarantineReason::Unacknowledged,
        QuarantineReason::WayLost,
        QuarantineReason::Revoking,
        QuarantineReason::PermissionEnds,
        QuarantineReason::OwnPosts,
        QuarantineReason::ReaderLease,
        QuarantineReason::WorkerStopped,
    ];

    /// A short name of the reason, in lower case with underscores, for labels of metrics.
    pub fn name(self) -> &'static str {
        match self {
            QuarantineReason::Unacknowledged => "unacknowledged",
            QuarantineReason::WayLost => "way_lost",
            QuarantineReason::Revoking => "revoking",
            QuarantineReason::PermissionEnds => "permission_ends",
            QuarantineReason::OwnPosts => "own_posts",
            QuarantineReason::ReaderLease => "reader_lease",
            QuarantineReason::WorkerStopped => "worker_stopped",
        }
    }
}

impl Quarantine {
    /// Puts entries with the same peer and the same reason together: one entry for each pair,
    /// sorted by peer and then by reason. `count` combines the numbers of two entries (a sum, for
    /// sessions that share no page); of the times, the longest counts.
    pub fn gather(
        all: impl IntoIterator<Item = Quarantine>,
        count: fn(usize, usize) -> usize,
    ) -> Vec<Quarantine> {
        let mut gathered: BTreeMap<(Option<WorkerId>, QuarantineReason), Quarantine> = BTreeMap::new();
        for next in all {
            let key = (next.peer.clone(), next.reason);
            let Some(entry) = gathered.get_mut(&key) else {
                gathered.insert(key, next);
                continue;
            };
            entry.pages = count(entry.pages, next.pages);
            entry.items = count(entry.items, next.items);
            entry.sessions = count(entry.sessions, next.sessions);
            // Time alone frees both only if it frees each of them.
            entry.ends_within = entry.ends_within.zip(next.ends_within).map(|(a, b)| a.max(b));
        }
        gathered.into_values().collect()
    }
}

impl fmt::Display for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.pages)?;
        if self.items > 0 {
            write!(f, " and {} items of cache groups", self.items)?;
        }
        write!(f, " of {} sessions", self.sessions)?;
        if let Some(peer) = &self.peer {
            write!(f, ", peer {peer}")?;
        }
        write!(f, ": {}", self.reason)?;
        match self.ends_within {
            Some(time) => write!(f, " (ends by itself in at most {time:?})"),
            None => Ok(()),
        }
    }
}

/// What the pages wait for, and what an operator can do to free them.
impl fmt::Display for QuarantineReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QuarantineReason::Unacknowledged => {
                "the peer was told to stop writing and has not said that it has; kill that process or drain that peer"
            }
            QuarantineReason::WayLost => {
                "the way to the peer is lost, and the peer may still be writing; restore the network or kill that process"
            }
            QuarantineReason::Revoking => {
                "the peer's right to write is revoked, and a write of it has not ended; resume or kill that process"
            }
            QuarantineReason::PermissionEnds => {
                "writes that the peer began under its permission may still arrive; they end by themselves"
            }
            QuarantineReason::OwnPosts => {
                "a data operation of this worker has not ended; drain that peer or kill that process"
            }
            QuarantineReason::ReaderLease => "the peer may read until its lease ends; drain that peer",
            QuarantineReason::WorkerStopped => {
                "this worker stopped while the pages could still be touched; restart its process"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::EngineId;

    fn entry(peer: Option<&str>, reason: QuarantineReason, pages: usize) -> Quarantine {
        let peer = peer.map(|engine| WorkerId { engine: EngineId::new(engine).unwrap(), rank: 1 });
        Quarantine { peer, reason, pages, items: 1, sessions: 2, ends_within: None }
    }

    #[test]
    fn quarantine_entries_of_a_peer_and_reason_merge_with_the_longest_time() {
        use QuarantineReason::{PermissionEnds, Unacknowledged};
        let timed = |secs, pages| Quarantine {
            ends_within: Some(Duration::from_secs(secs)),
            ..entry(Some("a"), PermissionEnds, pages)
        };
        let all = || {
            [timed(3, 4), entry(Some("b"), Unacknowledged, 1), timed(9, 5), entry(None, Unacknowledged, 7)]
        };
        let summed = Quarantine::gather(all(), |a, b| a + b);
        let one = Quarantine { items: 2, sessions: 4, ..timed(9, 9) };
        assert_eq!(summed, [entry(None, Unacknowledged, 7), one, entry(Some("b"), Unacknowledged, 1)]);
        let widest = Quarantine::gather(all(), usize::max);
        assert_eq!(widest[1], timed(9, 5));
        let never = Quarantine { ends_within: None, ..timed(1, 1) };
        assert_eq!(Quarantine::gather([timed(3, 4), never], usize::max)[0].ends_within, None);
    }

    #[test]
    fn the_text_names_the_peer_and_what_would_release_its_pages() {
        let text = entry(Some("prefill"), QuarantineReason::Unacknowledged, 12).to_string();
        assert_eq!(
            text,
            "12 pages and 1 items of cache groups of 2 sessions, peer prefill/1: the peer was told to stop \
             writing and has not said that it has; kill that process or drain that peer"
        );
        let timed = Quarantine {
            items: 0,
            ends_within: Some(Duration::from_secs(10)),
            ..entry(Some("prefill"), QuarantineReason::PermissionEnds, 3)
        };
        assert_eq!(
            timed.to_string(),
            "3 pages of 2 sessions, peer prefill/1: writes that the peer began under its permission may still arrive; \
             they end by themselves \
             (ends by itself in at most 10s)"
        );
    }
}
