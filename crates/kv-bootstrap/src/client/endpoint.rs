//! One server as the client sees it: a queue of requests, and a connection that carries them.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;

use bytes::{Buf, Bytes, BytesMut};
use kv_core::{BootstrapError, Time};
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::resolve::{Resolver, Target};
use crate::config::ClientConfig;
use crate::http::{Response, ResponseParser};

/// How often a request is sent before a connection that breaks is its failure. All requests may
/// be repeated; the first connection may just have been closed for having been idle.
const MAX_SENDS: u8 = 2;
/// Pieces read in one go, before the caller gets its turn again.
const READS_PER_TURN: usize = 32;

/// A request with its meaning `P`.
#[derive(Debug)]
pub(crate) struct Request<P> {
    pub(crate) purpose: P,
    /// When it was asked for.
    pub(crate) asked: Time,
    pub(crate) deadline: Time,
    bytes: Bytes,
    sends: u8,
}

impl<P> Request<P> {
    pub(crate) fn new(purpose: P, bytes: Bytes, asked: Time, deadline: Time) -> Request<P> {
        Request { purpose, asked, deadline, bytes, sends: 0 }
    }
}

/// What became of a request.
pub(crate) type Outcome<P> = (Request<P>, Result<Response, BootstrapError>);

/// What an endpoint needs of its client to make progress.
pub(crate) struct Context<'a> {
    pub(crate) now: Time,
    pub(crate) config: &'a ClientConfig,
    pub(crate) registry: &'a Registry,
    pub(crate) resolver: &'a mut Resolver,
    pub(crate) scratch: &'a mut [u8],
}

/// A server.
///
/// Every request submitted comes out of [`Endpoint::advance`] exactly once, at its deadline at the
/// latest. Requests are answered in the order in which they were submitted.
#[derive(Debug)]
pub(crate) struct Endpoint<P> {
    addr: String,
    target: Target,
    token: Token,
    addrs: Addrs,
    link: Link,
    queue: VecDeque<Request<P>>,
    in_flight: VecDeque<Request<P>>,
    idle_since: Time,
    /// There is something to do at once: a new request, or more to read than one turn allows.
    more: bool,
}

#[derive(Debug)]
enum Addrs {
    Unknown,
    Known { list: Vec<SocketAddr>, until: Time },
}

#[derive(Debug)]
enum Link {
    Down,
    /// The connection to the address at this position is being opened.
    Connecting {
        stream: TcpStream,
        index: usize,
        writable: bool,
    },
    Up(Box<Up>),
}

#[derive(Debug)]
struct Up {
    stream: TcpStream,
    parser: ResponseParser,
    input: BytesMut,
    output: VecDeque<Bytes>,
    readable: bool,
    writable: bool,
}

impl<P> Endpoint<P> {
    pub(crate) fn new(addr: &str, target: Target, token: Token, now: Time) -> Endpoint<P> {
        let addrs = match target.numeric() {
            Some(addr) => Addrs::Known { list: vec![addr], until: Time::MAX },
            None => Addrs::Unknown,
        };
        Endpoint {
            addr: addr.to_owned(),
            target,
            token,
            addrs,
            link: Link::Down,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            idle_since: now,
            more: false,
        }
    }

    pub(crate) fn addr(&self) -> &str {
        &self.addr
    }

    /// Queues a request; `Err` if the queue is full.
    pub(crate) fn submit(&mut self, config: &ClientConfig, request: Request<P>) -> Result<(), Request<P>> {
        if self.queue.len() >= config.max_queue {
            return Err(request);
        }
        self.queue.push_back(request);
        self.more = true;
        Ok(())
    }

    /// Requests that have not been sent yet.
    pub(crate) fn queued_mut(&mut self) -> &mut VecDeque<Request<P>> {
        &mut self.queue
    }

