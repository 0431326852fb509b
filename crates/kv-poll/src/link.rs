//! What lies between session handles and their worker: the command ring one way, cells, changes
//! and orphans the other.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crossbeam_queue::{ArrayQueue, SegQueue};
use kv_core::proto::Command;
use kv_core::{Fence, Groups, Incarnation, KvArgs, OpenError, Pages, Quarantine, Room, SessionId};

use crate::cell::{Cell, Side};
use crate::gauges::{Counters, Gauges};
use crate::manager::Registration;
use crate::poll_set::PollSet;
use crate::token::Token;
use crate::worker::Waker;

/// A command, with the cell of its session: the way back for the pages in it.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) cell: Arc<Cell>,
    pub(crate) command: Command,
    /// What must have passed before the node is told.
    pub(crate) fence: Option<Box<dyn Fence>>,
}

/// Shared by a worker, its managers and their sessions.
///
/// Commands go through a ring of fixed size that returns what it has no room for. Aborts must
/// never be refused, so they have a queue of their own, into which a session puts itself at most
/// once. An abort may thus overtake the `Open` of its session; the worker asks the cell when it
/// opens one.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) args: KvArgs,
    /// This life of the worker.
    pub(crate) incarnation: Incarnation,
    pub(crate) poll_set: PollSet,
    pub(crate) waker: Waker,
    pub(crate) counters: Counters,
    max_sessions: usize,
    next_session: AtomicU64,
    open: AtomicUsize,
    ring: ArrayQueue<Message>,
    aborts: SegQueue<Arc<Cell>>,
    orphans: Mutex<Vec<Pages>>,
    orphan_groups: Mutex<Vec<Groups>>,
    registration: Mutex<Registration>,
    quarantine: Mutex<Vec<Quarantine>>,
    stop: OnceLock<Duration>,
    stopped: AtomicBool,
}

