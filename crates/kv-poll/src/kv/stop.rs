//! The end of a worker of the KV cache.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use kv_core::proto::Resource;

use super::words::KvMachine;
use crate::worker;

/// A worker of the KV cache that was told to stop, by [`Worker::begin_stop`](crate::Worker::begin_stop).
///
/// Meanwhile the thread of the worker goes on, until every page is back, and for the grace at most:
///
/// * New sessions are refused; sessions that had not ended fail, and the peers are told.
/// * Pages come back through `reclaim` of their sessions, or through
///   [`Manager::orphans`](crate::Manager::orphans), as ever: once no data operation can touch them any more,
///   and not before. Pages that are not quiet when the grace is over never come back, and the report counts
///   them.
/// * The transport lives on the thread. Memory that was given to the transport must stay mapped until
///   [`poll`](Stopping::poll) returns the report; and until the process ends, if the report counts anything in
///   quarantine or a panic, or if this value is dropped without a report.
///
/// Dropping this value does not wait and does not stop the thread earlier: the thread ends by itself, without a
/// report.
///
/// No descriptor becomes readable at the end. A server awaits this value, on any executor; or calls
/// [`poll`](Stopping::poll) in its loop; or [waits](Stopping::wait) on a thread that may block.
#[derive(Debug)]
#[must_use = "a worker ends without a report if this is dropped"]
pub struct Stopping(worker::Stopping<KvMachine>);

/// How a worker of the KV cache ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StopReport {
    /// Sessions that had not ended when the worker was told to stop. They have failed.
    pub sessions_ended: usize,
    /// Pages that could not be proven quiet within the grace. They must not be used again in the life of this
    /// process.
    pub pages_quarantined: usize,
    /// Items of cache groups that could not be proven quiet within the grace.
    pub items_quarantined: usize,
    /// Data operations that had not ended within the grace.
    pub posts_in_flight: usize,
    /// The thread of the worker had panicked.
    pub panicked: bool,
}

impl Stopping {
    pub(super) fn of(thread: worker::Stopping<KvMachine>) -> Stopping {
        Stopping(thread)
    }

    /// The report, once the thread has ended; `None` before. Never blocks.
    pub fn poll(&mut self) -> Option<StopReport> {
        self.0.poll().map(report)
    }

    /// Waits for the end of the thread, which comes when the grace is over and the transport has closed, at
    /// the latest. Blocks the caller.
    pub fn wait(self) -> StopReport {
        report(self.0.wait())
    }
}

/// Resolves when the thread has ended.
impl Future for Stopping {
    type Output = StopReport;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<StopReport> {
        Pin::new(&mut self.get_mut().0).poll(cx).map(report)
    }
}

fn report(report: worker::StopReport) -> StopReport {
    StopReport {
        sessions_ended: report.sessions_ended,
        pages_quarantined: report.quarantined.kind(Resource::PAGES),
        items_quarantined: report.quarantined.kind(Resource::ITEMS),
        posts_in_flight: report.posts_in_flight,
        panicked: report.panicked,
    }
}
