//! What each host is: its cache, its machine, and what others are told of it, in the words of each dialect.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kv_bootstrap::SglangRank;
use kv_core::layout::{HND_PACKED, Holds, Layout, RegionRole};
use kv_core::{
    AuxIndex, EngineId, Incarnation, KvArgs, MemoryKind, Parallel, RankRecord, Region, Time, TransferMode,
    WorkerId, WorkerRole,
};
use kv_interop::sglang::model::SglangAgent;
use kv_interop::sglang::{self, AUX_ITEM_LENS, SglangConfig};
use kv_interop::vllm::{self, Compatibility, SideChannelAddr, VllmConfig};
use kv_poll::KvMachine;

use super::memory::ATOM;
use super::params::DialectParams;
use super::{Dialect, LifeId};

/// Why there can be no such host.
pub(super) type Refused = Box<dyn std::error::Error>;

/// Tokens of a page.
pub(super) const PAGE_SIZE: u32 = 4;
/// Rows of each aux buffer.
pub(super) const ROWS: u32 = 64;
const LAYERS: u32 = 2;
const HEADS: u32 = 2;
const HASH: &str = "a hash";

/// A rank of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) engine: usize,
    pub(super) prefill: bool,
    pub(super) rank: u32,
    pub(super) tp: u32,
}

impl Place {
    pub(super) fn engine_name(self) -> String {
        format!("{}-{}", if self.prefill { "p" } else { "d" }, self.engine)
    }

    pub(super) fn host(self) -> String {
        format!("10.0.0.{}", self.engine + 1)
    }

    /// The port of the rank's PULL socket under SGLang. Under vLLM, the first rank's is the engine's side channel.
    pub(super) fn port(self) -> u16 {
        5600 + self.rank as u16
    }

    pub(super) fn addr(self) -> String {
        format!("{}:{}", self.host(), self.port())
    }

    fn parallel(self) -> Parallel {
        Parallel::default().with(|group| (group.tp_size, group.tp_rank) = (self.tp, self.rank))
    }
}

/// What the machine reads of the aux rows of its own memory: the room in each row.
pub(super) type Rooms = Arc<[AtomicU64; ROWS as usize]>;

/// The cache of a host. A process that takes the place of another has its memory at the same addresses.
pub(super) fn args(params: &DialectParams, place: Place) -> Result<KvArgs, Refused> {
    let heads = (HEADS / place.tp).max(1);
    let part = u64::from(heads * PAGE_SIZE) * ATOM as u64;
    let builder = KvArgs::builder(&place.engine_name(), place.rank)
        .pages(params.pages, PAGE_SIZE)
        .heads(heads, 8)
        .dtype("bf16")
        .parallel(place.parallel())
        .max_sge(params.max_sge)
        .max_inflight(params.max_inflight);
    let pages = u64::from(params.pages);
    let kv = |number: u64, len, holds, layer| {
        Region::dram(RegionRole::Kv, 0x100_0000 * (number + 1), pages * len, len).holds(holds).layer(layer)
    };
    let layout = Layout::default().with(|layout| layout.total_kv_heads = HEADS);
    let built = match params.dialect {
        Dialect::VllmPull | Dialect::VllmPush => {
            let mode =
                if params.dialect == Dialect::VllmPull { TransferMode::Pull } else { TransferMode::Push };
            let builder = builder.layout(layout.with(|layout| layout.axes = HND_PACKED)).transfer_mode(mode);
            let region = |layer: u32| kv(layer.into(), 2 * part, Holds::KeyValue, layer);
            (0..LAYERS).map(region).fold(builder, |builder, region| builder.region(region)).build()
        }
        Dialect::Sglang => {
            let kinds = [Holds::Key, Holds::Value].into_iter().enumerate();
            let regions = kinds.flat_map(|(at, holds)| {
                (0..LAYERS).map(move |layer| {
                    kv(at as u64 * u64::from(LAYERS) + u64::from(layer), part, holds, layer)
                        .memory(MemoryKind::Vram, 0)
                })
            });
            let aux = (0..).zip(AUX_ITEM_LENS).map(|(buffer, len)| {
                Region::dram(RegionRole::Aux, 0x1000_0000 + buffer * 0x10_0000, u64::from(ROWS) * len, len)
            });
            let builder = regions.fold(builder.layout(layout), |builder, region| builder.region(region));
            aux.fold(builder, |builder, region| builder.region(region)).build()
        }
    };
    Ok(built?)
}

