//! Frames: one byte of flags, the length in one or eight bytes, and the bytes.

use bytes::{BufMut, Bytes, BytesMut};

use super::error::ZmtpError;

/// Another frame of the same message follows.
const MORE: u8 = 1;
/// The length has eight bytes.
const LONG: u8 = 2;
/// The frame is a command.
const COMMAND: u8 = 4;

/// A frame that has come whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Command(Bytes),
    /// A part of a message; `more` is true if another part follows.
    Part {
        more: bool,
        bytes: Bytes,
    },
}

/// The most bytes that the next frame may have, if it is a command and if it is a part of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) command: usize,
    pub(super) message: usize,
    /// The bytes of the message that have come already, for the text of the error.
    pub(super) before: usize,
}

/// A frame while its bytes come in.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    header: [u8; 9],
    filled: usize,
    /// The bytes so far, once the header is there.
    body: Option<Vec<u8>>,
    /// The length of the frame.
    len: usize,
}

impl FrameReader {
    /// Bytes of the unfinished frame that are held.
    pub(super) fn held(&self) -> usize {
        self.body.as_ref().map_or(0, Vec::len)
    }

    /// Bytes of memory that the unfinished frame takes.
    #[cfg(test)]
    pub(super) fn room_taken(&self) -> usize {
        self.body.as_ref().map_or(0, Vec::capacity)
    }

    /// Takes bytes away from the input, up to the end of a frame. `None` when the input is used up.
    pub(super) fn take(&mut self, input: &mut &[u8], room: Room) -> Result<Option<Frame>, ZmtpError> {
        if self.body.is_none() && !self.take_header(input, room)? {
            return Ok(None);
        }
        let body = self.body.get_or_insert_default();
        let (now, later) = input.split_at(input.len().min(self.len - body.len()));
        if now.len() == self.len {
            body.reserve_exact(now.len());
        }
        body.extend_from_slice(now);
        *input = later;
        if body.len() < self.len {
            return Ok(None);
        }
        let (bytes, flags) = (Bytes::from(std::mem::take(body)), self.header[0]);
        *self = FrameReader::default();
        Ok(Some(match flags & COMMAND {
            0 => Frame::Part { more: flags & MORE != 0, bytes },
            _ => Frame::Command(bytes),
        }))
    }

    /// True once the header is there and may be followed by as many bytes as it announces.
    fn take_header(&mut self, input: &mut &[u8], room: Room) -> Result<bool, ZmtpError> {
        while let Some((&byte, rest)) = input.split_first() {
            *input = rest;
            self.header[self.filled] = byte;
            self.filled += 1;
            let flags = self.header[0];
            if flags > MORE | LONG && flags != COMMAND && flags != COMMAND | LONG {
                return Err(ZmtpError::Flags(flags));
            }
            let length = match self.header {
                [_, short, ..] if flags & LONG == 0 && self.filled == 2 => u64::from(short),
                [_, long @ ..] if self.filled == 9 => u64::from_be_bytes(long),
                _ => continue,
            };
            let (what, max, before) = match flags & COMMAND {
                0 => ("message", room.message, room.before),
                _ => ("command", room.command, 0),
            };
            let got = length.saturating_add(before as u64);
            self.len = usize::try_from(length).unwrap_or(usize::MAX);
            if got > max as u64 {
                return Err(ZmtpError::Length { what, got, max });
            }
            self.body = Some(Vec::new());
            return Ok(true);
        }
        Ok(false)
    }
}

/// The bytes of a message, in pieces: a header before each part.
pub(crate) fn write_message(parts: &[Bytes]) -> Vec<Bytes> {
    let mut out = Vec::with_capacity(2 * parts.len());
    for (at, part) in parts.iter().enumerate() {
        let more = if at + 1 < parts.len() { MORE } else { 0 };
        out.push(header(more, part.len()));
        if !part.is_empty() {
            out.push(part.clone());
        }
    }
    out
}

/// The bytes of a command.
pub(super) fn write_command(body: &[u8]) -> Bytes {
    [&header(COMMAND, body.len()), body].concat().into()
}

fn header(flags: u8, len: usize) -> Bytes {
    let mut header = BytesMut::with_capacity(9);
    match u8::try_from(len) {
        Ok(short) => header.put_slice(&[flags, short]),
        Err(_) => {
            header.put_u8(flags | LONG);
            header.put_u64(len as u64);
        }
    }
    header.freeze()
}
