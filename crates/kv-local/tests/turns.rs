//! Posts take turns, `poll` is short, and an idle transport sleeps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::ptr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{Pair, Side, boottime, heard, snapshot};
use kv_core::random::SplitMix64;
use kv_core::{
    Descriptor, MAX_FRAME, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Transport,
    TransportError, TransportEvent, TransportWait, WayEnd,
};
use kv_local::{Arena, LocalConfig, LocalTransport, MemoryError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use rustix::param::page_size;
use rustix::time::Timespec;
use workers::{PLACES, Place, worker, worker_with};

const LARGE: usize = 64 << 20;
const PEER: PeerId = PeerId(11);
const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::ZERO };
/// How long a transport that ends waits for sockets that are full.
const FAREWELL: Duration = Duration::from_millis(100);

fn pair(a: Place, b: Place, lens: &[usize]) -> Pair<LocalTransport> {
    Pair::new(worker(a, lens), worker(b, lens)).introduce()
}

fn post(id: u64, op: Op, len: usize, piece: usize) -> Post {
    let descriptor = |at: usize| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: at as u64,
        remote_offset: at as u64,
        len: piece.min(len - at) as u64,
    };
    Post { id: PostId(id), op, descriptors: (0..len).step_by(piece).map(descriptor).collect(), notify: None }
}

fn ended(events: &[TransportEvent]) -> Vec<u64> {
    let id = |event: &TransportEvent| match event {
        TransportEvent::Posted { post, .. } => Some(post.0),
        _ => None,
    };
    events.iter().filter_map(id).collect()
}

#[test]
fn a_small_post_overtakes_large_posts_of_other_peers() {
    for (a, b) in PLACES {
        for op in [Op::Write, Op::Read] {
            let mut pair = pair(a, b, &[LARGE]);
            pair.a.transport.post(PEER, post(1, op, LARGE, LARGE)).unwrap();
            pair.a.transport.post(PEER, post(2, op, LARGE, 4096)).unwrap();
            pair.turn();
            assert_eq!(ended(&pair.a_events), [], "{a:?} {b:?}: one call must not copy 128 MiB");
            assert_eq!(pair.a.transport.wait(), TransportWait::Now);
            pair.a.transport.post(PEER, post(3, op, 4096, 4096)).unwrap();
            pair.until("all end", |pair| pair.a_events.len() == 3);
            assert_eq!(ended(&pair.a_events)[0], 3, "{a:?} {b:?} {op:?}");
        }
    }
}

/// The posts copy more bytes in one burst than the processor's caches hold, and so past the caches.
#[test]
fn a_long_burst_of_pieces_of_all_lengths_arrives_byte_for_byte() {
    for (seed, op) in [Op::Write, Op::Read].into_iter().enumerate() {
        println!("seed {seed}");
        let mut random = SplitMix64::new(seed as u64);
        let mut pair = pair(Place::Arena, Place::Arena, &[LARGE]);
        let bytes: Vec<u8> = (0..LARGE / 8).flat_map(|_| random.bits().to_le_bytes()).collect();
        let from = if op == Op::Write { &pair.a } else { &pair.b };
        from.memory.write(0, 0, &bytes);
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < LARGE {
            let most = [100, 5000, 9000, 400_000][random.below(4) as usize];
            let len = (1 + random.below(most)).min((LARGE - at) as u64);
            pieces.push((at, len));
            at += len as usize;
        }
        for at in (1..pieces.len()).rev() {
            pieces.swap(at, random.below(at as u64 + 1) as usize);
        }
        let (mut to, mut wanted) = (0, Vec::new());
        let mut descriptors = Vec::new();
        for (at, len) in pieces {
            wanted.extend_from_slice(&bytes[at..at + len as usize]);
            let (local_offset, remote_offset) =
                if op == Op::Write { (at as u64, to) } else { (to, at as u64) };
            descriptors.push(Descriptor {
                local_region: 0,
                remote_region: 0,
                local_offset,
                remote_offset,
                len,
            });
            to += len;
        }
        let posts = descriptors.chunks(descriptors.len() / 9);
        for (id, descriptors) in posts.clone().enumerate() {
            let post = Post { id: PostId(id as u64), op, descriptors: descriptors.to_vec(), notify: None };
            pair.a.transport.post(PEER, post).unwrap();
        }
        pair.until("all end", |pair| pair.a_events.len() == posts.len());
        assert_eq!(pair.a.transport.stats().posts_completed, posts.len() as u64);
        let got = snapshot(if op == Op::Write { &pair.b } else { &pair.a });
        assert!(got[0] == wanted, "{op:?}");
    }
}

