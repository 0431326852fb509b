//! One scheduler, three protocols: the same loop over the queues of a prefill and a decode worker serves requests
//! by the native protocol, by vLLM's (pull and push) and by SGLang's. Only how the workers start and what a router
//! carries differ.
#![cfg(feature = "interop")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_conformance::Random;
use kv_transfer::allocator::RunAllocator;
use kv_transfer::consensus::SingleRank;
use kv_transfer::interop::sglang::{self, AUX_ITEM_LENS, SglangConfig};
use kv_transfer::interop::vllm::{self, VllmConfig};
use kv_transfer::interop::{ChannelConfig, InteropTransport, SideChannel};
use kv_transfer::nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::prelude::*;
use kv_transfer::queue::{
    AdmissionRule, AuxMemory, DecodeConfig, DecodeQueues, Demand, Incoming, Outgoing, PrefillConfig,
    PrefillPolicy, PrefillQueues, RequestError, aux_tag,
};
use kv_transfer::{AuxIndex, Cause, Change, Holds, Layout, Lease, Manager, TransferMode, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{PATIENCE, until};

const PAGES: u32 = 64;
const PAGE_SIZE: u32 = 16;
const LAYERS: usize = 3;
/// Keys and values of one page of one layer: 2 heads of 8 elements of 2 bytes.
const PIECE: usize = 2 * 2 * 8 * 2 * PAGE_SIZE as usize;
const ROWS: u32 = 8;
const LEASE: Duration = Duration::from_secs(6);
/// The aux buffer that holds the room.
const ROOM: usize = 9;

/// A protocol: how its workers start, and what its routers carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    Native,
    Vllm(TransferMode),
    Sglang,
}

impl Dialect {
    fn mode(self) -> TransferMode {
        if let Dialect::Vllm(mode) = self { mode } else { TransferMode::Push }
    }

    /// The lengths of the aux buffers' rows; vLLM has no aux buffers.
    fn aux(self) -> &'static [u64] {
        if matches!(self, Dialect::Vllm(_)) { &[] } else { &AUX_ITEM_LENS }
    }

    fn room(self, number: usize) -> Room {
        match self {
            Dialect::Vllm(_) => Room::request(&format!("cmpl-{number}-0-{number:08x}")).unwrap(),
            _ => Room::Number(1000 + number as u64),
        }
    }
}

/// One side: a worker, its memory, and where the other side's sessions find the worker.
struct Side {
    worker: Worker,
    manager: Manager,
    memory: Arc<HostMemory>,
    addr: String,
    /// Answers vLLM's handshakes while the side lives.
    side_channel: Option<SideChannel>,
    dialect: Dialect,
}

fn nixl() -> Option<Nixl> {
    kv_conformance::needed("NIXL", Nixl::load(&Search::default()))
}

/// Bytes of the KV regions; the aux buffers lie behind them.
const KV_BYTES: usize = LAYERS * PIECE * PAGES as usize;

fn aux_at(dialect: Dialect, buffer: usize, row: u32) -> usize {
    let before: u64 = dialect.aux()[..buffer].iter().map(|len| len * u64::from(ROWS)).sum();
    KV_BYTES + (before + dialect.aux()[buffer] * u64::from(row)) as usize
}

fn args(dialect: Dialect, engine: &str, memory: &HostMemory) -> KvArgs {
    let (at, piece) = (memory.addr(), PIECE as u64);
    let mut args = KvArgs::builder(engine, 0).pages(PAGES, PAGE_SIZE).heads(2, 8).dtype("bf16");
    args = args.transfer_mode(dialect.mode()).num_receivers(1);
    // Keys and values of a layer take as much room together as apart. SGLang keeps all keys before all values.
    if dialect == Dialect::Sglang {
        for half in 0..2 * LAYERS {
            let holds = if half < LAYERS { Holds::Key } else { Holds::Value };
            let (addr, len) = (at + half as u64 * piece / 2 * u64::from(PAGES), piece / 2);
            let region = Region::dram(RegionRole::Kv, addr, len * u64::from(PAGES), len);
            args = args.region(region.layer((half % LAYERS) as u32).holds(holds));
        }
    } else {
        for layer in 0..LAYERS {
            let addr = at + layer as u64 * piece * u64::from(PAGES);
            let region = Region::dram(RegionRole::Kv, addr, piece * u64::from(PAGES), piece);
            args = args.region(region.layer(layer as u32).holds(Holds::KeyValue));
        }
        args = args.layout(Layout::default().with(|layout| layout.axes = layout::HND_PACKED));
    }
    for (buffer, len) in dialect.aux().iter().enumerate() {
        let addr = at + aux_at(dialect, buffer, 0) as u64;
        args = args.region(Region::dram(RegionRole::Aux, addr, len * u64::from(ROWS), *len));
    }
    args.build().unwrap()
}

