//! Hosts with a machine of the encoder cache and its memory, the wire between them, and a clock. Frames, copies,
//! deaths and time are in the test's hand.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::NodeConfig;
use kv_core::wire::{Body, Frame};
use kv_core::{
    ContentHash, Directions, Incarnation, Op, Origin, PageList, PeerId, Post, RankRecord, ServiceOffer, Time,
    TransferMode, TransportError, TransportOffer, WayEnd, WorkerRole, WriteFence,
};
use kv_ec::{
    Command, EC_SERVICE, EcError, EcMachine, EcPoll, EcRegion, EncoderCache, EntryGuard, Eviction,
    MachineConfig, Resource, SharedStore, Want,
};

/// Bytes of a block, unless a plan says otherwise.
pub const BLOCK: u64 = 64;
pub const SECOND: Duration = Duration::from_secs(1);
pub const MS: Duration = Duration::from_millis(1);

/// What becomes of a frame.
pub enum Fate {
    Arrives,
    /// Kept back until [`Fleet::take_held`].
    Waits,
    Lost,
    /// Other bytes arrive in its place.
    Becomes(Bytes),
}

/// A frame between two hosts.
pub struct InFlight {
    pub from: usize,
    pub to: usize,
    pub frame: Bytes,
}

impl InFlight {
    /// The same frame once more.
    pub fn again(&self) -> InFlight {
        InFlight { from: self.from, to: self.to, frame: self.frame.clone() }
    }

    pub fn body(&self) -> Body {
        Frame::decode(&self.frame).unwrap().body
    }
}

/// A data operation that the transport has taken.
#[derive(Debug)]
pub struct Taken {
    pub by: usize,
    pub other: usize,
    pub post: Post,
}

pub struct Host {
    pub machine: EcMachine,
    pub store: SharedStore,
    pub region: EcRegion,
    /// The host that each peer is.
    peers: BTreeMap<PeerId, usize>,
    polls: BTreeMap<u64, EcPoll>,
    failures: BTreeMap<u64, EcError>,
    entries: BTreeMap<u64, EntryGuard>,
}

/// The settings of a host.
pub struct Plan {
    pub blocks: u32,
    pub block_bytes: u32,
    pub machine: MachineConfig,
    pub node: Box<dyn Fn(&mut NodeConfig)>,
}

pub struct Fleet {
    /// By number; a host that has died is gone.
    pub hosts: BTreeMap<usize, Host>,
    /// What the bootstrap servers say, dead hosts included.
    records: BTreeMap<usize, RankRecord>,
    pub now: Time,
    wire: VecDeque<InFlight>,
    held: Vec<InFlight>,
    /// Decides about every frame.
    pub fate: Box<dyn FnMut(&InFlight) -> Fate>,
    /// With `true`, data operations wait in `taken` until the test carries them out.
    pub by_hand: bool,
    pub taken: Vec<Taken>,
    /// Hosts to which no way can be opened.
    pub unreachable: BTreeSet<usize>,
    /// How long after a death the last writes of the dead host may arrive.
    pub quiet_after: Duration,
    /// Ways that were opened and not closed.
    pub ways: i64,
    /// All frames so far: from, to, and length.
    pub lengths: Vec<(usize, usize, usize)>,
    sessions: u64,
    started: usize,
}

impl Fleet {
    pub fn new() -> Fleet {
        Fleet {
            hosts: BTreeMap::new(),
            records: BTreeMap::new(),
            now: Time::from_nanos(1_000_000_000),
            wire: VecDeque::new(),
            held: Vec::new(),
            fate: Box::new(|_| Fate::Arrives),
            by_hand: false,
            taken: Vec::new(),
            unreachable: BTreeSet::new(),
            quiet_after: Duration::ZERO,
            ways: 0,
            lengths: Vec::new(),
            sessions: 0,
            started: 0,
        }
    }

    // ---- hosts ----------------------------------------------------------------------------------

    pub fn host(&mut self, blocks: u32) -> usize {
        self.host_with(blocks, |_| ())
    }

