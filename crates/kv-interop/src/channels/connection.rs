//! A connection of a ZeroMQ socket: a TCP stream that never blocks, and the ZMTP session on it.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use kv_bootstrap::net::Socket;
use mio::event::Event;
use mio::net::TcpStream;
use rustix::net::sockopt;

use crate::zmtp::{Heard, Session, SocketType, ZmtpError, write_message};

/// Most reads of one turn, before the owner continues with other connections.
const READS_PER_TURN: usize = 4;
/// A host that has vanished without a word is noticed after this silence, …
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// … and this many questions without an answer, …
const KEEPALIVE_COUNT: u32 = 3;
/// … at this distance.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// How long the peer's system may leave bytes unacknowledged, in milliseconds.
const UNACKNOWLEDGED: u32 = 25_000;

/// A connection with its session, and the bytes that the peer's system has not taken.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    session: Session,
}

/// What a turn of a connection has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is nothing more to read now.
    Wait,
    /// There may be more to read.
    Again,
}

/// Why a connection is over.
#[derive(Debug)]
pub(crate) enum Over {
    /// The peer has closed the connection, or its system has.
    Ended,
    /// The peer lives, and what it sends cannot be understood.
    Violated,
}

impl From<io::Error> for Over {
    fn from(_: io::Error) -> Over {
        Over::Ended
    }
}

impl From<ZmtpError> for Over {
    fn from(_: ZmtpError) -> Over {
        Over::Violated
    }
}

impl Connection {
    /// A connection of a socket of this type. The greeting goes out with the first turn.
    pub(crate) fn new(stream: TcpStream, ours: SocketType, max_message: usize) -> Connection {
        watch(&stream);
        let mut socket = Socket::new(stream);
        socket.send([Session::opening()]);
        Connection { socket, session: Session::new(ours, max_message) }
    }

    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        self.socket.stream()
    }

    /// Notes from an event whether the stream can be read or written.
    pub(crate) fn ready(&mut self, event: &Event) {
        self.socket.ready(event);
    }

    /// True once the handshake is over.
    pub(crate) fn is_open(&self) -> bool {
        self.session.is_ready()
    }

    /// Bytes of an unfinished message that are held.
    pub(crate) fn held(&self) -> usize {
        self.session.held()
    }

    /// Bytes that the peer's system has not taken yet.
    pub(crate) fn unsent(&self) -> usize {
        self.socket.unsent()
    }

    /// Queues a message. Only for a connection that is open.
    pub(crate) fn send(&mut self, parts: &[Bytes]) {
        self.socket.send(write_message(parts));
    }

    /// Sends what is queued, as far as the peer's system takes it.
    pub(crate) fn flush(&mut self) -> Result<(), Over> {
        Ok(self.socket.flush()?)
    }

    /// Reads what has come, up to a bound, and sends what is queued. Each message goes to `take`, which may
    /// answer with a message. `more_unsent` bounds the bytes that wait for the peer: beyond, answers to
    /// heartbeats are left out.
    pub(crate) fn turn(
        &mut self,
        scratch: &mut [u8],
        more_unsent: usize,
        take: &mut dyn FnMut(Said) -> Option<Vec<Bytes>>,
    ) -> Result<Turn, Over> {
        // A peer that has ended the connection has maybe sent something before.
        let flushed = self.socket.flush();
        for _ in 0..READS_PER_TURN {
            match self.socket.read(scratch)? {
                None => {
                    flushed?;
                    self.socket.flush()?;
                    return Ok(Turn::Wait);
                }
                Some(0) => return Err(Over::Ended),
                Some(_) => self.hear(more_unsent, take)?,
            }
        }
        self.socket.flush()?;
        Ok(Turn::Again)
    }

    fn hear(
        &mut self,
        more_unsent: usize,
        take: &mut dyn FnMut(Said) -> Option<Vec<Bytes>>,
    ) -> Result<(), ZmtpError> {
        let mut input = std::mem::take(&mut self.socket.input);
        let mut rest = &input[..];
        while let Some(heard) = self.session.take(&mut rest)? {
            let answer = match heard {
                Heard::Greeted(ready) => {
                    self.socket.send([ready]);
                    None
                }
                Heard::Ping(pong) if self.socket.unsent() < more_unsent => {
                    self.socket.send([pong]);
                    None
                }
                Heard::Ping(_) => None,
                Heard::Ready => take(Said::Ready),
                Heard::Message(parts) => {
                    take(Said::Message { parts, crowded: self.socket.unsent() >= more_unsent })
                }
            };
            if let Some(parts) = answer {
                self.send(&parts);
            }
        }
        input.clear();
        self.socket.input = input;
        Ok(())
    }
}

/// What the owner of a connection is told.
#[derive(Debug)]
pub(crate) enum Said {
    /// Messages may be sent from now on.
    Ready,
    /// A message. `crowded` is true if the peer has left too many bytes unread to be answered.
    Message { parts: Vec<Bytes>, crowded: bool },
}

/// Has the system notice the end of a host that vanishes. Where an option is refused, only such an end is
/// noticed later.
fn watch(stream: &TcpStream) {
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT);
    let _ = sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED);
}
