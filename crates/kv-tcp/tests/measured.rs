//! What slow peers and strangers cost, in time and in memory. One test runs at a time, because others would be
//! measured with it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::process::{self, Process};
use kv_conformance::{Job, Other, Side, boottime, connect, pattern, rest};
use kv_core::{Op, PeerId, Transport, TransportError, TransportEvent};
use kv_tcp::{TcpConfig, TcpTransport};
use workers::wire::{Wire, config_behind};
use workers::{ended, loopback, post, resident, until, worker};

const PEER: PeerId = PeerId(1);
const LEN: usize = 16 << 20;

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other process: a worker behind the wire with the address in `word`, or behind none. Without its
/// variable it is no test at all.
#[test]
fn child() {
    process::child(|word| {
        let config = word.parse().map_or_else(|_| TcpConfig::new(loopback()), config_behind);
        worker(config, &[LEN])
    });
}

/// Lets so many writes and reads end before anything else happens, and returns how long they took.
fn transfers(here: &mut Side<TcpTransport>, peer: PeerId, first: u64, count: u64) -> Duration {
    let begun = Instant::now();
    for id in first..first + count {
        here.transport.post(peer, post(id, if id % 2 == 0 { Op::Write } else { Op::Read }, LEN)).unwrap();
    }
    let (mut events, mut left) = (Vec::new(), count);
    while left > 0 {
        assert!(begun.elapsed() < Duration::from_secs(120), "{left} posts have not ended");
        here.transport.poll(boottime(), &mut events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { post, result } if post.0 >= first => {
                    assert_eq!(result, Ok(()), "{post}");
                    left -= 1;
                }
                event => panic!("{event:?} while {left} posts have not ended"),
            }
        }
        rest(&here.transport, Duration::from_millis(5));
    }
    begun.elapsed()
}

#[test]
fn transfers_of_a_fast_peer_do_not_wait_for_those_on_a_slow_wire_which_wakes_nobody_in_vain() {
    let _alone = alone();
    let (fast, slow) = (PeerId(1), PeerId(2));
    // The slow peer reads from here by one slow wire, and is written to and read from by another one.
    let (in_wire, out_wire) = (Wire::new(), Wire::new());
    let mut here = worker(in_wire.config(), &[LEN]);
    here.memory.write(0, 0, &pattern(LEN));
    let metadata = here.transport.metadata().unwrap();
    let fast_one = Process::start("direct", Job::Serve, &metadata);
    connect(&mut here.transport, fast, fast_one.metadata()).unwrap();
    transfers(&mut here, fast, 1000, 8);
    let alone = (0..5).map(|round| transfers(&mut here, fast, 2000 + 100 * round, 16)).min().unwrap();

    for wire in [&in_wire, &out_wire] {
        wire.slow(2 << 20);
    }
    let slow_one = Process::start(&out_wire.addr().to_string(), Job::Read, &metadata);
    connect(&mut here.transport, slow, slow_one.metadata()).unwrap();
    for id in 0..8 {
        here.transport.post(slow, post(id, if id % 2 == 0 { Op::Write } else { Op::Read }, LEN)).unwrap();
    }
    // Until the slow peer has its connections in both directions, and their buffers are full.
    let (begun, mut events) = (Instant::now(), Vec::new());
    while in_wire.connections() < 2 || out_wire.connections() < 2 || begun.elapsed() < Duration::from_secs(1)
    {
        assert!(begun.elapsed() < Duration::from_secs(60));
        here.transport.poll(boottime(), &mut events);
        rest(&here.transport, Duration::from_millis(5));
    }
    assert_eq!(events, [], "the slow peer is not slow");
    // The clock is the slow wire, which needs seconds for its first post: 80 transfers, which take a fraction of a
    // second, end before it. A machine that stops for a while stops the wire, too.
    let beside = (0..5).map(|round| transfers(&mut here, fast, 4000 + 100 * round, 16)).min().unwrap();
    println!("16 transfers of {} MiB: {alone:?} alone, {beside:?} beside a slow peer", LEN >> 20);
    // Sockets with full buffers wake this side for some of the pieces that the wire takes, and not all the time.
    let (begun, busy) = (Instant::now(), kv_host::clock::thread_time());
    while begun.elapsed() < Duration::from_millis(500) {
        here.transport.poll(boottime(), &mut events);
        rest(&here.transport, Duration::from_millis(5));
    }
    let (busy, whole) = (kv_host::clock::thread_time() - busy, begun.elapsed());
    println!("{busy:?} of {whole:?} on the processor beside a slow peer alone");
    assert!(busy < whole / 8, "{busy:?} of {whole:?} on the processor");
    // The slow peer gets what it was promised, once its wire is quick.
    for wire in [&in_wire, &out_wire] {
        wire.slow(0);
    }
    let deadline = Instant::now() + Duration::from_secs(120);
    while events.len() < 8 {
        assert!(Instant::now() < deadline, "{events:?}");
        here.transport.poll(boottime(), &mut events);
        rest(&here.transport, Duration::from_millis(5));
    }
    assert!((0..8).all(|id| ended(&events, id) == Some(Ok(()))), "{events:?}");
}