/// The scheduler's side.
impl Link {
    pub(crate) fn new(
        args: KvArgs,
        incarnation: Incarnation,
        max_sessions: usize,
        commands: usize,
    ) -> io::Result<Link> {
        Ok(Link {
            args,
            incarnation,
            poll_set: PollSet::new(max_sessions)?,
            waker: Waker::new()?,
            counters: Counters::default(),
            max_sessions,
            next_session: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            ring: ArrayQueue::new(commands.max(1)),
            aborts: SegQueue::new(),
            orphans: Mutex::default(),
            orphan_groups: Mutex::default(),
            registration: Mutex::default(),
            quarantine: Mutex::default(),
            stop: OnceLock::new(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Opens a session with the command that `open` makes of its id.
    pub(crate) fn open(
        &self,
        room: Room,
        open: impl FnOnce(SessionId, Room) -> Command,
    ) -> Result<Arc<Cell>, OpenError> {
        if self.is_stopped() || self.stop.get().is_some() {
            return Err(OpenError::WorkerStopped);
        }
        let more = |open: usize| (open < self.max_sessions).then(|| open + 1);
        if let Err(open) = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            return Err(OpenError::TooManySessions { open, max: self.max_sessions });
        }
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let cell = Arc::new(Cell::new(id, room.clone()));
        match self.submit(&cell, open(id, room)) {
            Ok(()) => Ok(cell),
            Err(_) => {
                self.open.fetch_sub(1, Ordering::AcqRel);
                Err(OpenError::Backpressure)
            }
        }
    }

    /// Gives the worker a command, or the command back if there is no room for it.
    pub(crate) fn submit(&self, cell: &Arc<Cell>, command: Command) -> Result<(), Command> {
        self.submit_after(cell, command, None).map_err(|(command, _)| command)
    }

    /// As `submit`, of a command that the node is told once the fence has passed.
    pub(crate) fn submit_after(
        &self,
        cell: &Arc<Cell>,
        command: Command,
        fence: Option<Box<dyn Fence>>,
    ) -> Result<(), (Command, Option<Box<dyn Fence>>)> {
        let lends = Token::size_in(&command).is_some();
        if lends {
            cell.lend();
        }
        match self.ring.push(Message { cell: Arc::clone(cell), command, fence }) {
            Ok(()) => {
                self.waker.wake();
                self.sweep_if_stopped();
                Ok(())
            }
            Err(message) => {
                if lends {
                    cell.unlend();
                    self.notify_if_reclaimable(cell);
                }
                Err((message.command, message.fence))
            }
        }
    }

    /// Asks for a session's end. Never refused.
    pub(crate) fn abort(&self, cell: &Arc<Cell>) {
        if !cell.poll().is_terminal() && cell.want_abort() {
            self.aborts.push(Arc::clone(cell));
            self.waker.wake();
            self.sweep_if_stopped();
        }
    }

    /// The session's handle is gone, or its table entry at the worker. The last of both frees its
    /// place.
    pub(crate) fn leave(&self, cell: &Cell, side: Side) {
        if cell.leave(side) {
            self.open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub(crate) fn take_orphans(&self) -> Vec<Pages> {
        let orphans = std::mem::take(&mut *lock(&self.orphans));
        self.counters.pages_orphaned.sub(orphans.iter().map(Pages::len).sum());
        orphans
    }

    pub(crate) fn take_orphan_groups(&self) -> Vec<Groups> {
        let orphans = std::mem::take(&mut *lock(&self.orphan_groups));
        self.counters.items_orphaned.sub(orphans.iter().map(Groups::len).sum());
        orphans
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.counters.read(self.open.load(Ordering::Acquire), self.args.geometry().bytes_per_page())
    }

    pub(crate) fn registration(&self) -> Registration {
        lock(&self.registration).clone()
    }

    pub(crate) fn quarantine(&self) -> Vec<Quarantine> {
        lock(&self.quarantine).clone()
    }

    /// Asks the worker to stop within `grace`. The first call counts.
    pub(crate) fn request_stop(&self, grace: Duration) {
        let _ = self.stop.set(grace);
        self.waker.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

/// The worker's side.
impl Link {
    pub(crate) fn next_command(&self) -> Option<Message> {
        self.ring.pop()
    }

    pub(crate) fn next_abort(&self) -> Option<Arc<Cell>> {
        self.aborts.pop()
    }

    pub(crate) fn aborts_waiting(&self) -> usize {
        self.aborts.len()
    }

    pub(crate) fn has_commands(&self) -> bool {
        !self.ring.is_empty() || !self.aborts.is_empty()
    }

    pub(crate) fn stop_requested(&self) -> Option<Duration> {
        self.stop.get().copied()
    }

    /// Hands a token back to its session, and says so if that was the last it waited for.
    pub(crate) fn give_back(&self, cell: &Arc<Cell>, token: impl Into<Token>) {
        if let Some(orphan) = cell.give_back(token.into()) {
            self.add_orphan(orphan);
        }
        self.notify_if_reclaimable(cell);
    }

    /// Keeps what no session takes back.
    pub(crate) fn add_orphan(&self, token: impl Into<Token>) {
        match token.into() {
            Token::Pages(pages) if !pages.is_empty() => {
                self.counters.pages_orphaned.add(pages.len());
                lock(&self.orphans).push(pages);
            }
            Token::Groups(groups, _) if !groups.is_empty() => {
                self.counters.items_orphaned.add(groups.len());
                lock(&self.orphan_groups).push(groups);
            }
            _ => {}
        }
    }

    pub(crate) fn set_quarantine(&self, quarantine: Vec<Quarantine>) {
        *lock(&self.quarantine) = quarantine;
    }

    pub(crate) fn set_registration(&self, registration: Registration) {
        *lock(&self.registration) = registration;
    }

    /// The worker's last act: from now on nobody takes commands out of the ring but those who
    /// put them in.
    ///
    /// A producer pushes, then looks at the flag; the worker sets the flag, then empties the ring.
    /// All of it is sequentially consistent, so every command is found by one of them.
    pub(crate) fn close(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.sweep_if_stopped();
    }

    fn sweep_if_stopped(&self) {
        if !self.is_stopped() {
            return;
        }
        while self.aborts.pop().is_some() {}
        while let Some(Message { cell, command, fence: _ }) = self.ring.pop() {
            // No node has seen what is in it, so no wire knows it.
            if let Some(token) = Token::from_command(command) {
                self.give_back(&cell, token);
            }
            if cell.fail_stopped() {
                self.poll_set.notify(&cell);
            }
            self.leave(&cell, Side::Worker);
        }
    }

    fn notify_if_reclaimable(&self, cell: &Arc<Cell>) {
        if cell.is_reclaimable() {
            self.poll_set.notify(cell);
        }
    }
}

/// Nothing here panics while holding a lock; were it otherwise, the data would still be whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
