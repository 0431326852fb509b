//! Messages on one Unix stream: length-prefixed, bounded both ways, never blocking.
//!
//! | bytes | |
//! |---|---|
//! | 4 | length of the body, little endian |
//! | 1 | kind: 1 hello, 2 frame, 3 goodbye |
//! | length | body |
//!
//! A hello comes first, exactly once, and carries the descriptors of the sender's arenas. A goodbye
//! comes last, and says that the sender has stopped copying.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, Bytes, BytesMut};
use kv_core::MAX_FRAME;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

use crate::arena::Arena;
use crate::handshake::MAX_HELLO;
use crate::metadata::MAX_ARENAS;

/// Bytes before each body.
pub(crate) const HEADER: usize = 5;
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
}

/// What a peer said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Who it is. The descriptors that came with it are in [`Connection::take_fds`].
    Hello(Bytes),
    /// A frame.
    Frame(Bytes),
    /// It has stopped copying and forgets us.
    Goodbye,
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
    #[error("a body of {got} bytes; {max} are allowed")]
    Length { got: usize, max: usize },
    #[error("descriptors that were not asked for, or too many")]
    Descriptors,
}

/// One connected socket.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    inbound: BytesMut,
    fds: Vec<OwnedFd>,
    greeted: bool,
    outbound: VecDeque<Outgoing>,
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
    /// A connection on a socket that does not block. `limit` bounds the queue of frames.
    pub(crate) fn new(socket: OwnedFd, limit: usize) -> Connection {
        Connection {
            socket,
            inbound: BytesMut::new(),
            fds: Vec::new(),
            greeted: false,
            outbound: VecDeque::new(),
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

    /// Queues our hello; the arenas' descriptors go with its first byte.
    pub(crate) fn queue_hello(&mut self, body: Bytes, arenas: Vec<Arena>) {
        self.arenas = arenas;
        self.push(Kind::Hello, body);
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
            let keep = position < begun || message.header[HEADER - 1] == Kind::Hello as u8;
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
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let mut left = FLUSH;
        while !self.is_flushed() && left > 0 {
            match self.write_some(left) {
                Ok(count) => {
                    self.advance(count);
                    left = left.saturating_sub(count);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads at most `scratch.len()` bytes.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<Received, Broken> {
        let result = if self.greeted {
            recv(&self.socket, &mut *scratch, RecvFlags::DONTWAIT).map(|(_, count)| count)
        } else {
            self.receive_with_fds(scratch)?
        };
        match result {
            Ok(0) => Ok(Received::End),
            Ok(count) => {
                self.inbound.extend_from_slice(scratch.get(..count).unwrap_or_default());
                Ok(Received::Bytes(count))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
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
        Ok(Some(match kind {
            Kind::Hello => {
                self.greeted = true;
                Message::Hello(body)
            }
            Kind::Frame => Message::Frame(body),
            Kind::Goodbye => Message::Goodbye,
        }))
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
        let (kind, max) = match (kind, self.greeted) {
            (1, false) => (Kind::Hello, MAX_HELLO),
            (2, true) => (Kind::Frame, MAX_FRAME),
            (3, true) => (Kind::Goodbye, 0),
            _ => return Err(Broken::Kind(kind)),
        };
        let got = u32::from_le_bytes([a, b, c, d]) as usize;
        if got > max { Err(Broken::Length { got, max }) } else { Ok(Some((kind, got))) }
    }

    fn receive_with_fds(&mut self, scratch: &mut [u8]) -> Result<Result<usize, Errno>, Broken> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ARENAS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.socket, &mut [IoSliceMut::new(scratch)], &mut control, flags) {
            Ok(received) => received,
            Err(error) => return Ok(Err(error)),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_ARENAS {
            return Err(Broken::Descriptors);
        }
        Ok(Ok(received.bytes))
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

    fn write_some(&self, most: usize) -> Result<usize, Errno> {
        let mut pieces = Vec::with_capacity(2 * GATHER);
        let mut skip = self.written;
        let mut room = most;
        for message in self.outbound.iter().take(GATHER).take_while(|message| self.may_go(message)) {
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
        let fds: Vec<BorrowedFd<'_>> = self.arenas.iter().map(Arena::fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ARENAS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        sendmsg(&self.socket, &pieces, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn advance(&mut self, count: usize) {
        // The descriptors went with the first byte of the hello.
        self.arenas.clear();
        self.written += count;
        while let Some(first) = self.outbound.front() {
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

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Connection::new(ours.into(), 4 << 20), theirs)
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

    #[test]
    fn messages_are_whole_however_the_stream_is_cut() {
        let (mut ours, mut theirs) = pair();
        let stream = [message(1, b"me"), message(2, b""), message(2, &[9; 7000]), message(3, b"")].concat();
        let mut got = Vec::new();
        for piece in stream.chunks(613) {
            theirs.write_all(piece).unwrap();
            got.extend(drain(&mut ours).unwrap());
        }
        let wanted = [
            Message::Hello(Bytes::from_static(b"me")),
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
                theirs.write_all(&message(1, b"")).unwrap();
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
        theirs.write_all(&[message(1, b""), message(1, b"")].concat()).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(1)));
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
        let mut reader = Connection::new(theirs.into(), 0);
        reader.greeted = true;
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
