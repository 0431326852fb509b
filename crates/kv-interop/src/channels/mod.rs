//! The ZeroMQ sockets of one worker: REQ and PUSH sockets that are connected to peers, and a PULL socket that
//! listens. All are on one `mio::Poll`, whose descriptor the worker waits on, and no call blocks.
//!
//! | module | holds |
//! |---|---|
//! | `client` | the way to one peer, and what its end proves |
//! | `server` | a listening socket and its connections |
//! | `connection` | a stream with its ZMTP session |

mod client;
mod config;
mod connection;
mod error;
mod gauges;
pub(crate) mod server;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_bootstrap::net::Resolver;
use kv_core::{PeerId, TransportError, WayEnd};
use mio::{Events, Poll, Token, Waker};
use slab::Slab;

use crate::zmtp::{MAX_MESSAGE, SocketType};
use client::{Client, Kind};
use server::{Bounds, Server};

pub use config::ChannelConfig;

pub use error::ChannelError;
pub(crate) use gauges::Counters;
pub use gauges::{ChannelCounts, ChannelGauges};

const WAKER: Token = Token(usize::MAX);
const LISTENER: Token = Token(usize::MAX - 1);
/// How long clients make progress in one turn, before the listening socket does.
const TURN: Duration = Duration::from_micros(300);
/// Bytes that one read takes from the system at most.
pub(crate) const SCRATCH: usize = 64 << 10;

/// What a worker's sockets report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The answer of a peer to the oldest message that was not answered.
    Answer { peer: PeerId, parts: Vec<Bytes> },
    /// A message to the listening socket, with the number of its connection.
    Message { connection: u64, parts: Vec<Bytes> },
    /// The way to a peer has ended.
    Gone { peer: PeerId, end: WayEnd },
}

/// The sockets of one worker.
pub(crate) struct Channels {
    config: ChannelConfig,
    poll: Poll,
    ready: Events,
    resolver: Resolver,
    clients: Slab<Client>,
    by_peer: BTreeMap<PeerId, usize>,
    /// Clients that may have something to do.
    active: BTreeSet<usize>,
    /// The client with which the next turn begins.
    next: usize,
    /// When clients have something to do that no event tells.
    timers: BTreeSet<(Instant, usize)>,
    server: Option<Server>,
    scratch: Vec<u8>,
    counts: ChannelCounts,
}

impl Channels {
    pub(crate) fn new(config: ChannelConfig) -> Result<Channels, ChannelError> {
        let poll = Poll::new().map_err(ChannelError::os("epoll_create"))?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(ChannelError::os("eventfd"))?;
        let bounds = Bounds {
            connections: config.max_connections,
            buffered: config.max_buffered,
            message: MAX_MESSAGE,
            unsent: config.max_queue,
            handshake: config.handshake_timeout,
        };
        let listen = |addr: &String| Server::bind(addr, SocketType::Pull, bounds, poll.registry(), LISTENER);
        let server = config.listen.as_ref().map(listen).transpose()?;
        Ok(Channels {
            config,
            ready: Events::with_capacity(256),
            resolver: Resolver::new(waker),
            clients: Slab::new(),
            by_peer: BTreeMap::new(),
            active: BTreeSet::new(),
            next: 0,
            timers: BTreeSet::new(),
            server,
            scratch: vec![0; SCRATCH],
            counts: ChannelCounts::default(),
            poll,
        })
    }

