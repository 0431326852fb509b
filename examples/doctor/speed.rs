//! The speed of a transport between a worker of this thread and one of another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_transfer::tcp::HostMemory;
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

use super::Error;

/// The size of the region of each worker, in bytes.
pub const REGION: usize = 64 << 20;
/// The worker of the other thread.
pub const PEER: PeerId = PeerId(1);

const BLOCK: usize = 64 << 10;
const ROUNDS: u64 = 5;
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory for a worker, and its only region.
pub fn memory() -> Result<(HostMemory, Region), Error> {
    let memory = HostMemory::new(REGION)?;
    let region = Region::dram(RegionRole::Kv, memory.addr(), REGION as u64, BLOCK as u64);
    Ok((memory, region))
}

/// Medians in GB/s of moving every block of the region to another place.
pub fn between<T: Transport + Send + 'static, const OPS: usize>(
    here: &mut T,
    mut there: T,
    ops: [Op; OPS],
) -> Result<[f64; OPS], Error> {
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let server = std::thread::spawn(move || {
        let mut events = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            there.poll(Time::ZERO, &mut events);
            events.clear();
            std::thread::yield_now();
        }
    });
    let mut rates = [0.0; OPS];
    let measured = ops.iter().zip(&mut rates).enumerate().try_for_each(|(at, (op, rate))| {
        let first = at as u64 * 100;
        let seconds = (first..=first + ROUNDS).map(|id| post(here, id, *op)).collect::<Result<Vec<_>, _>>();
        // The first one opens what later ones have.
        let mut seconds = seconds?.split_off(1);
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::INFINITY);
        *rate = REGION as f64 / median / 1e9;
        Ok(())
    });
    over.store(true, Ordering::Relaxed);
    server.join().map_err(|_| "the other thread has ended early")?;
    measured.map(|()| rates)
}

/// Runs one post to its end. Returns its duration in seconds.
fn post<T: Transport>(transport: &mut T, id: u64, op: Op) -> Result<f64, Error> {
    let blocks = REGION / BLOCK;
    // Every block from another place than it goes to.
    let descriptors = (0..blocks).map(|at| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: (at * BLOCK) as u64,
        remote_offset: ((at * 389 + 7) % blocks * BLOCK) as u64,
        len: BLOCK as u64,
    });
    let begun = Instant::now();
    transport.post(PEER, Post { id: PostId(id), op, descriptors: descriptors.collect(), notify: None })?;
    let mut events = Vec::new();
    while begun.elapsed() < PATIENCE {
        transport.poll(Time::ZERO, &mut events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { result, .. } => {
                    result?;
                    return Ok(begun.elapsed().as_secs_f64());
                }
                TransportEvent::PeerGone { end, .. } => {
                    return Err(format!("the way has ended: {end:?}").into());
                }
                TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
            }
        }
        std::thread::yield_now();
    }
    Err(format!("a post has not ended within {PATIENCE:?}").into())
}
