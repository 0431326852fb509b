//! The NIXL transport keeps the contract of transports, also with processes that are killed; and what else it
//! promises.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Other, Side, pattern, rest};
use kv_core::{
    Descriptor, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportError,
    TransportEvent, WayEnd,
};
use kv_nixl::{HostMemory, MemoryError, NixlConfig, NixlError, NixlTransport, Route};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use workers::{Workers, nixl, worker};

const PEER: PeerId = PeerId(1);

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(nixl);
}

#[test]
fn the_contract_is_kept() {
    let Some(nixl) = nixl() else { return };
    kv_conformance::all(|| Workers::alike(nixl, "default"));
}

#[test]
fn memory_that_the_transport_was_not_given_is_refused() {
    let Some(nixl) = nixl() else { return };
    let pool = HostMemory::new(1 << 20).unwrap();
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    let region = |addr, len| Region::dram(RegionRole::Kv, addr, len, 1);
    let whole = region(pool.addr(), 1 << 20);
    assert!(matches!(transport.register(&whole), Err(TransportError::UnknownMemory { region: 0, .. })));
    transport.add_memory(&pool).unwrap();
    for wrong in [
        region(pool.addr() - 1, 10),
        region(pool.addr() + 1, 1 << 20),
        region(pool.addr(), u64::MAX),
        whole.clone().memory(MemoryKind::Vram, 0),
        whole.clone().memory(MemoryKind::File, 0),
    ] {
        assert!(matches!(transport.register(&wrong), Err(TransportError::UnknownMemory { .. })), "{wrong:?}");
    }
    transport.register(&whole).unwrap();
    transport.metadata().unwrap();
    assert_eq!(transport.add_memory(&pool), Err(NixlError::Memory(MemoryError::Frozen)));
    assert!(transport.register(&whole).is_err());
}

#[test]
fn a_backend_that_is_not_there_is_named_beside_those_that_are() {
    let Some(nixl) = nixl() else { return };
    let config = NixlConfig::default().with(|config| config.backend = "NONESUCH".to_owned());
    let error = NixlTransport::new(nixl, config).unwrap_err();
    assert!(matches!(&error, NixlError::Backend { backend, .. } if backend == "NONESUCH"), "{error}");
    assert!(error.to_string().contains("UCX"), "{error}");
}

#[test]
fn a_transport_that_ends_is_reported_to_its_peers_and_is_quiet_at_once() {
    let Some(nixl) = nixl() else { return };
    let (mut here, there) = (worker(nixl, &[4096]), worker(nixl, &[4096]));
    let mut there = there.transport;
    here.transport.connect(PEER, &there.metadata().unwrap()).unwrap();
    here.transport.permit(PEER, Time::MAX);
    there.connect(PEER, &here.transport.metadata().unwrap()).unwrap();
    there.permit(PEER, Time::MAX);
    let (mut events, mut theirs) = (Vec::new(), Vec::new());
    // Both ways: a farewell is believed of a peer that has heard this side.
    there.send(PEER, Bytes::from_static(b"here I am")).unwrap();
    here.transport.send(PEER, Bytes::from_static(b"and here am I")).unwrap();
    while events.is_empty() || theirs.is_empty() {
        here.transport.poll(Time::ZERO, &mut events);
        there.poll(Time::ZERO, &mut theirs);
    }
    drop(there);
    events.clear();
    while events.is_empty() {
        here.transport.poll(Time::ZERO, &mut events);
    }
    assert_eq!(
        events,
        [TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } }]
    );
}

