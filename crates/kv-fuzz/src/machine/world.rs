//! A machine with its scheduler and its peers, moved by a script.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Limits, Node, NodeConfig, NodeGauges, Output};
use kv_core::wire::{Body, ConversationId, Frame};
use kv_core::{
    BootstrapError, Directions, Geometry, Incarnation, KvPoll, LookupId, MAX_FRAME, Origin, PeerId, Post,
    RankRecord, SessionId, Time, TransferMode, TransportError, TransportOffer, WayEnd, WorkerRole,
    WriteFence,
};

use super::books::{self, Books};
use super::caches;
use super::cost::{Moment, Paid};
use super::frames::{self, Peer};
use super::scheduler;
use super::script::Script;
use super::{Charge, Outcome, Reach};

/// The number of inputs of one script, at most.
pub const MAX_INPUTS: u64 = 400;

pub(super) const US: Incarnation = Incarnation::from_random(9);
/// Bounds so small that scripts reach them.
pub(super) fn limits() -> Limits {
    Limits::default().with(|limits| {
        limits.max_peers = 3;
        limits.max_registrations = 8;
        limits.max_waiting_runs = 4096;
        limits.max_failed_rooms = 8;
        limits.max_post_bytes = 1 << 20;
        limits.max_attempts = 64;
        limits.connections_share = 2;
        limits.max_incarnations = 2;
        limits.max_addresses = 8;
        limits.max_ended_leases = 7;
    })
}

/// Bytes of a run of pages in a frame.
const OF_RUN: u64 = 8;

/// One machine, its surroundings, and the script that moves both.
pub(super) struct World<'a> {
    script: Script<'a>,
    /// The length of the whole script, in bytes.
    length: usize,
    node: Node,
    us: &'static Geometry,
    now: Time,
    peers: [Peer; 4],
    /// The peers that the machine knows, with the cache and the peer that their metadata names.
    known: BTreeMap<PeerId, (u8, u8)>,
    books: Books,
    opened: u64,
    /// The number of ranks that serve receiving sessions.
    sources: usize,
    /// The number of attempts of receiving sessions whose end peers have not acknowledged.
    draining: usize,
    /// Runs that they have granted, and that no plan was made of.
    granted: usize,
    posts: Vec<(PeerId, Post)>,
    connecting: Vec<PeerId>,
    lookups: BTreeSet<LookupId>,
    revoking: BTreeSet<PeerId>,
}

