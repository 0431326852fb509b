//! The way to a worker, and the handle on one session: what a service builds its own handles on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kv_core::machine::{Machine, SessionCommand, SessionStatus, Submit};
use kv_core::{OpenError, SessionId};

use super::cell::{Cell, Failure, Side};
use super::gauges::Gauges;
use super::poll_set::PollSet;
use super::shared::{Registration, Shared};

/// The way to a worker: cheap to clone, usable from any thread. It does not keep the worker
/// running; without one, sessions cannot be opened.
pub struct Port<M: Machine> {
    shared: Arc<Shared<M>>,
}

impl<M: Machine> Port<M> {
    pub(crate) fn new(shared: Arc<Shared<M>>) -> Port<M> {
        Port { shared }
    }

    /// Opens a session with the command that `open` makes of its number.
    pub fn open(&self, open: impl FnOnce(SessionId) -> M::Command) -> Result<Handle<M>, OpenError> {
        let cell = self.shared.open(open)?;
        Ok(Handle { shared: Arc::clone(&self.shared), cell, closed: false })
    }

    /// The sessions that have changed.
    pub fn poll_set(&self) -> &PollSet<M> {
        &self.shared.poll_set
    }

    /// Takes what came back after its session's handle was dropped, as far as `pick` takes it; what `pick`
    /// returns as an error stays. No wire touches any of it any more.
    pub fn take_orphans<T>(&self, pick: impl FnMut(M::Resource) -> Result<T, M::Resource>) -> Vec<T> {
        self.shared.take_orphans(pick)
    }

    /// The worker's numbers.
    pub fn gauges(&self) -> Gauges {
        self.shared.gauges()
    }

    /// Whether the worker can be found by its peers.
    pub fn registration(&self) -> Registration {
        self.shared.registration()
    }

    /// What the resources in quarantine wait for, as the worker saw it 50 ms ago at most. Of a worker that
    /// has stopped: nothing, see [`Gauges::sessions_lost`].
    pub fn quarantine(&self) -> Vec<M::Quarantine> {
        self.shared.quarantine()
    }

    pub(super) fn request_stop(&self, grace: Duration) {
        self.shared.request_stop(grace);
    }

    /// True once the worker's thread has ended, whatever ended it.
    pub fn is_stopped(&self) -> bool {
        self.shared.is_stopped()
    }
}

impl<M: Machine> Clone for Port<M> {
    fn clone(&self) -> Port<M> {
        Port { shared: Arc::clone(&self.shared) }
    }
}

impl<M: Machine> fmt::Debug for Port<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").field("gauges", &self.gauges()).finish_non_exhaustive()
    }
}

/// One session of a worker. Nothing in it blocks, and [`poll`](Handle::poll) is one atomic load.
///
/// Dropping a handle that was not [reclaimed](Handle::reclaim) aborts the session; what it was lent goes
/// to [`Port::take_orphans`] as it comes back.
#[must_use = "dropping a handle aborts its session"]
pub struct Handle<M: Machine> {
    shared: Arc<Shared<M>>,
    cell: Arc<Cell<M>>,
    closed: bool,
}

impl<M: Machine> Handle<M> {
    /// The session's number within its worker, as the poll set reports it.
    pub fn id(&self) -> SessionId {
        self.cell.id()
    }

    /// The session's state.
    pub fn poll(&self) -> M::Status {
        self.cell.poll()
    }

    /// Why it failed; `None` unless it has.
    pub fn failure(&self) -> Option<Failure<M>> {
        self.cell.failure()
    }

    /// Asks for an end, at any stage; idempotent, and never refused. A session that has ended stays as it
    /// is.
    pub fn abort(&self) {
        self.shared.abort(&self.cell);
    }

    /// Takes back what the session was lent, in the order in which it came back. `None` while the session
    /// has not ended, while anything is still out, and after it was reclaimed, from when on it takes no
    /// command either.
    pub fn reclaim(&mut self) -> Option<Vec<M::Resource>> {
        if self.closed || !self.cell.is_reclaimable() {
            return None;
        }
        let returned = self.cell.take_returned();
        self.close();
        Some(returned)
    }

    /// Hands something that came back on to [`Port::take_orphans`].
    pub fn leave_behind(&self, resource: M::Resource) {
        self.shared.add_orphan(resource);
    }

    /// A way to see the session's state without its handle.
    pub fn watch(&self) -> Watch<M> {
        Watch { cell: Arc::clone(&self.cell) }
    }

    fn close(&mut self) {
        self.closed = true;
        self.cell.close_handle();
        self.shared.leave(&self.cell, Side::Handle);
    }

    #[cfg(test)]
    pub(crate) fn cell(&self) -> &Arc<Cell<M>> {
        &self.cell
    }
}

/// Sees one session, also after its handle is gone.
pub struct Watch<M: Machine> {
    cell: Arc<Cell<M>>,
}

impl<M: Machine> Watch<M> {
    /// The session's state: one atomic load.
    pub fn poll(&self) -> M::Status {
        self.cell.poll()
    }
}

impl<M: Machine> fmt::Debug for Watch<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("id", &self.cell.id()).field("poll", &self.poll()).finish()
    }
}

impl<M: Machine> Submit<M::Command> for Handle<M> {
    fn submit(&mut self, mut command: M::Command) -> Result<(), M::Command> {
        // What is lent after the end of the handle would come back to nobody.
        match !self.closed && command.address(self.id()) {
            true => self.shared.submit(&self.cell, command),
            false => Err(command),
        }
    }
}

impl<M: Machine> Drop for Handle<M> {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        self.shared.abort(&self.cell);
        for resource in self.cell.abandon() {
            self.shared.add_orphan(resource);
        }
        self.close();
    }
}

impl<M: Machine> fmt::Debug for Handle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_over = self.poll().is_terminal();
        f.debug_struct("Handle")
            .field("id", &self.id())
            .field("poll", &self.poll())
            .field("over", &is_over)
            .finish()
    }
}
