//! [`HostServer`]: how the process that owns the region serves the ranks of its host.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kv_host::{OsError, Process, check, descriptors};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::address::{HostAddress, Listener};
use super::connection::Holdings;
use super::error::{HostError, Refusal};
use super::message::{
    Greeting, MAX_COMPATIBILITY, MAX_REQUEST, Reply, Request, Welcome, decode, encode, encode_greeting,
};
use super::watch::{Ready, Watch};
use crate::region::EcRegion;
use crate::store::SharedStore;

/// Most requests of one rank, and most new connections, in one turn.
const PER_TURN: usize = 16;
/// How long new connections wait when the process has no descriptor left for them.
const PAUSE: Duration = Duration::from_millis(50);

/// Settings of a [`HostServer`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostConfig {
    /// The hash of what the region's embeddings depend on ([`Compatibility::hash`](crate::Compatibility::hash)),
    /// which every rank compares with its own; at most 1024 bytes.
    pub compatibility: String,
    /// Most connections at a time, 1 to 4096. A process that has closed its connection and left reservations
    /// behind counts as a connection until the process ends.
    pub max_connections: u32,
    /// Most reservations and pins of one rank together; 1 to 65536.
    pub max_held: u32,
}

impl Default for HostConfig {
    /// No compatibility hash, 64 connections, 4096 reservations and pins for each.
    fn default() -> HostConfig {
        HostConfig { compatibility: String::new(), max_connections: 64, max_held: 4096 }
    }
}

impl HostConfig {
    /// The same with some fields changed.
    ///
    /// ```
    /// use kv_ec::host::HostConfig;
    /// let config = HostConfig::default().with(|config| config.max_connections = 8);
    /// assert_eq!(config.max_held, 4096);
    /// ```
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut HostConfig)) -> HostConfig {
        change(&mut self);
        self
    }
}

/// What a server holds for its ranks, and counts since the server was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostGauges {
    /// Ranks that are connected.
    pub connections: usize,
    /// Processes that have closed their connection and left reservations behind, which last until the process
    /// ends.
    pub leaving: usize,
    /// Pins of all ranks.
    pub pins: usize,
    /// Reservations of all ranks.
    pub reservations: usize,
    /// Connections that were refused, because there were too many or because they were of another user.
    pub refused: u64,
    /// Connections that were ended because a message could not be decoded as a request.
    pub violations: u64,
}

/// Serves the region and its cache to the ranks of the host. The [module](super) says what ranks can do, and
/// what happens when a rank ends.
///
/// The server runs on a thread of its own ([`spawn`](HostServer::spawn)), or in the caller's loop: the caller
/// calls [`turn`](HostServer::turn) whenever the server's descriptor ([`AsFd`]) is readable, and every 50 ms,
/// because a server that had no file descriptor left for a new connection tries again after this time.
///
/// Dropping a server unpins the entries of its ranks. The blocks of a reservation are lost with the server if
/// the rank still runs: the cache never uses them again ([`CacheGauges::lost`](crate::CacheGauges::lost)).
#[derive(Debug)]
pub struct HostServer {
    pub(super) watch: Watch,
    listener: Listener,
    /// When the server listens again, after a pause.
    listens_at: Option<Instant>,
    region: EcRegion,
    store: SharedStore,
    config: HostConfig,
    welcome: Vec<u8>,
    ranks: BTreeMap<u64, Rank>,
    drawn: u64,
    refused: u64,
    violations: u64,
}

/// A process that is connected, or that has left reservations behind.
#[derive(Debug)]
struct Rank {
    process: Process,
    holdings: Holdings,
    socket: Option<OwnedFd>,
    /// The answer that the socket has no room for.
    unsent: Option<Vec<u8>>,
    /// True while the server waits for room in the socket, and not for requests.
    waits_for_room: bool,
}

/// Why a connection is over.
enum Ended {
    Closed,
    Violation,
}

