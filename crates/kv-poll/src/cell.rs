//! The status cell: what a session's handle and its worker share.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use kv_core::{Cause, KvPoll, Phase, Room, SessionId, TransferError};

use crate::token::Token;

/// One session, seen from both sides.
///
/// The worker writes the state, the scheduler reads it. Between them go tokens of pages and items: `lend` counts
/// one out, `give_back` counts it in again; the session can be reclaimed when it has ended and
/// none is out.
///
/// State, tokens and the reclaimability computed from them are sequentially consistent: whoever
/// changes the last one of them sees that it was the last, so that its report is never missed.
#[derive(Debug)]
pub(crate) struct Cell {
    id: SessionId,
    room: Room,
    state: AtomicU8,
    failure: OnceLock<Box<TransferError>>,
    outstanding: AtomicUsize,
    custody: Mutex<Custody>,
    handle_gone: AtomicBool,
    abort_wanted: AtomicBool,
    queued: AtomicBool,
    /// What the poll set has reported last: the state, and `RECLAIMABLE`.
    told: AtomicU8,
    sides_left: AtomicU8,
}

/// Beside a state that was told: that the session is reclaimable.
const RECLAIMABLE: u8 = 0x80;
/// Nothing was told.
const NOTHING: u8 = 0x7f;

/// The tokens that have come back, until somebody takes them.
#[derive(Debug, Default)]
struct Custody {
    returned: Vec<Token>,
    /// Nobody will: they go to the orphans.
    abandoned: bool,
}

