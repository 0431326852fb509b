//! What the encoder cache costs: blocks, hits, transfers beside a copy of the same bytes, and messages.
//!
//! `cargo bench --bench encoder_cache`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_core::wire::{Acquire, Body, ConversationId, Delivery, Destination, Frame, Granted, XferReq};
use kv_core::{Attempt, ContentHash, PageList, SessionId, TransferMode};
use kv_ec::{Availability, EcConfig, EcConnector, EcPoll, EcRegion, EcWorker, EncoderCache, Eviction, Want};
use kv_local::{LocalConfig, LocalTransport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Blocks of an entry: an image of 4.5 MB.
const BLOCKS: u32 = 880;
/// Bytes of a block: one row of an embedding.
const BLOCK: u32 = 5120;
const BYTES: u64 = BLOCKS as u64 * BLOCK as u64;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let mut criterion = Criterion::default().configure_from_args();
    blocks(&mut criterion)?;
    hits(&mut criterion)?;
    transfers(&mut criterion)?;
    messages(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

fn hash(number: u64) -> Result<ContentHash, Failure> {
    // As long as a SHA-256 in hex digits.
    Ok(ContentHash::new(&format!("{number:064x}"))?)
}

/// Saves an entry without bytes.
fn save(cache: &mut EncoderCache, number: u64, blocks: u32) -> Result<(), Failure> {
    let reservation = cache.reserve(&hash(number)?, u64::from(blocks) * u64::from(BLOCK))?;
    cache.commit(reservation).map_err(|_| "a whole reservation is committed")?;
    Ok(())
}

// ---- blocks -------------------------------------------------------------------------------------

/// A region of 100 000 blocks: the cost of one block is the cost of one element.
fn blocks(criterion: &mut Criterion) -> Result<(), Failure> {
    const REGION: u32 = 100_000;
    let mut group = criterion.benchmark_group("100 000 blocks, an entry of 880");
    group.throughput(Throughput::Elements(BLOCKS.into()));
    for (name, scattered) in [("neighbours", false), ("every second block", true)] {
        let mut cache = EncoderCache::new(REGION, BLOCK, Eviction::Lru);
        let mut in_use = Vec::new();
        if scattered {
            for number in 0..u64::from(REGION) {
                save(&mut cache, number, 1)?;
            }
            for number in 0..u64::from(REGION) {
                match number % 2 {
                    0 => drop(cache.remove(&hash(number)?)),
                    _ => in_use.push(cache.pin(&hash(number)?)?),
                }
            }
        }
        // Twice as many entries as there is room for: from then on each one evicts another.
        let entries: Vec<ContentHash> =
            (0..200).map(|number| hash(1 << 40 | number)).collect::<Result<_, _>>()?;
        let mut turn = entries.iter().cycle();
        let mut next = || turn.next().cloned();

        group.bench_function(format!("{name}: reserve and discard"), |b| {
            b.iter(|| {
                let reservation = next().and_then(|hash| cache.reserve(&hash, BYTES).ok());
                reservation.map(|reservation| cache.discard(reservation)).is_some()
            });
        });
        let mut round = |cache: &mut EncoderCache| {
            let reserved = next().and_then(|hash| cache.reserve(&hash, BYTES).ok());
            reserved.is_some_and(|reservation| cache.commit(reservation).is_ok())
        };
        for _ in 0..200 {
            assert!(round(&mut cache), "an entry has no room");
        }
        let evicted = cache.gauges().evictions;
        assert!(evicted > 0, "no entry was evicted");
        group.bench_function(format!("{name}: evict, reserve and commit"), |b| b.iter(|| round(&mut cache)));
        assert!(cache.gauges().evictions > evicted);
        in_use.into_iter().for_each(|pin| cache.unpin(pin));
    }
    group.finish();
    Ok(())
}

// ---- workers ------------------------------------------------------------------------------------

/// A worker over kv-local, with room for some large entries.
fn worker(engine: &str, publish: Option<&str>) -> Result<(EcWorker, EcConnector), Failure> {
    let region = EcRegion::create(8 * BLOCKS, BLOCK)?;
    let mut transport = LocalTransport::new(LocalConfig::default())?;
    transport.add_arena(region.arena().ok_or("a region that was created has an arena")?)?;
    let client = Box::new(HttpBootstrapClient::new(ClientConfig::default())?);
    let config = EcConfig::new(engine, "bench").with(|config| config.publish = publish.map(str::to_owned));
    let worker = EcWorker::start(config, &region, transport, client)?;
    let connector = worker.connector();
    Ok((worker, connector))
}

/// Saves entry `number` of 880 blocks: neighbours, or every second block.
fn save_at(connector: &EcConnector, number: u64, scattered: bool) -> Result<(), Failure> {
    let small = |at| hash(1 << 40 | at);
    if scattered {
        for at in 0..u64::from(2 * BLOCKS) {
            let reservation = connector.reserve(&small(at)?, BLOCK.into())?;
            connector.save(reservation)?;
        }
        for at in (0..u64::from(2 * BLOCKS)).step_by(2) {
            connector.store().remove(&small(at)?);
        }
        // The rest of the region is in use, so that the entry gets the blocks between the small ones.
        let rest = connector.reserve(&small(u64::MAX >> 24)?, 6 * BYTES)?;
        connector.save(rest)?;
    }
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at.wrapping_mul(31) ^ number) as u8).collect();
    let reservation = connector.reserve(&hash(number)?, BYTES)?;
    assert_eq!(reservation.pages().runs().len(), if scattered { BLOCKS as usize } else { 1 });
    connector.write(&reservation, 0, &bytes)?;
    connector.save(reservation)?;
    Ok(())
}

