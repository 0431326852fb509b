//! Requests by content: a receiver asks a service for an entry by the hash of the entry's content,
//! rather than for a room that a sender of its request opens.
//!
//! This file is what the protocol knows of such requests. Which entries there are, and which of them
//! a worker may give away, is the service's own matter (kv-ec for the encoder cache).

use crate::content::ContentHash;
use crate::error::peer::cut;
use crate::id::{Attempt, PeerId, Room};

/// What a receiver asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContentRequest {
    /// The hash of the entry's content.
    pub hash: ContentHash,
    /// The text that both sides must have alike for their entries to be interchangeable, such as a hash
    /// over model and settings; cut to 512 bytes.
    pub compatibility: String,
    /// The length of the entry that the receiver expects, in bytes.
    pub bytes: u64,
}

impl ContentRequest {
    /// A request for an entry of this many bytes.
    pub fn new(hash: ContentHash, compatibility: impl Into<String>, bytes: u64) -> ContentRequest {
        ContentRequest { hash, compatibility: cut(compatibility.into()), bytes }
    }
}

/// A peer's request by content that waits for this worker's answer.
///
/// The service answers in one of two ways: it opens a sender in [`room`](Asked::room) and sends the
/// entry's pages, or it [refuses](crate::proto::Node::refuse_asked). A request that the
/// service does not answer fails when the time is over for which its receiver waits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Asked {
    /// The peer that asks.
    pub peer: PeerId,
    /// The peer's attempt, which every answer repeats.
    pub attempt: Attempt,
    /// The entry that the peer asks for.
    pub content: ContentRequest,
    /// The room in which a sender meets this request and no other. This worker has drawn it.
    pub room: Room,
    /// True if the peer reads the pages under a lease; false if this worker is to write them.
    pub reads: bool,
}

/// The service whose machine a [`Node`](crate::proto::Node) is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Service {
    /// The service's name in rank records and hellos. Workers of different services refuse each other.
    pub name: String,
    /// The compatibility text of the service's offers, see
    /// [`ServiceOffer::compatibility`](crate::ServiceOffer::compatibility).
    pub compatibility: String,
    /// True if receivers ask by content: the machine then answers [`Asked`] requests, and refuses
    /// registrations for rooms.
    pub by_content: bool,
}

impl Service {
    /// The KV cache: receivers ask for rooms, and geometries are compared in place of a text.
    pub fn kv() -> Service {
        Service {
            name: crate::kv_offer::KV_SERVICE.to_owned(),
            compatibility: String::new(),
            by_content: false,
        }
    }

    /// A service whose receivers ask by content.
    pub fn by_content(name: &str, compatibility: &str) -> Service {
        Service { name: name.to_owned(), compatibility: compatibility.to_owned(), by_content: true }
    }
}
