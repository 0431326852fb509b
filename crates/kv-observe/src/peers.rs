//! The peers that have a label of their own: the first ones that were met, and no more than a fixed number. A peer
//! chooses its name and may come back under ever new names, so the others share one label. The same holds for the
//! transports by which peers are reached.

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

/// Most transports that have a label of their own: as many as a worker can have.
const MAX_TRANSPORTS: usize = kv_core::MAX_OFFERS;

/// The place of a transport among those that have a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way(u16);

impl Way {
    const UNKNOWN: Way = Way(0);
    const OTHER: Way = Way(1);
}

/// The names of one worker's peers, and of the transports by which they are reached.
#[derive(Debug)]
pub(crate) struct Peers {
    max: usize,
    slots: BTreeMap<WorkerId, Slot>,
    /// The text of each slot.
    names: Vec<SharedString>,
    known: BTreeMap<PeerId, (Slot, Way)>,
    /// The text of each transport's place.
    transports: Vec<SharedString>,
}

impl Peers {
    pub(crate) fn new(max: usize) -> Peers {
        let names = vec!["unknown".into(), "other".into()];
        let transports = names.clone();
        Peers { max: max.min(MAX_KNOWN), slots: BTreeMap::new(), names, known: BTreeMap::new(), transports }
    }

    /// Notes that the peer with this id is this worker.
    pub(crate) fn met(&mut self, id: PeerId, worker: &WorkerId) {
        let slot = self.named(worker);
        self.known.insert(id, (slot, Way::UNKNOWN));
        if self.known.len() > MAX_KNOWN {
            self.known.pop_first();
        }
    }

    /// Notes by which transport the peer with this id is reached.
    pub(crate) fn reached(&mut self, id: PeerId, transport: &str) {
        let way = self.way(transport);
        if let Some((_, reached)) = self.known.get_mut(&id) {
            *reached = way;
        }
    }

    /// The place of a transport; a new one if there is room.
    pub(crate) fn way(&mut self, transport: &str) -> Way {
        let known = self.transports.iter().skip(2).position(|name| name.as_ref() == transport);
        let next = self.transports.len();
        let at = match known {
            Some(at) => at + 2,
            None if next < MAX_TRANSPORTS + 2 => {
                self.transports.push(transport.to_owned().into());
                next
            }
            None => return Way::OTHER,
        };
        u16::try_from(at).map_or(Way::OTHER, Way)
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
        id.and_then(|id| self.known.get(&id)).map_or(Slot::UNKNOWN, |(slot, _)| *slot)
    }

    /// The transport by which the peer with this id is reached.
    pub(crate) fn way_to(&self, id: Option<PeerId>) -> Way {
        id.and_then(|id| self.known.get(&id)).map_or(Way::UNKNOWN, |(_, way)| *way)
    }

    /// The text of a transport's place.
    pub(crate) fn transport(&self, way: Way) -> SharedString {
        self.transports.get(usize::from(way.0)).cloned().unwrap_or_else(|| "unknown".into())
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
    fn a_peer_is_labelled_by_the_last_transport_that_was_chosen_and_transports_are_bounded() {
        let mut peers = Peers::new(4);
        let id = PeerId(1);
        peers.reached(id, "local");
        let label = |peers: &Peers| peers.transport(peers.way_to(Some(id))).to_string();
        assert_eq!(label(&peers), "unknown", "nobody has met it");
        peers.met(id, &worker(0));
        for name in ["local", "tcp", "local"] {
            peers.reached(id, name);
            assert_eq!(label(&peers), name);
        }
        for number in 0..100 {
            peers.reached(id, &format!("transport {number}"));
        }
        assert_eq!(label(&peers), "other");
        assert_eq!(peers.transports.len(), MAX_TRANSPORTS + 2);
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
