//! [`SideChannel`]: the server of vLLM's handshake, on a thread of its own.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::Time;
use kv_host::clock;
use mio::{Events, Poll, Token, Waker};

use super::metadata::{self, asked};
use crate::channels::server::{Bounds, Context, Server};
use crate::channels::{ChannelError, Counters, SCRATCH};
use crate::zmtp::SocketType;

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
/// Longest request in bytes. vLLM's have less than 32.
const MAX_REQUEST: usize = 4096;
/// Bytes of answers that may wait for a peer that does not read.
const MAX_UNSENT: usize = 4 << 20;

/// The side channel of an engine, from which vLLM workers fetch the metadata of the engine's ranks.
///
/// The server is a ZeroMQ ROUTER socket. A request is the msgpack of `("get_meta_msg", pp_rank, tp_rank)`. The
/// answer has two parts: the payload that was [published](SideChannel::publish) for the rank, and the msgpack of
/// [the server's clock](SideChannel::seconds).
///
/// All ranks of an engine in one process share a side channel: clones of the handle are one server, which stops
/// when the last clone is dropped.
///
/// - A request for a rank that has published nothing is not answered: the requester gives up after its own
///   timeout (5 s in vLLM). vLLM's own server ends at such a request, with a `KeyError` in its thread.
/// - What is not a request is dropped. A peer that does not read its answers is not answered after 4 MiB, and
///   loses its connection after 25 s.
/// - At most 1024 connections are open, with ten seconds for each handshake.
#[derive(Debug, Clone)]
pub struct SideChannel {
    thread: Arc<Thread>,
}

/// How many requests a side channel has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SideChannelGauges {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests for a rank that has published nothing, and requests of peers that do not read their answers.
    pub refused: u64,
    /// Messages that were no requests.
    pub malformed: u64,
    /// Connections that are open now.
    pub connections: usize,
}

#[derive(Debug)]
struct Thread {
    local_addr: SocketAddr,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// The payload of each rank, by pipeline and tensor rank.
    payloads: Mutex<BTreeMap<(u32, u32), Bytes>>,
    answered: AtomicU64,
    refused: AtomicU64,
    malformed: AtomicU64,
    connections: AtomicUsize,
}

impl SideChannel {
    /// Listens on `addr` (`host:port`; with port 0 the system picks a port).
    ///
    /// # Errors
    ///
    /// [`ChannelError`] if the address cannot be used, or the system refuses a descriptor or the thread.
    pub fn bind(addr: &str) -> Result<SideChannel, ChannelError> {
        let poll = Poll::new().map_err(ChannelError::os("epoll_create"))?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(ChannelError::os("eventfd"))?;
        let bounds = Bounds {
            connections: 1024,
            buffered: 1024 * MAX_REQUEST,
            message: MAX_REQUEST,
            unsent: MAX_UNSENT,
            handshake: Duration::from_secs(10),
        };
        let server = Server::bind(addr, SocketType::Router, bounds, poll.registry(), LISTENER)?;
        let local_addr = server.local_addr().map_err(ChannelError::os("getsockname"))?;
        let shared = Arc::<Shared>::default();
        let service = Service { poll, server, shared: Arc::clone(&shared) };
        let builder = std::thread::Builder::new().name("kv-side-channel".to_owned());
        let thread = builder.spawn(move || service.run()).map_err(ChannelError::os("clone"))?;
        Ok(SideChannel { thread: Arc::new(Thread { local_addr, shared, waker, thread: Some(thread) }) })
    }

    /// The address that the server listens on, with the port that the system picked.
    pub fn local_addr(&self) -> SocketAddr {
        self.thread.local_addr
    }

    /// From now on, requests for this rank are answered with this payload. The payload replaces an earlier one
    /// of the rank.
    pub fn publish(&self, pp_rank: u32, tp_rank: u32, payload: Bytes) {
        self.thread.shared.payloads().insert((pp_rank, tp_rank), payload);
    }

    /// From now on, requests for this rank are not answered any more.
    pub fn withdraw(&self, pp_rank: u32, tp_rank: u32) {
        self.thread.shared.payloads().remove(&(pp_rank, tp_rank));
    }

    /// How many ranks are published.
    #[cfg(test)]
    pub(crate) fn published(&self) -> usize {
        self.thread.shared.payloads().len()
    }

    /// What the server's clock shows at this moment of the worker's clock, in seconds. Requesters take the
    /// difference to their own clock, and compare moments that a machine has told them, such as
    /// `remote_blocks_expiry_time`, with theirs.
    pub fn seconds(at: Time) -> f64 {
        at.as_nanos() as f64 / 1e9
    }

    /// Reads the counts, each at its own moment.
    pub fn gauges(&self) -> SideChannelGauges {
        let Shared { answered, refused, malformed, connections, .. } = &*self.thread.shared;
        SideChannelGauges {
            answered: answered.load(Ordering::Relaxed),
            refused: refused.load(Ordering::Relaxed),
            malformed: malformed.load(Ordering::Relaxed),
            connections: connections.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Waking fails only if the eventfd's counter is full, and then the thread wakes anyway.
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn payloads(&self) -> std::sync::MutexGuard<'_, BTreeMap<(u32, u32), Bytes>> {
        self.payloads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a message, if the message is a request that can be answered.
    fn answer(&self, parts: &[Bytes], crowded: bool) -> Option<Vec<Bytes>> {
        let Some((pp_rank, tp_rank)) = parse(parts) else {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let payload = self.payloads().get(&(pp_rank, tp_rank)).filter(|_| !crowded).cloned();
        let Some(payload) = payload else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        self.answered.fetch_add(1, Ordering::Relaxed);
        let clock = metadata::clock(clock::now().since(Time::ZERO));
        Some(vec![Bytes::new(), payload, clock])
    }
}

/// The pipeline and tensor rank of a request, which comes behind an empty part as REQ sockets send it.
pub(crate) fn parse(parts: &[Bytes]) -> Option<(u32, u32)> {
    let [envelope, request] = parts else { return None };
    if envelope.is_empty() { asked(request) } else { None }
}

struct Service {
    poll: Poll,
    server: Server,
    shared: Arc<Shared>,
}

impl Service {
    fn run(mut self) {
        let (mut events, mut scratch) = (Events::with_capacity(256), vec![0; SCRATCH]);
        let counters = Counters::default();
        while !self.shared.stop.load(Ordering::Acquire) {
            match self.poll.poll(&mut events, self.timeout()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The epoll descriptor itself is broken: there is nothing left to serve with.
                Err(_) => return,
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.server.acceptable(),
                    WAKER => {}
                    Token(key) => self.server.ready(key, event),
                }
            }
            let shared = &*self.shared;
            self.server.advance(&mut Context {
                now: Instant::now(),
                registry: self.poll.registry(),
                token: Token,
                scratch: &mut scratch,
                counters: &counters,
                take: &mut |_, parts, crowded| shared.answer(&parts, crowded),
            });
            shared.connections.store(self.server.connections(), Ordering::Relaxed);
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let left = self.server.next_timeout(now)?.saturating_duration_since(now);
        // epoll counts in milliseconds: round up, or the last millisecond would be a busy loop.
        Some(if left.is_zero() { left } else { left + Duration::from_millis(1) })
    }
}
