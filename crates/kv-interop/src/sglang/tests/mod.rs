//! A machine with scripted inputs: what SGLang's workers say, what the transport reports, and the time.

mod hostile;
mod looking;
mod phases;
mod receiving;
mod refusals;
mod sending;
mod stale;
mod tracing;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output, SessionResource};
use kv_core::proto::{Command, Resource};
use kv_core::{
    AuxIndex, Directions, Incarnation, KvArgs, KvPoll, LookupId, MemoryKind, PageList, PagePool, Pages,
    Parallel, PeerId, Post, PostId, Quarantine, RankQuery, RankRecord, Region, RegionRole, Room,
    ServiceOffer, SessionId, SessionOptions, Time, TransferError, WayEnd, WorkerId, WorkerRole, WriteFence,
};

use super::config::SglangAgent;
use super::machine::SglangMachine;
use super::*;
use crate::gauges::{Ignored, IgnoredGauges};
use crate::message::{Incoming, Message, Way};

/// The address and port of the PULL socket under test.
const PULL: (&str, u16) = ("10.0.0.7", 4321);
const BOOTSTRAP: &str = "10.0.0.1:8998";
const SEED: u64 = 32;
/// The number of the first abort with that seed.
const GENERATION: &str = "17";

struct Rig {
    machine: SglangMachine,
    gauges: IgnoredGauges,
    now: Time,
    pool: PagePool,
    /// The rooms that the aux rows hold.
    rows: Arc<Mutex<BTreeMap<u32, u64>>>,
    /// What the machine has asked for since the test looked.
    ways: Vec<(PeerId, Way)>,
    said: Vec<(PeerId, Vec<String>)>,
    lookups: Vec<(LookupId, RankQuery)>,
    disconnected: Vec<PeerId>,
    posts: Vec<(PeerId, Post)>,
    cancelled: Vec<PostId>,
    permits: Vec<PeerId>,
    /// What each session was told, and how many pages came back.
    states: BTreeMap<SessionId, Vec<KvPoll>>,
    failures: BTreeMap<SessionId, TransferError>,
    back: BTreeMap<SessionId, usize>,
}

/// Arguments of a rank with the aux buffers of SGLang: one layer, 16 tokens a page, 64 pages.
fn args(place: Parallel) -> KvArgs {
    args_in(MemoryKind::Dram, place)
}

fn args_in(memory: MemoryKind, place: Parallel) -> KvArgs {
    let kv = |at| Region::dram(RegionRole::Kv, at, 64 * 64, 64).memory(memory, 0);
    let mut args = KvArgs::builder("ours", place.tp_rank).pages(64, 16).dtype("f16").parallel(place);
    args = args.region(kv(0x1_0000)).region(kv(0x2_0000));
    for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
        args = args.region(Region::dram(RegionRole::Aux, 0x10_0000 + buffer * 0x1_0000, 8 * len, len));
    }
    args.build().unwrap()
}

fn tp(tp_size: u32, tp_rank: u32) -> Parallel {
    Parallel::default().with(|place| (place.tp_size, place.tp_rank) = (tp_size, tp_rank))
}

/// The agent of this worker.
fn agent() -> SglangAgent {
    SglangAgent {
        name: "agent-1".to_owned(),
        metadata: Bytes::from_static(b"nixlSerDes|blob"),
        pull: (PULL.0.to_owned(), PULL.1),
    }
}

impl Rig {
    fn decode(args: &KvArgs) -> Rig {
        Rig::new(args, WorkerRole::Decode)
    }

    fn new(args: &KvArgs, role: WorkerRole) -> Rig {
        let rows: Arc<Mutex<BTreeMap<u32, u64>>> = Arc::default();
        let memory = Arc::clone(&rows);
        let gauges = IgnoredGauges::default();
        let config = SglangConfig::new(role).with(|config| {
            (config.gauges, config.seed) = (gauges.clone(), Some(SEED));
            config.aux_rooms =
                Some(Box::new(move |row: AuxIndex| *memory.lock().unwrap().get(&row.0).unwrap_or(&0)));
        });
        Rig {
            machine: SglangMachine::new(args, config, agent()).unwrap(),
            gauges,
            now: Time::ZERO + Duration::from_secs(1),
            pool: PagePool::new(64),
            rows,
            ways: Vec::new(),
            said: Vec::new(),
            lookups: Vec::new(),
            disconnected: Vec::new(),
            posts: Vec::new(),
            cancelled: Vec::new(),
            permits: Vec::new(),
            states: BTreeMap::new(),
            failures: BTreeMap::new(),
            back: BTreeMap::new(),
        }
    }

