//! The wire: what two workers tell each other, as msgpack.
//!
//! A frame is the array `[version, kind, conversation, fields]`; `fields` is the array of the message's fields.
//! It carries durations, never clock readings. A frame is at most [`MAX_FRAME`](crate::MAX_FRAME) bytes long.
//! Every message is idempotent: transports may lose, duplicate and reorder frames.
//!
//! Lists of pages, parts and attempts are runs (first, length), packed into one msgpack value of type `bin`, all
//! little-endian: a run of pages or parts is 8 bytes, 4 for the first and 4 for the length; a run of attempts is
//! 12 bytes, 8 for the first and 4 for the length. The length counts the first: a run of one page has length 1.
//!
//! `conversation` names the conversation. Each side draws a number for the other when they meet and tells
//! it in [`Hello`] or [`Welcome`]; whoever speaks puts the listener's number into the frame. A
//! frame of a former incarnation, or of a conversation that was forgotten, carries a number that
//! nobody answers to, and is dropped and counted.
//!
//! # Versions
//!
//! A worker speaks a range of versions ([`VERSIONS`]) and says so in its hello, and in the answer to one.
//! Two workers speak the newest version that both have ([`Codec::between`]).
//!
//! - **What every version reads.** [`Hello`], [`Welcome`], [`Refused`], [`Abort`] and [`AbortAck`] have 0 in
//!   place of a version: two workers that have no version in common can still tell each other which they
//!   have, and end the requests that they were to serve together. These messages grow at their ends only.
//! - **New fields** are appended to a message, or get a new name in [`Geometry`](crate::Geometry) and
//!   [`PeerCause`](crate::PeerCause), which are written by name. A reader skips fields that it does not know,
//!   16 levels deep at most. A field that was added later has a default, which stands in the
//!   documentation of the field and means what the older version did. Values inside a field never change.
//! - **New messages** get a new kind. A reader drops and counts a kind that it does not know.
//! - **New causes** of failures are [`PeerCause::Other`](crate::PeerCause::Other) to a reader that does not
//!   know them.
//! - Whatever cannot be expressed so is a new version, and the old one is spoken with older peers for as
//!   long as [`VERSIONS`] has it.

mod body;
mod codec;
mod conversation_id;
mod lengths;
mod tolerant;
pub(crate) mod versions;

pub use body::{
    Abort, AbortAck, Acquire, Body, Delivery, Destination, Failed, Granted, Heartbeat, HeartbeatAck, Hello,
    Progress, Refused, Register, Registered, Release, Released, Welcome,
};
pub use codec::{Codec, Frame, Unreadable, Unspeakable, hello_transport};
pub use conversation_id::ConversationId;
pub use lengths::lengths_fit;
pub(crate) use tolerant::read as read_tolerant;
pub use versions::{VERSIONS, Versions};
