//! The poll set: the sessions that have changed since the scheduler last looked.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};

use crossbeam_queue::ArrayQueue;
use kv_core::SessionId;
use kv_core::machine::Machine;
use rustix::event::{EventfdFlags, eventfd};

use super::cell::Cell;
use super::waiters::Waiters;

/// One session that has changed, with its state now. Several changes since the last report are one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<S> {
    /// The number of the session, as its handle's `id` says.
    pub session: SessionId,
    /// The state of the session now.
    pub poll: S,
    /// True if the session has ended and `reclaim` hands back everything that the session was lent.
    pub reclaimable: bool,
}

/// The sessions of one worker that have changed, in the order of their first unreported change.
///
/// The cost of a scheduler step grows with the number of sessions that have changed, not with the number of
/// sessions in flight. The descriptor ([`AsFd`], for epoll, mio's `SourceFd`, tokio's `AsyncFd`) is readable
/// exactly while there is something to drain. A `drain` that runs beside a change may leave the descriptor
/// readable once for nothing.
///
/// A session is in the set at most once. Each change of state is reported, or replaced by a later change that
/// is reported. The moment in which a session becomes reclaimable is reported as a change. No change is
/// reported twice, and sessions whose handle is gone are not reported.
pub struct PollSet<M: Machine> {
    queue: ArrayQueue<Arc<Cell<M>>>,
    event: OwnedFd,
    signal: AtomicU8,
    /// There is a change for which the descriptor is to be made readable at the end of the worker's turn.
    noted: AtomicBool,
    /// A drain is under way. Nothing ever waits for the end of one.
    draining: AtomicBool,
    /// A drain found another one under way.
    turned_away: AtomicBool,
    /// The tasks that wait for a change of any session.
    waiters: Waiters,
}

/// The descriptor is not readable, and no notifier is about to write to it.
const QUIET: u8 = 0;
/// The descriptor is readable, or a notifier is about to write to it.
const SIGNALLED: u8 = 1;

impl<M: Machine> PollSet<M> {
    /// A set for at most `max_sessions` sessions with a handle.
    pub(crate) fn new(max_sessions: usize) -> io::Result<PollSet<M>> {
        Ok(PollSet {
            // Twice as many: see `make_room`.
            queue: ArrayQueue::new(max_sessions.saturating_mul(2).max(2)),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            signal: AtomicU8::new(QUIET),
            noted: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            turned_away: AtomicBool::new(false),
            waiters: Waiters::default(),
        })
    }

    /// Hands every change to `f`, and returns the number of changes. Changes that happen meanwhile are left
    /// for the next call. A call without changes costs nanoseconds. One drain runs at a time, and nothing
    /// waits for it: a second drain, on another thread or from within `f`, returns 0 and leaves the changes
    /// to the first.
    pub fn drain(&self, mut f: impl FnMut(Change<M::Status>)) -> usize {
        if self.is_quiet() {
            return 0;
        }
        let Some(draining) = self.enter() else { return 0 };
        self.reset();
        let mut changes = 0;
        for _ in 0..self.queue.len() {
            let Some(cell) = self.queue.pop() else { break };
            if let Some(change) = report(&cell) {
                changes += 1;
                f(change);
            }
        }
        drop(draining);
        changes
    }

