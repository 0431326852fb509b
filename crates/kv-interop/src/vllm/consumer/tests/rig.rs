//! A receiver without I/O, and a vLLM engine that answers by script.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::layout::{Axes, Axis, Geometry, HND_PACKED, Holds, Layout, RegionRole};
use kv_core::machine::{Output, SessionResource};
use kv_core::proto::Resource;
use kv_core::{
    Descriptor, EngineId, KvArgs, KvPoll, PageList, PagePool, Parallel, PeerId, Post, PostId, Region,
    RemoteRequest, RequestId, Room, SessionId, SessionOptions, Time, TransferError, TransferMode,
    TransportError, WayEnd,
};

use super::super::super::config::{SideChannelAddr, VllmConfig};
use super::super::super::context::Context;
use super::super::super::geometry::own_metadata;
use super::super::super::hash::Compatibility;
use super::super::super::metadata::{NixlAgentMetadata, NixlHandshakePayload, asked, clock};
use super::super::Consumer;
use crate::message::{AgentRegion, Message, Way};

pub(super) const SECOND: Duration = Duration::from_secs(1);
/// Bytes of one key or value of one token in one head.
pub(super) const ATOM: u64 = 16;
pub(super) const PAGES: u32 = 40;
pub(super) const HASH: &str = "a hash";

/// A model of 4 heads and two layers on ranks of any size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) tp_size: u32,
    pub(super) tp_rank: u32,
    pub(super) page_size: u32,
    pub(super) page_major: bool,
    pub(super) latent: bool,
    pub(super) total_heads: u32,
    pub(super) axes: Axes,
}

pub(super) const ONE: Shape = Shape {
    tp_size: 1,
    tp_rank: 0,
    page_size: 16,
    page_major: false,
    latent: false,
    total_heads: 4,
    axes: HND_PACKED,
};

impl Shape {
    pub(super) fn tp(self, tp_size: u32, tp_rank: u32) -> Shape {
        Shape { tp_size, tp_rank, ..self }
    }

    pub(super) fn args(self, engine: &str, mode: TransferMode) -> KvArgs {
        let heads = if self.latent { 1 } else { (self.total_heads / self.tp_size).max(1) };
        let parts = if self.latent { 1 } else { 2 };
        let len = u64::from(heads * self.page_size * parts) * ATOM;
        let parallel =
            Parallel::default().with(|group| (group.tp_size, group.tp_rank) = (self.tp_size, self.tp_rank));
        let layout = Layout::default().with(|layout| {
            layout.axes = self.axes;
            layout.total_kv_heads = if self.latent { 1 } else { self.total_heads };
        });
        let holds = if self.latent { Holds::Latent } else { Holds::KeyValue };
        let kv =
            |addr, item: u64| Region::dram(RegionRole::Kv, addr, u64::from(PAGES) * item, item).holds(holds);
        let builder = KvArgs::builder(engine, self.tp_rank).pages(PAGES, self.page_size).heads(heads, 8);
        let builder = builder.dtype("bf16").parallel(parallel).layout(layout).transfer_mode(mode).max_sge(64);
        let builder = if self.page_major {
            builder.region(kv(0x10_0000, 2 * len).layers(0..2))
        } else {
            builder.region(kv(0x10_0000, len).layer(0)).region(kv(0x80_0000, len).layer(1))
        };
        builder.build().unwrap()
    }
}

/// The bytes that key or value of a token have in every cache of the model.
fn truth(layer: u32, head: u32, token: u32, part: u32) -> [u8; ATOM as usize] {
    let mut bytes = [0; ATOM as usize];
    bytes[..4].copy_from_slice(&[layer as u8 + 1, head as u8, token as u8, part as u8]);
    bytes
}

/// Every place of a request's bytes on a rank: region, offset, and the bytes that belong there.
fn places(geometry: &Geometry, pages: &[u32], first_token: u32) -> Vec<(usize, u64, [u8; ATOM as usize])> {
    let mut all = Vec::new();
    let latent = geometry.regions[0].holds == Holds::Latent;
    let replicas = geometry.parallel.tp_size;
    let first_head =
        if latent { 0 } else { geometry.parallel.tp_rank * geometry.total_kv_heads() / replicas };
    let (heads, parts) = if latent { (1, 1) } else { (geometry.kv_heads, 2) };
    for (number, region) in geometry.regions.iter().enumerate() {
        let extents = |axis: Axis| match axis {
            Axis::Layer => region.layers,
            Axis::Part => parts,
            Axis::Token => geometry.page_size,
            Axis::Head => heads,
            Axis::Dim => 1,
        };
        for (position, page) in pages.iter().enumerate() {
            for inside in 0..region.item_len / ATOM {
                let (mut rest, mut at) = (inside as u32, BTreeMap::new());
                for axis in geometry.layout.axes.order().into_iter().rev() {
                    at.insert(axis, rest % extents(axis));
                    rest /= extents(axis);
                }
                let token = first_token + position as u32 * geometry.page_size + at[&Axis::Token];
                let layer = region.layer.unwrap() + at[&Axis::Layer];
                let bytes = truth(layer, first_head + at[&Axis::Head], token, at[&Axis::Part]);
                all.push((number, u64::from(*page) * region.item_len + inside * ATOM, bytes));
            }
        }
    }
    all
}

