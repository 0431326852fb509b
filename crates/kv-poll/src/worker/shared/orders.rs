//! What a worker is told as a whole, to drain and to stop, and how far the worker has come with it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kv_core::machine::Machine;

use super::Shared;

impl<M: Machine> Shared<M> {
    /// Asks the worker to drain. Later calls have no effect.
    pub(crate) fn request_drain(&self) {
        self.drain.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Asks the worker to drain, and to stop when it is empty, or after `within` at the latest, with this grace.
    pub(crate) fn request_drain_then_stop(&self, within: Duration, grace: Duration) {
        let _ = self.stop_after.set((within, grace));
        self.request_drain();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.drain.load(Ordering::SeqCst)
    }

    /// True once the worker has been empty while it drained, and once it has stopped.
    pub(crate) fn is_drained(&self) -> bool {
        self.drained.load(Ordering::SeqCst) || self.is_stopped()
    }

    /// Asks the worker to stop within `grace`. Later calls have no effect.
    pub(crate) fn request_stop(&self, grace: Duration) {
        let _ = self.stop.set(grace);
        self.waker.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// True once the thread is done with the transport.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

/// The methods for the worker's thread.
impl<M: Machine> Shared<M> {
    /// The last act of the worker's thread, after the transport was closed.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.waiters.wake();
    }

    pub(crate) fn stop_after(&self) -> Option<(Duration, Duration)> {
        self.stop_after.get().copied()
    }

    /// The worker drains, and is empty.
    pub(crate) fn set_drained(&self) {
        self.drained.store(true, Ordering::SeqCst);
        self.waiters.wake();
    }

    pub(crate) fn stop_requested(&self) -> Option<Duration> {
        self.stop.get().copied()
    }
}
