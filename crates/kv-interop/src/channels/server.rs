//! A listening socket, PULL or ROUTER, with its connections.
//!
//! Everybody who reaches the port can connect. So the number of connections, the time of their handshakes, and
//! the bytes of unfinished messages are bounded; a connection costs work only when something has come on it.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use slab::Slab;

use super::connection::{Connection, Said, Turn};
use super::error::{ChannelError, bind};
use super::gauges::Counters;
use crate::zmtp::SocketType;

/// Most connections accepted in one turn, before the open connections are served.
const ACCEPTS_PER_TURN: usize = 64;
/// How long connections are served in one turn, before the owner does something else. A connection that has begun
/// its turn finishes it.
const TURN: Duration = Duration::from_micros(300);
/// How long to wait when the process has no descriptor left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The bounds of a listening socket.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    pub(crate) connections: usize,
    /// Bytes of unfinished messages on all connections.
    pub(crate) buffered: usize,
    /// Bytes of one message.
    pub(crate) message: usize,
    /// Bytes that may wait for a peer that does not read.
    pub(crate) unsent: usize,
    pub(crate) handshake: Duration,
}

/// A listening socket with all its connections.
#[derive(Debug)]
pub(crate) struct Server {
    listener: TcpListener,
    ours: SocketType,
    bounds: Bounds,
    slots: Slab<Slot>,
    /// Connections that have not finished their handshake, the oldest first, with the moment at which they are
    /// closed. Entries of connections that have finished are passed over.
    shaking: VecDeque<(Instant, usize, u64)>,
    /// Connections with something to do, each once.
    active: VecDeque<usize>,
    buffered: usize,
    accepted: u64,
    accept: Accept,
}

#[derive(Debug)]
struct Slot {
    connection: Connection,
    /// The number of the connection, which no later connection has.
    number: u64,
    held: usize,
    queued: bool,
}

#[derive(Debug, Clone, Copy)]
enum Accept {
    /// Connections may wait to be accepted.
    Now,
    /// No connection waited the last time.
    WhenReadable,
    /// The process has no descriptor for another connection; try again at this time.
    At(Instant),
}

/// What a server needs of its owner to make progress.
pub(crate) struct Context<'a> {
    pub(crate) now: Instant,
    pub(crate) registry: &'a Registry,
    /// The token of the connection with this key.
    pub(crate) token: fn(usize) -> Token,
    pub(crate) scratch: &'a mut [u8],
    pub(crate) counters: &'a Counters,
    /// Takes a message, with the number of its connection, and answers the message on the same connection. The
    /// last argument is true if the peer has left too much unread to be answered.
    pub(crate) take: &'a mut dyn FnMut(u64, Vec<Bytes>, bool) -> Option<Vec<Bytes>>,
}

impl Server {
    /// Listens on `addr`, under the token `listener`.
    pub(crate) fn bind(
        addr: &str,
        ours: SocketType,
        bounds: Bounds,
        registry: &Registry,
        token: Token,
    ) -> Result<Server, ChannelError> {
        let mut listener = bind(addr)?;
        registry.register(&mut listener, token, Interest::READABLE).map_err(ChannelError::os("epoll_ctl"))?;
        Ok(Server {
            listener,
            ours,
            bounds,
            slots: Slab::new(),
            shaking: VecDeque::new(),
            active: VecDeque::new(),
            buffered: 0,
            accepted: 0,
            accept: Accept::Now,
        })
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(crate) fn connections(&self) -> usize {
        self.slots.len()
    }

    /// Entries of the list of connections whose handshake may not be finished.
    #[cfg(test)]
    pub(crate) fn shaking(&self) -> usize {
        self.shaking.len()
    }

    /// Bytes of unfinished messages that are held.
    #[cfg(test)]
    pub(crate) fn buffered(&self) -> usize {
        self.buffered
    }

    /// Notes that connections wait to be accepted.
    pub(crate) fn acceptable(&mut self) {
        self.accept = Accept::Now;
    }

    /// Notes an event of the connection with this key.
    pub(crate) fn ready(&mut self, key: usize, event: &Event) {
        if let Some(slot) = self.slots.get_mut(key) {
            slot.connection.ready(event);
            self.activate(key);
        }
    }

    /// When [`Server::advance`] must be called if no event comes before: `Some` of a moment that has passed if
    /// there is something to do at once.
    pub(crate) fn next_timeout(&self, now: Instant) -> Option<Instant> {
        let accept = match self.accept {
            Accept::Now => return Some(now),
            Accept::WhenReadable => None,
            Accept::At(at) => Some(at),
        };
        if !self.active.is_empty() {
            return Some(now);
        }
        self.shaking.front().map(|shaking| shaking.0).into_iter().chain(accept).min()
    }

    /// Accepts connections, and serves those on which something has come.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) {
        while let Some(&(deadline, key, number)) = self.shaking.front() {
            let over = !self.is_shaking(key, number);
            if !over && deadline > context.now {
                break;
            }
            self.shaking.pop_front();
            if !over {
                context.counters.refused();
                self.close(key, context.registry);
            }
        }
        self.accept(context);
        let begun = Instant::now();
        for _ in 0..self.active.len() {
            let Some(key) = self.active.pop_front() else { break };
            self.serve(key, context);
            if begun.elapsed() >= TURN {
                break;
            }
        }
    }

