//! A machine, its scheduler and its peers, as a script moves them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Limits, Node, NodeConfig, Output, Resource};
use kv_core::wire::{Body, Frame, Link};
use kv_core::{
    AuxIndex, BootstrapError, ChunkId, Directions, FenceError, FinalLayers, Geometry, GrantRef, GroupItems,
    Groups, Incarnation, KvPoll, Lease, LookupId, Origin, PageList, Pages, PeerId, PlaneError, Post,
    RankRecord, ServiceOffer, SessionId, SessionOptions, TRANSPORT_VERSION, Time, TransferMode,
    TransportOffer, WayEnd, WorkerRole, WriteFence,
};

use super::cost::{Moment, Paid};
use super::frames::{self, PAGES, Peer};
use super::script::Script;
use super::{Charge, Outcome};

/// Most inputs of one script.
pub const MAX_INPUTS: u64 = 400;

const US: Incarnation = Incarnation::from_random(9);
const LIMITS: Limits = Limits {
    max_peers: 3,
    max_registrations: 8,
    max_waiting_runs: 4096,
    max_failed_rooms: 8,
    max_post_bytes: 1 << 20,
    max_attempts: 64,
    connections_share: 2,
    max_incarnations: 2,
    max_addresses: 8,
    max_ended_grants: 7,
};

/// What the scheduler has asked for in a session.
#[derive(Debug, Default)]
struct Session {
    own: u64,
    sends: bool,
    /// Tokens of pages and groups that have not come back.
    tokens: u32,
    ended: bool,
}

pub(super) struct World<'a> {
    script: Script<'a>,
    node: Node,
    us: Geometry,
    now: Time,
    peers: [Peer; 4],
    /// The peers that the machine knows, by what their metadata says: which cache, and which of `peers`.
    known: BTreeMap<PeerId, (u8, u8)>,
    sessions: BTreeMap<SessionId, Session>,
    opened: u64,
    posts: Vec<(PeerId, Post)>,
    connecting: Vec<PeerId>,
    lookups: BTreeSet<LookupId>,
    revoking: BTreeSet<PeerId>,
    outcome: Outcome,
}

