//! The port of a worker, and the handle of one session. A service builds its own manager and handles on both.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kv_core::machine::{Machine, SessionCommand, SessionStatus, Submit};
use kv_core::{OpenError, SessionId};

use super::cell::{Cell, Failure, Side};
use super::changes::{Changes, Set};
use super::command_room::CommandRoom;
use super::draining::Draining;
use super::gauges::Gauges;
use super::poll_set::PollSet;
use super::shared::{Publication, Shared};
use super::waiters::{Awaited, Waiting};

/// Opens sessions on a worker and tells how the worker is doing. Cheap to clone, and usable from any thread. A
/// port does not keep the worker running.
pub struct Port<M: Machine> {
    shared: Arc<Shared<M>>,
}

impl<M: Machine> Port<M> {
    pub(crate) fn new(shared: Arc<Shared<M>>) -> Port<M> {
        Port { shared }
    }

    /// Opens a session. `open` makes the opening command of the number that the session gets.
    pub fn open(&self, open: impl FnOnce(SessionId) -> M::Command) -> Result<Handle<M>, OpenError> {
        let cell = self.shared.open(open)?;
        Ok(Handle { shared: Arc::clone(&self.shared), cell, closed: false })
    }

    /// The set of sessions that have changed.
    pub fn poll_set(&self) -> &PollSet<M> {
        &self.shared.poll_set
    }

    /// Takes those resources for which `pick` returns true, of the resources that came back after the handle
    /// of their session was dropped. No data operation touches these resources any more.
    ///
    /// `pick` may use the port. While `pick` runs, the resources are on offer to this call, and other calls
    /// do not see them. Should `pick` panic, all of them stay.
    pub fn take_orphans(&self, pick: impl FnMut(&M::Resource) -> bool) -> Vec<M::Resource> {
        self.shared.take_orphans(pick)
    }

    /// True if the worker takes a command now.
    pub(crate) fn has_room(&self) -> bool {
        self.shared.has_room()
    }

    /// Gives the port a resource that no data operation touches and that its owner cannot free, because the
    /// owner is about to be dropped. [`take_orphans`](Port::take_orphans) returns the resource.
    pub fn leave_behind(&self, resource: M::Resource) {
        self.shared.add_orphan(resource);
    }

    /// The numbers of the worker.
    pub fn gauges(&self) -> Gauges {
        self.shared.gauges()
    }

    /// Whether peers can find the worker at the bootstrap server.
    pub fn publication(&self) -> Publication {
        self.shared.publication()
    }

    /// What the resources in quarantine wait for, as the worker saw the quarantine 50 ms ago at most. Empty
    /// for a worker that has stopped; [`Gauges::sessions_lost`] counts what was lost with the worker.
    pub fn quarantine(&self) -> Vec<M::Quarantine> {
        self.shared.quarantine()
    }

    /// The last act of the worker's thread, after the transport was closed.
    pub(super) fn end(&self) {
        self.shared.end();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.shared.has_ended()
    }

    pub(super) fn request_drain_then_stop(&self, within: Duration, grace: Duration) {
        self.shared.request_drain_then_stop(within, grace);
    }

    pub(super) fn is_drained(&self) -> bool {
        self.shared.is_drained()
    }

    pub(super) fn request_stop(&self, grace: Duration) {
        self.shared.request_stop(grace);
    }

    /// True once the worker runs no session any more, after a stop or a panic. The transport may still be
    /// closing: only [`Stopping::poll`](crate::Stopping::poll) says when memory is out of its reach.
    pub fn is_stopped(&self) -> bool {
        self.shared.is_stopped()
    }
}