    fn input(&mut self, input: Input<Command>) {
        self.machine.handle(self.now, input);
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Connect { peer, transport } => self.ways.push((peer, Way::of(&transport).unwrap())),
                Output::Send { peer, frame } => {
                    let text = |part: &Bytes| String::from_utf8_lossy(part).into_owned();
                    self.said.push((peer, Message::decode(&frame).unwrap().0.iter().map(text).collect()));
                }
                Output::Lookup { lookup, addr, query } => {
                    assert_eq!(addr, BOOTSTRAP);
                    self.lookups.push((lookup, query));
                }
                Output::Disconnect { peer } => self.disconnected.push(peer),
                Output::Status { session, poll, failure } => {
                    let states = self.states.entry(session).or_default();
                    assert!(!states.iter().any(|state| state.is_terminal()), "a session ends once");
                    states.push(poll);
                    self.failures.extend(failure.map(|failure| (session, *failure)));
                }
                Output::Release { session, resource } => {
                    let pages = resource.amounts().kind(Resource::PAGES);
                    *self.back.entry(session).or_default() += pages;
                    let Resource::Pages(pages) = resource else { continue };
                    self.pool.release(pages).unwrap();
                }
                Output::Post { peer, post } => self.posts.push((peer, post)),
                Output::Cancel { post } => self.cancelled.push(post),
                Output::Permit { peer, until } => {
                    assert_eq!(until, Time::MAX);
                    self.permits.push(peer);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Lets time pass, with a timeout whenever the machine asks for one.
    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.machine.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.input(Input::Timeout);
        }
        self.now = until;
    }

    fn pages(&mut self, pages: &[u32]) -> Pages {
        self.pool.adopt(PageList::from_pages(pages.iter().copied()).unwrap()).unwrap()
    }

    fn open(&mut self, session: u64, room: u64) -> SessionId {
        self.open_with(session, room, SessionOptions::default())
    }

    fn open_with(&mut self, session: u64, room: u64, options: SessionOptions) -> SessionId {
        let (session, room) = (SessionId(session), Room::Number(room));
        let (bootstrap_addr, options) = (BOOTSTRAP.to_owned(), Box::new(options));
        self.input(Input::Command(Command::OpenReceiver { session, room, bootstrap_addr, options }));
        session
    }

    fn init(&mut self, session: SessionId, pages: &[u32], aux: u32) {
        let (pages, aux) = (self.pages(pages), Some(AuxIndex(aux)));
        self.input(Input::Command(Command::InitReceiver { session, pages, aux }));
    }

    /// Answers the only lookup with these ranks.
    fn answer(&mut self, ranks: Vec<RankRecord>) {
        let (lookup, query) = self.lookups.remove(0);
        assert_eq!((query.service.as_str(), query.role), ("sglang", WorkerRole::Prefill));
        assert!(self.lookups.is_empty(), "one lookup at a time for each address");
        self.input(Input::Found { lookup, ranks });
    }

    /// Reports all ways as open; the peers.
    fn connect(&mut self) -> Vec<(PeerId, String)> {
        let ways = std::mem::take(&mut self.ways);
        let address = |(peer, way): (PeerId, Way)| match way {
            Way::Push { addr } => (peer, addr),
            other => panic!("{other:?}"),
        };
        let ways: Vec<_> = ways.into_iter().map(address).collect();
        for (peer, _) in &ways {
            let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
            self.input(Input::Connected { peer: *peer, directions, fence });
        }
        ways
    }

    /// What the machine has said since the last look.
    fn said(&mut self) -> Vec<(PeerId, Vec<String>)> {
        std::mem::take(&mut self.said)
    }

    /// A message at the PULL socket.
    fn hear(&mut self, parts: &[&str]) {
        let message = Message(parts.iter().map(|part| Bytes::copy_from_slice(part.as_bytes())).collect());
        let frame = Incoming::Message { peer: None, message }.encode();
        self.input(Input::Frame { from: kv_core::Origin(1), frame });
    }

    fn gone(&mut self, peer: PeerId, end: WayEnd) {
        self.input(Input::PeerGone { peer, end });
    }

    fn abort(&mut self, session: SessionId) {
        self.input(Input::Command(Command::Abort { session }));
    }

    /// The states of a session, as their names.
    fn states(&self, session: SessionId) -> String {
        let states = self.states.get(&session).into_iter().flatten().map(ToString::to_string);
        states.collect::<Vec<_>>().join(" ")
    }

    fn cause(&self, session: SessionId) -> String {
        self.failures.get(&session).map(|error| error.cause.to_string()).unwrap_or_default()
    }

    fn back(&self, session: SessionId) -> Option<usize> {
        self.back.get(&session).copied()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        self.machine.quarantine()
    }
}

/// The record of a prefill rank at `10.0.0.2`, with these fields of `PUT /route` added or replaced.
fn rank(place: Parallel, port: u16, life: u64, fields: serde_json::Value) -> RankRecord {
    let mut route = serde_json::json!({
        "attn_tp_size": place.tp_size, "attn_tp_rank": place.tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": place.dp_size, "attn_dp_rank": place.dp_rank, "pp_size": place.pp_size,
        "pp_rank": place.pp_rank, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.2",
        "rank_port": port, "page_size": 16, "kv_cache_dtype": "torch.float16"
    });
    route.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap());
    let (service, compatibility) = ("sglang".to_owned(), String::new());
    let data = Bytes::from(route.to_string());
    let offer = ServiceOffer { service, min: 1, max: 1, compatibility, data };
    let worker = WorkerId { engine: kv_core::EngineId::new("theirs").unwrap(), rank: place.tp_rank };
    let who = (worker, Incarnation::from_random(life));
    RankRecord::new(who, WorkerRole::Prefill, place, Vec::new(), vec![offer]).unwrap()
}

fn plain() -> serde_json::Value {
    serde_json::json!({})
}