#[test]
fn a_cancelled_post_is_quiet_at_once() {
    for (a, b) in PLACES {
        let mut pair = pair(a, b, &[LARGE]);
        let line = vec![9; 1 << 20];
        for at in (0..LARGE).step_by(1 << 20) {
            pair.a.memory.write(0, at, &line);
        }
        pair.a.transport.post(PEER, post(1, Op::Write, LARGE, LARGE)).unwrap();
        pair.turn();
        pair.a.transport.cancel(PostId(1));
        let before = snapshot(&pair.b);
        for _ in 0..50 {
            pair.turn();
        }
        let event = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::Cancelled) };
        assert_eq!(pair.a_events, [event]);
        assert!(before == snapshot(&pair.b), "{a:?} {b:?}: bytes moved after the end");
        let copied = before[0].iter().filter(|byte| **byte == 9).count();
        assert!(copied > 0 && copied < LARGE, "{copied}");
    }
}

fn readable(side: &Side<LocalTransport>, patience: Duration) -> bool {
    let (TransportWait::Readable(fds) | TransportWait::ReadableOrAfter(fds, _)) = side.transport.wait()
    else {
        panic!("busy");
    };
    assert_eq!(fds.len(), 1);
    // SAFETY: the transport keeps its descriptor open while it is borrowed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fds[0]) };
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Takes turns until neither side has work: memory of a new peer is made present a moment after the connection, and
/// that of a lost one is unmapped piece by piece.
fn rest(pair: &mut Pair<LocalTransport>) {
    pair.until("work is done", |pair| {
        pair.a.transport.wait() != TransportWait::Now && pair.b.transport.wait() != TransportWait::Now
    });
}

#[test]
fn many_messages_are_followed_by_pauses_until_they_end_or_this_side_posts() {
    let mut pair = pair(Place::Arena, Place::Arena, &[1 << 20]);
    let crowd = |pair: &mut Pair<LocalTransport>, messages: usize| {
        rest(pair);
        pair.b_events.clear();
        for _ in 0..messages {
            pair.a.transport.send(PEER, Bytes::from_static(b"done")).unwrap();
        }
        pair.turn();
        assert_eq!(pair.b_events.len(), messages);
        pair.b.transport.wait()
    };
    let is_pause = |wait| matches!(wait, TransportWait::ReadableOrAfter(fds, _) if fds.is_empty());
    assert!(!is_pause(crowd(&mut pair, 15)));
    assert!(is_pause(crowd(&mut pair, 16)));
    std::thread::sleep(Duration::from_millis(3));
    pair.turn();
    assert!(!is_pause(pair.b.transport.wait()), "the crowd is over");
    assert!(is_pause(crowd(&mut pair, 16)));
    pair.b.transport.post(PeerId(22), post(1, Op::Read, 4096, 4096)).unwrap();
    rest(&mut pair);
    assert!(!is_pause(pair.b.transport.wait()), "answers of the peer are not to wait");
    let mut other = worker(Place::Arena, &[4096]);
    other.transport.connect(PEER, &pair.b.transport.metadata().unwrap()).unwrap();
    for _ in 0..20 {
        other.transport.poll(boottime(), &mut Vec::new());
        pair.turn();
    }
    std::thread::sleep(Duration::from_millis(3));
    assert!(!is_pause(crowd(&mut pair, 16)), "messages of other peers are not to wait");
}

#[test]
fn an_idle_transport_sleeps_until_a_frame_a_connection_or_a_death() {
    let mut pair = pair(Place::Arena, Place::Adopted, &[1 << 20]);
    rest(&mut pair);
    assert!(!readable(&pair.a, Duration::from_millis(200)), "woken for nothing");
    assert!(!readable(&pair.b, Duration::from_millis(200)), "woken for nothing");
    pair.a.transport.send(PEER, Bytes::from_static(b"wake up")).unwrap();
    assert_eq!(pair.a.transport.wait(), TransportWait::Now, "the frames of a turn travel together");
    pair.a.transport.poll(boottime(), &mut Vec::new());
    assert!(readable(&pair.b, Duration::from_secs(20)));
    pair.turn();
    assert!(pair.b_events.len() == 1 && heard(&pair.b_events, b"wake up"), "{:?}", pair.b_events);
    rest(&mut pair);
    assert!(!readable(&pair.b, Duration::from_millis(50)));

    let mut third = worker(Place::Arena, &[4096]);
    third.transport.connect(PeerId(5), &pair.b.transport.metadata().unwrap()).unwrap();
    assert!(readable(&pair.b, Duration::from_secs(20)));
    pair.turn();
    rest(&mut pair);
    drop(third);
    assert!(readable(&pair.b, Duration::from_secs(20)));
    for _ in 0..10 {
        pair.turn();
    }
    rest(&mut pair);
    assert!(!readable(&pair.b, Duration::from_millis(50)));
    assert!(matches!(pair.b.transport.wait(), TransportWait::Readable(_)));
}

#[test]
fn a_dropped_transport_says_goodbye_even_with_a_full_queue_before_it() {
    for attempt in 0..20 {
        let (end, took) = drop_with_a_full_queue();
        if end == DEAD {
            return;
        }
        // It has waited for its socket as long as it may, while the machine did not let the peer read.
        assert_eq!(end, WayEnd::Lost);
        assert!(took >= FAREWELL, "no goodbye after {took:?}");
        println!("attempt {attempt}: the peer has read nothing for {took:?}");
    }
    panic!("no goodbye in any attempt");
}

/// How a peer hears of the end of a transport whose queue is full, and how long that end took.
fn drop_with_a_full_queue() -> (WayEnd, Duration) {
    let mut pair = pair(Place::Arena, Place::Arena, &[1 << 20]);
    while pair.b.transport.send(PeerId(22), Bytes::from(vec![1; MAX_FRAME])).is_ok() {}
    let Pair { mut a, b, .. } = pair;
    // It is read while the other side waits for its sockets.
    let (began, begins) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline, "no end");
            a.transport.poll(boottime(), &mut events);
            let _ = began.send(());
            let end = events.iter().find_map(|event| match event {
                TransportEvent::PeerGone { peer: PEER, end } => Some(*end),
                _ => None,
            });
            if let Some(end) = end {
                return end;
            }
        }
    });
    begins.recv().unwrap();
    let begun = Instant::now();
    drop(b.transport);
    let took = begun.elapsed();
    (reader.join().unwrap(), took)
}

