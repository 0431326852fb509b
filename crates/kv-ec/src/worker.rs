//! The worker of the encoder cache: a thread that runs [`EcMachine`] over a transport of its own.

use std::time::Duration;

use kv_core::proto::{Limits, NodeConfig, Timing};
use kv_core::trace::KvWhat;
use kv_core::{
    ArgsError, BootstrapClient, Incarnation, OsError, Parallel, RankRecord, RecordError, Service,
    ServiceOffer, Transport, WorkerRole,
};
use kv_poll::StartError;
use kv_poll::worker::{self, Listener, Setup, StopReport};

use crate::cache::{EncoderCache, Eviction};
use crate::connector::EcConnector;
use crate::machine::{EC_SERVICE, EcMachine, MachineConfig};
use crate::region::EcRegion;
use crate::store::SharedStore;

/// The settings of a worker of the encoder cache.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EcConfig {
    /// The id of the engine. The rank of the worker in the engine is `replica`: no two workers of a fleet may
    /// have the same engine and replica.
    pub engine: String,
    /// The number of the worker among the replicas of the engine, below `replicas` (default 0).
    pub replica: u32,
    /// How many replicas the engine has (default 1). Producers that register with one bootstrap server must be
    /// the replicas of one engine, so that [`Want::replica`](crate::Want::replica) can name each of them.
    pub replicas: u32,
    /// How the machine answers peers, and how it fetches from them.
    pub machine: MachineConfig,
    /// Which entries are evicted first.
    pub eviction: Eviction,
    /// The bootstrap server (`host:port`) with which the worker registers, and which consumers name in
    /// [`Want::source`](crate::Want::source). `None` for a worker that only fetches.
    pub publish: Option<String>,
    /// Durations of the protocol, such as the length of a permission to write.
    pub timing: Timing,
    /// Bounds on what peers can make the machine remember.
    pub limits: Limits,
    /// The listeners to which the worker's thread gives each event of the protocol.
    pub listeners: Vec<Listener<KvWhat>>,
}

impl EcConfig {
    /// The default settings for the engine with this id. `compatibility` is
    /// [`MachineConfig::compatibility`].
    pub fn new(engine: impl Into<String>, compatibility: impl Into<String>) -> EcConfig {
        EcConfig {
            engine: engine.into(),
            replica: 0,
            replicas: 1,
            machine: MachineConfig::new(compatibility),
            eviction: Eviction::default(),
            publish: None,
            timing: Timing::default(),
            limits: Limits::default(),
            listeners: Vec::new(),
        }
    }

    /// The same with some fields changed: `EcConfig::new(…).with(|config| config.publish = Some(addr))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Why a worker of the encoder cache did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EcStartError {
    /// The description of the region, the id of the engine, or the number of the replica is not valid.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// The record for the bootstrap server is not valid, for instance because the compatibility text has more
    /// than 512 bytes.
    #[error("the worker cannot be registered: {0}")]
    Record(#[from] RecordError),
    /// The worker's thread did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// A worker of the encoder cache that drains.
pub type EcDraining = worker::Draining<EcMachine>;

/// A worker of the encoder cache that is stopping.
pub type EcStopping = worker::Stopping<EcMachine>;

/// A running worker of the encoder cache: one on each host, whose region all ranks of the host share.
///
/// Dropping a worker blocks as [`stop`](EcWorker::stop) does with a grace of one second.
#[derive(Debug)]
pub struct EcWorker {
    thread: worker::Worker<EcMachine>,
    connector: EcConnector,
}

impl EcWorker {
    /// Registers the region with the transport and starts the worker's thread. A transport that must know
    /// memory before its registration, such as kv-local, must have been given the [arena](EcRegion::arena) of
    /// the region.
    ///
    /// # Errors
    ///
    /// [`EcStartError`]; no thread is left running.
    pub fn start<P: Transport + Send + 'static>(
        config: EcConfig,
        region: &EcRegion,
        mut transport: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<EcWorker, EcStartError> {
        let parallel = Parallel::default().with(|parallel| {
            (parallel.dp_size, parallel.dp_rank) = (config.replicas, config.replica);
        });
        let args = region.args(&config.engine, config.replica).parallel(parallel);
        let args = args.transfer_mode(config.machine.mode).build()?;
        let seed = u64::from_le_bytes(kv_host::random()?);
        let incarnation = Incarnation::from_random(seed);
        worker::attach(&mut transport, args.regions())?;
        let transports = transport.offers().map_err(StartError::Metadata)?;
        let service = Service::by_content(EC_SERVICE, &config.machine.compatibility);
        let offers = vec![ServiceOffer::kv(args.geometry())?.of_service(&service)];
        let worker = args.worker().clone();
        let who = (worker.clone(), incarnation);
        let record = RankRecord::new(who, WorkerRole::Encode, parallel, transports.clone(), offers)?;
        let node = NodeConfig::over(args, incarnation, transports).with(|node| {
            node.seed = seed;
            node.timing = config.timing;
            node.limits = config.limits;
        });
        let store =
            SharedStore::new(EncoderCache::new(region.blocks(), region.block_bytes(), config.eviction));
        let machine = EcMachine::new(config.machine, node, store.clone());
        let setup = Setup::new(worker).with(|setup| {
            setup.listeners = config.listeners;
            setup.publish = config.publish.map(|addr| (addr, record));
        });
        let thread = worker::Worker::start(machine, setup, transport, client)?;
        let connector = EcConnector::new(thread.port(), store, region.clone());
        Ok(EcWorker { thread, connector })
    }

    /// A handle of the cache, for encoders that save entries and for schedulers that fetch them.
    pub fn connector(&self) -> EcConnector {
        self.connector.clone()
    }

    /// Tells the worker to take no new wants and saves, and to refuse requests of peers, with a cause after which
    /// they do not ask this worker again. Wants that are open, and transfers that have begun, end as they would
    /// have. Returns at once; [`worker::Draining`] says when the worker is empty.
    pub fn begin_drain(&self) -> EcDraining {
        self.thread.port().begin_drain()
    }

    /// Tells the worker to drain, and to stop once it is empty, or after `within` at the latest, with this grace.
    pub fn drain_then_stop(self, within: Duration, grace: Duration) -> EcStopping {
        self.thread.drain_then_stop(within, grace)
    }

    /// Tells the worker to end all sessions and to tell the peers, and returns at once. The worker's thread runs
    /// on until no data operation can touch a block, for `grace` at most.
    pub fn begin_stop(self, grace: Duration) -> EcStopping {
        self.thread.begin_stop(grace)
    }

    /// Stops the worker as [`begin_stop`](EcWorker::begin_stop) does, and blocks until its thread has ended.
    pub fn stop(self, grace: Duration) -> StopReport {
        self.thread.stop(grace)
    }
}
