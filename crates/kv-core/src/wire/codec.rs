//! Messages to bytes, and bytes to messages.

use bytes::Bytes;
use serde::de::IgnoredAny;

use super::body::Body;
use super::conversation_id::ConversationId;
use super::tolerant::{Fields, read};
use super::versions::{VERSIONS, Versions};
use crate::record::TransportOffer;
use crate::transport::MAX_FRAME;

/// What stands in place of a version in the messages that every version reads.
const EVERY: u8 = 0;

/// One message, and the conversation that it is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The listener's number for the conversation.
    pub conversation: ConversationId,
    /// What is said.
    pub body: Body,
}

/// Writes messages for one peer in the version that both sides speak, and reads messages in that version.
///
/// ```
/// use kv_core::Attempt;
/// use kv_core::wire::{Body, Codec, ConversationId, Registered, Unspeakable, VERSIONS, Versions};
///
/// let registered = Body::Registered(Registered { attempt: Attempt(3) });
/// // Before the two have met, only what every version reads can be said.
/// assert_eq!(Codec::MEETING.encode(ConversationId::new(1, 7), &registered), Err(Unspeakable::NotMet { kind: 5 }));
/// let theirs = Versions { min: VERSIONS.max, max: VERSIONS.max + 1 };
/// let codec = Codec::between(VERSIONS, theirs).expect("a common version");
/// let frame = codec.decode(&codec.encode(ConversationId::new(1, 7), &registered)?).expect("it is in their common version");
/// assert_eq!((frame.conversation, frame.body), (ConversationId::new(1, 7), registered));
/// # Ok::<(), Unspeakable>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codec {
    /// `None` as long as nothing is known of the peer, and where nothing is common.
    version: Option<u8>,
}

impl Codec {
    /// For a peer that has not said which versions it speaks, or speaks none that this worker speaks.
    pub const MEETING: Codec = Codec { version: None };

    /// For a peer with these versions: the newest common one is spoken. `None` if there is none.
    pub fn between(ours: Versions, theirs: Versions) -> Option<Codec> {
        ours.common(theirs).map(|version| Codec { version: Some(version) })
    }

    /// The version that is spoken; `None` before the two sides have met.
    pub fn version(self) -> Option<u8> {
        self.version
    }

    /// The message as the bytes of a frame, at most [`MAX_FRAME`] of them.
    pub fn encode(self, conversation: ConversationId, body: &Body) -> Result<Bytes, Unspeakable> {
        let kind = body.kind();
        let version = if Body::is_for_every_version(kind) { Some(EVERY) } else { self.version };
        let version = version.ok_or(Unspeakable::NotMet { kind })?;
        let mut out = Vec::with_capacity(128);
        let mut serializer = rmp_serde::Serializer::new(&mut out);
        body.write(version, conversation, &mut serializer).map_err(|_| Unspeakable::Failed { kind })?;
        if out.len() > MAX_FRAME {
            return Err(Unspeakable::TooLong { got: out.len() });
        }
        Ok(out.into())
    }

    /// The message in these bytes, all of them: in the version that is spoken, or in the form that every version
    /// reads.
    pub fn decode(self, bytes: &[u8]) -> Result<Frame, Unreadable> {
        read_frame(bytes, self.version.map(|version| Versions { min: version, max: version }))
    }
}

impl Frame {
    /// The frame as bytes, in the newest version.
    pub fn encode(&self) -> Result<Bytes, Unspeakable> {
        Codec { version: Some(VERSIONS.max) }.encode(self.conversation, &self.body)
    }

    /// The frame in these bytes, in any version of [`VERSIONS`], whoever may have said it.
    pub fn decode(bytes: &[u8]) -> Result<Frame, Unreadable> {
        read_frame(bytes, Some(VERSIONS))
    }

    /// The conversation that a frame names, in whatever version it is said; `None` if it names none.
    pub fn conversation_of(bytes: &[u8]) -> Option<ConversationId> {
        outer(bytes).map(|outer| outer.conversation)
    }
}

