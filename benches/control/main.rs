//! What the control path costs: polls, scheduler steps, plans, frames, leases, tasks that wait.
//!
//! `cargo bench --bench control`

#![allow(clippy::print_stdout)]

mod leases;
mod wakers;

use std::error::Error;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use kv_transfer::layout::{Axes, HDN, HND, Holds, Layout, NHD};
use kv_transfer::prelude::*;
use kv_transfer::queue::{Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues};
use kv_transfer::unstable::Descriptor;
use kv_transfer::unstable::plan::{PagePlan, Plan, RegionMap, Side};
use kv_transfer::unstable::wire::{Body, ConversationId, Delivery, Destination, Frame, Register};
use kv_transfer::{Attempt, AuxIndex, Change, Geometry, Manager, PageRun, Parallel};

fn main() -> Result<(), Box<dyn Error>> {
    let mut criterion = Criterion::default().configure_from_args();
    let testing = kv_benches::is_trial();
    sessions(&mut criterion, testing)?;
    plans(&mut criterion)?;
    uneven_plans(&mut criterion)?;
    frames(&mut criterion)?;
    leases::heartbeats(&mut criterion)?;
    wakers::changes(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

/// `poll` of every session, and a scheduler step in which none has changed.
fn sessions(criterion: &mut Criterion, testing: bool) -> Result<(), Box<dyn Error>> {
    let counts: &[u32] = if testing { &[1, 100] } else { &[1, 10_000, 100_000] };
    for &count in counts {
        let arena = Arena::new(count as usize * 64)?;
        let args = KvArgs::builder("prefill", 0)
            .pages(count, 16)
            .region(Region::dram(RegionRole::Kv, arena.addr(), u64::from(count) * 64, 64))
            .build()?;
        let mut transport = LocalTransport::new(LocalConfig::default())?;
        transport.add_arena(&arena)?;
        let client = HttpBootstrapClient::new(ClientConfig::default())?;
        let config = WorkerConfig::new(args, WorkerRole::Prefill);
        let worker = Worker::start(config, transport, Box::new(client))?;
        let manager = worker.manager();
        let pool = PagePool::new(count);

        polls(criterion, &manager, count)?;

        let mut queues = PrefillQueues::<u32, _>::new(
            manager.clone(),
            Default::default(),
            PrefillConfig::new(PrefillPolicy::Eager),
        );
        let mut changes: Vec<Change> = Vec::new();
        for page in 0..count {
            let key = loop {
                match queues.push(page, Outgoing::new("127.0.0.1:1", Room::Number(page.into()))) {
                    Ok(key) => break key,
                    // The ring is full for a moment.
                    Err(_) => std::thread::sleep(Duration::from_micros(100)),
                }
            };
            while queues.pop_waiting(|_, _| true).is_some() {}
            queues.init(key, 1, None)?;
            queues.send_chunk(key, pool.adopt(PageList::from_pages([page])?)?)?;
            queues.finish(key)?;
            step(&mut queues, &manager, &mut changes)?;
        }
        settle(&mut queues, &manager, &mut changes)?;
        assert_eq!(queues.counts().inflight, count as usize);
        let mut failure = None;
        criterion.bench_with_input(
            BenchmarkId::new("step, none changed, in flight", count),
            &count,
            |b, _| {
                b.iter(|| {
                    if let Err(error) = step(&mut queues, &manager, &mut changes) {
                        failure = Some(error);
                    }
                });
            },
        );
        if let Some(error) = failure {
            return Err(error);
        }
        drop(queues);
        worker.stop(Duration::from_secs(10));
    }
    Ok(())
}

fn polls(criterion: &mut Criterion, manager: &Manager, count: u32) -> Result<(), Box<dyn Error>> {
    let mut senders = Vec::new();
    while senders.len() < count as usize {
        let room = Room::Number(senders.len() as u64);
        match manager.sender("127.0.0.1:1", room, &[], SessionOptions::default()) {
            Ok(sender) => senders.push(sender),
            Err(_) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
    let mut group = criterion.benchmark_group("poll");
    group.throughput(Throughput::Elements(count.into()));
    group.bench_with_input(BenchmarkId::from_parameter(count), &count, |b, _| {
        b.iter(|| senders.iter().filter(|sender| black_box(sender.poll()).is_terminal()).count());
    });
    group.finish();
    drop(senders);
    // Dropped sessions end, and make room for others.
    while manager.gauges().sessions_open > 0 {
        manager.poll_set().drain(|_| {});
        std::thread::sleep(Duration::from_millis(1));
    }
    manager.poll_set().drain(|_| {});
    Ok(())
}

type Queues = PrefillQueues<u32, Manager>;

/// One iteration of a scheduler's loop over its queues.
fn step(queues: &mut Queues, manager: &Manager, changes: &mut Vec<Change>) -> Result<(), Box<dyn Error>> {
    manager.poll_set().drain(|change| changes.push(change));
    queues.step(changes.drain(..))?;
    while queues.drain_finished().is_some() {}
    Ok(())
}

/// Steps until nothing changes any more.
fn settle(queues: &mut Queues, manager: &Manager, changes: &mut Vec<Change>) -> Result<(), Box<dyn Error>> {
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(10));
        step(queues, manager, changes)?;
    }
    Ok(())
}

/// 128 K tokens in pages of 16, 80 layers, K and V: 1.3 M pieces.
fn plans(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    const PAGES: u32 = 128 * 1024 / 16;
    let geometry = geometry(PAGES)?;
    let map = RegionMap::new(&geometry, &geometry)?;
    let contiguous = PageList::from_runs([PageRun { start: 0, len: PAGES }])?;
    let random = PageList::from_pages((0..PAGES).map(|page| page.wrapping_mul(2_654_435_761) % PAGES))?;
    let mut group = criterion.benchmark_group("plan 8192 pages x 160 regions");
    for (name, local, remote) in [("contiguous", &contiguous, &contiguous), ("random", &random, &contiguous)]
    {
        let mut descriptors: Vec<Descriptor> = Vec::with_capacity(1024);
        let mut count = 0;
        let mut failure = None;
        group.bench_function(name, |b| {
            b.iter(|| {
                count = 0;
                match PagePlan::new(local, remote).and_then(|pages| Plan::pages(&map, pages)) {
                    Ok(mut plan) => loop {
                        descriptors.clear();
                        let progress = plan.fill(black_box(&mut descriptors), 1024, u64::MAX);
                        count += progress.descriptors;
                        if progress.done {
                            break;
                        }
                    },
                    Err(error) => failure = Some(error),
                }
            });
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
        println!("{name}: {} parts of pages in {count} descriptors", u64::from(PAGES) * 160);
    }
    group.finish();
    Ok(())
}

fn geometry(pages: u32) -> Result<Geometry, Box<dyn Error>> {
    let mut args = KvArgs::builder("engine", 0).pages(pages, 16);
    let len = u64::from(pages) * 64;
    for region in 0..160 {
        args = args.region(Region::dram(RegionRole::Kv, 0x1000 + region * len, len, 64));
    }
    Ok(args.build()?.geometry().clone())
}

/// The plan between one pair of ranks for the same request, from four prefill ranks to two decode ranks.
fn uneven_plans(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    const PAGES: u32 = 128 * 1024 / 16;
    let pages = PageList::from_pages((0..PAGES).map(|page| page.wrapping_mul(2_654_435_761) % PAGES))?;
    let registered = PageList::from_runs([PageRun { start: 0, len: PAGES }])?;
    let mut group = criterion.benchmark_group("plan 8192 pages x 160 regions, 4 ranks to 2");
    group.sample_size(10);
    let packed = HDN.packed(2);
    for (name, axes) in
        [("head-major", HND), ("token-major", NHD), ("paged keys", packed), ("paged values", HDN)]
    {
        let map = RegionMap::directed(&rank(PAGES, 4, 1, axes)?, &rank(PAGES, 2, 0, axes)?, Side::Local)?;
        let mut descriptors: Vec<Descriptor> = Vec::with_capacity(1024);
        let mut failure = None;
        group.bench_function(name, |b| {
            b.iter(|| match Plan::chunk(&map, &pages, 0, &registered) {
                Ok(mut plan) => loop {
                    descriptors.clear();
                    if plan.fill(black_box(&mut descriptors), 1024, u64::MAX).done {
                        break;
                    }
                },
                Err(error) => failure = Some(error),
            });
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
        let counts = Plan::chunk(&map, &pages, 0, &registered)?.counts();
        println!("{name}: {} parts of pages in {} descriptors", counts.pieces, counts.descriptors);
    }
    group.finish();
    Ok(())
}

/// A rank of an engine with 8 KV heads of 8 bytes and 80 layers.
fn rank(pages: u32, tp_size: u32, tp_rank: u32, axes: Axes) -> Result<Geometry, Box<dyn Error>> {
    let heads = 8 / tp_size;
    let layout = Layout::default().with(|layout| {
        layout.axes = axes;
        layout.total_kv_heads = 8;
    });
    let mut args = KvArgs::builder("engine", tp_rank)
        .pages(pages, 16)
        .heads(heads, 4)
        .parallel(Parallel::default().with(|parallel| {
            parallel.tp_size = tp_size;
            parallel.tp_rank = tp_rank;
        }))
        .layout(layout);
    let item_len = 16 * u64::from(heads) * 8;
    let len = u64::from(pages) * item_len;
    for layer in 0..80 {
        for (half, holds) in [(0, Holds::Key), (1, Holds::Value)] {
            let addr = 0x1000 + u64::from(2 * layer + half) * len;
            args = args.region(Region::dram(RegionRole::Kv, addr, len, item_len).layer(layer).holds(holds));
        }
    }
    Ok(args.build()?.geometry().clone())
}

fn frames(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = criterion.benchmark_group("frame");
    for runs in [1_u32, 1000] {
        let pages = PageList::from_pages((0..runs).map(|run| run * 2))?;
        let to = Destination {
            pages,
            first_page: 0,
            total_pages: runs,
            aux: Some(AuxIndex(3)),
            aux_here: true,
            groups: Default::default(),
            ask: 1,
            permit_ms: 10_000,
        };
        let register = Register {
            attempt: Attempt(1),
            low_watermark: Attempt(1),
            room: Room::request("cmpl-2f1b9a4e-0-0123abcd")?,
            ranks: 1,
            ttl_ms: 300_000,
            delivery: Delivery::Write(to),
        };
        let frame = Frame { conversation: ConversationId::new(1, 7), body: Body::Register(register) };
        let bytes = frame.encode()?;
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(BenchmarkId::new("encode, runs", runs), |b| {
            b.iter(|| black_box(&frame).encode())
        });
        group.bench_function(BenchmarkId::new("decode, runs", runs), |b| {
            b.iter_batched(|| bytes.clone(), |bytes| Frame::decode(&bytes), BatchSize::SmallInput);
        });
    }
    group.finish();
    Ok(())
}
