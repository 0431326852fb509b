//! What transports over NIXL leave in memory: a process of its own, because the memory of other tests would count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use bytes::Bytes;
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Time, Transport};
use kv_nixl::HostMemory;
use workers::{nixl, worker};

const PEER: PeerId = PeerId(1);

#[test]
fn transports_posts_and_memory_leave_nothing_behind() {
    let Some(nixl) = nixl() else { return };
    let cycle = |rounds: usize| {
        let (mut here, mut there) = (worker(nixl, &[8 << 20]), worker(nixl, &[8 << 20]));
        here.transport.connect(PEER, &there.transport.metadata().unwrap()).unwrap();
        here.transport.permit(PEER, Time::MAX);
        for id in 0..rounds as u64 {
            let descriptors = (0..64).map(|at| Descriptor {
                local_region: 0,
                remote_region: 0,
                local_offset: at << 16,
                remote_offset: (63 - at) << 16,
                len: 5000,
            });
            let notify = Some(Bytes::from(vec![7; 1000]));
            let post = Post { id: PostId(id), op: Op::Write, descriptors: descriptors.collect(), notify };
            here.transport.post(PEER, post).unwrap();
            // Memory that has nothing to do with the transport comes and goes.
            let other = HostMemory::new(4 << 20).unwrap();
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            while ours.is_empty() || theirs.is_empty() {
                here.transport.poll(Time::ZERO, &mut ours);
                there.transport.poll(Time::ZERO, &mut theirs);
            }
            drop(other);
        }
        assert_eq!(here.transport.stats().posts_completed, rounds as u64);
    };
    for _ in 0..10 {
        cycle(50);
    }
    let before = resident();
    for _ in 0..20 {
        cycle(100);
    }
    let grown = resident().saturating_sub(before);
    println!("2000 posts in 20 transports: {grown} KiB more");
    // NIXL itself may keep up to 300 KB of each agent that was made and dropped.
    assert!(grown < 12 << 10, "{grown} KiB more");
}

/// Resident memory in KiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
