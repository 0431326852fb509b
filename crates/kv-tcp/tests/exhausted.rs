//! A process that has no descriptor left, for a while.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod workers;

use std::fs::File;
use std::time::Duration;

use kv_conformance::{boottime, connect};
use kv_core::{Op, PeerId, Transport, TransportWait};
use kv_tcp::TcpConfig;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use workers::{ended, loopback, post, until, worker};

const LEN: usize = 1 << 20;

/// Descriptors are a matter of the whole process: one test.
#[test]
fn workers_without_a_descriptor_left_rest_and_meet_once_there_are_some_again() {
    let mut to = worker(TcpConfig::new(loopback()), &[LEN]);
    let mut others = [0; 2].map(|_| worker(TcpConfig::new(loopback()), &[LEN]));
    let [early, late] = &mut others;
    let metadata = to.transport.metadata().unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).unwrap();
    // The kernel opens the connection of one peer, which is not accepted yet.
    connect(&mut early.transport, PeerId(1), &metadata).unwrap();
    let taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(!taken.is_empty() && taken.len() < 64);
    connect(&mut late.transport, PeerId(1), &metadata).unwrap();
    let (mut events, mut rests) = (Vec::new(), 0);
    for _ in 0..100 {
        for side in [&mut to, &mut *early, &mut *late] {
            side.transport.poll(boottime(), &mut events);
        }
        // A turn may leave something to do at once, but not every turn.
        if let TransportWait::ReadableOrAfter(_, time) = to.transport.wait() {
            rests += usize::from(time >= Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((events, to.transport.stats().accepted), (vec![], 0));
    assert!(rests >= 10, "it has gone to rest {rests} times");
    drop(taken);
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut events = Vec::new();
    for side in [&mut *early, &mut *late] {
        side.transport.post(PeerId(1), post(1, Op::Write, LEN)).unwrap();
    }
    until("a write of both", &mut [&mut to, early, late], &mut events, |events| {
        events[1..].iter().all(|events| ended(events, 1) == Some(Ok(())))
    });
}
