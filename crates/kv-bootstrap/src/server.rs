//! [`KvBootstrapServer`]: one thread with one `mio::Poll` that accepts connections and answers requests.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_core::{BootstrapServer, Time};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use slab::Slab;

use crate::client_addr::ClientAddr;
use crate::config::ServerConfig;
use crate::connection::{Connection, Turn};
use crate::error::BootstrapServerError;
use crate::expiry::Expiry;
use crate::gauges::BootstrapGauges;
use crate::http::Reply;
use crate::routes::{From, Tables};
use crate::watch::Watcher;

const WAKER: Token = Token(usize::MAX);
/// The first token of the listeners.
const LISTENERS: usize = usize::MAX / 4 * 3;
/// The first token of the connections to ports that are watched.
const WATCHED: usize = usize::MAX / 2;
/// Most connections accepted in one turn, before the open connections are served.
const ACCEPTS_PER_TURN: usize = 64;
/// Most connections beyond the limit that are kept until their answer 503 is sent.
const REFUSED: usize = 64;
/// How long the server waits when the process has no descriptor left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bootstrap server, as SGLang's `KVBootstrapServer`: it serves from its own thread until it is stopped or
/// dropped. The [crate's page](crate) lists the routes.
#[derive(Debug)]
pub struct KvBootstrapServer {
    local_addr: SocketAddr,
    engine_addrs: Vec<SocketAddr>,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    gauges: Arc<Mutex<BootstrapGauges>>,
    thread: Option<JoinHandle<()>>,
}

impl KvBootstrapServer {
    /// Binds `addr` (`host:port`; with port 0 the system picks a port) and serves with
    /// [`ServerConfig::default`].
    pub fn start(addr: &str) -> Result<KvBootstrapServer, BootstrapServerError> {
        KvBootstrapServer::start_with(addr, ServerConfig::default())
    }

