//! Two nodes, the wire between them, and a clock.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output, Resource, Spoken};
use kv_core::wire::{Body, Frame, VERSIONS, Versions};
use kv_core::{
    AuxIndex, CacheGroupLists, Cause, Directions, Incarnation, KvArgs, KvArgsBuilder, KvPoll, LeaseRef,
    LookupId, Origin, PageList, Pages, PeerId, Post, RankRecord, Region, RegionRole, RequestCacheGroups,
    Room, SessionId, SessionOptions, Time, TransferError, TransportError, WayEnd, WorkerRole, WriteFence,
};

/// The prefill node.
pub const P: usize = 0;
/// The decode node.
pub const D: usize = 1;

/// What came back of the groups of a session: lists, and groups that were skipped.
pub type ReleasedGroups = (CacheGroupLists, Vec<u16>);

type Filter = Box<dyn FnMut(&Body) -> bool>;

pub struct Pair {
    nodes: [Node; 2],
    configs: [NodeConfig; 2],
    now: Time,
    /// Which node a node's peer number stands for.
    peers: BTreeMap<(usize, PeerId), usize>,
    wire: VecDeque<(usize, Bytes)>,
    held: Vec<(usize, Bytes)>,
    lose: Filter,
    hold: Filter,
    copies: usize,
    /// What the wire is good for.
    pub directions: Directions,
    /// What ends the danger of a silent peer's writes.
    pub fence: WriteFence,
    /// To which node nothing comes through.
    pub deaf: Option<usize>,
    /// Connections cannot be opened.
    pub unreachable: bool,
    /// What each node's transport was last told of its permission, and how often to revoke.
    permits: BTreeMap<usize, Time>,
    revokes: Vec<(usize, PeerId)>,
    posts: Vec<(usize, Post)>,
    polls: BTreeMap<(usize, SessionId), KvPoll>,
    failures: BTreeMap<(usize, SessionId), TransferError>,
    released: BTreeMap<(usize, SessionId), Vec<PageList>>,
    released_groups: BTreeMap<(usize, SessionId), Vec<ReleasedGroups>>,
    next_session: u64,
}

pub fn list(pages: &[u32]) -> PageList {
    PageList::from_pages(pages.iter().copied()).unwrap()
}

pub fn pages(pages: &[u32]) -> Pages {
    Pages::unpooled(list(pages)).unwrap()
}

fn args(engine: &str, page_size: u32) -> KvArgs {
    args_builder(engine, page_size).build().unwrap()
}

fn args_builder(engine: &str, page_size: u32) -> KvArgsBuilder {
    KvArgs::builder(engine, 0)
        .pages(32, page_size)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64).layer(0))
        .region(Region::dram(RegionRole::Kv, 0x2_0000, 32 * 64, 64).layer(0))
        .region(Region::dram(RegionRole::Aux, 0x3_0000, 4 * 16, 16))
        .max_inflight(8)
}

impl Pair {
    pub fn new() -> Pair {
        Pair::with(|_| {})
    }

    /// Two engines that add suffixes to the ids of requests.
    pub fn suffixing() -> Pair {
        Pair::with(|config| {
            let engine = config.args.worker().engine.as_str().to_owned();
            config.args = args_builder(&engine, 16).suffixes_requests(true).build().unwrap();
        })
    }

    pub fn with(change: impl Fn(&mut NodeConfig)) -> Pair {
        let config = |engine, incarnation| {
            let metadata = Bytes::from_static(b"memory");
            let incarnation = Incarnation::from_random(incarnation);
            let mut config = NodeConfig::new(args(engine, 16), incarnation, "test", metadata);
            change(&mut config);
            config
        };
        let configs = [config("prefill", 100), config("decode", 200)];
        Pair {
            nodes: [Node::new(configs[P].clone()), Node::new(configs[D].clone())],
            configs,
            now: Time::from_nanos(1_000_000_000),
            peers: BTreeMap::new(),
            wire: VecDeque::new(),
            held: Vec::new(),
            lose: Box::new(|_| false),
            hold: Box::new(|_| false),
            copies: 1,
            directions: Directions::BOTH,
            fence: WriteFence::AtDeath,
            deaf: None,
            unreachable: false,
            permits: BTreeMap::new(),
            revokes: Vec::new(),
            posts: Vec::new(),
            polls: BTreeMap::new(),
            failures: BTreeMap::new(),
            released: BTreeMap::new(),
            released_groups: BTreeMap::new(),
            next_session: 0,
        }
    }

