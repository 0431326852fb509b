//! One connection of the server: bytes in, requests, answers, bytes out.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use kv_core::Time;
use mio::event::Event;
use mio::net::TcpStream;

use crate::config::ServerConfig;
use crate::http::{Progress, Reply, Request, RequestLimits, RequestParser, Stage};

/// Answers waiting to be read by the client beyond which no further request is looked at.
const OUTPUT_MARK: usize = 64 << 10;
/// Bytes read, and requests answered, before other connections get their turn.
const READS_PER_TURN: usize = 8;
const REQUESTS_PER_TURN: usize = 64;
/// How long a client that was told to go may still send: closing with unread input would take the
/// answer from it.
const LINGER: Duration = Duration::from_secs(1);

/// A client.
///
/// | phase | left when |
/// |---|---|
/// | `Serving` | the last answer is decided (`Closing`), the client is gone (closed) |
/// | `Closing` | everything is sent: `Lingering` |
/// | `Lingering` | the client has closed its side, or a second has passed: closed |
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    parser: RequestParser,
    input: BytesMut,
    output: VecDeque<Bytes>,
    output_len: usize,
    /// Since when there has been something to send.
    output_since: Time,
    phase: Phase,
    /// When the present request, or part of it, or rest between requests, began.
    since: Time,
    waiting_for: Part,
    readable: bool,
    writable: bool,
    eof: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    Closing,
    Lingering,
}

