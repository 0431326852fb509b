//! The plane: memory, posts and the [`Plane`] trait. What happens on connections is in `links`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    MemoryKind, Op, Origin, PeerId, Plane, PlaneError, PlaneEvent, PlaneWait, Post, PostId, Region, Time,
    WriteFence,
};
use kv_host::{Arena, Frozen, Host, Mapping, Memory, OsError, ProcessIdentity, check, clock};
use rustix::event::epoll;
use rustix::process::{PTracer, set_ptracer};

use crate::config::LocalConfig;
use crate::error::LocalError;
use crate::link::{Link, LinkId, Lost, Stage};
use crate::links::{self, Pacing, READ_SCRATCH};
use crate::metadata::{self, MAX_ARENAS, Metadata, Place, Token};
use crate::remote::unmap_some;
use crate::transfer::{Progress, Transfer};

/// Bytes of one post that are copied before the next post has its turn.
const QUANTUM: usize = 256 << 10;
/// How long one call of `poll` copies: half of what a call may take.
const COPY_TIME: Duration = Duration::from_micros(500);
/// How long a slice of a write takes, with much to spare. No slice begins this close to the end of the
/// permission.
pub(crate) const SLICE_TIME: Duration = Duration::from_millis(10);
/// Bytes of a new peer's memory made present at once, and for how long one call of `poll` does so.
const POPULATE: usize = 256 << 10;
const POPULATE_TIME: Duration = Duration::from_micros(200);

/// The embedded plane: one worker's end of it. See the crate's header.
#[derive(Debug)]
pub struct LocalPlane {
    pub(crate) config: LocalConfig,
    pub(crate) host: Host,
    pub(crate) token: Token,
    process: ProcessIdentity,
    pub(crate) socket_name: String,
    pub(crate) listener: OwnedFd,
    pub(crate) epoll: OwnedFd,
    pub(crate) arenas: Vec<Arena>,
    adopted: Vec<Memory>,
    regions: Vec<Memory>,
    places: Vec<Place>,
    /// Our metadata, once anybody has asked for it.
    pub(crate) frozen: Frozen,

    pub(crate) peers: HashMap<PeerId, LinkId>,
    pub(crate) links: HashMap<LinkId, Link>,
    pub(crate) next_link: LinkId,
    /// Links that have ended before their peers were proven to copy nothing more.
    pub(crate) lost: HashMap<LinkId, Lost>,
    /// Peers whose way was lost a moment ago, and until when their death is awaited.
    pub(crate) dying: BTreeMap<PeerId, Time>,
    /// Revocations to be answered, and the links on which slices are under way.
    pub(crate) revoking: BTreeMap<PeerId, BTreeSet<LinkId>>,
    /// When to look at those links again, and how long after that.
    pub(crate) look_at: Time,
    pub(crate) look_again: Duration,
    /// Accepted, and have not said who they are.
    pub(crate) strangers: BTreeSet<LinkId>,
    /// Accepted, and no peer of ours yet.
    pub(crate) unclaimed: BTreeSet<LinkId>,
    /// To be connected once the peer's backlog has room.
    pub(crate) dialing: BTreeSet<LinkId>,
    /// May have whole messages in their buffers.
    pub(crate) backlog: VecDeque<LinkId>,
    pub(crate) pacing: Pacing,
    pub(crate) populating: VecDeque<LinkId>,
    pub(crate) retired: Vec<Mapping>,

    pub(crate) dial_at: Time,
    pub(crate) sweep_at: Time,
    pub(crate) listen_at: Option<Time>,
    pub(crate) now: Time,
    /// Rotates who is read first.
    pub(crate) turn: usize,
    pub(crate) scratch: Box<[u8]>,

    pub(crate) transfers: HashMap<PostId, Transfer>,
    /// Posts with bytes to copy, next one first. Ids of ended posts are skipped.
    pub(crate) run: VecDeque<PostId>,
    pub(crate) events: Vec<PlaneEvent>,
    pub(crate) stats: LocalStats,
}

