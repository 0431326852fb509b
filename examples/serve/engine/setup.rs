//! How an engine starts: the model, the cache in registered memory, and a worker for each rank.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use kv_examples::aux::AuxForm;
use kv_examples::cli::{CacheOptions, HandOver, Parallelism};
use kv_examples::error::ExampleError;
use kv_examples::loading::ModelOptions;
use kv_examples::model::Model;
use kv_examples::paged::PagedKv;
use kv_examples::rank::AUX_ROWS;
use kv_examples::rank_kv::RankKv;
use kv_examples::transport;
use kv_transfer::bootstrap::HttpBootstrapClient;
use kv_transfer::ways::Standing;
use kv_transfer::{
    EngineGroup, KvArgs, Listener, Publication, TransferMode, Worker, WorkerConfig, WorkerRole,
};
use serde::{Deserialize, Serialize};

use super::store::Store;
use crate::observe::{Observer, Observing};
use crate::timeline::Recorders;

/// How long a worker may take to end its sessions when the process ends.
const STOP_WITHIN: Duration = Duration::from_secs(2);

pub use kv_examples::router::Side;

/// One process of the service: a data-parallel replica of a prefill or a decode engine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankSpec {
    /// The side that the process is on.
    pub side: Side,
    /// The number of the replica.
    pub number: u32,
    /// The number of replicas on this side.
    pub of: u32,
    /// Where the process takes HTTP requests, `host:port`.
    pub listen: String,
    /// The bootstrap server that the ranks register with.
    pub bootstrap: String,
    /// The options that choose the model.
    pub model: ModelOptions,
    /// The options of the cache.
    pub cache: CacheOptions,
    /// The number of tensor-parallel ranks.
    pub tp: u32,
    /// How KV is handed over.
    pub hand_over: HandOver,
    /// How many tokens of a prompt are computed before their pages are sent.
    pub chunk_tokens: u32,
    /// How long a request may take.
    pub deadline: Duration,
    /// Most tokens of a request, prompt and answer together.
    pub max_model_len: usize,
    /// Most requests in the process.
    pub max_requests: usize,
    /// Which lines the process writes of what its workers do.
    pub log: Option<String>,
}

impl RankSpec {
    /// The name of the process, such as `prefill/0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.side, self.number)
    }
}

/// An engine that is ready for requests.
pub struct Engine {
    /// What the engine was started with.
    pub spec: RankSpec,
    /// The model.
    pub model: Arc<Model>,
    /// The cache.
    pub kv: PagedKv,
    /// The pages of the cache.
    pub store: Arc<Store>,
    /// Opens sessions on all ranks of the engine.
    pub manager: EngineGroup,
    /// Counts what the workers do.
    pub observing: Observing,
    /// Over which transports the peers of each worker are connected, in the order of ranks.
    pub standings: Vec<Standing>,
    /// What the workers have done.
    pub recorders: Recorders,
    workers: Mutex<Vec<Worker>>,
}

impl Engine {
    /// Loads the model, allocates and registers the cache, and starts the workers. Ready when the bootstrap server
    /// knows the workers.
    pub async fn start(spec: RankSpec) -> Result<Engine, ExampleError> {
        let model = spec.model.load()?;
        let parallelism = Parallelism { tp: spec.tp, pp: 1, cp: 1, dcp: 1 };
        let replica = (spec.number, spec.of);
        let kv = PagedKv::new(&model, &spec.cache, parallelism, replica, (AuxForm::Native, AUX_ROWS))?;
        let mut observer = Observer::new(spec.log.as_deref());
        let (mut workers, mut standings, recorders) = (Vec::new(), Vec::new(), Recorders::default());
        for (number, rank) in (spec.number * spec.tp..).zip(kv.ranks()) {
            let (worker, standing) =
                start_worker(&spec, number, rank, &model, (observer.listener(), &recorders))?;
            workers.push(worker);
            standings.push(standing);
        }
        let manager = EngineGroup::new(workers.iter().map(Worker::manager).collect())?;
        for rank in manager.managers() {
            while !matches!(rank.publication(), Publication::Published) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        tokio::spawn(look_after(manager.clone()));
        let store = Store::new(spec.cache.pages, kv.page_tokens(), AUX_ROWS);
        let (observing, workers) = (observer.start(), Mutex::new(workers));
        let model = Arc::new(model);
        Ok(Engine { spec, model, kv, store, manager, observing, standings, recorders, workers })
    }

    /// Stops the workers: what is left of their sessions ends, and the peers are told.
    pub async fn stop(&self) {
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        for worker in workers {
            worker.begin_stop(STOP_WITHIN).await;
        }
        self.observing.flush();
    }
}

/// Starts the worker of one rank. The listener and a recorder hear of all that the worker does.
fn start_worker(
    spec: &RankSpec,
    number: u32,
    rank: &RankKv,
    model: &Model,
    (listener, recorders): (Listener, &Recorders),
) -> Result<(Worker, Standing), ExampleError> {
    let pace = spec.hand_over.timing;
    let args = rank.describe(KvArgs::builder(&spec.side.to_string(), number).model(&model.fingerprint()));
    let args = args.transfer_mode(TransferMode::from(spec.hand_over.mode)).build()?;
    let role = match spec.side {
        Side::Prefill => WorkerRole::Prefill,
        Side::Decode => WorkerRole::Decode,
    };
    let recorder = Recorders::recorder(args.worker());
    let config = WorkerConfig::new(args, role).with(|config| {
        // Decode ranks look prefill ranks up, and on the next turn prefill ranks decode ranks.
        config.bootstrap = Some(spec.bootstrap.clone());
        config.timing = pace.timing();
        config.listener = Some(listener.and(recorder.listener()));
    });
    let client = HttpBootstrapClient::new(pace.client())?;
    let (worker, standing) = transport::start(rank.memory(), config, None, client, pace)?;
    recorders.started(recorder, worker.incarnation());
    Ok((worker, standing))
}

/// Takes the changes of all sessions out of the group. The tasks of the requests await their sessions, so that
/// nothing is left to do here but to hand on commands for which the ring of a rank had no room.
async fn look_after(manager: EngineGroup) {
    let mut changes = manager.changes();
    drop(manager);
    while poll_fn(|cx| Pin::new(&mut changes).poll_next(cx)).await.is_some() {}
}