    pub fn node(&self, node: usize) -> &Node {
        &self.nodes[node]
    }

    pub fn input(&mut self, node: usize, input: Input) {
        self.nodes[node].handle(self.now, input);
        self.drain(node);
        self.deliver();
    }

    pub fn command(&mut self, node: usize, command: Command) {
        self.input(node, Input::Command(command));
    }

    /// Loses the frames for which `lose` says true.
    pub fn lose(&mut self, lose: impl FnMut(&Body) -> bool + 'static) {
        self.lose = Box::new(lose);
    }

    /// Keeps back the frames for which `hold` says true.
    pub fn hold(&mut self, hold: impl FnMut(&Body) -> bool + 'static) {
        self.hold = Box::new(hold);
    }

    pub fn deliver_held(&mut self) {
        self.hold = Box::new(|_| false);
        self.wire.extend(std::mem::take(&mut self.held));
        self.deliver();
    }

    /// Delivers what was kept back, and keeps back the frames for which `hold` says true.
    pub fn deliver_held_and_hold(&mut self, hold: impl FnMut(&Body) -> bool + 'static) {
        self.hold = Box::new(hold);
        self.wire.extend(std::mem::take(&mut self.held));
        self.deliver();
    }

    pub fn duplicate_frames(&mut self, copies: usize) {
        self.copies = copies;
    }

    fn put_on_wire(&mut self, to: usize, frame: Bytes) {
        let body = Frame::decode(&frame).expect("nodes send valid frames").body;
        if (self.lose)(&body) || self.deaf == Some(to) {
            return;
        }
        if (self.hold)(&body) {
            self.held.push((to, frame));
            return;
        }
        for _ in 0..self.copies {
            self.wire.push_back((to, frame.clone()));
        }
    }

    fn deliver(&mut self) {
        while let Some((to, frame)) = self.wire.pop_front() {
            self.nodes[to].handle(self.now, Input::Frame { from: Origin(1 - to as u64), frame });
            self.drain(to);
        }
    }

    fn drain(&mut self, node: usize) {
        while let Some(output) = self.nodes[node].poll_output() {
            self.carry_out(node, output);
        }
    }

    fn carry_out(&mut self, node: usize, output: Output) {
        match output {
            Output::Connect { peer, .. } if self.unreachable => {
                let error = TransportError::PeerGone;
                self.nodes[node].handle(self.now, Input::ConnectFailed { peer, error });
            }
            Output::Connect { peer, .. } => {
                self.peers.insert((node, peer), 1 - node);
                let (directions, fence) = (self.directions, self.fence);
                self.nodes[node].handle(self.now, Input::Connected { peer, directions, fence });
            }
            Output::Disconnect { peer } => {
                self.peers.remove(&(node, peer));
            }
            Output::Send { peer, frame } => {
                if let Some(&to) = self.peers.get(&(node, peer)) {
                    self.put_on_wire(to, frame);
                }
            }
            Output::Post { post, .. } => self.posts.push((node, post)),
            Output::Permit { until, .. } => drop(self.permits.insert(node, until)),
            Output::Revoke { peer } => self.revokes.push((node, peer)),
            Output::Cancel { .. } => {}
            Output::Lookup { lookup, .. } => self.answer(node, lookup),
            Output::Status { session, poll, failure } => {
                let before = self.polls.insert((node, session), poll);
                assert!(
                    before.is_none_or(
                        |before| !before.is_terminal() && (poll == KvPoll::Failed || poll > before)
                    )
                );
                assert_eq!(failure.is_some(), poll == KvPoll::Failed);
                if let Some(failure) = failure {
                    self.failures.insert((node, session), *failure);
                }
            }
            Output::Release { session, resource: Resource::Pages(pages) } => {
                assert!(self.polls.get(&(node, session)).is_none_or(|poll| poll.is_terminal()));
                self.released.entry((node, session)).or_default().push(pages.list().clone());
            }
            Output::Release { session, resource: Resource::RequestCacheGroups { groups, skipped } } => {
                assert!(self.polls.get(&(node, session)).is_none_or(|poll| poll.is_terminal()));
                let lists = groups.lists();
                self.released_groups.entry((node, session)).or_default().push((lists, skipped));
            }
        }
    }

