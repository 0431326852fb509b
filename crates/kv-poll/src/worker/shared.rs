//! What lies between session handles and their worker: the command ring in one direction; cells, changes and
//! orphans in the other.

mod orders;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crossbeam_queue::{ArrayQueue, SegQueue};
use kv_core::machine::{Machine, SessionCommand, SessionResource};
use kv_core::{BootstrapError, OpenError, SessionId};

use super::cell::{Cell, Side};
use super::discard::discard;
use super::gauges::{Counters, Gauges};
use super::poll_set::PollSet;
use super::waiters::{Awaited, Waiters};
use super::wake::Waker;

/// A command, with the cell of its session, by which resources that the command lends come back.
pub(crate) struct Message<M: Machine> {
    pub(crate) cell: Arc<Cell<M>>,
    pub(crate) command: M::Command,
    /// True for the opening command of a session.
    pub(crate) opens: bool,
}

/// Whether the bootstrap server knows a worker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Publication {
    /// The worker was told no server to register with.
    #[default]
    None,
    /// The server has not accepted the worker yet; the worker keeps trying.
    Pending {
        /// Why the last try failed; `None` before the first try has failed.
        last: Option<BootstrapError>,
    },
    /// The server has accepted the worker, and peers can find it.
    Published,
    /// The worker drains and awaits no further peers. Peers do not find its replica any more once all ranks of
    /// the replica have left.
    Left,
}

/// Shared by a worker, its ports and their sessions.
///
/// Commands go through a ring of fixed size, which returns a command for which there is no room. Aborts must
/// never be refused, so aborts have a queue of their own, which a session enters at most once. An abort may
/// thus overtake the opening command of its session; when a session is opened, the worker looks into the cell
/// whether an abort is wanted.
pub(crate) struct Shared<M: Machine> {
    pub(crate) poll_set: PollSet<M>,
    pub(crate) waker: Waker,
    pub(crate) counters: Counters,
    max_sessions: usize,
    next_session: AtomicU64,
    open: AtomicUsize,
    ring: ArrayQueue<Message<M>>,
    aborts: SegQueue<Arc<Cell<M>>>,
    orphans: Mutex<Vec<M::Resource>>,
    publication: Mutex<Publication>,
    quarantine: Mutex<Vec<M::Quarantine>>,
    drain: AtomicBool,
    /// After how much time a worker that drains stops if it is not empty, and with which grace. A worker with
    /// this stops also when it is empty.
    stop_after: OnceLock<(Duration, Duration)>,
    /// The worker has been empty while it drained.
    drained: AtomicBool,
    stop: OnceLock<Duration>,
    stopped: AtomicBool,
    /// The worker's thread runs nothing of the worker any more: the transport is closed.
    ended: AtomicBool,
    /// The tasks that wait for room in the ring, or for the end of the worker.
    waiters: Waiters,
}

impl<M: Machine> Awaited for Shared<M> {
    fn waiters(&self) -> &Waiters {
        &self.waiters
    }
}

/// The methods for schedulers, on any thread.
impl<M: Machine> Shared<M> {
    pub(crate) fn new(max_sessions: usize, commands: usize) -> io::Result<Shared<M>> {
        Ok(Shared {
            poll_set: PollSet::new(max_sessions)?,
            waker: Waker::new()?,
            counters: Counters::default(),
            max_sessions,
            next_session: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            ring: ArrayQueue::new(commands.max(1)),
            aborts: SegQueue::new(),
            orphans: Mutex::new(Vec::new()),
            publication: Mutex::default(),
            quarantine: Mutex::new(Vec::new()),
            drain: AtomicBool::new(false),
            stop_after: OnceLock::new(),
            drained: AtomicBool::new(false),
            stop: OnceLock::new(),
            stopped: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            waiters: Waiters::default(),
        })
    }

