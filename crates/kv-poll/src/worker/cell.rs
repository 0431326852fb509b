//! The status cell: what the handle of a session and the worker share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use kv_core::SessionId;
use kv_core::few::Few;
use kv_core::machine::{Machine, SessionStatus};

use super::waiters::{Awaited, Waiters};

/// One session, as its handle and its worker see the session.
///
/// The worker writes the state, the scheduler reads the state. Resources go to and fro between the two:
/// `lend` counts a resource out, `give_back` counts the resource in again. The session can be reclaimed when
/// the session has ended and no resource is out.
///
/// The state and the number of resources are sequentially consistent: the side that makes the last change
/// before a session can be reclaimed sees that the change was the last, so that the report of the change is
/// never missed.
pub(crate) struct Cell<M: Machine> {
    id: SessionId,
    state: AtomicU8,
    failure: OnceLock<Failure<M>>,
    outstanding: AtomicUsize,
    custody: Mutex<Custody<M::Resource>>,
    handle_gone: AtomicBool,
    abort_wanted: AtomicBool,
    queued: AtomicBool,
    /// What the poll set has reported last: the state, with `RECLAIMABLE` added.
    told: AtomicU8,
    sides_left: AtomicU8,
    /// The tasks that wait for a change of this session.
    waiters: Waiters,
}

/// The bit beside a reported state that says that the session is reclaimable.
const RECLAIMABLE: u8 = 0x80;
/// The value of a session of which nothing was reported yet.
const NOTHING: u8 = 0x7f;

/// Why a session failed.
pub enum Failure<M: Machine> {
    /// The machine ended the session, for this reason.
    Machine(Box<M::Failure>),
    /// The worker stopped while the session was running.
    WorkerStopped {
        /// The state of the session when the worker stopped.
        at: M::Status,
    },
}

impl<M: Machine> Clone for Failure<M> {
    fn clone(&self) -> Failure<M> {
        match self {
            Failure::Machine(failure) => Failure::Machine(failure.clone()),
            Failure::WorkerStopped { at } => Failure::WorkerStopped { at: *at },
        }
    }
}

impl<M: Machine> fmt::Debug for Failure<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Machine(failure) => fmt::Debug::fmt(failure, f),
            Failure::WorkerStopped { at } => f.debug_struct("WorkerStopped").field("at", at).finish(),
        }
    }
}

impl<M: Machine> fmt::Display for Failure<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Machine(failure) => fmt::Display::fmt(failure, f),
            Failure::WorkerStopped { at } => write!(f, "the worker stopped when the session was {at}"),
        }
    }
}

/// The resources that have come back, until the handle takes them.
struct Custody<R> {
    returned: Few<R>,
    /// The handle is gone: resources go to the orphans.
    abandoned: bool,
}

