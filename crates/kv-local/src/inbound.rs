//! The bytes that a peer has sent on a connection, and the messages in them. Each length is checked before
//! the body is awaited.

use std::mem;
use std::os::fd::{AsFd, OwnedFd};

use bytes::{Buf, Bytes, BytesMut};
use kv_core::MAX_FRAME;
use kv_host::OsError;
use kv_host::descriptors::{self, ReceiveError};
use rustix::net::{RecvFlags, recv};

use crate::framing::{Broken, HEADER, Kind, MAX_LENT, Message};
use crate::handshake::{MAX_HELLO, OPENING};

/// Frames of up to so many bytes are copied out of the receive buffer, so that they do not keep it alive.
const SMALL: usize = 4 << 10;
/// An empty receive buffer of more bytes than this is freed.
const KEEP: usize = 64 << 10;

/// How much of the peer's greeting has arrived.
#[derive(Debug)]
enum Heard {
    /// The hello has not arrived completely.
    Nothing,
    /// The hello has arrived, and its descriptors have not.
    Hello(Bytes),
    /// The hello and its descriptors have arrived.
    Everything,
}

/// The result of reading once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// So many bytes were read.
    Bytes(usize),
    /// There is nothing to read at the moment.
    Nothing,
    /// The stream has ended and all its bytes have been read.
    End,
}

/// Bytes that do not make a complete message yet, and descriptors that came with them.
#[derive(Debug)]
pub(crate) struct Inbound {
    buffer: BytesMut,
    fds: Vec<OwnedFd>,
    heard: Heard,
    /// The bytes with which the peer's hello must begin.
    opening: [u8; OPENING],
}

impl Inbound {
    /// The inbound side of a new connection. The peer's hello must begin with `opening`.
    pub(crate) fn new(opening: [u8; OPENING]) -> Inbound {
        Inbound { buffer: BytesMut::new(), fds: Vec::new(), heard: Heard::Nothing, opening }
    }

    /// The inbound side of a connection whose peer has sent its hello and its descriptors.
    #[cfg(test)]
    pub(crate) fn greeted() -> Inbound {
        Inbound { heard: Heard::Everything, ..Inbound::new([0; OPENING]) }
    }

    /// Reads at most `scratch.len()` bytes from a socket that does not block.
    pub(crate) fn receive(&mut self, socket: &OwnedFd, scratch: &mut [u8]) -> Result<Received, Broken> {
        // Until the descriptors have come, no byte is read beyond a message: the next one is read by another
        // call.
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
            // A reset comes instead of the end if the peer has left bytes of this side unread.
            Err(_) => Ok(Received::End),
        }
    }

    /// The next complete message, if one has arrived.
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
            Kind::Wake => Some(Message::Wake),
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
            // At first only as many bytes as show whether the sender knows this transport's token.
            Heard::Nothing if got < HEADER + OPENING => Ok(HEADER + OPENING - got),
            Heard::Nothing => Ok(self.peek()?.map_or(HEADER, |(_, len)| HEADER + len - got)),
        }
    }

    /// Kind and length of the message at the beginning of the buffer, checked before its body is awaited.
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
            (5, Heard::Everything) => (Kind::Wake, 0, 0),
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
