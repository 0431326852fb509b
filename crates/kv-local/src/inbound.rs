//! What a peer has sent on a connection: bytes become messages, each length checked before its body is
//! awaited.

use std::mem;
use std::os::fd::{AsFd, OwnedFd};

use bytes::{Buf, Bytes, BytesMut};
use kv_core::MAX_FRAME;
use kv_host::OsError;
use kv_host::descriptors::{self, ReceiveError};
use rustix::net::{RecvFlags, recv};

use crate::framing::{Broken, HEADER, Kind, MAX_LENT, Message};
use crate::handshake::{MAX_HELLO, OPENING};

/// Frames up to this size are copied out of the receive buffer, so as not to keep it alive.
const SMALL: usize = 4 << 10;
/// An empty receive buffer larger than this is given back.
const KEEP: usize = 64 << 10;

/// What the peer has said so far.
#[derive(Debug)]
enum Heard {
    /// Not the whole hello.
    Nothing,
    /// Its hello, but not its descriptors.
    Hello(Bytes),
    /// Both.
    Everything,
}

/// What reading brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// That many bytes.
    Bytes(usize),
    /// Nothing for now.
    Nothing,
    /// The stream has ended and everything that was in it has been read.
    End,
}

/// Bytes that came and are no messages yet, and descriptors that came with them.
#[derive(Debug)]
pub(crate) struct Inbound {
    buffer: BytesMut,
    fds: Vec<OwnedFd>,
    heard: Heard,
    /// How the peer's hello must begin.
    opening: [u8; OPENING],
}

impl Inbound {
    /// Nothing has come; the peer's hello must begin with `opening`.
    pub(crate) fn new(opening: [u8; OPENING]) -> Inbound {
        Inbound { buffer: BytesMut::new(), fds: Vec::new(), heard: Heard::Nothing, opening }
    }

    /// Of a peer that has said its hello and sent its descriptors.
    #[cfg(test)]
    pub(crate) fn greeted() -> Inbound {
        Inbound { heard: Heard::Everything, ..Inbound::new([0; OPENING]) }
    }

    /// Reads at most `scratch.len()` bytes from a socket that does not block.
    pub(crate) fn receive(&mut self, socket: &OwnedFd, scratch: &mut [u8]) -> Result<Received, Broken> {
        // Nothing is read beyond a message before the last one that the kernel treats differently.
        let room = self.wanted()?.min(scratch.len());
        let scratch = scratch.get_mut(..room).unwrap_or_default();
        let result = if matches!(self.heard, Heard::Hello(_)) {
            descriptors::receive(socket.as_fd(), scratch, &mut self.fds, MAX_LENT)
        } else {
            let received = recv(socket, &mut *scratch, RecvFlags::DONTWAIT);
            received.map(|(_, count)| count).map_err(|error| OsError::new("recv", error).into())
        };
        match result {
            Ok(0) => Ok(Received::End),
            Ok(count) => {
                self.buffer.extend_from_slice(scratch.get(..count).unwrap_or_default());
                Ok(Received::Bytes(count))
            }
            Err(error) if error.is_for_now() => Ok(Received::Nothing),
            Err(ReceiveError::TooMany { .. }) => Err(Broken::Descriptors),
            // A reset comes instead of the end when the peer left something of ours unread.
            Err(_) => Ok(Received::End),
        }
    }

    /// The next complete message.
    pub(crate) fn next_message(&mut self) -> Result<Option<Message>, Broken> {
        let Some((kind, len)) = self.peek()? else {
            return Ok(None);
        };
        if self.buffer.len() < HEADER + len {
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        let body = if len <= SMALL {
            let body = Bytes::copy_from_slice(self.buffer.get(..len).unwrap_or_default());
            self.buffer.advance(len);
            body
        } else {
            self.buffer.split_to(len).freeze()
        };
        if self.buffer.is_empty() && self.buffer.capacity() > KEEP {
            self.buffer = BytesMut::new();
        }
        Ok(match kind {
            Kind::Hello => {
                self.heard = Heard::Hello(body);
                None
            }
            Kind::Descriptors => match mem::replace(&mut self.heard, Heard::Everything) {
                Heard::Hello(hello) => Some(Message::Hello(hello)),
                Heard::Nothing | Heard::Everything => return Err(Broken::Kind(kind as u8)),
            },
            Kind::Frame => Some(Message::Frame(body)),
            Kind::Goodbye => Some(Message::Goodbye),
        })
    }

    /// The descriptors that came with the hello.
    pub(crate) fn take_fds(&mut self) -> Vec<OwnedFd> {
        mem::take(&mut self.fds)
    }

    /// How many bytes to ask the kernel for.
    fn wanted(&self) -> Result<usize, Broken> {
        let got = self.buffer.len();
        match self.heard {
            Heard::Everything => Ok(usize::MAX),
            Heard::Hello(_) => Ok(HEADER.saturating_sub(got)),
            // First only as much as shows whether the sender knows our token.
            Heard::Nothing if got < HEADER + OPENING => Ok(HEADER + OPENING - got),
            Heard::Nothing => Ok(self.peek()?.map_or(HEADER, |(_, len)| HEADER + len - got)),
        }
    }

    /// Kind and length of the message that begins the buffer, checked before its body is awaited.
    fn peek(&self) -> Result<Option<(Kind, usize)>, Broken> {
        let Some((header, _)) = self.buffer.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [a, b, c, d, kind] = *header;
        let (kind, min, max) = match (kind, &self.heard) {
            (1, Heard::Nothing) => (Kind::Hello, OPENING, MAX_HELLO),
            (2, Heard::Everything) => (Kind::Frame, 0, MAX_FRAME),
            (3, Heard::Everything) => (Kind::Goodbye, 0, 0),
            (4, Heard::Hello(_)) => (Kind::Descriptors, 0, 0),
            _ => return Err(Broken::Kind(kind)),
        };
        let got = u32::from_le_bytes([a, b, c, d]) as usize;
        if !(min..=max).contains(&got) {
            return Err(Broken::Length { got, min, max });
        }
        let body = self.buffer.get(HEADER..).unwrap_or_default();
        if matches!(kind, Kind::Hello) && body.iter().zip(&self.opening).any(|(got, wanted)| got != wanted) {
            return Err(Broken::Opening);
        }
        Ok(Some((kind, got)))
    }
}