    pub fn host_with(&mut self, blocks: u32, change: impl FnOnce(&mut Plan)) -> usize {
        self.started += 1;
        let number = self.started;
        let machine = MachineConfig::new("one model");
        let mut plan = Plan { blocks, block_bytes: BLOCK as u32, machine, node: Box::new(|_| ()) };
        change(&mut plan);
        let region = EcRegion::create(plan.blocks, plan.block_bytes).unwrap();
        let args = region.args(&format!("host-{number}"), 0).build().unwrap();
        let offer = TransportOffer::new("wire", Bytes::from(number.to_le_bytes().to_vec()));
        let who = (args.worker().clone(), Incarnation::from_random(number as u64));
        let service = kv_core::Service::by_content(EC_SERVICE, &plan.machine.compatibility);
        let offers = vec![ServiceOffer::kv(args.geometry()).unwrap().of_service(&service)];
        let parallel = args.geometry().parallel;
        let mut node = NodeConfig::over(args, who.1, vec![offer.clone()]);
        (plan.node)(&mut node);
        let record = RankRecord::new(who, WorkerRole::Encode, parallel, vec![offer], offers).unwrap();
        let store = SharedStore::new(EncoderCache::new(plan.blocks, plan.block_bytes, Eviction::Lru));
        let machine = EcMachine::new(plan.machine, node, store.clone());
        self.records.insert(number, record);
        let (peers, polls, failures, entries) = Default::default();
        let host = Host { machine, store, region, peers, polls, failures, entries };
        self.hosts.insert(number, host);
        number
    }

    pub fn at(&self, host: usize) -> &Host {
        &self.hosts[&host]
    }

    /// The process of a host dies: the hosts that had a way to it are told.
    pub fn kill(&mut self, dead: usize) {
        let Host { peers, .. } = self.hosts.remove(&dead).unwrap();
        self.ways -= peers.len() as i64;
        self.taken.retain(|taken| taken.by != dead);
        let end = WayEnd::Dead { quiet_after: self.quiet_after };
        for host in self.hosts.keys().copied().collect::<Vec<_>>() {
            self.end_way(host, dead, end);
        }
    }

    /// A host loses its way to another one, which lives.
    pub fn lose_way(&mut self, host: usize, to: usize) {
        self.end_way(host, to, WayEnd::Lost);
    }

    fn end_way(&mut self, host: usize, to: usize, end: WayEnd) {
        let peers = &mut self.hosts.get_mut(&host).unwrap().peers;
        let ended: Vec<PeerId> =
            peers.iter().filter(|(_, other)| **other == to).map(|(peer, _)| *peer).collect();
        peers.retain(|_, other| *other != to);
        for peer in ended {
            self.ways -= 1;
            self.input(host, Input::PeerGone { peer, end });
        }
    }

    // ---- entries and sessions -------------------------------------------------------------------

    /// An entry of so many whole blocks with its own bytes is ready at a host.
    pub fn save(&self, host: usize, seed: u64, blocks: u64) {
        let Host { store, region, .. } = self.at(host);
        let bytes = blocks * u64::from(region.block_bytes());
        let reservation = store.reserve(&hash(seed), bytes).unwrap();
        region.write(reservation.pages(), 0, &content(seed, bytes)).unwrap();
        store.commit(reservation).unwrap();
    }

    /// An entry is gone from a host, and other bytes are in its blocks.
    pub fn replace(&self, host: usize, seed: u64) {
        let Host { store, region, .. } = self.at(host);
        let pin = store.pin_guard(&hash(seed)).unwrap();
        let (list, bytes) = (pin.pages().clone(), pin.bytes());
        drop(pin);
        assert!(store.remove(&hash(seed)), "nobody may hold the entry");
        region.write(&list, 0, &vec![0xee; bytes as usize]).unwrap();
    }

    /// An entry of so many blocks of [`BLOCK`] bytes at a host.
    pub fn want(&self, seed: u64, blocks: u64, from: usize, mode: TransferMode) -> Want {
        Want::new(hash(seed), blocks * BLOCK, from.to_string()).with(|want| want.mode = Some(mode))
    }

