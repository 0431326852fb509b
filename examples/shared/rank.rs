//! What every rank does before its loop and after it: memory, plane, worker.

use std::time::Duration;

use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient};
use kv_transfer::{KvArgs, Parallel, Worker, WorkerConfig, WorkerRole};
use serde::{Deserialize, Serialize};

use super::cli::{CacheOptions, HandOver};
use super::control::Event;
use super::error::ExampleError;
use super::heartbeats::Heartbeats;
use super::loading::ModelOptions;
use super::model::Model;
use super::paged::PagedKv;
use super::plane;
use super::router::Side;
use super::wire::WireLog;

/// Aux rows of a rank: requests that can be in transfer at once.
pub const AUX_ROWS: u32 = 256;
/// How long a rank without any request sleeps, if nothing happens.
pub const IDLE: Duration = Duration::from_secs(60);
/// How long a rank with requests sleeps, if nothing happens: then it tries again what its worker
/// had no room for.
pub const RETRY: Duration = Duration::from_millis(50);
/// How long a rank waits for the pages of ended requests before it accounts for them.
pub const FINISH_WITHIN: Duration = Duration::from_secs(45);
/// How long a worker may take to end what is still open when it is stopped.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// One rank of the service: a data-parallel replica of its engine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankSpec {
    /// Prefill or decode.
    pub side: Side,
    /// Its number among its likes.
    pub number: u32,
    /// How many of them there are.
    pub of: u32,
    /// The bootstrap server that prefill ranks register with.
    pub bootstrap: String,
    /// The model.
    pub model: ModelOptions,
    /// The cache.
    pub cache: CacheOptions,
    /// Tokens in a page of the other side.
    pub peer_page_size: u32,
    /// How KV is handed over.
    pub hand_over: HandOver,
    /// Note when pages come back, to the millisecond.
    pub watch_pages: bool,
    /// Tokens of a prompt that a prefill rank computes before it sends their pages.
    pub chunk_tokens: u32,
}

/// A rank's parts.
pub struct SetUp {
    /// The model.
    pub model: Model,
    /// Its cache, in registered memory.
    pub kv: PagedKv,
    /// The worker that moves the pages.
    pub worker: Worker,
    /// What its plane has moved.
    pub log: WireLog,
    /// When the readers of its pages were last heard of.
    pub heartbeats: Heartbeats,
    /// What to tell the router.
    pub ready: Event,
}

impl SetUp {
    /// Loads the model, allocates the cache, registers it with a plane, and starts the worker.
    pub fn new(spec: &RankSpec) -> Result<SetUp, ExampleError> {
        let model = spec.model.load()?;
        let kv = PagedKv::new(&model, &spec.cache, AUX_ROWS)?;
        let parallel = Parallel { dp_size: spec.of, dp_rank: spec.number, ..Parallel::default() };
        let engine = spec.side.to_string();
        let args = KvArgs::builder(&engine, spec.number).model(&model.fingerprint()).parallel(parallel);
        let args = args.transfer_mode(spec.hand_over.mode.into());
        let args = kv.describe(args).build()?;
        let worker = args.worker().to_string();
        let role = match spec.side {
            Side::Decode => WorkerRole::Decode,
            Side::Prefill => WorkerRole::Prefill,
        };
        // Decode ranks look prefill ranks up, and on the next turn prefill ranks decode ranks.
        let config = WorkerConfig::new(args, role).bootstrap(&spec.bootstrap);
        let client = HttpBootstrapClient::new(ClientConfig::default())?;
        let (log, heartbeats) = (WireLog::default(), Heartbeats::default());
        let started = plane::start(kv.memory(), config, (&log, &heartbeats), client)?;
        let ready = Event::Ready { worker, model: model.fingerprint(), page_bytes: kv.page_bytes() as u64 };
        Ok(SetUp { model, kv, worker: started, log, heartbeats, ready })
    }
}

/// Stops a rank's worker. A router that went away is no error: that is how ranks are told to end.
pub fn close(worker: Worker, result: Result<(), ExampleError>) -> Result<(), ExampleError> {
    worker.stop(STOP_WITHIN);
    match result {
        Err(ExampleError::LinkClosed) => Ok(()),
        other => other,
    }
}
