//! Messages on one Unix stream: length-prefixed, bounded both ways, never blocking.
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

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, Bytes, BytesMut};
use kv_core::MAX_FRAME;
use kv_host::descriptors::{self, ReceiveError};
use kv_host::{Arena, OsError};
use rustix::net::{RecvFlags, recv};

use crate::handshake::{MAX_HELLO, OPENING};
use crate::metadata::MAX_ARENAS;

/// Bytes before each body.
pub(crate) const HEADER: usize = 5;
/// Most descriptors that a peer lends: for the right to write, and for its arenas.
const MAX_LENT: usize = 1 + MAX_ARENAS;
/// Bytes written in one call, so that a peer that reads quickly does not keep us.
const FLUSH: usize = 64 << 10;
/// Most messages gathered into one write.
const GATHER: usize = 32;
/// Frames up to this size are copied out of the receive buffer, so as not to keep it alive.
const SMALL: usize = 4 << 10;
/// An empty receive buffer larger than this is given back.
const KEEP: usize = 64 << 10;

/// The kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hello = 1,
    Frame = 2,
    Goodbye = 3,
    Descriptors = 4,
}

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

/// What a peer said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Who it is. The descriptors that came after it are in [`Connection::take_fds`].
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

/// One connected socket.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    inbound: BytesMut,
    fds: Vec<OwnedFd>,
    heard: Heard,
    /// How the peer's hello must begin.
    opening: [u8; OPENING],
    outbound: VecDeque<Outgoing>,
    /// To go with the message of descriptors.
    right: Option<OwnedFd>,
    arenas: Vec<Arena>,
    /// Bytes in `outbound`.
    queued: usize,
    /// Bytes of the first message that are written already.
    written: usize,
    limit: usize,
    /// Frames may go out.
    open: bool,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER],
    body: Bytes,
}

impl Connection {
    /// A connection on a socket that does not block. `limit` bounds the queue of frames; the peer's hello
    /// must begin with `opening`.
    pub(crate) fn new(socket: OwnedFd, limit: usize, opening: [u8; OPENING]) -> Connection {
        Connection {
            socket,
            inbound: BytesMut::new(),
            fds: Vec::new(),
            heard: Heard::Nothing,
            opening,
            outbound: VecDeque::new(),
            right: None,
            arenas: Vec::new(),
            queued: 0,
            written: 0,
            limit,
            open: false,
        }
    }

    /// The socket.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Queues our hello, and after it the descriptors of the right to write and of the arenas.
    pub(crate) fn queue_hello(&mut self, body: Bytes, right: OwnedFd, arenas: Vec<Arena>) {
        self.right = Some(right);
        self.arenas = arenas;
        self.push(Kind::Hello, body);
        self.push(Kind::Descriptors, Bytes::new());
    }

    /// Queues a frame, unless there is no room.
    pub(crate) fn queue_frame(&mut self, body: Bytes) -> bool {
        if !self.has_room(body.len()) {
            return false;
        }
        self.push(Kind::Frame, body);
        true
    }

