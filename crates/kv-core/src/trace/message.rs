//! The messages between two workers, as ids and counts.

use std::fmt;
use std::time::Duration;

use crate::content::ContentHash;
use crate::error::{PeerCause, Phase};
use crate::id::Room;
use crate::names::names;

/// A message of a frame, without its lists. The text follows `says` or `hears`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// A receiver's worker introduces itself and asks the sender's worker for an answer.
    Hello,
    /// The hello is accepted.
    Welcome,
    /// The hello is refused.
    Refused(Box<PeerCause>),
    /// The receiver has registered its pages for a request (push).
    Register {
        /// The room of the request.
        room: Room,
        /// How many pages this sender is to write.
        pages: usize,
        /// For how long the sender may begin writes, counted from the moment at which the sender
        /// asked for permission; `None` if the registration does not answer such a question.
        permission: Option<Duration>,
    },
    /// The receiver asks for a lease on the pages of a request, to read them (pull).
    Acquire {
        /// The room of the request.
        room: Room,
    },
    /// The receiver asks for an entry by the hash of its content (encoder cache).
    AskedForEntry {
        /// The hash of the entry's content.
        hash: ContentHash,
        /// The length of the entry that the receiver expects, in bytes.
        bytes: u64,
    },
    /// The registration or the acquire message has arrived.
    Registered,
    /// Parts of a push are in place.
    InPlace {
        /// How many parts this message names.
        parts: u64,
        /// How many parts there are in all; `None` as long as the sender does not know.
        total: Option<u32>,
    },
    /// The attempt has failed at the sender.
    Failed {
        /// The cause at the sender.
        cause: Box<PeerCause>,
        /// True if no write of the attempt can arrive any more.
        quiet: bool,
    },
    /// The attempt has failed at the receiver, and the sender must stop writing.
    Abort(Box<PeerCause>),
    /// No write of the aborted attempt is in flight, and none will be posted.
    AbortAcknowledged,
    /// The pages are complete, and leased to the reader (pull).
    Granted {
        /// How many pages are leased.
        pages: usize,
        /// How long the lease still lasts.
        lease: Duration,
    },
    /// A heartbeat, which asks for an answer.
    Heartbeat {
        /// The number of the heartbeat, which its answer repeats.
        number: u64,
        /// How many leases the reader asks to extend.
        leases: u64,
        /// How many quiet attempts the speaker asks about.
        asked: u64,
        /// True if the speaker asks for permission to write.
        writes: bool,
    },
    /// The answer to a heartbeat.
    HeartbeatAnswered {
        /// The number of the heartbeat that is answered.
        number: u64,
        /// How many leases are extended.
        leases: u64,
        /// How long the shortest of these leases lasts, counted from the moment at which the reader
        /// asked; zero without leases.
        lease: Duration,
        /// For how long the writer may begin writes, counted from the moment at which the writer
        /// asked; zero if it may not.
        permission: Duration,
    },
    /// Attempts are over at the receiver: all pages have arrived or were read, or the receiver has
    /// heard of the failure.
    Release {
        /// How many attempts are over.
        attempts: u64,
    },
    /// The sender has heard which attempts are over.
    Released {
        /// How many attempts the answer names.
        attempts: u64,
    },
}

impl Message {
    /// The phase of a session to which the message belongs; `None` if it belongs to no phase.
    pub fn phase(&self) -> Option<Phase> {
        match self {
            Message::Hello | Message::Welcome | Message::Refused(_) => Some(Phase::Handshake),
            Message::Register { .. }
            | Message::Acquire { .. }
            | Message::AskedForEntry { .. }
            | Message::Registered => Some(Phase::Rendezvous),
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
}

names! {
    /// A short name of the kind of message, in lower case with underscores, for labels of metrics.
    Message {
        Message::Hello => "hello",
        Message::Welcome => "welcome",
        Message::Refused(_) => "refused",
        Message::Register { .. } => "register",
        Message::Acquire { .. } => "acquire",
        Message::AskedForEntry { .. } => "xfer_req",
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
            Message::AskedForEntry { hash, bytes } => {
                write!(f, "that entry {hash} of {bytes} bytes is wanted")
            }
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
            Message::Heartbeat { number: _, leases, asked, writes } => {
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
            Message::HeartbeatAnswered { number: _, leases, lease, permission } => {
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
