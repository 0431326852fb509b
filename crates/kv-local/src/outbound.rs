//! The messages that wait to be written to a connection, in order and within a bound, and the descriptors
//! that are sent with one of them.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::Bytes;
use kv_host::{Arena, OsError, descriptors};

use crate::framing::{HEADER, Kind, header};

/// Most bytes written in one call, so that a peer that reads quickly does not keep this thread.
const FLUSH: usize = 64 << 10;
/// So many messages do not wait for others.
const MANY: usize = 64;
/// Bytes of messages that do not wait for others.
const LONG: usize = 16 << 10;

/// The messages that one connection has still to write.
#[derive(Debug)]
pub(crate) struct Outbound {
    messages: VecDeque<Outgoing>,
    /// The page of the peer's right to write, sent with the message of descriptors.
    right: Option<OwnedFd>,
    /// The arenas of this side, sent with the message of descriptors.
    arenas: Vec<Arena>,
    /// Bytes in `messages`, headers included.
    queued: usize,
    /// Bytes of the first message that are written already.
    written: usize,
    limit: usize,
    /// True if frames may be written: the peer has sent its hello.
    open: bool,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER],
    body: Bytes,
}

impl Outgoing {
    fn is(&self, kind: Kind) -> bool {
        self.header[HEADER - 1] == kind as u8
    }
}

impl Outbound {
    /// An empty queue that takes frames until it holds `limit` bytes.
    pub(crate) fn new(limit: usize) -> Outbound {
        Outbound {
            messages: VecDeque::new(),
            right: None,
            arenas: Vec::new(),
            queued: 0,
            written: 0,
            limit,
            open: false,
        }
    }

    /// Queues this side's hello, then the message with the descriptors of the right to write and of the
    /// arenas.
    pub(crate) fn queue_hello(&mut self, body: Bytes, right: OwnedFd, arenas: Vec<Arena>) {
        self.right = Some(right);
        self.arenas = arenas;
        self.push(Kind::Hello, body);
        self.push(Kind::Descriptors, Bytes::new());
        // Frames that were queued while the peer's backlog was full come behind.
        self.messages.rotate_right(2);
    }

    /// Queues a frame; false if there is no room.
    pub(crate) fn queue_frame(&mut self, body: Bytes) -> bool {
        if !self.has_room(body.len()) {
            return false;
        }
        self.push(Kind::Frame, body);
        true
    }

    /// Queues a message that wakes the peer, unless messages wait that will.
    pub(crate) fn queue_wake(&mut self) {
        if self.messages.is_empty() {
            self.push(Kind::Wake, Bytes::new());
        }
    }

    /// True if there is room for a frame of `len` bytes.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.queued.saturating_add(HEADER + len) <= self.limit
    }

    /// Drops the frames of which no byte is written, and queues this side's goodbye.
    pub(crate) fn queue_goodbye(&mut self) {
        let begun = usize::from(self.written > 0);
        let mut position = 0;
        let queued = &mut self.queued;
        self.messages.retain(|message| {
            let keep = position < begun || !message.is(Kind::Frame);
            position += 1;
            if !keep {
                *queued -= HEADER + message.body.len();
            }
            keep
        });
        self.open = true;
        self.push(Kind::Goodbye, Bytes::new());
    }

    /// Allows frames to be written: the peer's hello has been accepted.
    pub(crate) fn open(&mut self) {
        self.open = true;
    }

    /// True if the messages fill a write: none is to wait for further ones.
    pub(crate) fn is_long(&self) -> bool {
        self.messages.len() >= MANY || self.queued >= LONG
    }

    /// True if no message waits that may be written now.
    pub(crate) fn is_flushed(&self) -> bool {
        self.messages.front().is_none_or(|first| !self.may_go(first))
    }

    /// Writes as many bytes as the socket takes, 64 KiB at most. `scratch` is overwritten.
    pub(crate) fn flush(&mut self, socket: &OwnedFd, scratch: &mut Vec<u8>) -> Result<(), OsError> {
        let mut left = FLUSH;
        while !self.is_flushed() && left > 0 {
            match self.write_some(socket, scratch, left) {
                Ok(count) => {
                    self.advance(count);
                    left = left.saturating_sub(count);
                }
                Err(error) if error.kind == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    fn may_go(&self, message: &Outgoing) -> bool {
        self.open || !message.is(Kind::Frame)
    }

    fn push(&mut self, kind: Kind, body: Bytes) {
        self.queued += HEADER + body.len();
        self.messages.push_back(Outgoing { header: header(kind, body.len()), body });
    }

    /// Writes the first messages, of `most` bytes at most. They are gathered in `scratch` first: most are so short that
    /// the kernel takes longer for each piece of a list than for its bytes.
    fn write_some(&self, socket: &OwnedFd, scratch: &mut Vec<u8>, most: usize) -> Result<usize, OsError> {
        scratch.clear();
        let mut skip = self.written;
        // The descriptors go with the first byte of their message, which therefore begins a write.
        let lends = skip == 0 && self.messages.front().is_some_and(|first| first.is(Kind::Descriptors));
        for message in self.messages.iter().take_while(|message| self.may_go(message)) {
            if scratch.len() == most || message.is(Kind::Descriptors) && !scratch.is_empty() {
                break;
            }
            for part in [&message.header[..], &message.body[..]] {
                let rest = part.get(skip.min(part.len())..).unwrap_or_default();
                skip -= part.len() - rest.len();
                scratch.extend_from_slice(rest.get(..most - scratch.len()).unwrap_or(rest));
            }
        }
        let arenas = self.arenas.iter().map(|arena| arena.file().as_fd());
        let lent = self.right.iter().map(AsFd::as_fd).chain(arenas);
        let fds: Vec<BorrowedFd<'_>> = if lends { lent.collect() } else { Vec::new() };
        descriptors::send(socket.as_fd(), &[IoSlice::new(scratch)], &fds)
    }

    fn advance(&mut self, count: usize) {
        self.written += count;
        while let Some(first) = self.messages.front() {
            if self.written > 0 && first.is(Kind::Descriptors) {
                // The descriptors were sent with the first byte.
                self.right = None;
                self.arenas.clear();
            }
            let size = HEADER + first.body.len();
            if self.written < size {
                break;
            }
            self.written -= size;
            self.queued -= size;
            self.messages.pop_front();
        }
    }
}