impl<'a> World<'a> {
    pub(super) fn new(mut script: Script<'a>) -> World<'a> {
        let length = script.0.len();
        let header = script.byte();
        let mode = [TransferMode::Push, TransferMode::Pull, TransferMode::Auto][usize::from(header % 3)];
        let variants = [script.byte(), script.byte(), script.byte(), script.byte()];
        let peers = frames::peers(variants, "kv");
        #[allow(clippy::expect_used)]
        let args = caches::us().expect("the worker's arguments are valid");
        let us = args.geometry();
        let config = NodeConfig::new(args.clone(), US, "test", Bytes::from_static(&[0]));
        let config = config.with(|config| config.limits = self::limits());
        let mut world = World {
            script,
            length,
            node: Node::new(config),
            us,
            now: Time::from_nanos(1_000_000_000),
            peers,
            known: BTreeMap::new(),
            books: Books::default(),
            opened: 0,
            sources: 0,
            draining: 0,
            granted: 0,
            posts: Vec::new(),
            connecting: Vec::new(),
            lookups: BTreeSet::new(),
            revoking: BTreeSet::new(),
        };
        for peer in 0..usize::from(header / 3 % 4) {
            world.greet(peer, &mut Script(&[255; 8]));
        }
        if mode != TransferMode::Push {
            world.open(true, mode);
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
            0..=14 => self.open(true, self.mode_of(0)),
            15..=24 => self.open(false, self.mode_of(1)),
            25..=74 => self.command(),
            75..=89 => {
                let (peer, mut script) = (usize::from(self.script.below(4)), self.script);
                self.greet(peer, &mut script);
                self.script = script;
            }
            90..=204 => self.say(),
            205..=219 => self.end_post(),
            220..=229 => self.way(),
            230..=237 => self.lookup(),
            238 | 239 => {
                let peer = PeerId(u64::from(self.script.below(8)));
                let script = &mut self.script;
                let end = match script.flag() {
                    true => WayEnd::Lost,
                    false => WayEnd::Dead { quiet_after: Duration::from_millis(script.number() % 100_000) },
                };
                self.input("PeerGone", 0, 0, Input::PeerGone { peer, end });
            }
            240..=249 => {
                if let Some(next) = self.node.next_timeout() {
                    self.now = self.now.max(next);
                }
                self.input("Timeout", 0, 0, Input::Timeout);
            }
            _ => {
                let step = Duration::from_micros(self.script.number() % 20_000_000);
                self.now = self.now + step;
                self.input("Timeout", 0, 0, Input::Timeout);
            }
        }
    }

    fn mode_of(&self, kind: u8) -> TransferMode {
        // Without taking a decision: sessions of both kinds in all modes come up.
        let turn = (self.opened as usize + usize::from(kind)) % 3;
        [TransferMode::Push, TransferMode::Pull, TransferMode::Auto][turn]
    }

    fn open(&mut self, sender: bool, mode: TransferMode) {
        self.opened += 1;
        let session = SessionId(self.opened);
        let (own, command) = scheduler::open(&mut self.script, session, sender, mode);
        self.ask(session, own, 0, command);
    }

    fn command(&mut self) {
        let session = SessionId(u64::from(self.script.below(self.opened.min(200) as u8 + 2)));
        for (own, lent, command) in scheduler::commands(&mut self.script, session) {
            self.ask(session, own, lent, command);
        }
    }

    fn ask(&mut self, session: SessionId, own: u64, lent: u32, command: Command) {
        if self.books.enter(session, own, lent, &command) {
            self.input(books::name(&command), 0, own, Input::Command(command));
        }
    }

    fn greet(&mut self, peer: usize, script: &mut Script) {
        let number = peer as u64;
        let Some(peer) = self.peers.get_mut(peer) else { return };
        // Another life of it, at times.
        if script.byte() < 12 {
            peer.incarnation += 16;
            peer.conversations.clear();
        }
        let Some(hello) = peer.hello(script, US) else { return };
        let Ok(frame) = (Frame { conversation: ConversationId::NONE, body: Body::Hello(hello) }).encode()
        else {
            return;
        };
        self.hear("Hello", number, frame);
    }

    fn say(&mut self) {
        let at = usize::from(self.script.below(4));
        let Some(peer) = self.peers.get(at) else { return };
        let conversation = match self.script.byte() {
            0..=7 => ConversationId(self.script.number()),
            8..=23 => peer.conversations.first().copied().unwrap_or(ConversationId::NONE),
            _ => peer.conversations.last().copied().unwrap_or(ConversationId::NONE),
        };
        if self.script.byte() < 8 {
            // Bytes as they come.
            let len = self.script.size(300).min(self.script.0.len());
            let (raw, rest) = self.script.0.split_at(len);
            self.script = Script(rest);
            return self.hear("bytes", at as u64, Bytes::copy_from_slice(raw));
        }
        let body = peer.says(&mut self.script);
        let what = frames::name(&body);
        let Ok(frame) = (Frame { conversation, body }).encode() else { return };
        // On its own connection, mostly.
        let from = if self.script.byte() < 8 { self.script.number() % 5 } else { at as u64 };
        let copies = if self.script.byte() < 16 { 1 + self.script.below(40) } else { 1 };
        for _ in 0..copies {
            self.hear(what, from, frames::damaged(self.script, &frame));
        }
    }

    fn hear(&mut self, what: &'static str, from: u64, frame: Bytes) {
        let from = Origin(from);
        self.input(what, frame.len() as u64, 0, Input::Frame { from, frame });
    }

    fn end_post(&mut self) {
        if self.posts.is_empty() {
            return;
        }
        let at = usize::from(self.script.byte()) % self.posts.len();
        let (_, post) = self.posts.remove(at);
        let result = if self.script.rarely() { Err(TransportError::Cancelled) } else { Ok(()) };
        self.input("Posted", 0, 0, Input::Posted { post: post.id, result });
    }

    fn way(&mut self) {
        let script = &mut self.script;
        let fence = match script.below(3) {
            0 => WriteFence::AtDeath,
            1 => WriteFence::Revocable,
            _ => WriteFence::Within(Duration::from_millis(script.number() % 10_000)),
        };
        let directions =
            [Directions::BOTH, Directions::WRITE, Directions::READ][usize::from(script.below(3))];
        if let Some(&peer) = self.revoking.first()
            && script.flag()
        {
            self.revoking.remove(&peer);
            return self.input("Revoked", 0, 0, Input::Revoked { peer });
        }
        let Some(peer) = self.connecting.pop() else { return };
        if script.rarely() {
            let error = TransportError::Metadata("of another host");
            self.input("ConnectFailed", 0, 0, Input::ConnectFailed { peer, error });
        } else {
            self.input("Connected", 0, 0, Input::Connected { peer, directions, fence });
        }
    }

    fn lookup(&mut self) {
        let Some(lookup) = self.lookups.pop_first() else { return };
        if self.script.rarely() {
            let error = match self.script.flag() {
                true => BootstrapError::UnknownRank,
                false => BootstrapError::NotReady { registered: 1, expected: self.script.small() },
            };
            return self.input("LookupFailed", 0, 0, Input::LookupFailed { lookup, error });
        }
        let (count, first) = (1 + self.script.size(64), self.script.below(4));
        let mut ranks = Vec::new();
        for at in 0..count {
            let Some(peer) = self.peers.get((usize::from(first) + at) % 4) else { continue };
            let (Some(cache), Some(worker)) = (caches::cache(peer.variant), peer.worker("")) else {
                continue;
            };
            let incarnation = Incarnation::from_random(peer.incarnation + 64 * (at as u64 / 4));
            let metadata = peer.metadata(0);
            // Larger than a registry would take, too.
            let transport = TransportOffer::new("test", metadata);
            let (role, parallel) = (WorkerRole::Prefill, cache.geometry.parallel);
            let (transports, offers) = (vec![transport], vec![cache.offer.clone()]);
            ranks.push(RankRecord { worker, incarnation, role, parallel, transports, offers });
        }
        // About as large as the JSON of the answer.
        let data = |rank: &RankRecord| rank.offers.iter().map(|offer| offer.data.len()).sum::<usize>();
        let bytes = ranks.iter().map(|rank| 300 + data(rank) as u64 * 4 / 3).sum();
        self.input("Found", bytes, 0, Input::Found { lookup, ranks });
    }

    fn input(&mut self, what: &'static str, bytes: u64, asked: u64, input: Input) {
        let own = asked + self.books.own();
        let frame = if matches!(input, Input::Frame { .. }) { bytes } else { 0 };
        let start = Moment::now();
        self.node.handle(self.now, input);
        let handled = start.cost_since(0);
        let (mut said, mut outputs) = (0, Vec::new());
        while let Some(output) = self.node.poll_output() {
            said += books::size(&output, books::size_of_resource);
            outputs.push(output);
        }
        let gauges = self.node.gauges();
        // Those that this input has brought, or ended.
        let sources = std::mem::replace(&mut self.sources, gauges.sources).max(gauges.sources);
        // What its own sessions that have ended still have to tell.
        let draining = std::mem::replace(&mut self.draining, gauges.draining).max(gauges.draining);
        let granted = std::mem::replace(&mut self.granted, gauges.granted_runs);
        let earlier = OF_RUN * granted.saturating_sub(gauges.granted_runs) as u64;
        let paid = Paid { bytes: bytes + earlier, own: own + (sources + draining) as u64 };
        let cost = super::Cost { said, ..handled };
        self.books.charge(Charge { what, cost, paid }, &outputs);
        let reach = Reach {
            frame,
            own,
            sessions: gauges.senders + gauges.receivers,
            sources,
            targets: gauges.targets,
            peers: gauges.peers,
            posts: gauges.posts,
        };
        self.books.reached(reach, &gauges);
        for output in outputs {
            self.carry_out(output);
        }
        self.check_bounds(&gauges);
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Connect { peer, transport } => {
                let byte = |at| transport.metadata.get(at).copied().unwrap_or(0);
                self.known.insert(peer, (byte(0), byte(1)));
                self.connecting.push(peer);
            }
            Output::Disconnect { peer } => {
                self.connecting.retain(|connecting| *connecting != peer);
                self.revoking.remove(&peer);
            }
            Output::Send { peer, frame } => self.listen(peer, &frame),
            Output::Post { peer, post } => {
                self.check_post(peer, &post);
                self.posts.push((peer, post));
            }
            Output::Lookup { lookup, .. } => {
                assert!(self.lookups.insert(lookup), "{lookup:?} is asked twice at a time");
            }
            Output::Revoke { peer } => {
                self.revoking.insert(peer);
            }
            Output::Status { session, poll, failure } => {
                assert_eq!(failure.is_some(), poll == KvPoll::Failed, "{session}");
                self.books.told(session, poll);
            }
            Output::Release { session, .. } => self.books.released(session),
            Output::Cancel { .. } | Output::Permit { .. } => {}
        }
    }