    /// Opens a session. `open` makes the opening command of the session's number.
    pub(crate) fn open(&self, open: impl FnOnce(SessionId) -> M::Command) -> Result<Arc<Cell<M>>, OpenError> {
        if self.is_stopped() || self.stop.get().is_some() {
            return Err(OpenError::WorkerStopped);
        }
        if self.is_draining() {
            return Err(OpenError::Draining);
        }
        let more = |open: usize| (open < self.max_sessions).then(|| open + 1);
        if let Err(open) = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            return Err(OpenError::TooManySessions { open, max: self.max_sessions });
        }
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let cell = Arc::new(Cell::new(id));
        match self.push(&cell, open(id), true) {
            Ok(()) => Ok(cell),
            Err(_) => {
                self.open.fetch_sub(1, Ordering::AcqRel);
                Err(OpenError::Backpressure)
            }
        }
    }

    /// Gives the worker a command; returns the command if there is no room for it.
    pub(crate) fn submit(&self, cell: &Arc<Cell<M>>, command: M::Command) -> Result<(), M::Command> {
        self.push(cell, command, false)
    }

    fn push(&self, cell: &Arc<Cell<M>>, command: M::Command, opens: bool) -> Result<(), M::Command> {
        let lends = command.lends().is_some();
        if lends {
            cell.lend();
        }
        match self.ring.push(Message { cell: Arc::clone(cell), command, opens }) {
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
                Err(message.command)
            }
        }
    }

    /// Asks the worker to end a session. Never refused.
    pub(crate) fn abort(&self, cell: &Arc<Cell<M>>) {
        if !cell.is_over() && cell.want_abort() {
            self.aborts.push(Arc::clone(cell));
            self.waker.wake();
            self.sweep_if_stopped();
        }
    }

    /// Notes that the handle of a session is gone, or the entry in the worker's table. The last of both frees
    /// the session's place.
    pub(crate) fn leave(&self, cell: &Cell<M>, side: Side) {
        if cell.leave(side) {
            self.open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Takes the orphans that `pick` picks; the others stay. No lock is held while `pick` runs.
    pub(crate) fn take_orphans(&self, pick: impl FnMut(&M::Resource) -> bool) -> Vec<M::Resource> {
        let all = std::mem::take(&mut *lock(&self.orphans));
        let mut offered = Offered { orphans: &self.orphans, all };
        let mut picks = offered.all.iter().map(pick).collect::<Vec<bool>>().into_iter();
        let taken: Vec<_> = offered.all.extract_if(.., |_| picks.next().unwrap_or_default()).collect();
        taken.iter().for_each(|orphan| self.counters.orphaned.sub(orphan.amounts()));
        taken
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.counters.read(self.open.load(Ordering::Acquire))
    }

    pub(crate) fn publication(&self) -> Publication {
        lock(&self.publication).clone()
    }

    pub(crate) fn quarantine(&self) -> Vec<M::Quarantine> {
        lock(&self.quarantine).clone()
    }

    /// True if the ring has room for a command, and after the worker has stopped, when commands need no room.
    pub(crate) fn has_room(&self) -> bool {
        self.ring.len() < self.ring.capacity() || self.is_stopped()
    }
}

/// The methods for the worker's thread.
impl<M: Machine> Shared<M> {
    pub(crate) fn next_command(&self) -> Option<Message<M>> {
        self.ring.pop()
    }

    /// Wakes the tasks that wait for room. Comes after commands were taken out.
    pub(crate) fn made_room(&self) {
        fence(Ordering::SeqCst);
        self.waiters.wake();
    }

    pub(crate) fn commands_waiting(&self) -> usize {
        self.ring.len()
    }

    pub(crate) fn next_abort(&self) -> Option<Arc<Cell<M>>> {
        self.aborts.pop()
    }

    pub(crate) fn aborts_waiting(&self) -> usize {
        self.aborts.len()
    }

    pub(crate) fn has_commands(&self) -> bool {
        !self.ring.is_empty() || !self.aborts.is_empty()
    }

    /// Hands a resource back to its session, and reports the session if the session can be reclaimed now, at the end
    /// of the turn.
    pub(crate) fn give_back(&self, cell: &Arc<Cell<M>>, resource: M::Resource) {
        self.give(cell, resource);
        if cell.is_reclaimable() {
            self.announce_soon(cell);
        }
    }

    fn give(&self, cell: &Arc<Cell<M>>, resource: M::Resource) {
        if let Some(orphan) = cell.give_back(resource) {
            self.add_orphan(orphan);
        }
    }

    /// Hands back what a command lends that the machine has not seen, so that no data operation uses it.
    pub(crate) fn return_unseen(&self, cell: &Arc<Cell<M>>, command: M::Command) {
        if let Some(resource) = command.into_resource() {
            self.give(cell, resource);
            self.notify_if_reclaimable(cell);
        }
    }

    /// Keeps a resource whose handle is gone.
    pub(crate) fn add_orphan(&self, resource: M::Resource) {
        let amounts = resource.amounts();
        if !amounts.is_empty() {
            self.counters.orphaned.add(amounts);
            lock(&self.orphans).push(resource);
        }
    }

    pub(crate) fn set_quarantine(&self, quarantine: Vec<M::Quarantine>) {
        *lock(&self.quarantine) = quarantine;
    }

    pub(crate) fn set_publication(&self, publication: Publication) {
        *lock(&self.publication) = publication;
    }

    /// The last act of the worker. From now on, the threads that put commands into the ring take them out
    /// again.
    ///
    /// A producer pushes a command, then looks at the flag; the worker sets the flag, then empties the ring.
    /// All four steps are sequentially consistent, so the producer or the worker finds every command.
    pub(crate) fn close(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.sweep_if_stopped();
        self.waiters.wake();
    }

    fn sweep_if_stopped(&self) {
        if !self.is_stopped() {
            return;
        }
        while self.aborts.pop().is_some() {}
        while let Some(Message { cell, mut command, .. }) = self.ring.pop() {
            discard(command.take_ready());
            self.return_unseen(&cell, command);
            if cell.fail_stopped() {
                self.announce(&cell);
            }
            self.leave(&cell, Side::Worker);
        }
    }

    fn notify_if_reclaimable(&self, cell: &Arc<Cell<M>>) {
        if cell.is_reclaimable() {
            self.announce(cell);
        }
    }

    /// As [`announce`](Shared::announce), but the descriptor of the poll set becomes readable at the end of the turn
    /// only. For the worker's thread.
    pub(crate) fn announce_soon(&self, cell: &Arc<Cell<M>>) {
        self.poll_set.note(cell);
        cell.waiters().wake();
    }

    /// Tells the poll set and the tasks that wait for the session that the session has changed.
    pub(crate) fn announce(&self, cell: &Arc<Cell<M>>) {
        self.poll_set.notify(cell);
        cell.waiters().wake();
    }
}

/// Orphans that are offered to a caller, outside the lock. What the caller does not take goes back, ahead of
/// what has come meanwhile: all of them, should the caller panic.
struct Offered<'a, R> {
    orphans: &'a Mutex<Vec<R>>,
    all: Vec<R>,
}