    pub fn fetch(&mut self, host: usize, want: Want) -> u64 {
        self.sessions += 1;
        let session = kv_core::SessionId(self.sessions);
        self.input(host, Input::Command(Command::Fetch { session, want: Box::new(want) }));
        self.sessions
    }

    /// The caller drops the handle of a session.
    pub fn give_up(&mut self, host: usize, session: u64) {
        let session = kv_core::SessionId(session);
        self.input(host, Input::Command(Command::Abort { session }));
    }

    pub fn poll(&self, host: usize, session: u64) -> EcPoll {
        self.at(host).polls.get(&session).copied().unwrap_or(EcPoll::Waiting)
    }

    pub fn failure(&self, host: usize, session: u64) -> &EcError {
        &self.at(host).failures[&session]
    }

    /// The bytes of the entry that a session has got, which is unpinned.
    pub fn received(&mut self, host: usize, session: u64) -> Vec<u8> {
        let host = self.hosts.get_mut(&host).unwrap();
        let entry = host.entries.remove(&session).expect("an entry");
        let mut bytes = vec![0; entry.bytes() as usize];
        host.region.read(entry.pages(), 0, &mut bytes).unwrap();
        bytes
    }

    /// Lets time pass until a session has ended, at most for `patience`. Returns how long that took.
    pub fn end_of(&mut self, host: usize, session: u64, patience: Duration) -> Duration {
        let begun = self.now;
        while self.poll(host, session) > EcPoll::Failed && self.poll(host, session) < EcPoll::Ready {
            assert!(self.now - begun < patience, "still {} after {patience:?}", self.poll(host, session));
            self.run_for(MS);
        }
        self.now - begun
    }

    // ---- time, frames, copies -------------------------------------------------------------------

