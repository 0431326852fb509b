//! The plane: memory, peers and the [`Plane`] trait. What moves bytes is in `requests`, what moves
//! frames in `traffic`.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Directions, MAX_FRAME, MAX_REGIONS, MemoryKind, Op, Origin, PeerId, Plane, PlaneError, PlaneEvent,
    PlaneWait, Post, PostId, Region, Time, WriteFence,
};
use rustix::event::epoll;

use crate::config::NixlConfig;
use crate::discovery::Nixl;
use crate::doorbell::Doorbell;
use crate::engine::{CallError, Engine};
use crate::error::NixlError;
use crate::ffi::Memory;
use crate::host::{Life, Process};
use crate::inbox::Inbox;
use crate::metadata::{Metadata, Place, agent_name};
use crate::origins::Origins;
use crate::pace::Pace;
use crate::permission::Permission;
use crate::pool::HostPool;
use crate::prepared::Grid;
use crate::random::random;
use crate::remote::{Arrivals, Remote, RemoteId, Speech, Stage};
use crate::requests::{Line, Request};
use crate::storage;
use crate::traffic::RINGING;
use crate::transfer::{self, Batch, Transfer};
use crate::transport::{NO_READS, Reach, Transport};

/// How long a dropped plane waits for requests on their way.
const FAREWELL: Duration = Duration::from_secs(2);

/// The NIXL plane: one worker's end of it. See the crate's header.
pub struct NixlPlane {
    nixl: Nixl,
    pub(crate) config: NixlConfig,
    /// Requests on their way; before the agent and the memory, because it is dropped first.
    pub(crate) requests: Vec<Request>,
    pub(crate) engine: Engine,
    pub(crate) token: u64,
    process: Process,
    reach: Reach,
    memories: Vec<Memory>,
    pub(crate) regions: Vec<Memory>,
    /// Bytes of an item of each.
    item_lens: Vec<u64>,
    /// Our items, once NIXL has prepared a list of them.
    pub(crate) lists: Option<Grid>,
    /// Our agent's metadata, once anybody has asked for it.
    frozen: OnceCell<Bytes>,

    pub(crate) peers: HashMap<PeerId, RemoteId>,
    pub(crate) names: HashMap<String, RemoteId>,
    pub(crate) remotes: BTreeMap<RemoteId, Remote>,
    /// What peers allow to write.
    pub(crate) permissions: HashMap<PeerId, Permission>,
    pub(crate) origins: Origins,
    /// Readable when a peer on this host has died, or has rung.
    pub(crate) wakes: OwnedFd,
    pub(crate) doorbell: Option<Doorbell>,

    pub(crate) transfers: HashMap<PostId, Transfer>,
    /// Peers with posts that have something to send, next one first.
    pub(crate) line: Line,
    /// Connections that are not open: each ends when its requests have.
    pub(crate) ending: Vec<RemoteId>,
    pub(crate) arrivals: Arrivals,
    /// What foreign agents have sent.
    pub(crate) inbox: Inbox,
    pub(crate) probe_at: Instant,
    pub(crate) events: Vec<PlaneEvent>,
    pub(crate) pace: Pace,
    pub(crate) batch: Batch,
    pub(crate) stats: NixlStats,
}

/// Counts since the plane was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NixlStats {
    /// Requests posted to NIXL.
    pub requests: u64,
    /// Those of them that named prepared items by their numbers.
    pub requests_by_number: u64,
    /// Descriptors in them.
    pub descriptors: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Posts that ended well.
    pub posts_completed: u64,
    /// Notifications that were not for this plane, or not of this version.
    pub strangers: u64,
    /// Raw notifications of foreign agents for which there was no room, or that were too long.
    pub foreign_dropped: u64,
    /// Longest call of `poll`.
    pub longest_poll: Duration,
    /// Posts that are to end for their owner's wish, their peer's death or a lost connection, and whose
    /// memory is not quiet yet.
    pub unquiet: usize,
}