impl HostServer {
    /// Listens at an address. `store` must be the cache of the entries in `region`.
    ///
    /// # Errors
    ///
    /// [`HostError::Blocks`] and [`HostError::BlockBytes`] if the cache is not one of this region,
    /// [`HostError::Limit`] for a setting out of its range, [`HostError::Os`] if somebody else listens at the
    /// address or the address cannot be used.
    pub fn bind(
        address: &HostAddress,
        region: &EcRegion,
        store: &SharedStore,
        config: HostConfig,
    ) -> Result<HostServer, HostError> {
        let (max_connections, max_held) = (config.max_connections as usize, config.max_held as usize);
        check::limits([
            ("max_connections", max_connections, 1, 4096),
            ("max_held", max_held, 1, 65536),
            ("compatibility", config.compatibility.len(), 0, MAX_COMPATIBILITY),
        ])?;
        let (blocks, block_bytes) = (region.blocks(), region.block_bytes());
        let cache = store.gauges().blocks;
        if cache != blocks {
            return Err(HostError::Blocks { region: blocks, cache });
        }
        if store.block_bytes() != block_bytes {
            return Err(HostError::BlockBytes { region: block_bytes, cache: store.block_bytes() });
        }
        let compatibility = config.compatibility.clone();
        let welcome = encode_greeting(&Greeting::Welcome(Welcome { blocks, block_bytes, compatibility }))?;
        let (watch, listener) = (Watch::new()?, address.listen()?);
        watch.add(&listener, Ready::Listener)?;
        Ok(HostServer {
            watch,
            listener,
            listens_at: None,
            region: region.clone(),
            store: store.clone(),
            config,
            welcome,
            ranks: BTreeMap::new(),
            drawn: 0,
            refused: 0,
            violations: 0,
        })
    }

    /// Waits until there is something to serve, for `timeout` at most (`None`: without an end), and serves it. A
    /// call may return early without having served anything. Fails only if the kernel's `epoll_wait` fails.
    pub fn turn(&mut self, timeout: Option<Duration>) -> Result<(), HostError> {
        let pause = self.listens_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.into_iter().chain(pause).min();
        for ready in self.watch.wait(timeout)? {
            match ready {
                Ready::Listener => self.accept(),
                Ready::Socket(rank) => self.serve(rank),
                Ready::Process(rank) => self.forget(rank),
                // The thread looks for itself whether it is to stop.
                Ready::Wake => {}
            }
        }
        if self.listens_at.is_some_and(|at| at <= Instant::now())
            && self.watch.add(&self.listener, Ready::Listener).is_ok()
        {
            self.listens_at = None;
        }
        Ok(())
    }

    /// What the server holds for its ranks.
    pub fn gauges(&self) -> HostGauges {
        let connections = self.ranks.values().filter(|rank| rank.socket.is_some()).count();
        HostGauges {
            connections,
            leaving: self.ranks.len() - connections,
            pins: self.ranks.values().map(|rank| rank.holdings.num_pins()).sum(),
            reservations: self.ranks.values().map(|rank| rank.holdings.num_reservations()).sum(),
            refused: self.refused,
            violations: self.violations,
        }
    }

    fn accept(&mut self) {
        for _ in 0..PER_TURN {
            match accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    if self.greet(socket).is_err() {
                        self.refused += 1;
                    }
                }
                Err(Errno::WOULDBLOCK) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => {
                    self.watch.remove(&self.listener);
                    self.listens_at = Some(Instant::now() + PAUSE);
                    return;
                }
            }
        }
    }

    /// Accepts a rank and passes the region to it, or refuses the rank.
    fn greet(&mut self, socket: OwnedFd) -> Result<(), HostError> {
        let process = Process::behind(socket.as_fd())?;
        if self.ranks.len() >= self.config.max_connections as usize {
            let refusal = Refusal::TooManyConnections { max: self.config.max_connections };
            let greeting = encode_greeting(&Greeting::Refused(refusal))?;
            descriptors::send(socket.as_fd(), &[IoSlice::new(&greeting)], &[])?;
            return Err(refusal.into());
        }
        descriptors::send(socket.as_fd(), &[IoSlice::new(&self.welcome)], &[self.region.as_fd()])?;
        self.drawn += 1;
        self.watch.add(&socket, Ready::Socket(self.drawn))?;
        let holdings = Holdings::new(&self.store, self.config.max_held);
        let rank = Rank { process, holdings, socket: Some(socket), unsent: None, waits_for_room: false };
        self.ranks.insert(self.drawn, rank);
        Ok(())
    }

    fn serve(&mut self, number: u64) {
        let Some(rank) = self.ranks.get_mut(&number) else { return };
        let served = rank.serve().and_then(|()| rank.wait(&self.watch, number));
        if let Err(ended) = served {
            self.violations += u64::from(matches!(ended, Ended::Violation));
            self.end(number);
        }
    }

    /// Ends a connection: its pins are over, and its reservations wait for the end of the process.
    fn end(&mut self, number: u64) {
        let Some(rank) = self.ranks.get_mut(&number) else { return };
        if let Some(socket) = rank.socket.take() {
            self.watch.remove(&socket);
        }
        rank.holdings.unpin_all();
        if rank.holdings.num_reservations() == 0 || !rank.process.is_alive() {
            self.forget(number);
        } else if self.watch.add(&rank.process, Ready::Process(number)).is_err() {
            // The process's end would never be known: the reservations are lost.
            self.ranks.remove(&number);
        }
    }

    /// Forgets a rank whose process has ended, or that holds nothing.
    fn forget(&mut self, number: u64) {
        if let Some(mut rank) = self.ranks.remove(&number) {
            self.watch.remove(&rank.process);
            rank.holdings.discard_all();
        }
    }
}