/// Frames of a host go beside NIXL, so nothing that is sent shows that the way of the pages is lost.
#[test]
fn a_connection_that_breaks_between_living_processes_is_found_before_the_next_copy() {
    let Some(nixl) = nixl() else { return };
    let mut side = worker(nixl, &[Workers::FAR_LEN]);
    let mut other = Process::start("default", Job::Serve, &side.transport.metadata().unwrap());
    let page = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 4096 };
    let mut bytes = [0; 4096];
    for round in 1..=2 {
        side.transport.connect(PEER, other.metadata()).unwrap();
        if side.transport.route(PEER) != Some(Route::Memory) {
            println!("skipped: the kernel does not copy between processes here");
            return;
        }
        let read = Post { id: PostId(round), op: Op::Read, descriptors: vec![page], notify: None };
        side.transport.post(PEER, read).unwrap();
        let read = until(&mut side, "a copy", |events| !events.is_empty());
        assert_eq!(read, [TransportEvent::Posted { post: PostId(round), result: Ok(()) }]);
        side.memory.read(0, 0, &mut bytes);
        assert!(bytes == pattern(4096)[..], "round {round}");
        side.memory.write(0, 0, &[0; 4096]);
        // Its answers come as before.
        side.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
        if round == 1 {
            assert!(break_connections(&other) > 0);
        }
        until(&mut side, "the echo", |events| matches!(events[..], [TransportEvent::Frame { .. }]));
        if round == 1 {
            let ends = until(&mut side, "the end", |events| !events.is_empty());
            assert_eq!(ends, [TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
            assert!(other.is_alive());
        }
    }
}

/// Breaks the TCP connections of another process, as a firewall that is loaded anew does. Returns how many.
fn break_connections(other: &Process) -> usize {
    let process = pidfd_open(Pid::from_child(other.child()), PidfdFlags::empty()).unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", other.child().id())).unwrap();
    let numbers = descriptors.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
    let sockets = numbers.filter_map(|fd| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let connections = sockets.map(TcpStream::from).filter(|socket| socket.peer_addr().is_ok());
    connections.filter(|socket| socket.shutdown(Shutdown::Both).is_ok()).count()
}

/// Polls a transport until it has reported what is awaited; fails after a minute.
fn until(
    side: &mut Side<NixlTransport>,
    what: &str,
    done: impl Fn(&[TransportEvent]) -> bool,
) -> Vec<TransportEvent> {
    let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
    while !done(&events) {
        assert!(Instant::now() < deadline, "{what}: {events:?}");
        side.transport.poll(Time::ZERO, &mut events);
        rest(&side.transport, Duration::from_millis(10));
    }
    events
}

#[test]
fn a_short_post_passes_the_long_ones_before_it() {
    let Some(nixl) = nixl() else { return };
    let len = 16 << 20;
    let (mut here, mut there) = (worker(nixl, &[len]), worker(nixl, &[len]));
    here.transport.connect(PEER, &there.transport.metadata().unwrap()).unwrap();
    here.transport.permit(PEER, Time::MAX);
    let post = |id, len| {
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
        Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify: None }
    };
    for id in 0..50 {
        here.transport.post(PEER, post(id, len as u64)).unwrap();
    }
    here.transport.post(PEER, post(50, 64 << 10)).unwrap();
    let mut events = Vec::new();
    let ended = |events: &[TransportEvent], id| {
        events.contains(&TransportEvent::Posted { post: PostId(id), result: Ok(()) })
    };
    while !ended(&events, 50) {
        here.transport.poll(Time::ZERO, &mut events);
        there.transport.poll(Time::ZERO, &mut Vec::new());
    }
    assert!(events.len() < 5, "{} long posts ended first", events.len() - 1);
    while events.len() <= 50 {
        here.transport.poll(Time::ZERO, &mut events);
        there.transport.poll(Time::ZERO, &mut Vec::new());
    }
    assert!((0..=50).all(|id| ended(&events, id)));
}

#[test]
fn short_posts_share_requests_and_each_has_its_own_event_frame_and_bytes() {
    let Some(nixl) = nixl() else { return };
    let (item, posts) = (4096, 500);
    let len = item * posts;
    let (mut here, mut there) = (worker(nixl, &[len]), worker(nixl, &[len]));
    here.transport.connect(PEER, &there.transport.metadata().unwrap()).unwrap();
    here.transport.permit(PEER, Time::MAX);
    let bytes: Vec<u8> = (0..len).map(|at| (at / item * 7 + at) as u8).collect();
    here.memory.write(0, 0, &bytes);
    // Both directions in turn: one request has one.
    for id in 0..posts {
        let at = (id * item) as u64;
        let descriptor = Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: at,
            remote_offset: at,
            len: item as u64,
        };
        let op = if id % 100 < 90 { Op::Write } else { Op::Read };
        let notify = Some(Bytes::from(id.to_string()));
        here.transport
            .post(PEER, Post { id: PostId(id as u64), op, descriptors: vec![descriptor], notify })
            .unwrap();
    }
    here.transport.cancel(PostId(7));
    let (mut ended, mut frames) = (Vec::new(), Vec::new());
    while ended.len() < posts || frames.len() < posts - 1 {
        here.transport.poll(Time::ZERO, &mut ended);
        there.transport.poll(Time::ZERO, &mut frames);
    }
    for id in 0..posts {
        let result = if id == 7 { Err(TransportError::Cancelled) } else { Ok(()) };
        assert!(ended.contains(&TransportEvent::Posted { post: PostId(id as u64), result }), "post {id}");
        let text = id.to_string();
        let is =
            |event: &&TransportEvent| matches!(event, TransportEvent::Frame { frame, .. } if *frame == text);
        assert_eq!(frames.iter().filter(is).count(), usize::from(id != 7), "frame {id}");
    }
    let (mut ours, mut theirs) = (vec![1; len], vec![1; len]);
    here.memory.read(0, 0, &mut ours);
    there.memory.read(0, 0, &mut theirs);
    for (id, wanted) in bytes.chunks(item).enumerate() {
        let at = id * item;
        match id % 100 {
            7 if id == 7 => assert!(theirs[at..][..item].iter().all(|byte| *byte == 0), "cancelled"),
            0..90 => assert!(theirs[at..][..item] == *wanted, "WRITE {id}"),
            _ => assert!(ours[at..][..item].iter().all(|byte| *byte == 0), "READ {id}"),
        }
    }
    assert!(here.transport.stats().requests < posts as u64 / 4, "{:?}", here.transport.stats());
}

