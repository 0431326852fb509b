//! WRITE and READ between two processes over kv-local, by block size and count, against a
//! plain memcpy of the same blocks in the same run; and over the TCP transport, against plain blocking sockets; with
//! `--features kv-benches/tls` also encrypted, against rustls over such sockets.
//!
//! | `cargo bench -p kv-benches --bench write_read …` | measures |
//! |---|---|
//! | nothing more | kv-local, TCP, each library whose feature is on, and with NIXL or UCX the memory of a GPU, where there is one |
//! | `-- tcp` | kv-tcp beside plain blocking sockets |
//! | `--features nixl,ucx,fabric -- tcp` | also kv-tcp beside NIXL, UCX and libfabric over TCP |
//! | `--features nixl -- nixl` | NIXL beside plain `nixl-sys` |
//! | `--features ucx -- ucx` | UCX beside plain calls of UCX |
//! | `--features fabric -- fabric` | libfabric beside plain calls of libfabric |
//! | `--features nixl,ucx -- gpu` | memory of a GPU, over NIXL and over UCX, beside CUDA's own copies |
//!
//! Of kv-local, Criterion's figures come first. Then come tables of ratios, each from pairs of measurements taken in turn, so
//! that they hold on a machine whose speed drifts.

#![allow(clippy::print_stdout)]

mod child;
#[cfg(feature = "fabric")]
mod fabric;
#[cfg(any(feature = "nixl", feature = "ucx"))]
mod gpu;
#[cfg(feature = "nixl")]
mod nixl;
mod over_tcp;
mod peer;
mod posts;
mod tcp;
#[cfg(feature = "ucx")]
mod ucx;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kv_transfer::local::Arena;
use kv_transfer::unstable::random::SplitMix64;
use kv_transfer::unstable::{Descriptor, Op};

use peer::Pair;

type Error = Box<dyn std::error::Error>;

/// The size of the region on each side, in bytes.
const REGION: usize = 512 << 20;
/// Pairs of measurements behind each ratio.
const ROUNDS: usize = 7;

fn main() -> Result<(), Error> {
    if over_tcp::has_a_part() {
        return over_tcp::play();
    }
    #[cfg(any(feature = "nixl", feature = "ucx"))]
    if gpu::is_peer() {
        return gpu::serve();
    }
    #[cfg(any(feature = "nixl", feature = "ucx"))]
    if gpu::is_asked_for() {
        return gpu::tables(if kv_benches::is_trial() { 8 << 20 } else { REGION });
    }
    // Without NIXL, which brings another copy of UCX.
    #[cfg(feature = "ucx")]
    if ucx::is_peer() {
        return ucx::serve();
    }
    #[cfg(feature = "ucx")]
    if std::env::args().skip(1).any(|arg| arg == "ucx") {
        return ucx::tables(if kv_benches::is_trial() { 8 << 20 } else { REGION });
    }
    // First: it sets the environment, while there is one thread.
    #[cfg(feature = "nixl")]
    let nixl = nixl::prepare();
    #[cfg(feature = "nixl")]
    if let Some(nixl) = &nixl
        && nixl::is_peer()
    {
        return nixl::serve(nixl);
    }
    if peer::is_peer() {
        return peer::serve();
    }
    if tcp::is_peer() {
        return tcp::serve();
    }
    #[cfg(feature = "fabric")]
    if fabric::is_peer() {
        return fabric::serve();
    }
    let testing = kv_benches::is_trial();
    let region = if testing { 8 << 20 } else { REGION };
    #[cfg(feature = "nixl")]
    if std::env::args().skip(1).any(|arg| arg == "nixl") {
        return nixl.as_ref().map_or(Ok(()), |nixl| nixl::tables(nixl, region));
    }
    if std::env::args().skip(1).any(|arg| arg == "tcp") {
        tcp::table(region)?;
        return over_tcp::table(region);
    }
    #[cfg(feature = "fabric")]
    if std::env::args().skip(1).any(|arg| arg == "fabric") {
        return fabric::table(region);
    }
    let mut pair = Pair::start(region)?;
    let mut copy = Memcpy::new(region);

    let mut criterion = Criterion::default().configure_from_args().sample_size(10);
    figures(&mut criterion, &mut pair, &mut copy, region)?;
    if !testing {
        ratios(&mut pair, &mut copy, region)?;
    }
    drop((pair, copy));
    tcp::table(region)?;
    over_tcp::table(region)?;
    #[cfg(feature = "fabric")]
    fabric::table(region)?;
    #[cfg(feature = "nixl")]
    if let Some(nixl) = &nixl {
        nixl::tables(nixl, region)?;
    }
    #[cfg(feature = "ucx")]
    ucx::in_a_process_of_its_own()?;
    #[cfg(any(feature = "nixl", feature = "ucx"))]
    gpu::tables(region)?;
    criterion.final_summary();
    Ok(())
}