/// Counts since the plane was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LocalStats {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused: of another user, above a limit, too slow, or with a wrong hello.
    pub refused: u64,
    /// Connections dropped because the other side broke the framing.
    pub broken: u64,
    /// Posts whose bytes, and whose notify frame, went out.
    pub posts_completed: u64,
}

impl LocalPlane {
    /// A plane that listens under a random name in the abstract socket namespace.
    pub fn new(config: LocalConfig) -> Result<LocalPlane, LocalError> {
        let name = metadata::random_socket_name()?;
        LocalPlane::with_socket_name(config, name)
    }

    pub(crate) fn with_socket_name(
        config: LocalConfig,
        socket_name: String,
    ) -> Result<LocalPlane, LocalError> {
        config.check()?;
        let host = Host::here()?;
        let token = Token::random()?;
        let process = ProcessIdentity::here()?;
        let listener = links::listen(&socket_name)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OsError::new("epoll_create", error))?;
        let mut plane = LocalPlane {
            config,
            host,
            token,
            process,
            socket_name,
            listener,
            epoll,
            arenas: Vec::new(),
            adopted: Vec::new(),
            regions: Vec::new(),
            places: Vec::new(),
            frozen: Frozen::default(),
            peers: HashMap::new(),
            links: HashMap::new(),
            next_link: 0,
            lost: HashMap::new(),
            dying: BTreeMap::new(),
            revoking: BTreeMap::new(),
            look_at: Time::ZERO,
            look_again: Duration::ZERO,
            strangers: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            dialing: BTreeSet::new(),
            backlog: VecDeque::new(),
            pacing: Pacing::default(),
            populating: VecDeque::new(),
            retired: Vec::new(),
            dial_at: Time::ZERO,
            sweep_at: Time::MAX,
            listen_at: None,
            now: Time::ZERO,
            turn: 0,
            scratch: vec![0; READ_SCRATCH].into(),
            transfers: HashMap::new(),
            run: VecDeque::new(),
            events: Vec::new(),
            stats: LocalStats::default(),
        };
        plane.watch_listener().map_err(|error| OsError::new("epoll_ctl", error))?;
        Ok(plane)
    }

    /// Gives an arena to the plane: regions inside it can be registered, and peers may map it.
    pub fn add_arena(&mut self, arena: &Arena) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        if self.arenas.len() >= MAX_ARENAS {
            return Err(LocalError::Arenas { got: self.arenas.len() + 1, max: MAX_ARENAS });
        }
        self.arenas.push(arena.clone());
        Ok(())
    }

    /// What has happened so far.
    pub fn stats(&self) -> LocalStats {
        self.stats
    }

    pub(crate) fn adopt_memory(&mut self, memory: Memory) -> Result<(), LocalError> {
        self.frozen.check_memory()?;
        if self.config.permit_tracing {
            // Fails where there is no Yama, and then it is not needed.
            let _ = set_ptracer(PTracer::Any);
        }
        self.adopted.push(memory);
        Ok(())
    }

    /// Our metadata. From the first call on, our memory does not change any more.
    pub(crate) fn own_metadata(&self) -> Result<Bytes, PlaneError> {
        self.frozen.get_or_make(|| self.describe())
    }

    fn describe(&self) -> Result<Bytes, PlaneError> {
        Metadata {
            host: self.host,
            token: self.token,
            process: self.process,
            socket: self.socket_name.clone(),
            arenas: self.arenas.iter().map(|arena| arena.file().len()).collect(),
            regions: self.places.clone(),
        }
        .encode()
    }

    /// Where a range lies in the memory that we were given.
    fn locate(&self, addr: u64, len: u64) -> Option<(Memory, Place)> {
        let within = |memory: &Memory| memory.at(addr, len);
        for (index, arena) in self.arenas.iter().enumerate() {
            if let Some(part) = within(arena.memory()) {
                let start = addr - arena.addr();
                return Some((part, Place { arena: u32::try_from(index).ok(), start, len }));
            }
        }
        let part = self.adopted.iter().find_map(within)?;
        Some((part, Place { arena: None, start: addr, len }))
    }

    /// Copies for a while, one quantum of each post after the other.
    fn copy_some(&mut self) {
        if self.run.is_empty() {
            return;
        }
        let start = Instant::now();
        while let Some(id) = self.run.pop_front() {
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            let Some(link) = self.links.get_mut(&transfer.link) else {
                continue;
            };
            let (Some((memory, right)), Some(process)) = (&link.memory, &link.process) else {
                continue;
            };
            let slice = if transfer.op() == Op::Read {
                transfer.step(&self.regions, memory, process, QUANTUM)
            } else if !right.mark() {
                Err(PlaneError::Revoked)
            } else {
                // The clock is read inside of the mark: whoever finds the right unmarked after the
                // permission has ended knows that no slice begins any more.
                let permitted = clock::now() + SLICE_TIME < link.permitted;
                let slice = permitted.then(|| transfer.step(&self.regions, memory, process, QUANTUM));
                right.clear();
                let Some(slice) = slice else {
                    link.held.insert(id);
                    continue;
                };
                slice
            };
            if slice.is_ok() {
                right.count();
            }
            match slice {
                Ok(Progress::More) => self.run.push_back(id),
                Ok(Progress::Complete) => self.bytes_in_place(id),
                Err(error) => self.end(id, Err(error)),
            }
            if start.elapsed() >= COPY_TIME {
                break;
            }
        }
    }

    /// All bytes of a post are copied: tells the peer, once there is room to.
    fn bytes_in_place(&mut self, id: PostId) {
        // The kernel orders the copies before the frame for whoever reads the socket; this orders
        // them before the event for other threads of ours.
        fence(Ordering::SeqCst);
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let link_id = transfer.link;
        match (transfer.notify.take(), self.links.get_mut(&link_id)) {
            (Some(notify), Some(link)) => {
                link.parked.push(id, notify);
                self.flush(link_id);
            }
            (None, _) => self.end(id, Ok(())),
            (Some(_), None) => {}
        }
    }

    /// Ends a post with its event.
    pub(crate) fn end(&mut self, post: PostId, result: Result<(), PlaneError>) {
        if self.transfers.remove(&post).is_some() {
            self.stats.posts_completed += u64::from(result.is_ok());
            self.events.push(PlaneEvent::Posted { post, result });
        }
    }

    /// Makes memory of new peers present, so that copies to it need not wait for page faults.
    fn populate_some(&mut self) {
        if self.populating.is_empty() {
            return;
        }
        let start = Instant::now();
        while let Some(id) = self.populating.pop_front() {
            let memory = self.links.get_mut(&id).and_then(|link| link.memory.as_mut());
            if memory.is_some_and(|(memory, _)| memory.populate_some(POPULATE)) {
                self.populating.push_back(id);
            }
            if start.elapsed() >= POPULATE_TIME {
                return;
            }
        }
    }

    fn link_of(&mut self, peer: PeerId) -> Result<&mut Link, PlaneError> {
        let id = self.peers.get(&peer).ok_or(PlaneError::PeerGone)?;
        self.links.get_mut(id).ok_or(PlaneError::PeerGone)
    }
}

