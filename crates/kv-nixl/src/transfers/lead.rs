//! How far requests may run ahead of the peer's thread.
//!
//! Over TCP, UCX confirms a write while the peer's thread is still inside NIXL's progress, which goes on for as long as
//! something comes: writers that go by UCX's confirmations alone keep that thread there, and it serves nobody else. So a
//! writer asks, by a number, whether the thread has come out, and runs ahead of the last answer by a few slices only. All
//! writers of a peer share its speed, and a slice takes each of them about the same time: so the peer's thread is kept
//! for a few times that time, however many write.

use std::time::{Duration, Instant};

use crate::transfers::speed::SLICE;

/// How far requests run ahead, as a multiple of what may be under way: far enough that an answer is there before the way
/// is empty.
const MOST: u64 = 2;
/// How long an answer may take. A peer that takes longer may have forgotten this side: until it answers again, it is not
/// waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// Requests to one peer whose thread takes part in them, counted by their shares of a slice's time.
#[derive(Debug, Default)]
pub(crate) struct Lead {
    begun: u64,
    asked: u64,
    answered: u64,
    /// Since when the peer owes an answer; `None` if it owes none.
    since: Option<Instant>,
    /// The peer has answered the last question in time: it can be waited for.
    answers: bool,
}

impl Lead {
    /// True if another request may begin, where so much may be under way at a time.
    pub(crate) fn has_room(&self, window: u64) -> bool {
        !self.answers || self.begun - self.answered < MOST * window
    }

    /// Counts a request that has begun. Returns the number to ask the peer for, once in a slice.
    pub(crate) fn begin(&mut self, load: u64, now: Instant) -> Option<u64> {
        self.begun += load;
        if self.begun - self.asked < SLICE {
            return None;
        }
        self.asked = self.begun;
        self.since.get_or_insert(now);
        Some(self.asked)
    }

    /// Takes the peer's answer. A number that was not asked is not believed.
    pub(crate) fn answer(&mut self, number: u64, now: Instant) {
        if number > self.answered && number <= self.asked {
            self.answered = number;
            self.answers = true;
            self.since = (number < self.asked).then_some(now);
        }
    }

    /// Gives up waiting for an answer that is late. True if it was waited for.
    pub(crate) fn give_up(&mut self, now: Instant) -> bool {
        let is_late = self.since.is_some_and(|since| now.saturating_duration_since(since) >= PATIENCE);
        is_late && std::mem::take(&mut self.answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_answers_is_never_more_than_some_slices_behind() {
        let (mut lead, now) = (Lead::default(), Instant::now());
        let window = 2 * SLICE;
        assert!(lead.begin(10 * SLICE, now).is_some() && lead.has_room(window), "nothing is known of it yet");
        lead.answer(10 * SLICE + 1, now);
        assert!(lead.has_room(window) && lead.answered == 0, "nobody has asked for that");
        lead.answer(10 * SLICE, now);
        let mut asked = 0;
        let mut begun = 0;
        while lead.has_room(window) && begun <= MOST * window {
            asked = lead.begin(SLICE / 2, now).unwrap_or(asked);
            begun += SLICE / 2;
        }
        assert_eq!(begun, MOST * window);
        lead.answer(asked - SLICE, now);
        assert!(lead.has_room(window));
        lead.answer(asked, now);
        assert_eq!(lead.since, None);
    }

    #[test]
    fn a_peer_that_does_not_answer_in_time_is_not_waited_for_until_it_does() {
        let (mut lead, now) = (Lead::default(), Instant::now());
        let first = lead.begin(SLICE, now).unwrap();
        lead.answer(first, now);
        let last = lead.begin(10 * SLICE, now).unwrap();
        assert!(!lead.has_room(SLICE));
        assert!(!lead.give_up(now + PATIENCE / 2));
        assert!(lead.give_up(now + PATIENCE) && lead.has_room(SLICE));
        assert!(!lead.give_up(now + 2 * PATIENCE), "once");
        lead.answer(last, now + 2 * PATIENCE);
        lead.begin(10 * SLICE, now + 2 * PATIENCE);
        assert!(!lead.has_room(SLICE));
    }
}
