//! The way to one foreign socket: a name that is resolved, a connection that is made, messages in both
//! directions, and the end.
//!
//! # What the end of a connection says of the peer
//!
//! When a connection ends whose handshake was finished, the port is tried once more at once, and again after
//! 100 ms:
//!
//! - **Refused twice, one after the other**: the peer's listening socket is closed for good, and the way ends as
//!   [`Dead`](WayEnd::Dead). The system closes the socket when all threads of the process have left; the process
//!   closes the socket when it shuts down, or when the thread that serves the socket ends. A stopped process and a
//!   process that is only busy leave the socket open, and the system goes on accepting connections for them.
//! - **Accepted, and closed again without a byte**: the process is being taken apart, and its connections are
//!   closed before its listening socket. The port is tried again, for two seconds at most.
//! - **Accepted and greeted, accepted in silence, or any other answer**: nothing is proven.
//!
//! A first connection of a REQ socket that is refused proves nothing either: maybe nobody listens there yet. The
//! address of a PULL socket is known only from a process that has bound the port: a refusal of a first connection
//! to such a port is looked into as the end of a connection is.
//!
//! What is proven concerns the socket, and not what writes: vLLM's side channel is served by a thread of its scheduler,
//! which ends at the first question that it cannot answer, while the workers live and write. A dialect whose peer can
//! write without the socket looks for the ends of the writers' agents as well, after each of which
//! [`quiet_after`](super::ChannelConfig::quiet_after) covers the last bytes.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_bootstrap::net::{Resolver, Target};
use kv_core::{PeerId, TransportError, WayEnd};
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::config::ChannelConfig;
use super::connection::{Connection, Over, Said, Turn};
use super::gauges::Counters;
use crate::zmtp::{MAX_MESSAGE, SocketType};

/// The distance of two tries of a port whose connection has ended.
const PAUSE: Duration = Duration::from_millis(100);
/// How long messages may still go out after the peer was disconnected.
const LINGER: Duration = Duration::from_secs(2);
/// What a message counts beside its bytes.
const OVERHEAD: usize = 64;

/// Whether messages are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A REQ socket: one message at a time, and its answer before the next one.
    Request,
    /// A PUSH socket: messages go to the peer only.
    Push,
}

/// What a client needs of its owner to make progress.
pub(super) struct Context<'a> {
    pub(super) now: Instant,
    pub(super) config: &'a ChannelConfig,
    pub(super) registry: &'a Registry,
    pub(super) token: Token,
    pub(super) resolver: &'a mut Resolver,
    pub(super) scratch: &'a mut [u8],
    pub(super) counters: &'a Counters,
    /// Messages that have come.
    pub(super) heard: &'a mut Vec<(PeerId, Vec<Bytes>)>,
}

/// A REQ or PUSH socket with one connection.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) peer: PeerId,
    kind: Kind,
    addr: String,
    target: Target,
    stage: Stage,
    /// When the stage has taken too long, or the next one begins.
    pub(super) deadline: Option<Instant>,
    /// Messages that have not been given to the connection.
    queue: VecDeque<Vec<Bytes>>,
    queued: usize,
    /// A request was sent, and its answer has not come.
    asked: bool,
    /// The owner has disconnected the peer: what is queued still goes out.
    leaving: bool,
}

#[derive(Debug)]
enum Stage {
    /// The name is being resolved.
    Resolving,
    /// One of the name's addresses is being connected.
    Connecting { stream: TcpStream, addr: SocketAddr, rest: VecDeque<SocketAddr> },
    /// There is a connection, whose handshake may not be finished.
    Talking { connection: Box<Connection>, addr: SocketAddr },
    /// The connection has ended: does somebody listen?
    Probing(Probing),
    /// The next step takes the stage out for a moment.
    Moving,
}

#[derive(Debug)]
struct Probing {
    addr: SocketAddr,
    /// The try that is under way; `None` between two tries.
    stream: Option<TcpStream>,
    refused: u32,
    until: Instant,
}

/// What follows from a step.
enum Step {
    /// Nothing to do until an event, or the deadline.
    Wait,
    /// The next step can be taken at once.
    Next,
    /// There is more to read, after others have had their turn.
    Later,
    /// The way has ended.
    End(WayEnd),
}

impl Client {
    pub(super) fn new(
        peer: PeerId,
        kind: Kind,
        addr: &str,
        now: Instant,
        config: &ChannelConfig,
    ) -> Result<Client, TransportError> {
        let form = || TransportError::Foreign(format!("the address is {addr:?}; it must be host:port"));
        let target = Target::parse(addr).ok_or_else(form)?;
        Ok(Client {
            peer,
            kind,
            addr: addr.to_owned(),
            target,
            stage: Stage::Resolving,
            deadline: Some(now + config.connect_timeout),
            queue: VecDeque::new(),
            queued: 0,
            asked: false,
            leaving: false,
        })
    }

