//! [`FabricTransport`]: its parts, each of which owns its state, and how it is made. Other files add the methods of one
//! idea each:
//!
//! ```text
//! contract    the Transport trait
//! completing  what libfabric reports
//! hearing     messages of peers: greetings, frames, farewells
//! sending     messages to peers
//! slicing     slices of this side's posts
//! ending      how posts and ways end, and what has to be waited for
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use bytes::Bytes;
use kv_core::{PeerId, Time};
use kv_host::{Memory, Posts, Timers, clock};

use crate::completing::Flight;
use crate::config::FabricConfig;
use crate::device::{Device, DeviceStats, Devices};
use crate::ending::LEAVING;
use crate::error::FabricError;
use crate::ffi::{Completion, Library, MESSAGE};
use crate::given::Given;
use crate::guest::{GuestId, Guests, Reply, Unanswered};
use crate::message::Immediate;
use crate::metadata::Port;
use crate::silence::Looks;
use crate::transfer::Transfer;
use crate::watch::Watch;
use crate::way::{Way, WayId};

/// One worker's end of the libfabric transport. The [crate's page](crate) says what it does, with an example.
pub struct FabricTransport {
    pub(crate) config: FabricConfig,
    pub(crate) devices: Devices,
    pub(crate) given: Given,
    pub(crate) watch: Watch,
    pub(crate) ways: BTreeMap<WayId, Way>,
    pub(crate) keys: HashMap<u64, WayId>,
    pub(crate) peers: HashMap<PeerId, WayId>,
    pub(crate) guests: Guests,
    /// Answers that guests are to be given.
    pub(crate) unanswered: BTreeMap<(GuestId, Reply), Unanswered>,
    pub(crate) posts: Posts<Transfer>,
    /// Ways that may have something to send.
    pub(crate) stirred: BTreeSet<WayId>,
    /// Ways for which libfabric has had no room.
    pub(crate) blocked: BTreeSet<WayId>,
    /// The way that has sent last.
    pub(crate) filled: WayId,
    /// Ways by the time at which they are looked at.
    pub(crate) timers: Timers,
    /// How long a peer may be silent ([`FabricConfig::silence`]).
    pub(crate) silence: Looks,
    /// How long a peer may take to welcome this side ([`FabricConfig::handshake_timeout`]).
    pub(crate) greeting: Looks,
    /// How long a disconnected way goes on sending ([`LEAVING`]).
    pub(crate) leaving: Looks,
    /// When the keepalive is given to new connections, if there may be some.
    pub(crate) keep_alive_at: Option<Time>,
    pub(crate) done: Vec<Completion<Flight>>,
    pub(crate) scratch: Vec<u8>,
    /// The number that was given to a way or guest last.
    pub(crate) last_id: u64,
    pub(crate) now: Time,
    pub(crate) stats: FabricStats,
}

/// Counts since the transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FabricStats {
    /// Peers that have connected this transport.
    pub guests: u64,
    /// Messages of strangers, of peers above a limit, and of earlier lives.
    pub refused: u64,
    /// Peers that broke the rules of messages, and were forgotten.
    pub broken: u64,
    /// Writes of peers that were counted here.
    pub counted: u64,
    /// Completions of nothing that was under way, and data of writes that name no post of a peer.
    pub stray: u64,
    /// Posts that have ended without an error: all bytes are in place.
    pub posts_completed: u64,
}

impl FabricTransport {
    /// A transport with an endpoint of [`FabricConfig::provider`] on each of [`FabricConfig::devices`].
    ///
    /// # Errors
    ///
    /// [`FabricError::Limit`], [`FabricError::Refused`] and [`FabricError::Address`] if a field of `config` is not
    /// acceptable; [`FabricError::Library`], [`FabricError::Symbol`] and [`FabricError::Version`] if libfabric cannot be
    /// used; [`FabricError::Provider`] if it has no such provider here, or not on such a device;
    /// [`FabricError::Mixed`] if the devices are too different.
    pub fn new(config: FabricConfig) -> Result<FabricTransport, FabricError> {
        config.check()?;
        let library = Library::get(config.library.as_deref())?;
        let devices = Devices::open(library, &config)?;
        let port = |device: &Device| Port {
            name: Bytes::copy_from_slice(device.endpoint.name()),
            node: device.location.node,
        };
        let ports = devices.all().map(port).collect();
        let given = Given::new(config.provider.clone(), ports, devices.promises().immediate)?;
        let watch = Watch::new()?;
        let (silence, greeting) = (Looks::new(config.silence), Looks::new(config.handshake_timeout));
        Ok(FabricTransport {
            config,
            devices,
            given,
            watch,
            ways: BTreeMap::new(),
            keys: HashMap::new(),
            peers: HashMap::new(),
            guests: Guests::default(),
            unanswered: BTreeMap::new(),
            posts: Posts::default(),
            stirred: BTreeSet::new(),
            blocked: BTreeSet::new(),
            filled: 0,
            timers: Timers::default(),
            silence,
            greeting,
            leaving: Looks::new(LEAVING),
            keep_alive_at: None,
            done: Vec::new(),
            scratch: vec![0; MESSAGE],
            last_id: 0,
            now: clock::now(),
            stats: FabricStats::default(),
        })
    }

    /// Gives memory to the transport, an [`Arena`](kv_host::Arena) or a [`HostMemory`](kv_host::HostMemory): regions
    /// inside it can be registered, and peers may read and write those.
    ///
    /// # Errors
    ///
    /// [`FabricError::Memory`] if the transport's metadata has been asked for: peers may know the metadata, so the memory
    /// cannot change any more.
    pub fn add_memory(&mut self, memory: &Memory) -> Result<(), FabricError> {
        self.given.add(memory.clone())
    }

    /// True if writes are counted by the receiver, which needs no message after them; false if the provider's writes
    /// carry less than eight bytes of data, and a post's notify frame follows when its bytes are in place.
    pub fn counts_writes(&self) -> bool {
        self.devices.promises().immediate >= Immediate::SURE
    }

    /// What each of [`FabricConfig::devices`] has done so far.
    pub fn devices(&self) -> Vec<DeviceStats> {
        self.devices.all().map(Device::stats).collect()
    }

    /// The counts so far.
    pub fn stats(&self) -> FabricStats {
        FabricStats { posts_completed: self.posts.completed(), ..self.stats }
    }

    /// A number that nothing had before.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

impl fmt::Debug for FabricTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FabricTransport { config, peers, stats, .. } = self;
        f.debug_struct("FabricTransport")
            .field("provider", &config.provider)
            .field("devices", &config.devices.len())
            .field("peers", &peers.len())
            .field("stats", stats)
            .finish_non_exhaustive()
    }
}
