//! One connection: the greeting, the handshake, and then messages and commands.

use bytes::Bytes;
use kv_core::MAX_FRAME;

use super::command::{Command, write_pong, write_ready};
use super::error::ZmtpError;
use super::frame::{Frame, FrameReader, Room};
use super::greeting::{self, Greeting};
use crate::message::MAX_PARTS;

/// Longest command in bytes. READY of libzmq has less than 400.
const MAX_COMMAND: usize = 4096;
/// Most bytes of all parts of a message: what is left of a worker's frame, in which a message travels on, when
/// the lengths of its parts are written down.
pub(crate) const MAX_MESSAGE: usize = MAX_FRAME - 4096;

/// The type of a ZeroMQ socket on this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketType {
    Req,
    Push,
    Pull,
    Router,
}

impl SocketType {
    fn name(self) -> &'static str {
        match self {
            SocketType::Req => "REQ",
            SocketType::Push => "PUSH",
            SocketType::Pull => "PULL",
            SocketType::Router => "ROUTER",
        }
    }

    /// The types of sockets with which a socket of this type can talk.
    fn partners(self) -> &'static [&'static str] {
        match self {
            SocketType::Req => &["ROUTER", "REP"],
            SocketType::Push => &["PULL"],
            SocketType::Pull => &["PUSH"],
            SocketType::Router => &["REQ", "DEALER", "ROUTER"],
        }
    }
}

/// What came out of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The peer's greeting is accepted. The owner sends these bytes, this side's READY.
    Greeted(Bytes),
    /// The peer's socket goes with ours: messages may be sent from now on.
    Ready,
    /// A message: its parts.
    Message(Vec<Bytes>),
    /// A heartbeat of the peer. The owner sends these bytes, its answer, unless the peer does not read.
    Ping(Bytes),
}

/// One side of a connection.
#[derive(Debug)]
pub(crate) struct Session {
    ours: SocketType,
    max_message: usize,
    stage: Stage,
    frames: FrameReader,
    /// The parts of a message so far, and their bytes.
    parts: Vec<Bytes>,
    len: usize,
}

#[derive(Debug)]
enum Stage {
    Greeting(Greeting),
    Handshake,
    Traffic,
}

impl Session {
    /// A connection of a socket of this type that has sent its [opening](Session::opening). A message of the
    /// peer may have `max_message` bytes, all parts together.
    pub(crate) fn new(ours: SocketType, max_message: usize) -> Session {
        let stage = Stage::Greeting(Greeting::new());
        Session { ours, max_message, stage, frames: FrameReader::default(), parts: Vec::new(), len: 0 }
    }

    /// A connection whose handshake is finished.
    #[cfg(feature = "fuzz")]
    pub(crate) fn ready(ours: SocketType) -> Session {
        Session { stage: Stage::Traffic, ..Session::new(ours, MAX_MESSAGE) }
    }

    /// The bytes with which every connection begins.
    pub(crate) fn opening() -> Bytes {
        Bytes::copy_from_slice(&greeting::ours())
    }

    /// True once messages may be sent.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Traffic)
    }

    /// Bytes of an unfinished message that are held.
    pub(crate) fn held(&self) -> usize {
        self.len + self.frames.held()
    }

    /// Takes bytes away from the input until something has been heard. `None` when the input is used up.
    pub(crate) fn take(&mut self, input: &mut &[u8]) -> Result<Option<Heard>, ZmtpError> {
        if let Stage::Greeting(greeting) = &mut self.stage {
            if !greeting.take(input)? {
                return Ok(None);
            }
            self.stage = Stage::Handshake;
            return Ok(Some(Heard::Greeted(write_ready(self.ours.name()))));
        }
        loop {
            let room = Room { command: MAX_COMMAND, message: self.max_message, before: self.len };
            let Some(frame) = self.frames.take(input, room)? else { return Ok(None) };
            let heard = match frame {
                Frame::Command(body) => self.command(Command::parse(body)?)?,
                Frame::Part { more, bytes } => self.part(more, bytes)?,
            };
            if heard.is_some() {
                return Ok(heard);
            }
        }
    }

    fn command(&mut self, command: Command) -> Result<Option<Heard>, ZmtpError> {
        match command {
            Command::Error { reason } => Err(ZmtpError::Refused { reason }),
            Command::Ready { socket_type } if !self.is_ready() => {
                if !self.ours.partners().contains(&socket_type.as_str()) {
                    return Err(ZmtpError::SocketType { ours: self.ours.name(), theirs: socket_type });
                }
                self.stage = Stage::Traffic;
                Ok(Some(Heard::Ready))
            }
            _ if !self.is_ready() => Err(ZmtpError::NotReady { got: "another command" }),
            Command::Ping { context } => Ok(Some(Heard::Ping(write_pong(&context)))),
            Command::Ready { .. } | Command::Other => Ok(None),
        }
    }

    fn part(&mut self, more: bool, bytes: Bytes) -> Result<Option<Heard>, ZmtpError> {
        if !self.is_ready() {
            return Err(ZmtpError::NotReady { got: "a message" });
        }
        if self.parts.len() == MAX_PARTS {
            return Err(ZmtpError::Parts { max: MAX_PARTS });
        }
        self.len += bytes.len();
        self.parts.push(bytes);
        if more {
            return Ok(None);
        }
        self.len = 0;
        Ok(Some(Heard::Message(std::mem::take(&mut self.parts))))
    }
}

#[cfg(test)]
mod tests;