/// The machine of one life of a host.
pub(super) fn machine(
    params: &DialectParams,
    place: Place,
    args: &KvArgs,
    (life, rooms): (LifeId, &Rooms),
) -> Result<KvMachine, Refused> {
    let seed = params.seed.wrapping_mul(977).wrapping_add(life as u64);
    match params.dialect {
        Dialect::VllmPull | Dialect::VllmPush => {
            let config = VllmConfig::default().with(|config| {
                config.compatibility = Compatibility::Hash(HASH.to_owned());
                config.seed = Some(seed);
                config.side_channel =
                    Some(SideChannelAddr { host: place.host(), port: Place { rank: 0, ..place }.port() });
            });
            Ok(vllm::model::machine(args, &config)?)
        }
        Dialect::Sglang => {
            let role = if place.prefill { WorkerRole::Prefill } else { WorkerRole::Decode };
            let rooms = Arc::clone(rooms);
            let room_in = move |row: AuxIndex| rooms[row.0 as usize].load(Ordering::Relaxed);
            let agent = SglangAgent {
                name: agent_name(life),
                metadata: agent_metadata(life),
                pull: (place.host(), place.port()),
            };
            let config = SglangConfig::new(role).with(|config| {
                config.aux_rooms = Some(Box::new(room_in));
                config.seed = Some(seed);
            });
            Ok(sglang::model::machine(args, config, agent)?)
        }
    }
}

/// The name of a life's agent. No two lives have one name.
pub(super) fn agent_name(life: LifeId) -> String {
    format!("agent-{life}")
}

/// The metadata of a life's agent, which begin as NIXL's do: the name with its length.
pub(super) fn agent_metadata(life: LifeId) -> Bytes {
    let name = agent_name(life);
    [b"nixlSerDes|Agent", &(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat().into()
}

/// The life that agent metadata name.
pub(super) fn life_of(metadata: &[u8]) -> Option<LifeId> {
    let name = metadata.strip_prefix(b"nixlSerDes|Agent")?.get(8..)?;
    std::str::from_utf8(name).ok()?.strip_prefix("agent-")?.parse().ok()
}

/// What vLLM's side channel answers to a question. `life_of` tells the life of a rank.
pub(super) fn answer(
    part: &[u8],
    clock: Time,
    rank: impl Fn(u32) -> Option<(KvArgs, LifeId)>,
) -> Option<Vec<Bytes>> {
    let (_, tp_rank) = vllm::model::question(part)?;
    let (args, life) = rank(tp_rank)?;
    let shown = std::time::Duration::from_nanos(clock.as_nanos());
    vllm::model::answer(&args, agent_metadata(life), HASH, shown).ok()
}

/// What the bootstrap server tells of a life of an SGLang prefill rank.
pub(super) fn record(place: Place, life: LifeId) -> Option<RankRecord> {
    let rank = SglangRank::new(place.host(), place.port(), PAGE_SIZE.into()).with(|rank| {
        rank.parallel = place.parallel();
        rank.kv_cache_dtype = Some("torch.bfloat16".to_owned());
    });
    let worker = WorkerId { engine: EngineId::new(&place.engine_name()).ok()?, rank: place.rank };
    let who = (worker, Incarnation::from_random(life as u64 + 1));
    RankRecord::new(who, WorkerRole::Prefill, place.parallel(), Vec::new(), vec![rank.offer()]).ok()
}
