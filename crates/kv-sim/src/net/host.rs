//! One life of one host: its machine and its connections.

use std::collections::BTreeMap;

use kv_core::machine::Machine;
use kv_core::{Incarnation, PeerId, RankRecord, Time, TransportEvent};

use crate::net::cost::Held;
use crate::net::flight::WayId;
use crate::net::lives::{LifeId, Road, Slot};
use crate::net::rig::Rig;

/// One life of one host. `M` is its machine, `G` what the machine reports that it holds, and `L` a stranger:
/// a peer that speaks the protocol without a machine.
#[derive(Clone)]
pub struct Host<M: Machine, G: Send, L> {
    pub(crate) slot: Slot,
    pub(crate) engine: Engine<M, G, L>,
    /// The sizes of the machine's tables after its last step.
    pub(crate) held: Held,
    /// Since when the host's driver has been stopped, in global time; `None` while it runs.
    pub(crate) stopped: Option<u64>,
    pub(crate) incarnation: Incarnation,
    /// The record of the host at its bootstrap server. Only hosts that serve others are published.
    pub(crate) record: RankRecord,
    pub(crate) published: Option<String>,
    pub(crate) conns: BTreeMap<PeerId, Conn>,
    /// The moment for which the timer is set, and how often the timer was set.
    pub(crate) timer: Option<Time>,
    pub(crate) timer_generation: u32,
    /// The number of posts in flight.
    pub(crate) flying: usize,
}

/// What runs on a host.
pub(crate) enum Engine<M: Machine, G: Send, L> {
    /// A protocol machine that the world drives.
    Node(Box<M>),
    /// A machine in the worker's own loop.
    Rig(Box<Rig<M, G>>),
    /// A transport without a machine, with the events that its owner outside of the world has yet to poll.
    Transport(Vec<TransportEvent>),
    /// A stranger: a peer that speaks the protocol without a machine.
    Stranger(L),
    /// The life is over.
    Dead,
}

/// The connection of one life to another, as the transport of the first life knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conn {
    pub(crate) target: LifeId,
    /// The transport that the connection uses.
    pub(crate) road: Road,
    /// The way for writes over the connection.
    pub(crate) way: WayId,
    /// Nothing passes any more: refused, or broken under way.
    pub(crate) dead: bool,
    /// When the transport notices the end of the connection, in global time; `None` while the connection
    /// lives.
    pub(crate) gone_at: Option<u64>,
}

impl<M: Machine + Clone, G: Send, L: Clone> Clone for Engine<M, G, L> {
    /// A driver cannot be copied, and its copy is dead. No world that is copied has a driver.
    fn clone(&self) -> Engine<M, G, L> {
        match self {
            Engine::Node(node) => Engine::Node(node.clone()),
            Engine::Transport(inbox) => Engine::Transport(inbox.clone()),
            Engine::Stranger(stranger) => Engine::Stranger(stranger.clone()),
            Engine::Rig(_) | Engine::Dead => Engine::Dead,
        }
    }
}

impl<M: Machine, G: Send, L> Host<M, G, L> {
    /// A host that begins to live, and that may be found at a bootstrap server.
    pub(crate) fn new(
        slot: Slot,
        mut engine: Engine<M, G, L>,
        record: RankRecord,
        published: Option<String>,
    ) -> Host<M, G, L> {
        if let Engine::Node(node) = &mut engine {
            node.listen(true);
        }
        Host {
            slot,
            engine,
            held: Held::default(),
            stopped: None,
            incarnation: record.incarnation,
            record,
            published,
            conns: BTreeMap::new(),
            timer: None,
            timer_generation: 0,
            flying: 0,
        }
    }

    /// True if the host runs the worker's own loop.
    pub(crate) fn is_driven(&self) -> bool {
        matches!(self.engine, Engine::Rig(_))
    }
}