fn read_frame(bytes: &[u8], spoken: Option<Versions>) -> Result<Frame, Unreadable> {
    if bytes.len() > MAX_FRAME {
        return Err(Unreadable::TooLong { got: bytes.len() });
    }
    let Outer { version, kind, conversation, fields } =
        outer(bytes).ok_or(Unreadable::Malformed { kind: 0 })?;
    match spoken {
        _ if version == EVERY => {}
        None => return Err(Unreadable::NotMet { kind }),
        Some(spoken) if spoken.contains(version) => {}
        Some(spoken) => return Err(Unreadable::Version { got: version, spoken }),
    }
    if Body::is_for_every_version(kind) != (version == EVERY) {
        return Err(Unreadable::Kind { got: kind });
    }
    Ok(Frame { conversation, body: Body::read(kind, fields)? })
}

/// What every version reads of a frame.
struct Outer<'a> {
    version: u8,
    kind: u8,
    conversation: ConversationId,
    /// The array of the fields, and nothing after it.
    fields: &'a [u8],
}

/// A frame is an array of four: two small integers, a number in any of the forms that msgpack has for one, and fields.
fn outer(bytes: &[u8]) -> Option<Outer<'_>> {
    let [0x94, version @ 0..=0x7f, kind @ 0..=0x7f, form, rest @ ..] = bytes else { return None };
    let width = match form {
        0..=0x7f => 0,
        0xcc => 1,
        0xcd => 2,
        0xce => 4,
        0xcf => 8,
        _ => return None,
    };
    let (number, fields) = rest.split_at_checked(width)?;
    let small = if width == 0 { u64::from(*form) } else { 0 };
    let conversation = ConversationId(number.iter().fold(small, |sum, &byte| sum << 8 | u64::from(byte)));
    Some(Outer { version: *version, kind: *kind, conversation, fields })
}

/// The transport in a frame, if it is a [`Hello`](super::Hello): only a connection that may speak for it
/// may bring it.
pub fn hello_transport(frame: &[u8]) -> Option<TransportOffer> {
    if frame.len() > MAX_FRAME {
        return None;
    }
    let Outer { version: EVERY, kind: Body::HELLO, fields, .. } = outer(frame)? else { return None };
    // What follows the transport need not be understood for that.
    let Fields((IgnoredAny, metadata, transport)): Fields<(IgnoredAny, Bytes, String)> = read(fields)?;
    Some(TransportOffer::new(&transport, metadata))
}

/// Why bytes are not a message. Such bytes are dropped and counted; the connection stays, and nobody
/// answers them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// Longer than any frame may be.
    #[error("frame of {got} bytes; at most {MAX_FRAME} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
    },
    /// Of a version that is not spoken.
    #[error("frame of version {got}; {spoken} is spoken")]
    Version {
        /// Its version.
        got: u8,
        /// What is spoken.
        spoken: Versions,
    },
    /// Said before a version was agreed upon, and not in the form that every version reads.
    #[error("frame of kind {kind} before a version was agreed upon")]
    NotMet {
        /// Its kind.
        kind: u8,
    },
    /// Of a kind that this version does not know: a newer peer's, who goes on without an answer.
    #[error("frame of unknown kind {got}")]
    Kind {
        /// Its kind.
        got: u8,
    },
    /// Not msgpack, or not the fields of that kind.
    #[error("malformed frame of kind {kind}")]
    Malformed {
        /// Its kind; 0 if that could not be read.
        kind: u8,
    },
}

/// Why a message cannot be said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unspeakable {
    /// Longer than a frame may be.
    #[error("frame of {got} bytes; at most {MAX_FRAME} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
    },
    /// The peer has not said which versions it speaks, or speaks none of this worker's.
    #[error("a message of kind {kind} before a version was agreed upon")]
    NotMet {
        /// Its kind.
        kind: u8,
    },
    /// One of its lists is longer than msgpack allows.
    #[error("a message of kind {kind} that msgpack cannot express")]
    Failed {
        /// Its kind.
        kind: u8,
    },
}