    fn answer(&mut self, node: usize, lookup: LookupId) {
        let config = &self.configs[1 - node];
        let record = RankRecord::serving_kv(
            (config.args.worker().clone(), config.incarnation),
            WorkerRole::Prefill,
            (&config.transports[0].name, config.transports[0].metadata.clone()),
            config.args.geometry(),
        )
        .unwrap();
        self.nodes[node].handle(self.now, Input::Found { lookup, ranks: vec![record] });
        self.drain(node);
    }

    /// Lets time pass; timers run when they are due.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let next = self.nodes.iter().filter_map(Node::next_timeout).min().filter(|&next| next <= end);
            self.now = self.now.max(next.unwrap_or(end));
            for node in [P, D] {
                if self.nodes[node].next_timeout().is_some_and(|next| next <= self.now) {
                    self.input(node, Input::Timeout);
                    assert!(
                        self.nodes[node].next_timeout() > Some(self.now)
                            || self.nodes[node].next_timeout().is_none()
                    );
                }
            }
            if next.is_none() {
                return;
            }
        }
    }

    /// Time passes, but not for one of the nodes: its process is stopped.
    pub fn pass_without(&mut self, stopped: usize, time: Duration) {
        let end = self.now + time;
        let node = 1 - stopped;
        while let Some(next) = self.nodes[node].next_timeout().filter(|&next| next <= end) {
            self.now = self.now.max(next);
            self.nodes[node].handle(self.now, Input::Timeout);
            self.drain(node);
            // What is sent to the stopped one waits in its buffers.
            let (waits, wire): (Vec<_>, Vec<_>) = self.wire.drain(..).partition(|&(to, _)| to == stopped);
            self.held.extend(waits);
            self.wire.extend(wire);
            self.deliver();
        }
        self.now = end;
    }

    /// A node loses its way to the other one, which may live.
    pub fn lose_way(&mut self, node: usize) {
        for peer in self.peers_of(node) {
            self.peers.remove(&(node, peer));
            self.input(node, Input::PeerGone { peer, end: WayEnd::Lost });
        }
    }

    /// True if the node has a way to the other one.
    pub fn has_way(&self, node: usize) -> bool {
        !self.peers_of(node).is_empty()
    }

    fn peers_of(&self, node: usize) -> Vec<PeerId> {
        self.peers.keys().filter(|(of, _)| *of == node).map(|&(_, peer)| peer).collect()
    }

    /// Until when the node's transport may begin writes.
    pub fn permit(&self, node: usize) -> Option<Time> {
        self.permits.get(&node).copied()
    }

    /// What the node has asked its transport to revoke.
    pub fn take_revokes(&mut self) -> Vec<(usize, PeerId)> {
        std::mem::take(&mut self.revokes)
    }

    pub fn now(&self) -> Time {
        self.now
    }

    fn session(&mut self) -> SessionId {
        self.next_session += 1;
        SessionId(self.next_session)
    }

    pub fn open_sender(&mut self, room: Room, receivers: u32) -> SessionId {
        self.open_sender_with(room, receivers, SessionOptions::default())
    }

    pub fn open_sender_with(&mut self, room: Room, receivers: u32, options: SessionOptions) -> SessionId {
        let (session, options) = (self.session(), Box::new(options));
        self.command(P, Command::OpenSender { session, room, receivers, options });
        session
    }

    pub fn open_receiver(&mut self, room: Room) -> SessionId {
        self.open_receiver_with(room, SessionOptions::default())
    }

    pub fn open_receiver_with(&mut self, room: Room, options: SessionOptions) -> SessionId {
        let (session, options) = (self.session(), Box::new(options));
        let bootstrap_addr = "bootstrap:1".to_owned();
        self.command(D, Command::OpenReceiver { session, room, bootstrap_addr, options });
        session
    }

    /// What a router would carry to the reader of this session's pages.
    pub fn lease_ref(&self, sender: SessionId) -> LeaseRef {
        LeaseRef::new(self.configs[P].incarnation, sender)
    }

    pub fn init_sender(&mut self, session: SessionId, num_pages: usize, aux: Option<u32>) {
        self.command(P, Command::InitSender { session, num_pages, aux: aux.map(AuxIndex) });
    }

    pub fn send(&mut self, session: SessionId, chunk: &[u32]) {
        self.command(P, Command::Send { session, chunk: pages(chunk) });
    }

    pub fn init_receiver(&mut self, session: SessionId, to: &[u32], aux: Option<u32>) {
        self.command(D, Command::InitReceiver { session, pages: pages(to), aux: aux.map(AuxIndex) });
    }

    pub fn give_groups(&mut self, node: usize, session: SessionId, groups: RequestCacheGroups) {
        self.command(node, Command::RequestCacheGroups { session, groups });
    }

    /// What came back of the groups of a session: lists, and groups that were skipped.
    pub fn released_groups(&self, node: usize, session: SessionId) -> Vec<ReleasedGroups> {
        self.released_groups.get(&(node, session)).cloned().unwrap_or_default()
    }

    /// A request whose posts are in flight.
    pub fn transferring(&mut self, room: Room, from: &[u32], to: &[u32]) -> (SessionId, SessionId) {
        let sender = self.open_sender(room.clone(), 1);
        let receiver = self.open_receiver(room);
        self.init_receiver(receiver, to, None);
        self.init_sender(sender, from.len(), None);
        self.send(sender, from);
        (sender, receiver)
    }

    pub fn abort(&mut self, node: usize, session: SessionId) {
        self.command(node, Command::Abort { session });
    }

    pub fn shutdown(&mut self, node: usize) {
        self.command(node, Command::Shutdown);
    }

    pub fn poll(&self, node: usize, session: SessionId) -> KvPoll {
        self.polls[&(node, session)]
    }

    pub fn failure(&self, node: usize, session: SessionId) -> Cause {
        assert_eq!(self.poll(node, session), KvPoll::Failed);
        self.failures[&(node, session)].cause.clone()
    }

    pub fn released(&self, node: usize, session: SessionId) -> Vec<PageList> {
        self.released.get(&(node, session)).cloned().unwrap_or_default()
    }

    /// Takes the posts in flight; they end when the test says so.
    pub fn take_posts(&mut self) -> Vec<(usize, Post)> {
        std::mem::take(&mut self.posts)
    }

    /// Takes the oldest post in flight; it ends when the test says so.
    pub fn take_first(&mut self) -> Option<(usize, Post)> {
        (!self.posts.is_empty()).then(|| self.posts.remove(0))
    }

    /// How many posts are in flight.
    pub fn posts(&self) -> usize {
        self.posts.len()
    }

    pub fn only_post(&self) -> Post {
        assert_eq!(self.posts.len(), 1);
        self.posts[0].1.clone()
    }

    /// How many of the posts in flight read this page.
    pub fn posts_touching(&self, page: u64) -> usize {
        let reads =
            |post: &Post| post.descriptors.iter().any(|descriptor| descriptor.local_offset == page * 64);
        self.posts.iter().filter(|(_, post)| reads(post)).count()
    }

    pub fn complete(&mut self, node: usize, post: Post, result: Result<(), TransportError>) {
        if let (Ok(()), Some(notify)) = (&result, post.notify) {
            self.put_on_wire(1 - node, notify);
        }
        self.input(node, Input::Posted { post: post.id, result });
    }

    /// Ends the oldest post well.
    pub fn complete_first(&mut self) {
        let (node, post) = self.posts.remove(0);
        self.complete(node, post, Ok(()));
    }

    /// Ends all posts well, and those that follow.
    pub fn complete_posts(&mut self) {
        while !self.posts.is_empty() {
            self.complete_first();
        }
    }

    /// The transport of `node` proves its peer gone.
    pub fn peer_gone(&mut self, node: usize, quiet_after: Duration) {
        for peer in self.peers_of(node) {
            self.input(node, Input::PeerGone { peer, end: WayEnd::Dead { quiet_after } });
        }
    }

    pub fn restart(&mut self, node: usize) {
        let incarnation = self.configs[node].incarnation.get() + 1;
        self.configs[node].incarnation = Incarnation::from_random(incarnation);
        self.configs[node].seed += 1;
        self.nodes[node] = Node::new(self.configs[node].clone());
        self.peers.retain(|&(of, _), _| of != node);
    }

    /// Restarts the node with a library that speaks these versions.
    pub fn upgrade(&mut self, node: usize, versions: Versions) {
        self.configs[node].versions = Spoken::of_another_library(versions);
        self.restart(node);
    }

    /// Gives the node another page size, before anything has begun.
    pub fn replace_geometry(&mut self, node: usize, page_size: u32) {
        self.configs[node].args = args("decode", page_size);
        self.nodes[node] = Node::new(self.configs[node].clone());
    }

    /// Lets a node with room for one peer meet another, so that it forgets the one it knows.
    pub fn make_forget(&mut self, node: usize) {
        let mut stranger = self.configs[1 - node].clone();
        stranger.incarnation = Incarnation::from_random(0x5712_a4e5);
        stranger.args = args("stranger", 16);
        let hello = kv_core::wire::Hello {
            versions: VERSIONS,
            to: self.configs[node].incarnation,
            worker: stranger.args.worker().clone(),
            incarnation: stranger.incarnation,
            conversation: kv_core::wire::ConversationId::new(1, 1),
            nonce: 1,
            transport: stranger.transports[0].name.clone(),
            metadata: stranger.transports[0].metadata.clone(),
            geometry: Some(Box::new(stranger.args.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        let known = self.peers.clone();
        for number in 0.. {
            let mut hello = hello.clone();
            hello.incarnation = Incarnation::from_random(0x1_0000 + number);
            let frame = Frame { conversation: kv_core::wire::ConversationId::NONE, body: Body::Hello(hello) };
            self.nodes[node]
                .handle(self.now, Input::Frame { from: Origin(number), frame: frame.encode().unwrap() });
            while let Some(output) = self.nodes[node].poll_output() {
                if let Output::Disconnect { peer } = &output
                    && known.contains_key(&(node, *peer))
                {
                    self.peers.remove(&(node, *peer));
                    return;
                }
            }
            assert!(number < 2000, "the peer was never forgotten");
        }
    }

    /// Nothing is left in either node: no session, no attempt, no post.
    pub fn assert_empty(&mut self) {
        self.run_for(Duration::from_secs(120));
        for node in [P, D] {
            let gauges = self.nodes[node].gauges();
            let left =
                [gauges.senders, gauges.receivers, gauges.registrations, gauges.incoming, gauges.posts];
            assert_eq!(left, [0; 5], "node {node}: {gauges:?}");
            assert_eq!((gauges.draining, gauges.pages_leased), (0, 0), "node {node}: {gauges:?}");
            assert_eq!(
                (gauges.timers, gauges.lookups, gauges.failed_rooms),
                (0, 0, 0),
                "node {node}: {gauges:?}"
            );
        }
    }
}