#[test]
fn notify_frames_wait_for_room_and_are_never_dropped() {
    let mut pair = pair(Place::Arena, Place::Arena, &[1 << 20]);
    for id in 0..20 {
        let notify = Some(Bytes::from(vec![id as u8; MAX_FRAME]));
        pair.a.transport.post(PEER, Post { notify, ..post(id, Op::Write, 4096, 4096) }).unwrap();
    }
    // The peer does not read.
    let mut events = Vec::new();
    for _ in 0..200 {
        pair.a.transport.poll(boottime(), &mut events);
    }
    assert!(ended(&events).len() < 20, "more was queued than the queue holds");
    assert_eq!(pair.a.transport.send(PEER, Bytes::new()), Err(TransportError::WouldBlock));
    assert_ne!(pair.a.transport.wait(), TransportWait::Now, "waiting for the peer must not burn a core");
    pair.a.transport.cancel(PostId(18));
    pair.a_events = events;
    pair.until("all are told", |pair| ended(&pair.a_events).len() == 20 && pair.b_events.len() == 19);
    let mut seen: Vec<u8> = pair
        .b_events
        .iter()
        .map(|event| match event {
            TransportEvent::Frame { frame, .. } => frame[0],
            event => panic!("{event:?}"),
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..18).chain([19]).collect::<Vec<u8>>());
}

#[test]
fn a_post_under_the_id_of_a_cancelled_one_ends_after_its_notify_frame() {
    let mut pair = pair(Place::Arena, Place::Arena, &[1 << 20]);
    // The peer does not read.
    let mut events = Vec::new();
    for _ in 0..200 {
        while pair.a.transport.send(PEER, Bytes::from(vec![1; MAX_FRAME])).is_ok() {}
        pair.a.transport.poll(boottime(), &mut events);
    }
    let notify = Some(Bytes::from(vec![2; MAX_FRAME]));
    let notified = || Post { notify: notify.clone(), ..post(1, Op::Write, 4096, 4096) };
    pair.a.transport.post(PEER, notified()).unwrap();
    pair.a.transport.cancel(PostId(1));
    pair.a.transport.post(PEER, notified()).unwrap();
    for _ in 0..10 {
        pair.a.transport.poll(boottime(), &mut events);
    }
    let ended = |result| TransportEvent::Posted { post: PostId(1), result };
    assert_eq!(events, [ended(Err(TransportError::Cancelled))], "the frame has not found room");
    let told = |event: &TransportEvent| matches!(event, TransportEvent::Frame { frame, .. } if frame[0] == 2);
    pair.until("the frame", |pair| pair.b_events.iter().any(told));
    pair.until("the end", |pair| !pair.a_events.is_empty());
    assert_eq!(pair.a_events, [ended(Ok(()))]);
}

