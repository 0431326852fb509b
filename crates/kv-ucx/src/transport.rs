//! [`UcxTransport`]: its parts, each of which owns its state, and how it is made. Other files add the methods of one
//! idea each:
//!
//! ```text
//! contract    the Transport trait
//! serving     one turn of poll: UCX works, and what it has left is looked at
//! opening     ways to peers: hellos and welcomes
//! slicing     slices of posts, frames, and what becomes of them
//! ending      how ways and remotes end, and what has to be waited for
//! farewell    the last words of a transport that is dropped
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use bytes::Bytes;
use kv_core::{Descriptor, PeerId, Time, TransportError};
use kv_host::{Memory, MemoryError, Posts, Token, TransferId};

use crate::config::UcxConfig;
use crate::error::UcxError;
use crate::ffi::engine::{Engine, Failure, Piece};
use crate::given::{Given, Range};
use crate::library::Ucx;
use crate::metadata::MAX_ADDRESS;
use crate::parted::Parted;
use crate::remote::{RemoteId, Remotes};
use crate::scans::Scans;
use crate::transfer::Transfer;
use crate::watch::Watch;
use crate::way::{Way, WayId};

/// One worker's end of the UCX transport. The [crate's page](crate) says what it does, with an example.
pub struct UcxTransport {
    /// UCX lets a GPU copy what is read.
    pub(crate) reads_by_gpu: bool,
    pub(crate) config: UcxConfig,
    pub(crate) watch: Watch,
    /// Dropped before the memory that it has registered.
    pub(crate) engine: Engine,
    pub(crate) given: Given,
    pub(crate) remotes: Remotes,
    pub(crate) ways: BTreeMap<WayId, Way>,
    pub(crate) by_token: HashMap<Token, WayId>,
    pub(crate) peers: HashMap<PeerId, WayId>,
    pub(crate) posts: Posts<Transfer>,
    pub(crate) flights: HashMap<u64, Flight>,
    /// Ways that may have something to send, and the way that has sent last.
    pub(crate) stirred: BTreeSet<WayId>,
    pub(crate) filled: WayId,
    /// Ways with notify frames that wait for room.
    pub(crate) crowded: BTreeSet<WayId>,
    /// Ways that are opening, by the time at which they are looked at.
    pub(crate) opening: BTreeSet<(Time, WayId)>,
    /// Remotes that are ending.
    pub(crate) ending: Vec<RemoteId>,
    pub(crate) scans: Scans,
    pub(crate) parted: Parted,
    /// The keys of this side's regions, once a peer has asked for them.
    pub(crate) keys: Option<Vec<Bytes>>,
    /// The number that was given to a remote, way or slice last.
    pub(crate) last_id: u64,
    pub(crate) now: Time,
    pub(crate) parts: Vec<Descriptor>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) stats: UcxStats,
}

/// A slice that is under way.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) transfer: TransferId,
    pub(crate) way: WayId,
    pub(crate) remote: RemoteId,
    pub(crate) weight: u64,
    pub(crate) begun: Time,
}

/// Counts since the transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UcxStats {
    /// Slices that were handed to UCX.
    pub slices: u64,
    /// Contiguous ranges in those slices.
    pub descriptors: u64,
    /// Bytes in those slices.
    pub bytes: u64,
    /// Posts that have ended without an error: all bytes are in place.
    pub posts_completed: u64,
    /// Messages that were dropped: of another form, of no session, or for another life of this transport.
    pub strangers: u64,
}