impl<'a> World<'a> {
    pub(super) fn new(mut script: Script<'a>) -> World<'a> {
        let header = script.byte();
        let mode = [TransferMode::Push, TransferMode::Pull, TransferMode::Auto][usize::from(header % 3)];
        let variants = [script.byte(), script.byte(), script.byte(), script.byte()];
        let mut number = 0;
        let peers = variants.map(|byte| {
            number += 1;
            // Most fit.
            let variant = if byte < 128 { 0 } else { byte % 8 };
            Peer {
                incarnation: number,
                number: number as u8 - 1,
                variant,
                links: Vec::new(),
                drawn: 0,
                nonce: 0,
                beat: 0,
                ask: 0,
            }
        });
        #[allow(clippy::expect_used)]
        let args = frames::args("us", PAGES, 16).expect("the worker's arguments are valid");
        let us = args.geometry().clone();
        let config =
            NodeConfig { limits: LIMITS, ..NodeConfig::new(args, US, "test", Bytes::from_static(&[0])) };
        let mut world = World {
            script,
            node: Node::new(config),
            us,
            now: Time::from_nanos(1_000_000_000),
            peers,
            known: BTreeMap::new(),
            sessions: BTreeMap::new(),
            opened: 0,
            posts: Vec::new(),
            connecting: Vec::new(),
            lookups: BTreeSet::new(),
            revoking: BTreeSet::new(),
            outcome: Outcome::default(),
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
        while !self.script.is_empty() && self.outcome.inputs < MAX_INPUTS {
            self.next();
        }
        self.finish();
        self.outcome
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
        let (session, script) = (SessionId(self.opened), &mut self.script);
        let room = frames::room(script);
        let grants = if sender { 0 } else { script.size(2000) };
        let grant = |number: usize| GrantRef {
            incarnation: Incarnation::from_random(number as u64 + 1),
            nonce: SessionId(1 + number as u64),
            pages: None,
        };
        let options = Box::new(SessionOptions {
            mode: Some(mode),
            deadline: script.option(|script| Duration::from_millis(script.number() % 1_000_000)),
            prefill_dp_rank: script.option(|script| u32::from(script.below(3))),
            lease: script.option(|script| Lease::Fixed(Duration::from_millis(script.number() % 100_000))),
            grants: (0..grants).map(grant).collect(),
            source: None,
            prefix_pages: if script.rarely() { script.size(5000) } else { 0 },
            tokens: script.option(|script| script.size(100_000)),
        });
        if sender {
            let receivers = script.size(5000) as u32;
            let own = 1 + u64::from(receivers);
            self.ask(session, own, 0, Command::OpenSender { session, room, receivers, options });
        } else {
            let bootstrap_addr = format!("server-{}:1", script.text(2000));
            let own = 1 + grants as u64 + bootstrap_addr.len() as u64 / 16;
            self.ask(session, own, 0, Command::OpenReceiver { session, room, bootstrap_addr, options });
        }
    }

    fn own_pages(&mut self) -> Pages {
        let list = PageList::try_from(self.script.runs(20_000, PAGES)).unwrap_or_default();
        Pages::claim(list).unwrap_or_default()
    }

    fn command(&mut self) {
        let session = SessionId(u64::from(self.script.below(self.opened.min(200) as u8 + 2)));
        let aux = if self.script.rarely() { Some(AuxIndex(self.script.small())) } else { None };
        match self.script.below(12) {
            0..=2 => {
                let pages = self.own_pages();
                let num_pages = if self.script.rarely() { self.script.size(100_000) } else { pages.len() };
                let own = cost_of(&pages);
                self.ask(session, 1, 0, Command::InitSender { session, num_pages, aux });
                if self.script.flag() {
                    self.ask(session, own, 1, Command::Send { session, chunk: pages });
                } else {
                    self.ask(session, own, 1, Command::BeginChunk { session, chunk: pages });
                }
            }
            3 => {
                let chunk = self.own_pages();
                self.ask(session, cost_of(&chunk), 1, Command::Send { session, chunk });
            }
            4 => {
                let chunk = ChunkId(self.script.small());
                let start = self.script.below(3).into();
                let layers = self.script.option(|script| start..start + u32::from(script.below(3)));
                self.ask(
                    session,
                    1,
                    0,
                    Command::LayersFinal { session, layers: FinalLayers { chunk, layers, fence: None } },
                );
            }
            5 => {
                let command = Command::FenceFailed {
                    session,
                    chunk: ChunkId(0),
                    error: FenceError::Device { code: 1 },
                };
                self.ask(session, 0, 0, command);
            }
            6..=8 => {
                let pages = self.own_pages();
                self.ask(session, cost_of(&pages), 1, Command::InitReceiver { session, pages, aux });
            }
            9 | 10 => {
                let (mut groups, mut own) = (Groups::none(), 1);
                for group in (0..4).filter(|_| self.script.flag()).collect::<Vec<_>>() {
                    let list = PageList::try_from(self.script.runs(4000, 4096)).unwrap_or_default();
                    let items = Pages::claim(list).unwrap_or_default();
                    own += cost_of(&items);
                    // By rising number, and each once.
                    let _ = groups.push(GroupItems::from_number(group, self.script.small() % 1000, items));
                }
                self.ask(session, own, 1, Command::Groups { session, groups });
            }
            _ => self.ask(session, 0, 0, Command::Abort { session }),
        }
    }

    fn ask(&mut self, session: SessionId, own: u64, tokens: u32, command: Command) {
        let opens = matches!(command, Command::OpenSender { .. } | Command::OpenReceiver { .. });
        let sends = match &command {
            Command::OpenReceiver { .. } | Command::InitReceiver { .. } => Some(false),
            Command::Groups { .. } | Command::Abort { .. } => None,
            _ => Some(true),
        };
        if opens {
            self.sessions.insert(session, Session { sends: sends == Some(true), ..Session::default() });
        }
        // The handles of senders have none of the methods of receivers.
        if self.sessions.get(&session).is_some_and(|known| sends.is_some_and(|sends| sends != known.sends)) {
            return;
        }
        if let Some(known) = self.sessions.get_mut(&session) {
            known.own += own;
            known.tokens += tokens;
        }
        let what = match &command {
            Command::OpenSender { .. } => "OpenSender",
            Command::OpenReceiver { .. } => "OpenReceiver",
            Command::InitSender { .. } => "InitSender",
            Command::Send { .. } | Command::BeginChunk { .. } => "Send",
            Command::LayersFinal { .. } => "LayersFinal",
            Command::InitReceiver { .. } => "InitReceiver",
            Command::Groups { .. } => "Groups",
            _ => "Abort",
        };
        self.input(what, 0, own, Input::Command(command));
    }

    fn greet(&mut self, peer: usize, script: &mut Script) {
        let number = peer as u64;
        let Some(peer) = self.peers.get_mut(peer) else { return };
        // Another life of it, at times.
        if script.byte() < 12 {
            peer.incarnation += 16;
            peer.links.clear();
        }
        let Some(hello) = peer.hello(script, US) else { return };
        let Ok(frame) = (Frame { link: Link::NONE, body: Body::Hello(hello) }).encode() else { return };
        self.hear("Hello", number, frame);
    }

    fn say(&mut self) {
        let at = usize::from(self.script.below(4));
        let Some(peer) = self.peers.get(at) else { return };
        let link = match self.script.byte() {
            0..=7 => Link(self.script.number()),
            8..=23 => peer.links.first().copied().unwrap_or(Link::NONE),
            _ => peer.links.last().copied().unwrap_or(Link::NONE),
        };
        if self.script.byte() < 8 {
            // Bytes as they come.
            let len = self.script.size(300).min(self.script.0.len());
            let (raw, rest) = self.script.0.split_at(len);
            self.script = Script(rest);
            return self.hear("bytes", at as u64, Bytes::copy_from_slice(raw));
        }
        let body = peer.says(&mut self.script);
        let what = name(&body);
        let Ok(frame) = (Frame { link, body }).encode() else { return };
        // On its own connection, mostly.
        let from = if self.script.byte() < 8 { self.script.number() % 5 } else { at as u64 };
        let copies = if self.script.byte() < 16 { 1 + self.script.below(40) } else { 1 };
        for _ in 0..copies {
            self.hear(what, from, self.damaged(&frame));
        }
    }

    /// The frame, damaged at times.
    fn damaged(&self, frame: &Bytes) -> Bytes {
        let mut script = self.script;
        if script.byte() >= 6 {
            return frame.clone();
        }
        let mut bytes = frame.to_vec();
        let at = script.word() as usize % bytes.len().max(1);
        match script.below(3) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, script.byte()),
            _ => bytes.splice(at..at, [0xdd, 0xff, 0xff, 0xff, 0xff]).for_each(drop),
        }
        bytes.into()
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
        let result = if self.script.rarely() { Err(PlaneError::Cancelled) } else { Ok(()) };
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
            let error = PlaneError::Metadata("of another host");
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
            let (Some(geometry), Some(worker)) = (frames::geometry(peer.variant), peer.worker("")) else {
                continue;
            };
            let incarnation = Incarnation::from_random(peer.incarnation + 64 * (at as u64 / 4));
            let metadata = peer.metadata(0);
            // Larger than a registry would take, too.
            let transport = TransportOffer { name: "test".to_owned(), version: TRANSPORT_VERSION, metadata };
            let (role, parallel) = (WorkerRole::Prefill, geometry.parallel);
            let (transports, offers) = (vec![transport], ServiceOffer::kv(&geometry).into_iter().collect());
            ranks.push(RankRecord { worker, incarnation, role, parallel, transports, offers });
        }
        // About as large as the JSON of the answer.
        let data = |rank: &RankRecord| rank.offers.iter().map(|offer| offer.data.len()).sum::<usize>();
        let bytes = ranks.iter().map(|rank| 300 + data(rank) as u64 * 4 / 3).sum();
        self.input("Found", bytes, 0, Input::Found { lookup, ranks });
    }

    fn input(&mut self, what: &'static str, bytes: u64, asked: u64, input: Input) {
        let own = asked + self.sessions.values().map(|session| session.own).sum::<u64>();
        let paid = Paid { bytes, own };
        let start = Moment::now();
        self.node.handle(self.now, input);
        let handled = start.cost_since(0);
        let (mut said, mut outputs) = (0, Vec::new());
        while let Some(output) = self.node.poll_output() {
            said += size(&output);
            outputs.push(output);
        }
        let cost = super::Cost { said, ..handled };
        self.outcome.inputs += 1;
        let charge = Charge { what, cost, paid };
        if charge.share() > self.outcome.worst.share() || self.outcome.worst.what.is_empty() {
            self.outcome.worst = charge;
        }
        let input_kind = what.len() as u32 * 31 + u32::from(what.as_bytes().first().copied().unwrap_or(0));
        let dear = (charge.share() * 16.0) as u32;
        self.note(input_kind, 1000 + dear.min(64));
        self.note(input_kind, 2000 + outputs.len().min(16) as u32);
        for output in outputs {
            self.note(input_kind, kind(&output));
            self.carry_out(output);
        }
        self.check_bounds();
    }

    fn note(&mut self, input: u32, what: u32) {
        self.outcome.features.push(input.wrapping_mul(0x9e37_79b1) ^ what.wrapping_mul(0x85eb_ca6b));
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Connect { peer, metadata } => {
                let byte = |at| metadata.get(at).copied().unwrap_or(0);
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
                let known = self.sessions.get_mut(&session);
                assert!(
                    known.as_ref().is_some_and(|known| !known.ended),
                    "{session} ends twice, or never was"
                );
                if let Some(known) = known.filter(|_| poll.is_terminal()) {
                    known.ended = true;
                }
                self.forget(session);
            }
            Output::Release { session, .. } => {
                if let Some(known) = self.sessions.get_mut(&session) {
                    assert!(known.ended, "pages of {session} come back before its end");
                    assert!(known.tokens > 0, "more comes back of {session} than was given");
                    known.tokens -= 1;
                }
                self.forget(session);
            }
            Output::Cancel { .. } | Output::Permit { .. } => {}
        }
    }

    /// A session that has ended, and of which everything has come back, pays for nothing any more.
    fn forget(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get_mut(&session)
            && known.ended
            && known.tokens == 0
        {
            known.own = 0;
        }
    }

    /// What a peer learns from a frame of the machine's.
    fn listen(&mut self, to: PeerId, frame: &Bytes) {
        let frame = Frame::decode(frame);
        assert!(frame.is_ok(), "the machine says what nobody can read: {frame:?}");
        let Ok(Frame { body, .. }) = frame else { return };
        let Some(&(_, number)) = self.known.get(&to) else { return };
        let Some(peer) = self.peers.get_mut(usize::from(number)) else { return };
        match body {
            Body::Welcome(welcome) => {
                peer.ask = welcome.ask;
                peer.links.push(welcome.link);
            }
            Body::AskWrite(question) => peer.ask = question.ask,
            Body::Hello(hello) => {
                peer.nonce = hello.nonce;
                peer.links.push(hello.link);
            }
            Body::Claim(claim) => peer.beat = claim.beat,
            Body::Heartbeat(heartbeat) => peer.beat = heartbeat.beat,
            _ => {}
        }
    }

    fn check_post(&self, peer: PeerId, post: &Post) {
        let cache = self.known.get(&peer).and_then(|&(variant, _)| frames::geometry(variant));
        assert!(!post.descs.is_empty() && post.descs.len() <= 64, "{} descriptors", post.descs.len());
        for desc in &post.descs {
            let inside = |geometry: &Geometry, region: u32, offset: u64| {
                let region = geometry.regions.get(region as usize);
                region.is_some_and(|region| offset.checked_add(desc.len).is_some_and(|end| end <= region.len))
            };
            assert!(desc.len > 0 && inside(&self.us, desc.local_region, desc.local_offset), "{desc:?}");
            let there =
                cache.as_ref().is_some_and(|there| inside(there, desc.remote_region, desc.remote_offset));
            assert!(there, "{desc:?} leaves the peer's memory");
        }
    }

    fn check_bounds(&self) {
        let gauges = self.node.gauges();
        assert!(gauges.peers <= LIMITS.max_peers, "{gauges:?}");
        assert!(gauges.registrations <= LIMITS.max_registrations, "{gauges:?}");
        assert!(gauges.failed_rooms <= 2 * LIMITS.max_failed_rooms, "{gauges:?}");
        assert!(gauges.incoming as u64 <= LIMITS.max_peers as u64 * LIMITS.max_attempts, "{gauges:?}");
        assert!(gauges.ended_grants <= LIMITS.max_ended_grants, "{gauges:?}");
        if let Some(next) = self.node.next_timeout() {
            assert!(next > self.now, "a timer that is due was not run");
        }
    }

    /// The scheduler stops: every session has ended.
    fn finish(&mut self) {
        self.input("Shutdown", 0, 0, Input::Command(Command::Shutdown));
        let open = self.sessions.iter().find(|(_, session)| !session.ended);
        assert!(open.is_none(), "{open:?} has not ended at shutdown");
        // Posts that end late find nothing that they could upset.
        for (_, post) in std::mem::take(&mut self.posts) {
            self.input("Posted", 0, 0, Input::Posted { post: post.id, result: Ok(()) });
        }
    }
}

