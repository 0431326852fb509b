//! A socket that never blocks: bytes that were read and are not used yet, and bytes that are still to be
//! sent.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;

use bytes::{Buf, Bytes, BytesMut};
use mio::event::Event;
use mio::net::TcpStream;

/// Most pieces of output given to the system in one call.
const MAX_SLICES: usize = 16;

/// A connected stream with its input and output, edge-triggered by mio.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    /// Bytes that were read. A parser takes away the bytes of a message.
    pub input: BytesMut,
    output: VecDeque<Bytes>,
    unsent: usize,
    readable: bool,
    writable: bool,
}

impl Socket {
    /// A socket on a stream that is connected, or is being connected.
    pub fn new(stream: TcpStream) -> Socket {
        // Messages are small and whole; waiting for more to send only delays them.
        let _ = stream.set_nodelay(true);
        let (input, output) = (BytesMut::new(), VecDeque::new());
        Socket { stream, input, output, unsent: 0, readable: true, writable: true }
    }

    /// The stream, to register with a poll and to deregister.
    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Notes from an event whether the socket can be read or written.
    pub fn ready(&mut self, event: &Event) {
        self.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        self.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
    }

    /// Queues bytes; [`Socket::flush`] sends them.
    pub fn send(&mut self, parts: impl IntoIterator<Item = Bytes>) {
        for part in parts {
            self.unsent += part.len();
            self.output.push_back(part);
        }
    }

    /// Bytes that are still to be sent.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Sends as many queued bytes as the system takes without blocking.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.writable && self.unsent > 0 {
            let parts = self.output.iter().take(MAX_SLICES);
            let slices: Vec<IoSlice<'_>> = parts.map(|part| IoSlice::new(part)).collect();
            match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => self.sent(len),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut len: usize) {
        self.unsent = self.unsent.saturating_sub(len);
        while let Some(part) = self.output.front_mut() {
            if part.len() > len {
                part.advance(len);
                return;
            }
            len -= part.len();
            self.output.pop_front();
        }
    }

    /// Reads once, at most `scratch.len()` bytes, and returns their number; `None` if there is nothing to
    /// read now, `Some(0)` at the end of the stream.
    pub fn read(&mut self, scratch: &mut [u8]) -> io::Result<Option<usize>> {
        while self.readable {
            match self.stream.read(scratch) {
                Ok(len) => {
                    self.input.extend_from_slice(scratch.get(..len).unwrap_or_default());
                    return Ok(Some(len));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Drops the bytes that are still to be sent, because the peer will not read them.
    pub fn give_up(&mut self) {
        self.output.clear();
        self.unsent = 0;
    }

    /// Closes the sending direction. The peer's own end of the stream, or its reset, is still to be read.
    pub fn finish(&mut self) -> io::Result<()> {
        self.readable = true;
        self.stream.shutdown(Shutdown::Write)
    }
}
