//! One server as the client sees it: a queue of requests, and the connection that carries them.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use kv_core::{BootstrapError, OsError, Time};
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::resolve::{Resolver, Target};
use crate::config::ClientConfig;
use crate::http::{Response, ResponseParser};
use crate::socket::Socket;

/// How often a request is sent before a broken connection makes the request fail. All requests may be
/// repeated, and the server may have closed the first connection just then because it was idle.
const MAX_SENDS: u8 = 2;
/// Most reads in one turn, before the caller continues with other servers.
const READS_PER_TURN: usize = 32;

/// A request, with the purpose `P` for which the client made it.
#[derive(Debug)]
pub(crate) struct Request<P> {
    pub(crate) purpose: P,
    /// When the request was made.
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

/// A request that has ended, with its answer or error.
pub(crate) type Outcome<P> = (Request<P>, Result<Response, BootstrapError>);

/// What an endpoint needs of its client to make progress.
pub(crate) struct Context<'a> {
    pub(crate) now: Time,
    pub(crate) config: &'a ClientConfig,
    pub(crate) registry: &'a Registry,
    pub(crate) resolver: &'a mut Resolver,
    pub(crate) scratch: &'a mut [u8],
}

/// One server, its requests and its connection.
///
/// Every request submitted comes out of [`Endpoint::advance`] exactly once, at its deadline at the
/// latest. Requests are answered in the order in which they were submitted.
#[derive(Debug)]
pub(crate) struct Endpoint<P> {
    addr: String,
    target: Target,
    key: Token,
    addrs: Addrs,
    link: Link,
    queue: VecDeque<Request<P>>,
    in_flight: VecDeque<Request<P>>,
    idle_since: Time,
    /// True if there is something to do at once: a new request, or more to read than one turn allows.
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
    /// The connection to the address at position `index` is being opened.
    Connecting {
        stream: TcpStream,
        index: usize,
        writable: bool,
    },
    Up(Box<Up>),
}

#[derive(Debug)]
struct Up {
    socket: Socket,
    parser: ResponseParser,
}

/// Why a connection cannot be used any more.
#[derive(Debug, Clone, Copy)]
enum Loss {
    /// The server announced with its last answer that it closes: it has not read the requests that follow.
    Announced,
    Broken(OsError),
}