impl AsFd for HostServer {
    /// A descriptor that is readable when there is something to serve.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl Drop for HostServer {
    fn drop(&mut self) {
        for rank in self.ranks.values_mut() {
            // First, so that a rank that reads sees that the pins are over.
            rank.socket = None;
            rank.holdings.unpin_all();
            if !rank.process.is_alive() {
                rank.holdings.discard_all();
            }
        }
    }
}

impl Rank {
    /// Answers requests, as long as there are any, there is room for the answers, and other ranks do not have
    /// to wait for long.
    fn serve(&mut self) -> Result<(), Ended> {
        let Rank { socket: Some(socket), holdings, unsent, .. } = self else { return Ok(()) };
        // One byte more than a request may have, so that a longer one is seen to be longer.
        let mut buffer = [0; MAX_REQUEST + 1];
        for _ in 0..PER_TURN {
            if let Some(answer) = unsent.take()
                && !send(socket, &answer)?
            {
                *unsent = Some(answer);
                return Ok(());
            }
            let len = match descriptors::receive(socket.as_fd(), &mut buffer, &mut Vec::new(), 0) {
                Ok(0) => return Err(Ended::Closed),
                Ok(len) => len,
                Err(error) if error.is_for_now() => return Ok(()),
                Err(descriptors::ReceiveError::TooMany { .. }) => return Err(Ended::Violation),
                Err(_) => return Err(Ended::Closed),
            };
            let message = buffer.get(..len).filter(|message| message.len() <= MAX_REQUEST);
            let request: Request =
                message.and_then(|message| decode(message).ok()).ok_or(Ended::Violation)?;
            let reply = Reply { number: request.number, answer: holdings.answer(&request.ask) };
            *unsent = Some(encode(&reply).map_err(|_| Ended::Violation)?);
        }
        Ok(())
    }

    /// Waits for room if an answer is unsent, and otherwise for the next request.
    fn wait(&mut self, watch: &Watch, number: u64) -> Result<(), Ended> {
        let room = self.unsent.is_some();
        if let Some(socket) = self.socket.as_ref().filter(|_| room != self.waits_for_room) {
            watch.wait_for_room(socket, Ready::Socket(number), room).map_err(|_| Ended::Closed)?;
            self.waits_for_room = room;
        }
        Ok(())
    }
}

/// Sends a message; false if there is no room for it now.
fn send(socket: &OwnedFd, message: &[u8]) -> Result<bool, Ended> {
    match descriptors::send(socket.as_fd(), &[IoSlice::new(message)], &[]) {
        Ok(_) => Ok(true),
        Err(OsError { kind: std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted, .. }) => {
            Ok(false)
        }
        Err(_) => Err(Ended::Closed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{EncoderCache, Eviction};

    #[test]
    fn a_listener_that_paused_listens_again_and_the_server_sleeps() {
        let address: HostAddress = format!("@kv-ec-pause-{}", std::process::id()).parse().unwrap();
        let region = EcRegion::create(1, 1).unwrap();
        let store = SharedStore::new(EncoderCache::new(1, 1, Eviction::Fifo));
        let mut server = HostServer::bind(&address, &region, &store, HostConfig::default()).unwrap();
        server.watch.remove(&server.listener);
        server.listens_at = Some(Instant::now());
        let _rank = address.dial(Duration::from_secs(10)).unwrap();
        server.turn(Some(Duration::ZERO)).unwrap();
        assert_eq!((server.listens_at, server.gauges().connections), (None, 0));
        server.turn(Some(Duration::ZERO)).unwrap();
        assert_eq!(server.gauges().connections, 1);
    }
}