/// The hit path: an entry that is here is pinned and let go.
fn hits(criterion: &mut Criterion) -> Result<(), Failure> {
    let mut group = criterion.benchmark_group("hit of an entry of 880 blocks");
    for (name, scattered) in [("neighbours", false), ("every second block", true)] {
        let (worker, connector) = worker("prefill", None)?;
        save_at(&connector, 1, scattered)?;
        let want = Want::new(hash(1)?, BYTES, "127.0.0.1:1");
        let hit = || matches!(connector.ensure_cache_available(want.clone()), Ok(Availability::Here(_)));
        assert!(hit(), "the entry is here");
        group.bench_function(format!("{name}, alone"), |b| b.iter(hit));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) && hit() {
                        std::hint::spin_loop();
                    }
                });
            }
            group.bench_function(format!("{name}, beside three threads"), |b| b.iter(hit));
            stop.store(true, Ordering::Relaxed);
        });
        worker.stop(Duration::from_secs(10));
    }
    group.finish();
    Ok(())
}

/// From the request for an entry of 4.5 MB to its bytes, beside one copy of as many bytes.
fn transfers(criterion: &mut Criterion) -> Result<(), Failure> {
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let addr = server.local_addr().to_string();
    let mut group = criterion.benchmark_group("an entry of 4.5 MB");
    group.throughput(Throughput::Bytes(BYTES));
    let (from, mut to) = (vec![7u8; BYTES as usize], vec![0u8; BYTES as usize]);
    group.bench_function("memcpy", |b| b.iter(|| black_box(&mut to).copy_from_slice(black_box(&from))));
    for (name, scattered) in [("neighbours", false), ("every second block", true)] {
        let (producer_worker, producer) = worker("encoder", Some(&addr))?;
        let (consumer_worker, consumer) = worker("prefill", None)?;
        save_at(&producer, 1, scattered)?;
        for mode in [TransferMode::Push, TransferMode::Pull] {
            let want = Want::new(hash(1)?, BYTES, &*addr).with(|want| want.mode = Some(mode));
            fetch_many(&mut group, &format!("{name}, {mode}"), &consumer, &want)?;
        }
        consumer_worker.stop(Duration::from_secs(10));
        producer_worker.stop(Duration::from_secs(10));
    }
    group.finish();
    Ok(())
}

