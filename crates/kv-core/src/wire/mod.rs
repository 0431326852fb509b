//! The messages between two workers, and their encoding as msgpack.
//!
//! A frame is the array `[version, kind, conversation, fields]`; `fields` is the array of the
//! message's fields. Times are durations, never readings of a clock. A frame is at most
//! [`MAX_FRAME`](crate::MAX_FRAME) bytes long. Every message is idempotent, because transports may
//! lose, duplicate and reorder frames.
//!
//! Lists of pages, parts and attempts are runs (first, length), packed into one msgpack value of
//! type `bin`, in little-endian order. A run of pages or parts takes 8 bytes, 4 for the first
//! number and 4 for the length. A run of attempts takes 12 bytes, 8 for the first number and 4 for
//! the length. A run of one page has length 1.
//!
//! `conversation` is the [`ConversationId`] that the addressee has drawn. Each side draws an id for
//! the other when they meet, and tells it in [`Hello`] or [`Welcome`]; the speaker of a frame puts
//! the addressee's id into the frame. A frame of a former incarnation, or of a conversation that was
//! forgotten, carries an id that the addressee does not know, and is dropped and counted.
//!
//! # Versions
//!
//! A worker speaks a range of versions ([`VERSIONS`]), and tells the range in its hello and in its
//! answer to a hello. Two workers speak the newest version that both have ([`Codec::between`]).
//!
//! - **Messages of every version.** [`Hello`], [`Welcome`], [`Refused`], [`Abort`] and [`AbortAck`]
//!   have 0 in place of a version. With them, two workers that have no version in common still tell
//!   each other their versions, and end the requests that they were to serve together. New fields
//!   of these messages are only ever appended.
//! - **New fields** are appended to a message, or get a new name in [`Geometry`](crate::Geometry)
//!   and [`PeerCause`](crate::PeerCause), whose fields are written by name. A reader skips fields
//!   that it does not know, 16 levels deep at most. A field that was added later has a default,
//!   which its documentation states; the default means what the older version did. The meaning of a
//!   value never changes.
//! - **New values** in a [`Geometry`](crate::Geometry), such as regions with a
//!   [form](crate::layout::Form) of their own, stand where an older version reads a value that the
//!   plan depends on. The older version cannot read the geometry then, and refuses the peer by the
//!   field `geometry`.
//! - **New messages** get a new kind. A reader drops and counts frames of a kind that it does not
//!   know.
//! - **New causes** of failures become [`PeerCause::Other`](crate::PeerCause::Other) at a reader
//!   that does not know them.
//! - Any other change is a new version. The old version is still spoken with older peers, as long
//!   as [`VERSIONS`] contains it.

mod body;
mod codec;
mod conversation_id;
mod lengths;
mod tolerant;
pub(crate) mod versions;

pub use body::{
    Abort, AbortAck, Acquire, Body, Delivery, Destination, Failed, Granted, Heartbeat, HeartbeatAck, Hello,
    Progress, Refused, Register, Registered, Release, Released, Welcome, XferReq,
};
pub use codec::{Codec, Frame, Unreadable, Unspeakable, hello_transport};
pub use conversation_id::ConversationId;
pub use lengths::lengths_fit;
pub(crate) use tolerant::read as read_tolerant;
pub use versions::{VERSIONS, Versions};