    /// The address of the listening socket, with the port that the system picked.
    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.server.as_ref()?.local_addr().ok()
    }

    pub(crate) fn counts(&self) -> &ChannelCounts {
        &self.counts
    }

    pub(crate) fn has(&self, peer: PeerId) -> bool {
        self.by_peer.contains_key(&peer)
    }

    /// Opens the way to the ROUTER or REP socket at `host:port`.
    pub(crate) fn request(&mut self, peer: PeerId, addr: &str) -> Result<(), TransportError> {
        self.open(peer, Kind::Request, addr)
    }

    /// Opens the way to the PULL socket at `host:port`.
    pub(crate) fn push(&mut self, peer: PeerId, addr: &str) -> Result<(), TransportError> {
        self.open(peer, Kind::Push, addr)
    }

    fn open(&mut self, peer: PeerId, kind: Kind, addr: &str) -> Result<(), TransportError> {
        if self.clients.len() >= self.config.max_ways {
            return Err(TransportError::WouldBlock);
        }
        let client = Client::new(peer, kind, addr, Instant::now(), &self.config)?;
        let key = self.clients.insert(client);
        self.by_peer.insert(peer, key);
        self.active.insert(key);
        Ok(())
    }

    /// Sends a message when the connection is ready for it. What has no parts is no message.
    pub(crate) fn send(&mut self, peer: PeerId, parts: Option<Vec<Bytes>>) -> Result<(), TransportError> {
        let key = *self.by_peer.get(&peer).ok_or(TransportError::PeerGone)?;
        let client = self.clients.get_mut(key).ok_or(TransportError::PeerGone)?;
        let none = || TransportError::Foreign("a frame to a side channel holds no message".to_owned());
        let parts = parts.filter(|parts| !parts.is_empty()).ok_or_else(none)?;
        client.send(parts, &self.config)?;
        self.active.insert(key);
        Ok(())
    }

    /// Forgets the peer. What was sent before still goes out, if the peer takes it within two seconds.
    pub(crate) fn disconnect(&mut self, peer: PeerId) {
        let Some(key) = self.by_peer.remove(&peer) else { return };
        let Some(client) = self.clients.get_mut(key) else { return };
        let former = client.deadline;
        if client.leave(Instant::now()) {
            self.active.insert(key);
            self.set_timer(key, former);
        } else {
            self.remove(key, former);
        }
    }

    /// Makes progress, and appends what has happened. Nothing is done that takes long.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) {
        if self.poll.poll(&mut self.ready, Some(Duration::ZERO)).is_ok() {
            for event in &self.ready {
                match (event.token(), &mut self.server) {
                    (WAKER, _) => {}
                    (LISTENER, Some(server)) => server.acceptable(),
                    (Token(token), Some(server)) if token % 2 == 1 => server.ready(token / 2, event),
                    (Token(token), _) => {
                        if let Some(client) = self.clients.get_mut(token / 2) {
                            client.ready(event);
                            self.active.insert(token / 2);
                        }
                    }
                }
            }
        }
        let now = Instant::now();
        self.advance_clients(now, events);
        let Some(server) = &mut self.server else { return };
        let counters = &*self.counts.0;
        server.advance(&mut server::Context {
            now,
            registry: self.poll.registry(),
            token: |key| Token(2 * key + 1),
            scratch: &mut self.scratch,
            counters,
            take: &mut |connection, parts, _| {
                counters.message();
                events.push(Event::Message { connection, parts });
                None
            },
        });
    }

    fn advance_clients(&mut self, now: Instant, events: &mut Vec<Event>) {
        while let Some(&(at, key)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            self.active.insert(key);
        }
        self.take_addresses(now, events);
        let mut before = std::mem::take(&mut self.active);
        let mut due: VecDeque<usize> = before.split_off(&self.next).into_iter().chain(before).collect();
        while let Some(key) = due.pop_front() {
            if now.elapsed() >= TURN {
                self.next = key;
                self.active.insert(key);
                self.active.extend(due);
                return;
            }
            let Some(former) = self.clients.get(key).map(|client| client.deadline) else { continue };
            let advanced = self.with(key, now, events, |client, context| client.advance(context));
            self.settle(key, former, advanced, events);
        }
    }

    /// Passes the resolver's answers to the clients that wait for them.
    fn take_addresses(&mut self, now: Instant, events: &mut Vec<Event>) {
        while let Some((name, found)) = self.resolver.next_answer() {
            let found = found.unwrap_or_default();
            // An answer makes room for another name.
            let resolving = |client: &Client| client.resolving().map(|addr| *addr == *name);
            let waiting: Vec<(usize, bool)> =
                self.clients.iter().filter_map(|(key, client)| Some((key, resolving(client)?))).collect();
            for (key, this) in waiting {
                self.active.insert(key);
                let former = self.clients.get(key).and_then(|client| client.deadline);
                if this
                    && let Some(Some(end)) =
                        self.with(key, now, events, |client, context| client.resolved(&found, context))
                {
                    self.settle(key, former, Some(Err(end)), events);
                }
            }
        }
    }

    /// Has a client make progress. Messages that have come become events.
    fn with<R>(
        &mut self,
        key: usize,
        now: Instant,
        events: &mut Vec<Event>,
        step: impl FnOnce(&mut Client, &mut client::Context<'_>) -> R,
    ) -> Option<R> {
        let mut heard = Vec::new();
        let mut context = client::Context {
            now,
            config: &self.config,
            registry: self.poll.registry(),
            token: Token(2 * key),
            resolver: &mut self.resolver,
            scratch: &mut self.scratch,
            counters: &self.counts.0,
            heard: &mut heard,
        };
        let result = step(self.clients.get_mut(key)?, &mut context);
        for (peer, parts) in heard {
            self.counts.0.message();
            events.push(Event::Answer { peer, parts });
        }
        Some(result)
    }

    fn settle(
        &mut self,
        key: usize,
        former: Option<Instant>,
        advanced: Option<Result<bool, WayEnd>>,
        events: &mut Vec<Event>,
    ) {
        match advanced {
            None => {}
            Some(Ok(again)) => {
                if again {
                    self.active.insert(key);
                }
                self.set_timer(key, former);
            }
            Some(Err(end)) => {
                if let Some(client) = self.remove(key, former)
                    && !client.is_leaving()
                {
                    self.by_peer.remove(&client.peer);
                    events.push(Event::Gone { peer: client.peer, end });
                }
            }
        }
    }

    fn set_timer(&mut self, key: usize, former: Option<Instant>) {
        if let Some(at) = former {
            self.timers.remove(&(at, key));
        }
        let deadline = self.clients.get(key).and_then(|client| client.deadline);
        self.timers.extend(deadline.map(|at| (at, key)));
    }

    fn remove(&mut self, key: usize, former: Option<Instant>) -> Option<Client> {
        let client = self.clients.try_remove(key)?;
        self.active.remove(&key);
        for at in former.into_iter().chain(client.deadline) {
            self.timers.remove(&(at, key));
        }
        Some(client)
    }

    /// The descriptor that is readable when something has come.
    pub(crate) fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }

    /// How long the owner may sleep if the descriptor does not become readable; `None` for as long as it likes.
    pub(crate) fn sleep(&self) -> Option<Duration> {
        let now = Instant::now();
        if !self.active.is_empty() {
            return Some(Duration::ZERO);
        }
        let timer = self.timers.first().map(|(at, _)| *at);
        let server = self.server.as_ref().and_then(|server| server.next_timeout(now));
        timer.into_iter().chain(server).min().map(|at| at.saturating_duration_since(now))
    }
}

impl std::fmt::Debug for Channels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channels")
            .field("peers", &self.by_peer.len())
            .field("connections", &self.server.as_ref().map(Server::connections))
            .finish_non_exhaustive()
    }
}