fn figures(
    criterion: &mut Criterion,
    pair: &mut Pair,
    copy: &mut Memcpy,
    region: usize,
) -> Result<(), Error> {
    for block in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        for count in [16, 256, region / block] {
            if count * block > region || count * block < block * 16 {
                continue;
            }
            let moves = Moves::random(block, count, region);
            let mut group = criterion.benchmark_group(format!("{}x{}KiB", count, block >> 10));
            group.throughput(Throughput::Bytes((block * count) as u64));
            group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
            group.bench_function(BenchmarkId::from_parameter("memcpy"), |b| b.iter(|| copy.run(&moves)));
            for (name, op) in [("WRITE", Op::Write), ("READ", Op::Read)] {
                let mut failure = None;
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| {
                        if let Err(error) = pair.run(op, moves.descriptors()) {
                            failure = Some(error);
                        }
                    });
                });
                if let Some(error) = failure {
                    return Err(error);
                }
            }
            group.finish();
        }
    }
    Ok(())
}

/// Medians of throughput and of the ratio to memcpy, measured in turn.
fn ratios(pair: &mut Pair, copy: &mut Memcpy, region: usize) -> Result<(), Error> {
    println!(
        "\n{} MiB in blocks at random places, medians of {ROUNDS} rounds, in which each row has its turn",
        region >> 20
    );
    println!(
        "{:>9} {:>12} {:>12} {:>12} {:>14} {:>14}",
        "block", "memcpy GB/s", "WRITE GB/s", "READ GB/s", "WRITE/memcpy", "READ/memcpy"
    );
    for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let moves = Moves::random(block, region / block, region);
        let mut rounds = Vec::new();
        for round in 0..=ROUNDS {
            let memcpy = timed(|| {
                copy.run(&moves);
                Ok(())
            })?;
            let write = timed(|| pair.run(Op::Write, moves.descriptors()))?;
            let read = timed(|| pair.run(Op::Read, moves.descriptors()))?;
            if round > 0 {
                rounds.push([memcpy, write, read]);
            }
        }
        let median = |value: &dyn Fn(&[f64; 3]) -> f64| median(rounds.iter().map(value));
        let rate = |seconds: f64| region as f64 / seconds / 1e9;
        println!(
            "{:>5} KiB {:>12.2} {:>12.2} {:>12.2} {:>14.2} {:>14.2}",
            block >> 10,
            rate(median(&|round| round[0])),
            rate(median(&|round| round[1])),
            rate(median(&|round| round[2])),
            median(&|round| round[0] / round[1]),
            median(&|round| round[0] / round[2]),
        );
    }
    Ok(())
}

fn timed(run: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

/// The value in the middle; of an even number, the larger of the two.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Blocks to move, each with its destination.
struct Moves {
    block: usize,
    descriptors: Vec<Descriptor>,
}

impl Moves {
    /// `count` distinct blocks, each from a random place to a random place.
    fn random(block: usize, count: usize, region: usize) -> Moves {
        let places = region / block;
        let (from, to) = (shuffled(places, 1), shuffled(places, 2));
        let descriptors = from.iter().zip(&to).take(count).map(|(&from, &to)| Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: (from * block) as u64,
            remote_offset: (to * block) as u64,
            len: block as u64,
        });
        Moves { block, descriptors: descriptors.collect() }
    }

    fn descriptors(&self) -> &[Descriptor] {
        &self.descriptors
    }
}

fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64::new(seed);
    let mut places: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        places.swap(at, random.below(at as u64 + 1) as usize);
    }
    places
}

/// The upper limit of a copy: one thread, within its own memory, with every page touched before.
struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    fn new(region: usize) -> Memcpy {
        Memcpy { from: vec![1; region], to: vec![2; region] }
    }

    fn run(&mut self, moves: &Moves) {
        for descriptor in &moves.descriptors {
            let (from, to) = (descriptor.local_offset as usize, descriptor.remote_offset as usize);
            self.to[to..to + moves.block].copy_from_slice(&self.from[from..from + moves.block]);
        }
        black_box(&mut self.to);
    }
}

/// Fills a region so that every block differs from every other.
pub(crate) fn fill(arena: &Arena) -> Result<(), Error> {
    let mut block = vec![0; 4096];
    for offset in (0..arena.len()).step_by(block.len()) {
        block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&(offset as u64).to_le_bytes()));
        arena.write(offset, &block)?;
    }
    Ok(())
}
