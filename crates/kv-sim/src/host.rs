//! One life of one host: its node, its connections, its free pages.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::proto::{Node, NodeConfig};
use kv_core::wire::Link;
use kv_core::{
    ArgsError, Incarnation, KvArgs, Layout, Parallel, PeerId, PlaneEvent, RankRecord, Region, RegionRole,
    SessionId, StateGroup, Time, WorkerRole,
};

use crate::clock::Clock;
use crate::cost::Held;
use crate::ledger::{LegId, LifeId, Slot};
use crate::memory::Memory;
use crate::params::{Params, Topology};
use crate::planted::Planted;
use crate::rig::Rig;
use crate::state::GROUPS;
use crate::ways::WayId;

/// The plane's name in records and hellos.
pub(crate) const PLANE: &str = "sim";

/// One life of one host.
pub(crate) struct Host {
    pub(crate) slot: Slot,
    pub(crate) engine: Engine,
    /// What its node held after its last step.
    pub(crate) held: Held,
    /// Since when its driver has been stopped, in global time.
    pub(crate) stopped: Option<u64>,
    pub(crate) incarnation: Incarnation,
    pub(crate) record: RankRecord,
    pub(crate) conns: BTreeMap<PeerId, Conn>,
    /// The timer that is set, and how often it was set.
    pub(crate) timer: Option<Time>,
    pub(crate) timer_generation: u32,
    pub(crate) sessions: BTreeMap<SessionId, LegId>,
    pub(crate) next_session: u64,
    pub(crate) free_pages: Vec<u32>,
    pub(crate) free_rows: Vec<u32>,
    /// Free items of each state group.
    pub(crate) free_items: [Vec<u32>; GROUPS],
    /// Posts in flight.
    pub(crate) flying: usize,
}

/// What runs on a host.
pub(crate) enum Engine {
    /// A node.
    Node(Box<Node>),
    /// A node in the worker's own loop.
    Rig(Box<Rig>),
    /// What its plane has to tell to whoever owns it, outside of the world.
    Plane(Vec<PlaneEvent>),
    /// Somebody who lies, and the links of those that have greeted it.
    Liar(BTreeMap<LifeId, Link>),
    /// Nothing any more.
    Dead,
}

/// The way from one life to another, as the plane of the first knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conn {
    pub(crate) target: LifeId,
    /// For writes.
    pub(crate) way: WayId,
    /// Nothing passes any more: refused, or broken under way.
    pub(crate) dead: bool,
    /// When its end is noticed, in global time; `None` while it lives.
    pub(crate) gone_at: Option<u64>,
}

impl Host {
    /// True if it runs the worker's own loop.
    pub(crate) fn is_driven(&self) -> bool {
        matches!(self.engine, Engine::Rig(_))
    }

    /// Starts a life.
    pub(crate) fn boot(
        params: &Params,
        (slot, life): (Slot, LifeId),
        (bits, clock): (u64, Clock),
        memory: &Memory,
        planted: Option<Planted>,
    ) -> Result<Host, Box<dyn std::error::Error>> {
        let driven = params.driven;
        let args = args(params, slot, memory)?;
        let incarnation = Incarnation::from_random(bits);
        let role = if slot < params.prefills { WorkerRole::Prefill } else { WorkerRole::Decode };
        let who = (args.worker().clone(), incarnation);
        let record = RankRecord::serving_kv(who, role, (PLANE, metadata(life)), args.geometry())?;
        let mut config = NodeConfig::new(args.clone(), incarnation, PLANE, metadata(life));
        config.timing = params.timing;
        config.limits = params.limits;
        let node = Node::new(config);
        let engine = if !driven {
            Engine::Node(Box::new(node))
        } else {
            match Rig::new((node, args, record.clone()), params, (life, clock, bits), planted) {
                Some(rig) => Engine::Rig(Box::new(rig)),
                None => Engine::Dead,
            }
        };
        let free_pages = (0..memory.pages.len() as u32).rev().collect();
        let free_rows = (0..memory.rows.len() as u32).rev().collect();
        Ok(Host {
            slot,
            engine,
            held: Held::default(),
            stopped: None,
            incarnation,
            record,
            conns: BTreeMap::new(),
            timer: None,
            timer_generation: 0,
            sessions: BTreeMap::new(),
            next_session: 1,
            free_pages,
            free_rows,
            free_items: memory.items.each_ref().map(|items| (0..items.len() as u32).rev().collect()),
            flying: 0,
        })
    }
}

/// What peers are given to reach a life.
pub(crate) fn metadata(life: LifeId) -> Bytes {
    Bytes::copy_from_slice(&(life as u64).to_le_bytes())
}

/// The life that metadata leads to.
pub(crate) fn life_of(metadata: &[u8]) -> Option<LifeId> {
    Some(u64::from_le_bytes(metadata.try_into().ok()?) as LifeId)
}

fn args(params: &Params, slot: Slot, memory: &Memory) -> Result<KvArgs, ArgsError> {
    let prefill = slot < params.prefills;
    let within = if prefill { slot } else { slot - params.prefills };
    let side = if prefill { "p" } else { "d" };
    let mut parallel = Parallel::default();
    if let Some(pair) = &params.unequal {
        let builder = pair.describe(prefill, within as u32, memory, params.state_items > 0);
        return builder
            .dtype("u8")
            .suffixes_requests(params.suffixed)
            .max_inflight(params.max_inflight)
            .max_sge(params.max_sge)
            .build();
    }
    let (engine, rank) = match params.topology {
        Topology::Plain | Topology::Unequal => (format!("{side}{within}"), 0),
        Topology::DataParallel if prefill => {
            parallel.dp_size = params.prefills as u32;
            parallel.dp_rank = within as u32;
            (side.to_owned(), within as u32)
        }
        Topology::DataParallel => (format!("{side}{within}"), 0),
        Topology::TensorParallel => {
            parallel.tp_size = 2;
            parallel.tp_rank = within as u32;
            (side.to_owned(), within as u32)
        }
    };
    let misfit = params.misfit == Some(slot);
    let mut builder = KvArgs::builder(&engine, rank)
        .pages(memory.pages.len() as u32, 16)
        .dtype(if misfit { "f16" } else { "f32" })
        .parallel(parallel)
        .suffixes_requests(params.suffixed)
        .max_inflight(params.max_inflight)
        .max_sge(params.max_sge);
    for (number, region) in memory.regions().iter().enumerate() {
        let addr = (number as u64 + 1) << 20;
        let shape = Region::dram(region.role, addr, region.bytes.len() as u64, region.item_len as u64);
        let layered = region.role == RegionRole::Kv;
        builder =
            builder.region(if layered { shape.layer(number as u32) } else { shape.group(region.group) });
    }
    if memory.items.iter().any(|items| !items.is_empty()) {
        let groups = vec![
            StateGroup::slots(1, parallel.tp_size),
            StateGroup::pages(16, 1, parallel.tp_size).optional(),
        ];
        builder = builder.layout(Layout { groups, ..Layout::default() });
    }
    builder.build()
}
