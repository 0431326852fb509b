//! The worker of the encoder cache: a thread that runs [`EcMachine`] over a transport of its own.

use std::time::Duration;

use kv_core::proto::{Limits, NodeConfig, Timing};
use kv_core::trace::KvWhat;
use kv_core::{
    ArgsError, BootstrapClient, Incarnation, OsError, Parallel, RankRecord, RecordError, Service,
    ServiceOffer, Transport, WorkerRole,
};
use kv_poll::StartError;
use kv_poll::worker::{self, Listener, Setup};

use crate::cache::{EncoderCache, Eviction};
use crate::connector::EcConnector;
use crate::machine::{EC_SERVICE, EcMachine, MachineConfig};
use crate::region::EcRegion;
use crate::store::SharedStore;

/// What a worker of the encoder cache is started with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EcConfig {
    /// The id of the engine; the worker is the only rank of the encoder cache on its host.
    pub engine: String,
    /// Which of the engine's replicas the worker is, below `replicas` (default 0): encoders that register with
    /// one bootstrap server are the replicas of one engine, and a [`Want`](crate::Want) names the replica.
    pub replica: u32,
    /// How many replicas the engine has (default 1).
    pub replicas: u32,
    /// How the machine answers peers and asks them.
    pub machine: MachineConfig,
    /// Which entries make room first.
    pub eviction: Eviction,
    /// The bootstrap server (`host:port`) with which the worker registers, so that consumers find it. `None`
    /// for a worker that only fetches.
    pub publish: Option<String>,
    /// Durations of the protocol.
    pub timing: Timing,
    /// Bounds on what peers can make the machine remember.
    pub limits: Limits,
    /// The listeners that are told each event of the protocol, on the worker's thread.
    pub listeners: Vec<Listener<KvWhat>>,
}

impl EcConfig {
    /// The defaults, for an engine whose entries have this compatibility text.
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
    /// The region or the engine's id is not valid.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// The record for the bootstrap server is too long. Use a shorter compatibility text.
    #[error("the worker cannot be registered: {0}")]
    Record(#[from] RecordError),
    /// The worker's thread did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// A running worker of the encoder cache: one on each host, whose region all ranks of the host share.
///
/// Dropping a worker blocks as [`stop`](EcWorker::stop) does with a grace of one second.
#[derive(Debug)]
pub struct EcWorker {
    thread: worker::Worker<EcMachine>,
    connector: EcConnector,
}

impl EcWorker {
    /// Registers the region with the transport and starts the thread. The memory of the region must have been
    /// given to the transport before, where the transport wants that ([`EcRegion::arena`]).
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

    /// The way to the cache, for encoders that save and for schedulers that fetch.
    pub fn connector(&self) -> EcConnector {
        self.connector.clone()
    }

    /// Tells the worker to end all sessions, tell the peers, and go on for `grace` at most until no data
    /// operation can touch a block. Returns at once.
    pub fn begin_stop(self, grace: Duration) -> worker::Stopping<EcMachine> {
        self.thread.begin_stop(grace)
    }

    /// As [`begin_stop`](EcWorker::begin_stop), and waits for the end.
    pub fn stop(self, grace: Duration) -> worker::StopReport {
        self.thread.stop(grace)
    }
}
