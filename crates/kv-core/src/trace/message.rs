//! What two workers tell each other, as ids and counts.

use std::fmt;
use std::time::Duration;

use crate::error::{PeerCause, Phase};
use crate::id::Room;

/// What a frame tells, without its lists. Its text follows `says` or `hears`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// A receiver's worker introduces itself, and asks to be spoken to.
    Hello,
    /// The hello is accepted.
    Welcome,
    /// The hello is refused.
    Refused(Box<PeerCause>),
    /// The receiver's pages for a request (push).
    Register {
        /// The request.
        room: Room,
        /// How many pages this sender is to write.
        pages: usize,
        /// For how long the sender may begin writes, from when it asked whether it may; `None` if the registration
        /// answers no such question.
        permission: Option<Duration>,
    },
    /// The receiver will read the pages of a request (pull).
    Acquire {
        /// The request.
        room: Room,
    },
    /// The registration or the acquire message has arrived.
    Registered,
    /// Parts of a push are in place.
    InPlace {
        /// How many of them this message tells.
        parts: u64,
        /// How many there are, once that is known.
        total: Option<u32>,
    },
    /// The attempt has failed at the sender.
    Failed {
        /// Why.
        cause: Box<PeerCause>,
        /// No write can arrive any more.
        quiet: bool,
    },
    /// The attempt has failed at the receiver: stop writing.
    Abort(Box<PeerCause>),
    /// No write of the aborted attempt is in flight, and none will be posted.
    AbortAcknowledged,
    /// The pages are complete, and leased to the reader (pull).
    Granted {
        /// How many.
        pages: usize,
        /// What is left of the lease.
        lease: Duration,
    },
    /// A sign of life, which asks for one.
    Heartbeat {
        /// How many leases are to be extended.
        leases: u64,
        /// How many attempts are asked about that have been quiet.
        asked: u64,
        /// Whether permission to write is asked for.
        writes: bool,
    },
    /// The answer to a heartbeat.
    HeartbeatAnswered {
        /// How many leases are extended.
        leases: u64,
        /// How long the shortest of them lasts: the reader counts from when it asked. Zero without leases.
        lease: Duration,
        /// For how long writes may begin: the writer counts from when it asked. Zero if they may not.
        permission: Duration,
    },
    /// Attempts are over: everything has arrived, or was read, or the failure is understood.
    Release {
        /// How many.
        attempts: u64,
    },
    /// The releases have arrived.
    Released {
        /// Of how many attempts.
        attempts: u64,
    },
}

impl Message {
    /// The part of a session's life to which the message belongs, if it belongs to one.
    pub fn phase(&self) -> Option<Phase> {
        match self {
            Message::Hello | Message::Welcome | Message::Refused(_) => Some(Phase::Handshake),
            Message::Register { .. } | Message::Acquire { .. } | Message::Registered => {
                Some(Phase::Rendezvous)
            }
            Message::InPlace { .. }
            | Message::Granted { .. }
            | Message::Release { .. }
            | Message::Released { .. } => Some(Phase::Transfer),
            Message::Failed { .. }
            | Message::Abort(_)
            | Message::AbortAcknowledged
            | Message::Heartbeat { .. }
            | Message::HeartbeatAnswered { .. } => None,
        }
    }

    /// A short name of the kind, in lower case with underscores: a label of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Hello => "hello",
            Message::Welcome => "welcome",
            Message::Refused(_) => "refused",
            Message::Register { .. } => "register",
            Message::Acquire { .. } => "acquire",
            Message::Registered => "registered",
            Message::InPlace { .. } => "in_place",
            Message::Failed { .. } => "failed",
            Message::Abort(_) => "abort",
            Message::AbortAcknowledged => "abort_acknowledged",
            Message::Granted { .. } => "granted",
            Message::Heartbeat { .. } => "heartbeat",
            Message::HeartbeatAnswered { .. } => "heartbeat_answered",
            Message::Release { .. } => "release",
            Message::Released { .. } => "released",
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Message::Hello => f.write_str("hello"),
            Message::Welcome => f.write_str("that the hello is welcome"),
            Message::Refused(cause) => write!(f, "that the hello is refused: {cause}"),
            Message::Register { room, pages, permission: None } => {
                write!(f, "that room {room} has {pages} pages to be written")
            }
            Message::Register { room, pages, permission: Some(lasts) } => {
                write!(
                    f,
                    "that room {room} has {pages} pages to be written, and writes are permitted for {lasts:?}"
                )
            }
            Message::Acquire { room } => write!(f, "that the pages of room {room} will be read"),
            Message::Registered => f.write_str("that the registration has arrived"),
            Message::InPlace { parts, total: None } => write!(f, "that {parts} parts are in place"),
            Message::InPlace { parts, total: Some(total) } => {
                write!(f, "that {parts} of {total} parts are in place")
            }
            Message::Failed { cause, quiet } => {
                let quiet = if *quiet { "nothing is" } else { "writes may be" };
                write!(f, "that the sender has failed and {quiet} in flight: {cause}")
            }
            Message::Abort(cause) => write!(f, "that the receiver has failed: {cause}"),
            Message::AbortAcknowledged => f.write_str("that the abort is done and nothing is in flight"),
            Message::Granted { pages, lease } => write!(f, "that {pages} pages are leased for {lease:?}"),
            Message::Heartbeat { leases, asked, writes } => {
                f.write_str("that a sign of life is wanted")?;
                if *leases > 0 {
                    write!(f, ", and {leases} leases to be extended")?;
                }
                if *asked > 0 {
                    write!(f, ", and news of {asked} attempts")?;
                }
                if *writes {
                    f.write_str(", and permission to write")?;
                }
                Ok(())
            }
            Message::HeartbeatAnswered { leases, lease, permission } => {
                f.write_str("a sign of life")?;
                if *leases > 0 {
                    write!(f, ", and that {leases} leases are extended to {lease:?}")?;
                }
                if !permission.is_zero() {
                    write!(f, ", and that writes are permitted for {permission:?}")?;
                }
                Ok(())
            }
            Message::Release { attempts } => write!(f, "that {attempts} attempts are over"),
            Message::Released { attempts } => write!(f, "that the end of {attempts} attempts has arrived"),
        }
    }
}
