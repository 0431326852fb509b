//! The end of a history: the world runs on without faults until nothing happens any more.

use super::choice::Choice;
use super::search::Histories;
use super::small::Small;
use crate::kv::fact::Fact;
use crate::violation::Violation;

/// More events than any session can cause before its deadline.
const EVENTS: usize = 5000;

impl Small {
    /// Lets the world run to its end, in order and without faults. Then checks that all sessions have ended,
    /// all pages are back, and nothing is left in the tables of the hosts. With `lossy`, the frames in flight
    /// are lost first.
    pub(super) fn run_to_rest(mut self, lossy: bool) -> Result<(), Violation> {
        if lossy {
            self.stage.wire.clear();
        }
        // What is given from now on is not lost for want of room.
        self.stage.frames = usize::MAX;
        for _ in 0..EVENTS {
            let Some(choice) = self.next_in_order() else {
                // A result that is kept for a reader whose last word was lost makes way when the room is needed.
                self.stage.world.settled(!lossy);
                return self.stage.settle();
            };
            self.apply(choice)?;
        }
        self.stage.world.tell(&Fact::Restless);
        self.stage.settle()
    }

    fn next_in_order(&self) -> Option<Choice> {
        if !self.sent {
            return Some(Choice::Send);
        }
        if !self.stage.proofs.is_empty() {
            return Some(Choice::Gone(0));
        }
        if let Some(slot) =
            (1..self.stage.lives.len()).find(|&slot| self.stage.is_alive(slot) && !self.is_init(slot))
        {
            return Some(Choice::Init(slot));
        }
        if !self.stage.wire.is_empty() {
            return Some(Choice::Deliver { letter: 0, again: false });
        }
        if let Some((read, it)) = self.stage.reads().next() {
            return Some(match (it.moved == it.pieces.len(), self.stage.can_copy(it)) {
                (true, _) => Choice::End(read),
                (false, true) => Choice::Copy(read),
                (false, false) => Choice::Fail(read),
            });
        }
        self.stage.first_timer().map(Choice::Ring)
    }
}
