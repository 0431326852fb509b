//! Transfers that overlap with the forward pass: a device computes layer by layer, while layers that are
//! computed are moved, between engines with pages of different sizes and layouts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use kv_conformance::Random;
use kv_transfer::allocator::{FreeList, PageAllocator};
use kv_transfer::layout::{HND, NHD};
use kv_transfer::prelude::*;
use kv_transfer::{
    Cause, FinalLayers, Holds, Layout, Manager, PeerCause, Publication, ReadyEvent, ReadyEventError,
    ReadyWord, TransferMode,
};
use support::{PATIENCE, ended, reclaimed, server, until};

const LAYERS: usize = 6;
/// Bytes of the key, and of the value, of a token in a layer.
const TOKEN: usize = 20;

/// How a cache lies in memory.
#[derive(Clone, Copy)]
struct Shape {
    /// The number of tokens in a page.
    tokens: usize,
    /// All layers of a page together, or a region for each.
    page_major: bool,
    pages: usize,
}

/// The cache of layer-major pages of 16 tokens that computes.
const PREFILL: Shape = Shape { tokens: 16, page_major: false, pages: 96 };
const DECODES: [Shape; 3] = [
    Shape { tokens: 16, page_major: false, pages: 96 },
    Shape { tokens: 32, page_major: true, pages: 48 },
    Shape { tokens: 8, page_major: true, pages: 192 },
];

impl Shape {
    /// Where the key (0) or value (1) of a token of a page lies.
    fn place(self, page: u32, layer: usize, kind: usize, token: usize) -> usize {
        let (page, per_page) = (page as usize, self.tokens * TOKEN);
        let (index, within) = if self.page_major {
            (page, ((layer * 2 + kind) * self.tokens + token) * TOKEN)
        } else {
            ((layer * 2 + kind) * self.pages + page, token * TOKEN)
        };
        index * if self.page_major { per_page * LAYERS * 2 } else { per_page } + within
    }

    fn len(self) -> usize {
        self.pages * LAYERS * 2 * self.tokens * TOKEN
    }

    fn regions(self, addr: u64) -> Vec<Region> {
        let item = (self.tokens * TOKEN) as u64;
        let region = |number: usize, item: u64| {
            let len = item * self.pages as u64;
            Region::dram(RegionRole::Kv, addr + number as u64 * len, len, item)
        };
        if self.page_major {
            let whole = region(0, item * LAYERS as u64 * 2);
            return vec![whole.layers(0..LAYERS as u32).holds(Holds::KeyValue)];
        }
        let kinds = [Holds::Key, Holds::Value];
        let each = |number: usize| region(number, item).layer(number as u32 / 2).holds(kinds[number % 2]);
        (0..2 * LAYERS).map(each).collect()
    }
}

struct Host {
    shape: Shape,
    arena: Arena,
    worker: Worker,
    manager: Manager,
    free: FreeList,
}

impl Host {
    fn start(addr: &str, role: WorkerRole, shape: Shape) -> Host {
        let arena = Arena::new(shape.len()).unwrap();
        let axes = if shape.page_major { NHD } else { HND };
        let mut args = KvArgs::builder(&format!("{role:?}").to_lowercase(), 0)
            .pages(shape.pages as u32, shape.tokens as u32)
            .layout(Layout::default().with(|layout| layout.axes = axes))
            .max_inflight(4);
        for region in shape.regions(arena.addr()) {
            args = args.region(region);
        }
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
        let config = WorkerConfig::new(args.build().unwrap(), role)
            .with(|config| config.bootstrap = Some(addr.to_owned()));
        let worker = Worker::start(config, transport, Box::new(client)).unwrap();
        let manager = worker.manager();
        until("registration", || manager.publication() == Publication::Published);
        Host { shape, arena, worker, manager, free: FreeList::new(shape.pages as u32) }
    }

    fn take(&mut self, tokens: usize) -> Pages {
        self.free.allocate(tokens.div_ceil(self.shape.tokens)).unwrap()
    }

    /// True if the KV of some layers of the first tokens of a room are in these pages.
    fn has(&self, pages: &PageList, room: u64, layers: std::ops::Range<usize>, tokens: usize) -> bool {
        let pages: Vec<u32> = pages.iter().collect();
        let places = layers.flat_map(|layer| (0..2 * tokens).map(move |n| (layer, n % 2, n / 2)));
        let mut bytes = [0; TOKEN];
        places.into_iter().all(|(layer, kind, token)| {
            let page = pages[token / self.shape.tokens];
            let at = self.shape.place(page, layer, kind, token % self.shape.tokens);
            self.arena.read(at, &mut bytes).unwrap();
            bytes == content(room, layer, kind, token)
        })
    }

