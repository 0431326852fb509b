//! The causes of failure that the two sides tell each other, as they travel in a frame.

use serde::{Deserialize, Deserializer, Serialize};

use super::cause::group_items;
use crate::groups::CacheGroupSpan;
use crate::id::{Room, has_control};
use crate::lease::TransferMode;
use crate::wire::versions::Versions;

/// What ended the peer's half of a session, as the peer tells it in a frame. The texts speak of the
/// peer as "it", after `ended by the peer:`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PeerCause {
    /// The peer's scheduler aborted the request, or dropped the session's handle.
    #[error("its scheduler aborted the request")]
    Aborted,
    /// The peer's worker takes no new requests: it drains, or it is stopping. The request may be served by
    /// another worker.
    #[error("its worker drains or is stopping")]
    WorkerStopped,
    /// The deadline of the peer's session passed.
    #[error("its deadline passed")]
    DeadlineExceeded,
    /// The two sides disagree about how many pages the request has.
    #[error("{sent} pages are to be sent, but {registered} were registered")]
    PageCount {
        /// How many pages the sender announced.
        sent: u64,
        /// How many pages the receiver registered.
        registered: u64,
    },
    /// One side gave an aux row for the request, and the other side gave none.
    #[error("an aux row is given on one side only (sender {sender}, receiver {receiver})")]
    AuxOneSided {
        /// True if the sender gave an aux row.
        sender: bool,
        /// True if the receiver gave an aux row.
        receiver: bool,
    },
    /// The two sides disagree about the items of a cache group.
    #[error("{}", group_items(.group, .sent, .wanted))]
    GroupItems {
        /// The number of the group in [`Layout::groups`](crate::Layout::groups).
        group: u16,
        /// The items that the sender gave; `None` if the sender did not name the group.
        sent: Option<CacheGroupSpan>,
        /// The items that the receiver gave; `None` if the receiver did not name the group.
        wanted: Option<CacheGroupSpan>,
    },
    /// The peer's server gave pages, rows or chunks that do not fit the request or its cache.
    #[error("its server gave pages or rows that do not fit")]
    BadArguments,
    /// A data operation of the peer failed.
    #[error("a data operation failed")]
    DataOperation,
    /// The peer's transport never does such a data operation between these two caches. The peer's own error says why.
    #[error("its transport does no such data operation between these two caches")]
    DataRefused,
    /// The peer lost another rank that the request needs.
    #[error("another rank that the request needs was lost")]
    OtherRankLost,
    /// The geometries of the two caches do not fit.
    #[error("{0}")]
    Incompatible(Mismatch),
    /// The sender's scheduler expects another number of receivers than the receiver's engine has
    /// for that sender.
    #[error("the sender expects {expected} receivers, but the receiver's engine has {told} for this sender")]
    ReceiverCount {
        /// The number that the sender's scheduler gave.
        expected: usize,
        /// The number that the receiver told.
        told: usize,
    },
    /// The registration names pages, rows or items that the receiver's own cache does not have.
    #[error("the registration names pages or rows that the receiver does not have")]
    OutOfRange,
    /// The peer's tables of sessions, attempts or peers are full.
    #[error("its worker has as many sessions, requests or peers as its limits allow")]
    Overloaded,
    /// The lease on the peer's pages has run out.
    #[error("the lease on its pages has expired")]
    LeaseExpired,
    /// The peer has no lease with this id, or has forgotten the lease.
    #[error("it knows no lease {lease_id}")]
    UnknownLease {
        /// The lease id that this worker asked for.
        lease_id: u64,
    },
    /// The pages of the lease were read and released, or have as many readers already as the sender
    /// expects.
    #[error("lease {lease_id} has been consumed")]
    LeaseConsumed {
        /// The lease id that this worker asked for.
        lease_id: u64,
    },
    /// One side is set to push, and the other to pull.
    #[error("transfer_mode differs: sender {sender}, receiver {receiver}")]
    Mode {
        /// The transfer mode of the sender.
        sender: TransferMode,
        /// The transfer mode of the receiver.
        receiver: TransferMode,
    },
    /// Two open requests have ids that are equal without the suffixes of their engines.
    #[error("requests {room} and {other} have the same id without the engines' suffixes")]
    AmbiguousRoom {
        /// The room of one request.
        room: Room,
        /// The room of the other request.
        other: Room,
    },
    /// The peer has no entry with the content that was asked for.
    #[error("it has no such entry")]
    EntryMissing,
    /// The peer is computing or fetching the entry that was asked for.
    #[error("its entry is not complete yet")]
    EntryNotReady,
    /// The peer's entry has another length than the receiver expects.
    #[error("its entry has {held} bytes, but {asked} were asked for")]
    EntrySize {
        /// The length of the entry in bytes.
        held: u64,
        /// The length that the receiver expects, in bytes.
        asked: u64,
    },
    /// The two sides have no version of the wire protocol in common.
    #[error("it speaks versions {ours} of the wire protocol, and a peer of the request speaks {theirs}")]
    Versions {
        /// The versions that the side that reports the cause speaks.
        ours: Versions,
        /// The versions that the other side speaks.
        theirs: Versions,
    },
    /// The peer does not know the session or the incarnation that a frame of this worker named.
    #[error("it does not know the session or the incarnation that was named")]
    Unknown,
    /// The peer received a frame that the protocol does not allow.
    #[error("it received a frame that the protocol does not allow")]
    Protocol,
    /// The peer failed for a reason that has no name in the protocol.
    #[error("internal error")]
    Internal,
    /// A cause that only a newer version of the protocol knows.
    #[error("{name} (a cause that this version does not know)")]
    Other {
        /// The name of the cause in the newer version, cut to 512 bytes.
        #[serde(deserialize_with = "short")]
        name: String,
    },
}