impl<M: Machine + 'static> Port<M> {
    /// Tells the worker to take no new requests and to serve those that it has, and returns at once.
    /// [`Draining`] says what holds meanwhile, and when the worker is empty.
    pub fn begin_drain(&self) -> Draining<M> {
        self.shared.request_drain();
        Draining::new(self.clone())
    }

    /// The changes of the sessions as a stream, for servers that await them instead of draining the set.
    pub fn changes(&self) -> Changes<M> {
        Changes::new(Arc::clone(&self.shared))
    }

    /// Resolves when the worker takes a command again, after a command was refused for want of room.
    pub fn command_room(&self) -> CommandRoom<M> {
        CommandRoom::new(Arc::clone(&self.shared))
    }

    /// The poll set, as a thing that tasks wait for.
    pub(crate) fn awaited_changes(&self) -> Arc<dyn Awaited> {
        Arc::new(Set(Arc::clone(&self.shared)))
    }

    /// The ring and the end of the worker, as things that tasks wait for.
    pub(crate) fn awaited(&self) -> Arc<dyn Awaited> {
        Arc::clone(&self.shared) as Arc<dyn Awaited>
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

/// One session of a worker. No method blocks, and [`poll`](Handle::poll) is one atomic load.
///
/// Dropping a handle that was not [reclaimed](Handle::reclaim) aborts the session. What the session was lent
/// then goes to [`Port::take_orphans`], as each resource comes back.
#[must_use = "dropping a handle aborts its session"]
pub struct Handle<M: Machine> {
    shared: Arc<Shared<M>>,
    cell: Arc<Cell<M>>,
    closed: bool,
}

impl<M: Machine> Handle<M> {
    /// The number of the session within its worker. The poll set reports changes under this number.
    pub fn id(&self) -> SessionId {
        self.cell.id()
    }

    /// The state of the session now: one atomic load.
    pub fn poll(&self) -> M::Status {
        self.cell.poll()
    }

    /// Why the session failed; `None` unless the session has failed.
    pub fn failure(&self) -> Option<Failure<M>> {
        self.cell.failure()
    }

    /// Asks the worker to end the session, in whatever state. Never refused, and without effect on a session
    /// that has ended or was aborted before.
    pub fn abort(&self) {
        self.shared.abort(&self.cell);
    }

    /// Takes back what the session was lent, in the order in which the resources came back. `None` while the
    /// session has not ended, while a resource is still out, and after the session was reclaimed. A session
    /// that was reclaimed takes no command any more.
    pub fn reclaim(&mut self) -> Option<Vec<M::Resource>> {
        if self.closed || !self.cell.is_reclaimable() {
            return None;
        }
        let returned = self.cell.take_returned();
        self.close();
        Some(returned)
    }

    /// Hands a resource that came back on to [`Port::take_orphans`].
    pub fn leave_behind(&self, resource: M::Resource) {
        self.shared.add_orphan(resource);
    }

    /// True if nothing will come back any more: the session was reclaimed, or the worker has stopped while it held
    /// something of the session. A worker that stops fails its sessions a moment later.
    pub(crate) fn is_beyond_reclaim(&self) -> bool {
        let lost = || self.shared.is_stopped() && self.cell.is_over() && !self.cell.is_reclaimable();
        self.closed || lost()
    }

    /// A view of the state of the session that does not need the handle.
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

impl<M: Machine + 'static> Handle<M> {
    /// The registration of a task that waits for a change of the session: of its state, and of what it was lent.
    pub fn waiting(&self) -> Waiting {
        Waiting::on([Arc::clone(&self.cell) as Arc<dyn Awaited>])
    }
}

/// A view of the state of one session, which outlives the handle.
pub struct Watch<M: Machine> {
    cell: Arc<Cell<M>>,
}

impl<M: Machine> Watch<M> {
    /// The state of the session now: one atomic load.
    pub fn poll(&self) -> M::Status {
        self.cell.poll()
    }
}

impl<M: Machine + 'static> Watch<M> {
    /// The session, as a thing that tasks wait for.
    pub(crate) fn awaited(&self) -> Arc<dyn Awaited> {
        Arc::clone(&self.cell) as Arc<dyn Awaited>
    }
}

impl<M: Machine> fmt::Debug for Watch<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("id", &self.cell.id()).field("poll", &self.poll()).finish()
    }
}

impl<M: Machine> Submit<M::Command> for Handle<M> {
    fn submit(&mut self, mut command: M::Command) -> Result<(), M::Command> {
        // A resource that is lent after the handle was reclaimed would have no handle to come back to.
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
