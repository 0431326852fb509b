//! Over TCP only: the contract is kept with WRITE, READ is refused, and what is on its way stays on its
//! way, for as long as it takes. Another transport than in the other tests, so another process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::sync::Once;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::process::Process;
use kv_conformance::{A_KNOWS_B, Harness, Job, LENS, Other, Pair, Side, pattern, rest, snapshot};
use kv_core::{
    Descriptor, Directions, MemoryKind, Op, PeerId, Post, PostId, Time, Transport, TransportError,
    TransportEvent, WayEnd,
};
use kv_nixl::{ForeignRegion, Nixl, NixlTransport, Route};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::IgnoredAny;
use workers::Workers;

const PEER: PeerId = PeerId(1);
const LEN: usize = Workers::FAR_LEN;

fn tcp() -> Option<&'static Nixl> {
    static SET: Once = Once::new();
    // SAFETY: the other tests of this process wait here, and UCX has not started.
    SET.call_once(|| unsafe { std::env::set_var("UCX_TLS", "tcp") });
    workers::nixl()
}

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(tcp);
}

/// Peers are killed in the middle of their writes and ours, many times; nobody dies with them.
#[test]
fn the_contract_is_kept_with_writes() {
    let Some(nixl) = tcp() else { return };
    kv_conformance::all(|| Workers { reads: false, ..Workers::alike(nixl, "default") });
}

#[test]
fn reads_are_refused_before_anything_moves_unless_they_are_allowed() {
    let Some(nixl) = tcp() else { return };
    for (kind, allowed) in [("default", false), ("reads-over-tcp", true)] {
        let mut pair = Pair::connected(&Workers { reads: allowed, ..Workers::alike(nixl, kind) }, &LENS);
        pair.b.memory.write(0, 0, b"bytes");
        assert_eq!(pair.a.transport.route(A_KNOWS_B), Some(Route::Tcp));
        assert_eq!(pair.a.transport.directions(Some(A_KNOWS_B)), Directions::WRITE);
        assert_eq!(pair.a.transport.directions(None), Directions::WRITE);
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 5 };
        let post = Post { id: PostId(1), op: Op::Read, descriptors: vec![descriptor], notify: None };
        let taken = pair.a.transport.post(A_KNOWS_B, post);
        let mut bytes = [0; 5];
        if allowed {
            assert_eq!(taken, Ok(()));
            pair.until("a read", |pair| !pair.a_events.is_empty());
            pair.a.memory.read(0, 0, &mut bytes);
            assert_eq!(&bytes, b"bytes");
        } else {
            let Err(TransportError::Unsupported(why)) = taken else { panic!("{taken:?}") };
            assert!(why.contains("READ over TCP") && why.contains("reads_over_tcp"), "{why}");
            (0..100).for_each(|_| pair.turn());
            pair.a.memory.read(0, 0, &mut bytes);
            assert_eq!((pair.a_events, bytes), (vec![], [0; 5]));
        }
    }
}

fn signal(other: &Process, signal: Signal) {
    kill_process(Pid::from_child(other.child()), signal).unwrap();
}

fn sleep(transport: &NixlTransport) {
    rest(transport, Duration::from_millis(10));
}

fn pass(side: &mut Side<NixlTransport>, events: &mut Vec<TransportEvent>, span: Duration) {
    let end = Instant::now() + span;
    while Instant::now() < end {
        side.transport.poll(Time::ZERO, events);
        sleep(&side.transport);
    }
}

fn until(
    side: &mut Side<NixlTransport>,
    events: &mut Vec<TransportEvent>,
    what: &str,
    done: impl Fn(&[TransportEvent]) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {} events, {:?}", events.len(), side.transport);
        side.transport.poll(Time::ZERO, events);
        sleep(&side.transport);
    }
}

#[test]
fn a_cancelled_post_is_not_over_before_its_bytes_are() {
    let Some(nixl) = tcp() else { return };
    let mut side = workers::worker_with(nixl, &[LEN], workers::configured("reads-over-tcp"));
    let other = Process::start("default", Job::Serve, &side.transport.metadata().unwrap());
    side.transport.connect(PEER, other.metadata()).unwrap();
    side.transport.permit(PEER, Time::MAX);
    let whole = |id| {
        let descriptor = Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: 0,
            remote_offset: 0,
            len: LEN as u64,
        };
        Post { id: PostId(id), op: Op::Read, descriptors: vec![descriptor], notify: None }
    };
    let mut events = Vec::new();
    let begun = Instant::now();
    side.transport.post(PEER, whole(1)).unwrap();
    until(&mut side, &mut events, "a post", |events| !events.is_empty());
    println!("READ over TCP: {:.2} GB/s", LEN as f64 / begun.elapsed().as_secs_f64() / 1e9);
    events.clear();

    signal(&other, Signal::STOP);
    side.transport.post(PEER, whole(2)).unwrap();
    side.transport.post(PEER, whole(3)).unwrap();
    // A third one that never gets a request on its way: the window is full.
    side.transport.post(PEER, whole(4)).unwrap();
    for _ in 0..100 {
        side.transport.poll(Time::ZERO, &mut events);
    }
    for id in 2..=4 {
        side.transport.cancel(PostId(id));
    }
    side.transport.disconnect(PEER);
    pass(&mut side, &mut events, Duration::from_millis(700));
    let cancelled = |id| TransportEvent::Posted { post: PostId(id), result: Err(TransportError::Cancelled) };
    assert!(events.iter().all(|event| *event != cancelled(2)), "the first is on its way: {events:?}");
    assert!(side.transport.stats().unquiet >= 1);
    assert!(!side.transport.shutdown(Duration::from_millis(50)), "it cannot be quiet yet");

    // Now it goes on; the bytes come, then the events, and after them nothing.
    signal(&other, Signal::CONT);
    until(&mut side, &mut events, "the ends", |events| (2..=4).all(|id| events.contains(&cancelled(id))));
    assert_eq!(events.len(), 3);
    assert_eq!(side.transport.stats().unquiet, 0);
    side.memory.write(0, 0, &vec![0xee; LEN]);
    pass(&mut side, &mut events, Duration::from_millis(300));
    assert!(snapshot(&side)[0].iter().all(|byte| *byte == 0xee), "written after the event");
    assert!(side.transport.shutdown(Duration::from_secs(1)));
    let again = PeerId(2);
    side.transport.connect(again, other.metadata()).unwrap();
    side.transport.permit(again, Time::MAX);
    let post = Post { id: PostId(9), ..whole(9) };
    events.clear();
    side.transport.post(again, post).unwrap();
    until(&mut side, &mut events, "a post", |events| !events.is_empty());
    assert!(snapshot(&side)[0] == pattern(LEN));
}

