//! One event: a header that all services share, and what happened in the words of one of them.

use std::convert::Infallible;
use std::fmt;

use crate::error::Phase;
use crate::id::{Attempt, PeerId, SessionId};
use crate::time::Time;

/// One thing that happened in a machine. Its text is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event<W> {
    /// When, by the worker's clock: the time of the input that led to it.
    pub at: Time,
    /// Whom it concerns.
    pub who: Who,
    /// What happened.
    pub what: W,
    /// How many events between the last one that was fetched and this one were lost, because nobody fetched them
    /// in time.
    pub missed: u64,
}

/// Whom an event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Who {
    /// The session of this worker.
    pub session: Option<SessionId>,
    /// The peer, by the number that this worker's machine gave to it when they met.
    pub peer: Option<PeerId>,
    /// The attempt of the receiving side at the sending one, in the receiver's numbers.
    pub attempt: Option<Attempt>,
}

/// What happens in the machines of one service. Its text is a sentence about whoever the event concerns,
/// without a subject and without a full stop: `hears that the registration has arrived`.
pub trait What: fmt::Display + fmt::Debug + Clone + Send + 'static {
    /// The part of a session's life that this belongs to; `None` for what belongs to none, such as the end of
    /// a peer.
    fn phase(&self) -> Option<Phase> {
        None
    }
}

impl What for Infallible {}

impl<W: What> Event<W> {
    /// The part of a session's life that the event belongs to; `None` for what belongs to none.
    pub fn phase(&self) -> Option<Phase> {
        self.what.phase()
    }
}

impl<W: What> fmt::Display for Event<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.at.as_nanos() / 1000;
        write!(f, "{}.{:06} s", micros / 1_000_000, micros % 1_000_000)?;
        if let Some(session) = self.who.session {
            write!(f, ", session {session}")?;
        }
        if let Some(peer) = self.who.peer {
            write!(f, ", peer {peer}")?;
        }
        if let Some(attempt) = self.who.attempt {
            write!(f, ", attempt {attempt}")?;
        }
        if let Some(phase) = self.phase() {
            write!(f, ", {phase}")?;
        }
        write!(f, ": {}", self.what)?;
        match self.missed {
            0 => Ok(()),
            missed => write!(f, " ({missed} events before this one are lost)"),
        }
    }
}

impl From<SessionId> for Who {
    fn from(session: SessionId) -> Who {
        Who { session: Some(session), ..Who::default() }
    }
}

impl From<PeerId> for Who {
    fn from(peer: PeerId) -> Who {
        Who { peer: Some(peer), ..Who::default() }
    }
}

impl From<(SessionId, PeerId)> for Who {
    fn from((session, peer): (SessionId, PeerId)) -> Who {
        Who { session: Some(session), peer: Some(peer), attempt: None }
    }
}

impl From<(SessionId, PeerId, Attempt)> for Who {
    fn from((session, peer, attempt): (SessionId, PeerId, Attempt)) -> Who {
        Who { session: Some(session), peer: Some(peer), attempt: Some(attempt) }
    }
}
