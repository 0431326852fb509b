//! One ready event for several ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{ReadyEvent, ReadyEventError};

use crate::worker::discard;

/// A ready event that the workers of all ranks ask, and that says the same to each of them once it has passed
/// or failed.
///
/// One worker asks the caller's event at a time, and no lock is held meanwhile: the event may take its time
/// or use the group. A worker that comes in between hears "not yet", and asks again later.
#[derive(Clone)]
pub(super) struct SharedReadyEvent(Arc<Mutex<State>>);

struct State {
    /// The caller's event; `None` while a worker asks it, and after its last answer.
    ready_event: Option<Box<dyn ReadyEvent>>,
    /// The last answer: everything but "not yet" is one.
    answer: Option<Result<bool, ReadyEventError>>,
}

impl Drop for State {
    fn drop(&mut self) {
        discard(self.ready_event.take());
    }
}

impl SharedReadyEvent {
    pub(super) fn new(ready_event: Box<dyn ReadyEvent>) -> SharedReadyEvent {
        SharedReadyEvent(Arc::new(Mutex::new(State { ready_event: Some(ready_event), answer: None })))
    }

    /// The event as the caller gave it, if nothing else holds a clone of this.
    pub(super) fn unshare(self) -> Box<dyn ReadyEvent> {
        let SharedReadyEvent(mut state) = self;
        let alone = Arc::get_mut(&mut state);
        let given = alone
            .and_then(|state| state.get_mut().unwrap_or_else(PoisonError::into_inner).ready_event.take());
        given.unwrap_or_else(|| Box::new(SharedReadyEvent(state)))
    }

    /// True once the last answer is known; the caller's event is gone then.
    pub(super) fn is_answered(&self) -> bool {
        self.lock().answer.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics with the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadyEvent for SharedReadyEvent {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        let taken = {
            let mut state = self.lock();
            if let Some(answer) = state.answer {
                return answer;
            }
            state.ready_event.take()
        };
        let Some(mut ready_event) = taken else { return Ok(false) };
        let answer = catch_unwind(AssertUnwindSafe(|| ready_event.passed()));
        let answer = answer.unwrap_or(Err(ReadyEventError::Panicked));
        if answer == Ok(false) {
            self.lock().ready_event = Some(ready_event);
        } else {
            self.lock().answer = Some(answer);
            discard(Some(ready_event));
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An announcement that is refused is given back as it was, however often it is said again.
    #[test]
    fn a_ready_event_that_nobody_shares_comes_back_without_a_wrapping() {
        let answers = [Ok(false), Ok(true)];
        let mut asked = 0;
        let ready_event: Box<dyn ReadyEvent> = Box::new(move || {
            asked += 1;
            answers[asked % 2]
        });
        let address = std::ptr::from_ref(&*ready_event).cast::<u8>();
        let shared = SharedReadyEvent::new(ready_event);
        drop(shared.clone());
        assert_eq!(std::ptr::from_ref(&*shared.unshare()).cast::<u8>(), address);
    }

    #[test]
    fn every_rank_hears_the_same_answer_and_the_ready_event_is_not_asked_again() {
        let asked = Arc::new(Mutex::new(0));
        let counter = Arc::clone(&asked);
        let ready_event = move || {
            let mut asked = counter.lock().unwrap();
            *asked += 1;
            if *asked < 3 { Ok(false) } else { Err(ReadyEventError::Device { code: *asked }) }
        };
        let mut first = SharedReadyEvent::new(Box::new(ready_event));
        let mut second = first.clone();
        assert_eq!((first.passed(), second.passed()), (Ok(false), Ok(false)));
        assert!(!first.is_answered());
        let error = Err(ReadyEventError::Device { code: 3 });
        assert_eq!((first.passed(), second.passed(), first.passed()), (error, error, error));
        assert!(first.is_answered());
        assert_eq!(*asked.lock().unwrap(), 3);
    }

    /// A ready event whose destructor panics.
    struct Broken(Result<bool, ReadyEventError>);

    impl ReadyEvent for Broken {
        fn passed(&mut self) -> Result<bool, ReadyEventError> {
            self.0
        }
    }

    impl Drop for Broken {
        fn drop(&mut self) {
            panic!("a bug in the destructor of a ready event");
        }
    }

    #[test]
    fn a_destructor_that_panics_changes_no_answer_and_leaves_no_drop_undone() {
        let mut passed = SharedReadyEvent::new(Box::new(Broken(Ok(true))));
        assert_eq!((passed.passed(), passed.passed()), (Ok(true), Ok(true)));
        let unasked = SharedReadyEvent::new(Box::new(Broken(Ok(false))));
        assert_eq!(unasked.clone().passed(), Ok(false));
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(unasked)));
        assert!(dropped.is_ok());
    }

    #[test]
    fn a_ready_event_that_panics_fails_every_rank_and_is_not_asked_again() {
        let mut asked = 0;
        let mut first = SharedReadyEvent::new(Box::new(move || {
            asked += 1;
            panic!("asked {asked} times")
        }));
        let mut second = first.clone();
        let panicked = Err(ReadyEventError::Panicked);
        assert_eq!((first.passed(), second.passed(), first.passed()), (panicked, panicked, panicked));
    }
}
