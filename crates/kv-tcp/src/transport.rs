//! [`TcpTransport`]: its parts, each of which owns its state, and how it is made. Other files add the methods
//! of one idea each:
//!
//! ```text
//! contract    the Transport trait
//! sockets     which sockets are ready; reading and writing them in bounded shares
//! dialing     opening the way to a peer, and asking whether a peer is still there
//! listening   strangers, their hellos, and guests
//! serving     slices of guests: pages land here, pages are sent from here
//! slicing     slices of this side's posts
//! answers     what peers say about those slices
//! ending      how ways and guests end, and what has to be waited for
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;

use kv_core::{PeerId, Time};
use kv_host::{Memory, OsError, Posts, Timers, Token};

use crate::config::TcpConfig;
use crate::connection::{Connection, ConnectionId};
use crate::error::TcpError;
use crate::given::Given;
use crate::guest::Guests;
use crate::socket;
use crate::transfer::Transfer;
use crate::watch::Watch;
use crate::way::{Way, WayId};

/// Most bytes that are copied at once.
const SCRATCH: usize = 64 << 10;

/// One worker's end of the TCP transport. The [crate's page](crate) says what it does, with an example.
pub struct TcpTransport {
    pub(crate) config: TcpConfig,
    pub(crate) given: Given,
    pub(crate) watch: Watch,
    pub(crate) connections: HashMap<ConnectionId, Connection>,
    pub(crate) ways: BTreeMap<WayId, Way>,
    pub(crate) peers: HashMap<PeerId, WayId>,
    /// Peers to whom this side's way was lost.
    pub(crate) lost: HashMap<PeerId, Token>,
    pub(crate) guests: Guests,
    pub(crate) strangers: BTreeSet<ConnectionId>,
    /// Connections with bytes that the kernel does not report, in the order in which they are read.
    pub(crate) unread: VecDeque<ConnectionId>,
    pub(crate) posts: Posts<Transfer>,
    /// Ways that may have something to send.
    pub(crate) stirred: BTreeSet<WayId>,
    /// The way that has sent last.
    pub(crate) filled: WayId,
    /// Ways by the time at which they are looked at.
    pub(crate) timers: Timers,
    /// When accepting begins again, after the process had no descriptor left.
    pub(crate) listen_at: Option<Time>,
    pub(crate) bound: SocketAddr,
    /// The number that was given to a connection, way or guest last.
    pub(crate) last_id: u64,
    pub(crate) now: Time,
    pub(crate) scratch: Box<[u8]>,
    pub(crate) stats: TcpStats,
}

/// Counts since the transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TcpStats {
    /// Connections that were accepted, refused ones included.
    pub accepted: u64,
    /// Connections that were refused: above a limit, too slow, or with a hello that is not acceptable.
    pub refused: u64,
    /// Connections that were closed because the other side broke the rules of the stream.
    pub broken: u64,
    /// Connections that were closed because certificates did not show that the other side is a worker of the
    /// service, or because the other side does not speak TLS. They are counted as refused, too, if this side had
    /// accepted them.
    pub untrusted: u64,
    /// Slices that were not in place in their time, and were sent again.
    pub late: u64,
    /// Posts that have ended without an error: all bytes are in place.
    pub posts_completed: u64,
}

impl TcpTransport {
    /// A transport that listens on [`TcpConfig::bind`].
    ///
    /// # Errors
    ///
    /// [`TcpError::Limit`] if a field of `config` is out of its range; [`TcpError::Bind`] if the address is
    /// not of this host, or taken; [`TcpError::Advertise`] if peers would be told an address that names no
    /// host.
    pub fn new(config: TcpConfig) -> Result<TcpTransport, TcpError> {
        config.check()?;
        let address = config.bind;
        let bind = |cause: OsError| TcpError::Bind { address, cause };
        let (listener, bound) = socket::listener(&config).map_err(bind)?;
        let addresses =
            socket::advertised(&config, bound).map_err(|address| TcpError::Advertise { address })?;
        let tls = config.encryption().is_some();
        Ok(TcpTransport {
            config,
            given: Given::new(addresses, tls)?,
            watch: Watch::new(listener)?,
            connections: HashMap::new(),
            ways: BTreeMap::new(),
            peers: HashMap::new(),
            lost: HashMap::new(),
            guests: Guests::default(),
            strangers: BTreeSet::new(),
            unread: VecDeque::new(),
            posts: Posts::default(),
            stirred: BTreeSet::new(),
            filled: 0,
            timers: Timers::default(),
            listen_at: None,
            bound,
            last_id: 0,
            now: Time::ZERO,
            scratch: vec![0; SCRATCH].into(),
            stats: TcpStats::default(),
        })
    }

    /// Gives memory to the transport, an [`Arena`](kv_host::Arena) or a [`HostMemory`](kv_host::HostMemory):
    /// regions inside it can be registered, and peers may read and write those.
    ///
    /// # Errors
    ///
    /// [`TcpError::Memory`] if the transport's metadata has been asked for: peers may know the metadata, so
    /// the memory cannot change any more.
    pub fn add_memory(&mut self, memory: &Memory) -> Result<(), TcpError> {
        self.given.add(memory.clone())
    }

    /// The address on which the transport listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.bound
    }

    /// The addresses that peers are told, in the order in which they are tried.
    pub fn addresses(&self) -> &[SocketAddr] {
        self.given.addresses()
    }

    /// The counts so far.
    pub fn stats(&self) -> TcpStats {
        TcpStats { posts_completed: self.posts.completed(), ..self.stats }
    }

    /// A number that nothing had before.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TcpTransport { bound, peers, stats, .. } = self;
        f.debug_struct("TcpTransport")
            .field("bound", bound)
            .field("peers", &peers.len())
            .field("stats", stats)
            .finish_non_exhaustive()
    }
}
