//! Pages in files: written and read back through the transport, and looked at through the file system.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{Pair, Random, rest};
use kv_core::{
    Descriptor, Directions, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport,
    TransportError, TransportEvent,
};
use kv_nixl::{HostMemory, MemoryError, Nixl, NixlConfig, NixlError, NixlTransport, Route};
use workers::{Workers, nixl};

const PAGE: usize = 64 << 10;
const PAGES: usize = 96;
const LEN: usize = PAGES * PAGE;
const STORAGE: PeerId = PeerId(7);

/// A file of its own for each test, removed with its handle.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, len: u64) -> Scratch {
        let path = std::env::temp_dir().join(format!("kv-nixl-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(len).unwrap();
        Scratch(path)
    }

    fn open(&self) -> File {
        File::options().read(true).write(true).open(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A transport with one host region, and one in a file from its second page on.
fn worker(nixl: &Nixl, scratch: &Scratch) -> (NixlTransport, HostMemory) {
    let pool = HostMemory::new(LEN).unwrap();
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    transport.add_memory(&pool).unwrap();
    let memory = Region::dram(RegionRole::Kv, pool.addr(), LEN as u64, PAGE as u64);
    let device = transport.add_file(scratch.open()).unwrap();
    transport.register(&memory).unwrap();
    let late = transport.add_file(scratch.open()).unwrap_err();
    assert!(matches!(late, NixlError::File { reason } if reason.contains("before regions")), "{late}");
    let pages = Region::dram(RegionRole::Kv, PAGE as u64, LEN as u64, PAGE as u64);
    transport.register(&pages.memory(MemoryKind::File, device)).unwrap();
    let ours = transport.metadata().unwrap();
    transport.connect(STORAGE, &ours).unwrap();
    (transport, pool)
}

fn descriptor(memory: usize, file: usize, len: usize) -> Descriptor {
    Descriptor {
        local_region: 0,
        remote_region: 1,
        local_offset: memory as u64,
        remote_offset: file as u64,
        len: len as u64,
    }
}

fn run(transport: &mut NixlTransport, post: Post) -> (Result<(), TransportError>, Vec<TransportEvent>) {
    let id = post.id;
    transport.post(STORAGE, post).unwrap();
    let mut events = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "no end");
        transport.poll(Time::ZERO, &mut events);
        let end = events
            .iter()
            .position(|event| matches!(event, TransportEvent::Posted { post, .. } if *post == id));
        if let Some(at) = end {
            let TransportEvent::Posted { result, .. } = events.remove(at) else { unreachable!() };
            return (result, events);
        }
        rest(transport, Duration::from_millis(5));
    }
}

#[test]
fn pages_go_to_a_file_and_come_back() {
    let Some(nixl) = nixl() else { return };
    let mut random = Random::new("pages_go_to_a_file_and_come_back");
    for _ in 0..2 {
        let scratch = Scratch::new("pages", (LEN + 2 * PAGE) as u64);
        let (mut transport, pool) = worker(nixl, &scratch);
        assert_eq!(transport.route(STORAGE), Some(Route::Storage));
        assert_eq!(transport.directions(Some(STORAGE)), Directions::BOTH);
        let content = random.bytes(LEN);
        pool.write(0, &content).unwrap();
        let order = random.order(PAGES);
        let pages = |step: usize| -> Vec<Descriptor> {
            let places = order.iter().enumerate();
            places.map(|(at, to)| descriptor((at + step) % PAGES * PAGE, to * PAGE, PAGE)).collect()
        };
        let notify = Some(Bytes::from_static(b"stored"));
        let post = Post { id: PostId(1), op: Op::Write, descriptors: pages(0), notify };
        let (result, others) = run(&mut transport, post);
        assert_eq!(result, Ok(()));
        assert!(
            matches!(&others[..], [TransportEvent::Frame { frame, .. }] if *frame == "stored"),
            "{others:?}"
        );

        // What others see in the file: the pages, and nothing beside them.
        let stored = std::fs::read(&scratch.0).unwrap();
        assert_eq!(stored.len(), LEN + 2 * PAGE);
        assert!(stored[..PAGE].iter().chain(&stored[LEN + PAGE..]).all(|byte| *byte == 0));
        for (at, to) in order.iter().enumerate() {
            let (page, kept) = (&content[at * PAGE..][..PAGE], &stored[(to + 1) * PAGE..][..PAGE]);
            assert!(page == kept, "page {at}");
        }

        // And back, each page one further.
        pool.write(0, &vec![0; LEN]).unwrap();
        let post = Post { id: PostId(2), op: Op::Read, descriptors: pages(1), notify: None };
        assert_eq!(run(&mut transport, post).0, Ok(()));
        let mut got = vec![0; LEN];
        pool.read(0, &mut got).unwrap();
        assert!(got[PAGE..] == content[..LEN - PAGE] && got[..PAGE] == content[LEN - PAGE..]);

        // Others may have written to it meanwhile.
        scratch.open().write_all_at(b"from elsewhere", (PAGE + 100) as u64).unwrap();
        let post =
            Post { id: PostId(3), op: Op::Read, descriptors: vec![descriptor(5, 100, 14)], notify: None };
        assert_eq!(run(&mut transport, post).0, Ok(()));
        let mut got = [0; 14];
        pool.read(5, &mut got).unwrap();
        assert_eq!(&got, b"from elsewhere");
    }
}

#[test]
fn what_cannot_be_done_with_a_file_is_refused_with_its_reason() {
    let Some(nixl) = nixl() else { return };
    let scratch = Scratch::new("refused", (LEN + PAGE) as u64);
    let empty = Scratch::new("empty", 0);
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    for (file, wanted) in [
        (File::open(&scratch.0).unwrap(), "reading and writing"),
        (File::open(std::env::temp_dir()).unwrap(), "no regular file"),
        (empty.open(), "empty"),
    ] {
        match transport.add_file(file) {
            Err(NixlError::File { reason }) => assert!(reason.contains(wanted), "{reason}"),
            other => panic!("{wanted}: {other:?}"),
        }
    }
    // Without a file there is nothing to connect to.
    let ours = transport.metadata().unwrap();
    assert!(matches!(transport.connect(STORAGE, &ours), Err(TransportError::Metadata(_))));
    assert_eq!(transport.add_file(scratch.open()).unwrap_err(), NixlError::Memory(MemoryError::Frozen));

    let (mut transport, _pool) = worker(nixl, &scratch);
    let post = |descriptors| Post { id: PostId(1), op: Op::Write, descriptors, notify: None };
    let outside = transport.post(STORAGE, post(vec![descriptor(0, LEN, 1)]));
    assert!(matches!(outside, Err(TransportError::OutOfBounds { side: "remote", .. })), "{outside:?}");
    let memory = Descriptor { remote_region: 0, ..descriptor(0, 0, 1) };
    let file = Descriptor { local_region: 1, ..descriptor(0, 0, 1) };
    for wrong in [memory, file] {
        let refused = transport.post(STORAGE, post(vec![wrong]));
        assert!(matches!(refused, Err(TransportError::Unsupported(_))), "{refused:?}");
    }
    // A file that was cut off behind our back has no bytes to give.
    scratch.open().set_len(PAGE as u64 + 10).unwrap();
    let read = Post { op: Op::Read, ..post(vec![descriptor(0, 0, PAGE)]) };
    assert!(matches!(transport.post(STORAGE, read), Err(TransportError::Unsupported(_))));
    let (result, _) = run(&mut transport, Post { op: Op::Read, ..post(vec![descriptor(0, 0, 10)]) });
    assert_eq!(result, Ok(()));
}

#[test]
fn a_file_region_is_out_of_reach_for_peers_and_for_posts_to_them() {
    let Some(nixl) = nixl() else { return };
    let scratch = Scratch::new("peers", (LEN + PAGE) as u64);
    let harness = Workers::alike(nixl, "default");
    let pair = Pair::connected(&harness, &[LEN]);
    let mut other = pair.a.transport;
    let (mut transport, _pool) = worker(nixl, &scratch);
    let peer = PeerId(1);
    other.connect(peer, &transport.metadata().unwrap()).unwrap();
    other.permit(peer, Time::MAX);
    transport.connect(peer, &other.metadata().unwrap()).unwrap();
    transport.permit(peer, Time::MAX);
    let descriptors = vec![descriptor(0, 0, 10)];
    let post = Post { id: PostId(1), op: Op::Write, descriptors, notify: None };
    assert!(matches!(other.post(peer, post.clone()), Err(TransportError::Unsupported(_))));
    let ours = Descriptor { local_region: 1, remote_region: 0, ..descriptor(0, 0, 10) };
    let refused = transport.post(peer, Post { descriptors: vec![ours], ..post.clone() });
    assert!(matches!(refused, Err(TransportError::Unsupported(_))));
    // Memory beside the file is reached as ever.
    let memory = Descriptor { remote_region: 0, ..descriptor(0, 0, 10) };
    other.post(peer, Post { descriptors: vec![memory], ..post }).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        other.poll(Time::ZERO, &mut events);
        transport.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
}