impl PeerCause {
    /// A cause that this version does not know, with its name cut to 512 bytes.
    pub(crate) fn other(name: String) -> PeerCause {
        PeerCause::Other { name: cut(name) }
    }

    /// The cause as other ranks are told it in each of their requests, when one peer has told it to
    /// this worker. Its texts are cut to their beginnings, so that a thousand requests do not
    /// repeat a long text in full.
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

/// Why two workers cannot exchange pages: the first field in which they differ, and both values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{field} differs: {ours} here, {theirs} at the peer{}", crate::layout::remedy(.field))]
pub struct Mismatch {
    /// The name of the field: of a [`Geometry`](crate::Geometry), or of an offer.
    #[serde(deserialize_with = "short")]
    pub field: String,
    /// The value on the side that reports the difference.
    #[serde(deserialize_with = "short")]
    pub ours: String,
    /// The value on the other side.
    #[serde(deserialize_with = "short")]
    pub theirs: String,
}

/// The longest text of a peer that is kept, in bytes. The rest is cut off.
const MAX_TEXT: usize = 512;
/// The longest text of a peer that is passed on to other ranks, in bytes.
const MAX_TEXT_PASSED_ON: usize = 32;

fn short<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(cut)
}

/// A text of a peer as it is kept: cut to its beginning, and on one line, because it ends up in logs.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        text.truncate(cut_at(&text, MAX_TEXT).len());
        text.shrink_to_fit();
    }
    if has_control(&text) {
        text = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    }
    text
}

/// The beginning of a text: at most `most` bytes, and whole characters.
fn cut_at(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_peer_are_one_line_without_control_characters() {
        let forged = "page_size\n2031-01-01 ERROR all is lost\u{1b}[2J\r\u{9b}0m".to_owned();
        let [field, ours, theirs] = [&forged, &forged, &forged].map(String::clone);
        let mismatch = PeerCause::Incompatible(Mismatch { field, ours, theirs });
        let sent = [mismatch, PeerCause::Other { name: forged.clone() }];
        for sent in sent {
            let frame = rmp_serde::to_vec(&sent).unwrap();
            let heard: PeerCause = rmp_serde::from_slice(&frame).unwrap();
            assert!(
                sent.to_string().contains(char::is_control) && !heard.to_string().contains(char::is_control)
            );
            assert!(heard.to_string().contains("2031-01-01 ERROR all is lost"), "{heard}");
        }
        assert!(!PeerCause::other(forged).to_string().contains(char::is_control));
        let long = "\u{9b}".repeat(400);
        assert_eq!(cut(long), " ".repeat(256), "cut first");
    }
}
