//! One connection of the server: bytes are read, requests parsed and answered, and answers written.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::Time;
use mio::event::Event;
use mio::net::TcpStream;

use crate::config::ServerConfig;
use crate::http::{Progress, Reply, Request, RequestLimits, RequestParser, Stage};
use crate::socket::Socket;

/// Bytes of unsent answers from which on no further request of the client is parsed.
const OUTPUT_MARK: usize = 64 << 10;
/// Bytes read, and requests answered, before other connections get their turn.
const READS_PER_TURN: usize = 8;
const REQUESTS_PER_TURN: usize = 64;
/// How long a client may still send after its last answer: closing a socket with unread input would make the
/// client lose that answer.
const LINGER: Duration = Duration::from_secs(1);

/// The connection of one client.
///
/// | phase | left when |
/// |---|---|
/// | `Serving` | the last answer is decided (`Closing`), the client is gone (closed) |
/// | `Closing` | all answers are sent: `Lingering` |
/// | `Lingering` | the client has closed its side, or a second has passed: closed |
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    parser: RequestParser,
    /// Since when there has been something to send.
    output_since: Time,
    phase: Phase,
    /// When the part in `waiting_for` began: the head, the body, or the pause between requests.
    since: Time,
    waiting_for: Part,
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
    /// Nothing: the connection rests between requests.
    Nothing,
    Head,
    Body,
}

/// What the server does with a connection after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Wait until the socket is ready or the deadline has passed.
    Wait,
    /// Give the connection another turn, after the others.
    Again,
    /// Close the connection and drop its value.
    Close,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, now: Time, config: &ServerConfig) -> Connection {
        let limits = RequestLimits { max_head: config.max_head, max_body: config.max_body };
        Connection {
            socket: Socket::new(stream),
            parser: RequestParser::new(limits),
            output_since: now,
            phase: Phase::Serving,
            since: now,
            waiting_for: Part::Nothing,
            eof: false,
        }
    }

    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        self.socket.stream()
    }

    /// Notes from an event whether the socket can be read or written.
    pub(crate) fn ready(&mut self, event: &Event) {
        self.socket.ready(event);
    }

    /// Since when the connection has rested between requests; `None` if it is busy.
    pub(crate) fn idle_since(&self) -> Option<Time> {
        let idle =
            self.phase == Phase::Serving && self.waiting_for == Part::Nothing && self.socket.unsent() == 0;
        idle.then_some(self.since)
    }

    /// Bytes of memory that an unfinished request takes.
    pub(crate) fn buffered(&self) -> usize {
        self.parser.buffered() + self.socket.input.capacity()
    }

    /// When [`Connection::overdue`] must be called, unless the connection makes progress before.
    pub(crate) fn deadline(&self, config: &ServerConfig) -> Time {
        let output =
            if self.socket.unsent() == 0 { Time::MAX } else { self.output_since + config.write_timeout };
        let input = match self.phase {
            Phase::Lingering => self.since + LINGER,
            Phase::Closing => Time::MAX,
            Phase::Serving => match self.waiting_for {
                // A client that has not read its answers yet is not at rest.
                Part::Nothing if self.socket.unsent() > 0 => Time::MAX,
                Part::Nothing => self.since + config.idle_timeout,
                // While nothing is read from the client, it is not the client that is slow.
                Part::Head | Part::Body if self.socket.unsent() >= OUTPUT_MARK => Time::MAX,
                Part::Head => self.since + config.head_timeout,
                Part::Body => self.since + config.body_timeout,
            },
        };
        input.min(output)
    }

    /// Handles a deadline that has passed. Returns true if the connection must be closed.
    pub(crate) fn overdue(&mut self, now: Time) -> bool {
        let slow_request = self.phase == Phase::Serving && self.waiting_for != Part::Nothing;
        if slow_request && self.socket.unsent() == 0 {
            self.refuse(now, Reply::text(408, "the request did not arrive in time"));
            return false;
        }
        true
    }

    /// Sends a last answer and reads no further request.
    pub(crate) fn refuse(&mut self, now: Time, reply: Reply) {
        if self.phase == Phase::Serving {
            self.send(now, reply.encode(true, false, false));
            self.phase = Phase::Closing;
            self.socket.input.clear();
            self.parser.reset();
        }
    }

    /// Reads, answers and writes as much as possible without blocking.
    pub(crate) fn turn(
        &mut self,
        now: Time,
        scratch: &mut [u8],
        answer: &mut dyn FnMut(&Request) -> Reply,
    ) -> Turn {
        let (mut reads, mut requests) = (READS_PER_TURN, REQUESTS_PER_TURN);
        loop {
            if self.socket.flush().is_err() {
                return Turn::Close;
            }
            let progress = match self.phase {
                Phase::Serving => self.serve(now, &mut requests, answer) || self.read(scratch, &mut reads),
                Phase::Closing => self.finish(now),
                Phase::Lingering => {
                    self.socket.input.clear();
                    self.read(scratch, &mut reads)
                }
            };
            let done = self.socket.unsent() == 0 && self.eof;
            if done && !progress && self.phase != Phase::Closing {
                return Turn::Close;
            }
            if !progress {
                if self.socket.input.is_empty() {
                    // A connection at rest holds no memory.
                    self.socket.input = BytesMut::new();
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
        if self.socket.unsent() >= OUTPUT_MARK {
            return false;
        }
        match self.parser.parse(&mut self.socket.input) {
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

    /// Notes which part of a request the client must send next, and since when.
    fn expect(&mut self, now: Time) {
        let part = match self.parser.stage() {
            Stage::Body => Part::Body,
            Stage::Head if self.socket.input.is_empty() => Part::Nothing,
            Stage::Head => Part::Head,
        };
        if part != self.waiting_for {
            self.waiting_for = part;
            self.since = now;
        }
    }

    /// Reads once. True if bytes, or the end of the stream, came in.
    fn read(&mut self, scratch: &mut [u8], budget: &mut usize) -> bool {
        let blocked = self.phase == Phase::Serving && self.socket.unsent() >= OUTPUT_MARK;
        if self.eof || blocked {
            return false;
        }
        match self.socket.read(scratch) {
            Ok(None) => return false,
            Ok(Some(len)) => self.eof = len == 0,
            Err(_) => {
                // The client has reset the connection, and will not read the rest either.
                self.eof = true;
                self.socket.give_up();
            }
        }
        *budget = budget.saturating_sub(1);
        true
    }

    fn send(&mut self, now: Time, parts: Vec<Bytes>) {
        if self.socket.unsent() == 0 {
            self.output_since = now;
        }
        self.socket.send(parts);
    }

    /// After the last byte: closes the sending direction, and waits for the client to close its own. True if
    /// there was progress.
    fn finish(&mut self, now: Time) -> bool {
        if self.socket.unsent() > 0 {
            return false;
        }
        self.phase = Phase::Lingering;
        self.since = now;
        // If the client is gone already, reading finds that out.
        self.eof |= self.socket.finish().is_err();
        true
    }
}