impl NixlPlane {
    /// A plane with an agent of a random name.
    pub fn new(nixl: &Nixl, config: NixlConfig) -> Result<NixlPlane, NixlError> {
        config.check()?;
        let token = random().map_err(|kind| NixlError::Os { call: "getrandom", kind })?;
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| NixlError::Os { call: "epoll_create", kind: error.kind() })?;
        // Without one, peers' frames are seen a little later.
        let doorbell = Doorbell::new(token).ok().filter(|doorbell| {
            let data = epoll::EventData::new_u64(RINGING);
            epoll::add(&wakes, doorbell, data, epoll::EventFlags::IN).is_ok()
        });
        let engine = Engine::new(nixl, &agent_name(token), &config)?;
        Ok(NixlPlane {
            nixl: nixl.clone(),
            engine,
            token,
            process: Process::ours(),
            reach: Reach::here(&config),
            memories: Vec::new(),
            regions: Vec::new(),
            item_lens: Vec::new(),
            lists: None,
            frozen: OnceCell::new(),
            peers: HashMap::new(),
            names: HashMap::new(),
            remotes: BTreeMap::new(),
            permissions: HashMap::new(),
            origins: Origins::default(),
            wakes,
            doorbell,
            transfers: HashMap::new(),
            requests: Vec::new(),
            line: Line::default(),
            ending: Vec::new(),
            arrivals: Arrivals::default(),
            inbox: Inbox::new(config.foreign_bytes),
            probe_at: Instant::now(),
            events: Vec::new(),
            pace: Pace::new(config.idle_poll),
            batch: Batch::default(),
            stats: NixlStats::default(),
            config,
        })
    }

    /// Gives a pool to the plane: regions inside it can be registered.
    pub fn add_pool(&mut self, pool: &HostPool) -> Result<(), NixlError> {
        self.adopt_memory(pool.memory().clone())
    }

    /// Makes ready for files.
    pub(crate) fn start_storage(&mut self) -> Result<(), NixlError> {
        if self.frozen.get().is_some() {
            return Err(NixlError::Frozen);
        }
        if !self.regions.is_empty() {
            return Err(NixlError::File {
                reason: "files are given to a plane before regions are registered",
            });
        }
        self.engine.start_storage(&self.nixl)
    }

    pub(crate) fn adopt_memory(&mut self, memory: Memory) -> Result<(), NixlError> {
        if self.frozen.get().is_some() {
            return Err(NixlError::Frozen);
        }
        self.memories.push(memory);
        Ok(())
    }

    /// The way to a connected peer.
    pub fn transport(&self, peer: PeerId) -> Option<Transport> {
        Some(self.remotes.get(self.peers.get(&peer)?)?.transport)
    }

    /// What has happened so far.
    pub fn stats(&self) -> NixlStats {
        let unquiet = self.transfers.values().filter(|transfer| transfer.stopped.is_some()).count();
        NixlStats { unquiet, ..self.stats }
    }

    /// Starts nothing more, and waits for what is on its way. True if then no memory of this plane is
    /// touched any more by what it started: it can be dropped, and adopted memory be freed.
    pub fn shutdown(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let posts: Vec<PostId> = self.transfers.keys().copied().collect();
        for post in posts {
            self.cancel(post);
        }
        while !self.requests.is_empty() && Instant::now() < deadline {
            let _ = self.engine.receive(|_, _| {});
            self.check_requests();
            self.end_connections(Instant::now());
            std::thread::sleep(self.pace.sleep(true));
        }
        self.requests.is_empty()
    }

    /// Our regions.
    fn places(&self) -> Vec<Place> {
        let regions = self.regions.iter().zip(&self.item_lens);
        regions.map(|(memory, item_len)| memory.place(*item_len)).collect()
    }

    /// Our agent's metadata. From the first call on, our memory does not change any more.
    pub(crate) fn own_agent_metadata(&self) -> Result<Bytes, PlaneError> {
        if let Some(bytes) = self.frozen.get() {
            return Ok(bytes.clone());
        }
        let bytes = self.engine.metadata().map_err(backend)?;
        Ok(self.frozen.get_or_init(|| bytes.into()).clone())
    }

    /// A connection to the agent that is described; the one that is there, if there is one.
    fn open(&mut self, peer: PeerId, metadata: Metadata) -> Result<RemoteId, PlaneError> {
        let ours = metadata.token == self.token;
        if ours && self.regions.iter().all(|region| region.kind() != MemoryKind::File) {
            return Err(PlaneError::Metadata("it is our own, and we have no files"));
        }
        if metadata.backend != self.config.backend {
            return Err(PlaneError::Metadata("the peer uses another backend"));
        }
        let name = agent_name(metadata.token);
        if let Some(id) = self.names.get(&name)
            && let Some(remote) = self.remotes.get_mut(id)
        {
            if let Stage::Broken(_) = remote.stage {
                return Err(PlaneError::PeerGone);
            }
            if remote.is_foreign() {
                return Err(PlaneError::Unsupported("a plane that is connected as a foreign agent"));
            }
            remote.stage = Stage::Open;
            remote.users.push(peer);
            return Ok(*id);
        }
        let id = RemoteId::random()?;
        let life = metadata.process.watch();
        if life.is_over() {
            return Err(PlaneError::PeerGone);
        }
        let loaded = if ours { name.clone() } else { self.engine.load(&metadata.nixl).map_err(backend)? };
        if loaded != name {
            self.engine.forget(&loaded);
            return Err(PlaneError::Metadata("NIXL's part is of another agent"));
        }
        if let Life::Watched(fd) = &life {
            // Without it the death is seen later, by an error.
            let data = epoll::EventData::new_u64(id.0);
            let _ = epoll::add(&self.wakes, fd, data, epoll::EventFlags::IN);
        }
        let near = matches!(life, Life::Watched(_) | Life::Ours);
        let transport = self.reach.to(metadata.reach, near);
        let speech = Speech::ours(metadata.token, near);
        let slice = (self.config.slice_time, self.config.slice_bytes);
        let mut remote = Remote::new(name.clone(), speech, metadata.regions, life, peer, slice);
        remote.transport = if ours { Transport::Storage } else { transport };
        remote.origin = self.origins.of(&name);
        if !ours {
            remote.lists = self.prepare(&name, &remote.regions);
        }
        self.names.insert(name, id);
        self.remotes.insert(id, remote);
        if !ours {
            self.greet(id);
        }
        Ok(id)
    }

    /// Has NIXL prepare the list of a peer's items, and ours before the first one. Without lists,
    /// requests are made of addresses.
    pub(crate) fn prepare(&mut self, name: &str, regions: &[Place]) -> Option<Grid> {
        let most = self.config.prepared_items;
        if self.lists.is_none() {
            let places = self.places();
            let grid = Grid::new(&places, most)?;
            self.engine.prepare(None, grid.kind, grid.items(&places)).ok()?;
            self.lists = Some(grid);
        }
        let grid = Grid::new(regions, most)?;
        self.engine.prepare(Some(name), grid.kind, grid.items(regions)).ok()?;
        Some(grid)
    }

    fn open_remote(&self, peer: PeerId) -> Result<(RemoteId, &Remote), PlaneError> {
        let id = *self.peers.get(&peer).ok_or(PlaneError::PeerGone)?;
        let remote = self.remotes.get(&id).filter(|remote| remote.is_open());
        Ok((id, remote.ok_or(PlaneError::PeerGone)?))
    }
}