    /// Lets time pass; timers run when they are due.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let due =
                self.hosts.iter().filter_map(|(host, at)| Some((at.machine.next_timeout()?, *host))).min();
            let Some((at, host)) = due.filter(|(at, _)| *at <= end) else { break };
            self.now = self.now.max(at);
            self.input(host, Input::Timeout);
        }
        self.now = end;
    }

    pub fn input(&mut self, host: usize, input: Input<Command>) {
        self.handle(host, input);
        loop {
            if let Some(InFlight { from, to, frame }) = self.wire.pop_front() {
                self.handle(to, Input::Frame { from: Origin(from as u64), frame });
            } else if !self.by_hand && !self.taken.is_empty() {
                let taken = self.taken.remove(0);
                self.carry_out(taken);
            } else {
                return;
            }
        }
    }

    fn handle(&mut self, host: usize, input: Input<Command>) {
        let Some(at) = self.hosts.get_mut(&host) else { return };
        at.machine.handle(self.now, input);
        while let Some(output) = self.hosts.get_mut(&host).and_then(|at| at.machine.poll_output()) {
            self.output(host, output);
        }
    }

    fn output(&mut self, host: usize, output: Output<EcPoll, Resource, EcError>) {
        let now = self.now;
        let at = self.hosts.get_mut(&host).unwrap();
        match output {
            Output::Connect { peer, transport } => {
                let other = usize::from_le_bytes(transport.metadata[..].try_into().unwrap());
                let reachable = self.hosts.contains_key(&other) && !self.unreachable.contains(&other);
                let answer = match reachable {
                    true => {
                        Input::Connected { peer, directions: Directions::BOTH, fence: WriteFence::AtDeath }
                    }
                    false => Input::ConnectFailed { peer, error: TransportError::PeerGone },
                };
                if reachable {
                    self.ways += 1;
                    self.hosts.get_mut(&host).unwrap().peers.insert(peer, other);
                }
                self.handle(host, answer);
            }
            Output::Disconnect { peer } => self.ways -= i64::from(at.peers.remove(&peer).is_some()),
            Output::Send { peer, frame } => {
                let Some(&to) = at.peers.get(&peer) else { return };
                self.lengths.push((host, to, frame.len()));
                self.put_on_wire(InFlight { from: host, to, frame });
            }
            Output::Post { peer, post } => {
                self.taken.push(Taken { by: host, other: at.peers[&peer], post });
            }
            Output::Lookup { lookup, addr, query } => {
                let record = &self.records[&addr.parse().unwrap()];
                assert_eq!((query.role, &*query.service), (WorkerRole::Encode, EC_SERVICE));
                let found = Input::Found { lookup, ranks: vec![record.clone()] };
                at.machine.handle(now, found);
            }
            Output::Status { session, poll, failure } => {
                let before = at.polls.insert(session.0, poll);
                assert!(!matches!(before, Some(EcPoll::Failed | EcPoll::Ready)), "{session} ends twice");
                failure.map(|failure| at.failures.insert(session.0, *failure));
            }
            Output::Release { session, resource: Resource::Slot(entry) } => {
                entry.map(|entry| at.entries.insert(session.0, entry));
            }
            Output::Permit { .. } | Output::Revoke { .. } | Output::Cancel { .. } => {}
            other @ Output::Release { .. } => panic!("{other:?}"),
        }
    }

    fn put_on_wire(&mut self, frame: InFlight) {
        match (self.fate)(&frame) {
            Fate::Arrives => self.wire.push_back(frame),
            Fate::Waits => self.held.push(frame),
            Fate::Lost => {}
            Fate::Becomes(bytes) => self.wire.push_back(InFlight { frame: bytes, ..frame }),
        }
    }

    /// The frames that were kept back so far.
    pub fn take_held(&mut self) -> Vec<InFlight> {
        std::mem::take(&mut self.held)
    }

    /// Frames arrive that were kept back.
    pub fn deliver(&mut self, frames: Vec<InFlight>) {
        for InFlight { from, to, frame } in frames {
            self.input(to, Input::Frame { from: Origin(from as u64), frame });
        }
    }

    /// Copies the bytes of a data operation.
    pub fn copy(&self, taken: &Taken) {
        let (Some(by), Some(other)) = (self.hosts.get(&taken.by), self.hosts.get(&taken.other)) else {
            return;
        };
        for part in &taken.post.descriptors {
            let mut bytes = vec![0; part.len as usize];
            let (local, remote) = (by.region.memory(), other.region.memory());
            let (here, there) = (part.local_offset as usize, part.remote_offset as usize);
            match taken.post.op {
                Op::Write => local.read(here, &mut bytes).and_then(|()| remote.write(there, &bytes)),
                Op::Read => remote.read(there, &mut bytes).and_then(|()| local.write(here, &bytes)),
            }
            .unwrap();
        }
    }

    /// The transport says that a data operation has ended.
    pub fn ended(&mut self, taken: Taken, result: Result<(), TransportError>) {
        let Taken { by, other, post } = taken;
        if let (Ok(()), Some(frame)) = (&result, post.notify) {
            self.put_on_wire(InFlight { from: by, to: other, frame });
        }
        self.input(by, Input::Posted { post: post.id, result });
    }

    /// A data operation takes place and ends well.
    pub fn carry_out(&mut self, taken: Taken) {
        self.copy(&taken);
        self.ended(taken, Ok(()));
    }

    /// The data operations that one host has begun.
    pub fn take_of(&mut self, host: usize) -> Vec<Taken> {
        self.taken.extract_if(.., |taken| taken.by == host).collect()
    }
}

/// The hash of an entry.
pub fn hash(seed: u64) -> ContentHash {
    ContentHash::new(&format!("image-{seed}")).unwrap()
}

/// The bytes of an entry, none of which is 0xee.
pub fn content(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 13 + at / 64 + seed * 101) % 0xee) as u8).collect()
}

/// The blocks that a data operation touches at the host that posted it.
pub fn local_blocks(taken: &Taken) -> PageList {
    let blocks = taken.post.descriptors.iter().flat_map(|part| {
        let first = (part.local_offset / BLOCK) as u32;
        first..first + (part.len / BLOCK) as u32
    });
    PageList::from_pages(blocks).unwrap()
}
