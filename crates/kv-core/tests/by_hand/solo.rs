//! One node, and a peer of it whose every frame is in the test's hand.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output, Resource};
use kv_core::trace::{Event, KvWhat};
use kv_core::wire::{
    Abort, Acquire, Body, ConversationId, Delivery, Destination, Frame, Heartbeat, HeartbeatAck, Hello,
    Progress, Refused, Register, Release, VERSIONS, Welcome,
};
use kv_core::{
    Asked, Attempt, AuxIndex, CacheGroup, Cause, Geometry, Incarnation, KvArgs, KvArgsBuilder, KvPoll,
    Layout, LookupId, Origin, PageList, Pages, PeerCause, PeerId, Post, PostId, RankRecord, Region,
    RegionRole, Room, SessionId, SessionOptions, Time, TransferError, TransportError, WorkerRole,
};

/// The node that is tested.
pub const US: Incarnation = Incarnation::from_random(9);

/// One node and what it has said so far.
pub struct Solo {
    node: Node,
    pub now: Time,
    /// What the node wants in the frames of each peer, by incarnation.
    conversations: BTreeMap<u64, ConversationId>,
    /// What it wanted before.
    former: BTreeMap<u64, ConversationId>,
    /// The number in the last welcome.
    welcomed: Option<ConversationId>,
    /// The last hello to each peer that was not answered, by incarnation.
    hellos: BTreeMap<u64, Hello>,
    /// All outputs of the last input.
    pub said: Vec<Output>,
    polls: BTreeMap<SessionId, KvPoll>,
    failures: BTreeMap<SessionId, TransferError>,
    released: BTreeMap<SessionId, Vec<PageList>>,
    posts: Vec<Post>,
    sessions: u64,
}

/// The cache group that every node has.
pub const SLOTS: u16 = 0;
/// One that a request may lack.
pub const OPTIONAL: u16 = 1;

pub fn args(engine: &str, num_pages: u32) -> KvArgs {
    with_state(KvArgs::builder(engine, 0).pages(num_pages, 16))
        .region(Region::dram(RegionRole::Kv, 0x100_0000, u64::from(num_pages) * 64, 64))
        .max_inflight(4)
        .build()
        .unwrap()
}

/// Aux rows and cache groups, on every node alike.
fn with_state(args: KvArgsBuilder) -> KvArgsBuilder {
    let groups = vec![CacheGroup::slots(1, 1), CacheGroup::pages(4, 1, 1).optional()];
    args.region(Region::dram(RegionRole::Aux, 0x3_0000, 4 * 16, 16))
        .region(Region::dram(RegionRole::State, 0x4_0000, 8 * 32, 32).group(SLOTS))
        .region(Region::dram(RegionRole::State, 0x5_0000, 6 * 48, 48).group(OPTIONAL))
        .layout(Layout::default().with(|layout| layout.groups = groups))
}

pub fn list(pages: &[u32]) -> PageList {
    PageList::from_pages(pages.iter().copied()).unwrap()
}

/// A registration of one request.
pub fn register(attempt: u64, room: Room, pages: &[u32]) -> Register {
    let (total_pages, pages, aux, groups) = (pages.len() as u32, list(pages), None, Default::default());
    let (first_page, aux_here) = (0, true);
    // The answer to what the first welcome asks.
    let (ask, permit_ms) = (1, 10_000);
    let to = Destination { pages, first_page, total_pages, aux, aux_here, groups, ask, permit_ms };
    delivering(attempt, room, Delivery::Write(to))
}

fn delivering(attempt: u64, room: Room, delivery: Delivery) -> Register {
    Register {
        attempt: Attempt(attempt),
        low_watermark: Attempt(0),
        room,
        ranks: 1,
        ttl_ms: 60_000,
        delivery,
    }
}

/// The same registration with another destination.
pub fn with(register: Register, change: impl FnOnce(&mut Destination)) -> Register {
    let mut to = destination(&register);
    change(&mut to);
    Register { delivery: Delivery::Write(to), ..register }
}

/// Where the pages of a registration are to be written.
pub fn destination(register: &Register) -> Destination {
    match &register.delivery {
        Delivery::Write(to) => to.clone(),
        Delivery::Read(acquire) => panic!("{acquire:?}"),
    }
}