impl Cell {
    pub(crate) fn new(id: SessionId, room: Room) -> Cell {
        Cell {
            id,
            room,
            state: AtomicU8::new(KvPoll::Bootstrapping as u8),
            failure: OnceLock::new(),
            outstanding: AtomicUsize::new(0),
            custody: Mutex::default(),
            handle_gone: AtomicBool::new(false),
            abort_wanted: AtomicBool::new(false),
            queued: AtomicBool::new(false),
            told: AtomicU8::new(NOTHING),
            sides_left: AtomicU8::new(0),
        }
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// One atomic load. Only valid states are ever stored.
    pub(crate) fn poll(&self) -> KvPoll {
        KvPoll::from_u8(self.state.load(Ordering::SeqCst)).unwrap_or(KvPoll::Failed)
    }

    pub(crate) fn failure(&self) -> Option<TransferError> {
        match self.poll() {
            KvPoll::Failed => self.failure.get().map(|error| (**error).clone()),
            _ => None,
        }
    }

    /// Stores a new state; the failure first, so that whoever sees `Failed` finds it. A final
    /// state stays: false if there was one.
    pub(crate) fn set(&self, poll: KvPoll, failure: Option<Box<TransferError>>) -> bool {
        if self.poll().is_terminal() {
            return false;
        }
        if let Some(failure) = failure {
            // Two sides may fail a session when the worker stops; the first reason stays.
            let _ = self.failure.set(failure);
        }
        self.state.store(poll as u8, Ordering::SeqCst);
        true
    }

    /// Ends a session whose worker is no more.
    pub(crate) fn fail_stopped(&self) -> bool {
        let phase = match self.poll() {
            KvPoll::Bootstrapping => Phase::Bootstrap,
            KvPoll::WaitingForInput => Phase::Rendezvous,
            _ => Phase::Transfer,
        };
        let (room, cause) = (self.room.clone(), Cause::WorkerStopped);
        self.set(KvPoll::Failed, Some(Box::new(TransferError { room, peer: None, phase, cause })))
    }

    /// Counts a token out. Before it is handed over, so that it cannot be back before it was gone.
    pub(crate) fn lend(&self) {
        self.outstanding.fetch_add(1, Ordering::SeqCst);
        // When it is back, that is news.
        self.told.fetch_and(!RECLAIMABLE, Ordering::SeqCst);
    }

    /// Takes back a `lend` whose token was not handed over after all.
    pub(crate) fn unlend(&self) {
        self.outstanding.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts a token in. If the handle is gone, it comes straight back out: an orphan.
    pub(crate) fn give_back(&self, token: Token) -> Option<Token> {
        let mut custody = self.custody();
        let orphan = if custody.abandoned {
            Some(token)
        } else {
            custody.returned.push(token);
            None
        };
        drop(custody);
        self.outstanding.fetch_sub(1, Ordering::SeqCst);
        orphan
    }

    /// True once the session has ended and every token is back.
    pub(crate) fn is_reclaimable(&self) -> bool {
        self.poll().is_terminal() && self.outstanding.load(Ordering::SeqCst) == 0
    }

    /// The tokens that are back, in the order in which they came.
    pub(crate) fn take_returned(&self) -> Vec<Token> {
        std::mem::take(&mut self.custody().returned)
    }

    /// The handle goes without reclaiming: what is back now is handed out, what comes later will
    /// be by `give_back`.
    pub(crate) fn abandon(&self) -> Vec<Token> {
        let mut custody = self.custody();
        custody.abandoned = true;
        std::mem::take(&mut custody.returned)
    }

    /// Marks that nobody is interested in changes any more.
    pub(crate) fn close_handle(&self) {
        self.handle_gone.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_handle_gone(&self) -> bool {
        self.handle_gone.load(Ordering::SeqCst)
    }

    /// Remembers that the scheduler wants an end; true the first time.
    pub(crate) fn want_abort(&self) -> bool {
        !self.abort_wanted.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_abort_wanted(&self) -> bool {
        self.abort_wanted.load(Ordering::SeqCst)
    }

    /// Marks the cell as standing in the poll set; true if it did not yet.
    pub(crate) fn enqueue(&self) -> bool {
        // AcqRel with `dequeue`: if this finds the mark set, the `dequeue` that clears it comes
        // later and sees everything written before this call.
        !self.queued.swap(true, Ordering::AcqRel)
    }

    /// Clears the mark. To be called before the state is read.
    pub(crate) fn dequeue(&self) {
        self.queued.swap(false, Ordering::AcqRel);
    }

    /// What a drain reports; `None` if it has reported that already. A change that was seen before its
    /// notification leaves the session in the set for nothing. Drains run one at a time.
    pub(crate) fn news(&self) -> Option<(KvPoll, bool)> {
        let (reclaimable, poll) = (self.is_reclaimable(), self.poll());
        let now = poll as u8 | if reclaimable { RECLAIMABLE } else { 0 };
        (self.told.swap(now, Ordering::SeqCst) != now).then_some((poll, reclaimable))
    }

    /// One side is done with the session; true for the call after which both are.
    pub(crate) fn leave(&self, side: Side) -> bool {
        let before = self.sides_left.fetch_or(side as u8, Ordering::AcqRel);
        before != BOTH && before | side as u8 == BOTH
    }

    fn custody(&self) -> MutexGuard<'_, Custody> {
        self.custody.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The two sides of a cell.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum Side {
    /// The scheduler's handle.
    Handle = 1,
    /// The worker's table.
    Worker = 2,
}

const BOTH: u8 = Side::Handle as u8 | Side::Worker as u8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::tests::pages as some_pages;

    fn pages(pages: &[u32]) -> Token {
        some_pages(pages).into()
    }

    fn cell() -> Cell {
        Cell::new(SessionId(1), Room::from(7))
    }

    #[test]
    fn a_final_state_stays_and_so_does_its_reason() {
        let cell = cell();
        assert!(cell.fail_stopped());
        let reason = cell.failure();
        assert_eq!(reason.as_ref().map(|error| error.cause.clone()), Some(Cause::WorkerStopped));
        assert!(!cell.set(KvPoll::Success, None));
        assert_eq!((cell.poll(), cell.failure()), (KvPoll::Failed, reason));
    }

    #[test]
    fn no_failure_is_shown_before_the_state_says_so() {
        let cell = cell();
        let error =
            TransferError { room: Room::from(7), peer: None, phase: Phase::Transfer, cause: Cause::PeerLost };
        cell.failure.set(Box::new(error)).unwrap();
        assert_eq!(cell.failure(), None);
    }

    #[test]
    fn pages_are_reclaimable_only_after_the_end_and_when_all_are_back() {
        let cell = cell();
        cell.lend();
        cell.lend();
        assert_eq!(cell.give_back(pages(&[1, 2])), None);
        assert!(cell.set(KvPoll::Success, None));
        assert!(!cell.is_reclaimable(), "a token is still out");
        assert_eq!(cell.give_back(pages(&[3])), None);
        assert!(cell.is_reclaimable());
        assert_eq!(cell.take_returned(), [pages(&[1, 2]), pages(&[3])]);
    }

    #[test]
    fn abandoned_pages_come_out_as_orphans_early_and_late() {
        let cell = cell();
        cell.lend();
        cell.lend();
        assert_eq!(cell.give_back(pages(&[1])), None);
        assert_eq!(cell.abandon(), [pages(&[1])]);
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