    fn close(mut self) {
        until("the end of all sessions", || self.manager.gauges().sessions_open == 0);
        self.manager.orphans().into_iter().for_each(|pages| self.free.free(pages).unwrap());
        assert_eq!(self.free.available(), self.shape.pages);
        let gauges = self.manager.gauges();
        assert_eq!((gauges.pages_in_transfer(), gauges.pages_quarantined()), (0, 0));
        self.worker.stop(PATIENCE);
    }
}

fn content(room: u64, layer: usize, kind: usize, token: usize) -> [u8; TOKEN] {
    let name = ((layer * 2 + kind) << 32 | token) as u64;
    Random::from_seed(room << 48 ^ name).bytes(TOKEN).try_into().unwrap()
}

/// A device that computes chunks of a prompt, layer by layer, in the order of a stream.
struct Device {
    /// Layers of chunks that are done: the word that the device raises.
    done: Arc<AtomicU64>,
    /// The number of layers that the device may compute.
    allowed: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Device {
    /// Computes pages of a room, chunk by chunk, each with the number of its first page.
    fn start(host: &Host, room: u64, chunks: Vec<(usize, Vec<u32>)>, allowed: usize) -> Device {
        let (arena, shape) = (host.arena.clone(), host.shape);
        let (done, allowed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(allowed)));
        let (reached, may) = (Arc::clone(&done), Arc::clone(&allowed));
        let thread = spawn(move || {
            for (first, pages) in chunks {
                for layer in 0..LAYERS {
                    while reached.load(Ordering::Relaxed) >= may.load(Ordering::SeqCst) as u64 {
                        sleep(Duration::from_micros(50));
                    }
                    for (position, page) in pages.iter().enumerate() {
                        for n in 0..2 * shape.tokens {
                            let token = (first + position) * shape.tokens + n / 2;
                            let at = shape.place(*page, layer, n % 2, n / 2);
                            arena.write(at, &content(room, layer, n % 2, token)).unwrap();
                        }
                    }
                    reached.fetch_add(1, Ordering::Release);
                }
            }
        });
        Device { done, allowed, thread }
    }

    /// A ready event that passes after `behind` layers of chunks.
    fn event(&self, behind: usize) -> impl ReadyEvent + 'static {
        ReadyWord::new(Arc::clone(&self.done), behind as u64)
    }
}

/// Gives a prompt away in chunks, everything announced before anything is computed.
fn announce(
    host: &Host,
    addr: &str,
    room: u64,
    mut pages: Pages,
    mode: TransferMode,
    random: &mut Random,
    allowed: usize,
) -> (kv_transfer::Sender, Device) {
    let options = SessionOptions::default().with(|options| options.mode = Some(mode));
    let mut sender = host.manager.sender(addr, Room::Number(room), &[], options).unwrap();
    sender.init(pages.len(), None).unwrap();
    let mut chunks = Vec::new();
    while !pages.is_empty() {
        let rest = pages.split_off(1 + random.below(pages.len()));
        chunks.push(std::mem::replace(&mut pages, rest));
    }
    let mut first = 0;
    let mut work = Vec::new();
    for chunk in &chunks {
        work.push((first, chunk.list().iter().collect::<Vec<u32>>()));
        first += chunk.len();
    }
    let device = Device::start(host, room, work, allowed);
    for (number, chunk) in chunks.into_iter().enumerate() {
        let id = sender.begin_chunk(chunk).unwrap();
        let mut layer = 0;
        while layer < LAYERS {
            let end = layer + 1 + random.below(LAYERS - layer);
            let event = device.event(number * LAYERS + end);
            sender.layers_final(FinalLayers::new(id, layer as u32..end as u32).after(event)).unwrap();
            layer = end;
        }
    }
    (sender, device)
}

fn receive(
    host: &mut Host,
    addr: &str,
    room: u64,
    tokens: usize,
    mode: TransferMode,
) -> (kv_transfer::Receiver, PageList) {
    let options = SessionOptions::default().with(|options| options.mode = Some(mode));
    let mut receiver = host.manager.receiver(addr, Room::Number(room), options).unwrap();
    let pages = host.take(tokens);
    let list = pages.list().clone();
    receiver.init(pages, None).unwrap();
    (receiver, list)
}