/// What the client is expected to send next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// A request, at leisure.
    Nothing,
    Head,
    Body,
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing to do until the socket or the clock says so.
    Wait,
    /// There is more to do; others first.
    Again,
    /// Drop the connection.
    Close,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, now: Time, config: &ServerConfig) -> Connection {
        let limits = RequestLimits { max_head: config.max_head, max_body: config.max_body };
        Connection {
            stream,
            parser: RequestParser::new(limits),
            input: BytesMut::new(),
            output: VecDeque::new(),
            output_len: 0,
            output_since: now,
            phase: Phase::Serving,
            since: now,
            waiting_for: Part::Nothing,
            readable: true,
            writable: true,
            eof: false,
        }
    }

    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Takes note of what the socket is ready for.
    pub(crate) fn ready(&mut self, event: &Event) {
        self.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        self.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
    }

    /// Since when it has rested between requests; `None` if it is busy.
    pub(crate) fn idle_since(&self) -> Option<Time> {
        let idle =
            self.phase == Phase::Serving && self.waiting_for == Part::Nothing && self.output.is_empty();
        idle.then_some(self.since)
    }

    /// Bytes of an unfinished request.
    pub(crate) fn buffered(&self) -> usize {
        self.parser.buffered() + self.input.capacity()
    }

    /// When [`Connection::overdue`] is due.
    pub(crate) fn deadline(&self, config: &ServerConfig) -> Time {
        let output =
            if self.output.is_empty() { Time::MAX } else { self.output_since + config.write_timeout };
        let input = match self.phase {
            Phase::Lingering => self.since + LINGER,
            Phase::Closing => Time::MAX,
            Phase::Serving => match self.waiting_for {
                // A client that has not read its answers yet is not at rest.
                Part::Nothing if !self.output.is_empty() => Time::MAX,
                Part::Nothing => self.since + config.idle_timeout,
                // While nothing is read from the client, it is not the client that is slow.
                Part::Head | Part::Body if self.output_len >= OUTPUT_MARK => Time::MAX,
                Part::Head => self.since + config.head_timeout,
                Part::Body => self.since + config.body_timeout,
            },
        };
        input.min(output)
    }

    /// The deadline has passed. True if the connection is to be dropped.
    pub(crate) fn overdue(&mut self, now: Time) -> bool {
        let slow_request = self.phase == Phase::Serving && self.waiting_for != Part::Nothing;
        if slow_request && self.output.is_empty() {
            self.refuse(now, Reply::text(408, "the request did not arrive in time"));
            return false;
        }
        true
    }

    /// Gives a last answer to whatever was asked.
    pub(crate) fn refuse(&mut self, now: Time, reply: Reply) {
        if self.phase == Phase::Serving {
            self.send(now, reply.encode(true, false, false));
            self.phase = Phase::Closing;
            self.input.clear();
            self.parser.reset();
        }
    }

    /// Reads, answers and writes what can be without waiting.
    pub(crate) fn turn(
        &mut self,
        now: Time,
        scratch: &mut [u8],
        answer: &mut dyn FnMut(&Request) -> Reply,
    ) -> Turn {
        let (mut reads, mut requests) = (READS_PER_TURN, REQUESTS_PER_TURN);
        loop {
            if self.flush().is_err() {
                return Turn::Close;
            }
            let progress = match self.phase {
                Phase::Serving => self.serve(now, &mut requests, answer) || self.read(scratch, &mut reads),
                Phase::Closing => self.finish(now),
                Phase::Lingering => {
                    self.input.clear();
                    self.read(scratch, &mut reads)
                }
            };
            let done = self.output.is_empty() && self.eof;
            if done && !progress && self.phase != Phase::Closing {
                return Turn::Close;
            }
            if !progress {
                if self.input.is_empty() {
                    // A connection at rest holds no memory.
                    self.input = BytesMut::new();
                }
                return Turn::Wait;
            }
            if reads == 0 || requests == 0 {
                return Turn::Again;
            }
        }
    }

    /// Answers the next request, if it is complete. True if there was progress.
    fn serve(&mut self, now: Time, budget: &mut usize, answer: &mut dyn FnMut(&Request) -> Reply) -> bool {
        if self.output_len >= OUTPUT_MARK {
            return false;
        }
        match self.parser.parse(&mut self.input) {
            Ok(Progress::Complete(request)) => {
                *budget = budget.saturating_sub(1);
                self.since = now;
                self.waiting_for = Part::Nothing;
                let parts =
                    answer(&request).encode(request.http11, request.keep_alive, request.method == "HEAD");
                self.send(now, parts);
                if !request.keep_alive {
                    self.phase = Phase::Closing;
                }
                true
            }
            Ok(Progress::Continue) => {
                self.expect(now);
                self.send(now, vec![Bytes::from_static(b"HTTP/1.1 100 Continue\r\n\r\n")]);
                true
            }
            Ok(Progress::NeedMore) => {
                self.expect(now);
                false
            }
            Err(error) => {
                self.refuse(now, Reply::text(error.status(), error.to_string()));
                true
            }
        }
    }

    /// Notes which part of a request is missing, and since when.
    fn expect(&mut self, now: Time) {
        let part = match self.parser.stage() {
            Stage::Body => Part::Body,
            Stage::Head if self.input.is_empty() => Part::Nothing,
            Stage::Head => Part::Head,
        };
        if part != self.waiting_for {
            self.waiting_for = part;
            self.since = now;
        }
    }

    /// True if bytes, or the end, came in.
    fn read(&mut self, scratch: &mut [u8], budget: &mut usize) -> bool {
        let blocked = self.phase == Phase::Serving && self.output_len >= OUTPUT_MARK;
        if !self.readable || self.eof || blocked {
            return false;
        }
        *budget = budget.saturating_sub(1);
        loop {
            match self.stream.read(scratch) {
                Ok(0) => self.eof = true,
                Ok(len) => self.input.extend_from_slice(scratch.get(..len).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return false;
                }
                Err(_) => {
                    // Reset: nobody will read the rest either.
                    self.eof = true;
                    self.output.clear();
                    self.output_len = 0;
                }
            }
            return true;
        }
    }

    fn send(&mut self, now: Time, parts: Vec<Bytes>) {
        if self.output.is_empty() {
            self.output_since = now;
        }
        self.output_len += parts.iter().map(Bytes::len).sum::<usize>();
        self.output.extend(parts);
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.writable && !self.output.is_empty() {
            let slices: Vec<IoSlice<'_>> =
                self.output.iter().take(16).map(|part| IoSlice::new(part)).collect();
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
        self.output_len = self.output_len.saturating_sub(len);
        while let Some(part) = self.output.front_mut() {
            if part.len() > len {
                part.advance(len);
                return;
            }
            len -= part.len();
            self.output.pop_front();
        }
    }

    /// After the last byte: says so, and waits for the client to go. True if there was progress.
    fn finish(&mut self, now: Time) -> bool {
        if !self.output.is_empty() {
            return false;
        }
        self.phase = Phase::Lingering;
        self.since = now;
        // The client may be gone already; then reading finds out.
        if self.stream.shutdown(Shutdown::Write).is_err() {
            self.eof = true;
        }
        self.readable = true;
        true
    }
}