impl<P> Endpoint<P> {
    pub(crate) fn new(addr: &str, target: Target, key: Token, now: Time) -> Endpoint<P> {
        let addrs = match target.numeric() {
            Some(addr) => Addrs::Known { list: vec![addr], until: Time::MAX },
            None => Addrs::Unknown,
        };
        Endpoint {
            addr: addr.to_owned(),
            target,
            key,
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

    /// Requests that are not answered yet, sent or not.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Request<P>> {
        self.in_flight.iter().chain(&self.queue)
    }

    /// True if there is neither a request nor a connection.
    pub(crate) fn is_unused(&self) -> bool {
        self.pending().next().is_none() && matches!(self.link, Link::Down)
    }

    /// Notes from an event whether the socket can be read or written.
    pub(crate) fn ready(&mut self, event: &Event) {
        match &mut self.link {
            Link::Down => {}
            Link::Connecting { writable, .. } => {
                *writable |= event.is_writable() || event.is_write_closed() || event.is_error();
            }
            Link::Up(up) => up.socket.ready(event),
        }
    }

    /// Takes the resolver's answer for this server's name.
    pub(crate) fn resolved(
        &mut self,
        now: Time,
        config: &ClientConfig,
        found: Result<Vec<SocketAddr>, OsError>,
        outcomes: &mut Vec<Outcome<P>>,
    ) {
        match found {
            Ok(list) if !list.is_empty() => {
                self.addrs = Addrs::Known { list, until: now + config.resolve_ttl };
            }
            Ok(_) => self.fail_queue(no_address(), outcomes),
            Err(error) => self.fail_queue(error, outcomes),
        }
    }

    /// When [`Endpoint::advance`] must be called again if no event comes before.
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

    /// Makes as much progress as possible without blocking, and adds requests that have ended to `outcomes`.
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
            // The answer may still come, before those to later requests, and would be taken for one of
            // theirs.
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

    /// Begins to connect, or to resolve the server's name. True if there is more to do at once.
    fn open(&mut self, context: &mut Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        match &self.addrs {
            Addrs::Known { until, .. } if *until > context.now => {
                self.connect(context, 0, no_address(), outcomes);
                false
            }
            _ => {
                self.addrs = Addrs::Unknown;
                context.resolver.start(&self.addr, &self.target);
                false
            }
        }
    }

    /// Begins to connect to the first address from position `index` on that does not fail at once. If all of
    /// them fail, all requests fail with the last error.
    fn connect(
        &mut self,
        context: &Context<'_>,
        mut index: usize,
        mut error: OsError,
        outcomes: &mut Vec<Outcome<P>>,
    ) {
        if let Addrs::Known { list, .. } = &self.addrs {
            while let Some(addr) = list.get(index) {
                let interest = Interest::READABLE | Interest::WRITABLE;
                let opened = TcpStream::connect(*addr).and_then(|mut stream| {
                    context.registry.register(&mut stream, self.key, interest)?;
                    Ok(stream)
                });
                match opened {
                    Ok(stream) => {
                        self.link = Link::Connecting { stream, index, writable: false };
                        return;
                    }
                    Err(failure) => error = OsError::new("connect", failure),
                }
                index += 1;
            }
        }
        self.link = Link::Down;
        self.fail_queue(error, outcomes);
    }

    /// Handles a socket that has become writable: it is connected, or connecting has failed. True if it is
    /// connected.
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
            self.connect(context, index + 1, OsError::new("connect", error), outcomes);
            return false;
        }
        let (socket, parser) = (Socket::new(stream), ResponseParser::new(context.config.max_response));
        self.link = Link::Up(Box::new(Up { socket, parser }));
        true
    }

    /// Sends requests and receives answers. True if the connection is lost, so that another must be opened.
    fn exchange(&mut self, context: &mut Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        let Link::Up(up) = &mut self.link else { return false };
        while self.in_flight.len() < context.config.max_pipeline.max(1)
            && let Some(mut request) = self.queue.pop_front()
        {
            request.sends += 1;
            up.socket.send([request.bytes.clone()]);
            self.in_flight.push_back(request);
        }
        let mut lost = up.socket.flush().err().map(|error| broken("write", error));
        for _ in 0..READS_PER_TURN {
            let (eof, ended) = match up.socket.read(context.scratch) {
                Ok(Some(0)) => (true, Some(broken("read", io::ErrorKind::UnexpectedEof))),
                Ok(Some(_)) => (false, None),
                Ok(None) => return lost.is_some_and(|lost| self.lose(lost, context, outcomes)),
                Err(error) => (true, Some(broken("read", error))),
            };
            // A connection that cannot be written to may still hold the answer that says why.
            let answered = up.answers(eof, context.now, &mut self.in_flight, &mut self.idle_since, outcomes);
            lost = match answered {
                Err(Loss::Announced) => Some(Loss::Announced),
                Err(broken) => lost.or(Some(broken)),
                Ok(()) => lost.or(ended),
            };
            if let Some(lost) = lost {
                return self.lose(lost, context, outcomes);
            }
        }
        self.more = true;
        false
    }

    /// Closes a lost connection. Requests that were sent [`MAX_SENDS`] times fail; the others wait for the
    /// next connection.
    fn lose(&mut self, lost: Loss, context: &Context<'_>, outcomes: &mut Vec<Outcome<P>>) -> bool {
        self.close(context.registry);
        match lost {
            Loss::Announced => self.in_flight.iter_mut().for_each(|request| request.sends -= 1),
            Loss::Broken(error) => {
                while self.in_flight.front().is_some_and(|request| request.sends >= MAX_SENDS) {
                    let failed = self.in_flight.pop_front();
                    outcomes.extend(failed.map(|request| (request, Err(BootstrapError::Unreachable(error)))));
                }
            }
        }
        self.requeue();
        true
    }

    /// Puts the requests in flight back to the front of the queue, in order.
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
            Link::Up(mut up) => drop(registry.deregister(up.socket.stream())),
        }
    }

    fn fail_queue(&mut self, error: OsError, outcomes: &mut Vec<Outcome<P>>) {
        if self.target.numeric().is_none() {
            // The name may have other addresses by now.
            self.addrs = Addrs::Unknown;
        }
        let failed = self.queue.drain(..).map(|request| (request, Err(BootstrapError::Unreachable(error))));
        outcomes.extend(failed);
    }
}

impl Up {
    /// Takes the answers that have arrived, in the order of the requests; `eof` says that no more bytes will
    /// come.
    fn answers<P>(
        &mut self,
        eof: bool,
        now: Time,
        in_flight: &mut VecDeque<Request<P>>,
        idle_since: &mut Time,
        outcomes: &mut Vec<Outcome<P>>,
    ) -> Result<(), Loss> {
        loop {
            let response = match self.parser.parse(&mut self.socket.input, eof) {
                Ok(Some(response)) => response,
                Ok(None) => return Ok(()),
                Err(error) => {
                    let error = BootstrapError::Malformed(error.text());
                    outcomes.extend(in_flight.pop_front().map(|request| (request, Err(error))));
                    return Err(broken("read", io::ErrorKind::InvalidData));
                }
            };
            // An answer without a request: all later answers would be taken for those of other requests.
            let request = in_flight.pop_front().ok_or(broken("read", io::ErrorKind::InvalidData))?;
            *idle_since = now;
            let keep_alive = response.keep_alive;
            outcomes.push((request, Ok(response)));
            if !keep_alive {
                return Err(Loss::Announced);
            }
        }
    }
}

/// The error of a name that no address belongs to.
fn no_address() -> OsError {
    OsError::new("resolve", io::ErrorKind::NotFound)
}

fn broken(call: &'static str, error: impl Into<io::Error>) -> Loss {
    Loss::Broken(OsError::new(call, error))
}
