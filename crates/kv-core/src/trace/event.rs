//! One event: a header that all services share, and a description in the words of one service.

use std::convert::Infallible;
use std::fmt;

use crate::error::Phase;
use crate::id::{Attempt, PeerId, SessionId};
use crate::time::Time;

/// One thing that happened in a machine. As text, an event is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event<W> {
    /// When the event happened, by the worker's clock: the time of the input that led to the event.
    pub at: Time,
    /// The session, the peer and the attempt that the event concerns.
    pub who: Who,
    /// What happened, in the words of the service.
    pub what: W,
    /// How many events were lost before this one, because nobody fetched them in time; counted from
    /// the last event that was fetched.
    pub missed: u64,
}

/// The session, the peer and the attempt that an event concerns; each is `None` if the event
/// concerns none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Who {
    /// The session of this worker that the event concerns.
    pub session: Option<SessionId>,
    /// The peer, by the id that this worker's machine gave to the peer when they met.
    pub peer: Option<PeerId>,
    /// The attempt of the receiver at the sender, by the receiver's numbers.
    pub attempt: Option<Attempt>,
}

/// What happens in the machines of one service. As text, it is a sentence about the session or the
/// peer of the event, without the subject and without a full stop: `hears that the registration has
/// arrived`.
pub trait What: fmt::Display + fmt::Debug + Clone + Send + 'static {
    /// The phase of a session to which the event belongs; `None` for events that belong to no
    /// phase, such as the end of a peer.
    fn phase(&self) -> Option<Phase> {
        None
    }
}

impl What for Infallible {}

impl<W: What> Event<W> {
    /// The phase of a session to which the event belongs; `None` if the event belongs to no phase.
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
