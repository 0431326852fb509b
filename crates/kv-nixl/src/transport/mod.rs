//! The fields of the transport. The methods are in the files of this list; each file calls the files below:
//!
//! ```text
//! transport/contract                                          the Transport trait
//! connections/opening, foreign/connecting, regions/storage    connections are opened
//! notifications/incoming, connections/closing                 what arrives; how connections end
//! transfers/turns                                             requests start, and are watched
//! transfers/slices                                            the content of the next request
//! transfers/held, transfers/settle                            may a write start; posts end
//! notifications/outgoing, transfers/enqueue                   what is sent; where posts wait
//! transport/ends                                              a post ends, a connection breaks
//! transport
//! ```

mod contract;
mod ends;
mod pace;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::RandomState;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{PeerId, PostId, TransportError, TransportEvent};
use kv_host::wake::Announced;
use kv_host::{Frozen, Host, OsError, ProcessIdentity, random};
use rustix::event::epoll;

use crate::agent::engine::Engine;
use crate::agent::name::{agent_name, uuid_name};
use crate::config::NixlConfig;
use crate::connections::id::RemoteId;
use crate::connections::origins::Origins;
use crate::connections::remote::Remote;
use crate::connections::route::{Reach, Route};
use crate::error::NixlError;
use crate::ffi::memory::Memory;
use crate::library::discovery::Nixl;
use crate::notifications::arrivals::Arrivals;
use crate::notifications::datagrams::Datagrams;
use crate::notifications::inbox::Inbox;
use crate::regions::place::Place;
use crate::regions::prepared::Grid;
use crate::transfers::line::Line;
use crate::transfers::permission::Permission;
use crate::transfers::request::Request;
use crate::transfers::transfer::{Batch, Transfer};
use crate::transport::pace::Pace;

/// The NIXL transport of one worker: one NIXL agent, the memory of the worker, and the connections to peers.
/// The [crate's header](crate) has an example.
pub struct NixlTransport {
    pub(crate) nixl: Nixl,
    pub(crate) config: NixlConfig,
    /// Requests on their way. They are dropped before the agent and the memory.
    pub(crate) requests: Vec<Request>,
    pub(crate) engine: Engine,
    pub(crate) token: u64,
    /// The name of the agent: made of the token, or a UUID.
    pub(crate) name: String,
    /// This host and this process, as far as the kernel says.
    pub(crate) process: (Host, ProcessIdentity),
    pub(crate) reach: Reach,
    pub(crate) memories: Vec<Memory>,
    pub(crate) regions: Vec<Memory>,
    /// Bytes of an item of each region.
    pub(crate) item_lens: Vec<u64>,
    /// The items of this transport's regions, once NIXL has prepared a list of them.
    pub(crate) lists: Option<Grid>,
    /// The key by which two metadata of one peer are compared.
    pub(crate) same: RandomState,
    /// The agent's metadata, once a caller has asked for it.
    pub(crate) frozen: Frozen,

    pub(crate) peers: HashMap<PeerId, RemoteId>,
    pub(crate) names: HashMap<String, RemoteId>,
    pub(crate) remotes: BTreeMap<RemoteId, Remote>,
    /// Until when each peer permits writes.
    pub(crate) permissions: HashMap<PeerId, Permission>,
    pub(crate) origins: Origins,
    /// Readable when a peer on this host has died, or a datagram has come.
    pub(crate) wakes: OwnedFd,
    pub(crate) datagrams: Option<Datagrams>,

    pub(crate) transfers: HashMap<PostId, Transfer>,
    /// Peers with posts that have something to send, in the order of their turns.
    pub(crate) line: Line,
    /// Connections that are not open: each ends when its requests have ended.
    pub(crate) ending: Vec<RemoteId>,
    pub(crate) arrivals: Arrivals,
    /// Raw notifications of foreign agents.
    pub(crate) inbox: Inbox,
    /// Connections with a datagram that waits to be sent.
    pub(crate) unsent: Vec<RemoteId>,
    pub(crate) probe_at: Instant,
    pub(crate) events: Vec<TransportEvent>,
    pub(crate) pace: Pace,
    /// The frame for which the owner does not sleep.
    pub(crate) announced: Announced<RemoteId>,
    pub(crate) batch: Batch,
    pub(crate) stats: NixlStats,
}

