//! The parts of an engine that both sides share: memory, transports, workers.

use std::time::{Duration, Instant};

use kv_transfer::{EngineGroup, EngineId, KvArgs, KvManager, Publication, Worker, WorkerId};
use serde::{Deserialize, Serialize};

use super::cli::{CacheOptions, HandOver, Pace, Parallelism};
use super::control::Event;
use super::dialect::{Dialect, DialectOptions, Presence};
use super::error::ExampleError;
use super::heartbeats::Heartbeats;
use super::loading::ModelOptions;
use super::model::Model;
use super::paged::PagedKv;
use super::recording::Recording;
use super::router::Side;
use super::wire::WireLog;

/// Aux rows of a rank: requests that can be in transfer at once.
pub const AUX_ROWS: u32 = 256;
/// How long a rank without any request sleeps, if nothing happens.
pub const IDLE: Duration = Duration::from_secs(60);
/// How long a rank with requests sleeps if nothing happens. Then it repeats what its worker had no room for.
pub const RETRY: Duration = Duration::from_millis(50);
/// How long a rank waits at the end for the pages of ended requests, before it reports its pages.
pub fn finish_within(pace: Pace) -> Duration {
    match pace {
        Pace::Normal => Duration::from_secs(45),
        // Some of them wait for several timeouts, one after the other.
        Pace::Fast => Duration::from_secs(5),
    }
}
/// For how long a bootstrap server that has not accepted a worker at once is waited for.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(5);
/// How long a worker may take to end open sessions when it is stopped.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// One process of the service: a data-parallel replica of its engine, with all ranks of the replica.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankSpec {
    /// The side that the process is on.
    pub side: Side,
    /// The number of the replica.
    pub number: u32,
    /// The number of replicas on this side.
    pub of: u32,
    /// The bootstrap server that prefill ranks register with.
    pub bootstrap: String,
    /// The options that choose the model.
    pub model: ModelOptions,
    /// The options of the cache.
    pub cache: CacheOptions,
    /// The parallel sizes of the engine.
    pub parallelism: Parallelism,
    /// Tokens in a page of the other side.
    pub peer_page_size: u32,
    /// How KV is handed over.
    pub hand_over: HandOver,
    /// Note when pages come back, to the millisecond.
    pub watch_pages: bool,
    /// Record what the workers do, and hand the records to the router at the end.
    pub record: bool,
    /// How many tokens of a prompt a prefill rank computes before it sends their pages.
    pub chunk_tokens: u32,
    /// True if each layer is sent while the next layer is computed.
    pub layer_wise: bool,
    /// The protocol between the sides.
    pub dialect: DialectOptions,
}

impl RankSpec {
    /// How long the rank waits at the end for the pages of ended requests.
    pub fn finish_within(&self) -> Duration {
        let lease = match self.dialect.dialect {
            // After the lease, a read of an engine that cannot be told to stop may touch the pages for as long again.
            Dialect::Vllm => 2 * self.hand_over.lease().duration(),
            Dialect::Native | Dialect::Sglang => Duration::ZERO,
        };
        finish_within(self.hand_over.timing) + lease
    }
}

/// The parts of an engine.
pub struct SetUp {
    /// The model that the engine runs.
    pub model: Model,
    /// The cache, in registered memory.
    pub kv: PagedKv,
    /// The workers that move the pages, one for each rank.
    pub workers: Vec<Worker>,
    /// The managers of all ranks, as one.
    pub manager: EngineGroup,
    /// The engine as the other side finds it.
    pub presence: Presence,
    /// What the transports have moved.
    pub log: WireLog,
    /// When the readers of the engine's pages were last heard of.
    pub heartbeats: Heartbeats,
    /// The events of the workers.
    pub recording: Recording,
    /// The event that tells the router that the rank is ready.
    pub ready: Event,
}

impl SetUp {
    /// Loads the model, allocates the cache, registers it with transports, starts the workers, and waits until peers
    /// can find them.
    pub fn new(spec: &RankSpec) -> Result<SetUp, ExampleError> {
        let presence = Presence::new(spec)?;
        let model = spec.model.load()?;
        let aux = (spec.dialect.dialect.aux(), AUX_ROWS);
        let kv = PagedKv::new(&model, &spec.cache, spec.parallelism, (spec.number, spec.of), aux)?;
        let first = spec.number * kv.ranks().len() as u32;
        let (log, heartbeats) = (WireLog::default(), Heartbeats::default());
        let (mut workers, mut recording) = (Vec::new(), Recording::default());
        for (number, rank) in (first..).zip(kv.ranks()) {
            let args = KvArgs::builder(&presence.engine, number).model(&model.fingerprint());
            let id = WorkerId { engine: EngineId::new(&presence.engine)?, rank: number };
            let listener = spec.record.then(|| recording.listener(&id));
            let notes = (&log, &heartbeats);
            workers.push(presence.start(spec, rank, rank.describe(args), notes, listener)?);
        }
        let manager = EngineGroup::new(workers.iter().map(Worker::manager).collect())?;
        wait_until_published(&manager);
        let worker = manager.args().worker().to_string();
        let (page_bytes, reach) = (kv.page_bytes() as u64, presence.reach());
        let ready = Event::Ready { worker, model: model.fingerprint(), page_bytes, reach };
        Ok(SetUp { model, kv, workers, manager, presence, log, heartbeats, recording, ready })
    }
}

/// Waits until the bootstrap server, if there is one, knows every rank. A request that comes earlier fails: peers find no
/// engine, or the one that has drained and whose place this one takes. A server that refuses or is not there is not
/// waited for: the workers keep trying.
fn wait_until_published(engine: &EngineGroup) {
    let end = Instant::now() + PUBLISHED_WITHIN;
    for rank in engine.managers() {
        while let Publication::Pending { last } = rank.publication() {
            if last.is_some() && Instant::now() > end {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Stops the workers of an engine. A router that has disconnected is no error, because that is how engines
/// are told to end.
pub fn close(workers: Vec<Worker>, result: Result<(), ExampleError>) -> Result<(), ExampleError> {
    for worker in workers {
        worker.stop(STOP_WITHIN);
    }
    match result {
        Err(ExampleError::LinkClosed) => Ok(()),
        other => other,
    }
}