impl<R> Drop for Offered<'_, R> {
    fn drop(&mut self) {
        let mut orphans = lock(self.orphans);
        self.all.append(&mut orphans);
        *orphans = std::mem::take(&mut self.all);
    }
}

/// Locks, also after a panic: no panic in this file leaves locked data half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use kv_core::proto::Resource;
    use kv_core::{
        ChunkId, FinalLayers, KvManager, KvSender, KvSession, PageList, PagePool, Room, SessionOptions,
    };

    use crate::worker::tests::{Broken, idle, pages};

    #[test]
    fn a_ready_event_that_panics_when_a_stopped_worker_drops_it_loses_no_page_behind_it() {
        let (shared, manager) = idle();
        let pool = PagePool::new(8);
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.layers_final(FinalLayers::all(ChunkId(0)).after(Broken)).unwrap();
        sender.send(pool.adopt(PageList::from_pages([3, 4]).unwrap()).unwrap()).unwrap();
        shared.close();
        pool.release(sender.reclaim().unwrap().pages).unwrap();
        assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));
        assert_eq!(manager.gauges().sessions_open, 0);
    }

    #[test]
    fn orphans_are_offered_without_a_lock_and_stay_unless_they_are_taken() {
        let (shared, manager) = idle();
        for page in 1..5 {
            shared.add_orphan(pages(&[page]).into());
        }
        // A service that looks at its orphans while it is offered one, and that panics at the third.
        let mut offered = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            shared.take_orphans(|_| {
                offered += 1;
                assert!(offered < 3, "a bug in the service");
                if offered == 1 {
                    assert_eq!(shared.take_orphans(|_| true).len(), 0, "all are being offered");
                    shared.add_orphan(pages(&[5]).into());
                }
                offered == 1
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(manager.gauges().pages_orphaned(), 5);
        // What was picked before the panic is there, too, ahead of what has come meanwhile.
        let mut fourth = 0..;
        let taken = shared.take_orphans(|_| fourth.next() == Some(3));
        assert_eq!(taken, [Resource::from(pages(&[4]))]);
        assert_eq!(manager.orphans(), [1, 2, 3, 5].map(|page| pages(&[page])));
        assert_eq!(manager.gauges().pages_orphaned(), 0);
    }
}