/// Counts since the transport was made, and two gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NixlStats {
    /// Requests that were posted to NIXL.
    pub requests: u64,
    /// Requests of [`requests`](NixlStats::requests) that named prepared items by their numbers.
    pub requests_by_number: u64,
    /// Descriptors in all requests.
    pub descriptors: u64,
    /// Bytes in all requests.
    pub bytes: u64,
    /// Posts that ended without an error.
    pub posts_completed: u64,
    /// Notifications that were not for this transport, or not of this version.
    pub strangers: u64,
    /// Raw notifications of foreign agents that were dropped: the inbox had no room, or they were too long.
    pub foreign_dropped: u64,
    /// Time of the longest call of `poll`.
    pub longest_poll: Duration,
    /// Gauge: posts that were cancelled, or whose peer died or lost its connection, and whose memory may
    /// still be touched.
    pub unquiet: usize,
}

/// The number of the datagram socket in the epoll set; connections have smaller numbers.
const DATAGRAMS: u64 = u64::MAX;

impl NixlTransport {
    /// Makes a transport, whose agent gets a random name.
    pub fn new(nixl: &Nixl, config: NixlConfig) -> Result<NixlTransport, NixlError> {
        config.check()?;
        let token = u64::from_le_bytes(random()?);
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OsError::new("epoll_create", error))?;
        // Without the socket, frames come by NIXL, and are seen a little later. A transport under a UUID has none: the
        // address of the socket is made of the name that agents of this crate have.
        let datagrams =
            (!config.uuid_name).then(|| Datagrams::new(token).ok()).flatten().filter(|datagrams| {
                let data = epoll::EventData::new_u64(DATAGRAMS);
                epoll::add(&wakes, datagrams, data, epoll::EventFlags::IN).is_ok()
            });
        let name = if config.uuid_name { uuid_name(random()?) } else { agent_name(token) };
        let engine = Engine::new(nixl, &name, &config)?;
        Ok(NixlTransport {
            nixl: nixl.clone(),
            engine,
            token,
            name,
            process: (Host::here().unwrap_or_default(), ProcessIdentity::here().unwrap_or_default()),
            reach: Reach::here(&config, &nixl.ucx_settings(), nixl.reads_by_gpu()),
            memories: Vec::new(),
            regions: Vec::new(),
            item_lens: Vec::new(),
            lists: None,
            same: RandomState::new(),
            frozen: Frozen::default(),
            peers: HashMap::new(),
            names: HashMap::new(),
            remotes: BTreeMap::new(),
            permissions: HashMap::new(),
            origins: Origins::default(),
            wakes,
            datagrams,
            transfers: HashMap::new(),
            requests: Vec::new(),
            line: Line::default(),
            ending: Vec::new(),
            arrivals: Arrivals::default(),
            inbox: Inbox::new(config.foreign_bytes),
            unsent: Vec::new(),
            probe_at: Instant::now(),
            events: Vec::new(),
            pace: Pace::new(config.idle_poll),
            announced: Announced::NONE,
            batch: Batch::default(),
            stats: NixlStats::default(),
            config,
        })
    }

    /// Gives mapped memory to the transport: regions of the memory can be registered. The memory is that of a
    /// [`HostMemory`](kv_host::HostMemory), or the region of an encoder cache. It stays mapped while the
    /// transport may use it.
    pub fn add_memory(&mut self, memory: &kv_host::Memory) -> Result<(), NixlError> {
        self.adopt_memory(Memory::whole(memory))
    }

    pub(crate) fn adopt_memory(&mut self, memory: Memory) -> Result<(), NixlError> {
        self.frozen.check_memory()?;
        self.memories.push(memory);
        Ok(())
    }

    /// The route to a connected peer; `None` if the peer is not connected.
    pub fn route(&self, peer: PeerId) -> Option<Route> {
        Some(self.remotes.get(self.peers.get(&peer)?)?.route)
    }

    /// The counts since the transport was made.
    pub fn stats(&self) -> NixlStats {
        let unquiet = self.transfers.values().filter(|transfer| transfer.stopped.is_some()).count();
        NixlStats { unquiet, ..self.stats }
    }

    /// The places of this transport's regions.
    pub(crate) fn places(&self) -> Vec<Place> {
        let regions = self.regions.iter().zip(&self.item_lens);
        regions.map(|(memory, item_len)| Place::of(memory, *item_len)).collect()
    }

    /// The agent's metadata. From the first call on, no memory can be added to the transport.
    pub(crate) fn own_agent_metadata(&self) -> Result<Bytes, TransportError> {
        self.frozen.get_or_make(|| Ok(self.engine.metadata()?.into()))
    }
}

impl fmt::Debug for NixlTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlTransport")
            .field("name", &self.name)
            .field("backend", &self.config.backend)
            .field("regions", &self.regions.len())
            .field("peers", &self.peers.len())
            .field("posts", &self.transfers.len())
            .field("requests", &self.requests.len())
            .finish_non_exhaustive()
    }
}