fn fetch_many(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    consumer: &EcConnector,
    want: &Want,
) -> Result<(), Failure> {
    let before = consumer.port().gauges();
    let mut fetched = 0;
    let mut failure = None;
    group.bench_function(name, |b| {
        b.iter(|| {
            fetched += 1;
            if let Err(error) = fetch(consumer, want) {
                failure = Some(error);
            }
        });
    });
    let after = consumer.port().gauges();
    println!(
        "{name}: for each of {fetched} fetches at the consumer: {:.1} frames in, {:.1} out, {:.1} turns, {:.1} wake-ups",
        (after.frames_received - before.frames_received) as f64 / f64::from(fetched),
        (after.frames_sent - before.frames_sent) as f64 / f64::from(fetched),
        (after.turns - before.turns) as f64 / f64::from(fetched),
        (after.wake_ups - before.wake_ups) as f64 / f64::from(fetched),
    );
    failure.map_or(Ok(()), Err)
}

/// Fetches an entry, asleep until its end as a scheduler would be, and forgets the entry.
fn fetch(consumer: &EcConnector, want: &Want) -> Result<(), Failure> {
    let Availability::Deferred(mut fetch) = consumer.ensure_cache_available(want.clone())? else {
        return Err("the entry is here already".into());
    };
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    while fetch.poll() != EcPoll::Ready {
        if let Some(failure) = fetch.failure() {
            return Err(failure.to_string().into());
        }
        if poll(&mut [PollFd::new(consumer.poll_set(), PollFlags::IN)], Some(&patience))? == 0 {
            return Err("nothing has woken the caller".into());
        }
        consumer.poll_set().drain(|_| ());
    }
    drop(fetch);
    match consumer.store().remove(&want.hash) {
        true => Ok(()),
        false => Err("the entry is still in use".into()),
    }
}

// ---- messages -----------------------------------------------------------------------------------

/// The messages of a request for an entry of 880 blocks, in neighbouring blocks and in every second one.
fn messages(criterion: &mut Criterion) -> Result<(), Failure> {
    let mut group = criterion.benchmark_group("message");
    for (name, step) in [("neighbours", 1), ("every second block", 2)] {
        let pages = PageList::from_pages((0..BLOCKS).map(|block| block * step))?;
        let (attempt, low_watermark) = (Attempt(1000), Attempt(990));
        let write = Delivery::Write(Destination {
            pages: pages.clone(),
            first_page: 0,
            total_pages: BLOCKS,
            aux: None,
            aux_here: true,
            groups: Default::default(),
            ask: 7,
            permit_ms: 10_000,
        });
        let read = Delivery::Read(Acquire { lease_id: None, number: 7 });
        let request = |delivery| -> Result<Body, Failure> {
            let (hash, compatibility, ttl_ms) = (hash(1)?, "a".repeat(64), 60_000);
            let bytes = BYTES;
            let request = XferReq { attempt, low_watermark, hash, compatibility, bytes, ttl_ms, delivery };
            Ok(Body::XferReq(request))
        };
        let granted = Body::Granted(Granted {
            attempt,
            number: 7,
            lease_id: SessionId(1000),
            pages,
            aux: None,
            lease_ms: 30_000,
            interval_ms: 5000,
            groups: Default::default(),
        });
        for (kind, body) in
            [("XferReq to write", request(write)?), ("XferReq to read", request(read)?), ("Granted", granted)]
        {
            let frame = Frame { conversation: ConversationId(1 << 32 | 1), body };
            let bytes = frame.encode()?;
            println!("{kind}, {name}: {} B", bytes.len());
            group
                .bench_function(format!("{kind}, {name}: encode"), |b| b.iter(|| black_box(&frame).encode()));
            group.bench_function(format!("{kind}, {name}: decode"), |b| {
                b.iter(|| Frame::decode(black_box(&bytes)))
            });
        }
    }
    group.finish();
    Ok(())
}
