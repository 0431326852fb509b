//! One source of a receiving session: a rank of the sending engine that writes into this rank, or
//! lets this rank read.
//!
//! | source | from | when |
//! |---|---|---|
//! | `Meeting` | – | the peer is not up yet |
//! | `Met` | `Meeting` | the hello was answered |
//! | `Open` | `Met` | the registration, or the acquire message, is sent until it is acknowledged |
//! | `Open` | `Open` | the peer has forgotten the conversation: the registration is sent again, as a new attempt |
//! | `Closing` | `Open` | the session failed: the abort is sent until it is acknowledged |
//! | `Closing` | `Met` | the session failed before its registration: an abort is sent in place of it |
//! | `Closing` | `Closing` | something is heard about the attempt: the abort need not be said again in another conversation |
//! | `Over` | `Meeting`, `Met` | the session failed, and the source was told nothing that it must stop |
//! | `Over` | `Open` | all parts are in place, everything is read, the source failed and is quiet, or a peer that granted a lease forgot the conversation |
//! | `Over` | `Closing` | the abort was acknowledged, the source failed and is quiet, the peer forgot the conversation, is proven dead and its wire quiet, or is fenced off; of a read, when the abort is said |

use super::reading::Reading;
use crate::id::{Attempt, PeerId};
use crate::proto::run_set::RunSet;
use crate::time::Time;

/// A source, and what has arrived from it.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) peer: PeerId,
    state: State,
    /// When something was last heard about the attempt, or when the source was chosen.
    last_news: Time,
    pub(super) parts: RunSet,
    /// How many parts there are in all; `None` until the source has told the number.
    pub(super) total: Option<u32>,
    /// The cache groups that the source has left out.
    pub(super) skipped: Vec<u16>,
    /// In a session that reads: the lease, once it has been granted.
    pub(super) reading: Option<Reading>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Meeting,
    Met,
    Open {
        attempt: Attempt,
        /// True if the peer has the registration, or the acquire message.
        acknowledged: bool,
    },
    Closing {
        attempt: Attempt,
        /// When the session failed, if the peer has not spoken of the attempt.
        unanswered: Option<Time>,
    },
    Over,
}

/// The state that a source had when its session failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closes {
    /// The source had not been met.
    Meeting,
    /// The source had been met, and knows nothing of the session.
    Met,
    /// The source had this attempt, which is closing now.
    Open(Attempt),
    /// The source is closing already, or is over.
    Already,
}

impl Source {
    pub(super) fn new(peer: PeerId, now: Time) -> Source {
        Source {
            peer,
            state: State::Meeting,
            last_news: now,
            parts: RunSet::default(),
            total: None,
            skipped: Vec::new(),
            reading: None,
        }
    }

    // ---- what it is -----------------------------------------------------------------------------

    pub(super) fn is_meeting(&self) -> bool {
        self.state == State::Meeting
    }

