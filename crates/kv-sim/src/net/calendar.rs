//! The calendar of a world: future events, in the order of their moments.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use bytes::Bytes;
use kv_core::{BootstrapError, LookupId, PeerId, PostId, RankRecord, TransportError};

use crate::net::flight::WayId;
use crate::net::lives::{LifeId, Road};

/// Something that happens at one moment of virtual time.
#[derive(Debug, Clone)]
pub enum Event<A> {
    /// The timer of a machine rings, unless the machine has set it anew since.
    Timer { life: LifeId, generation: u32 },
    /// A frame arrives at a host.
    Frame { from: LifeId, to: LifeId, road: Road, bytes: Bytes },
    /// A transport or a bootstrap client reports something to its machine.
    Report { life: LifeId, report: Report },
    /// A read copies its pieces up to the piece `upto`.
    Move { flight: usize, upto: usize },
    /// The next slice of a write begins, if a permission allows it.
    Begin { flight: usize },
    /// The slice of a write that is under way ends.
    End { flight: usize },
    /// The driver of a host has a turn.
    Turn { life: LifeId },
    /// A post ends, and its machine is told.
    Land { flight: usize },
    /// A scheduler or a check of the service acts.
    Act(A),
    /// A fault begins or ends.
    Strike(Strike),
    /// Faults stop for good.
    Heal,
}

/// Something that a machine is told by its transport or its bootstrap client.
#[derive(Debug, Clone)]
pub enum Report {
    Posted { post: PostId, result: Result<(), TransportError> },
    Connected { peer: PeerId, way: WayId },
    ConnectFailed { peer: PeerId, way: WayId },
    PeerGone { peer: PeerId, way: WayId },
    Revoked { peer: PeerId },
    Found { lookup: LookupId, ranks: Vec<RankRecord> },
    LookupFailed { lookup: LookupId, error: BootstrapError },
    SpuriousTimeout,
    Garbage { bytes: Bytes },
}

/// A fault that strikes at one moment.
#[derive(Debug, Clone, Copy)]
pub enum Strike {
    Crash { slot: usize, down_for: u64 },
    Boot { slot: usize },
    Publish { life: LifeId },
    Pause { slot: usize, span: u64 },
    Jump { life: LifeId, ahead: u64 },
    Partition { from: usize, to: usize, road: Road, both_ways: bool, span: u64 },
    Break { from: usize, to: usize, road: Road, refused: u64 },
    Shutdown { slot: usize },
    Drain { slot: usize },
    Replace { life: LifeId },
}

#[derive(Clone)]
struct Entry<A> {
    at: u64,
    order: u64,
    event: Event<A>,
}

impl<A> PartialEq for Entry<A> {
    fn eq(&self, other: &Entry<A>) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl<A> Eq for Entry<A> {}
impl<A> PartialOrd for Entry<A> {
    fn partial_cmp(&self, other: &Entry<A>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<A> Ord for Entry<A> {
    fn cmp(&self, other: &Entry<A>) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Events in the order of their moments; events of one moment in the order in which they were entered.
#[derive(Clone)]
pub struct Calendar<A> {
    heap: BinaryHeap<Reverse<Entry<A>>>,
    entered: u64,
}

impl<A> Default for Calendar<A> {
    fn default() -> Calendar<A> {
        Calendar { heap: BinaryHeap::new(), entered: 0 }
    }
}

impl<A> Calendar<A> {
    /// Enters an event that will happen at this moment.
    pub fn enter(&mut self, at: u64, event: Event<A>) {
        self.entered += 1;
        self.heap.push(Reverse(Entry { at, order: self.entered, event }));
    }

    /// The next event, if its moment is not after `until`.
    pub fn next_until(&mut self, until: u64) -> Option<(u64, Event<A>)> {
        let due = self.heap.peek().is_some_and(|Reverse(entry)| entry.at <= until);
        if due { self.next() } else { None }
    }

    /// Takes out the next event, with its moment.
    pub fn next(&mut self) -> Option<(u64, Event<A>)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_then_of_entry() {
        let mut calendar = Calendar::<()>::default();
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
