//! What the two sides tell each other of a failure, as it travels in a frame.

use serde::{Deserialize, Deserializer, Serialize};

use super::cause::group_items;
use crate::groups::GroupSpan;
use crate::id::Room;
use crate::lease::TransferMode;
use crate::wire::versions::Versions;

/// What ended the peer's half of a session, as it travels in a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PeerCause {
    /// Its scheduler aborted.
    #[error("its scheduler aborted the request")]
    Aborted,
    /// It is stopping.
    #[error("it is stopping")]
    WorkerStopped,
    /// Its deadline passed.
    #[error("its deadline passed")]
    DeadlineExceeded,
    /// The numbers of pages differ.
    #[error("{sent} pages are to be sent, but {registered} were registered")]
    PageCount {
        /// Pages announced by the sender.
        sent: u64,
        /// Pages registered by the receiver.
        registered: u64,
    },
    /// One side has an aux row, the other none.
    #[error("an aux row is given on one side only (sender {sender}, receiver {receiver})")]
    AuxOneSided {
        /// The sender gave a row.
        sender: bool,
        /// The receiver gave a row.
        receiver: bool,
    },
    /// The two sides disagree about the items of a cache group.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The group.
        group: u16,
        /// What the sender gave; `None` if it did not name the group.
        sent: Option<GroupSpan>,
        /// What the receiver gave; `None` if it did not name the group.
        wanted: Option<GroupSpan>,
    },
    /// Its server gave pages, rows or chunks that do not fit the request or its cache.
    #[error("its server gave pages or rows that do not fit")]
    BadArguments,
    /// A data operation failed.
    #[error("a data operation failed")]
    DataOperation,
    /// Another rank that the request needs was lost.
    #[error("another rank that the request needs was lost")]
    OtherRankLost,
    /// The geometries do not fit.
    #[error("{0}")]
    Incompatible(Mismatch),
    /// The scheduler expected another number of receivers than an engine has for the sender's rank.
    #[error("the sender expects {expected} receivers, the receiver's engine has {told} for it")]
    ReceiverCount {
        /// Told by the sender's scheduler.
        expected: usize,
        /// Told by the receiver.
        told: usize,
    },
    /// The registration names pages or rows that do not exist.
    #[error("the registration is out of range")]
    OutOfRange,
    /// Its tables are full.
    #[error("it is overloaded")]
    Overloaded,
    /// The lease on its pages has run out.
    #[error("the lease on its pages has expired")]
    LeaseExpired,
    /// It has no such lease, or has forgotten what became of it.
    #[error("it knows no lease {lease_id}")]
    UnknownLease {
        /// The id of the lease.
        lease_id: u64,
    },
    /// The pages of the lease were read and released, or have all the readers they wait for.
    #[error("grant {lease_id} has been consumed")]
    LeaseConsumed {
        /// The id of the lease.
        lease_id: u64,
    },
    /// One side pushes, the other pulls.
    #[error("transfer_mode differs: sender {sender}, receiver {receiver}")]
    Mode {
        /// Of the sender.
        sender: TransferMode,
        /// Of the receiver.
        receiver: TransferMode,
    },
    /// Two requests have ids that are equal without the suffixes of their engines.
    #[error("requests {room} and {other} have the same id without the engines' suffixes")]
    AmbiguousRoom {
        /// One of them.
        room: Room,
        /// The other.
        other: Room,
    },
    /// The two sides have no version of the wire in common.
    #[error("it speaks versions {ours} of the wire, and a peer of the request speaks {theirs}")]
    Versions {
        /// What the side speaks that reports the error.
        ours: Versions,
        /// What the other side speaks.
        theirs: Versions,
    },
    /// It does not know the session.
    #[error("it does not know the session")]
    Unknown,
    /// The frames made no sense to it.
    #[error("it saw a protocol error")]
    Protocol,
    /// Anything else.
    #[error("internal error")]
    Internal,
    /// A cause that only a newer version knows.
    #[error("{name} (a cause that this version does not know)")]
    Other {
        /// What the newer version calls it, at most 512 bytes of it.
        #[serde(deserialize_with = "short")]
        name: String,
    },
}

impl PeerCause {
    /// A cause that this version does not know.
    pub(crate) fn other(name: String) -> PeerCause {
        PeerCause::Other { name: cut(name) }
    }

    /// What other ranks are told of what one peer has said, in each of their requests: of its texts only the
    /// beginnings, so that one long refusal is not said at length a thousand times.
    pub(crate) fn passed_on(&self) -> PeerCause {
        let begin = |text: &str| cut_at(text, MAX_TEXT_PASSED_ON).to_owned();
        match self {
            PeerCause::Incompatible(Mismatch { field, ours, theirs }) => {
                let (field, ours, theirs) = (begin(field), begin(ours), begin(theirs));
                PeerCause::Incompatible(Mismatch { field, ours, theirs })
            }
            PeerCause::Other { name } => PeerCause::Other { name: begin(name) },
            other => other.clone(),
        }
    }
}

/// Two workers that cannot exchange pages: the first field in which they differ, and both values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{field} differs: {ours} here, {theirs} at the peer{}", crate::layout::remedy(.field))]
pub struct Mismatch {
    /// The field of the geometry.
    #[serde(deserialize_with = "short")]
    pub field: String,
    /// The value on the side that reports the error.
    #[serde(deserialize_with = "short")]
    pub ours: String,
    /// The value on the other side.
    #[serde(deserialize_with = "short")]
    pub theirs: String,
}

/// Longest text of a peer's that is kept, in bytes. What is longer is cut off.
const MAX_TEXT: usize = 512;
/// Longest text of it that is passed on, in bytes.
const MAX_TEXT_PASSED_ON: usize = 32;

fn short<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(cut)
}

pub(crate) fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        text.truncate(cut_at(&text, MAX_TEXT).len());
        text.shrink_to_fit();
    }
    text
}

/// The beginning of a text, at most so many bytes.
fn cut_at(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or(text)
}
