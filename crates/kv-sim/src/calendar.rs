//! What will happen, and when.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use bytes::Bytes;
use kv_core::{BootstrapError, LookupId, PeerId, PlaneError, PostId, RankRecord};

use crate::ledger::{LegId, LifeId};
use crate::ways::WayId;

/// Something that happens at one moment of virtual time.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A node's timer rings, unless it was set anew since.
    Timer { life: LifeId, generation: u32 },
    /// A frame arrives.
    Frame { from: LifeId, to: LifeId, bytes: Bytes },
    /// A plane or bootstrap client reports something to its node.
    Report { life: LifeId, report: Report },
    /// A read moves its pieces up to this one.
    Move { flight: usize, upto: usize },
    /// The next slice of a write begins, if it may.
    Begin { flight: usize },
    /// The slice of a write that is under way ends.
    End { flight: usize },
    /// The driver of a host has a turn.
    Turn { life: LifeId },
    /// A post ends.
    Land { flight: usize },
    /// A scheduler does something with one of its sessions.
    Act { leg: LegId, act: Act },
    /// A fault begins or ends.
    Strike(Strike),
    /// An oracle looks.
    Check(Check),
    /// Faults stop for good.
    Heal,
    /// The healed world gets its next request.
    Serve,
}

/// What a node is told by what surrounds it.
#[derive(Debug, Clone)]
pub(crate) enum Report {
    Posted { post: PostId, result: Result<(), PlaneError> },
    Connected { peer: PeerId, way: WayId },
    ConnectFailed { peer: PeerId, way: WayId },
    PeerGone { peer: PeerId, way: WayId },
    Revoked { peer: PeerId },
    Found { lookup: LookupId, ranks: Vec<RankRecord> },
    LookupFailed { lookup: LookupId, error: BootstrapError },
    SpuriousTimeout,
    Garbage { bytes: Bytes },
}

/// What a scheduler does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Open,
    Init { tries: u32 },
    Chunk { tries: u32 },
    Layers,
    Abort,
    Misuse,
}

/// Faults that have a moment.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Strike {
    Crash { slot: usize, down_for: u64 },
    Boot { slot: usize },
    Publish { life: LifeId },
    Pause { slot: usize, span: u64 },
    Jump { life: LifeId, ahead: u64 },
    Partition { from: usize, to: usize, both_ways: bool, span: u64 },
    Break { from: usize, to: usize, refused: u64 },
    Shutdown { slot: usize },
}

/// A moment at which an oracle wants to look.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Check {
    /// The deadline of a session, slack included, has passed.
    Deadline { leg: LegId },
    /// The failure of `origin` must have reached `leg` by now.
    Told { leg: LegId, origin: LegId },
    /// A request of the healed world must have been served by now.
    Served { leg: LegId },
}

#[derive(Clone)]
struct Entry {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Events in order of time; those of one moment in the order in which they were entered.
#[derive(Default, Clone)]
pub(crate) struct Calendar {
    heap: BinaryHeap<Reverse<Entry>>,
    entered: u64,
}

impl Calendar {
    pub(crate) fn enter(&mut self, at: u64, event: Event) {
        self.entered += 1;
        self.heap.push(Reverse(Entry { at, order: self.entered, event }));
    }

    /// The next event, if its moment is not after this one.
    pub(crate) fn next_until(&mut self, until: u64) -> Option<(u64, Event)> {
        let due = self.heap.peek().is_some_and(|Reverse(entry)| entry.at <= until);
        if due { self.next() } else { None }
    }

    pub(crate) fn next(&mut self) -> Option<(u64, Event)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_then_of_entry() {
        let mut calendar = Calendar::default();
        for (at, flight) in [(5, 0), (3, 1), (5, 2), (3, 3)] {
            calendar.enter(at, Event::Land { flight });
        }
        let mut order = Vec::new();
        while let Some((at, Event::Land { flight })) = calendar.next() {
            order.push((at, flight));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2)]);
    }
}