#[test]
fn what_a_peer_does_not_take_is_refused_here_and_goes_on_when_the_peer_takes_it() {
    let _alone = alone();
    let wire = Wire::new();
    let config = TcpConfig::new(loopback()).with(|config| config.max_posts = 16);
    let (mut from, mut to) = (worker(config, &[LEN]), worker(wire.config(), &[LEN]));
    from.memory.write(0, 0, &pattern(LEN));
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"hello")).unwrap();
    let mut events = Vec::new();
    until("a frame", &mut [&mut from, &mut to], &mut events, |events| !events[1].is_empty());
    events.clear();
    wire.hold(true);
    let (mut frames, mut posts) = (0_u64, 0);
    let before = resident();
    loop {
        let frame = Bytes::from(vec![frames as u8; 64 << 10]);
        match from.transport.send(PEER, frame) {
            Ok(()) => frames += 1,
            Err(error) => {
                assert_eq!(error, TransportError::WouldBlock);
                break;
            }
        }
        assert!(frames < 16 << 10, "a gigabyte of frames is accepted for a peer that takes none");
        from.transport.poll(boottime(), &mut Vec::new());
    }
    while from.transport.post(PEER, post(posts, Op::Write, LEN)).is_ok() {
        posts += 1;
    }
    assert_eq!(posts, 16);
    assert_eq!(from.transport.post(PEER, post(99, Op::Read, LEN)), Err(TransportError::WouldBlock));
    for _ in 0..1000 {
        from.transport.poll(boottime(), &mut Vec::new());
    }
    // The frames that wait, and nothing of the pages.
    let grown = resident().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes more");
    wire.hold(false);
    until("all frames and posts", &mut [&mut from, &mut to], &mut events, |events| {
        events[1].len() as u64 == frames && events[0].len() as u64 == posts
    });
    for (number, event) in events[1].iter().enumerate() {
        let TransportEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
        assert!(frame.len() == 64 << 10 && frame.iter().all(|byte| *byte == number as u8), "{number}");
    }
    assert!((0..posts).all(|id| ended(&events[0], id) == Some(Ok(()))));
    let mut bytes = vec![0; LEN];
    to.memory.read(0, 0, &mut bytes);
    assert!(bytes == pattern(LEN));
}

#[cfg(feature = "tls")]
#[test]
fn strangers_who_never_end_their_tls_handshake_cost_a_bounded_memory() {
    let _alone = alone();
    let tls = workers::authority::Authority::new().tls();
    let config = TcpConfig::new(loopback()).with(|config| config.tls = Some(tls));
    let mut to = worker(config, &[LEN]);
    to.transport.metadata().unwrap();
    let addr = to.transport.local_addr();
    // Records of a handshake, which are parts of one message of 56 KiB that never comes to its end.
    let mut records = vec![0x16, 3, 1, 0x40, 0, 1, 0, 0xe0, 0];
    records.resize(5 + (16 << 10), 3);
    let mut more = vec![0x16, 3, 1, 0x40, 0];
    more.resize(5 + (16 << 10), 3);
    let flood = [records, more.repeat(2)].concat();
    let before = resident();
    let crowd: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(addr).unwrap()).collect();
    let mut events = Vec::new();
    for mut stream in &crowd {
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(&flood);
        to.transport.poll(boottime(), &mut events);
    }
    for _ in 0..200 {
        to.transport.poll(boottime(), &mut events);
    }
    let grown = resident().saturating_sub(before);
    println!("{grown} bytes for 64 strangers, {:?}", to.transport.stats());
    assert!(grown < 64 * (128 << 10) && events.is_empty(), "{grown} bytes for 64 strangers");
    assert_eq!(to.transport.stats().refused, 0);
}

#[test]
fn strangers_who_send_without_end_cost_one_greeting_each() {
    let _alone = alone();
    let mut to = worker(TcpConfig::new(loopback()), &[LEN]);
    to.transport.metadata().unwrap();
    let addr = to.transport.local_addr();
    let mut hello = b"KVt\x02".to_vec();
    hello.resize(119, 5);
    let flood = vec![5; 1 << 20];
    let mut events = Vec::new();
    let mut crowd = || -> Vec<TcpStream> {
        let crowd: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(addr).unwrap()).collect();
        for mut stream in &crowd {
            stream.write_all(&hello).unwrap();
            stream.set_nonblocking(true).unwrap();
        }
        for _ in 0..200 {
            to.transport.poll(boottime(), &mut events);
        }
        crowd
    };
    // The first crowd makes tables grow to their size.
    drop(crowd());
    let before = resident();
    let crowd = crowd();
    let refused = to.transport.stats().refused;
    for mut stream in &crowd {
        // Too short still to be a greeting. More is read by nobody, and the kernel stops taking it.
        assert!(matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock));
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 1 << 20, "{grown} bytes for 64 strangers");
    assert_eq!((to.transport.stats().refused, events.len()), (refused, 0));
    // One byte more ends the greeting, and nothing that follows it is kept.
    for mut stream in &crowd {
        let _ = stream.write(&flood);
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while to.transport.stats().refused < refused + 64 {
        assert!(Instant::now() < deadline, "{:?}", to.transport.stats());
        to.transport.poll(boottime(), &mut events);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 1 << 20 && events.is_empty(), "{grown} bytes for 64 strangers, {events:?}");
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.post(PEER, post(1, Op::Read, LEN)).unwrap();
    let mut events = Vec::new();
    until("a read", &mut [&mut from, &mut to], &mut events, |events| ended(&events[0], 1) == Some(Ok(())));
}
