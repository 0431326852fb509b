//! A machine of the encoder cache with its encoder, its consumers and its peers, moved by a script.
//!
//! The peers are those of the protocol machine (`frames.rs`), who greet as workers of the encoder cache and ask
//! for entries. After every input the books of the cache are checked: each block is free, filling, cached or
//! pinned, and none is lost. At the end of a script, when all peers are gone, nothing is pinned or filling.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::NodeConfig;
use kv_core::wire::{Body, ConversationId, Frame};
use kv_core::{
    BootstrapError, ContentHash, Directions, Geometry, Incarnation, KvArgs, LookupId, Origin, PeerId, Post,
    RankRecord, Region, RegionRole, Service, ServiceOffer, SessionId, Time, TransferMode, TransportError,
    TransportOffer, WayEnd, WorkerRole, WriteFence,
};
use kv_ec::{
    Command, EC_SERVICE, EcMachine, EcPoll, EncoderCache, EntryGuard, Eviction, MachineConfig, Reservation,
    Resource, SharedStore, Want,
};

use super::books::{self, Books};
use super::cost::{Moment, Paid};
use super::frames::{self, COMPATIBILITY, Peer};
use super::script::Script;
use super::world::{MAX_INPUTS, US, check_bounds, limits};
use super::{Charge, Outcome, Reach};

/// Blocks of the region: few, so that entries make room.
const BLOCKS: u32 = 16;
pub(super) const BLOCK: u32 = 64;
/// Most answers at once.
const MAX_ANSWERS: usize = 4;

type Out = Output<EcPoll, Resource, kv_ec::EcError>;

/// The arguments of the machine's own worker.
fn us() -> Option<&'static KvArgs> {
    static US: OnceLock<Option<KvArgs>> = OnceLock::new();
    let made = || {
        let len = u64::from(BLOCKS * BLOCK);
        let region = Region::dram(RegionRole::Kv, 1 << 40, len, u64::from(BLOCK)).layer(0);
        KvArgs::builder("us", 0).pages(BLOCKS, 1).max_inflight(6).max_sge(64).region(region).build().ok()
    };
    US.get_or_init(made).as_ref()
}

/// One machine, its surroundings, and the script that moves both.
pub(super) struct Entries<'a> {
    script: Script<'a>,
    /// The length of the whole script, in bytes.
    length: usize,
    machine: EcMachine,
    store: SharedStore,
    geometry: &'static Geometry,
    now: Time,
    peers: [Peer; 4],
    /// The number of the peer that each peer's metadata names.
    known: BTreeMap<PeerId, u8>,
    books: Books,
    opened: u64,
    /// Sessions that have not ended.
    open: BTreeMap<SessionId, EcPoll>,
    reserved: Vec<Reservation>,
    used: Vec<EntryGuard>,
    posts: Vec<Post>,
    connecting: Vec<PeerId>,
    revoking: Vec<PeerId>,
    lookups: Vec<LookupId>,
}