/// An acquire message of one request.
pub fn acquire(attempt: u64, room: Room, lease_id: Option<SessionId>, number: u64) -> Register {
    delivering(attempt, room, Delivery::Read(Acquire { lease_id, number }))
}

/// A heartbeat that asks for nothing but an answer.
pub fn heartbeat() -> Heartbeat {
    Heartbeat { number: 1, low_watermark: Attempt(0), leases: vec![], asked: vec![], writes: false }
}

/// A heartbeat that asks about attempts that have been quiet.
pub fn asks_about(asked: &[(u64, u32)]) -> Body {
    Body::Heartbeat(Heartbeat { asked: asked.to_vec(), ..heartbeat() })
}

/// A heartbeat that asks whether its speaker may write.
pub fn asks_to_write(number: u64) -> Body {
    Body::Heartbeat(Heartbeat { number, writes: true, ..heartbeat() })
}

/// The answer to a heartbeat that asks for nothing.
pub fn ack() -> HeartbeatAck {
    HeartbeatAck { number: 1, low_watermark: Attempt(0), lease_ms: 0, leases: vec![], permit_ms: 0 }
}

/// A sign of life.
pub fn sign_of_life() -> Body {
    Body::HeartbeatAck(ack())
}

/// The answer to a question of the node's whether it may write.
pub fn permits(number: u64, permit_ms: u64) -> Body {
    Body::HeartbeatAck(HeartbeatAck { number, permit_ms, ..ack() })
}

/// One part is in place.
pub fn done(attempt: u64, part: u32, total: Option<u32>, skipped: Vec<u16>) -> Body {
    Body::Progress(Progress { attempt: Attempt(attempt), done: vec![(part, 1)], total, skipped })
}

pub fn abort(attempt: u64, room: Room) -> Body {
    abort_for(attempt, room, PeerCause::Aborted)
}

pub fn abort_for(attempt: u64, room: Room, cause: PeerCause) -> Body {
    Body::Abort(Abort {
        failed_ms_ago: None,
        low_watermark: Attempt(0),
        attempt: Attempt(attempt),
        room,
        lease_id: None,
        cause,
    })
}

pub fn release(attempt: u64, low_watermark: u64) -> Body {
    Body::Release(Release {
        low_watermark: Attempt(low_watermark),
        attempts: vec![(attempt, 1)],
        answer: false,
    })
}

/// A hello of the peer with this incarnation.
pub fn hello(incarnation: u64, conversation: ConversationId) -> Hello {
    let args = args(&format!("peer-{incarnation}"), 16);
    Hello {
        versions: VERSIONS,
        to: US,
        worker: args.worker().clone(),
        incarnation: Incarnation::from_random(incarnation),
        conversation,
        nonce: 1,
        transport: "test".to_owned(),
        metadata: Bytes::from_static(b"peer"),
        geometry: Some(Box::new(args.geometry().clone())),
        suffixed: false,
        service: "kv".to_owned(),
    }
}

impl Solo {
    pub fn new(change: impl FnOnce(&mut NodeConfig)) -> Solo {
        let mut config = NodeConfig::new(args("us", 32), US, "test", Bytes::from_static(b"us"));
        change(&mut config);
        Solo {
            node: Node::new(config),
            now: Time::from_nanos(1_000_000_000),
            conversations: BTreeMap::new(),
            former: BTreeMap::new(),
            welcomed: None,
            hellos: BTreeMap::new(),
            said: Vec::new(),
            polls: BTreeMap::new(),
            failures: BTreeMap::new(),
            released: BTreeMap::new(),
            posts: Vec::new(),
            sessions: 0,
        }
    }

    /// A node that peer 1 has greeted.
    pub fn serving(change: impl FnOnce(&mut NodeConfig)) -> Solo {
        let mut solo = Solo::new(change);
        solo.greet(1);
        solo
    }

    /// The same with more pages.
    pub fn serving_pages(num_pages: u32) -> Solo {
        let region = Region::dram(RegionRole::Kv, 0x100_0000, u64::from(num_pages) * 64, 64);
        let args = with_state(KvArgs::builder("us", 0).pages(num_pages, 16).region(region));
        Solo::serving(|config| config.args = args.build().unwrap())
    }

