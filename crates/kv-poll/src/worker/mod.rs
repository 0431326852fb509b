//! The worker: one thread that runs the protocol [`Machine`] of one service over a transport. No other thread
//! touches the transport.
//!
//! This module knows no service. A service brings its machine, wraps a [`Port`] and [`Handle`]s into handles
//! of its own, and says in a [`Setup`] how a bootstrap server is to know the worker. The
//! [`Worker`](crate::Worker), [`Manager`](crate::Manager), [`Sender`](crate::Sender) and
//! [`Receiver`](crate::Receiver) at the top of this crate are those of the KV cache.

pub(crate) mod cell;
mod changes;
mod clock;
mod command_room;
mod discard;
mod draining;
mod driver;
mod ebb;
mod gauges;
mod listeners;
mod poll_set;
mod port;
mod quarantine;
mod ready_events;
mod sessions;
mod setup;
pub(crate) mod shared;
mod stopping;
pub(crate) mod waiters;
mod wake;

use std::fmt;
use std::num::NonZeroU64;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use kv_core::machine::Machine;
use kv_core::{BootstrapClient, OsError, Transport};
use rustix::thread::set_current_timer_slack;

pub use cell::Failure;
pub use changes::Changes;
pub use clock::{BootTime, Clock};
pub use command_room::CommandRoom;
pub(crate) use discard::discard;
pub use draining::Draining;
pub use driver::{Driver, Ended, Rest, Turn};
pub use gauges::Gauges;
pub use listeners::Listener;
pub use poll_set::{Change, PollSet};
pub use port::{Handle, Port, Watch};
pub use setup::{Setup, StartError, attach};
pub use shared::Publication;
pub use stopping::{StopReport, Stopping};
pub use waiters::Waiting;

/// How long a dropped worker waits for what sessions were lent.
const DROP_GRACE: Duration = Duration::from_secs(1);

/// A running worker.
///
/// The thread sleeps in `poll(2)` on the descriptors of the transport and of the bootstrap client, and on an
/// eventfd that session handles write when the thread sleeps, until one of them is readable or the protocol's
/// next deadline is due. An idle worker uses no processor time. A worker with a deadline in sight wakes up
/// every five seconds, because the kernel's sleep stands still while the host is suspended, and the deadline,
/// on `CLOCK_BOOTTIME`, does not. While an announcement waits for a [`ReadyEvent`](kv_core::ReadyEvent), the
/// event is asked after 20 µs, and then ever less often, down to once in a millisecond.
///
/// # The end
///
/// | call | blocks | use |
/// |---|---|---|
/// | [`drain_then_stop`](Worker::drain_then_stop) | never | rolling restarts: open sessions end as they would have, first |
/// | [`begin_stop`](Worker::begin_stop) | never | event loops and async servers; several workers at once |
/// | [`stop`](Worker::stop) | for the grace at most, and while the transport closes | everything else |
/// | dropping the worker | as `stop` with a grace of one second | the way out of an error |
///
/// A transport closes at once (kv-tcp), in 100 ms (kv-local) or in 2 s (NIXL) at most.
///
/// A drop waits because the memory that the transport was given is often dropped next, while the thread may
/// still copy into it. A server that must not block calls `begin_stop`, and keeps the memory until that has
/// reported the end.
///
/// Should the thread panic (a bug in a transport, say), every session fails with [`Failure::WorkerStopped`].
/// What the worker held can then never be reclaimed, because nothing is left that could prove that no data
/// operation touches that memory.
pub struct Worker<M: Machine> {
    port: Port<M>,
    thread: Option<JoinHandle<Ended>>,
}

impl<M: Machine + 'static> Worker<M> {
    /// Starts the thread, which then registers the worker with the bootstrap server, if the setup names one.
    /// The regions of the machine must be [registered](attach) with the transport before.
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
        let end = End(driver.port());
        let run = move || {
            // Dropped after the driver, and with it the transport, also if the driver panics.
            let _end = end;
            // Sleeps of some 20 µs, between which transports without a descriptor and ready events are asked, would else
            // take 70: the kernel lets a thread sleep 50 µs longer than it asked for.
            let _ = set_current_timer_slack(NonZeroU64::new(1));
            driver.run()
        };
        let thread = Builder::new().name(format!("kv-worker-{rank}")).spawn(run);
        let thread = thread.map_err(|error| OsError::new("thread::spawn", error))?;
        Ok(Worker { port, thread: Some(thread) })
    }
}

/// Tells that the thread of a worker has ended, when this is dropped.
struct End<M: Machine>(Port<M>);

impl<M: Machine> Drop for End<M> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl<M: Machine + 'static> Worker<M> {
    /// The port that opens sessions on this worker.
    pub fn port(&self) -> Port<M> {
        self.port.clone()
    }

    /// Tells the worker to drain, and to stop once it is empty, or after `within` at the latest. Returns at
    /// once. A drain that took too long ends as [`begin_stop`](Worker::begin_stop) does, with this grace: the
    /// report counts the sessions that had not ended.
    pub fn drain_then_stop(mut self, within: Duration, grace: Duration) -> Stopping<M> {
        self.port.request_drain_then_stop(within, grace);
        Stopping::new(self.port.clone(), self.thread.take())
    }

    /// Tells the worker to end all sessions, to tell the peers and to withdraw the publication, and returns at
    /// once. The thread runs on until everything that sessions were given is back, for `grace` at most;
    /// [`Stopping`] says what the caller can rely on meanwhile.
    pub fn begin_stop(mut self, grace: Duration) -> Stopping<M> {
        self.port.request_stop(grace);
        Stopping::new(self.port.clone(), self.thread.take())
    }

    /// Stops the worker as [`begin_stop`](Worker::begin_stop) does, and blocks the caller until the thread has
    /// ended: for `grace` at most, and then while the transport closes.
    pub fn stop(self, grace: Duration) -> StopReport {
        self.begin_stop(grace).wait()
    }
}

impl<M: Machine> Drop for Worker<M> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.port.request_stop(DROP_GRACE);
            // A panic of the thread was told to its sessions.
            let _ = thread.join();
        }
    }
}

impl<M: Machine> fmt::Debug for Worker<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("gauges", &self.port.gauges()).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