impl<'a> Entries<'a> {
    pub(super) fn new(mut script: Script<'a>) -> Entries<'a> {
        let length = script.0.len();
        let variants = [script.byte(), script.byte(), script.byte(), script.byte()];
        #[allow(clippy::expect_used)]
        let args = us().expect("the worker's arguments are valid");
        let config = NodeConfig::new(args.clone(), US, "test", Bytes::from_static(&[0]));
        let store = SharedStore::new(EncoderCache::new(BLOCKS, BLOCK, Eviction::Lru));
        let machine = MachineConfig::new(COMPATIBILITY).with(|config| config.max_answers = MAX_ANSWERS);
        let mut world = Entries {
            script,
            length,
            machine: EcMachine::new(machine, config.with(|config| config.limits = limits()), store.clone()),
            store,
            geometry: args.geometry(),
            now: Time::from_nanos(1_000_000_000),
            peers: frames::peers(variants, "ec"),
            known: BTreeMap::new(),
            books: Books::default(),
            opened: 0,
            open: BTreeMap::new(),
            reserved: Vec::new(),
            used: Vec::new(),
            posts: Vec::new(),
            connecting: Vec::new(),
            revoking: Vec::new(),
            lookups: Vec::new(),
        };
        for image in 0..3 {
            world.save(image, 1 + image as u32);
        }
        for peer in 0..2 {
            world.greet(peer, &mut Script(&[255; 8]));
            world.way();
        }
        world
    }

    pub(super) fn run(mut self) -> Outcome {
        while !self.script.is_empty() && self.books.inputs() < MAX_INPUTS {
            self.books.step(self.length - self.script.0.len());
            self.next();
        }
        self.finish();
        self.books.into_outcome()
    }

    fn next(&mut self) {
        match self.script.byte() {
            0..=14 => {
                let (image, blocks) = (u64::from(self.script.below(5)), 1 + u32::from(self.script.below(6)));
                self.save(image, blocks);
            }
            15..=29 => self.fetch(),
            30..=34 => {
                let session = SessionId(u64::from(self.script.below(self.opened.min(200) as u8 + 2)));
                self.command("Abort", Command::Abort { session });
            }
            35..=39 => {
                // A consumer needs an entry no longer, or an encoder gives one up.
                drop(self.used.pop());
                if self.script.flag()
                    && let Some(reservation) = self.reserved.pop()
                {
                    self.store.discard(reservation);
                }
            }
            40..=59 => {
                let (peer, mut script) = (usize::from(self.script.below(4)), self.script);
                self.greet(peer, &mut script);
                self.script = script;
            }
            60..=204 => self.say(),
            205..=219 if !self.posts.is_empty() => {
                let at = usize::from(self.script.byte()) % self.posts.len();
                let post = self.posts.remove(at);
                let result = if self.script.rarely() { Err(TransportError::Cancelled) } else { Ok(()) };
                self.input("Posted", 0, Input::Posted { post: post.id, result });
            }
            220..=229 => self.way(),
            230..=234 => self.lookup(),
            235..=237 => {
                let peer = PeerId(u64::from(self.script.below(8)));
                let end = if self.script.flag() { WayEnd::Lost } else { dead() };
                self.input("PeerGone", 0, Input::PeerGone { peer, end });
            }
            238..=249 => {
                if let Some(next) = self.machine.next_timeout() {
                    self.now = self.now.max(next);
                }
                self.input("Timeout", 0, Input::Timeout);
            }
            _ => {
                self.now = self.now + Duration::from_micros(self.script.number() % 20_000_000);
                self.input("Timeout", 0, Input::Timeout);
            }
        }
    }

    /// An encoder saves an entry, or is not done with it.
    fn save(&mut self, image: u64, blocks: u32) {
        let Some(hash) = hash(image) else { return };
        let Ok(reservation) = self.store.reserve(&hash, u64::from(blocks * BLOCK)) else { return };
        if image == 4 {
            self.reserved.push(reservation);
        } else if let Err(reservation) = self.store.commit(reservation) {
            self.store.discard(reservation);
        }
    }

    fn fetch(&mut self) {
        let script = &mut self.script;
        let (image, bytes) = (u64::from(script.below(8)), 1 + script.number() % 2000);
        let (source, mode) = (format!("server-{}:1", script.text(300)), script.below(3));
        let Some(hash) = hash(image) else { return };
        let want = Want::new(hash, bytes, source).with(|want| {
            want.mode =
                [TransferMode::Push, TransferMode::Pull, TransferMode::Auto].get(usize::from(mode)).copied();
            want.budget = script.option(|script| Duration::from_millis(script.number() % 100_000));
        });
        self.opened += 1;
        let session = SessionId(self.opened);
        self.open.insert(session, EcPoll::Waiting);
        self.command("Fetch", Command::Fetch { session, want: Box::new(want) });
    }

    fn command(&mut self, what: &'static str, command: Command) {
        self.input(what, 0, Input::Command(command));
    }

    fn greet(&mut self, peer: usize, script: &mut Script) {
        let number = peer as u64;
        let Some(peer) = self.peers.get_mut(peer) else { return };
        // Another life of it, at times.
        if script.byte() < 12 {
            peer.incarnation += 16;
            peer.conversations.clear();
        }
        let Some(mut hello) = peer.hello(script, US) else { return };
        if peer.variant == 0 {
            hello.geometry = Some(Box::new(self.geometry.clone()));
        }
        let frame = Frame { conversation: ConversationId::NONE, body: Body::Hello(hello) };
        if let Ok(frame) = frame.encode() {
            self.hear("Hello", number, frame);
        }
    }

    fn say(&mut self) {
        let at = usize::from(self.script.below(4));
        let Some(peer) = self.peers.get(at) else { return };
        let strange = self.script.byte();
        let conversation = match strange {
            0..=7 => Some(ConversationId(self.script.number())),
            8..=23 => peer.conversations.first().copied(),
            _ => peer.conversations.last().copied(),
        };
        let body = peer.says(&mut self.script);
        let what = frames::name(&body);
        let frame = Frame { conversation: conversation.unwrap_or(ConversationId::NONE), body };
        let Ok(frame) = frame.encode() else { return };
        let copies = if self.script.byte() < 16 { 1 + self.script.below(40) } else { 1 };
        for _ in 0..copies {
            self.hear(what, at as u64, frames::damaged(self.script, &frame));
        }
    }

    fn hear(&mut self, what: &'static str, from: u64, frame: Bytes) {
        self.input(what, frame.len() as u64, Input::Frame { from: Origin(from), frame });
    }

    fn way(&mut self) {
        if let Some(peer) = self.revoking.pop().filter(|_| self.script.flag()) {
            return self.input("Revoked", 0, Input::Revoked { peer });
        }
        let Some(peer) = self.connecting.pop() else { return };
        let fence = if self.script.flag() { WriteFence::AtDeath } else { WriteFence::Revocable };
        let directions = Directions::BOTH;
        self.input("Connected", 0, Input::Connected { peer, directions, fence });
    }

    /// A bootstrap server answers: one of the peers has the entries.
    fn lookup(&mut self) {
        let Some(lookup) = self.lookups.pop() else { return };
        let Some(peer) = self.peers.get(usize::from(self.script.below(4))) else { return };
        if self.script.rarely() {
            let error = BootstrapError::UnknownRank;
            return self.input("LookupFailed", 0, Input::LookupFailed { lookup, error });
        }
        let service = Service::by_content(EC_SERVICE, COMPATIBILITY);
        let offer = ServiceOffer::kv(self.geometry).map(|offer| offer.of_service(&service));
        let (Ok(offer), Some(worker)) = (offer, peer.worker("")) else { return };
        let who = (worker, Incarnation::from_random(peer.incarnation));
        let transport = TransportOffer::new("test", peer.metadata(0));
        let (role, parallel) = (WorkerRole::Encode, self.geometry.parallel);
        if let Ok(rank) = RankRecord::new(who, role, parallel, vec![transport], vec![offer]) {
            self.input("Found", 2000, Input::Found { lookup, ranks: vec![rank] });
        }
    }

    fn input(&mut self, what: &'static str, bytes: u64, input: Input<Command>) {
        let own = 4 * self.open.len() as u64 + u64::from(BLOCKS);
        let start = Moment::now();
        self.machine.handle(self.now, input);
        let handled = start.cost_since(0);
        let outputs: Vec<Out> = std::iter::from_fn(|| self.machine.poll_output()).collect();
        let said = outputs.iter().map(|output| books::size(output, |_| 0)).sum();
        let gauges = self.machine.gauges();
        // Each output of the inner machine is queued once more.
        let queued = outputs.len() / 2;
        let paid = Paid { bytes, own: own + (gauges.node.sources + gauges.node.draining + queued) as u64 };
        let cost = super::Cost { said, ..handled };
        self.books.note_cost(Charge { what, cost, paid }, outputs.iter().map(kind));
        let node = gauges.node;
        let (sessions, targets) = (node.senders + node.receivers, node.targets);
        let (frame, peers, posts, sources) = (bytes, node.peers, node.posts, node.sources);
        let reach = Reach { frame, own, sessions, sources, targets, peers, posts };
        self.books.reached(reach, &node);
        outputs.into_iter().for_each(|output| self.carry_out(output));
        check_bounds(&node);
        assert!(gauges.answers <= MAX_ANSWERS && gauges.waiting <= self.open.len(), "{gauges:?}");
        let next = self.machine.next_timeout();
        assert!(next.is_none_or(|next| next > self.now), "a timer that is due was not run");
        self.check_books();
    }

    /// Every block is in one state, and none is lost.
    fn check_books(&self) {
        let cache = self.store.gauges();
        let sum = cache.free + cache.filling + cache.cached + cache.pinned + cache.lost;
        assert_eq!((sum, cache.lost, cache.lost_pins), (BLOCKS, 0, 0), "{cache:?}");
    }

    fn carry_out(&mut self, output: Out) {
        match output {
            Output::Connect { peer, transport } => {
                self.known.insert(peer, transport.metadata.get(1).copied().unwrap_or(0));
                self.connecting.push(peer);
            }
            Output::Disconnect { peer } => {
                self.connecting.retain(|connecting| *connecting != peer);
                self.revoking.retain(|revoking| *revoking != peer);
            }
            Output::Send { peer, frame } => {
                let frame = Frame::decode(&frame);
                assert!(frame.is_ok(), "the machine says what nobody can read: {frame:?}");
                let number = self.known.get(&peer).map_or(0, |number| usize::from(*number));
                if let (Ok(frame), Some(peer)) = (frame, self.peers.get_mut(number)) {
                    peer.hears(&frame.body);
                }
            }
            Output::Post { post, .. } => {
                for descriptor in &post.descriptors {
                    let end = descriptor.local_offset.checked_add(descriptor.len);
                    let inside = end.is_some_and(|end| end <= u64::from(BLOCKS * BLOCK));
                    assert!(descriptor.len > 0 && inside, "{descriptor:?}");
                }
                self.posts.push(post);
            }
            Output::Revoke { peer } => self.revoking.push(peer),
            Output::Status { session, poll, failure } => {
                assert_eq!(failure.is_some(), poll == EcPoll::Failed, "{session}");
                let ends = matches!(poll, EcPoll::Failed | EcPoll::Ready);
                let known = if ends { self.open.remove(&session) } else { self.open.insert(session, poll) };
                assert!(known.is_some(), "{session} ends twice, or never was");
            }
            Output::Release { resource, session } => {
                assert!(matches!(resource, Resource::Slot(_)), "{session} was lent nothing else");
                if let Resource::Slot(entry) = resource {
                    self.used.extend(entry);
                }
            }
            Output::Lookup { lookup, .. } => self.lookups.push(lookup),
            Output::Cancel { .. } | Output::Permit { .. } => {}
        }
    }

    /// The worker stops and its peers go: every session ends, and nothing stays pinned or filling.
    fn finish(&mut self) {
        self.command("Shutdown", Command::Shutdown);
        assert!(self.open.is_empty(), "{:?} have not ended at shutdown", self.open);
        for post in std::mem::take(&mut self.posts) {
            self.input("Posted", 0, Input::Posted { post: post.id, result: Ok(()) });
        }
        for peer in self.known.keys().copied().collect::<Vec<_>>() {
            self.input("PeerGone", 0, Input::PeerGone { peer, end: dead() });
        }
        for _ in 0..50 {
            let Some(next) = self.machine.next_timeout() else { break };
            self.now = self.now.max(next);
            self.input("Timeout", 0, Input::Timeout);
            for post in std::mem::take(&mut self.posts) {
                self.input("Posted", 0, Input::Posted { post: post.id, result: Ok(()) });
            }
        }
        self.used.clear();
        std::mem::take(&mut self.reserved)
            .into_iter()
            .for_each(|reservation| self.store.discard(reservation));
        let (cache, gauges) = (self.store.gauges(), self.machine.gauges());
        assert_eq!(
            (cache.pinned, cache.filling, gauges.answers, gauges.transfers),
            (0, 0, 0, 0),
            "{gauges:?}"
        );
    }
}

fn hash(image: u64) -> Option<ContentHash> {
    ContentHash::new(&format!("image-{image}")).ok()
}

fn dead() -> WayEnd {
    WayEnd::Dead { quiet_after: Duration::ZERO }
}

fn kind(output: &Out) -> u32 {
    match output {
        Output::Send { frame, .. } => 100 + u32::from(frame.get(2).copied().unwrap_or(0)),
        Output::Status { poll, failure, .. } => {
            let text = failure.as_ref().map(|failure| format!("{failure:?}")).unwrap_or_default();
            let name = text.bytes().filter(u8::is_ascii_uppercase).take(6);
            (*poll as u32 + 10) ^ name.fold(0, |hash: u32, byte| hash * 31 + u32::from(byte)) << 8
        }
        Output::Release { .. } => 30,
        Output::Post { .. } => 4,
        Output::Connect { .. } | Output::Disconnect { .. } => 1,
        _ => 2,
    }
}