/// A vLLM engine as its side channel and its agents show it.
pub(super) struct Engine {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) hash: String,
    pub(super) life: u32,
    pub(super) change: fn(&mut NixlAgentMetadata),
    /// What the engine's clock shows.
    pub(super) clock: Duration,
}

impl Engine {
    pub(super) fn new(shape: Shape) -> Engine {
        let (name, hash) = ("p-0".to_owned(), HASH.to_owned());
        Engine { name, shape, hash, life: 1, change: |_| (), clock: Duration::from_secs(1000) }
    }

    pub(super) fn agent(&self, pp: u32, tp: u32) -> Bytes {
        format!("agent {} {pp} {tp} life {}", self.name, self.life).into()
    }

    fn answer(&self, question: &Bytes) -> Vec<Bytes> {
        let (pp, tp) = asked(question).expect("a question for metadata");
        let args = self.shape.tp(self.shape.tp_size, tp).args(&self.name, TransferMode::Pull);
        let mut metadata = own_metadata(&args, self.agent(pp, tp), "FLASH_ATTN").unwrap();
        (self.change)(&mut metadata);
        let agent_metadata_bytes = metadata.encode();
        let payload = NixlHandshakePayload { compatibility_hash: self.hash.clone(), agent_metadata_bytes };
        vec![payload.encode(), clock(self.clock)]
    }
}

/// A receiver, what it has said, and the memory on both sides.
pub(super) struct Rig {
    pub(super) cx: Context,
    pub(super) consumer: Consumer,
    pub(super) args: KvArgs,
    pub(super) ways: BTreeMap<PeerId, Way>,
    /// Messages and notifications, in order.
    pub(super) sent: Vec<(PeerId, Bytes)>,
    pub(super) posts: Vec<(PeerId, Post)>,
    pub(super) cancelled: BTreeSet<PostId>,
    pub(super) closed: BTreeSet<PeerId>,
    pub(super) told: BTreeMap<SessionId, Vec<KvPoll>>,
    pub(super) failures: BTreeMap<SessionId, TransferError>,
    pub(super) back: BTreeMap<SessionId, usize>,
    memory: Vec<Vec<u8>>,
    pool: PagePool,
}

impl Rig {
    pub(super) fn new(shape: Shape, mode: TransferMode) -> Rig {
        Rig::with(shape, mode, |_| ())
    }

    pub(super) fn with(shape: Shape, mode: TransferMode, change: impl FnOnce(&mut VllmConfig)) -> Rig {
        let args = shape.args("d-0", mode);
        let config = VllmConfig::default().with(|config| {
            config.compatibility = Compatibility::Hash(HASH.to_owned());
            config.side_channel = Some(SideChannelAddr { host: "10.0.0.9".to_owned(), port: 5601 });
            config.seed = Some(7);
            change(config);
        });
        let memory = args.regions().iter().map(|region| vec![0; region.len as usize]).collect();
        Rig {
            cx: Context { now: Time::ZERO + 1000 * SECOND, ..Context::default() },
            consumer: Consumer::new(&args, &config).unwrap(),
            args,
            ways: BTreeMap::new(),
            sent: Vec::new(),
            posts: Vec::new(),
            cancelled: BTreeSet::new(),
            closed: BTreeSet::new(),
            told: BTreeMap::new(),
            failures: BTreeMap::new(),
            back: BTreeMap::new(),
            memory,
            pool: PagePool::new(PAGES),
        }
    }