#[test]
fn posts_beyond_their_bound_are_refused_until_the_ends_of_others_are_told() {
    let few = LocalConfig::default().with(|config| config.max_posts = 2);
    let from = worker_with(Place::Arena, &[4096], few);
    let mut pair = Pair::new(from, worker(Place::Arena, &[4096])).introduce();
    let write = |id| post(id, Op::Write, 4096, 4096);
    for (id, wanted) in [(1, Ok(())), (2, Ok(())), (3, Err(TransportError::WouldBlock))] {
        assert_eq!(pair.a.transport.post(PEER, write(id)), wanted);
    }
    pair.a.transport.cancel(PostId(1));
    assert_eq!(pair.a.transport.post(PEER, write(3)), Err(TransportError::WouldBlock));
    pair.turn();
    assert_eq!(pair.a.transport.post(PEER, write(3)), Ok(()));
}

#[test]
fn a_read_of_memory_half_of_which_is_gone_ends_with_an_error() {
    let page = page_size();
    for piece in [page, 2 * page] {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, nobody refers to it, and it is never unmapped.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), 2 * page, prot, MapFlags::PRIVATE) }.unwrap();
        // SAFETY: the page was just mapped.
        unsafe { ptr::write_bytes(at.cast::<u8>(), 7, page) };
        let config = LocalConfig::default().with(|config| config.permit_tracing = true);
        let mut to = LocalTransport::new(config).unwrap();
        // SAFETY: as above.
        unsafe { to.adopt(at as u64, 2 * page as u64) }.unwrap();
        to.register(&Region::dram(RegionRole::Kv, at as u64, 2 * page as u64, 1)).unwrap();
        let mut from = worker(Place::Arena, &[2 * page]);
        from.transport.connect(PEER, &to.metadata().unwrap()).unwrap();
        // SAFETY: nobody refers to the page, and its place stays taken.
        unsafe { mprotect(at.byte_add(page), page, MprotectFlags::empty()) }.unwrap();
        from.transport.post(PEER, post(1, Op::Read, 2 * page, piece)).unwrap();
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            from.transport.poll(boottime(), &mut events);
            to.poll(boottime(), &mut Vec::new());
        }
        let [TransportEvent::Posted { post: PostId(1), result: Err(error) }] = &events[..] else {
            panic!("{events:?}")
        };
        assert!(error.to_string().contains("process_vm_readv"), "{error}");
        assert_eq!(snapshot(&from)[0], [vec![7; page], vec![0; page]].concat());
    }
}

#[test]
fn regions_must_lie_wholly_in_memory_that_the_transport_was_given() {
    let arena = Arena::new(8192).unwrap();
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    transport.add_arena(&arena).unwrap();
    let region = |addr, len| Region::dram(RegionRole::Kv, addr, len, 1);
    transport.register(&region(arena.addr(), 8192)).unwrap();
    let outside = [
        region(arena.addr(), 8193),
        region(arena.addr() - 1, 10),
        region(arena.addr() + 8192, 1),
        region(u64::MAX, 1),
        region(4096, 4096),
        region(arena.addr(), 4096).memory(MemoryKind::Vram, 0),
        region(arena.addr(), 4096).memory(MemoryKind::File, 0),
    ];
    for region in outside {
        let error = TransportError::UnknownMemory { region: 1, addr: region.addr, len: region.len };
        assert_eq!(transport.register(&region), Err(error));
    }
    transport.metadata().unwrap();
    assert!(matches!(transport.register(&region(arena.addr(), 1)), Err(TransportError::Unsupported(_))));
    assert_eq!(transport.add_arena(&arena), Err(MemoryError::Frozen.into()));
}

#[test]
fn a_transport_can_be_moved_to_the_worker_thread() {
    fn is_send<T: Send>() {}
    is_send::<LocalTransport>();
    is_send::<Arena>();
}