    /// Lets a peer learn from a frame of the machine.
    fn listen(&mut self, to: PeerId, frame: &Bytes) {
        let frame = Frame::decode(frame);
        assert!(frame.is_ok(), "the machine says what nobody can read: {frame:?}");
        let Ok(Frame { body, .. }) = frame else { return };
        let Some(&(_, number)) = self.known.get(&to) else { return };
        let Some(peer) = self.peers.get_mut(usize::from(number)) else { return };
        peer.hears(&body);
    }

    fn check_post(&self, peer: PeerId, post: &Post) {
        let cache = self.known.get(&peer).and_then(|&(variant, _)| caches::cache(variant));
        assert!(
            !post.descriptors.is_empty() && post.descriptors.len() <= 64,
            "{} descriptors",
            post.descriptors.len()
        );
        for descriptor in &post.descriptors {
            let inside = |geometry: &Geometry, region: u32, offset: u64| {
                let region = geometry.regions.get(region as usize);
                region.is_some_and(|region| {
                    offset.checked_add(descriptor.len).is_some_and(|end| end <= region.len)
                })
            };
            assert!(
                descriptor.len > 0 && inside(self.us, descriptor.local_region, descriptor.local_offset),
                "{descriptor:?}"
            );
            let there = cache.is_some_and(|there| {
                inside(&there.geometry, descriptor.remote_region, descriptor.remote_offset)
            });
            assert!(there, "{descriptor:?} leaves the peer's memory");
        }
    }