/// Killed while it runs, and while it is stopped with the requests in its sockets.
#[test]
fn a_source_killed_in_the_middle_of_reads_brings_no_byte_after_their_ends() {
    let Some(nixl) = tcp() else { return };
    for stopped in [false, true, false, true] {
        let connect =
            |transport: &mut NixlTransport, metadata: &[u8]| transport.connect(PEER, metadata).unwrap();
        kill_amid_reads(nixl, stopped, connect, WayEnd::Dead { quiet_after: Duration::ZERO });
    }
}

/// Its process is not known to be dead: the end comes once UCX has closed the connection, and some time
/// has passed.
#[test]
fn a_foreign_source_killed_in_the_middle_of_reads_brings_no_byte_after_their_ends() {
    let Some(nixl) = tcp() else { return };
    for stopped in [false, true, false, true] {
        kill_amid_reads(nixl, stopped, connect_foreign, WayEnd::Lost);
    }
}

/// Takes a transport of ours for an agent of somebody else, by what its metadata says of its agent, and under
/// a name that no transport has: NIXL goes by what is in the metadata.
fn connect_foreign(transport: &mut NixlTransport, metadata: &[u8]) {
    type Any = IgnoredAny;
    type Places = Vec<(u64, u64, u64, Any, u64)>;
    type Envelope = (Any, Any, Any, Any, Any, Any, Any, Places, Any, Bytes);
    let (.., places, _, agent) = rmp_serde::from_slice::<Envelope>(metadata).unwrap();
    let region = |(addr, len, item_len, _, device)| ForeignRegion {
        addr,
        len,
        item_len,
        memory: MemoryKind::Dram,
        device,
    };
    let regions: Vec<ForeignRegion> = places.into_iter().map(region).collect();
    let mut agent = agent.to_vec();
    let name = agent.windows(3).position(|prefix| prefix == b"kv-").unwrap();
    agent[name..name + 2].copy_from_slice(b"no");
    transport.connect_foreign(PEER, &agent, &regions).unwrap();
}

fn kill_amid_reads(nixl: &Nixl, stopped: bool, connect: impl Fn(&mut NixlTransport, &[u8]), end: WayEnd) {
    let config = workers::configured("reads-over-tcp").with(|config| config.settle = Duration::from_secs(1));
    let mut side = workers::worker_with(nixl, &[LEN], config);
    let mut other = Process::start("default", Job::Serve, &side.transport.metadata().unwrap());
    connect(&mut side.transport, other.metadata());
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    let read = |id| Post { id: PostId(id), op: Op::Read, descriptors: vec![descriptor], notify: None };
    let mut events = Vec::new();
    side.transport.post(PEER, read(0)).unwrap();
    until(&mut side, &mut events, "a read", |events| !events.is_empty());
    side.memory.write(0, 0, &vec![0; LEN]);
    events.clear();
    (1..=8).for_each(|id| side.transport.post(PEER, read(id)).unwrap());
    for _ in 0..5 {
        side.transport.poll(Time::ZERO, &mut events);
    }
    if stopped {
        signal(&other, Signal::STOP);
        let stopped = Instant::now() + Duration::from_millis(50);
        until(&mut side, &mut events, "a while", |_| Instant::now() > stopped);
    }
    other.kill();
    until(&mut side, &mut events, "the end", |events| {
        events.iter().any(|event| matches!(event, TransportEvent::PeerGone { .. }))
    });
    side.memory.write(0, 0, &vec![0xee; LEN]);
    assert_eq!(events.last(), Some(&TransportEvent::PeerGone { peer: PEER, end }));
    assert_eq!(events.len(), 9, "{events:?}");
    let failed = |event: &&TransportEvent| matches!(event, TransportEvent::Posted { result: Err(_), .. });
    assert!(events.iter().filter(failed).count() > 0, "it was killed too late to show anything");
    let later = Instant::now() + Duration::from_millis(200);
    until(&mut side, &mut events, "a while", |_| Instant::now() > later);
    assert!(snapshot(&side)[0].iter().all(|byte| *byte == 0xee), "written after the ends");
    assert_eq!((events.len(), side.transport.stats().unquiet), (9, 0));
}
