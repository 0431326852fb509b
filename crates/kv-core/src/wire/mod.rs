//! Frames: what two nodes tell each other, as versioned msgpack.
//!
//! A frame is the msgpack array `[VERSION, kind, link, body]`; the body is the array of its fields.
//! It carries durations, never clock readings, and lists of pages as runs. It is at most
//! [`MAX_FRAME`] bytes long. Every frame is idempotent: planes may lose, duplicate and reorder.
//!
//! `link` names the conversation. Each side draws a number for the other when they meet and tells
//! it in [`Hello`] or [`Welcome`]; whoever speaks puts the listener's number into the frame. A
//! frame of a former incarnation, or of a conversation that was forgotten, carries a number that
//! nobody answers to, and is dropped and counted.

mod body;
mod lengths;

pub use body::{
    Abort, AbortAck, AskWrite, Body, Claim, Done, Failed, Finish, Granted, Heartbeat, HeartbeatAck, Hello,
    MayWrite, Ping, Pong, Progress, Refused, Register, Registered, Release, Released, Welcome,
};
pub use lengths::lengths_fit;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::plane::MAX_FRAME;

/// Version of the frames. Two workers talk only if they have the same.
pub const VERSION: u8 = 3;

/// A conversation, as the side that drew the number knows it. The upper half counts up, so that the
/// later of two can be told; the lower half is random, so that it cannot be guessed by mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Link(pub u64);

impl Link {
    /// What a `Hello` carries: its sender knows no number yet.
    pub const NONE: Link = Link(0);

    /// The `sequence`-th link of a node.
    pub fn new(sequence: u32, random: u32) -> Link {
        Link(u64::from(sequence) << 32 | u64::from(random))
    }

    /// Which of the node's links it is.
    pub fn sequence(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The listener's number for the conversation.
    pub link: Link,
    /// What is said.
    pub body: Body,
}

/// Why bytes are not a frame. Such bytes are dropped and counted; nobody answers them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Longer than any frame may be.
    #[error("frame of {got} bytes; at most {MAX_FRAME} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
    },
    /// Of another version.
    #[error("frame of version {got}; this is version {VERSION}")]
    Version {
        /// Its version.
        got: u8,
    },
    /// No such kind of frame.
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

/// The transport's metadata in a frame, if it is a [`Hello`]: only a connection that may speak for that
/// memory may bring it.
pub fn hello_metadata(frame: &[u8]) -> Option<Bytes> {
    // The kind is the third byte of every frame.
    if frame.get(2) != Some(&1) {
        return None;
    }
    match Frame::decode(frame) {
        Ok(Frame { body: Body::Hello(hello), .. }) => Some(hello.metadata),
        _ => None,
    }
}

impl Frame {
    /// The frame as bytes. Fails if it is longer than a frame may be.
    ///
    /// ```
    /// use kv_core::wire::{AbortAck, Body, Frame, Link};
    /// use kv_core::Attempt;
    /// let frame = Frame { link: Link::new(1, 7), body: Body::AbortAck(AbortAck { attempt: Attempt(3) }) };
    /// assert_eq!(Frame::decode(&frame.encode()?)?, frame);
    /// # Ok::<(), kv_core::wire::FrameError>(())
    /// ```
    pub fn encode(&self) -> Result<Bytes, FrameError> {
        let kind = self.body.kind();
        let mut out = Vec::with_capacity(64);
        let mut serializer = rmp_serde::Serializer::new(&mut out);
        self.body.encode(self.link, &mut serializer).map_err(|_| FrameError::Malformed { kind })?;
        if out.len() > MAX_FRAME {
            return Err(FrameError::TooLong { got: out.len() });
        }
        Ok(out.into())
    }

    /// The frame in these bytes, all of them.
    pub fn decode(bytes: &[u8]) -> Result<Frame, FrameError> {
        if bytes.len() > MAX_FRAME {
            return Err(FrameError::TooLong { got: bytes.len() });
        }
        // `[VERSION, kind, …`: a fixed array of four, then two small integers.
        let (version, kind) = match bytes {
            [0x94, version @ 0..=0x7f, kind @ 0..=0x7f, ..] => (*version, *kind),
            _ => return Err(FrameError::Malformed { kind: 0 }),
        };
        if version != VERSION {
            return Err(FrameError::Version { got: version });
        }
        let (link, body) = Body::decode(kind, bytes)?;
        Ok(Frame { link, body })
    }
}