/// Fills all of a pool with bytes that tell where they are.
fn fill(pool: &HostMemory, seed: u64) -> Vec<u8> {
    let byte = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 56) as u8;
    let bytes: Vec<u8> = (0..pool.len() as u64).map(byte).collect();
    pool.write(0, &bytes).unwrap();
    bytes
}

const ITEM: u64 = 3000;
const ITEMS: u64 = 90;

/// Items of a page that lies in pieces, in any order, in both directions; also where the peer's items
/// are of another length, or where there are too many to prepare.
#[test]
fn items_that_are_named_by_number_are_the_ones_that_were_meant() {
    let Some(nixl) = nixl() else { return };
    for (items_there, prepared, by_number) in
        [(ITEM, 1 << 16, true), (ITEM / 2, 1 << 16, false), (ITEM, 100, false)]
    {
        let transport = |items: u64| {
            let pool = HostMemory::new(2 << 20).unwrap();
            let config = NixlConfig::default().with(|config| config.prepared_items = prepared);
            let mut transport = NixlTransport::new(nixl, config).unwrap();
            transport.add_memory(&pool).unwrap();
            for region in [0, 1 << 20] {
                let len = ITEMS * ITEM + 17;
                transport.register(&Region::dram(RegionRole::Kv, pool.addr() + region, len, items)).unwrap();
            }
            (transport, pool)
        };
        let ((mut here, ours), (mut there, theirs)) = (transport(ITEM), transport(items_there));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        here.permit(PEER, Time::MAX);
        let mut image = [fill(&ours, 1), fill(&theirs, 1 << 60)];
        for (id, op) in [(1, Op::Write), (2, Op::Read)] {
            // Every third item, to another place in the other region, some two at a time.
            let places = (0..ITEMS / 3).map(|n| (n * 3, (n * 29 * 3) % (ITEMS - 1), 1 + n % 2));
            let descriptors = places.map(|(from, to, count)| Descriptor {
                local_region: (id % 2) as u32,
                remote_region: (1 - id % 2) as u32,
                local_offset: from * ITEM,
                remote_offset: to * ITEM,
                len: count * ITEM,
            });
            let descriptors: Vec<Descriptor> = descriptors.collect();
            for descriptor in &descriptors {
                let here = (u64::from(descriptor.local_region) << 20) + descriptor.local_offset;
                let there = (u64::from(descriptor.remote_region) << 20) + descriptor.remote_offset;
                let range = |at: u64| at as usize..(at + descriptor.len) as usize;
                let [ours, theirs] = &mut image;
                match op {
                    Op::Write => theirs[range(there)].copy_from_slice(&ours[range(here)]),
                    Op::Read => ours[range(here)].copy_from_slice(&theirs[range(there)]),
                }
            }
            here.post(PEER, Post { id: PostId(id), op, descriptors, notify: None }).unwrap();
            let mut events = Vec::new();
            while events.is_empty() {
                here.poll(Time::ZERO, &mut events);
                there.poll(Time::ZERO, &mut events);
            }
            assert_eq!(events, [TransportEvent::Posted { post: PostId(id), result: Ok(()) }]);
        }
        for (pool, image) in [ours, theirs].iter().zip(&image) {
            let mut bytes = vec![0; 2 << 20];
            pool.read(0, &mut bytes).unwrap();
            assert!(bytes == *image, "items of {items_there} bytes there, {prepared} prepared");
        }
        let stats = here.stats();
        assert_eq!(stats.requests_by_number > 0, by_number, "{stats:?}");
        assert!(!by_number || stats.requests_by_number == stats.requests, "{stats:?}");
    }
}
