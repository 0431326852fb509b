//! One ready event for several ranks.

use std::sync::{Arc, Mutex, PoisonError};

use kv_core::{ReadyEvent, ReadyEventError};

/// A ready event that every rank asks, and that says the same to all once it has passed or failed.
#[derive(Clone)]
pub(super) struct SharedReadyEvent(Arc<Mutex<State>>);

struct State {
    ready_event: Box<dyn ReadyEvent>,
    answer: Option<Result<bool, ReadyEventError>>,
}

impl SharedReadyEvent {
    pub(super) fn new(ready_event: Box<dyn ReadyEvent>) -> SharedReadyEvent {
        SharedReadyEvent(Arc::new(Mutex::new(State { ready_event, answer: None })))
    }
}

impl SharedReadyEvent {
    /// The fence as it was given, if nobody shares it any more.
    pub(super) fn unshare(self) -> Box<dyn ReadyEvent> {
        match Arc::try_unwrap(self.0) {
            Ok(state) => state.into_inner().unwrap_or_else(PoisonError::into_inner).ready_event,
            Err(shared) => Box::new(SharedReadyEvent(shared)),
        }
    }
}

impl ReadyEvent for SharedReadyEvent {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        // Where it panicked once it may panic again: that fails the other ranks' sessions as well.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = state.answer {
            return answer;
        }
        let answer = state.ready_event.passed();
        if answer != Ok(false) {
            state.answer = Some(answer);
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
        let error = Err(ReadyEventError::Device { code: 3 });
        assert_eq!((first.passed(), second.passed(), first.passed()), (error, error, error));
        assert_eq!(*asked.lock().unwrap(), 3);
    }
}
