//! Encoding messages to the bytes of frames, and decoding them.

use std::io::{self, Write};

use bytes::Bytes;
use serde::de::IgnoredAny;

use super::body::Body;
use super::conversation_id::ConversationId;
use super::tolerant::{Fields, read};
use super::versions::{VERSIONS, Versions};
use crate::record::TransportOffer;
use crate::transport::MAX_FRAME;

/// The version number in the header of the messages that every version reads.
const EVERY: u8 = 0;

/// One message, with the id of its conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The id that the addressee of the frame has drawn for the conversation.
    pub conversation: ConversationId,
    /// The message of the frame.
    pub body: Body,
}

/// Encodes messages for one peer in the version that both sides speak, and decodes messages in that
/// version.
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
    /// `None` until the peer has told its versions, and if the two sides have none in common.
    version: Option<u8>,
}

impl Codec {
    /// The codec for a peer that has not told its versions, or that shares no version with this
    /// worker.
    pub const MEETING: Codec = Codec { version: None };

    /// The codec for a peer with these versions, in the newest common version; `None` if no version
    /// is common.
    pub fn between(ours: Versions, theirs: Versions) -> Option<Codec> {
        ours.common(theirs).map(|version| Codec { version: Some(version) })
    }

    /// The version that is spoken; `None` until the two sides have met.
    pub fn version(self) -> Option<u8> {
        self.version
    }

    /// Encodes a message as a frame of at most [`MAX_FRAME`] bytes.
    pub fn encode(self, conversation: ConversationId, body: &Body) -> Result<Bytes, Unspeakable> {
        let kind = body.kind();
        let version = if Body::is_for_every_version(kind) { Some(EVERY) } else { self.version };
        let version = version.ok_or(Unspeakable::NotMet { kind })?;
        let mut out = Draft::default();
        let mut serializer = rmp_serde::Serializer::new(&mut out);
        body.write(version, conversation, &mut serializer).map_err(|_| Unspeakable::Failed { kind })?;
        if out.len() > MAX_FRAME {
            return Err(Unspeakable::TooLong { got: out.len() });
        }
        Ok(out.into_bytes())
    }

    /// Decodes a frame, all bytes of it: in the version that is spoken, or in the form that every
    /// version reads.
    pub fn decode(self, bytes: &[u8]) -> Result<Frame, Unreadable> {
        read_frame(bytes, self.version.map(|version| Versions { min: version, max: version }))
    }
}

impl Frame {
    /// Encodes the frame in the newest version.
    pub fn encode(&self) -> Result<Bytes, Unspeakable> {
        Codec { version: Some(VERSIONS.max) }.encode(self.conversation, &self.body)
    }

    /// Decodes a frame in any version of [`VERSIONS`].
    pub fn decode(bytes: &[u8]) -> Result<Frame, Unreadable> {
        read_frame(bytes, Some(VERSIONS))
    }

    /// The conversation that a frame names, whatever its version; `None` if the bytes are not a
    /// frame.
    pub fn conversation_of(bytes: &[u8]) -> Option<ConversationId> {
        outer(bytes).map(|outer| outer.conversation)
    }
}

/// A frame that is being written. Most are short, and only then get memory, as much as they need.
struct Draft {
    short: [u8; 128],
    /// How many bytes are in `short`; all bytes are in `long` once they are more than `short` has room for.
    len: usize,
    long: Vec<u8>,
}

impl Default for Draft {
    fn default() -> Draft {
        Draft { short: [0; 128], len: 0, long: Vec::new() }
    }
}

impl Draft {
    fn len(&self) -> usize {
        self.len.max(self.long.len())
    }

    fn into_bytes(self) -> Bytes {
        match self.long.is_empty() {
            true => Bytes::copy_from_slice(self.short.get(..self.len).unwrap_or_default()),
            false => self.long.into(),
        }
    }
}

impl Write for Draft {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.long.is_empty() {
            if let Some(room) = self.short.get_mut(self.len..self.len + bytes.len()) {
                room.copy_from_slice(bytes);
                self.len += bytes.len();
                return Ok(bytes.len());
            }
            self.long = Vec::with_capacity(4 * self.short.len() + bytes.len());
            self.long.extend_from_slice(self.short.get(..self.len).unwrap_or_default());
        }
        self.long.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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

/// The header of a frame, which every version reads.
struct Outer<'a> {
    version: u8,
    kind: u8,
    conversation: ConversationId,
    /// The bytes of the array of the fields, with nothing after them.
    fields: &'a [u8],
}

/// Splits a frame, which is an array of four: two small integers, a number in any msgpack form, and the fields.
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

/// The sender's transport, if the frame is a [`Hello`](super::Hello); otherwise `None`. The worker
/// accepts a hello only from a connection that may speak for this transport.
pub fn hello_transport(frame: &[u8]) -> Option<TransportOffer> {
    if frame.len() > MAX_FRAME {
        return None;
    }
    let Outer { version: EVERY, kind: Body::HELLO, fields, .. } = outer(frame)? else { return None };
    // The fields after the transport need not be understood here.
    let Fields((IgnoredAny, metadata, transport)): Fields<(IgnoredAny, Bytes, String)> = read(fields)?;
    Some(TransportOffer::new(&transport, metadata))
}

/// Why bytes are not accepted as a message. Such bytes are dropped and counted. The connection
/// stays open, and the sender gets no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// The frame is longer than any frame may be.
    #[error("frame of {got} bytes; at most {MAX_FRAME} are allowed")]
    TooLong {
        /// The length of the frame in bytes.
        got: usize,
    },
    /// The frame is in a version that is not spoken with this peer.
    #[error("frame of version {got}; versions {spoken} are spoken")]
    Version {
        /// The version in the frame's header.
        got: u8,
        /// The versions that are spoken.
        spoken: Versions,
    },
    /// The frame came before a version was agreed upon, and is not in the form that every version
    /// reads.
    #[error("frame of kind {kind} before a version was agreed upon")]
    NotMet {
        /// The kind of message, as in [`Body::kind`].
        kind: u8,
    },
    /// A newer peer sent a kind of message that this version does not know. The peer manages
    /// without an answer.
    #[error("frame of unknown kind {got}")]
    Kind {
        /// The kind of message in the frame's header.
        got: u8,
    },
    /// The bytes are not msgpack, or not the fields of that kind of message.
    #[error("malformed frame of kind {kind}")]
    Malformed {
        /// The kind of message, as in [`Body::kind`]; 0 if the kind could not be read.
        kind: u8,
    },
}

/// Why a message cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unspeakable {
    /// The frame would be longer than a frame may be.
    #[error("frame of {got} bytes; at most {MAX_FRAME} are allowed")]
    TooLong {
        /// The length that the frame would have, in bytes.
        got: usize,
    },
    /// The peer has not told its versions, or shares no version with this worker.
    #[error("a message of kind {kind} before a version was agreed upon")]
    NotMet {
        /// The kind of message, as in [`Body::kind`].
        kind: u8,
    },
    /// A list in the message is longer than msgpack allows.
    #[error("a message of kind {kind} that msgpack cannot express")]
    Failed {
        /// The kind of message, as in [`Body::kind`].
        kind: u8,
    },
}