    /// The next change for a [stream](super::Changes), which leaves all others in the set. `None` if there is no
    /// change, or if a drain is under way, at whose end the tasks that wait for the set are woken.
    pub(super) fn next(&self) -> Option<Change<M::Status>> {
        if self.is_quiet() {
            return None;
        }
        let _draining = self.enter()?;
        loop {
            let cell = self.queue.pop();
            // The descriptor stays readable while there is more.
            if self.queue.is_empty() {
                self.reset();
            }
            match cell.map(|cell| report(&cell)) {
                Some(Some(change)) => return Some(change),
                None if self.queue.is_empty() => return None,
                None | Some(None) => {}
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.signal.load(Ordering::SeqCst) == QUIET && self.queue.is_empty()
    }

    /// Begins a drain; `None` while another is under way. What the drain before has written is seen by this one.
    fn enter(&self) -> Option<Draining<'_, M>> {
        if self.draining.swap(true, Ordering::SeqCst) {
            self.turned_away.store(true, Ordering::SeqCst);
            // The other drain may have ended before the note.
            if self.draining.swap(true, Ordering::SeqCst) {
                return None;
            }
        }
        Some(Draining(self))
    }

    /// Makes the descriptor unreadable, before the sessions in the set are counted, or looked for once more. A
    /// notifier pushes, fences, and looks at the signal: if it saw `SIGNALLED`, its fence came before ours, so `len`
    /// counts its push; if it did not, it signals anew. If there is nothing to read, the write is yet to come: nothing
    /// is reset, and the next drain will find it, perhaps with nothing left to do. Once the write is there, a drain
    /// always resets: an event loop that watches edges is woken by the next write only.
    fn reset(&self) {
        if self.signal.load(Ordering::SeqCst) == SIGNALLED
            && rustix::io::read(&self.event, &mut [0_u8; 8]).is_ok()
        {
            self.signal.store(QUIET, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// Puts a session into the set, unless the session is there already, and makes the descriptor readable.
    /// Comes after the change.
    pub(crate) fn notify(&self, cell: &Arc<Cell<M>>) {
        if self.put(cell) {
            self.signal();
        }
    }

    /// As [`notify`](PollSet::notify), but leaves it to [`signal_noted`](PollSet::signal_noted) to make the descriptor
    /// readable: once for all changes of a turn, and after the worker's messages are on their way. For the worker's
    /// thread.
    pub(crate) fn note(&self, cell: &Arc<Cell<M>>) {
        if self.put(cell) {
            self.noted.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the descriptor readable if changes were noted that nobody has drained meanwhile. True if changes were noted.
    pub(crate) fn signal_noted(&self) -> bool {
        let was_noted = self.noted.load(Ordering::Relaxed);
        if was_noted {
            self.noted.store(false, Ordering::Relaxed);
            self.signal();
        }
        was_noted
    }

    /// Puts a session into the set. False if it is there already, or has no handle.
    fn put(&self, cell: &Arc<Cell<M>>) -> bool {
        let is_new = !cell.is_handle_gone() && cell.enqueue();
        if is_new {
            self.push(Arc::clone(cell));
        }
        is_new
    }

    fn push(&self, cell: Arc<Cell<M>>) {
        if let Err(refused) = self.queue.push(cell) {
            self.make_room();
            if let Err(refused) = self.queue.push(refused) {
                debug_assert!(false, "more sessions have handles than the set was made for");
                refused.dequeue();
            }
        }
    }

    fn signal(&self) {
        fence(Ordering::SeqCst);
        if self.signal.swap(SIGNALLED, Ordering::SeqCst) == QUIET {
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
        self.waiters.wake();
    }

    /// Removes the sessions whose handle has gone since they were put here: a server that polls its handles
    /// and never drains leaves them behind. At most `max_sessions` sessions have a handle, so at least half
    /// of the queue becomes free, which pays for going through all of the queue.
    fn make_room(&self) {
        for _ in 0..self.queue.len() {
            let Some(cell) = self.queue.pop() else { break };
            if cell.is_handle_gone() {
                cell.dequeue();
            } else if let Err(refused) = self.queue.push(cell) {
                debug_assert!(false, "the room just made is gone");
                refused.dequeue();
            }
        }
    }
}

/// A drain under way, until this is dropped. What is in the set then, because `f` has panicked or a second drain
/// was turned away, makes the descriptor readable again.
struct Draining<'a, M: Machine>(&'a PollSet<M>);

impl<M: Machine> Drop for Draining<'_, M> {
    fn drop(&mut self) {
        let Draining(set) = self;
        set.draining.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let turned_away = set.turned_away.swap(false, Ordering::SeqCst);
        // A stream leaves the rest of the set, and the descriptor as it is. The drain that was turned away may have
        // been woken by the last edge.
        if !set.queue.is_empty() && (set.signal.swap(SIGNALLED, Ordering::SeqCst) == QUIET || turned_away) {
            let _ = rustix::io::write(&set.event, &1_u64.to_ne_bytes());
        }
        if turned_away {
            set.waiters.wake();
        }
    }
}

/// What a drain reports of a session that was taken out of the set; `None` if there is no news, or no handle that
/// could use the news.
pub(super) fn report<M: Machine>(cell: &Cell<M>) -> Option<Change<M::Status>> {
    // The mark goes before the state is read, so that a later change enqueues again.
    cell.dequeue();
    if cell.is_handle_gone() {
        return None;
    }
    let (poll, reclaimable) = cell.news()?;
    Some(Change { session: cell.id(), poll, reclaimable })
}

impl<M: Machine> PollSet<M> {
    /// The tasks that wait for a change of any session.
    pub(super) fn waiters(&self) -> &Waiters {
        &self.waiters
    }
}

impl<M: Machine> AsFd for PollSet<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl<M: Machine> AsRawFd for PollSet<M> {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl<M: Machine> fmt::Debug for PollSet<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").field("waiting", &self.queue.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicU64;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::kv::{Change, KvMachine, PollSet};
    use kv_core::{KvPoll, Pages};
    use rustix::buffer::spare_capacity;
    use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

    fn cell(id: u64) -> Arc<Cell<KvMachine>> {
        Arc::new(Cell::new(SessionId(id)))
    }

    fn readable(set: &PollSet, timeout: Duration) -> bool {
        let mut fds = [PollFd::new(set, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).unwrap();
        poll(&mut fds, Some(&timeout)).unwrap() == 1
    }

    fn drained(set: &PollSet) -> Vec<Change> {
        let mut changes = Vec::new();
        let count = set.drain(|change| changes.push(change));
        assert_eq!(count, changes.len());
        changes
    }

    #[test]
    fn a_session_is_reported_once_with_its_latest_state() {
        let set = PollSet::new(8).unwrap();
        let (first, second) = (cell(1), cell(2));
        for poll in [KvPoll::WaitingForInput, KvPoll::Transferring] {
            first.set(poll, None);
            set.notify(&first);
        }
        second.set(KvPoll::Success, None);
        set.notify(&second);
        let expected = [
            Change { session: SessionId(1), poll: KvPoll::Transferring, reclaimable: false },
            Change { session: SessionId(2), poll: KvPoll::Success, reclaimable: true },
        ];
        assert_eq!(drained(&set), expected);
        assert_eq!(drained(&set), []);
    }

    /// A scheduler counts its open sessions by what is reported.
    #[test]
    fn what_was_seen_before_its_notification_is_not_reported_again() {
        let set = PollSet::new(8).unwrap();
        let cell = cell(1);
        cell.lend();
        cell.set(KvPoll::Success, None);
        set.notify(&cell);
        // The worker is between the return of the pages and its notification.
        assert!(cell.give_back(Pages::none().into()).is_none());
        let expected = [Change { session: SessionId(1), poll: KvPoll::Success, reclaimable: true }];
        assert_eq!(drained(&set), expected);
        set.notify(&cell);
        assert_eq!(drained(&set), []);
        // Pages that are given all the same, and come back, are news.
        cell.lend();
        assert!(cell.give_back(Pages::none().into()).is_none());
        set.notify(&cell);
        assert_eq!(drained(&set), expected);
    }

    #[test]
    fn the_descriptor_is_readable_exactly_while_there_is_something() {
        let set = PollSet::new(8).unwrap();
        assert!(!readable(&set, Duration::ZERO));
        for _ in 0..3 {
            set.notify(&cell(1));
            set.notify(&cell(2));
            assert!(readable(&set, Duration::ZERO));
            assert!(readable(&set, Duration::ZERO), "level, not edge");
            assert_eq!(set.drain(|_| ()), 2);
            assert!(!readable(&set, Duration::ZERO));
        }
    }

    #[test]
    fn changes_made_while_draining_wait_for_the_next_call_and_signal_it() {
        let set = PollSet::new(8).unwrap();
        let cell = cell(1);
        set.notify(&cell);
        let mut calls = 0;
        set.drain(|_| {
            calls += 1;
            assert_eq!(set.drain(|_| ()), 0, "one drain at a time");
            cell.set(KvPoll::WaitingForInput, None);
            set.notify(&cell);
        });
        assert_eq!(calls, 1);
        assert!(readable(&set, Duration::ZERO));
        assert_eq!(drained(&set).len(), 1);
    }

    #[test]
    fn a_panic_in_a_drain_leaves_the_other_changes_and_a_descriptor_that_wakes_for_them() {
        let set = PollSet::new(8).unwrap();
        set.notify(&cell(1));
        set.notify(&cell(2));
        let drained_by = |f: &dyn Fn(Change)| catch_unwind(AssertUnwindSafe(|| set.drain(f)));
        assert!(drained_by(&|_| panic!("a bug in the scheduler")).is_err());
        assert!(readable(&set, Duration::ZERO));
        assert_eq!(drained(&set).iter().map(|change| change.session.0).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn sessions_without_handle_are_not_reported_and_do_not_fill_the_set() {
        let set = PollSet::new(4).unwrap();
        let kept = cell(0);
        set.notify(&kept);
        for id in 1..100 {
            let gone = cell(id);
            set.notify(&gone);
            gone.close_handle();
        }
        assert_eq!(drained(&set).iter().map(|change| change.session.0).collect::<Vec<_>>(), [0]);
        assert!(!readable(&set, Duration::ZERO));
    }

    /// An event loop that watches edges, as mio and tokio do, is woken once for each write: a drain
    /// that comes right after the write must leave the next change something to write for.
    #[test]
    fn no_change_is_lost_to_a_scheduler_that_watches_edges() {
        let set = Arc::new(PollSet::new(8).unwrap());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &*set, epoll::EventData::new_u64(0), edges).unwrap();
        let seen = Arc::new(AtomicU64::new(0));
        let rounds = 50_000;
        let worker = thread::spawn({
            let (set, seen) = (Arc::clone(&set), Arc::clone(&seen));
            move || {
                for round in 0..rounds {
                    set.notify(&cell(round));
                    while seen.load(Ordering::SeqCst) <= round {
                        thread::yield_now();
                    }
                }
            }
        });
        let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
        while seen.load(Ordering::SeqCst) < rounds {
            let mut events = Vec::with_capacity(1);
            epoll::wait(&epoll, spare_capacity(&mut events), Some(&patience)).unwrap();
            let seen_before = seen.load(Ordering::SeqCst);
            assert!(!events.is_empty(), "asleep with {seen_before} changes seen");
            set.drain(|_| {
                seen.fetch_add(1, Ordering::SeqCst);
            });
        }
        worker.join().unwrap();
    }

    /// One thread drives sessions through their states as a worker does, the other sleeps on the
    /// descriptor alone: a change that is lost, or not signalled, leaves it asleep.
    #[test]
    fn every_change_is_seen_by_a_scheduler_that_sleeps_on_the_descriptor() {
        const SESSIONS: u64 = 64;
        const ROUNDS: u64 = 2_000;
        for _ in 0..ROUNDS / 100 {
            let set = Arc::new(PollSet::new(SESSIONS as usize * 100).unwrap());
            let done = Arc::new(AtomicBool::new(false));
            let worker = thread::spawn({
                let (set, done) = (Arc::clone(&set), Arc::clone(&done));
                move || {
                    for round in 0..100 {
                        let cells: Vec<_> = (0..SESSIONS).map(|n| cell(round * SESSIONS + n)).collect();
                        for poll in [KvPoll::WaitingForInput, KvPoll::Transferring, KvPoll::Success] {
                            for cell in &cells {
                                cell.set(poll, None);
                                set.notify(cell);
                            }
                        }
                    }
                    done.store(true, Ordering::SeqCst);
                }
            });
            let mut ended = 0;
            while ended < 100 * SESSIONS {
                assert!(readable(&set, Duration::from_secs(60)), "asleep with {ended} sessions seen");
                set.drain(|change| ended += u64::from(change.poll.is_terminal()));
            }
            worker.join().unwrap();
            assert!(done.load(Ordering::SeqCst));
            set.drain(|_| ());
            assert!(!readable(&set, Duration::ZERO));
        }
    }
}