    /// A receiving session whose one source, peer 1, is up.
    pub fn receiving() -> (Solo, SessionId) {
        let mut solo = Solo::new(|_| {});
        let session = solo.open_receiver(Room::Number(1), None);
        let lookup = solo.lookups()[0].0;
        solo.found(lookup, vec![record(1)]);
        solo.welcome(1, 1);
        (solo, session)
    }

    /// From now on the node tells what happens in it.
    pub fn listen(&mut self) {
        self.node.listen(true);
    }

    /// What it has told since the last time.
    pub fn told(&mut self) -> Vec<Event<KvWhat>> {
        std::iter::from_fn(|| self.node.poll_trace()).collect()
    }

    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The next request by content that the service has not seen.
    pub fn asked(&mut self) -> Option<Asked> {
        self.node.poll_asked()
    }

    /// The service refuses a request by content.
    pub fn refuse(&mut self, asked: &Asked, cause: PeerCause) {
        self.node.refuse_asked(self.now, asked, cause);
        self.carry_out();
    }

    pub fn input(&mut self, input: Input) {
        self.node.handle(self.now, input);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        self.said = std::iter::from_fn(|| self.node.poll_output()).collect();
        for output in &self.said {
            match output {
                // One in another version is not for these.
                Output::Send { frame, .. } => match Frame::decode(frame).map(|frame| frame.body) {
                    Ok(Body::Welcome(welcome)) => self.welcomed = Some(welcome.conversation),
                    Ok(Body::Hello(hello)) => drop(self.hellos.insert(hello.to.get(), hello)),
                    _ => {}
                },
                Output::Post { post, .. } => self.posts.push(post.clone()),
                Output::Status { session, poll, failure } => {
                    let before = self.polls.insert(*session, *poll);
                    assert!(before.is_none_or(|before| !before.is_terminal()), "{session} ends twice");
                    if let Some(failure) = failure {
                        self.failures.insert(*session, (**failure).clone());
                    }
                }
                Output::Release { session, resource: Resource::Pages(pages) } => {
                    assert!(self.polls.get(session).is_none_or(|poll| poll.is_terminal()));
                    self.released.entry(*session).or_default().push(pages.list().clone());
                }
                _ => {}
            }
        }
    }

    /// The frames among the last outputs.
    pub fn frames(&self) -> Vec<Body> {
        let frame = |output: &Output| match output {
            Output::Send { frame, .. } => Some(Frame::decode(frame).unwrap().body),
            _ => None,
        };
        self.said.iter().filter_map(frame).collect()
    }

    /// The frames among the last outputs, and to whom they go.
    pub fn frames_to(&self) -> Vec<(PeerId, Body)> {
        let frame = |output: &Output| match output {
            Output::Send { peer, frame } => Some((*peer, Frame::decode(frame).unwrap().body)),
            _ => None,
        };
        self.said.iter().filter_map(frame).collect()
    }

    /// The one frame among the last outputs.
    pub fn answer(&self) -> Body {
        let frames = self.frames();
        assert_eq!(frames.len(), 1, "{frames:?}");
        frames[0].clone()
    }

    /// The lookups among the last outputs, with what they ask.
    pub fn lookups(&self) -> Vec<(LookupId, kv_core::Replica)> {
        let lookup = |output: &Output| match output {
            Output::Lookup { lookup, query, .. } => Some((*lookup, query.replica)),
            _ => None,
        };
        self.said.iter().filter_map(lookup).collect()
    }

    /// The peers that are disconnected among the last outputs.
    pub fn disconnected(&self) -> Vec<PeerId> {
        let gone = |output: &Output| match output {
            Output::Disconnect { peer } => Some(*peer),
            _ => None,
        };
        self.said.iter().filter_map(gone).collect()
    }

    /// The posts that the last outputs cancel.
    pub fn cancelled(&self) -> Vec<PostId> {
        let cancel = |output: &Output| match output {
            Output::Cancel { post } => Some(*post),
            _ => None,
        };
        self.said.iter().filter_map(cancel).collect()
    }

    /// A peer says hello, and its frames follow the answer.
    pub fn greet(&mut self, incarnation: u64) {
        self.greet_with(hello(incarnation, ConversationId::new(1, incarnation as u32)));
    }