impl Plane for NixlPlane {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn register(&mut self, region: &Region) -> Result<(), PlaneError> {
        if self.frozen.get().is_some() {
            return Err(PlaneError::Unsupported("a region after peers were told of the others"));
        }
        if self.regions.len() >= MAX_REGIONS {
            let got = self.regions.len() + 1;
            return Err(PlaneError::Size { field: "regions.len", got, min: 0, max: MAX_REGIONS });
        }
        let part = |memory: &Memory| memory.part(region.memory, region.device, region.addr, region.len);
        let memory = self.memories.iter().find_map(part).ok_or(PlaneError::UnknownMemory {
            region: self.regions.len() as u32,
            addr: region.addr,
            len: region.len,
        })?;
        self.engine.register(&memory).map_err(backend)?;
        self.regions.push(memory);
        self.item_lens.push(region.item_len);
        Ok(())
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        let known = peer.and_then(|peer| self.transport(peer));
        known.unwrap_or_else(|| self.reach.to_anybody()).directions()
    }

    fn metadata(&self) -> Result<Bytes, PlaneError> {
        let (nixl, process) = (self.own_agent_metadata()?, self.process.clone());
        Metadata::new(self.token, &self.config.backend, process, self.reach, self.places(), nixl).encode()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), PlaneError> {
        // What we registered is part of what the peer may need; it cannot change from now on.
        self.own_agent_metadata()?;
        let metadata = Metadata::decode(metadata)?;
        if let Some(remote) = self.peers.get(&peer).and_then(|id| self.remotes.get(id)) {
            return if remote.is_open() && remote.name == agent_name(metadata.token) && !remote.is_foreign() {
                Ok(())
            } else {
                Err(PlaneError::Unsupported("another agent under the id of a connected peer"))
            };
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(PlaneError::WouldBlock);
        }
        let id = self.open(peer, metadata)?;
        self.peers.insert(peer, id);
        self.confirm_arrivals_to(id);
        self.pace.stir();
        Ok(())
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let Ok(metadata) = Metadata::decode(metadata) else { return false };
        let name = agent_name(metadata.token);
        let remote = self.names.get(&name).and_then(|id| self.remotes.get(id));
        remote.map(|remote| remote.origin).or_else(|| self.origins.known(&name)) == Some(from)
    }