    /// Binds `addr` (`host:port`; with port 0 the system picks a port) and
    /// [`engine_addrs`](ServerConfig::engine_addrs), and serves with `config`.
    ///
    /// # Errors
    ///
    /// [`BootstrapServerError`] if an address cannot be used, or the system refuses a descriptor or the
    /// thread.
    pub fn start_with(addr: &str, config: ServerConfig) -> Result<KvBootstrapServer, BootstrapServerError> {
        let os = |call| move |source| BootstrapServerError::Os { call, source };
        let poll = Poll::new().map_err(os("epoll_create"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(os("eventfd"))?);
        let (mut desks, mut addrs) = (Vec::new(), Vec::new());
        for addr in std::iter::once(addr).chain(config.engine_addrs.iter().map(String::as_str)) {
            let mut listener = bind(addr)?;
            addrs.push(listener.local_addr().map_err(os("getsockname"))?);
            let token = Token(LISTENERS + desks.len());
            poll.registry().register(&mut listener, token, Interest::READABLE).map_err(os("epoll_ctl"))?;
            desks.push(Desk { listener, accept: Accept::Now });
        }
        let local_addr = addrs.remove(0);
        let stop = Arc::new(AtomicBool::new(false));
        let gauges = Arc::<Mutex<BootstrapGauges>>::default();
        let mut service = Service {
            gauges: Arc::clone(&gauges),
            clients: BTreeMap::new(),
            tables: Tables::new(&config, desks.len()),
            watcher: config.watch.map(|watch| Watcher::new(watch, WATCHED)),
            config,
            poll,
            desks,
            slots: Slab::new(),
            deadlines: Expiry::default(),
            ready: VecDeque::new(),
            buffered: 0,
            epoch: Instant::now(),
            stop: Arc::clone(&stop),
        };
        let builder = std::thread::Builder::new().name("kv-bootstrap".to_owned());
        let thread = builder.spawn(move || service.run()).map_err(os("clone"))?;
        let (engine_addrs, thread) = (addrs, Some(thread));
        Ok(KvBootstrapServer { local_addr, engine_addrs, stop, waker, gauges, thread })
    }

    /// The address that the server listens on, with the port that the system picked.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The further addresses that the server listens on, in the order of
    /// [`ServerConfig::engine_addrs`](crate::ServerConfig::engine_addrs).
    pub fn engine_addrs(&self) -> &[SocketAddr] {
        &self.engine_addrs
    }

    /// How much the server keeps (ranks, bytes, connections), as of the last turn of its thread.
    pub fn gauges(&self) -> BootstrapGauges {
        *self.gauges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes all connections and waits for the thread to end.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Waking fails only if the eventfd's counter is full, and then the thread wakes anyway.
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for KvBootstrapServer {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl BootstrapServer for KvBootstrapServer {
    type Error = BootstrapServerError;

    fn start(addr: &str) -> Result<KvBootstrapServer, BootstrapServerError> {
        KvBootstrapServer::start(addr)
    }

    fn local_addr(&self) -> SocketAddr {
        KvBootstrapServer::local_addr(self)
    }

    fn stop(self) {
        KvBootstrapServer::stop(self);
    }
}

fn bind(addr: &str) -> Result<TcpListener, BootstrapServerError> {
    let fail = |source| BootstrapServerError::Address { addr: addr.to_owned(), source };
    let mut failure = fail(io::ErrorKind::AddrNotAvailable.into());
    for addr in addr.to_socket_addrs().map_err(fail)? {
        match TcpListener::bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(source) => failure = BootstrapServerError::Bind { addr, source },
        }
    }
    Err(failure)
}

struct Service {
    config: ServerConfig,
    tables: Tables,
    watcher: Option<Watcher>,
    poll: Poll,
    /// One for each listening address.
    desks: Vec<Desk>,
    slots: Slab<Slot>,
    deadlines: Expiry<usize>,
    /// Connections with something to do, each once.
    ready: VecDeque<usize>,
    /// Bytes of unfinished requests over all connections.
    buffered: usize,
    clients: BTreeMap<ClientAddr, Share>,
    gauges: Arc<Mutex<BootstrapGauges>>,
    epoch: Instant,
    stop: Arc<AtomicBool>,
}

/// A listening address, with SGLang's tables of its own in `Tables`.
struct Desk {
    listener: TcpListener,
    accept: Accept,
}

/// Connections and buffered bytes of one client address.
#[derive(Default)]
struct Share {
    connections: usize,
    buffered: usize,
}

struct Slot {
    connection: Connection,
    from: From,
    deadline: Time,
    buffered: usize,
    queued: bool,
}

enum Accept {
    /// Connections may wait to be accepted.
    Now,
    /// No connection waited the last time.
    WhenReadable,
    /// The process has no descriptor for another connection; try again at this time.
    At(Time),
}

impl Service {
    fn run(&mut self) {
        let mut events = Events::with_capacity(256);
        let mut scratch = vec![0; 16 << 10];
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The epoll descriptor itself is broken: there is nothing left to serve with.
                Err(_) => return,
            }
            let now = self.now();
            for event in &events {
                match event.token() {
                    WAKER => {}
                    Token(at @ LISTENERS..) => {
                        if let Some(desk) = self.desks.get_mut(at - LISTENERS) {
                            desk.accept = Accept::Now;
                        }
                    }
                    Token(WATCHED..) => {
                        if let Some(watcher) = &mut self.watcher {
                            watcher.ready(now, self.poll.registry(), event);
                        }
                    }
                    Token(key) => {
                        if let Some(slot) = self.slots.get_mut(key) {
                            slot.connection.ready(event);
                            self.enqueue(key);
                        }
                    }
                }
            }
            self.tables.expire(now);
            // What the ports say comes before the requests: a process may die, and be registered anew, between
            // two turns.
            self.watch(now);
            self.close_overdue(now);
            for desk in 0..self.desks.len() {
                self.accept(now, desk);
            }
            for _ in 0..self.ready.len() {
                let Some(key) = self.ready.pop_front() else { break };
                self.turn(now, key, &mut scratch);
            }
            self.watch(now);
            let gauges = BootstrapGauges {
                connections: self.slots.len(),
                buffered: self.buffered,
                watched_ports: self.watcher.as_ref().map_or(0, Watcher::len),
                ..self.tables.gauges()
            };
            *self.gauges.lock().unwrap_or_else(PoisonError::into_inner) = gauges;
        }
    }

    fn now(&self) -> Time {
        Time::ZERO + self.epoch.elapsed()
    }

    /// Takes the ports that are to be watched from the tables to the watcher, and what was found there back.
    fn watch(&mut self, now: Time) {
        let Some(watcher) = &mut self.watcher else { return };
        for (desk, order) in self.tables.take_orders() {
            watcher.take_order(now, self.poll.registry(), desk, order);
        }
        watcher.expire(now, self.poll.registry());
        for ((desk, seq), verdict) in watcher.take_verdicts() {
            self.tables.judge(desk, seq, verdict);
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.ready.is_empty() || self.desks.iter().any(|desk| matches!(desk.accept, Accept::Now)) {
            return Some(Duration::ZERO);
        }
        let accepts = self.desks.iter().filter_map(|desk| match desk.accept {
            Accept::Now | Accept::WhenReadable => None,
            Accept::At(time) => Some(time),
        });
        let watch = self.watcher.as_ref().and_then(Watcher::next_timeout);
        let next = [self.deadlines.next(), self.tables.next_timeout(), watch];
        let next = next.into_iter().flatten().chain(accepts).min()?;
        // epoll counts in milliseconds: round up, or the last millisecond would be a busy loop.
        Some(next.since(self.now()) + Duration::from_millis(1))
    }

    fn enqueue(&mut self, key: usize) {
        if let Some(slot) = self.slots.get_mut(key)
            && !std::mem::replace(&mut slot.queued, true)
        {
            self.ready.push_back(key);
        }
    }

    fn turn(&mut self, now: Time, key: usize, scratch: &mut [u8]) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        slot.queued = false;
        let tables = &mut self.tables;
        let from = slot.from;
        let turn = slot.connection.turn(now, scratch, &mut |request| tables.answer(now, from, request));
        let buffered = slot.connection.buffered();
        let grown = buffered > slot.buffered;
        self.buffered = self.buffered - slot.buffered + buffered;
        let share = self.clients.entry(from.client).or_default();
        share.buffered = share.buffered - slot.buffered + buffered;
        slot.buffered = buffered;
        let full =
            self.buffered > self.config.max_buffered || share.buffered > self.config.max_buffered_per_client;
        if turn != Turn::Close && grown && full {
            slot.connection.refuse(now, Reply::text(503, "too many unfinished requests"));
            self.set_deadline(key);
            self.enqueue(key);
            return;
        }
        match turn {
            Turn::Wait => self.set_deadline(key),
            Turn::Again => {
                self.set_deadline(key);
                self.enqueue(key);
            }
            Turn::Close => self.close(key),
        }
    }

    fn set_deadline(&mut self, key: usize) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        let deadline = slot.connection.deadline(&self.config);
        if deadline != slot.deadline {
            self.deadlines.remove(slot.deadline, key);
            self.deadlines.insert(deadline, key);
            slot.deadline = deadline;
        }
    }

