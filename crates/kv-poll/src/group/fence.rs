//! One fence for several ranks.

use std::sync::{Arc, Mutex, PoisonError};

use kv_core::{Fence, FenceError};

/// A fence that every rank asks, and that says the same to all once it has passed or failed.
#[derive(Clone)]
pub(super) struct SharedFence(Arc<Mutex<State>>);

struct State {
    fence: Box<dyn Fence>,
    answer: Option<Result<bool, FenceError>>,
}

impl SharedFence {
    pub(super) fn new(fence: Box<dyn Fence>) -> SharedFence {
        SharedFence(Arc::new(Mutex::new(State { fence, answer: None })))
    }
}

impl SharedFence {
    /// The fence as it was given, if nobody shares it any more.
    pub(super) fn unshare(self) -> Box<dyn Fence> {
        match Arc::try_unwrap(self.0) {
            Ok(state) => state.into_inner().unwrap_or_else(PoisonError::into_inner).fence,
            Err(shared) => Box::new(SharedFence(shared)),
        }
    }
}

impl Fence for SharedFence {
    fn passed(&mut self) -> Result<bool, FenceError> {
        // Where it panicked once it may panic again: that fails the other ranks' sessions as well.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = state.answer {
            return answer;
        }
        let answer = state.fence.passed();
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
    fn a_fence_that_nobody_shares_comes_back_without_a_wrapping() {
        let answers = [Ok(false), Ok(true)];
        let mut asked = 0;
        let fence: Box<dyn Fence> = Box::new(move || {
            asked += 1;
            answers[asked % 2]
        });
        let address = std::ptr::from_ref(&*fence).cast::<u8>();
        let shared = SharedFence::new(fence);
        drop(shared.clone());
        assert_eq!(std::ptr::from_ref(&*shared.unshare()).cast::<u8>(), address);
    }

    #[test]
    fn every_rank_hears_the_same_answer_and_the_fence_is_not_asked_again() {
        let asked = Arc::new(Mutex::new(0));
        let counter = Arc::clone(&asked);
        let fence = move || {
            let mut asked = counter.lock().unwrap();
            *asked += 1;
            if *asked < 3 { Ok(false) } else { Err(FenceError::Device { code: *asked }) }
        };
        let mut first = SharedFence::new(Box::new(fence));
        let mut second = first.clone();
        assert_eq!((first.passed(), second.passed()), (Ok(false), Ok(false)));
        let error = Err(FenceError::Device { code: 3 });
        assert_eq!((first.passed(), second.passed(), first.passed()), (error, error, error));
        assert_eq!(*asked.lock().unwrap(), 3);
    }
}