    fn disconnect(&mut self, peer: PeerId) {
        let Some(id) = self.peers.remove(&peer) else { return };
        self.permissions.remove(&peer);
        let posts: Vec<PostId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == peer)
            .map(|(post, _)| *post)
            .collect();
        for post in posts {
            self.cancel(post);
        }
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.users.retain(|user| *user != peer);
            if remote.users.is_empty() && remote.is_open() {
                remote.stage = Stage::Left;
                self.ending.push(id);
            }
        }
        self.pace.stir();
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), PlaneError> {
        check_frame("frame.len", &frame)?;
        let (id, remote) = self.open_remote(peer)?;
        // Notify frames that wait for room go first.
        if !remote.parked.is_empty() || !remote.has_room(frame.len(), self.config.outbound_bytes) {
            return Err(PlaneError::WouldBlock);
        }
        self.pace.stir();
        if self.transmit(id, frame) { Ok(()) } else { Err(PlaneError::PeerGone) }
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), PlaneError> {
        if let Some(notify) = &post.notify {
            check_frame("notify.len", notify)?;
        }
        let (id, remote) = self.open_remote(peer)?;
        transfer::check(&post.descs, &self.regions, &remote.regions)?;
        storage::check(remote.transport == Transport::Storage, &post, &self.regions, &remote.regions)?;
        if post.op == Op::Read && remote.transport == Transport::Tcp && !self.config.reads_over_tcp {
            return Err(PlaneError::Unsupported(NO_READS));
        }
        if self.transfers.len() + self.events.len() >= self.config.max_posts {
            return Err(PlaneError::WouldBlock);
        }
        if self.transfers.contains_key(&post.id) {
            return Err(PlaneError::Unsupported("a second post under the id of a running one"));
        }
        let number = post.id;
        let transfer = Transfer::new(id, peer, post);
        self.transfers.insert(number, transfer);
        self.enqueue(id, number);
        self.pace.stir();
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get_mut(&post) else { return };
        // What is on its way cannot be stopped: the post ends when that has ended.
        transfer.stop(PlaneError::Cancelled);
        if transfer.in_flight == 0 {
            if let Some(remote) = self.remotes.get_mut(&transfer.remote) {
                remote.parked.retain(|parked| *parked != post);
                remote.held.retain(|held| *held != post);
            }
            self.end(post, Err(PlaneError::Cancelled));
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.permitted(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let way = self.transport(peer);
        way.map_or(WriteFence::AtDeath, |way| self.reach.write_fence(way, self.config.rdma_bound))
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<PlaneEvent>) {
        let begun = Instant::now();
        self.take_wakes();
        self.take_notifications();
        self.check_requests();
        self.start_requests();
        self.ring_for_requests(begun);
        self.probe(begun);
        self.end_connections(begun);
        if !self.events.is_empty() {
            self.pace.stir();
        }
        events.append(&mut self.events);
        self.stats.longest_poll = self.stats.longest_poll.max(begun.elapsed());
    }

    fn wait(&self) -> PlaneWait {
        if !self.events.is_empty() || !self.line.is_empty() || !self.inbox.is_empty() {
            return PlaneWait::Now;
        }
        let sleep = self.pace.sleep(!self.requests.is_empty() || !self.ending.is_empty());
        if sleep.is_zero() {
            return PlaneWait::Now;
        }
        PlaneWait::ReadableOrAfter(vec![self.wakes.as_fd().as_raw_fd()], sleep)
    }
}

impl Drop for NixlPlane {
    /// Waits a moment for what is on its way, and tells the peers. What then still is keeps the agent, and the pools that
    /// it may touch, until the process ends.
    fn drop(&mut self) {
        if self.shutdown(FAREWELL) {
            self.say_farewell();
        } else {
            // Each request keeps the agent.
            mem::forget(mem::take(&mut self.requests));
            mem::forget(mem::take(&mut self.memories));
            self.engine.abandon();
        }
    }
}

impl fmt::Debug for NixlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlPlane")
            .field("name", &agent_name(self.token))
            .field("backend", &self.config.backend)
            .field("regions", &self.regions.len())
            .field("peers", &self.peers.len())
            .field("posts", &self.transfers.len())
            .field("requests", &self.requests.len())
            .finish_non_exhaustive()
    }
}

pub(crate) fn backend(error: CallError) -> PlaneError {
    PlaneError::Backend { call: error.call, status: error.status }
}

fn check_frame(field: &'static str, frame: &Bytes) -> Result<(), PlaneError> {
    if frame.len() > MAX_FRAME {
        return Err(PlaneError::Size { field, got: frame.len(), min: 0, max: MAX_FRAME });
    }
    Ok(())
}