impl<M: Machine> Cell<M> {
    pub(crate) fn new(id: SessionId) -> Cell<M> {
        Cell {
            id,
            state: AtomicU8::new(M::Status::OPENED.to_u8()),
            failure: OnceLock::new(),
            outstanding: AtomicUsize::new(0),
            custody: Mutex::new(Custody { returned: Few::default(), abandoned: false }),
            handle_gone: AtomicBool::new(false),
            abort_wanted: AtomicBool::new(false),
            queued: AtomicBool::new(false),
            told: AtomicU8::new(NOTHING),
            sides_left: AtomicU8::new(0),
            waiters: Waiters::default(),
        }
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// One atomic load. Only valid states are ever stored.
    pub(crate) fn poll(&self) -> M::Status {
        M::Status::from_u8(self.state.load(Ordering::SeqCst)).unwrap_or(M::Status::FAILED)
    }

    /// Why the session failed; `None` unless the session has failed.
    pub(crate) fn failure(&self) -> Option<Failure<M>> {
        self.failure.get().filter(|_| self.is_over()).cloned()
    }

    /// True once the session has its final state.
    pub(crate) fn is_over(&self) -> bool {
        self.poll().is_terminal()
    }

    /// Stores a new state; the failure first, so that a reader that sees the end finds the failure. A final
    /// state stays: false if there was one.
    pub(crate) fn set(&self, poll: M::Status, failure: Option<Failure<M>>) -> bool {
        if self.is_over() {
            return false;
        }
        if let Some(failure) = failure {
            // Two sides may fail a session when the worker stops; the first reason stays.
            let _ = self.failure.set(failure);
        }
        self.state.store(poll.to_u8(), Ordering::SeqCst);
        true
    }

    /// Fails a session whose worker has stopped; false if the session had ended before.
    pub(crate) fn fail_stopped(&self) -> bool {
        self.set(M::Status::FAILED, Some(Failure::WorkerStopped { at: self.poll() }))
    }

    /// Counts a resource out. Comes before the resource is handed over, so that a resource cannot be counted
    /// in before being counted out.
    pub(crate) fn lend(&self) {
        self.outstanding.fetch_add(1, Ordering::SeqCst);
        // The return of the resource is news again.
        self.told.fetch_and(!RECLAIMABLE, Ordering::SeqCst);
    }

    /// Undoes a `lend` whose resource was not handed over after all.
    pub(crate) fn unlend(&self) {
        self.outstanding.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts a resource in. If the handle is gone, the resource is returned: it is an orphan.
    pub(crate) fn give_back(&self, resource: M::Resource) -> Option<M::Resource> {
        let mut custody = self.custody();
        let orphan = if custody.abandoned {
            Some(resource)
        } else {
            custody.returned.push(resource);
            None
        };
        drop(custody);
        self.outstanding.fetch_sub(1, Ordering::SeqCst);
        orphan
    }

    /// True once the session has ended and every resource is back.
    pub(crate) fn is_reclaimable(&self) -> bool {
        self.is_over() && self.outstanding.load(Ordering::SeqCst) == 0
    }

    /// Takes the resources that are back, in the order in which they came.
    pub(crate) fn take_returned(&self) -> Vec<M::Resource> {
        let returned = std::mem::take(&mut self.custody().returned);
        returned.into_iter().collect()
    }

    /// Notes that the handle goes without reclaiming. What is back now is returned here, what comes later by
    /// `give_back`.
    pub(crate) fn abandon(&self) -> Few<M::Resource> {
        let mut custody = self.custody();
        custody.abandoned = true;
        std::mem::take(&mut custody.returned)
    }

    /// Notes that the handle is gone: changes are not reported any more.
    pub(crate) fn close_handle(&self) {
        self.handle_gone.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_handle_gone(&self) -> bool {
        self.handle_gone.load(Ordering::SeqCst)
    }

    /// Remembers that the scheduler wants the session to end; true the first time.
    pub(crate) fn want_abort(&self) -> bool {
        !self.abort_wanted.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_abort_wanted(&self) -> bool {
        self.abort_wanted.load(Ordering::SeqCst)
    }

    /// Marks the session as being in the poll set; true if the session was not.
    pub(crate) fn enqueue(&self) -> bool {
        // AcqRel with `dequeue`: if this finds the mark set, the `dequeue` that clears it comes
        // later and sees everything written before this call.
        !self.queued.swap(true, Ordering::AcqRel)
    }

    /// Clears the mark of `enqueue`. Comes before the state is read.
    pub(crate) fn dequeue(&self) {
        self.queued.swap(false, Ordering::AcqRel);
    }

    /// What a drain reports: the state, and whether the session is reclaimable. `None` if that was reported
    /// before: a change that a drain sees before the notification of the change is notified for nothing.
    /// Drains run one at a time.
    pub(crate) fn news(&self) -> Option<(M::Status, bool)> {
        // In this order: what is reclaimable has its final state.
        let (reclaimable, poll) = (self.is_reclaimable(), self.poll());
        self.tell(poll, reclaimable)
    }

    /// The second half of `news`: notes what was just read. Other threads may come in between.
    fn tell(&self, poll: M::Status, reclaimable: bool) -> Option<(M::Status, bool)> {
        let now = poll.to_u8() | if reclaimable { RECLAIMABLE } else { 0 };
        let before = self.told.swap(now, Ordering::SeqCst);
        if reclaimable && !self.is_reclaimable() {
            // Another thread has lent something in between: its return is news again.
            self.told.fetch_and(!RECLAIMABLE, Ordering::SeqCst);
        }
        (before != now).then_some((poll, reclaimable))
    }

    /// Notes that one side is done with the session; true for the call after which both sides are.
    pub(crate) fn leave(&self, side: Side) -> bool {
        let before = self.sides_left.fetch_or(side as u8, Ordering::AcqRel);
        before != BOTH && before | side as u8 == BOTH
    }

    fn custody(&self) -> MutexGuard<'_, Custody<M::Resource>> {
        self.custody.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Machine> Awaited for Cell<M> {
    fn waiters(&self) -> &Waiters {
        &self.waiters
    }
}

/// The two sides of a cell.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum Side {
    /// The handle that a scheduler holds.
    Handle = 1,
    /// The entry in the worker's table of sessions.
    Worker = 2,
}

const BOTH: u8 = Side::Handle as u8 | Side::Worker as u8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvMachine;
    use crate::worker::tests::pages as some_pages;
    use kv_core::proto::Resource;
    use kv_core::{Cause, KvPoll, Phase, Room, TransferError};

    fn pages(pages: &[u32]) -> Resource {
        some_pages(pages).into()
    }

    fn cell() -> Cell<KvMachine> {
        Cell::new(SessionId(1))
    }

    #[test]
    fn a_final_state_stays_and_so_does_its_reason() {
        let cell = cell();
        assert!(cell.fail_stopped());
        assert!(!cell.set(KvPoll::Success, None));
        assert_eq!(cell.poll(), KvPoll::Failed);
        assert!(matches!(cell.failure(), Some(Failure::WorkerStopped { at: KvPoll::Bootstrapping })));
    }

    #[test]
    fn no_failure_is_shown_before_the_state_says_so() {
        let cell = cell();
        let error = TransferError::new(Room::from(7), Phase::Transfer, Cause::PeerLost);
        cell.failure.set(Failure::Machine(Box::new(error))).unwrap();
        assert!(cell.failure().is_none());
    }

    #[test]
    fn pages_are_reclaimable_only_after_the_end_and_when_all_are_back() {
        let cell = cell();
        cell.lend();
        cell.lend();
        assert_eq!(cell.give_back(pages(&[1, 2])), None);
        assert!(cell.set(KvPoll::Success, None));
        assert!(!cell.is_reclaimable(), "a resource is still out");
        assert_eq!(cell.give_back(pages(&[3])), None);
        assert!(cell.is_reclaimable());
        assert_eq!(cell.take_returned(), [pages(&[1, 2]), pages(&[3])]);
    }

    /// One interleaving, driven by hand: a command lends while a drain is between its two halves.
    #[test]
    fn the_return_of_pages_that_were_lent_in_the_middle_of_a_drain_is_news() {
        let cell = cell();
        assert!(cell.set(KvPoll::Success, None));
        let (reclaimable, poll) = (cell.is_reclaimable(), cell.poll());
        cell.lend();
        assert_eq!(cell.tell(poll, reclaimable), Some((KvPoll::Success, true)));
        assert!(!cell.is_reclaimable(), "the scheduler that was told so gets nothing");
        assert_eq!(cell.give_back(pages(&[1])), None);
        assert_eq!(
            cell.news(),
            Some((KvPoll::Success, true)),
            "nothing else tells the scheduler to try again"
        );
        assert_eq!(cell.news(), None);
    }

    #[test]
    fn abandoned_pages_come_out_as_orphans_early_and_late() {
        let cell = cell();
        cell.lend();
        cell.lend();
        assert_eq!(cell.give_back(pages(&[1])), None);
        assert_eq!(*cell.abandon(), [pages(&[1])]);
        assert_eq!(cell.give_back(pages(&[2])), Some(pages(&[2])));
    }

    #[test]
    fn the_second_side_to_leave_is_told_so_once() {
        let cell = cell();
        assert!(!cell.leave(Side::Worker));
        assert!(!cell.leave(Side::Worker));
        assert!(cell.leave(Side::Handle));
        assert!(!cell.leave(Side::Handle));
    }
}