    /// The same with a hello of the test's own.
    pub fn greet_with(&mut self, hello: Hello) {
        let incarnation = hello.incarnation.get();
        self.hello(hello);
        if let Some(conversation) = self.welcomed.take() {
            self.conversations.insert(incarnation, conversation);
        }
    }

    /// A peer says hello in a new conversation.
    pub fn greet_again(&mut self, incarnation: u64, conversation: ConversationId) {
        self.former.insert(incarnation, self.conversations[&incarnation]);
        self.hello(hello(incarnation, conversation));
        let conversation = self.welcomed.take().expect("a welcome");
        self.conversations.insert(incarnation, conversation);
    }

    /// The last hello to the peer; its answers go under the number in it.
    pub fn last_hello(&mut self, incarnation: u64) -> Hello {
        let hello = self.hellos[&incarnation].clone();
        self.conversations.insert(incarnation, hello.conversation);
        hello
    }

    /// What the node wants in the peer's frames.
    pub fn conversation(&self, incarnation: u64) -> ConversationId {
        self.conversations[&incarnation]
    }

    /// What it wanted before [`Solo::greet_again`].
    pub fn former_conversation(&self, incarnation: u64) -> ConversationId {
        self.former[&incarnation]
    }

    /// A frame of the conversation before [`Solo::greet_again`].
    pub fn says_under_old_conversation(&mut self, incarnation: u64, body: Body) {
        let frame = Frame { conversation: self.former[&incarnation], body };
        self.frame_from(incarnation, frame);
    }

    pub fn hello(&mut self, hello: Hello) {
        let incarnation = hello.incarnation.get();
        self.frame_from(incarnation, Frame { conversation: ConversationId::NONE, body: Body::Hello(hello) });
    }

    /// A frame on the connection of a peer: each peer has one of its own.
    pub fn frame_from(&mut self, incarnation: u64, frame: Frame) {
        self.input(Input::Frame { from: Origin(incarnation), frame: frame.encode().unwrap() });
    }

    /// The last hello to the peer is answered by the peer, which draws `conversation`.
    pub fn welcome(&mut self, incarnation: u64, conversation: u32) {
        let hello = self.hellos.remove(&incarnation).expect("a hello was said");
        self.conversations.insert(incarnation, hello.conversation);
        self.welcome_to(&hello, incarnation, conversation);
    }

    /// This hello is answered by the peer, which draws `conversation`.
    pub fn welcome_to(&mut self, hello: &Hello, incarnation: u64, conversation: u32) {
        let conversation = ConversationId::new(conversation, incarnation as u32);
        let welcome = Welcome { versions: VERSIONS, nonce: hello.nonce, conversation, ask: 1 };
        let frame = Frame { conversation: hello.conversation, body: Body::Welcome(welcome) };
        self.frame_from(incarnation, frame);
    }

    /// This hello is answered by another incarnation than the one that it is for, on a connection of its own.
    pub fn another_life_answers(&mut self, hello: &Hello) {
        let (versions, nonce, conversation) = (VERSIONS, hello.nonce, ConversationId::NONE);
        let refused = Refused { versions, nonce, conversation, cause: PeerCause::Unknown };
        let frame = Frame { conversation: hello.conversation, body: Body::Refused(refused) };
        self.frame_from(66, frame);
    }

    /// The peer says something.
    pub fn says(&mut self, incarnation: u64, body: Body) {
        let frame = Frame { conversation: self.conversations[&incarnation], body };
        self.frame_from(incarnation, frame);
    }

    pub fn found(&mut self, lookup: LookupId, ranks: Vec<RankRecord>) {
        self.input(Input::Found { lookup, ranks });
    }

    fn session(&mut self) -> SessionId {
        self.sessions += 1;
        SessionId(self.sessions)
    }

    pub fn open_sender(&mut self, room: Room, receivers: u32) -> SessionId {
        self.open_sender_with(room, receivers, SessionOptions::default())
    }

    pub fn open_sender_with(&mut self, room: Room, receivers: u32, options: SessionOptions) -> SessionId {
        let (session, options) = (self.session(), Box::new(options));
        self.input(Input::Command(Command::OpenSender { session, room, receivers, options }));
        session
    }