fn cost_of(pages: &Pages) -> u64 {
    1 + pages.len() as u64
}

/// About how many bytes an output is.
fn size(output: &Output) -> u64 {
    let size = match output {
        Output::Send { frame, .. } => frame.len(),
        Output::Post { post, .. } => {
            post.descs.len() * size_of::<kv_core::Desc>() + post.notify.as_ref().map_or(0, Bytes::len)
        }
        Output::Connect { metadata, .. } => metadata.len(),
        Output::Lookup { addr, .. } => addr.len(),
        Output::Release { resource: Resource::Pages(pages), .. } => 8 * pages.list().runs().len(),
        Output::Release { resource: Resource::Groups { groups, .. }, .. } => 8 * groups.lists().runs(),
        _ => 0,
    };
    (size + 16) as u64
}

fn kind(output: &Output) -> u32 {
    match output {
        Output::Connect { .. } => 1,
        Output::Disconnect { .. } => 2,
        Output::Send { frame, .. } => 100 + u32::from(frame.get(2).copied().unwrap_or(0)),
        Output::Post { .. } => 4,
        Output::Permit { .. } => 5,
        Output::Revoke { .. } => 6,
        Output::Cancel { .. } => 7,
        Output::Lookup { .. } => 8,
        Output::Status { poll, failure, .. } => {
            // The name of the cause: what its text begins with.
            let text = failure.as_ref().map(|failure| format!("{:?}", failure.cause));
            let name: u32 = text
                .iter()
                .flat_map(|text| text.bytes().take_while(u8::is_ascii_alphabetic))
                .fold(0, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
            (*poll as u32 + 10) ^ name << 8
        }
        Output::Release { resource: Resource::Pages(_), .. } => 30,
        Output::Release { resource: Resource::Groups { .. }, .. } => 31,
    }
}

fn name(body: &Body) -> &'static str {
    match body {
        Body::Hello(_) => "Hello",
        Body::Welcome(_) => "Welcome",
        Body::Refused(_) => "Refused",
        Body::Register(_) => "Register",
        Body::Registered(_) => "Registered",
        Body::Done(_) => "Done",
        Body::Progress(_) => "Progress",
        Body::Failed(_) => "Failed",
        Body::Abort(_) => "Abort frame",
        Body::AbortAck(_) => "AbortAck",
        Body::Finish(_) => "Finish",
        Body::Ping(_) => "Ping",
        Body::Pong(_) => "Pong",
        Body::Claim(_) => "Claim",
        Body::Granted(_) => "Granted",
        Body::Heartbeat(_) => "Heartbeat",
        Body::HeartbeatAck(_) => "HeartbeatAck",
        Body::Release(_) => "Release",
        Body::Released(_) => "Released",
        Body::AskWrite(_) => "AskWrite",
        Body::MayWrite(_) => "MayWrite",
    }
}