impl UcxTransport {
    /// A transport with a UCX context and worker of its own.
    ///
    /// # Errors
    ///
    /// [`UcxError::Limit`] if a field of `config` is out of its range; [`UcxError::Device`] if this host does not have
    /// one of the devices; [`UcxError::Setting`] if UCX refuses a
    /// setting; [`UcxError::Call`] if UCX cannot work with the devices and transports.
    pub fn new(ucx: Ucx, config: UcxConfig) -> Result<UcxTransport, UcxError> {
        config.check()?;
        config.check_devices()?;
        let settings = config.all_settings();
        let call = |Failure { call, status }: Failure| UcxError::Call {
            call,
            status: status.words(ucx.api),
            code: status.code(),
            devices: config.devices.clone(),
            transports: config.transports.clone(),
        };
        let reads_by_gpu = config.reads_by_gpu(|name| std::env::var(name).ok());
        let engine = Engine::new(ucx.api, &UcxConfig::settings_if_known(), &settings).map_err(
            |(failure, setting)| {
                let setting = setting.and_then(|index| settings.get(index));
                setting.map_or_else(
                    || call(failure),
                    |(name, value)| {
                        let (name, value) = (name.clone(), value.clone());
                        UcxError::Setting { name, value, status: failure.status.words(ucx.api) }
                    },
                )
            },
        )?;
        let address = engine.address().map_err(call)?;
        kv_host::check::limits([("the length of UCX's address", address.len(), 1, MAX_ADDRESS)])?;
        let watch = Watch::new(engine.event_fd().map_err(call)?)?;
        Ok(UcxTransport {
            watch,
            engine,
            given: Given::new(Token::random()?, address.into()),
            remotes: Remotes::default(),
            ways: BTreeMap::new(),
            by_token: HashMap::new(),
            peers: HashMap::new(),
            posts: Posts::default(),
            flights: HashMap::new(),
            stirred: BTreeSet::new(),
            filled: 0,
            crowded: BTreeSet::new(),
            opening: BTreeSet::new(),
            ending: Vec::new(),
            scans: Scans::default(),
            parted: Parted::default(),
            keys: None,
            last_id: 0,
            now: Time::ZERO,
            parts: Vec::new(),
            pieces: Vec::new(),
            stats: UcxStats::default(),
            reads_by_gpu,
            config,
        })
    }

    /// Gives memory to the transport, an [`Arena`](kv_host::Arena) or a [`HostMemory`](kv_host::HostMemory): regions
    /// inside it can be registered, and peers may read and write those.
    ///
    /// # Errors
    ///
    /// [`UcxError::Memory`] if the transport's metadata has been asked for: peers may know the metadata, so the
    /// memory cannot change any more.
    pub fn add_memory(&mut self, memory: &Memory) -> Result<(), UcxError> {
        Ok(self.add_range(Range::host(memory.clone()))?)
    }

    pub(crate) fn add_range(&mut self, range: Range) -> Result<(), MemoryError> {
        self.given.add(range)
    }

    /// The transports of UCX, each with its device, over which bytes go to a connected peer, as far as UCX says; empty
    /// for a peer that is not connected.
    pub fn lanes(&self, peer: PeerId) -> Vec<(String, String)> {
        let way = self.peers.get(&peer).and_then(|id| self.ways.get(id));
        way.map(|way| self.lanes_to(way.remote)).unwrap_or_default()
    }

    /// The same for a remote.
    pub(crate) fn lanes_to(&self, remote: RemoteId) -> Vec<(String, String)> {
        let remote = self.remotes.get(remote);
        remote.map(|remote| self.engine.transports(remote.endpoint)).unwrap_or_default()
    }

    /// The counts so far.
    pub fn stats(&self) -> UcxStats {
        let UcxStats { strangers, .. } = self.stats;
        let (posts_completed, strangers) = (self.posts.completed(), strangers + self.engine.dropped());
        UcxStats { posts_completed, strangers, ..self.stats }
    }

    /// A number that nothing had before.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The error of a call of UCX.
    pub(crate) fn backend(&self, Failure { call, status }: Failure) -> TransportError {
        status.of(self.engine.api(), call)
    }
}

impl fmt::Debug for UcxTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UcxTransport { config, peers, stats, .. } = self;
        f.debug_struct("UcxTransport")
            .field("devices", &config.devices)
            .field("transports", &config.transports)
            .field("peers", &peers.len())
            .field("stats", stats)
            .finish_non_exhaustive()
    }
}