    /// Sends all pages at once.
    pub fn send_list(&mut self, session: SessionId, pages: PageList) {
        let (num_pages, aux) = (pages.len(), None);
        self.input(Input::Command(Command::InitSender { session, num_pages, aux }));
        let chunk = Pages::unpooled(pages).unwrap();
        self.input(Input::Command(Command::Send { session, chunk }));
    }

    pub fn send(&mut self, session: SessionId, num_pages: usize, chunks: &[&[u32]]) {
        self.input(Input::Command(Command::InitSender { session, num_pages, aux: None }));
        for chunk in chunks {
            let chunk = Pages::unpooled(list(chunk)).unwrap();
            self.input(Input::Command(Command::Send { session, chunk }));
        }
    }

    pub fn open_receiver(&mut self, room: Room, prefill_dp_rank: Option<u32>) -> SessionId {
        self.open_receiver_with(
            room,
            SessionOptions::default().with(|options| options.prefill_dp_rank = prefill_dp_rank),
        )
    }

    pub fn open_receiver_with(&mut self, room: Room, options: SessionOptions) -> SessionId {
        let (session, options) = (self.session(), Box::new(options));
        let bootstrap_addr = "bootstrap:1".to_owned();
        let open = Command::OpenReceiver { session, room, bootstrap_addr, options };
        self.input(Input::Command(open));
        session
    }

    pub fn init_receiver(&mut self, session: SessionId, pages: &[u32], aux: Option<u32>) {
        let pages = Pages::unpooled(list(pages)).unwrap();
        self.input(Input::Command(Command::InitReceiver { session, pages, aux: aux.map(AuxIndex) }));
    }

    pub fn abort(&mut self, session: SessionId) {
        self.input(Input::Command(Command::Abort { session }));
    }

    pub fn poll(&self, session: SessionId) -> KvPoll {
        self.polls[&session]
    }

    pub fn cause(&self, session: SessionId) -> Cause {
        self.failures[&session].cause.clone()
    }

    pub fn failure(&self, session: SessionId) -> &TransferError {
        &self.failures[&session]
    }

    pub fn failure_count(&self, session: SessionId) -> usize {
        usize::from(self.failures.contains_key(&session))
    }

    pub fn released(&self, session: SessionId) -> Vec<PageList> {
        self.released.get(&session).cloned().unwrap_or_default()
    }

    pub fn take_posts(&mut self) -> Vec<Post> {
        std::mem::take(&mut self.posts)
    }

    pub fn posted(&mut self, post: PostId, result: Result<(), TransportError>) {
        self.input(Input::Posted { post, result });
    }

    /// Runs the next timeout, which must come within `time`.
    pub fn run_until_said(&mut self, time: Duration) {
        let next = self.node.next_timeout().expect("a timer is set");
        assert!(next <= self.now + time, "the next timer is at {next:?}");
        self.now = self.now.max(next);
        self.input(Input::Timeout);
    }

    /// Lets time pass without a timeout: the process gets no processor.
    pub fn sleep(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Lets time pass; what is said at each timeout is returned.
    pub fn run_for(&mut self, time: Duration) -> Vec<(Duration, Body)> {
        let (start, end) = (self.now, self.now + time);
        let mut frames = Vec::new();
        while let Some(next) = self.node.next_timeout().filter(|&next| next <= end) {
            self.now = self.now.max(next);
            self.input(Input::Timeout);
            let passed = self.now - start;
            frames.extend(self.frames().into_iter().map(|body| (passed, body)));
        }
        self.now = end;
        frames
    }
}

/// What the bootstrap server says of a peer.
pub fn record(incarnation: u64) -> RankRecord {
    record_with(incarnation, args(&format!("peer-{incarnation}"), 16).geometry())
}

/// The same of a peer with another cache.
pub fn record_with(incarnation: u64, geometry: &Geometry) -> RankRecord {
    let worker = args(&format!("peer-{incarnation}"), 16).worker().clone();
    let who = (worker, Incarnation::from_random(incarnation));
    RankRecord::serving_kv(who, WorkerRole::Prefill, ("test", Bytes::from_static(b"peer")), geometry).unwrap()
}
