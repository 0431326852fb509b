//! The worker of the KV cache: what is registered, and what it is known as.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use kv_core::proto::{Node, NodeConfig, Resource};
use kv_core::{BootstrapClient, Incarnation, KvArgs, RankRecord, ServiceOffer, Transport};

use super::config::WorkerConfig;
use super::manager::Manager;
use super::words::KvMachine;
use crate::worker::{self, StartError};

/// A running worker of the KV cache: its thread is a [`worker::Worker`].
///
/// Dropping it stops it as [`stop`](Worker::stop) does, with a grace of one second.
#[derive(Debug)]
pub struct Worker {
    thread: worker::Worker<KvMachine>,
    manager: Manager,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StopReport {
    /// Sessions that were still running, and were ended by the stop.
    pub sessions_ended: usize,
    /// Pages that could not be proven quiet within the grace. They must not be used again in the
    /// life of this process.
    pub pages_quarantined: usize,
    /// Items of cache groups likewise.
    pub items_quarantined: usize,
    /// Data operations that had not ended within the grace.
    pub posts_in_flight: usize,
    /// The thread had panicked.
    pub panicked: bool,
}

impl Worker {
    /// Registers the regions with the transport and starts the thread, which then registers the
    /// worker with the bootstrap server, if the configuration names one.
    pub fn start<P: Transport + Send + 'static>(
        config: WorkerConfig,
        mut transport: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<Worker, StartError> {
        let incarnation = Incarnation::from_random(random());
        worker::attach(&mut transport, config.args.regions())?;
        let transports = transport.offers().map_err(StartError::Metadata)?;
        let node = Node::new(NodeConfig {
            args: config.args.clone(),
            incarnation,
            transports: transports.clone(),
            versions: config.versions,
            seed: config.seed.unwrap_or_else(random),
            timing: config.timing,
            limits: config.limits,
        });
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

    /// A worker whose thread runs already.
    pub(crate) fn of(thread: worker::Worker<KvMachine>, args: KvArgs, incarnation: Incarnation) -> Worker {
        let manager = Manager::new(thread.port(), args, incarnation);
        Worker { thread, manager }
    }

    /// A way to open sessions on it.
    pub fn manager(&self) -> Manager {
        self.manager.clone()
    }

    /// This life of the worker, as its peers know it.
    pub fn incarnation(&self) -> Incarnation {
        self.manager.incarnation()
    }

    /// Ends all sessions, tells the peers, withdraws the registration, and waits for `grace` at
    /// most until every page is back. Blocks the caller meanwhile.
    pub fn stop(self, grace: Duration) -> StopReport {
        let report = self.thread.stop(grace);
        let [pages, items] = [Resource::PAGES, Resource::ITEMS].map(|kind| report.quarantined.kind(kind));
        StopReport {
            sessions_ended: report.sessions_ended,
            pages_quarantined: pages,
            items_quarantined: items,
            posts_in_flight: report.posts_in_flight,
            panicked: report.panicked,
        }
    }
}

/// Random bits from the operating system, by way of the keys that the standard library draws for
/// its hash maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