    fn close_overdue(&mut self, now: Time) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let Some(slot) = self.slots.get_mut(key) else { continue };
            if slot.connection.overdue(now) {
                self.close(key);
            } else {
                slot.deadline = slot.connection.deadline(&self.config);
                self.deadlines.insert(slot.deadline, key);
                self.enqueue(key);
            }
        }
    }

    fn close(&mut self, key: usize) {
        let Some(mut slot) = self.slots.try_remove(key) else { return };
        self.deadlines.remove(slot.deadline, key);
        self.buffered -= slot.buffered;
        if let Some(share) = self.clients.get_mut(&slot.from.client) {
            share.buffered -= slot.buffered;
            share.connections -= 1;
            if share.connections == 0 {
                self.clients.remove(&slot.from.client);
            }
        }
        if slot.queued {
            self.ready.retain(|queued| *queued != key);
        }
        let _ = self.poll.registry().deregister(slot.connection.stream());
    }

    fn accept(&mut self, now: Time, at: usize) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(desk) = self.desks.get_mut(at) else { return };
            match desk.accept {
                Accept::Now => {}
                Accept::At(time) if time <= now => {}
                Accept::At(_) | Accept::WhenReadable => return,
            }
            desk.accept = Accept::Now;
            match desk.listener.accept() {
                Ok((stream, addr)) => {
                    self.admit(now, stream, From { client: ClientAddr::from(addr.ip()), desk: at });
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        desk.accept = Accept::WhenReadable;
                        return;
                    }
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => {
                        // No descriptors or memory: make room, and wait a little.
                        desk.accept = Accept::At(now + ACCEPT_PAUSE);
                        self.close_idle(None);
                        return;
                    }
                },
            }
        }
    }

    fn admit(&mut self, now: Time, stream: TcpStream, from: From) {
        let client = from.client;
        let own = self.clients.get(&client).map_or(0, |share| share.connections);
        let full = if own >= self.config.max_connections_per_client {
            !self.close_idle(Some(client))
        } else {
            self.slots.len() >= self.config.max_connections && !self.close_idle(None)
        };
        let mut connection = Connection::new(stream, now, &self.config);
        if full {
            connection.refuse(now, Reply::text(503, "too many connections"));
            if self.slots.len() >= self.config.max_connections + REFUSED {
                // Too many connections are being refused already: send the answer at once, or not at all.
                connection.turn(now, &mut [0; 4096], &mut |_| Reply::text(503, "too many connections"));
                return;
            }
        }
        let entry = self.slots.vacant_entry();
        let key = entry.key();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if self.poll.registry().register(connection.stream(), Token(key), interest).is_err() {
            return;
        }
        let deadline = connection.deadline(&self.config);
        self.clients.entry(client).or_default().connections += 1;
        entry.insert(Slot { connection, from, deadline, buffered: 0, queued: false });
        self.deadlines.insert(deadline, key);
        self.enqueue(key);
    }

    /// Closes the connection that has been idle longest: of the client `of`, or of any client. False if all
    /// of them are busy.
    fn close_idle(&mut self, of: Option<ClientAddr>) -> bool {
        let slots = self.slots.iter().filter(|(_, slot)| of.is_none_or(|client| client == slot.from.client));
        let idle = slots.filter_map(|(key, slot)| Some((slot.connection.idle_since()?, key)));
        let Some((_, key)) = idle.min() else { return false };
        self.close(key);
        true
    }
}