    /// Queues a message. `WouldBlock` if too much waits already.
    pub(super) fn send(&mut self, parts: Vec<Bytes>, config: &ChannelConfig) -> Result<(), TransportError> {
        let unsent = match &self.stage {
            Stage::Talking { connection, .. } => connection.unsent(),
            _ => 0,
        };
        let size = size(&parts);
        if self.queued + unsent + size > config.max_queue {
            return Err(TransportError::WouldBlock);
        }
        self.queued += size;
        self.queue.push_back(parts);
        Ok(())
    }

    /// From now on the client only sends what is queued. What comes is not reported. False if nothing is to be
    /// sent.
    pub(super) fn leave(&mut self, now: Instant) -> bool {
        self.leaving = true;
        self.deadline = Some(self.deadline.map_or(now + LINGER, |deadline| deadline.min(now + LINGER)));
        match &self.stage {
            Stage::Talking { connection, .. } => !self.queue.is_empty() || connection.unsent() > 0,
            Stage::Probing(_) => false,
            _ => !self.queue.is_empty(),
        }
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// The address whose resolution the client waits for.
    pub(super) fn resolving(&self) -> Option<&str> {
        matches!(self.stage, Stage::Resolving).then_some(&self.addr)
    }

    /// How often in a row the port has refused, while the end of the connection is looked into.
    #[cfg(test)]
    pub(super) fn refusals(&self) -> Option<u32> {
        match &self.stage {
            Stage::Probing(probing) => Some(probing.refused),
            _ => None,
        }
    }

    pub(super) fn ready(&mut self, event: &Event) {
        if let Stage::Talking { connection, .. } = &mut self.stage {
            connection.ready(event);
        }
    }

    /// Takes the resolver's answer for the client's name.
    pub(super) fn resolved(&mut self, found: &[SocketAddr], context: &Context<'_>) -> Option<WayEnd> {
        match self.connect(found.iter().copied().collect(), context) {
            Step::End(end) => Some(end),
            _ => None,
        }
    }

    /// Makes as much progress as possible without blocking. `Ok(true)` if there is more to do after others have
    /// had their turn; `Err` if the way has ended.
    pub(super) fn advance(&mut self, context: &mut Context<'_>) -> Result<bool, WayEnd> {
        loop {
            let step = match &mut self.stage {
                Stage::Resolving => self.resolve(context),
                Stage::Connecting { .. } => self.connecting(context),
                Stage::Talking { .. } => self.talk(context),
                Stage::Probing(_) => self.probe(context),
                Stage::Moving => Step::End(WayEnd::Lost),
            };
            match step {
                Step::Next => {}
                Step::Later => return Ok(true),
                Step::Wait if self.deadline.is_some_and(|deadline| deadline <= context.now) => {
                    return Err(WayEnd::Lost);
                }
                Step::Wait => return Ok(false),
                Step::End(end) => return Err(end),
            }
        }
    }

    fn resolve(&mut self, context: &mut Context<'_>) -> Step {
        match self.target.numeric() {
            Some(addr) => self.connect(VecDeque::from([addr]), context),
            None => {
                context.resolver.start(&self.addr, &self.target);
                Step::Wait
            }
        }
    }

    /// Connects the first of these addresses that can be tried.
    fn connect(&mut self, mut addrs: VecDeque<SocketAddr>, context: &Context<'_>) -> Step {
        while let Some(addr) = addrs.pop_front() {
            match open(addr, context) {
                Ok(stream) => {
                    self.stage = Stage::Connecting { stream, addr, rest: addrs };
                    return Step::Next;
                }
                Err(error) if addrs.is_empty() => return self.not_connected(addr, error.kind(), context),
                Err(_) => {}
            }
        }
        Step::End(WayEnd::Lost)
    }

    /// The last address cannot be connected.
    fn not_connected(&mut self, addr: SocketAddr, error: io::ErrorKind, context: &Context<'_>) -> Step {
        if self.kind != Kind::Push || self.leaving || error != io::ErrorKind::ConnectionRefused {
            return Step::End(WayEnd::Lost);
        }
        let until = context.now + context.config.probing;
        self.stage = Stage::Probing(Probing { addr, stream: None, refused: 0, until });
        self.refused(context)
    }

    fn connecting(&mut self, context: &mut Context<'_>) -> Step {
        let Stage::Connecting { stream, .. } = &mut self.stage else { return Step::Wait };
        let connected = is_connected(stream);
        if matches!(connected, Ok(false)) {
            return Step::Wait;
        }
        match std::mem::replace(&mut self.stage, Stage::Moving) {
            Stage::Connecting { stream, addr, .. } if connected.is_ok() => {
                let ours = match self.kind {
                    Kind::Request => SocketType::Req,
                    Kind::Push => SocketType::Push,
                };
                let connection = Box::new(Connection::new(stream, ours, MAX_MESSAGE));
                self.stage = Stage::Talking { connection, addr };
                if !self.leaving {
                    self.deadline = Some(context.now + context.config.handshake_timeout);
                }
                Step::Next
            }
            Stage::Connecting { rest, addr, .. } if rest.is_empty() => {
                self.not_connected(addr, connected.err().unwrap_or(io::ErrorKind::Other), context)
            }
            Stage::Connecting { rest, .. } => self.connect(rest, context),
            _ => Step::End(WayEnd::Lost),
        }
    }

    fn talk(&mut self, context: &mut Context<'_>) -> Step {
        let Stage::Talking { mut connection, addr } = std::mem::replace(&mut self.stage, Stage::Moving)
        else {
            return Step::End(WayEnd::Lost);
        };
        let mut came = Vec::new();
        let turn = connection.turn(context.scratch, context.config.max_queue, &mut |said| {
            came.push(said);
            None
        });
        for said in came {
            self.take(said, context);
        }
        match turn.and_then(|turn| self.pump(&mut connection).map(|()| turn)) {
            Ok(turn) => {
                let sent = self.queue.is_empty() && connection.unsent() == 0;
                self.stage = Stage::Talking { connection, addr };
                match turn {
                    _ if self.leaving && sent => Step::End(WayEnd::Lost),
                    Turn::Again => Step::Later,
                    Turn::Wait => Step::Wait,
                }
            }
            Err(Over::Ended) if connection.is_open() && !self.leaving => {
                let until = context.now + context.config.probing;
                self.stage = Stage::Probing(Probing { addr, stream: None, refused: 0, until });
                self.deadline = None;
                Step::Next
            }
            Err(over) => {
                context.counters.violated(&over);
                Step::End(WayEnd::Lost)
            }
        }
    }

    fn take(&mut self, said: Said, context: &mut Context<'_>) {
        match said {
            Said::Ready if !self.leaving => self.deadline = None,
            Said::Ready => {}
            Said::Message { mut parts, .. } => {
                // An answer comes behind an empty part, as the question was sent.
                let envelope = parts.first().is_some_and(Bytes::is_empty) && parts.len() > 1;
                if self.leaving || !envelope || !std::mem::take(&mut self.asked) {
                    context.counters.dropped();
                    return;
                }
                parts.remove(0);
                context.heard.push((self.peer, parts));
            }
        }
    }

    /// Gives the connection what may be sent.
    fn pump(&mut self, connection: &mut Connection) -> Result<(), Over> {
        while connection.is_open() && !self.asked {
            let Some(mut parts) = self.queue.pop_front() else { break };
            self.queued -= size(&parts);
            if self.kind == Kind::Request {
                self.asked = true;
                parts.insert(0, Bytes::new());
            }
            connection.send(&parts);
        }
        connection.flush()
    }

    fn probe(&mut self, context: &mut Context<'_>) -> Step {
        let Stage::Probing(probing) = &mut self.stage else { return Step::Wait };
        if probing.until <= context.now {
            return Step::End(WayEnd::Lost);
        }
        if probing.stream.is_none() && self.deadline.is_none_or(|at| at <= context.now) {
            self.deadline = Some(probing.until);
            match open(probing.addr, context) {
                Ok(stream) => probing.stream = Some(stream),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return self.refused(context);
                }
                Err(_) => return Step::End(WayEnd::Lost),
            }
        }
        let Some(stream) = &mut probing.stream else { return Step::Wait };
        match is_connected(stream) {
            Ok(false) => Step::Wait,
            Ok(true) => match stream.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Step::Wait,
                Ok(0) | Err(_) => self.pause(0, context),
                Ok(_) => Step::End(WayEnd::Lost),
            },
            Err(io::ErrorKind::ConnectionRefused) => self.refused(context),
            Err(io::ErrorKind::ConnectionReset) => self.pause(0, context),
            Err(_) => Step::End(WayEnd::Lost),
        }
    }

    fn refused(&mut self, context: &Context<'_>) -> Step {
        match &self.stage {
            Stage::Probing(Probing { refused: 0, .. }) => self.pause(1, context),
            _ => Step::End(WayEnd::Dead { quiet_after: context.config.quiet_after }),
        }
    }

    fn pause(&mut self, refusals: u32, context: &Context<'_>) -> Step {
        if let Stage::Probing(probing) = &mut self.stage {
            (probing.stream, probing.refused) = (None, refusals);
            self.deadline = Some(context.now + PAUSE);
        }
        Step::Wait
    }
}

fn size(parts: &[Bytes]) -> usize {
    parts.iter().map(|part| part.len() + OVERHEAD).sum::<usize>() + OVERHEAD
}

fn open(addr: SocketAddr, context: &Context<'_>) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(addr)?;
    context.registry.register(&mut stream, context.token, Interest::READABLE | Interest::WRITABLE)?;
    Ok(stream)
}

/// True once the stream is connected; `Err` if it cannot be.
fn is_connected(stream: &TcpStream) -> Result<bool, io::ErrorKind> {
    if let Some(error) = stream.take_error().map_err(|error| error.kind())? {
        return Err(error.kind());
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error.kind()),
    }
}
