//! Messages on one Unix stream: length-prefixed, and bounded.
//!
//! | bytes | |
//! |---|---|
//! | 4 | length of the body, little endian |
//! | 1 | kind: 1 hello, 2 frame, 3 goodbye, 4 descriptors |
//! | length | body |
//!
//! A hello comes first, exactly once, and begins with what its receiver expects of a peer. The
//! descriptors follow: an empty message whose first byte carries them. They are taken from nobody else and
//! at no other time: everything before is read without room for them, so that the kernel closes what comes
//! too early. A goodbye comes last, and says that the sender has stopped copying.

use bytes::Bytes;

use crate::metadata::MAX_ARENAS;

/// Bytes before each body.
pub(crate) const HEADER: usize = 5;
/// Most descriptors that a peer lends: for the right to write, and for its arenas.
pub(crate) const MAX_LENT: usize = 1 + MAX_ARENAS;

/// The kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello = 1,
    Frame = 2,
    Goodbye = 3,
    Descriptors = 4,
}

/// What a peer said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Who it is. The descriptors that came after it are in
    /// [`Connection::take_fds`](crate::connection::Connection::take_fds).
    Hello(Bytes),
    /// A frame.
    Frame(Bytes),
    /// It has stopped copying and forgets us.
    Goodbye,
}

impl Message {
    /// Bytes of its body.
    pub(crate) fn len(&self) -> usize {
        match self {
            Message::Hello(body) | Message::Frame(body) => body.len(),
            Message::Goodbye => 0,
        }
    }
}

/// The peer broke the rules; nothing more can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("message kind {0} where it may not be")]
    Kind(u8),
    #[error("a body of {got} bytes; it must have {min} to {max}")]
    Length { got: usize, min: usize, max: usize },
    #[error("a hello for somebody else, or of another version")]
    Opening,
    #[error("more descriptors than a peer may lend")]
    Descriptors,
}
