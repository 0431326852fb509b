//! Our throughput over that of plain code, from pairs of measurements taken in turn.
//!
//! Each row has the ratio of the elapsed times, and that of the processor times of the thread. On a busy
//! machine the second ratio is steadier. Over shared memory, where the thread does the copy, both mean the
//! same.

use std::time::Instant;

use kv_transfer::nixl::{HostMemory, Nixl};
use kv_transfer::unstable::{Descriptor, Op};
use rustix::time::{ClockId, clock_gettime};

use super::{Pair, Route};
use crate::{Error, Moves};

/// How long the pairs of one row take together, in seconds, and the least and largest number of pairs.
const ROW: f64 = 2.0;
const ROUNDS: std::ops::RangeInclusive<usize> = 9..=101;

/// Transfers of 32 MiB and of the whole region, by block size.
pub(super) fn large(pair: &mut Pair, region: usize) -> Result<(), Error> {
    println!(
        "\nNIXL, {}: our transport / plain nixl-sys code, medians of pairs of measurements",
        pair.route.name()
    );
    println!("{:>15} {:>38} {:>38}", "", "WRITE", "READ");
    let columns = format!("{:>14} {:>7} {:>15}", "GB/s", "ratio", "of CPU times");
    println!("{:>15} {columns:>38} {columns:>38}", "blocks");
    let mut lowest = f64::INFINITY;
    for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        for total in [32 << 20, region] {
            if total > region {
                continue;
            }
            let moves = Moves::random(block, total / block, region);
            print!("{:>6} x {:>4} K", total / block, block >> 10);
            for op in [Op::Write, Op::Read] {
                let times = compare(
                    pair,
                    || moves.descriptors().to_vec(),
                    |pair, descriptors| {
                        pair.post(op, descriptors)?;
                        pair.await_posts(1)
                    },
                    |pair| pair.raw(op, moves.descriptors()),
                )?;
                let rate = |seconds: f64| total as f64 / seconds / 1e9;
                let rates = format!("{:.2} / {:.2}", rate(times.transport), rate(times.raw));
                print!(" {rates:>14} {:>7.3} {:>15.3}", times.ratio, times.cpu_ratio);
                lowest = lowest.min(times.ratio);
            }
            println!();
        }
    }
    println!("lowest ratio: {lowest:.3}");
    Ok(())
}

/// A thousand requests of one random page each, with 32 layers of 8 KiB. If the layers are apart in memory, a
/// page is one descriptor for each layer; if they are together, it is one descriptor.
pub(super) fn small(nixl: &Nixl, region: usize, route: Route) -> Result<(), Error> {
    let (layers, piece) = (32, 8 << 10);
    let pages = region / (layers * piece);
    let requests = if region < 16 << 20 { pages } else { 1000 };
    println!(
        "\n{requests} requests of one page of a cache of {} MiB, {layers} layers of {} KiB; NIXL, {}",
        region >> 20,
        piece >> 10,
        route.name()
    );
    println!("{:>12} {:>14} {:>16} {:>7} {:>13}", "", "descriptors", "ms together", "ratio", "of CPU times");
    // A cache of fewer pages gives some of them to several requests.
    let random = Moves::random(layers * piece, requests.min(pages), region);
    let page: Vec<Descriptor> = random.descriptors().iter().cycle().take(requests).copied().collect();
    let layer_major: Vec<Vec<Descriptor>> = page
        .iter()
        .map(|page| {
            // The same pages, but the layers lie apart.
            let at = |offset: u64, layer: usize| (layer * pages * piece) as u64 + offset / layers as u64;
            let descriptor = |layer| Descriptor {
                local_offset: at(page.local_offset, layer),
                remote_offset: at(page.remote_offset, layer),
                len: piece as u64,
                ..*page
            };
            (0..layers).map(descriptor).collect()
        })
        .collect();
    let page_major: Vec<Vec<Descriptor>> = page.iter().map(|page| vec![*page]).collect();
    let mut took = Vec::new();
    let mut copied = f64::NAN;
    let layouts = [("layer-major", &layer_major, piece), ("page-major", &page_major, layers * piece)];
    for (layout, posts, item) in layouts {
        let mut pair = Pair::start(nixl, region, route, item as u64)?;
        let times = compare(
            &mut pair,
            || posts.clone(),
            |pair, posts| {
                let count = posts.len();
                for descriptors in posts {
                    pair.post(Op::Write, descriptors)?;
                }
                pair.await_posts(count)
            },
            |pair| posts.iter().try_for_each(|descriptors| pair.raw(Op::Write, descriptors)),
        )?;
        println!(
            "{layout:>12} {:>14} {:>16} {:>7.3} {:>13.3}",
            posts.iter().map(Vec::len).sum::<usize>(),
            format!("{:.1} / {:.1}", times.transport * 1e3, times.raw * 1e3),
            times.ratio,
            times.cpu_ratio
        );
        took.push(times.transport);
        copied = memcpy(&pair, region, &page)?;
    }
    if let [layer_major, page_major] = took[..] {
        println!(
            "the page-major layout is {:.2} times as fast as the layer-major layout",
            layer_major / page_major
        );
        println!(
            "memcpy of the same pages takes {:.1} ms: a transport without any cost would be {:.2} times as fast",
            copied * 1e3,
            layer_major / copied
        );
    }
    Ok(())
}

