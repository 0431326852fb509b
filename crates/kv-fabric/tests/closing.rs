//! Workers that end while something is half received, or half connected.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{A_KNOWS_B, Pair, boottime, snapshot};
use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportEvent};
use kv_fabric::FabricTransport;
use workers::{Kind, worker};

const LEN: usize = 64 << 20;

/// Runs a check with each kind of worker, after which no descriptor is left open. Checks are run one after the other.
fn leaves_nothing_open(check: impl Fn(Kind)) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    // What the library opens once stays open.
    drop(Pair::connected(&Kind::Usual, &[1]));
    let before = open();
    for kind in [Kind::Usual, Kind::Two, Kind::Three] {
        check(kind);
        assert_eq!(open(), before, "{kind:?}: open descriptors");
    }
}

/// A pair whose first worker has begun a write or a read of a whole region. The side that receives its bytes has taken in
/// what was on its way; the other side does not move meanwhile, and the operation stops somewhere in the middle.
fn half_received(kind: Kind, op: Op) -> Pair<FabricTransport> {
    let mut pair = Pair::connected(&kind, &[LEN]);
    let page =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    let notify = (op == Op::Write).then(|| Bytes::from_static(b"whole"));
    let receiver =
        |pair: &Pair<FabricTransport>| snapshot(if op == Op::Write { &pair.b } else { &pair.a }).remove(0);
    let source = if op == Op::Write { &pair.a } else { &pair.b };
    source.memory.write(0, 0, &vec![7; LEN]);
    pair.a.transport.post(A_KNOWS_B, Post { id: PostId(1), op, descriptors: vec![page], notify }).unwrap();
    pair.until("the first bytes", |pair| receiver(pair).contains(&7));
    let mut before = receiver(&pair);
    loop {
        let begun = Instant::now();
        let side = if op == Op::Write { &mut pair.b } else { &mut pair.a };
        while begun.elapsed() < Duration::from_millis(50) {
            side.transport.poll(boottime(), &mut Vec::new());
        }
        let now = receiver(&pair);
        if now == before {
            break;
        }
        before = now;
    }
    assert!(before.contains(&0), "{op:?}: all bytes are there");
    pair
}

#[test]
fn a_worker_that_ends_in_the_middle_of_a_peers_write_ends_cleanly() {
    leaves_nothing_open(|kind| {
        let Pair { mut a, b, mut a_events, .. } = half_received(kind, Op::Write);
        drop(b);
        let dropped = Instant::now();
        while !a_events.iter().any(|event| matches!(event, TransportEvent::PeerGone { .. })) {
            assert!(dropped.elapsed() < Duration::from_secs(60), "{a_events:?}");
            a.transport.poll(boottime(), &mut a_events);
        }
    });
}

#[test]
fn a_worker_that_ends_in_the_middle_of_its_own_read_ends_cleanly() {
    leaves_nothing_open(|kind| {
        let Pair { a, mut b, mut b_events, .. } = half_received(kind, Op::Read);
        drop(a);
        b.transport.poll(boottime(), &mut b_events);
    });
}

/// The peer's kernel answers, or its queue of connections is full, but no worker is behind it.
#[test]
fn a_worker_that_ends_while_it_connects_ends_cleanly() {
    leaves_nothing_open(|kind| {
        for full in [false, true] {
            let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
            let at = deaf.local_addr().unwrap();
            let connect = || TcpStream::connect_timeout(&at, Duration::from_millis(100));
            let queue: Vec<_> = if full { std::iter::from_fn(|| connect().ok()).collect() } else { vec![] };
            let mut here = worker(kind.config(), &[1]);
            let peer = worker(Kind::Usual.config(), &[1]);
            let name = |port: u16| [&2u16.to_ne_bytes()[..], &port.to_be_bytes(), &[127, 0, 0, 1]].concat();
            let mut metadata = peer.transport.metadata().unwrap().to_vec();
            let place =
                metadata.windows(8).position(|bytes| bytes == name(u16::from_be_bytes([bytes[2], bytes[3]])));
            let place = place.unwrap();
            metadata[place..place + 8].copy_from_slice(&name(at.port()));
            here.transport.connect(A_KNOWS_B, &metadata).unwrap();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(100) {
                here.transport.poll(boottime(), &mut Vec::new());
            }
            println!("{kind:?}: {} connections before it", queue.len());
            drop(here);
        }
    });
}