    fn is_shaking(&self, key: usize, number: u64) -> bool {
        let slot = self.slots.get(key).filter(|slot| slot.number == number);
        slot.is_some_and(|slot| !slot.connection.is_open())
    }

    fn activate(&mut self, key: usize) {
        if let Some(slot) = self.slots.get_mut(key)
            && !std::mem::replace(&mut slot.queued, true)
        {
            self.active.push_back(key);
        }
    }

    fn serve(&mut self, key: usize, context: &mut Context<'_>) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        slot.queued = false;
        let (number, take) = (slot.number, &mut *context.take);
        let turn = slot.connection.turn(context.scratch, self.bounds.unsent, &mut |said| match said {
            Said::Message { parts, crowded } => take(number, parts, crowded),
            Said::Ready => None,
        });
        let held = slot.connection.held();
        self.buffered = self.buffered - slot.held + held;
        slot.held = held;
        match turn {
            Ok(Turn::Again) => self.activate(key),
            Ok(Turn::Wait) => {}
            Err(over) => {
                context.counters.violated(&over);
                self.close(key, context.registry);
            }
        }
        if self.buffered > self.bounds.buffered
            && let Some((_, greedy)) = self.slots.iter().map(|(key, slot)| (slot.held, key)).max()
        {
            context.counters.refused();
            self.close(greedy, context.registry);
        }
    }

    fn close(&mut self, key: usize, registry: &Registry) {
        let Some(mut slot) = self.slots.try_remove(key) else { return };
        self.buffered -= slot.held;
        if slot.queued {
            self.active.retain(|active| *active != key);
        }
        let _ = registry.deregister(slot.connection.stream());
    }

    fn accept(&mut self, context: &mut Context<'_>) {
        match self.accept {
            Accept::Now => {}
            Accept::At(at) if at <= context.now => {}
            Accept::At(_) | Accept::WhenReadable => return,
        }
        self.accept = Accept::Now;
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream, context),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        self.accept = Accept::WhenReadable;
                        return;
                    }
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    // No descriptors or memory: make room, and wait a little.
                    _ => {
                        self.close_oldest(context);
                        self.accept = Accept::At(context.now + ACCEPT_PAUSE);
                        return;
                    }
                },
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, context: &mut Context<'_>) {
        if self.slots.len() >= self.bounds.connections && !self.close_oldest(context) {
            context.counters.refused();
            return;
        }
        let mut connection = Connection::new(stream, self.ours, self.bounds.message);
        let entry = self.slots.vacant_entry();
        let key = entry.key();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if context.registry.register(connection.stream(), (context.token)(key), interest).is_err() {
            return;
        }
        self.accepted += 1;
        let number = self.accepted;
        entry.insert(Slot { connection, number, held: 0, queued: false });
        if self.shaking.len() > 2 * self.bounds.connections {
            // Most are of connections that are over, behind one that is idle.
            let mut shaking = std::mem::take(&mut self.shaking);
            shaking.retain(|(_, key, number)| self.is_shaking(*key, *number));
            self.shaking = shaking;
        }
        self.shaking.push_back((context.now + self.bounds.handshake, key, number));
        self.activate(key);
    }

    /// Closes the oldest connection that has not finished its handshake; false if there is none.
    fn close_oldest(&mut self, context: &mut Context<'_>) -> bool {
        while let Some((_, key, number)) = self.shaking.pop_front() {
            if self.is_shaking(key, number) {
                context.counters.refused();
                self.close(key, context.registry);
                return true;
            }
        }
        false
    }
}