    pub(super) fn is_met(&self) -> bool {
        self.state == State::Met
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    pub(super) fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The source's attempt, while it is open.
    pub(super) fn open_attempt(&self) -> Option<Attempt> {
        match self.state {
            State::Open { attempt, .. } => Some(attempt),
            _ => None,
        }
    }

    /// The source's attempt, while it is open and the peer has not acknowledged it.
    pub(super) fn unacknowledged(&self) -> Option<Attempt> {
        match self.state {
            State::Open { attempt, acknowledged: false } => Some(attempt),
            _ => None,
        }
    }

    /// The source's attempt, while the peer has not said that it writes no more.
    pub(super) fn closing_attempt(&self) -> Option<Attempt> {
        match self.state {
            State::Closing { attempt, .. } => Some(attempt),
            _ => None,
        }
    }

    /// When the session failed, if the attempt is closing and the peer has not spoken of it.
    pub(super) fn closes_unanswered_since(&self) -> Option<Time> {
        match self.state {
            State::Closing { unanswered, .. } => unanswered,
            _ => None,
        }
    }

    /// When something was last heard about the attempt, if the peer has it and no heartbeats are
    /// sent for it.
    pub(super) fn quiet_since(&self) -> Option<Time> {
        let waits = matches!(self.state, State::Open { acknowledged: true, .. }) && self.reading.is_none();
        waits.then_some(self.last_news)
    }

    // ---- what becomes of it ---------------------------------------------------------------------

    /// The peer has answered the hello.
    pub(super) fn meet(&mut self) {
        if self.state == State::Meeting {
            self.state = State::Met;
        }
    }

    /// The source's attempt is opened.
    pub(super) fn open(&mut self, attempt: Attempt, now: Time) {
        self.state = State::Open { attempt, acknowledged: false };
        self.last_news = now;
    }

    /// The peer has forgotten the attempt. Another attempt takes its place, of which nothing has
    /// arrived yet.
    pub(super) fn reopen(&mut self, attempt: Attempt) {
        self.state = State::Open { attempt, acknowledged: false };
        self.parts = RunSet::default();
        self.total = None;
    }

    /// Something was heard about the attempt: the peer has it.
    pub(super) fn hear(&mut self, now: Time) {
        match &mut self.state {
            State::Open { acknowledged, .. } => *acknowledged = true,
            State::Closing { unanswered, .. } => *unanswered = None,
            State::Meeting | State::Met | State::Over => {}
        }
        self.last_news = now;
    }

    /// The session has failed. A source that was not open is over, unless it is
    /// [aborted](Source::abort) afterwards.
    pub(super) fn close(&mut self, now: Time) -> Closes {
        let (state, closes) = match self.state {
            State::Meeting => (State::Over, Closes::Meeting),
            State::Met => (State::Over, Closes::Met),
            State::Open { attempt, acknowledged } => (
                State::Closing { attempt, unanswered: (!acknowledged).then_some(now) },
                Closes::Open(attempt),
            ),
            State::Closing { .. } | State::Over => (self.state, Closes::Already),
        };
        self.state = state;
        closes
    }

    /// The session has failed before it registered: this attempt tells the source so.
    pub(super) fn abort(&mut self, attempt: Attempt, now: Time) {
        self.state = State::Closing { attempt, unanswered: Some(now) };
    }

    /// It is certain that the source writes no more, or the source has nothing to do with the
    /// session. Returns its attempt, if it had one that was not over.
    pub(super) fn end(&mut self) -> Option<Attempt> {
        let attempt = self.open_attempt().or(self.closing_attempt());
        self.state = State::Over;
        attempt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Attempt = Attempt(1);
    const TWO: Attempt = Attempt(2);

    fn in_state(state: State) -> Source {
        Source { state, ..Source::new(PeerId(1), Time::ZERO) }
    }

    /// The table at the top, by state and event.
    #[test]
    fn each_state_of_a_source_takes_each_event_as_the_table_says() {
        let open = State::Open { attempt: ONE, acknowledged: false };
        let heard = State::Open { attempt: ONE, acknowledged: true };
        let (failed_at, later) = (Time::from_nanos(5), Time::from_nanos(6));
        let unanswered = State::Closing { attempt: ONE, unanswered: Some(failed_at) };
        let closing = State::Closing { attempt: ONE, unanswered: None };
        let close = |state| {
            let mut source = in_state(state);
            let closes = source.close(failed_at);
            assert_eq!(source.close(later), Closes::Already);
            (closes, source.state)
        };
        assert_eq!(close(State::Meeting), (Closes::Meeting, State::Over));
        assert_eq!(close(State::Met), (Closes::Met, State::Over));
        assert_eq!(close(open), (Closes::Open(ONE), unanswered));
        assert_eq!(close(heard), (Closes::Open(ONE), closing));
        assert_eq!(close(closing), (Closes::Already, closing));
        assert_eq!(close(State::Over), (Closes::Already, State::Over));
        for (state, attempt) in [
            (State::Meeting, None),
            (State::Met, None),
            (open, Some(ONE)),
            (heard, Some(ONE)),
            (unanswered, Some(ONE)),
            (closing, Some(ONE)),
            (State::Over, None),
        ] {
            let mut source = in_state(state);
            source.meet();
            assert_eq!(source.state, if state == State::Meeting { State::Met } else { state });
            let mut source = in_state(state);
            source.hear(Time::from_nanos(7));
            let after = match state {
                State::Open { .. } => heard,
                State::Closing { .. } => closing,
                state => state,
            };
            assert_eq!((source.state, source.closes_unanswered_since()), (after, None));
            assert_eq!(in_state(state).closes_unanswered_since(), (state == unanswered).then_some(failed_at));
            let mut source = in_state(state);
            assert_eq!((source.end(), source.is_over()), (attempt, true));
        }
        let mut source = in_state(heard);
        source.parts.insert(0, 3);
        source.reopen(TWO);
        assert_eq!((source.unacknowledged(), source.parts.len()), (Some(TWO), 0));
        source.abort(TWO, later);
        assert_eq!((source.closing_attempt(), source.open_attempt()), (Some(TWO), None));
        assert_eq!(source.closes_unanswered_since(), Some(later));
    }
}