fn start(nixl: &Nixl, dialect: Dialect, role: WorkerRole, server: &str) -> Side {
    let aux: u64 = dialect.aux().iter().sum();
    let memory = Arc::new(HostMemory::new(KV_BYTES + (aux * u64::from(ROWS)) as usize).unwrap());
    let config = NixlConfig::default().with(|config| {
        config.foreign_bytes = 16 << 20;
        config.uuid_name = dialect != Dialect::Native;
    });
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    transport.add_memory(&memory).unwrap();
    let args = args(dialect, &format!("{role:?}"), &memory);
    let client = || Box::new(HttpBootstrapClient::new(ClientConfig::default()).unwrap());
    let (mut addr, mut side_channel) = (server.to_owned(), None);
    let worker = match dialect {
        Dialect::Native => {
            let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.clone()));
            Worker::start(config, transport, client()).unwrap()
        }
        Dialect::Vllm(_) => {
            let channel = SideChannel::bind("127.0.0.1:0").unwrap();
            addr = channel.local_addr().to_string();
            let transport = InteropTransport::new(transport, ChannelConfig::default()).unwrap();
            // No receiver of vLLM's tells a writer that it gives up: the lease of a sender ends by itself.
            let config = VllmConfig::default().with(|config| config.timing.kv_lease_duration = LEASE);
            let worker = vllm::start(config, args, transport, Some(&channel)).unwrap();
            side_channel = Some(channel);
            worker
        }
        Dialect::Sglang => {
            let listen =
                ChannelConfig::default().with(|config| config.listen = Some("127.0.0.1:0".to_owned()));
            let transport = InteropTransport::new(transport, listen).unwrap();
            let rows = Arc::clone(&memory);
            let config = SglangConfig::new(role).with(|config| {
                config.bootstrap = Some(addr.clone());
                config.aux_rooms = Some(Box::new(move |row: AuxIndex| {
                    let mut room = [0; 8];
                    rows.read(aux_at(Dialect::Sglang, ROOM, row.0), &mut room).unwrap();
                    u64::from_le_bytes(room)
                }));
            });
            sglang::start(config, args, transport, client()).unwrap()
        }
    };
    Side { manager: worker.manager(), worker, memory, addr, side_channel, dialect }
}

/// One byte of a request's KV.
fn content(request: usize, position: usize, layer: usize, at: usize) -> u8 {
    (request * 31 + position * 7 + layer * 13 + at * 3) as u8
}

impl Side {
    /// The places in memory of one page of one layer.
    fn places(&self, page: u32, layer: usize) -> Vec<(usize, usize)> {
        let half = PIECE / 2;
        let in_region =
            |region: usize, len: usize| (region * len * PAGES as usize + page as usize * len, len);
        match self.dialect {
            Dialect::Sglang => vec![in_region(layer, half), in_region(LAYERS + layer, half)],
            _ => vec![in_region(layer, PIECE)],
        }
    }

    fn write_page(&self, page: u32, request: usize, position: usize) {
        for layer in 0..LAYERS {
            let mut at = 0..;
            for (place, len) in self.places(page, layer) {
                let bytes: Vec<u8> =
                    at.by_ref().take(len).map(|at| content(request, position, layer, at)).collect();
                self.memory.write(place, &bytes).unwrap();
            }
        }
    }

    /// How many bytes of a page differ from the request's.
    fn wrong(&self, page: u32, request: usize, position: usize) -> usize {
        let (mut wrong, mut bytes) = (0, vec![0; PIECE]);
        for layer in 0..LAYERS {
            let mut at = 0_usize;
            for (place, len) in self.places(page, layer) {
                self.memory.read(place, &mut bytes[..len]).unwrap();
                for byte in &bytes[..len] {
                    wrong += usize::from(*byte != content(request, position, layer, at));
                    at += 1;
                }
            }
        }
        wrong
    }

    fn row(&self, buffer: usize, row: u32) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(aux_at(self.dialect, buffer, row), &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }
}

/// The aux rows of the decode side: the room, and in the first buffer a number of the prefill side.
impl AuxMemory<usize> for &Side {
    fn clear(&mut self, row: AuxIndex) {
        for buffer in [0, ROOM] {
            self.memory.write(aux_at(self.dialect, buffer, row.0), &[0; 8]).unwrap();
        }
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        match self.row(ROOM, row.0) {
            0 => 0,
            room => aux_tag(&Room::Number(room)),
        }
    }

    fn read(&mut self, row: AuxIndex, request: &mut usize) {
        assert_eq!(self.row(0, row.0), *request as u64 + 77, "the first token of request {request}");
    }
}