    fn check_bounds(&self, gauges: &NodeGauges) {
        check_bounds(gauges);
        if let Some(next) = self.node.next_timeout() {
            assert!(next > self.now, "a timer that is due was not run");
        }
    }

    /// The scheduler stops: every session has ended.
    fn finish(&mut self) {
        self.input("Shutdown", 0, 0, Input::Command(Command::Shutdown));
        self.books.check_all_ended();
        // Posts that end late find nothing that they could upset.
        for (_, post) in std::mem::take(&mut self.posts) {
            self.input("Posted", 0, 0, Input::Posted { post: post.id, result: Ok(()) });
        }
    }
}

/// The tables that peers fill keep to their bounds.
pub(super) fn check_bounds(gauges: &NodeGauges) {
    let limits = limits();
    let attempts = limits.max_peers as u64 * limits.max_attempts;
    assert!(gauges.peers <= limits.max_peers, "{gauges:?}");
    assert!(gauges.registrations <= limits.max_registrations, "{gauges:?}");
    assert!(gauges.failed_rooms <= 2 * limits.max_failed_rooms, "{gauges:?}");
    assert!(gauges.incoming as u64 <= attempts, "{gauges:?}");
    assert!(gauges.closed_runs as u64 <= attempts, "{gauges:?}");
    assert!(gauges.waiting_runs <= limits.max_waiting_runs, "{gauges:?}");
    assert!(gauges.addresses <= limits.max_addresses, "{gauges:?}");
    assert!(gauges.sources <= gauges.receivers * limits.max_peers, "{gauges:?}");
    assert!(gauges.granted_runs <= gauges.sources * MAX_FRAME / OF_RUN as usize, "{gauges:?}");
    assert!(gauges.ended_leases <= limits.max_ended_leases, "{gauges:?}");
}
