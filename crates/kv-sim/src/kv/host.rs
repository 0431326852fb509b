//! One life of one host of the KV service: its arguments, its machine, and the resources of its scheduler.

use std::collections::BTreeMap;

use kv_core::proto::{Node, NodeConfig, NodeGauges};
use kv_core::wire::ConversationId;
use kv_core::{
    ArgsError, CacheGroup, Incarnation, KvArgs, Layout, Parallel, RankRecord, Region, RegionRole,
    ServiceOffer, SessionId, WorkerRole,
};

use crate::clock::Clock;
use crate::kv::items::GROUPS;
use crate::kv::ledger::LegId;
use crate::kv::memory::Memory;
use crate::kv::params::{Params, Topology};
use crate::net::cost::Held;
use crate::net::host;
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Slot, TRANSPORT, metadata, transports_of};
use crate::net::rig::Rig;
use crate::planted::Planted;

/// The conversations under which hosts that a liar has greeted want to be addressed.
pub(crate) type Conversations = BTreeMap<LifeId, ConversationId>;
/// One life of one host of the KV service.
pub(crate) type Host = host::Host<Node, NodeGauges, Conversations>;

/// The resources and the sessions of the scheduler of one host.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stock {
    pub(crate) sessions: BTreeMap<SessionId, LegId>,
    pub(crate) next_session: u64,
    pub(crate) free_pages: Vec<u32>,
    pub(crate) free_rows: Vec<u32>,
    /// The free items of each cache group.
    pub(crate) free_items: [Vec<u32>; GROUPS],
}

impl Stock {
    /// A stock in which every page, row and item of this memory is free.
    pub(crate) fn of(memory: &Memory) -> Stock {
        Stock {
            sessions: BTreeMap::new(),
            next_session: 1,
            free_pages: (0..memory.pages.len() as u32).rev().collect(),
            free_rows: (0..memory.rows.len() as u32).rev().collect(),
            free_items: memory.items.each_ref().map(|items| (0..items.len() as u32).rev().collect()),
        }
    }
}

/// The sizes of a machine's tables on which the cost of its steps may depend.
pub(crate) fn held_of(gauges: &NodeGauges) -> Held {
    Held {
        sessions: gauges.senders + gauges.receivers,
        peers: gauges.peers,
        of_peers: gauges.registrations + gauges.incoming + gauges.failed_rooms,
    }
}

/// A host at the beginning of a life.
pub(crate) fn new_host(
    params: &Params,
    (slot, life): (Slot, LifeId),
    (bits, clock): (u64, Clock),
    memory: &Memory,
    planted: Option<Planted>,
) -> Result<Host, Box<dyn std::error::Error>> {
    let args = args(params, slot, memory)?;
    let incarnation = Incarnation::from_random(bits);
    let prefill = slot < params.physics.prefills;
    let role = if prefill { WorkerRole::Prefill } else { WorkerRole::Decode };
    let who = (args.worker().clone(), incarnation);
    let transports = transports_of(params.physics.seed, &params.physics.ways, life);
    let (parallel, offers) = (args.geometry().parallel, vec![ServiceOffer::kv(args.geometry())?]);
    let record = RankRecord::new(who, role, parallel, transports.clone(), offers)?;
    let mut config = NodeConfig::new(args, incarnation, TRANSPORT, metadata(life));
    config.transports = transports;
    config.timing = params.physics.timing;
    config.limits = params.limits;
    let node = Node::new(config);
    let engine = if params.physics.driven {
        let worker = record.worker.clone();
        let rig =
            Rig::new((node, worker), (Node::gauges, held_of), &params.physics, (life, clock, bits), planted);
        rig.map_or(Engine::Dead, |rig| Engine::Rig(Box::new(rig)))
    } else {
        Engine::Node(Box::new(node))
    };
    Ok(Host::new(slot, engine, record, prefill.then(|| params.addr(slot))))
}

fn args(params: &Params, slot: Slot, memory: &Memory) -> Result<KvArgs, ArgsError> {
    let prefill = slot < params.physics.prefills;
    let within = if prefill { slot } else { slot - params.physics.prefills };
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
            parallel.dp_size = params.physics.prefills as u32;
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
            CacheGroup::slots(1, parallel.tp_size),
            CacheGroup::pages(16, 1, parallel.tp_size).optional(),
        ];
        builder = builder.layout(Layout::default().with(|layout| layout.groups = groups));
    }
    builder.build()
}