/// What a router hands from the prefill side to the decode side of one request.
fn route(prefill: &Side, room: &Room, sent: Option<(&PageList, &[kv_transfer::LeaseRef])>) -> Routed {
    if !matches!(prefill.dialect, Dialect::Vllm(_)) {
        return (prefill.addr.clone(), room.clone(), SessionOptions::default());
    }
    let args = prefill.manager.args();
    let (host, port) = prefill.addr.rsplit_once(':').unwrap();
    let remote = match sent {
        Some((pages, leases)) => {
            let (tokens, lease) = (pages.len() as u32 * PAGE_SIZE, Lease::Renewable(PATIENCE));
            RemoteKv::granted(args, &prefill.addr, room.clone(), tokens, pages, leases, lease).unwrap()
        }
        None => RemoteKv::new(args.worker().engine.clone(), room.clone(), host, port.parse().unwrap()),
    };
    let json = TransferParams::decode(prefill.dialect.mode(), remote).to_json();
    let params = TransferParams::parse(&json).unwrap();
    let remote = params.remote().unwrap();
    let options = remote.reader_options(SessionOptions::default());
    (remote.bootstrap_addr(), remote.room.clone().unwrap(), options)
}

type Routed = (String, Room, SessionOptions);
type Outcomes = BTreeMap<usize, Result<(), RequestError>>;

/// Sleeps for a moment or until a session has changed, and returns what has changed.
fn changes(manager: &Manager) -> Vec<Change> {
    let mut fds = [PollFd::from_borrowed_fd(manager.poll_set().as_fd(), PollFlags::IN)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 500_000 }));
    let mut changes = Vec::new();
    manager.poll_set().drain(|change| changes.push(change));
    changes
}

