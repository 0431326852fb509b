//! The worker: one thread for each rank, the only one that touches the plane.

mod clock;
mod config;
mod explain;
mod fences;
mod quarantine;
mod sessions;
mod turn;
mod wake;

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use kv_core::{BootstrapClient, Incarnation, Plane};

#[cfg(feature = "model")]
pub use clock::Clock;
pub use config::{StartError, WorkerConfig};
pub use turn::{Driver, Ended};
#[cfg(feature = "model")]
pub use turn::{Machine, Rest, Turn};
pub(crate) use wake::Waker;

use crate::link::Link;
use crate::manager::Manager;
use clock::BootTime;

/// How long a dropped worker waits for its pages.
const DROP_GRACE: Duration = Duration::from_secs(1);

/// A running worker.
///
/// It sleeps in `poll(2)` on the plane's descriptors, the bootstrap client's, and an eventfd that
/// session handles write when it sleeps, until one of them is readable or the protocol's next
/// deadline is due. An idle worker uses no processor time; one with a deadline in sight wakes up once a
/// second, because the kernel's sleep stands still while the host is suspended, and the deadline, on
/// `CLOCK_BOOTTIME`, does not. While an announcement waits for a
/// [`Fence`](kv_core::Fence), it is asked after 20 µs, and then ever less often, down to once in a
/// millisecond.
///
/// Dropping it stops it as [`stop`](Worker::stop) does, with a grace of one second.
///
/// Should its thread panic (a bug in a plane, say), every session fails with
/// [`WorkerStopped`](kv_core::Cause::WorkerStopped). The pages that the worker held then stay
/// unreclaimable for good, because nobody is left to prove that no wire touches them.
pub struct Worker {
    link: Arc<Link>,
    incarnation: Incarnation,
    thread: Option<JoinHandle<Ended>>,
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
    /// Items of state groups likewise.
    pub items_quarantined: usize,
    /// Data operations that had not ended within the grace.
    pub posts_in_flight: usize,
    /// The thread had panicked.
    pub panicked: bool,
}

impl Worker {
    /// Registers the regions with the plane and starts the thread, which then registers the
    /// worker with the bootstrap server, if the configuration names one.
    pub fn start<P: Plane + Send + 'static>(
        config: WorkerConfig,
        plane: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<Worker, StartError> {
        let clock = Box::new(BootTime);
        let incarnation = Incarnation::from_random(random());
        Worker::spawn(incarnation, Driver::start(config, incarnation, Box::new(plane), client, clock)?)
    }

    fn spawn(incarnation: Incarnation, driver: Driver) -> Result<Worker, StartError> {
        let link = Arc::clone(driver.link());
        let thread = Builder::new().name(format!("kv-worker-{}", link.args.worker().rank));
        let thread = thread.spawn(move || driver.run()).map_err(|error| os("thread::spawn", &error))?;
        Ok(Worker { link, incarnation, thread: Some(thread) })
    }

    /// A way to open sessions on it.
    pub fn manager(&self) -> Manager {
        Manager::new(Arc::clone(&self.link))
    }

    /// This life of the worker, as its peers know it.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Ends all sessions, tells the peers, withdraws the registration, and waits for `grace` at
    /// most until every page is back. Blocks the caller meanwhile.
    pub fn stop(mut self, grace: Duration) -> StopReport {
        self.join(grace)
    }

    fn join(&mut self, grace: Duration) -> StopReport {
        let Some(thread) = self.thread.take() else { return StopReport::default() };
        self.link.request_stop(grace);
        let ended = thread.join();
        let gauges = self.link.gauges();
        StopReport {
            sessions_ended: ended.as_ref().map_or(0, |ended| ended.sessions),
            pages_quarantined: gauges.pages_quarantined,
            items_quarantined: gauges.items_quarantined,
            posts_in_flight: gauges.posts_in_flight,
            panicked: ended.is_err(),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.join(DROP_GRACE);
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worker = self.link.args.worker();
        f.debug_struct("Worker").field("worker", worker).field("incarnation", &self.incarnation).finish()
    }
}

/// Random bits from the operating system, by way of the keys that the standard library draws for
/// its hash maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn os(call: &'static str, error: &io::Error) -> StartError {
    StartError::Os { call, kind: error.kind() }
}

#[cfg(test)]
pub(crate) mod tests;
