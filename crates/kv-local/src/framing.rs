//! Messages on one Unix stream: length-prefixed, and bounded.
//!
//! | bytes | |
//! |---|---|
//! | 4 | length of the body, little endian |
//! | 1 | kind: 1 hello, 2 frame, 3 goodbye, 4 descriptors, 5 wake |
//! | length | body |
//!
//! A hello comes first, exactly once, and begins with the bytes that its receiver expects. The descriptors
//! follow, with an empty message whose first byte carries them. Descriptors are accepted at no other time:
//! all earlier bytes are read without room for descriptors, so that the kernel closes those that come too
//! early. A wake is empty: a frame follows within microseconds, perhaps after a short copy, and the receiver is to be awake by
//! then. A goodbye comes last, and says that the sender has stopped copying.

use bytes::Bytes;

use crate::metadata::MAX_ARENAS;

/// Length of the header before each body, in bytes.
pub(crate) const HEADER: usize = 5;
/// Most descriptors that a peer sends: one for the right to write, and one for each arena.
pub(crate) const MAX_LENT: usize = 1 + MAX_ARENAS;

/// The kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello = 1,
    Frame = 2,
    Goodbye = 3,
    Descriptors = 4,
    Wake = 5,
}

/// The header of a message of this kind. Every body is shorter than 4 GiB: senders bound hellos and frames.
pub(crate) fn header(kind: Kind, len: usize) -> [u8; HEADER] {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [a, b, c, d, kind as u8]
}

/// A message of a peer. The message with descriptors is not told: it completes the hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The peer's hello, encoded. The descriptors that came after it are in
    /// [`Connection::take_fds`](crate::connection::Connection::take_fds).
    Hello(Bytes),
    /// A frame for the owner of the transport.
    Frame(Bytes),
    /// The peer has stopped copying and has disconnected this transport.
    Goodbye,
    /// A frame will follow soon.
    Wake,
}

impl Message {
    /// Length of the body, in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Message::Hello(body) | Message::Frame(body) => body.len(),
            Message::Goodbye | Message::Wake => 0,
        }
    }
}

/// The peer has broken the rules of the stream; nothing more can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("a message of kind {0} is not allowed at this point of the stream")]
    Kind(u8),
    #[error("the body of a message has {got} bytes; it must have {min} to {max}")]
    Length { got: usize, min: usize, max: usize },
    #[error("the hello is for another transport, or of another version")]
    Opening,
    #[error("the peer has sent more descriptors than it may")]
    Descriptors,
}