/// The scheduler: serves requests of these many pages, of which the decode side gives up those in `aborted`.
fn serve(prefill: &Side, decode: &Side, sizes: &[usize], aborted: &[usize]) -> [Outcomes; 2] {
    let config = |policy| PrefillConfig::new(policy);
    let mut sending = PrefillQueues::new(
        prefill.manager.clone(),
        SingleRank::default(),
        config(PrefillPolicy::AfterBootstrap),
    );
    let rule = AdmissionRule::new(PAGE_SIZE).with(|rule| {
        (rule.reserved_tokens, rule.clip_new_tokens, rule.retraction) = (0, 0, false);
    });
    let rows = if decode.dialect.aux().is_empty() { 0 } else { ROWS };
    let receiving = DecodeConfig::new(rule).with(|config| config.aux_rows = rows);
    let allocator = RunAllocator::new(PAGES);
    let mut receiving =
        DecodeQueues::new(decode.manager.clone(), SingleRank::default(), allocator, receiving);
    let (prompts, mut free_rows) = (PagePool::new(PAGES), (0..rows).collect::<Vec<_>>());
    let (mut free, mut in_rows) = ((0..PAGES).collect::<Vec<_>>(), BTreeMap::new());
    let [mut sent, mut received] = [Outcomes::new(), Outcomes::new()];
    let mut routed: Vec<(usize, Routed)> = Vec::new();
    let (mut keys, mut doomed) = (Vec::new(), Vec::new());
    for number in 0..sizes.len() {
        let room = prefill.dialect.room(number);
        keys.push(sending.push(number, Outgoing::new(&prefill.addr, room.clone())).unwrap());
        if prefill.dialect.mode() == TransferMode::Push {
            routed.push((number, route(prefill, &room, None)));
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while sent.len() < sizes.len() || received.len() < sizes.len() {
        let counts = (sending.counts(), receiving.counts());
        let failures = || keys.iter().map(|key| sending.failure(*key)).collect::<Vec<_>>();
        assert!(Instant::now() < deadline, "{counts:?}; {:?}; received {received:?}", failures());
        for (number, (addr, room, options)) in routed.drain(..) {
            let incoming = Incoming::new(&addr, room, Demand::new(sizes[number], 0));
            let key = receiving.push(number, incoming.with(|incoming| incoming.options = options)).unwrap();
            if aborted.contains(&number) {
                doomed.push(key);
            }
        }
        // A sender hears of a receiver that gives up only once the receiver has met the sender.
        if receiving.counts().handshake == 0 {
            for key in doomed.drain(..) {
                receiving.abort(key);
            }
        }
        let Ok(()) = sending.step(changes(&prefill.manager));
        while let Some(key) = sending
            .pop_waiting(|_, number| free.len() >= sizes[*number] && (rows == 0 || !free_rows.is_empty()))
        {
            let number = *sending.request(key).unwrap();
            let taken: Vec<u32> = free.drain(..sizes[number]).collect();
            (0..).zip(&taken).for_each(|(position, page)| prefill.write_page(*page, number, position));
            let row = free_rows.pop();
            if let Some(row) = row {
                let Room::Number(room) = prefill.dialect.room(number) else { panic!("a row needs a number") };
                for (buffer, word) in [(0, number as u64 + 77), (ROOM, room)] {
                    prefill.memory.write(aux_at(prefill.dialect, buffer, row), &word.to_le_bytes()).unwrap();
                }
                in_rows.insert(number, row);
            }
            sending.init(key, taken.len(), row.map(AuxIndex)).unwrap();
            let all = PageList::from_pages(taken).unwrap();
            let mut pages = prompts.adopt(all.clone()).unwrap();
            while !pages.is_empty() {
                let rest = pages.split_off(pages.len().div_ceil(2));
                if let Err(refused) = sending.send_chunk(key, std::mem::replace(&mut pages, rest)) {
                    free.extend(prompts.release(refused.pages).unwrap().iter());
                }
            }
            let _ = sending.finish(key);
            if prefill.dialect.mode() == TransferMode::Pull {
                let leases = sending.lease_refs(key).unwrap();
                routed.push((number, route(prefill, &prefill.dialect.room(number), Some((&all, &leases)))));
            }
        }
        while let Some(done) = sending.drain_finished() {
            free.extend(prompts.release(done.pages).unwrap().iter());
            free_rows.extend(in_rows.remove(&done.request));
            assert!(sent.insert(done.request, done.outcome).is_none(), "{} ended twice", done.request);
        }
        let Ok(()) = receiving.step(changes(&decode.manager), &mut { decode });
        while let Some(failed) = receiving.drain_failed() {
            assert!(received.insert(failed.request, Err(failed.error)).is_none());
        }
        while let Some(ready) = receiving.pop_waiting() {
            for (position, page) in ready.pages.list().iter().enumerate() {
                let wrong = decode.wrong(page, ready.request, position);
                assert_eq!(wrong, 0, "request {}, page {position}", ready.request);
            }
            assert!(received.insert(ready.request, Ok(())).is_none());
            receiving.finish(ready.key, ready.pages).unwrap();
        }
    }
    // Pages of aborted requests come back when no data operation can touch them any more.
    while receiving.accounting().free < PAGES as usize {
        assert!(Instant::now() < deadline, "{:?}", receiving.accounting());
        let Ok(()) = receiving.step(changes(&decode.manager), &mut { decode });
    }
    assert_eq!((prompts.num_out(), free.len()), (0, PAGES as usize));
    [sent, received]
}

fn run(dialect: Dialect) {
    let Some(nixl) = nixl() else { return };
    let mut random = Random::new(&format!("{dialect:?}"));
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let [prefill, decode] =
        [WorkerRole::Prefill, WorkerRole::Decode].map(|role| start(&nixl, dialect, role, &addr));
    let sizes: Vec<usize> = (0..24).map(|_| 1 + random.below(9)).collect();
    let aborted = [3, 11, 20];
    let [sent, received] = serve(&prefill, &decode, &sizes, &aborted);
    for number in 0..sizes.len() {
        let outcomes = (&sent[&number], &received[&number]);
        // A reader may have everything before its scheduler gives up.
        let given_up = aborted.contains(&number) && outcomes.1.is_err();
        if given_up {
            let told =
                matches!(outcomes.1, Err(RequestError::Transfer(error)) if error.cause == Cause::Aborted);
            assert!(told || outcomes.1 == &Err(RequestError::Aborted), "request {number}: {outcomes:?}");
        } else {
            assert_eq!(outcomes, (&Ok(()), &Ok(())), "request {number}");
        }
    }
    for side in [prefill, decode] {
        until("the end of all sessions", || side.manager.gauges().sessions_open == 0);
        let gauges = side.manager.gauges();
        assert_eq!((gauges.pages_quarantined(), gauges.pages_orphaned(), gauges.posts_in_flight), (0, 0, 0));
        let report = side.worker.stop(PATIENCE);
        assert_eq!((report.sessions_ended, report.pages_quarantined), (0, 0));
        drop(side.side_channel);
    }
}

#[test]
fn the_scheduler_serves_requests_by_the_native_protocol() {
    run(Dialect::Native);
}

#[test]
fn the_same_scheduler_serves_requests_by_vllms_pull_protocol() {
    run(Dialect::Vllm(TransferMode::Pull));
}

#[test]
fn the_same_scheduler_serves_requests_by_vllms_push_protocol() {
    run(Dialect::Vllm(TransferMode::Push));
}

#[test]
fn the_same_scheduler_serves_requests_by_sglangs_protocol() {
    run(Dialect::Sglang);
}
