//! The worker of the KV cache: how it starts, and what the bootstrap server is told of it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use kv_core::proto::{Node, NodeConfig};
use kv_core::trace::KvWhat;
use kv_core::{BootstrapClient, Incarnation, KvArgs, RankRecord, ServiceOffer, Transport};

use super::config::WorkerConfig;
use super::manager::Manager;
use super::stop::{StopReport, Stopping};
use super::words::KvMachine;
use crate::worker::{self, Setup, StartError};

/// A running worker of the KV cache: the [`worker::Worker`] of its machine, whose documentation says how the
/// thread sleeps and ends.
///
/// Dropping a worker blocks as [`stop`](Worker::stop) does with a grace of one second;
/// [`begin_stop`](Worker::begin_stop) does not block.
#[derive(Debug)]
pub struct Worker {
    thread: worker::Worker<KvMachine>,
    manager: Manager,
}

impl Worker {
    /// Registers the regions with the transport and starts the thread, which then registers the worker with
    /// the bootstrap server, if the configuration names one.
    pub fn start<P: Transport + Send + 'static>(
        config: WorkerConfig,
        mut transport: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<Worker, StartError> {
        let incarnation = Incarnation::from_random(random());
        worker::attach(&mut transport, config.args.regions())?;
        let transports = transport.offers().map_err(StartError::Metadata)?;
        let node = NodeConfig::over(config.args.clone(), incarnation, transports.clone()).with(|node| {
            node.versions = config.versions;
            node.seed = config.seed.unwrap_or_else(random);
            node.timing = config.timing;
            node.limits = config.limits;
        });
        let node = Node::new(node);
        let who = (config.args.worker().clone(), incarnation);
        let (geometry, role) = (config.args.geometry(), config.role);
        let offers = vec![ServiceOffer::kv(geometry)?.in_versions(config.versions.get())];
        let record = RankRecord::new(who, role, geometry.parallel, transports, offers)?;
        let (args, setup) = (config.args.clone(), config.setup(record));
        Ok(Worker::of(
            worker::Worker::start(Box::new(node) as KvMachine, setup, transport, client)?,
            args,
            incarnation,
        ))
    }

    /// Starts a worker whose sessions another machine serves, such as one that speaks a foreign engine's
    /// protocol. The regions of `args` must be [registered](worker::attach) with the transport before, and the
    /// machine must have been made for these arguments. Schedulers use the worker like every other.
    pub fn with_machine<P: Transport + Send + 'static>(
        machine: KvMachine,
        (args, incarnation): (KvArgs, Incarnation),
        setup: Setup<KvWhat>,
        transport: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<Worker, StartError> {
        Ok(Worker::of(worker::Worker::start(machine, setup, transport, client)?, args, incarnation))
    }

    /// A worker of the KV cache whose thread runs already.
    pub(crate) fn of(thread: worker::Worker<KvMachine>, args: KvArgs, incarnation: Incarnation) -> Worker {
        let manager = Manager::new(thread.port(), args, incarnation);
        Worker { thread, manager }
    }

    /// The manager that opens sessions on this worker.
    pub fn manager(&self) -> Manager {
        self.manager.clone()
    }

    /// The incarnation of this worker: the number that tells this life from those before and after a restart.
    pub fn incarnation(&self) -> Incarnation {
        self.manager.incarnation()
    }

    /// Tells the worker to drain, as [`Manager::begin_drain`] does, and to stop once it is empty, or after
    /// `within` at the latest. Returns at once. A drain that took too long ends as
    /// [`begin_stop`](Worker::begin_stop) does, with this grace: the report counts the sessions that had not
    /// ended.
    pub fn drain_then_stop(self, within: Duration, grace: Duration) -> Stopping {
        Stopping::of(self.thread.drain_then_stop(within, grace))
    }

    /// Tells the worker to end all sessions, tell the peers, withdraw the publication, and go on for `grace`
    /// at most until every page is back. Returns at once: [`Stopping`] says what holds meanwhile.
    pub fn begin_stop(self, grace: Duration) -> Stopping {
        Stopping::of(self.thread.begin_stop(grace))
    }

    /// As [`begin_stop`](Worker::begin_stop), and waits for the end. Blocks the caller for `grace` at most,
    /// and then while the transport closes: two seconds at most, over NIXL.
    pub fn stop(self, grace: Duration) -> StopReport {
        self.begin_stop(grace).wait()
    }
}

/// Random bits from the operating system, by way of the keys that the standard library draws for
/// its hash maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
