//! The end of a worker: asked for without waiting for it, and reported once it has come.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use kv_core::machine::{Amounts, Machine};

use super::driver::Ended;
use super::port::Port;
use super::waiters::Waiting;

/// A worker that was told to stop, by [`Worker::begin_stop`](super::Worker::begin_stop).
///
/// The thread of the worker runs on until everything that sessions were given is back, for the grace at most.
/// Until then:
///
/// * New sessions are refused; sessions that had not ended fail, and the peers are told.
/// * What a session was given comes back through its handle, as always: when no data operation can touch it any
///   more, and not before. What a data operation may still touch when the grace is over never comes back, and
///   the report counts it.
/// * The transport lives on the thread. Memory that was given to the transport must stay mapped until
///   [`poll`](Stopping::poll) returns the report; and until the process ends, if the report counts anything in
///   quarantine or a panic, or if this value is dropped without a report.
///
/// Dropping this value does not wait and does not stop the thread earlier: the thread ends by itself, without a
/// report.
///
/// No descriptor becomes readable at the end. A server awaits this value, on any executor; or calls
/// [`poll`](Stopping::poll) in its loop; or calls [`wait`](Stopping::wait) on a thread that may block.
#[must_use = "a worker ends without a report if this is dropped"]
pub struct Stopping<M: Machine> {
    port: Port<M>,
    thread: Option<JoinHandle<Ended>>,
    report: Option<StopReport>,
    waiting: Waiting,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StopReport {
    /// Sessions that had not ended when the worker was told to stop. They have failed.
    pub sessions_ended: usize,
    /// What could not be proven quiet within the grace, by kind. The memory must not be used for anything
    /// else in the life of this process.
    pub quarantined: Amounts,
    /// Data operations that had not ended within the grace.
    pub posts_in_flight: usize,
    /// The thread of the worker had panicked.
    pub panicked: bool,
}

impl<M: Machine + 'static> Stopping<M> {
    pub(super) fn new(port: Port<M>, thread: Option<JoinHandle<Ended>>) -> Stopping<M> {
        let waiting = Waiting::on([port.awaited()]);
        Stopping { port, thread, report: None, waiting }
    }

    /// The report, once the thread has ended; `None` before. Never blocks.
    pub fn poll(&mut self) -> Option<StopReport> {
        let Stopping { port, thread, report, .. } = self;
        reported(port, thread, report)
    }

    /// Blocks the caller until the thread has ended, which is when the grace is over and the transport has
    /// closed, at the latest.
    pub fn wait(mut self) -> StopReport {
        match self.thread.take() {
            Some(thread) => report_of(&self.port, thread),
            None => self.report.unwrap_or_default(),
        }
    }
}

/// The report, which is made when the thread has ended.
fn reported<M: Machine>(
    port: &Port<M>,
    thread: &mut Option<JoinHandle<Ended>>,
    report: &mut Option<StopReport>,
) -> Option<StopReport> {
    // A thread that has said so is about to end, and waits for nothing.
    let ended = port.has_ended();
    if let Some(thread) = thread.take_if(|thread| ended || thread.is_finished()) {
        *report = Some(report_of(port, thread));
    }
    *report
}

fn report_of<M: Machine>(port: &Port<M>, thread: JoinHandle<Ended>) -> StopReport {
    let ended = thread.join();
    let gauges = port.gauges();
    StopReport {
        sessions_ended: ended.as_ref().map_or(0, |ended| ended.sessions),
        quarantined: gauges.quarantined,
        posts_in_flight: gauges.posts_in_flight,
        panicked: ended.is_err(),
    }
}

/// Resolves when the thread has ended. A stop that was reported before is reported again.
impl<M: Machine + 'static> Future for Stopping<M> {
    type Output = StopReport;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<StopReport> {
        let Stopping { port, thread, report, waiting } = self.get_mut();
        waiting.look(cx, || reported(port, thread, report).map_or(Poll::Pending, Poll::Ready))
    }
}

impl<M: Machine> fmt::Debug for Stopping<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopping").field("report", &self.report).finish_non_exhaustive()
    }
}