    /// Takes all outputs.
    pub(super) fn drain(&mut self) {
        while let Some(out) = self.cx.effects.poll() {
            match out {
                Output::Connect { peer, transport } => {
                    self.ways.insert(peer, Way::of(&transport).unwrap());
                }
                Output::Disconnect { peer } => assert!(self.closed.insert(peer), "closed twice"),
                Output::Send { peer, frame } => {
                    assert!(!self.closed.contains(&peer), "a frame to a peer that was disconnected");
                    self.sent.push((peer, frame));
                }
                Output::Post { peer, post } => {
                    assert!(!self.closed.contains(&peer), "a post to a peer that was disconnected");
                    self.posts.push((peer, post));
                }
                Output::Cancel { post } => {
                    self.cancelled.insert(post);
                }
                Output::Status { session, poll, failure } => {
                    let told = self.told.entry(session).or_default();
                    assert!(!told.last().is_some_and(|last| last.is_terminal()), "ended twice");
                    told.push(poll);
                    if let Some(failure) = failure {
                        self.failures.insert(session, *failure);
                    }
                }
                Output::Release { session, resource } => {
                    assert!(self.poll(session).is_terminal(), "released before the end");
                    let pages = resource.amounts().kind(Resource::PAGES);
                    *self.back.entry(session).or_default() += pages;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    pub(super) fn poll(&self, session: SessionId) -> KvPoll {
        self.told.get(&session).and_then(|told| told.last().copied()).unwrap_or(KvPoll::Bootstrapping)
    }

    /// The name of the cause of a session's failure, and the whole cause as text.
    pub(super) fn cause(&self, session: SessionId) -> String {
        self.failures.get(&session).map(|error| error.cause.to_string()).unwrap_or_default()
    }

    pub(super) fn remote(engine: &Engine, request: &str, blocks: &[u32]) -> RemoteRequest {
        let id = (EngineId::new(&engine.name).unwrap(), RequestId::new(request).unwrap());
        let blocks = PageList::from_pages(blocks.iter().copied()).unwrap();
        RemoteRequest::new(id.0, id.1).with(|remote| {
            remote.block_ids = vec![blocks];
            remote.tp_size = engine.shape.tp_size;
        })
    }

    pub(super) fn open(
        &mut self,
        session: u64,
        remote: RemoteRequest,
        change: impl FnOnce(&mut SessionOptions),
    ) {
        self.open_at(session, "10.0.0.1:5600", remote, change);
    }

    pub(super) fn open_at(
        &mut self,
        session: u64,
        addr: &str,
        remote: RemoteRequest,
        change: impl FnOnce(&mut SessionOptions),
    ) {
        let room = Room::Request(remote.request.clone());
        // The parameters of an engine say the engine's mode.
        let said = Some(self.consumer.mode).filter(|mode| *mode != TransferMode::Auto);
        let remote = remote.with(|remote| remote.mode = remote.mode.or(said));
        let options = SessionOptions::default().with(|options| options.remote = Some(Box::new(remote)));
        let options = options.with(change);
        self.consumer.open(&mut self.cx, SessionId(session), (room, addr.to_owned()), options);
        self.drain();
    }

    /// Gives pages to a session. Different sessions must be given different pages.
    pub(super) fn init(&mut self, session: u64, pages: &[u32]) {
        let pages = self.pool.adopt(PageList::from_pages(pages.iter().copied()).unwrap()).unwrap();
        self.consumer.init(&mut self.cx, SessionId(session), pages, None);
        self.drain();
    }

    pub(super) fn abort(&mut self, session: u64) {
        self.consumer.abort(&mut self.cx, SessionId(session));
        self.drain();
    }

    /// Lets the time pass, with a timeout whenever one is due.
    pub(super) fn pass(&mut self, duration: Duration) {
        let end = self.cx.now + duration;
        while let Some(due) = self.consumer.next_timeout().filter(|due| *due <= end) {
            let before = self.cx.now;
            self.cx.now = due.max(self.cx.now);
            self.consumer.timeout(&mut self.cx);
            self.drain();
            let again = self.consumer.next_timeout();
            assert!(again.is_none_or(|again| again > before), "a timer that does not pass");
        }
        self.cx.now = end;
    }

    /// The open peer of a kind, of which there must be one.
    pub(super) fn channel(&self) -> PeerId {
        let open = self
            .ways
            .iter()
            .filter(|(peer, way)| matches!(way, Way::Request { .. }) && !self.closed.contains(peer));
        let open: Vec<PeerId> = open.map(|(peer, _)| *peer).collect();
        assert_eq!(open.len(), 1, "side channels");
        open[0]
    }

    /// The side channel that was opened last.
    pub(super) fn last_channel(&self) -> PeerId {
        *self.ways.iter().rev().find(|(_, way)| matches!(way, Way::Request { .. })).unwrap().0
    }

    /// The agents that are not disconnected, with their metadata.
    pub(super) fn agents(&self) -> BTreeMap<Bytes, PeerId> {
        let agent = |(peer, way): (&PeerId, &Way)| match way {
            Way::Agent { metadata, .. } if !self.closed.contains(peer) => Some((metadata.clone(), *peer)),
            _ => None,
        };
        self.ways.iter().filter_map(agent).collect()
    }

    /// Answers every question until none is left.
    pub(super) fn answer(&mut self, engine: &Engine) {
        loop {
            let question =
                self.sent.iter().position(|(peer, _)| matches!(self.ways[peer], Way::Request { .. }));
            let Some((peer, frame)) = question.map(|at| self.sent.remove(at)) else { return };
            if self.closed.contains(&peer) {
                continue;
            }
            let parts = engine.answer(&Message::decode(&frame).unwrap().0[0]);
            assert!(self.consumer.message(&mut self.cx, peer, &parts));
            self.drain();
        }
    }

    /// The whole handshake.
    pub(super) fn shake(&mut self, engine: &Engine) {
        self.answer(engine);
        for peer in self.agents().into_values() {
            assert!(self.consumer.connected(&mut self.cx, peer));
            self.drain();
        }
    }

    pub(super) fn gone(&mut self, peer: PeerId, end: WayEnd) {
        assert!(self.consumer.peer_gone(&mut self.cx, peer, end));
        self.drain();
    }

    /// Ends all posts in flight. Good ones move the bytes of the engine's ranks.
    pub(super) fn finish_posts(
        &mut self,
        engine: &Engine,
        blocks: &[u32],
        result: Result<(), TransportError>,
    ) {
        while !self.posts.is_empty() {
            let (peer, post) = self.posts.remove(0);
            if result.is_ok() {
                self.carry(engine, blocks, peer, &post);
            }
            self.consumer.posted(&mut self.cx, post.id, result.clone());
            self.drain();
        }
    }

    /// Copies what a read reads from a rank that holds a request in these blocks.
    fn carry(&mut self, engine: &Engine, blocks: &[u32], peer: PeerId, post: &Post) {
        let Way::Agent { metadata, regions } = &self.ways[&peer] else { panic!("a post to a side channel") };
        let tp = (0..engine.shape.tp_size).find(|tp| engine.agent(0, *tp) == metadata).expect("a rank");
        let args = engine.shape.tp(engine.shape.tp_size, tp).args(&engine.name, TransferMode::Pull);
        let mut memory = BTreeMap::new();
        for (region, offset, bytes) in places(args.geometry(), blocks, 0) {
            memory.insert(args.regions()[region].addr + offset, bytes);
        }
        for Descriptor { local_region, remote_region, local_offset, remote_offset, len } in &post.descriptors
        {
            let AgentRegion { addr, len: all, .. } = regions[*remote_region as usize];
            assert!(remote_offset + len <= all, "outside the region of the rank");
            for piece in (0..*len).step_by(ATOM as usize) {
                let bytes = memory.get(&(addr + remote_offset + piece)).expect("a byte of the request");
                let at = (local_offset + piece) as usize;
                self.memory[*local_region as usize][at..at + ATOM as usize].copy_from_slice(bytes);
            }
        }
    }

    /// How many bytes of a request are here, in these pages, and how many should be.
    pub(super) fn right(&self, pages: &[u32], first_token: u32) -> (u64, u64) {
        let (mut right, mut all) = (0, 0);
        for (region, offset, bytes) in places(self.args.geometry(), pages, first_token) {
            let found = &self.memory[region][offset as usize..(offset + ATOM) as usize];
            right += if found == bytes { ATOM } else { 0 };
            all += ATOM;
        }
        (right, all)
    }

    /// The notifications so far, as text, by the metadata of the agent; they are taken.
    pub(super) fn notified(&mut self) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let sent = std::mem::take(&mut self.sent);
        let mut notified = Vec::new();
        for (peer, bytes) in sent {
            match &self.ways[&peer] {
                Way::Agent { metadata, .. } => notified.push((text(metadata), text(&bytes))),
                _ => self.sent.push((peer, bytes)),
            }
        }
        notified
    }

    /// How many pages are held, and after which time they are free.
    pub(super) fn held(&self) -> Vec<(usize, Option<Duration>)> {
        let held = self.consumer.quarantine(self.cx.now);
        held.iter().map(|entry| (entry.pages, entry.ends_within)).collect()
    }
}