impl Plane for LocalPlane {
    fn name(&self) -> &'static str {
        "local"
    }

    fn register(&mut self, region: &Region) -> Result<(), PlaneError> {
        let number = self.frozen.next_region(self.places.len())?;
        let found = match region.memory {
            MemoryKind::Dram => self.locate(region.addr, region.len),
            MemoryKind::Vram | MemoryKind::File => None,
        };
        let (memory, place) =
            found.ok_or(PlaneError::UnknownMemory { region: number, addr: region.addr, len: region.len })?;
        self.regions.push(memory);
        self.places.push(place);
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, PlaneError> {
        self.own_metadata()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), PlaneError> {
        self.open_link(peer, metadata)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let link = self.links.get(&from.0);
        link.and_then(|link| link.identity.as_ref()).is_some_and(|identity| identity.bytes == metadata)
    }

    fn disconnect(&mut self, peer: PeerId) {
        match self.peers.get(&peer) {
            Some(id) => self.forget(*id),
            None => self.forget_lost(peer),
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), PlaneError> {
        check::frame("frame.len", frame.len())?;
        let id = *self.peers.get(&peer).ok_or(PlaneError::PeerGone)?;
        let link = self.link_of(peer)?;
        // Notify frames that wait for room go first.
        if !link.parked.is_empty() || !link.connection.queue_frame(frame) {
            return Err(PlaneError::WouldBlock);
        }
        self.flush(id);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), PlaneError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let link_id = *self.peers.get(&peer).ok_or(PlaneError::PeerGone)?;
        let link = self.links.get_mut(&link_id).ok_or(PlaneError::PeerGone)?;
        let identity = link.identity.as_ref().ok_or(PlaneError::PeerGone)?;
        let ours = |region: u32| self.regions.get(region as usize).map(|memory| memory.len() as u64);
        let theirs = &identity.metadata.regions;
        check::descriptors(&post.descs, ours, |region| theirs.get(region as usize).map(|place| place.len))?;
        if self.transfers.len() + self.events.len() >= self.config.max_posts {
            return Err(PlaneError::WouldBlock);
        }
        if self.transfers.contains_key(&post.id) {
            return Err(PlaneError::Unsupported("a second post under the id of a running one"));
        }
        let id = post.id;
        if link.memory.is_some() {
            self.run.push_back(id);
        } else {
            link.waiting.push(id);
        }
        self.transfers.insert(id, Transfer::new(link_id, post));
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        if let Some(transfer) = self.transfers.get(&post)
            && let Some(link) = self.links.get_mut(&transfer.link)
        {
            link.held.remove(&post);
            link.waiting.retain(|id| *id != post);
            link.parked.cancel(post);
        }
        // Every copy is made by this thread, inside `poll`: between slices the memory is quiet.
        self.end(post, Err(PlaneError::Cancelled));
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        if let Ok(link) = self.link_of(peer) {
            link.permitted = until;
            let held = mem::take(&mut link.held);
            self.run.extend(held);
        }
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let is_lost = self.lost.values().any(|lost| lost.peer == Some(peer));
        if is_lost || self.peers.contains_key(&peer) { WriteFence::Revocable } else { WriteFence::AtDeath }
    }

    fn revoke(&mut self, peer: PeerId) {
        self.revoke_links(peer);
    }

    fn poll(&mut self, now: Time, events: &mut Vec<PlaneEvent>) {
        self.now = now;
        self.keep_pace();
        self.serve_sockets();
        self.pacing.end_reading();
        self.serve_timers();
        self.serve_revocations();
        self.copy_some();
        self.populate_some();
        unmap_some(&mut self.retired);
        events.append(&mut self.events);
        self.pacing.hand_over();
    }

    fn wait(&self) -> PlaneWait {
        self.pacing.handled();
        let busy = !self.run.is_empty()
            || !self.events.is_empty()
            || !self.backlog.is_empty()
            || !self.populating.is_empty()
            || !self.retired.is_empty();
        if busy {
            return PlaneWait::Now;
        }
        let watch = vec![self.epoll.as_fd().as_raw_fd()];
        let timer = self.next_timer().map(|at| at.since(self.now));
        match timer.into_iter().chain(self.pacing.next()).min() {
            None => PlaneWait::Readable(watch),
            Some(after) => PlaneWait::ReadableOrAfter(watch, after),
        }
    }
}

impl Drop for LocalPlane {
    /// Tells the peers that no byte will be copied any more. Waits a moment for those whose sockets
    /// are full.
    fn drop(&mut self) {
        let links: Vec<LinkId> = self.links.keys().copied().collect();
        for id in links {
            self.forget(id);
        }
        let deadline = Instant::now() + links::FAREWELL;
        while self.links.values().any(|link| link.stage == Stage::Closing) && Instant::now() < deadline {
            self.wait_for_closing();
        }
    }
}
