//! The worker: one thread that runs one service's [`Machine`] over a transport, and the only one that
//! touches the transport.
//!
//! Nothing here knows a service. A service brings its machine, wraps a [`Port`] and [`Handle`]s into handles
//! of its own, and says in a [`Setup`] how a bootstrap server is to know the worker. The
//! [`Worker`](crate::Worker), [`Manager`](crate::Manager), [`Sender`](crate::Sender) and
//! [`Receiver`](crate::Receiver) at the top of this crate are those of the KV cache.

pub(crate) mod cell;
mod clock;
mod driver;
mod gauges;
mod listeners;
mod poll_set;
mod port;
mod quarantine;
mod ready_events;
mod sessions;
mod setup;
pub(crate) mod shared;
mod wake;

use std::fmt;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use kv_core::machine::{Amounts, Machine};
use kv_core::{BootstrapClient, Transport};

pub use cell::Failure;
pub use clock::{BootTime, Clock};
pub use driver::{Driver, Ended, Rest, Turn};
pub use gauges::Gauges;
pub use listeners::Listener;
pub use poll_set::{Change, PollSet};
pub use port::{Handle, Port, Watch};
pub use setup::{Setup, StartError, attach};
pub use shared::Registration;

/// How long a dropped worker waits for what it has lent.
const DROP_GRACE: Duration = Duration::from_secs(1);

/// A running worker.
///
/// It sleeps in `poll(2)` on the transport's descriptors, the bootstrap client's, and an eventfd that
/// session handles write when it sleeps, until one of them is readable or the protocol's next
/// deadline is due. An idle worker uses no processor time; one with a deadline in sight wakes up every
/// five seconds, because the kernel's sleep stands still while the host is suspended, and the deadline, on
/// `CLOCK_BOOTTIME`, does not. While an announcement waits for a
/// [`ReadyEvent`](kv_core::ReadyEvent), it is asked after 20 µs, and then ever less often, down to once in a
/// millisecond.
///
/// Dropping it stops it as [`stop`](Worker::stop) does, with a grace of one second.
///
/// Should its thread panic (a bug in a transport, say), every session fails with
/// [`Failure::WorkerStopped`]. What the worker held then stays unreclaimable for good, because nobody is
/// left to prove that no wire touches it.
pub struct Worker<M: Machine> {
    port: Port<M>,
    thread: Option<JoinHandle<Ended>>,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StopReport {
    /// Sessions that were still running, and were ended by the stop.
    pub sessions_ended: usize,
    /// What could not be proven quiet within the grace, by kind. It must not be used again in the life of
    /// this process.
    pub quarantined: Amounts,
    /// Data operations that had not ended within the grace.
    pub posts_in_flight: usize,
    /// The thread had panicked.
    pub panicked: bool,
}

impl<M: Machine + 'static> Worker<M> {
    /// Starts the thread, which then registers the worker with the bootstrap server, if the setup names one.
    /// The machine's regions are [registered](attach) with the transport already.
    pub fn start<P: Transport + Send + 'static>(
        machine: M,
        setup: Setup<M::Trace>,
        transport: P,
        client: Box<dyn BootstrapClient>,
    ) -> Result<Worker<M>, StartError> {
        let rank = setup.worker.rank;
        let driver = Driver::new(machine, setup, Box::new(transport), client, Box::new(BootTime))?;
        Worker::spawn(rank, driver)
    }

    pub(crate) fn spawn(rank: u32, driver: Driver<M>) -> Result<Worker<M>, StartError> {
        let port = driver.port();
        let thread = Builder::new().name(format!("kv-worker-{rank}")).spawn(move || driver.run());
        let thread = thread.map_err(|error| StartError::os("thread::spawn", &error))?;
        Ok(Worker { port, thread: Some(thread) })
    }
}

impl<M: Machine> Worker<M> {
    /// A way to open sessions on it.
    pub fn port(&self) -> Port<M> {
        self.port.clone()
    }

    /// Ends all sessions, tells the peers, withdraws the registration, and waits for `grace` at
    /// most until everything lent is back. Blocks the caller meanwhile.
    pub fn stop(mut self, grace: Duration) -> StopReport {
        self.join(grace)
    }

    fn join(&mut self, grace: Duration) -> StopReport {
        let Some(thread) = self.thread.take() else { return StopReport::default() };
        self.port.request_stop(grace);
        let ended = thread.join();
        let gauges = self.port.gauges();
        StopReport {
            sessions_ended: ended.as_ref().map_or(0, |ended| ended.sessions),
            quarantined: gauges.quarantined,
            posts_in_flight: gauges.posts_in_flight,
            panicked: ended.is_err(),
        }
    }
}

impl<M: Machine> Drop for Worker<M> {
    fn drop(&mut self) {
        self.join(DROP_GRACE);
    }
}

impl<M: Machine> fmt::Debug for Worker<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("gauges", &self.port.gauges()).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
