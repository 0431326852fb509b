//! One life of one host: its machine, and its connections.

use std::collections::BTreeMap;

use kv_core::machine::Machine;
use kv_core::{Incarnation, PeerId, RankRecord, Time, TransportEvent};

use crate::net::cost::Held;
use crate::net::flight::WayId;
use crate::net::lives::{LifeId, Road, Slot};
use crate::net::rig::Rig;

/// One life of one host. `M` is its machine, `G` what that says that it holds, `L` somebody without one.
#[derive(Clone)]
pub struct Host<M: Machine, G: Send, L> {
    pub(crate) slot: Slot,
    pub(crate) engine: Engine<M, G, L>,
    /// What its machine held after its last step.
    pub(crate) held: Held,
    /// Since when its driver has been stopped, in global time.
    pub(crate) stopped: Option<u64>,
    pub(crate) incarnation: Incarnation,
    /// What peers find of it, and at which bootstrap server; only what serves others is published.
    pub(crate) record: RankRecord,
    pub(crate) published: Option<String>,
    pub(crate) conns: BTreeMap<PeerId, Conn>,
    /// The timer that is set, and how often it was set.
    pub(crate) timer: Option<Time>,
    pub(crate) timer_generation: u32,
    /// Posts in flight.
    pub(crate) flying: usize,
}

/// What runs on a host.
pub(crate) enum Engine<M: Machine, G: Send, L> {
    /// A machine.
    Node(Box<M>),
    /// A machine in the worker's own loop.
    Rig(Box<Rig<M, G>>),
    /// What its transport has to tell to whoever owns it, outside of the world.
    Transport(Vec<TransportEvent>),
    /// Somebody who speaks without a machine.
    Stranger(L),
    /// Nothing any more.
    Dead,
}

/// The way from one life to another, as the transport of the first knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conn {
    pub(crate) target: LifeId,
    /// By which transport.
    pub(crate) road: Road,
    /// For writes.
    pub(crate) way: WayId,
    /// Nothing passes any more: refused, or broken under way.
    pub(crate) dead: bool,
    /// When its end is noticed, in global time; `None` while it lives.
    pub(crate) gone_at: Option<u64>,
}

impl<M: Machine + Clone, G: Send, L: Clone> Clone for Engine<M, G, L> {
    /// Of a driver there is no second one: its twin is dead. No world that is forked has one.
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

    /// True if it runs the worker's own loop.
    pub(crate) fn is_driven(&self) -> bool {
        matches!(self.engine, Engine::Rig(_))
    }
}