    /// Whether a frame of this length could be queued.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.queued.saturating_add(HEADER + len) <= self.limit
    }

    /// Drops the frames that have not begun to go out, and queues our goodbye.
    pub(crate) fn queue_goodbye(&mut self) {
        let begun = usize::from(self.written > 0);
        let mut position = 0;
        let queued = &mut self.queued;
        self.outbound.retain(|message| {
            let keep = position < begun || message.header[HEADER - 1] != Kind::Frame as u8;
            position += 1;
            if !keep {
                *queued -= HEADER + message.body.len();
            }
            keep
        });
        self.open = true;
        self.push(Kind::Goodbye, Bytes::new());
    }

    /// Lets frames go out: the peer has said who it is.
    pub(crate) fn open(&mut self) {
        self.open = true;
    }

    /// True if nothing waits to be written, or may be yet.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbound.front().is_none_or(|first| !self.may_go(first))
    }

    /// Writes as much as the socket takes, but a bounded amount.
    pub(crate) fn flush(&mut self) -> Result<(), OsError> {
        let mut left = FLUSH;
        while !self.is_flushed() && left > 0 {
            match self.write_some(left) {
                Ok(count) => {
                    self.advance(count);
                    left = left.saturating_sub(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads at most `scratch.len()` bytes.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<Received, Broken> {
        // Nothing is read beyond a message before the last one that the kernel treats differently.
        let room = self.wanted()?.min(scratch.len());
        let scratch = scratch.get_mut(..room).unwrap_or_default();
        let result = if matches!(self.heard, Heard::Hello(_)) {
            descriptors::receive(self.socket.as_fd(), scratch, &mut self.fds, MAX_LENT)
        } else {
            let received = recv(&self.socket, &mut *scratch, RecvFlags::DONTWAIT);
            received.map(|(_, count)| count).map_err(|error| OsError::new("recv", error).into())
        };
        match result {
            Ok(0) => Ok(Received::End),
            Ok(count) => {
                self.inbound.extend_from_slice(scratch.get(..count).unwrap_or_default());
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
        if self.inbound.len() < HEADER + len {
            return Ok(None);
        }
        self.inbound.advance(HEADER);
        let body = if len <= SMALL {
            let body = Bytes::copy_from_slice(self.inbound.get(..len).unwrap_or_default());
            self.inbound.advance(len);
            body
        } else {
            self.inbound.split_to(len).freeze()
        };
        if self.inbound.is_empty() && self.inbound.capacity() > KEEP {
            self.inbound = BytesMut::new();
        }
        Ok(match kind {
            Kind::Hello => {
                self.heard = Heard::Hello(body);
                None
            }
            Kind::Descriptors => match std::mem::replace(&mut self.heard, Heard::Everything) {
                Heard::Hello(hello) => Some(Message::Hello(hello)),
                Heard::Nothing | Heard::Everything => return Err(Broken::Kind(kind as u8)),
            },
            Kind::Frame => Some(Message::Frame(body)),
            Kind::Goodbye => Some(Message::Goodbye),
        })
    }

    /// How many bytes to ask the kernel for.
    fn wanted(&self) -> Result<usize, Broken> {
        let got = self.inbound.len();
        match self.heard {
            Heard::Everything => Ok(usize::MAX),
            Heard::Hello(_) => Ok(HEADER.saturating_sub(got)),
            // First only as much as shows whether the sender knows our token.
            Heard::Nothing if got < HEADER + OPENING => Ok(HEADER + OPENING - got),
            Heard::Nothing => Ok(self.peek()?.map_or(HEADER, |(_, len)| HEADER + len - got)),
        }
    }

    /// The descriptors that came with the hello.
    pub(crate) fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Kind and length of the message that begins the buffer, checked before its body is awaited.
    fn peek(&self) -> Result<Option<(Kind, usize)>, Broken> {
        let Some((header, _)) = self.inbound.split_first_chunk::<HEADER>() else {
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
        let body = self.inbound.get(HEADER..).unwrap_or_default();
        if matches!(kind, Kind::Hello) && body.iter().zip(&self.opening).any(|(got, wanted)| got != wanted) {
            return Err(Broken::Opening);
        }
        Ok(Some((kind, got)))
    }

    fn may_go(&self, message: &Outgoing) -> bool {
        self.open || message.header[HEADER - 1] != Kind::Frame as u8
    }

    fn push(&mut self, kind: Kind, body: Bytes) {
        // Every body is shorter than 4 GiB: callers bound hellos and frames.
        let [a, b, c, d] = (body.len() as u32).to_le_bytes();
        self.queued += HEADER + body.len();
        self.outbound.push_back(Outgoing { header: [a, b, c, d, kind as u8], body });
    }

    fn write_some(&self, most: usize) -> Result<usize, OsError> {
        let mut pieces = Vec::with_capacity(2 * GATHER);
        let mut skip = self.written;
        // The descriptors go with the first byte of their message, which therefore begins a write.
        let is_lending = |message: &Outgoing| message.header[HEADER - 1] == Kind::Descriptors as u8;
        let lends = skip == 0 && self.outbound.front().is_some_and(is_lending);
        let mut first = true;
        let mut room = most;
        for message in self.outbound.iter().take(GATHER).take_while(|message| self.may_go(message)) {
            if is_lending(message) && !first {
                break;
            }
            first = false;
            for part in [&message.header[..], &message.body[..]] {
                let rest = part.get(skip.min(part.len())..).unwrap_or_default();
                skip -= part.len() - rest.len();
                let rest = rest.get(..room).unwrap_or(rest);
                room -= rest.len();
                if !rest.is_empty() {
                    pieces.push(IoSlice::new(rest));
                }
            }
        }
        let lent =
            self.right.iter().map(AsFd::as_fd).chain(self.arenas.iter().map(|arena| arena.file().as_fd()));
        let fds: Vec<BorrowedFd<'_>> = if lends { lent.collect() } else { Vec::new() };
        descriptors::send(self.socket.as_fd(), &pieces, &fds)
    }

    fn advance(&mut self, count: usize) {
        self.written += count;
        while let Some(first) = self.outbound.front() {
            if self.written > 0 && first.header[HEADER - 1] == Kind::Descriptors as u8 {
                // They went with the first byte.
                self.right = None;
                self.arenas.clear();
            }
            let size = HEADER + first.body.len();
            if self.written < size {
                break;
            }
            self.written -= size;
            self.queued -= size;
            self.outbound.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    const OPENS: [u8; OPENING] = [7; OPENING];

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Connection::new(ours.into(), 4 << 20, OPENS), theirs)
    }

    fn drain(connection: &mut Connection) -> Result<Vec<Message>, Broken> {
        let mut messages = Vec::new();
        let mut scratch = vec![0; 1000];
        loop {
            while let Some(message) = connection.next_message()? {
                messages.push(message);
            }
            if !matches!(connection.receive(&mut scratch)?, Received::Bytes(_)) {
                return Ok(messages);
            }
        }
    }

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend_from_slice(body);
        bytes
    }

    /// A hello, and no descriptors.
    fn greeting(hello: &[u8]) -> Vec<u8> {
        [message(1, hello), message(4, b"")].concat()
    }

    #[test]
    fn messages_are_whole_however_the_stream_is_cut() {
        let (mut ours, mut theirs) = pair();
        let hello = [&OPENS[..], b"me"].concat();
        let stream = [greeting(&hello), message(2, b""), message(2, &[9; 7000]), message(3, b"")].concat();
        let mut got = Vec::new();
        for piece in stream.chunks(613) {
            theirs.write_all(piece).unwrap();
            got.extend(drain(&mut ours).unwrap());
        }
        let wanted = [
            Message::Hello(Bytes::from(hello)),
            Message::Frame(Bytes::new()),
            Message::Frame(Bytes::from(vec![9; 7000])),
            Message::Goodbye,
        ];
        assert_eq!(got, wanted);
        drop(theirs);
        assert_eq!(ours.receive(&mut [0; 8]), Ok(Received::End));
    }

    #[test]
    fn a_length_is_refused_before_its_body_is_awaited() {
        for (kind, len, greeted) in [
            (1u8, MAX_HELLO as u32 + 1, false),
            (2, MAX_FRAME as u32 + 1, true),
            (2, u32::MAX, true),
            (3, 1, true),
        ] {
            let (mut ours, mut theirs) = pair();
            if greeted {
                theirs.write_all(&greeting(&OPENS)).unwrap();
            }
            theirs.write_all(&len.to_le_bytes()).unwrap();
            theirs.write_all(&[kind]).unwrap();
            assert!(matches!(drain(&mut ours), Err(Broken::Length { .. })), "{kind}");
        }
    }

    #[test]
    fn frames_before_the_hello_and_a_second_hello_break_the_connection() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&message(2, b"early")).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(2)));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&[greeting(&OPENS), message(1, &OPENS)].concat()).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(1)));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&[message(1, &OPENS), message(2, b"early")].concat()).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(2)));
    }

    #[test]
    fn a_hello_for_somebody_else_is_refused_before_the_rest_of_it_is_awaited() {
        for wrong in 0..OPENING {
            let (mut ours, mut theirs) = pair();
            let mut opening = OPENS;
            opening[wrong] ^= 1;
            theirs.write_all(&(MAX_HELLO as u32).to_le_bytes()).unwrap();
            theirs.write_all(&[1]).unwrap();
            theirs.write_all(&opening).unwrap();
            assert_eq!(drain(&mut ours), Err(Broken::Opening), "{wrong}");
        }
    }

    #[test]
    fn a_full_queue_refuses_frames_and_a_goodbye_takes_their_place() {
        let (mut ours, theirs) = pair();
        ours.open();
        let frame = Bytes::from(vec![1; MAX_FRAME]);
        let mut accepted = 0;
        while ours.queue_frame(frame.clone()) {
            accepted += 1;
            ours.flush().unwrap();
            assert!(accepted < 100);
        }
        assert!(accepted >= 3);
        ours.queue_goodbye();
        theirs.set_nonblocking(true).unwrap();
        let mut reader = Connection::new(theirs.into(), 0, OPENS);
        reader.heard = Heard::Everything;
        let mut got = Vec::new();
        while got.last() != Some(&Message::Goodbye) {
            ours.flush().unwrap();
            got.extend(drain(&mut reader).unwrap());
        }
        // The frame that had begun to go out arrived whole, the others not at all.
        assert_eq!(got, [Message::Frame(frame), Message::Goodbye]);
        assert_eq!(ours.queued, 0);
    }
}