#[test]
fn computed_layers_arrive_while_later_layers_are_computed() {
    for shape in DECODES {
        let (_server, addr) = server();
        let mut prefill = Host::start(&addr, WorkerRole::Prefill, PREFILL);
        let mut decode = Host::start(&addr, WorkerRole::Decode, shape);
        let tokens = 16 * 6;
        let (receiver, list) = receive(&mut decode, &addr, 1, tokens, TransferMode::Push);
        let prompt = prefill.take(tokens);
        let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push));
        let mut sender = prefill.manager.sender(&addr, Room::Number(1), &[], options).unwrap();
        sender.init(prompt.len(), None).unwrap();
        let device = Device::start(&prefill, 1, vec![(0, prompt.list().iter().collect())], 0);
        let chunk = sender.begin_chunk(prompt).unwrap();
        for layer in 0..LAYERS {
            let layers = layer as u32..layer as u32 + 1;
            sender.layers_final(FinalLayers::new(chunk, layers).after(device.event(layer + 1))).unwrap();
        }
        for layer in 0..LAYERS {
            assert!(!decode.has(&list, 1, layer..layer + 1, 1), "layer {layer} is not computed yet");
            device.allowed.store(layer + 1, Ordering::SeqCst);
            until("the layer", || decode.has(&list, 1, 0..layer + 1, tokens));
        }
        assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
        assert_eq!(ended(&sender), KvPoll::Success, "{:?}", sender.failure());
        device.thread.join().unwrap();
        prefill.free.free(reclaimed(sender)).unwrap();
        decode.free.free(reclaimed(receiver)).unwrap();
        prefill.close();
        decode.close();
    }
}

#[test]
fn requests_announced_at_random_arrive_whole_pushed_or_pulled() {
    let mut random = Random::new("requests_announced_at_random_arrive_whole_pushed_or_pulled");
    for shape in DECODES {
        let (_server, addr) = server();
        let mut prefill = Host::start(&addr, WorkerRole::Prefill, PREFILL);
        let mut decode = Host::start(&addr, WorkerRole::Decode, shape);
        let mut requests = Vec::new();
        for room in 0..12 {
            let mode = if random.chance(50) { TransferMode::Push } else { TransferMode::Pull };
            let tokens = 1 + random.below(16 * 7);
            let early = random.chance(50).then(|| receive(&mut decode, &addr, room, tokens, mode));
            let prompt = prefill.take(tokens);
            let (sender, device) = announce(&prefill, &addr, room, prompt, mode, &mut random, usize::MAX);
            let receiver = early.unwrap_or_else(|| receive(&mut decode, &addr, room, tokens, mode));
            requests.push((room, tokens, sender, receiver, device));
        }
        for (room, tokens, sender, (receiver, list), device) in requests {
            assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
            assert!(decode.has(&list, room, 0..LAYERS, tokens), "room {room}: wrong bytes");
            assert_eq!(ended(&sender), KvPoll::Success, "{:?}", sender.failure());
            device.thread.join().unwrap();
            prefill.free.free(reclaimed(sender)).unwrap();
            decode.free.free(reclaimed(receiver)).unwrap();
        }
        prefill.close();
        decode.close();
    }
}

#[test]
fn a_device_that_fails_in_the_middle_fails_both_sides_and_loses_no_page() {
    let (_server, addr) = server();
    let mut prefill = Host::start(&addr, WorkerRole::Prefill, PREFILL);
    let mut decode = Host::start(&addr, WorkerRole::Decode, DECODES[1]);
    let (receiver, _) = receive(&mut decode, &addr, 1, 64, TransferMode::Push);
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push));
    let mut sender = prefill.manager.sender(&addr, Room::Number(1), &[], options).unwrap();
    let prompt = prefill.take(64);
    sender.init(prompt.len(), None).unwrap();
    let chunk = sender.begin_chunk(prompt).unwrap();
    sender.layers_final(FinalLayers::new(chunk, 0..2)).unwrap();
    let mut questions = 0;
    let illegal_address = move || {
        questions += 1;
        if questions < 5 { Ok(false) } else { Err(ReadyEventError::Device { code: 700 }) }
    };
    sender.layers_final(FinalLayers::new(chunk, 2..6).after(illegal_address)).unwrap();
    let error = ReadyEventError::Device { code: 700 };
    assert_eq!(support::failed(&sender), Cause::ReadyEvent { chunk, error });
    assert_eq!(support::failed(&receiver), Cause::ByPeer(PeerCause::Internal));
    prefill.free.free(reclaimed(sender)).unwrap();
    decode.free.free(reclaimed(receiver)).unwrap();
    prefill.close();
    decode.close();
}
