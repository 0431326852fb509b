//! The peers that have a label of their own: the first ones that were met, and no more than a fixed number. A peer
//! chooses its name and may come back under ever new names, so the others share one label.

use std::collections::BTreeMap;

use kv_core::{PeerId, WorkerId};
use metrics::SharedString;

/// Peers whose id is remembered. A machine knows fewer at once; more are remembered only if the events that tell
/// of forgotten peers are lost.
const MAX_KNOWN: usize = 1 << 14;

/// The place of a peer among those that have a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot(u16);

impl Slot {
    /// No peer, or one that nobody has introduced.
    pub(crate) const UNKNOWN: Slot = Slot(0);
    /// A peer without a label of its own.
    pub(crate) const OTHER: Slot = Slot(1);
}

/// The names of one worker's peers.
#[derive(Debug)]
pub(crate) struct Peers {
    max: usize,
    slots: BTreeMap<WorkerId, Slot>,
    /// The text of each slot.
    names: Vec<SharedString>,
    known: BTreeMap<PeerId, Slot>,
}

impl Peers {
    pub(crate) fn new(max: usize) -> Peers {
        let names = vec!["unknown".into(), "other".into()];
        Peers { max: max.min(MAX_KNOWN), slots: BTreeMap::new(), names, known: BTreeMap::new() }
    }

    /// Notes that the peer with this id is this worker.
    pub(crate) fn met(&mut self, id: PeerId, worker: &WorkerId) {
        let slot = self.named(worker);
        self.known.insert(id, slot);
        if self.known.len() > MAX_KNOWN {
            self.known.pop_first();
        }
    }

    /// Notes that the id is never used again.
    pub(crate) fn forgotten(&mut self, id: PeerId) {
        self.known.remove(&id);
    }

    /// The slot of a worker; a new one if there is room.
    pub(crate) fn named(&mut self, worker: &WorkerId) -> Slot {
        if let Some(&slot) = self.slots.get(worker) {
            return slot;
        }
        let (true, Ok(next)) = (self.slots.len() < self.max, u16::try_from(self.names.len())) else {
            return Slot::OTHER;
        };
        self.slots.insert(worker.clone(), Slot(next));
        self.names.push(worker.to_string().into());
        Slot(next)
    }

    /// The slot of the peer with this id.
    pub(crate) fn of(&self, id: Option<PeerId>) -> Slot {
        id.and_then(|id| self.known.get(&id)).copied().unwrap_or(Slot::UNKNOWN)
    }

    /// The text of a slot.
    pub(crate) fn name(&self, slot: Slot) -> SharedString {
        self.names.get(usize::from(slot.0)).cloned().unwrap_or_else(|| "unknown".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::EngineId;

    fn worker(rank: u32) -> WorkerId {
        WorkerId { engine: EngineId::new("engine").unwrap(), rank }
    }

    #[test]
    fn only_the_first_peers_have_a_label_and_keep_it_when_they_return() {
        let mut peers = Peers::new(2);
        for rank in 0..1000 {
            peers.met(PeerId(rank.into()), &worker(rank));
        }
        let name = |peers: &Peers, id| peers.name(peers.of(Some(PeerId(id)))).to_string();
        assert_eq!([0, 1, 2, 999].map(|id| name(&peers, id)), ["engine/0", "engine/1", "other", "other"]);
        (0..1000).for_each(|id| peers.forgotten(PeerId(id)));
        peers.met(PeerId(1000), &worker(1));
        assert_eq!([1, 1000].map(|id| name(&peers, id)), ["unknown", "engine/1"]);
        assert_eq!((peers.names.len(), peers.slots.len(), peers.known.len()), (4, 2, 1));
    }

    #[test]
    fn ids_of_peers_that_are_never_forgotten_do_not_pile_up() {
        let mut peers = Peers::new(1);
        for id in 0..MAX_KNOWN as u64 + 10 {
            peers.met(PeerId(id), &worker(0));
        }
        assert_eq!(peers.known.len(), MAX_KNOWN);
        assert_eq!((peers.of(Some(PeerId(9))), peers.of(Some(PeerId(10)))), (Slot::UNKNOWN, Slot(2)));
    }
}