    /// Requests of any kind that are not answered yet.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Request<P>> {
        self.in_flight.iter().chain(&self.queue)
    }

    /// True if nothing would be lost by forgetting it.
    pub(crate) fn is_unused(&self) -> bool {
        self.pending().next().is_none() && matches!(self.link, Link::Down)
    }

    /// Takes note of what the socket is ready for.
    pub(crate) fn ready(&mut self, event: &Event) {
        let write = event.is_writable() || event.is_write_closed() || event.is_error();
        match &mut self.link {
            Link::Down => {}
            Link::Connecting { writable, .. } => *writable |= write,
            Link::Up(up) => {
                up.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
                up.writable |= write;
            }
        }
    }

    /// The answer of the resolver.
    pub(crate) fn resolved(
        &mut self,
        now: Time,
        config: &ClientConfig,
        found: Result<Vec<SocketAddr>, io::ErrorKind>,
        outcomes: &mut Vec<Outcome<P>>,
    ) {
        match found {
            Ok(list) if !list.is_empty() => {
                self.addrs = Addrs::Known { list, until: now + config.resolve_ttl };
            }
            Ok(_) => self.fail_queue(io::ErrorKind::NotFound, outcomes),
            Err(kind) => self.fail_queue(kind, outcomes),
        }
    }

    /// When [`Endpoint::advance`] wants to be called again without any event.
    pub(crate) fn next_timeout(&self, config: &ClientConfig) -> Option<Time> {
        if self.more {
            return Some(Time::ZERO);
        }
        let deadline = self.in_flight.front().into_iter().chain(self.queue.front()).map(|r| r.deadline).min();
        match self.link {
            Link::Up(_) if deadline.is_none() => Some(self.idle_since + config.idle_timeout),
            _ => deadline,
        }
    }

    /// Makes progress without waiting, and says what became of requests.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>, outcomes: &mut Vec<Outcome<P>>) {
        self.more = false;
        self.time_out(context, outcomes);
        loop {
            let progress = match self.link {
                Link::Down if self.queue.is_empty() => false,
                Link::Down => self.open(context, outcomes),
                Link::Connecting { writable, .. } => writable && self.connected(context, outcomes),
                Link::Up(_) => self.exchange(context, outcomes),
            };
            if !progress {
                return;
            }
        }
    }

    fn time_out(&mut self, context: &Context<'_>, outcomes: &mut Vec<Outcome<P>>) {
        let now = context.now;
        if self.in_flight.front().is_some_and(|request| request.deadline <= now) {
            // The answer may still come, ahead of those to later requests: no use for it here.
            self.close(context.registry);
            self.requeue();
        }
        while self.queue.front().is_some_and(|request| request.deadline <= now) {
            outcomes.extend(self.queue.pop_front().map(|request| (request, Err(BootstrapError::TimedOut))));
        }
        if self.pending().next().is_none() {
            match self.link {
                Link::Connecting { .. } => self.close(context.registry),
                Link::Up(_) if self.idle_since + context.config.idle_timeout <= now => {
                    self.close(context.registry);
                }
                _ => {}
            }
        }
    }

    /// Begins to connect, or to find out where to. True if there is more to do at once.
    fn open(&mut self, context: &mut Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        match &self.addrs {
            Addrs::Known { until, .. } if *until > context.now => {
                self.connect(context, 0, io::ErrorKind::NotFound, outcomes);
                false
            }
            _ => {
                self.addrs = Addrs::Unknown;
                context.resolver.start(&self.addr, &self.target);
                false
            }
        }
    }

    /// Connects to the first address from position `index` on that takes it so far. Without any,
    /// all requests fail with the last error.
    fn connect(
        &mut self,
        context: &Context<'_>,
        mut index: usize,
        mut error: io::ErrorKind,
        outcomes: &mut Vec<Outcome<P>>,
    ) {
        if let Addrs::Known { list, .. } = &self.addrs {
            while let Some(addr) = list.get(index) {
                let interest = Interest::READABLE | Interest::WRITABLE;
                let opened = TcpStream::connect(*addr).and_then(|mut stream| {
                    context.registry.register(&mut stream, self.token, interest)?;
                    Ok(stream)
                });
                match opened {
                    Ok(stream) => {
                        self.link = Link::Connecting { stream, index, writable: false };
                        return;
                    }
                    Err(failure) => error = failure.kind(),
                }
                index += 1;
            }
        }
        self.link = Link::Down;
        self.fail_queue(error, outcomes);
    }

    /// The socket has become writable: the connection stands, or has failed. True if it stands.
    fn connected(&mut self, context: &Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        let Link::Connecting { stream, index, .. } = std::mem::replace(&mut self.link, Link::Down) else {
            return false;
        };
        let error = match stream.take_error() {
            Ok(None) => match stream.peer_addr() {
                Ok(_) => None,
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                    self.link = Link::Connecting { stream, index, writable: false };
                    return false;
                }
                Err(error) => Some(error),
            },
            Ok(Some(error)) | Err(error) => Some(error),
        };
        if let Some(error) = error {
            drop(stream);
            self.connect(context, index + 1, error.kind(), outcomes);
            return false;
        }
        // Requests are small and whole; waiting for more to send only delays them.
        let _ = stream.set_nodelay(true);
        self.link = Link::Up(Box::new(Up {
            stream,
            parser: ResponseParser::new(context.config.max_response),
            input: BytesMut::new(),
            output: VecDeque::new(),
            readable: true,
            writable: true,
        }));
        true
    }

    /// Sends requests and receives answers. True if the connection is gone and requests are left.
    fn exchange(&mut self, context: &mut Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        let Link::Up(up) = &mut self.link else { return false };
        while self.in_flight.len() < context.config.max_pipeline.max(1)
            && let Some(mut request) = self.queue.pop_front()
        {
            request.sends += 1;
            up.output.push_back(request.bytes.clone());
            self.in_flight.push_back(request);
        }
        let mut lost = up.flush().err().map(|error| error.kind());
        let mut announced = false;
        for turn in 0.. {
            if turn == READS_PER_TURN {
                self.more = true;
                break;
            }
            let eof = match up.read(context.scratch) {
                Ok(Some(0)) => true,
                Ok(Some(_)) => false,
                Ok(None) => break,
                Err(kind) => {
                    lost = Some(kind);
                    true
                }
            };
            // A connection that cannot be written to may still hold the answer that says why.
            loop {
                match up.parser.parse(&mut up.input, eof) {
                    Ok(Some(response)) => {
                        let Some(request) = self.in_flight.pop_front() else {
                            // An answer to nothing: whatever follows would be taken for another.
                            lost = lost.or(Some(io::ErrorKind::InvalidData));
                            break;
                        };
                        self.idle_since = context.now;
                        let keep_alive = response.keep_alive;
                        outcomes.push((request, Ok(response)));
                        if !keep_alive {
                            announced = true;
                            lost = lost.or(Some(io::ErrorKind::ConnectionAborted));
                            break;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        let failed = self.in_flight.pop_front();
                        let error = BootstrapError::Malformed(error.text());
                        outcomes.extend(failed.map(|request| (request, Err(error))));
                        lost = lost.or(Some(io::ErrorKind::InvalidData));
                        break;
                    }
                }
            }
            if eof {
                lost = lost.or(Some(io::ErrorKind::UnexpectedEof));
            }
            if lost.is_some() {
                break;
            }
        }
        match lost {
            None => false,
            Some(kind) => {
                self.close(context.registry);
                if announced {
                    // The server will not have looked at what follows the last it answers.
                    self.in_flight.iter_mut().for_each(|request| request.sends -= 1);
                }
                while self.in_flight.front().is_some_and(|request| request.sends >= MAX_SENDS) {
                    let failed = self.in_flight.pop_front();
                    outcomes.extend(failed.map(|request| (request, Err(BootstrapError::Unreachable(kind)))));
                }
                self.requeue();
                true
            }
        }
    }

    /// Puts the requests in flight back to where they came from.
    fn requeue(&mut self) {
        while let Some(request) = self.in_flight.pop_back() {
            self.queue.push_front(request);
        }
    }

    fn close(&mut self, registry: &Registry) {
        self.more = false;
        match std::mem::replace(&mut self.link, Link::Down) {
            Link::Down => {}
            Link::Connecting { mut stream, .. } => drop(registry.deregister(&mut stream)),
            Link::Up(mut up) => drop(registry.deregister(&mut up.stream)),
        }
    }

    fn fail_queue(&mut self, kind: io::ErrorKind, outcomes: &mut Vec<Outcome<P>>) {
        if self.target.numeric().is_none() {
            // The name may lead elsewhere by now.
            self.addrs = Addrs::Unknown;
        }
        let failed = self.queue.drain(..).map(|request| (request, Err(BootstrapError::Unreachable(kind))));
        outcomes.extend(failed);
    }
}

impl Up {
    fn flush(&mut self) -> io::Result<()> {
        while self.writable && !self.output.is_empty() {
            let slices: Vec<IoSlice<'_>> =
                self.output.iter().take(16).map(|part| IoSlice::new(part)).collect();
            match self.stream.write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(mut len) => {
                    while let Some(part) = self.output.front_mut() {
                        if part.len() > len {
                            part.advance(len);
                            break;
                        }
                        len -= part.len();
                        self.output.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what there is; `None` if nothing is there, `Some(0)` at the end.
    fn read(&mut self, scratch: &mut [u8]) -> Result<Option<usize>, io::ErrorKind> {
        while self.readable {
            match self.stream.read(scratch) {
                Ok(len) => {
                    self.input.extend_from_slice(scratch.get(..len).unwrap_or_default());
                    return Ok(Some(len));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) => return Err(error.kind()),
            }
        }
        Ok(None)
    }
}