/// How long one thread of this process takes to copy the same pages, in seconds: the limit that memory sets.
fn memcpy(pair: &Pair, region: usize, pages: &[Descriptor]) -> Result<f64, Error> {
    let (from, to) = (&pair.ends.pool, HostMemory::new(region)?);
    let mut rounds = Vec::new();
    for _ in 0..*ROUNDS.start() {
        let begun = Instant::now();
        for descriptor in pages {
            // SAFETY: both pools have `region` bytes, in which the descriptors lie; they are apart.
            #[allow(unsafe_code)]
            unsafe {
                let from = (from.addr() + descriptor.local_offset) as *const u8;
                let to = (to.addr() + descriptor.remote_offset) as *mut u8;
                std::ptr::copy_nonoverlapping(from, to, descriptor.len as usize);
            }
        }
        rounds.push(begun.elapsed().as_secs_f64());
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds.get(rounds.len() / 2).copied().unwrap_or(f64::NAN))
}

/// The medians of a comparison.
struct Times {
    transport: f64,
    raw: f64,
    /// Of the throughputs, transport over plain code.
    ratio: f64,
    cpu_ratio: f64,
}

/// The duration of one measurement, in seconds.
#[derive(Clone, Copy)]
struct Took {
    clock: f64,
    cpu: f64,
}

/// Measures the transport and plain code in turn. The transport is given its descriptors to keep, and plain
/// code reads them where they are: neither measurement includes making them.
fn compare<D>(
    pair: &mut Pair,
    mut descriptors: impl FnMut() -> D,
    mut transport: impl FnMut(&mut Pair, D) -> Result<(), Error>,
    mut raw: impl FnMut(&mut Pair) -> Result<(), Error>,
) -> Result<Times, Error> {
    let mut rounds: Vec<(Took, Took)> = Vec::new();
    // The first one warms up.
    let mut transport = |pair: &mut Pair| {
        let descriptors = descriptors();
        took(|| transport(pair, descriptors))
    };
    transport(pair)?;
    took(|| raw(pair))?;
    let begun = Instant::now();
    while rounds.len() < *ROUNDS.start()
        || (rounds.len() < *ROUNDS.end() && begun.elapsed().as_secs_f64() < ROW)
    {
        // Who comes first changes.
        rounds.push(if rounds.len().is_multiple_of(2) {
            let transport = transport(pair)?;
            (transport, took(|| raw(pair))?)
        } else {
            let raw = took(|| raw(pair))?;
            (transport(pair)?, raw)
        });
    }
    let median = |value: &dyn Fn(&(Took, Took)) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    Ok(Times {
        transport: median(&|(transport, _)| transport.clock),
        raw: median(&|(_, raw)| raw.clock),
        ratio: median(&|(transport, raw)| raw.clock / transport.clock),
        cpu_ratio: median(&|(transport, raw)| raw.cpu / transport.cpu),
    })
}

fn took(run: impl FnOnce() -> Result<(), Error>) -> Result<Took, Error> {
    let cpu = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    let (clock, before) = (Instant::now(), cpu());
    run()?;
    Ok(Took { clock: clock.elapsed().as_secs_f64(), cpu: cpu() - before })
}
