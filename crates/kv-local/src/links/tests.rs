//! What strangers, impostors and broken peers can do to a plane: nothing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};

use kv_core::{Desc, Op, Plane, PlaneWait, Post, PostId, Region, RegionRole};
use rustix::buffer::spare_capacity;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use std::mem;
use std::os::fd::AsFd;

use bytes::Bytes;
use kv_conformance::{connect as befriend, heard};
use kv_core::{Origin, PeerId, PlaneError, PlaneEvent, Time, WayEnd};
use kv_host::{Arena, Host, ProcessIdentity, clock};
use rustix::net::{accept_with, connect};

use super::ending::DYING;
use super::*;
use crate::config::LocalConfig;
use crate::handshake::{Hello, Lent, Refusal};
use crate::metadata::{Metadata, Place, Token, random_socket_name};
use crate::plane::LocalPlane;
use crate::right::Right;

const LEN: usize = 1 << 20;
const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::ZERO };

fn plane_with(config: LocalConfig, name: String) -> (LocalPlane, Arena) {
    let arena = Arena::new(LEN).unwrap();
    let mut plane = LocalPlane::with_socket_name(config, name).unwrap();
    plane.add_arena(&arena).unwrap();
    plane.register(&Region::dram(RegionRole::Kv, arena.addr(), LEN as u64, 4096)).unwrap();
    (plane, arena)
}

fn plane() -> (LocalPlane, Arena) {
    plane_with(LocalConfig::default(), random_socket_name().unwrap())
}

fn dial_raw(plane: &LocalPlane) -> UnixStream {
    let address = SocketAddr::from_abstract_name(&plane.socket_name).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn poll_at(plane: &mut LocalPlane, now: Duration) -> Vec<PlaneEvent> {
    let mut events = Vec::new();
    for _ in 0..20 {
        plane.poll(Time::ZERO + now, &mut events);
    }
    events
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(body);
    bytes
}

fn write_post(id: u64, len: usize) -> Post {
    let desc = Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op: Op::Write, descs: vec![desc], notify: None }
}

/// Two planes that move a page and a frame: the service that nobody may disturb.
fn assert_serves(plane: &mut LocalPlane, arena: &Arena) {
    let (mut other, source) = self::plane();
    source.write(0, b"good page").unwrap();
    let peer = PeerId(other.next_link + 1);
    befriend(&mut other, peer, &plane.metadata().unwrap()).unwrap();
    other.post(peer, Post { notify: Some(Bytes::from_static(b"there")), ..write_post(1, 4096) }).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        other.poll(Time::ZERO, &mut Vec::new());
        plane.poll(plane.now, &mut events);
    }
    assert!(heard(&events, b"there"), "{events:?}");
    let mut page = [0; 9];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"good page");
    drop(other);
    poll_at(plane, plane.now - Time::ZERO);
}

/// A hand-made peer: its metadata, and a hello for `plane`.
fn forged(plane: &LocalPlane, arenas: Vec<u64>) -> (Bytes, Vec<u8>) {
    let start = 0;
    let metadata = Metadata {
        host: Host::here().unwrap(),
        token: Token::random().unwrap(),
        process: ProcessIdentity::here().unwrap(),
        socket: random_socket_name().unwrap(),
        regions: vec![Place { arena: (!arenas.is_empty()).then_some(0), start, len: 4096 }],
        arenas,
    };
    let metadata = metadata.encode().unwrap();
    let hello = hello_for(plane, &metadata);
    (metadata, hello)
}

fn hello_for(plane: &LocalPlane, metadata: &Bytes) -> Vec<u8> {
    let hello = Hello { expected: plane.token, metadata: metadata.clone() };
    message(1, &hello.encode())
}

/// Says hello and lends a page for the right to write, which it returns, and these arenas.
fn greet(stream: &UnixStream, hello: &[u8], arenas: &[&OwnedFd]) -> Right {
    let (right, page) = Right::grant().unwrap();
    let page = page.into();
    let lent: Vec<&OwnedFd> = [&page].into_iter().chain(arenas.iter().copied()).collect();
    (&*stream).write_all(hello).unwrap();
    send_with_fds(stream, &message(4, b""), &lent);
    right
}

fn memory_file(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[&OwnedFd]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(stream, &[io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn garbage_oversized_and_early_messages_are_dropped_and_harm_nobody() {
    let (mut plane, arena) = plane();
    let mut clients: Vec<UnixStream> = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 1000],
        vec![0xff; 100_000],
        message(2, b"a frame before the hello"),
        message(3, b""),
        message(1, b"not a hello"),
        message(1, b"KVH\x02too short"),
        [
            message(1, &[b"KVH\x02".as_slice(), &plane.token.to_bytes(), b"no metadata"].concat()),
            message(4, b""),
        ]
        .concat(),
        [&u32::MAX.to_le_bytes()[..], &[1]].concat(),
    ]
    .into_iter()
    .map(|bytes| {
        let mut client = dial_raw(&plane);
        client.write_all(&bytes).unwrap();
        client
    })
    .collect();
    assert_eq!(poll_at(&mut plane, Duration::ZERO), []);
    for (number, client) in clients.iter_mut().enumerate() {
        assert!(is_closed(client), "client {number}");
    }
    assert!(plane.links.is_empty());
    assert!(matches!(plane.wait(), PlaneWait::Readable(_)));
    assert_serves(&mut plane, &arena);
}

#[test]
fn silent_and_slow_clients_are_few_and_leave_after_the_timeout() {
    let config = LocalConfig { max_strangers: 8, ..LocalConfig::default() };
    let (mut plane, arena) = plane_with(config, random_socket_name().unwrap());
    let (_, hello) = forged(&plane, Vec::new());
    let mut slow: Vec<UnixStream> = (0..40).map(|_| dial_raw(&plane)).collect();
    for client in &mut slow {
        let _ = client.write_all(&hello[..20]);
    }
    poll_at(&mut plane, Duration::from_secs(1));
    assert_eq!(plane.links.len(), 8);
    assert!(matches!(plane.wait(), PlaneWait::ReadableOrAfter(_, after) if after <= Duration::from_secs(5)));
    assert_serves(&mut plane, &arena);
    // A byte now and then does not keep them.
    for client in &mut slow {
        let _ = client.write_all(&hello[20..21]);
    }
    poll_at(&mut plane, Duration::from_secs(5));
    assert!(!plane.links.is_empty());
    poll_at(&mut plane, Duration::from_millis(6001));
    assert!(plane.links.is_empty() && plane.strangers.is_empty());
    assert!(slow.iter_mut().all(is_closed));
    assert!(matches!(plane.wait(), PlaneWait::Readable(_)));
}

#[test]
fn only_arenas_that_are_sealed_and_long_enough_are_accepted() {
    let shrink = SealFlags::SHRINK;
    let good = memory_file(8192, shrink);
    let open = memory_file(8192, SealFlags::GROW);
    let short = memory_file(4096, shrink);
    let disk: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    let many = vec![&good; 200];
    for (name, fds, accepted) in [
        ("good", vec![&good], true),
        ("can shrink", vec![&open], false),
        ("too short", vec![&short], false),
        ("no memory file", vec![&disk], false),
        ("none", vec![], false),
        ("one too many", vec![&good, &good], false),
        ("far too many", many, false),
    ] {
        let (mut plane, arena) = plane();
        let (_, hello) = forged(&plane, vec![8192]);
        let mut client = dial_raw(&plane);
        greet(&client, &hello, &fds);
        poll_at(&mut plane, Duration::ZERO);
        assert_eq!(plane.unclaimed.len(), usize::from(accepted), "{name}");
        assert_eq!(is_closed(&mut client), !accepted, "{name}");
        assert_serves(&mut plane, &arena);
    }
}

#[test]
fn descriptors_that_nobody_asked_for_are_not_kept() {
    let (mut plane, _arena) = plane();
    let (_, hello) = forged(&plane, Vec::new());
    let client = dial_raw(&plane);
    greet(&client, &hello, &[]);
    poll_at(&mut plane, Duration::ZERO);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let file = memory_file(4096, SealFlags::SHRINK);
    let mut most = 0;
    let before = open();
    for _ in 0..20 {
        send_with_fds(&client, &message(2, b"frame"), &[&file; 20]);
        assert_eq!(poll_at(&mut plane, Duration::ZERO).len(), 1);
        most = most.max(open());
    }
    // Other tests open a few of their own meanwhile.
    assert!(most < before + 300, "{before} descriptors became {most}");
}

#[test]
fn a_restarted_peer_under_the_same_name_is_refused_and_never_written_to() {
    let name = random_socket_name().unwrap();
    let (mut us, source) = plane();
    source.write(0, &[7; 4096]).unwrap();
    let (first_life, _) = plane_with(LocalConfig::default(), name.clone());
    let metadata = first_life.metadata().unwrap();
    drop(first_life);
    assert_eq!(us.connect(PeerId(1), &metadata), Err(PlaneError::PeerGone));

    let (mut second_life, arena) = plane_with(LocalConfig::default(), name);
    befriend(&mut us, PeerId(2), &metadata).unwrap();
    us.post(PeerId(2), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..100 {
        us.poll(Time::ZERO, &mut events);
        assert_eq!(poll_at(&mut second_life, Duration::ZERO), []);
    }
    us.poll(Time::ZERO + DYING, &mut events);
    let gone = PlaneEvent::PeerGone { peer: PeerId(2), end: WayEnd::Lost };
    assert_eq!(events, [PlaneEvent::Posted { post: PostId(1), result: Err(PlaneError::PeerGone) }, gone]);
    assert_eq!(second_life.stats().refused, 1);
    let mut page = [0; 4096];
    arena.read(0, &mut page).unwrap();
    assert_eq!(page, [0; 4096]);
    assert!(us.peers.is_empty() && us.links.is_empty());
}

#[test]
fn metadata_that_was_changed_on_its_way_is_never_used() {
    let (mut us, _source) = plane();
    let (mut them, _arena) = plane();
    let mut changed = Metadata::decode(&them.metadata().unwrap()).unwrap();
    changed.regions[0] = Place { arena: None, start: 4096, len: 1 << 40 };
    befriend(&mut us, PeerId(1), &changed.encode().unwrap()).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..100 {
        us.poll(Time::ZERO, &mut events);
        them.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events[0], PlaneEvent::Posted { post: PostId(1), result: Err(PlaneError::PeerGone) });
    assert!(us.links.values().all(|link| link.memory.is_none()));

    // The same at the side that was dialed.
    let (mut us, _source) = plane();
    us.connect(PeerId(1), &them.metadata().unwrap()).unwrap();
    for _ in 0..10 {
        us.poll(Time::ZERO, &mut Vec::new());
        them.poll(Time::ZERO, &mut Vec::new());
    }
    let mut changed = Metadata::decode(&us.metadata().unwrap()).unwrap();
    changed.regions[0].len += 1;
    assert!(matches!(them.connect(PeerId(2), &changed.encode().unwrap()), Err(PlaneError::Metadata(_))));
    them.connect(PeerId(2), &us.metadata().unwrap()).unwrap();
}

#[test]
fn an_impostor_that_answers_is_never_written_to() {
    let (mut us, _source) = plane();
    let name = random_socket_name().unwrap();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let (victim, _arena) = plane_with(LocalConfig::default(), random_socket_name().unwrap());
    let mut metadata = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    metadata.socket = name;
    befriend(&mut us, PeerId(1), &metadata.encode().unwrap()).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let (_, answer) = forged(&us, vec![8192]);
    greet(&stream, &answer, &[&memory_file(8192, SealFlags::SHRINK)]);
    let mut events = poll_at(&mut us, Duration::ZERO);
    events.extend(poll_at(&mut us, DYING));
    // It has our descriptors and lives: no proof that it does not use them.
    let lost = PlaneEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
    assert_eq!(events, [PlaneEvent::Posted { post: PostId(1), result: Err(PlaneError::PeerGone) }, lost]);
    assert!(us.links.is_empty());
    us.disconnect(PeerId(1));
    assert!(us.lost.is_empty() && us.peers.is_empty());
}

#[test]
fn the_end_of_the_stream_alone_is_no_proof_but_a_goodbye_is() {
    for goodbye in [false, true] {
        let (mut us, _arena) = plane();
        let (metadata, hello) = forged(&us, vec![8 << 20]);
        let mut client = dial_raw(&us);
        let file = memory_file(8 << 20, SealFlags::SHRINK);
        greet(&client, &hello, &[&file]);
        poll_at(&mut us, Duration::ZERO);
        befriend(&mut us, PeerId(1), &metadata).unwrap();
        us.post(PeerId(1), write_post(1, 4096)).unwrap();
        us.cancel(PostId(1));
        us.post(PeerId(1), write_post(2, 4096)).unwrap();
        if goodbye {
            client.write_all(&message(3, b"")).unwrap();
        }
        drop(client);
        let mut events = poll_at(&mut us, Duration::ZERO);
        if !goodbye {
            // Its process may be dying.
            assert_eq!(poll_at(&mut us, DYING - Duration::from_millis(1)), []);
        }
        events.extend(poll_at(&mut us, DYING));
        let end = if goodbye { DEAD } else { WayEnd::Lost };
        let gone = PlaneEvent::PeerGone { peer: PeerId(1), end };
        assert_eq!(events[0], PlaneEvent::Posted { post: PostId(1), result: Err(PlaneError::Cancelled) });
        assert_eq!(events[1], PlaneEvent::Posted { post: PostId(2), result: Err(PlaneError::PeerGone) });
        assert_eq!(events[2..], [gone]);
        assert_eq!(us.post(PeerId(1), write_post(3, 1)), Err(PlaneError::PeerGone));
        assert!(matches!(us.wait(), PlaneWait::Readable(_)), "a lost stream must not keep us busy");
        assert_eq!(us.lost.len(), usize::from(!goodbye));
    }
}

#[test]
fn a_peer_whose_backlog_is_full_is_dialed_again() {
    let (mut us, _source) = plane();
    let (them, _arena) = plane();
    let mut metadata = Metadata::decode(&them.metadata().unwrap()).unwrap();
    metadata.socket = random_socket_name().unwrap();
    let address = SocketAddrUnix::new_abstract_name(metadata.socket.as_bytes()).unwrap();
    let listener = new_socket().unwrap();
    bind(&listener, &address).unwrap();
    listen_on(&listener, 0).unwrap();
    let filler = new_socket().unwrap();
    connect(&filler, &address).unwrap();

    befriend(&mut us, PeerId(1), &metadata.encode().unwrap()).unwrap();
    assert_eq!(us.send(PeerId(1), Bytes::from_static(b"waits")), Ok(()));
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    assert_eq!(poll_at(&mut us, Duration::from_millis(20)), []);
    assert_eq!(us.dialing.len(), 1);
    assert!(matches!(us.wait(), PlaneWait::ReadableOrAfter(_, after) if after <= DIAL_AGAIN));
    accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
    assert_eq!(poll_at(&mut us, Duration::from_millis(40)), []);
    assert!(us.dialing.is_empty());
    // It hangs up before it said who it is: it never had our memory.
    drop(listener);
    let mut events = poll_at(&mut us, Duration::from_millis(60));
    events.extend(poll_at(&mut us, Duration::from_millis(60) + DYING));
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(matches!(events[1], PlaneEvent::PeerGone { peer: PeerId(1), .. }));
}

#[test]
fn a_flood_of_tiny_frames_is_served_a_bounded_number_at_a_time() {
    let (mut plane, _arena) = plane();
    let (_, hello) = forged(&plane, Vec::new());
    let mut client = dial_raw(&plane);
    greet(&client, &hello, &[]);
    poll_at(&mut plane, Duration::ZERO);
    client.set_nonblocking(true).unwrap();
    let flood = message(2, b"").repeat(40_000);
    let written = client.write(&flood).unwrap();
    let mut frames = 0;
    let mut polls = 0;
    while frames < written / 5 {
        let mut events = Vec::new();
        plane.poll(Time::ZERO, &mut events);
        assert!(events.len() <= MESSAGE_BUDGET, "{}", events.len());
        frames += events.len();
        polls += 1;
        assert!(polls < 1000, "{frames} of {}", written / 5);
    }
    assert!(written / 5 > MESSAGE_BUDGET);
}

#[test]
fn unclaimed_connections_are_few_and_leave_when_silent() {
    let config = LocalConfig { max_unclaimed: 4, ..LocalConfig::default() };
    let (mut plane, arena) = plane_with(config, random_socket_name().unwrap());
    let mut clients: Vec<UnixStream> = (0..10)
        .map(|_| {
            let (_, hello) = forged(&plane, Vec::new());
            let client = dial_raw(&plane);
            greet(&client, &hello, &[]);
            poll_at(&mut plane, Duration::ZERO);
            client
        })
        .collect();
    assert_eq!(plane.unclaimed.len(), 4);
    assert_eq!(clients.iter_mut().filter_map(|client| is_closed(client).then_some(())).count(), 6);
    clients[9].set_nonblocking(false).unwrap();
    poll_at(&mut plane, Duration::from_secs(30));
    clients[9].write_all(&message(2, b"still here")).unwrap();
    assert_eq!(poll_at(&mut plane, Duration::from_secs(30)).len(), 1);
    poll_at(&mut plane, Duration::from_secs(61));
    assert_eq!(plane.unclaimed.len(), 1);
    poll_at(&mut plane, Duration::from_secs(91));
    assert!(plane.links.is_empty());
    assert_serves(&mut plane, &arena);
}

#[test]
fn the_second_link_of_a_connected_peer_is_never_evicted() {
    let config = LocalConfig { max_unclaimed: 1, ..LocalConfig::default() };
    let (mut us, _source) = plane_with(config, random_socket_name().unwrap());
    let (mut them, _arena) = plane();
    us.connect(PeerId(1), &them.metadata().unwrap()).unwrap();
    them.connect(PeerId(2), &us.metadata().unwrap()).unwrap();
    let mut events = Vec::new();
    let mut turn = |us: &mut LocalPlane, them: &mut LocalPlane, at: u64| {
        for _ in 0..20 {
            us.poll(Time::ZERO + Duration::from_secs(at), &mut events);
            them.poll(Time::ZERO + Duration::from_secs(at), &mut events);
        }
        mem::take(&mut events)
    };
    turn(&mut us, &mut them, 0);
    let second = *us.unclaimed.first().expect("their link is not our peer's");
    let mut clients: Vec<UnixStream> = Vec::new();
    for _ in 0..5 {
        let (_, hello) = forged(&us, Vec::new());
        let client = dial_raw(&us);
        greet(&client, &hello, &[]);
        clients.push(client);
        assert_eq!(turn(&mut us, &mut them, 0), []);
    }
    assert!(us.unclaimed.contains(&second));
    // Nor is it closed for being silent.
    assert_eq!(turn(&mut us, &mut them, 61), []);
    assert_eq!(us.unclaimed.iter().collect::<Vec<_>>(), [&second]);
    // It goes with the peer, and the peer is told.
    us.disconnect(PeerId(1));
    let gone = PlaneEvent::PeerGone { peer: PeerId(2), end: DEAD };
    assert_eq!(turn(&mut us, &mut them, 62), [gone]);
    assert!(us.links.is_empty() && them.links.is_empty());
}

#[test]
fn a_flooding_peer_does_not_keep_others_from_being_heard() {
    let (mut plane, _arena) = plane();
    let mut clients: Vec<UnixStream> = (0..20)
        .map(|_| {
            let (_, hello) = forged(&plane, Vec::new());
            let client = dial_raw(&plane);
            greet(&client, &hello, &[]);
            client.set_nonblocking(true).unwrap();
            client
        })
        .collect();
    poll_at(&mut plane, Duration::ZERO);
    let flood = message(2, b"").repeat(20_000);
    for client in &mut clients[..19] {
        client.write_all(&flood).unwrap();
    }
    plane.poll(Time::ZERO, &mut Vec::new());
    clients[19].write_all(&message(2, b"urgent")).unwrap();
    let mut before = Vec::new();
    let mut polls = 0;
    while !heard(&before, b"urgent") {
        plane.poll(Time::ZERO, &mut before);
        polls += 1;
        assert!(polls < 50, "{} frames came first", before.len());
    }
}

/// Takes what has come, and spends much time on it.
fn handle_slowly(plane: &mut LocalPlane) -> usize {
    let mut events = Vec::new();
    plane.poll(Time::ZERO, &mut events);
    let begun = clock::thread_time();
    while clock::thread_time() - begun < Duration::from_millis(10) {
        std::hint::black_box(&events);
    }
    // Asking this is the end of what the owner does about the frames.
    assert_eq!(plane.wait(), PlaneWait::Now, "there are others in the buffer");
    events.len()
}

#[test]
fn a_peer_whose_frames_take_all_the_time_waits_and_others_are_heard() {
    let (mut plane, arena) = plane();
    let mut greeted = || {
        let (_, hello) = forged(&plane, Vec::new());
        let client = dial_raw(&plane);
        greet(&client, &hello, &[]);
        poll_at(&mut plane, Duration::ZERO);
        client
    };
    let (mut costly, mut other) = (greeted(), greeted());
    let flood = message(2, b"garbage").repeat(2 * MESSAGE_SHARE);
    costly.write_all(&flood).unwrap();
    assert_eq!(handle_slowly(&mut plane), MESSAGE_SHARE);
    other.write_all(&message(2, b"urgent")).unwrap();
    let mut events = Vec::new();
    plane.poll(Time::ZERO, &mut events);
    assert!(events.len() == 1 && heard(&events, b"urgent"), "{} frames came", events.len());
    assert!(matches!(plane.wait(), PlaneWait::ReadableOrAfter(..)), "nobody is there to be heard");

    // What it has sent is in the buffer, and is heard although nothing more comes.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    events.clear();
    while events.len() < MESSAGE_SHARE {
        plane.poll(Time::ZERO, &mut events);
        assert!(std::time::Instant::now() < deadline, "{} frames came", events.len());
    }
    assert_eq!(plane.pacing.next(), None);

    // What it sends while it is left alone wakes nobody, and its end is noticed.
    costly.write_all(&flood).unwrap();
    assert!(handle_slowly(&mut plane) > 0);
    plane.poll(Time::ZERO, &mut events);
    assert!(plane.pacing.next().is_some());
    costly.write_all(&flood).unwrap();
    let mut ready = Vec::with_capacity(EVENTS);
    epoll::wait(&plane.epoll, spare_capacity(&mut ready), Some(&NOW)).unwrap();
    assert!(ready.is_empty(), "a rest must not burn a core");
    drop(costly);
    while plane.links.len() > 1 {
        plane.poll(Time::ZERO, &mut events);
        assert!(std::time::Instant::now() < deadline);
    }
    assert_eq!(plane.pacing.next(), None);
    assert_serves(&mut plane, &arena);
}

#[test]
fn cancelled_posts_leave_nothing_behind_while_a_peer_does_not_answer() {
    let (mut us, _source) = plane();
    let (them, _arena) = plane();
    befriend(&mut us, PeerId(1), &them.metadata().unwrap()).unwrap();
    for id in 0..1000 {
        us.post(PeerId(1), write_post(id, 4096)).unwrap();
        us.cancel(PostId(id));
        us.poll(Time::ZERO, &mut Vec::new());
    }
    assert!(us.transfers.is_empty() && us.run.is_empty() && us.events.is_empty());
    assert!(us.links.values().all(|link| link.waiting.is_empty()));
}

#[test]
fn one_plane_is_one_peer() {
    let (mut us, _source) = plane();
    let (them, _arena) = plane();
    let metadata = them.metadata().unwrap();
    us.connect(PeerId(1), &metadata).unwrap();
    assert!(us.connect(PeerId(1), &metadata).is_err());
    assert!(matches!(us.connect(PeerId(2), &metadata), Err(PlaneError::Metadata(_))));
    let own = us.metadata().unwrap();
    assert!(matches!(us.connect(PeerId(3), &own), Err(PlaneError::Metadata(_))));
    us.disconnect(PeerId(1));
    us.connect(PeerId(2), &metadata).unwrap();
}

#[test]
fn a_connection_speaks_for_the_plane_that_opened_it_and_no_other() {
    let (mut us, _source) = plane();
    let (mut them, _arena) = plane();
    let (victim, _other) = plane();
    befriend(&mut them, PeerId(1), &us.metadata().unwrap()).unwrap();
    them.send(PeerId(1), Bytes::from_static(b"hello")).unwrap();
    let from = std::iter::from_fn(|| {
        poll_at(&mut them, Duration::ZERO);
        Some(poll_at(&mut us, Duration::ZERO))
    });
    let heard = |event: PlaneEvent| match event {
        PlaneEvent::Frame { from, .. } => Some(from),
        _ => None,
    };
    let from = from.take(100_000).flatten().find_map(heard).expect("a frame");
    assert!(us.may_speak_for(from, &them.metadata().unwrap()));
    assert!(!us.may_speak_for(from, &victim.metadata().unwrap()), "another's memory");
    assert!(!us.may_speak_for(Origin(from.0 + 1000), &them.metadata().unwrap()), "a connection that is gone");
}

/// What the impostor does, in a process of its own. Without its variable it is no test at all.
#[test]
fn impostor() {
    let Ok(role) = std::env::var(IMPOSTOR) else { return };
    let (socket, hello) = role.split_once(' ').unwrap();
    let digits: Vec<u8> = hello.chars().map(|digit| digit.to_digit(16).unwrap() as u8).collect();
    let hello: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket).unwrap()).unwrap();
    greet(&stream, &hello, &[&memory_file(8 << 20, SealFlags::SHRINK)]);
    println!("greeted");
    let _ = std::io::stdin().read_line(&mut String::new());
}

const IMPOSTOR: &str = "KV_LOCAL_IMPOSTOR";

#[test]
fn an_impostor_with_the_victims_metadata_is_refused_and_the_victim_is_served() {
    let (mut us, source) = plane();
    source.write(0, b"for the victim").unwrap();
    let (mut victim, arena) = plane();
    let metadata = victim.metadata().unwrap();
    let hello: String = hello_for(&us, &metadata).iter().map(|byte| format!("{byte:02x}")).collect();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "links::tests::impostor", "--nocapture", "--test-threads=1"])
        .env(IMPOSTOR, format!("{} {hello}", us.socket_name))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("greeted")));
    poll_at(&mut us, Duration::ZERO);
    assert_eq!(us.stats().accepted, 1);
    assert_eq!((us.stats().refused, us.unclaimed.len()), (1, 0));

    befriend(&mut us, PeerId(1), &metadata).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        us.poll(Time::ZERO, &mut events);
        victim.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events, [PlaneEvent::Posted { post: PostId(1), result: Ok(()) }]);
    let mut page = [0; 14];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"for the victim");
    // The other way: the victim connects on its own.
    assert_serves(&mut us, &source);
    drop(process.stdin.take());
    process.wait().unwrap();
}

#[test]
fn a_claim_that_the_kernel_cannot_confirm_is_never_used_but_its_address_is() {
    let (mut us, source) = plane();
    source.write(0, b"good page").unwrap();
    let (mut victim, arena) = plane();
    // As in a PID namespace that cannot be seen, before Linux 6.9.
    let mut unseen = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    unseen.process = ProcessIdentity { inode: 0, namespace: 1, pid: 7, started: 7 };
    victim.frozen = unseen.encode().unwrap().into();
    let metadata = victim.metadata().unwrap();
    let client = dial_raw(&us);
    greet(&client, &hello_for(&us, &metadata), &[&memory_file(2 << 20, SealFlags::SHRINK)]);
    poll_at(&mut us, Duration::ZERO);
    assert_eq!(us.unclaimed.len(), 1);
    befriend(&mut us, PeerId(1), &metadata).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        us.poll(Time::ZERO, &mut events);
        victim.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events, [PlaneEvent::Posted { post: PostId(1), result: Ok(()) }]);
    let mut page = [0; 9];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"good page");
}

#[test]
fn another_process_at_the_peers_address_is_told_nothing() {
    let (mut us, _source) = plane();
    let (victim, _arena) = plane();
    let mut metadata = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    let mut sleep = Command::new("sleep").arg("60").spawn().unwrap();
    metadata.process.inode += 1;
    let refused = us.connect(PeerId(1), &metadata.encode().unwrap());
    assert!(matches!(refused, Err(PlaneError::Metadata(_))), "{refused:?}");
    assert!(us.links.is_empty() && us.peers.is_empty());
    metadata.process = ProcessIdentity { inode: 0, pid: sleep.id() as i32, ..metadata.process };
    assert!(us.connect(PeerId(1), &metadata.encode().unwrap()).is_err());
    sleep.kill().unwrap();
    sleep.wait().unwrap();
}

/// Bytes that are allocated in a file.
fn allocated(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512
}

fn mapped(plane: &LocalPlane, peer: PeerId) -> usize {
    let (memory, _) = plane.links[&plane.peers[&peer]].memory.as_ref().unwrap();
    memory.mapped()
}

#[test]
fn only_registered_memory_is_mapped_and_holes_stay_holes() {
    let (mut plane, arena) = plane();
    let len = 1_u64 << 30;
    let file = memory_file(len, SealFlags::SHRINK);
    // The peer has 1 MiB of 64 registered ones, and 1 MiB that is not registered.
    let (metadata, _) = forged(&plane, vec![len]);
    let mut metadata = Metadata::decode(&metadata).unwrap();
    let registered = Place { arena: Some(0), start: 128 << 20, len: 64 << 20 };
    metadata.regions = vec![registered, Place { start: 192 << 20, len: 4096, ..registered }];
    let metadata = metadata.encode().unwrap();
    for at in [0, 130 << 20] {
        rustix::io::pwrite(&file, &[1; 1 << 20], at).unwrap();
    }
    let before = allocated(&file);
    let client = dial_raw(&plane);
    greet(&client, &hello_for(&plane, &metadata), &[&file]);
    poll_at(&mut plane, Duration::ZERO);
    plane.connect(PeerId(9), &metadata).unwrap();
    assert_eq!(mapped(&plane, PeerId(9)), 66 << 20);
    let mut polls = 0;
    while plane.wait() == PlaneWait::Now {
        plane.poll(Time::ZERO, &mut Vec::new());
        polls += 1;
        assert!(polls < 1000);
    }
    assert_eq!(allocated(&file), before, "pages were allocated in the peer's file");
    assert_serves(&mut plane, &arena);
}

#[test]
fn a_peers_memory_is_mapped_within_the_bound_or_within_what_it_has_allocated() {
    let bound = 8_u64 << 20;
    let config = LocalConfig { max_sparse: bound, ..LocalConfig::default() };
    for (len, filled, registered, accepted) in [
        (bound, 0, bound, true),
        (bound + (2 << 20), 0, bound + (2 << 20), false),
        (bound + (2 << 20), bound + (2 << 20), bound + (2 << 20), true),
        (bound + (2 << 20), bound, bound + (2 << 20), false),
        (1 << 40, 0, bound, true),
        (1 << 40, 0, 1 << 40, false),
        (1 << 40, 4 << 20, 1 << 40, false),
    ] {
        let (mut plane, _arena) = plane_with(config.clone(), random_socket_name().unwrap());
        let file = memory_file(len, SealFlags::SHRINK);
        let mebibyte = vec![1; 1 << 20];
        for at in (0..filled).step_by(1 << 20) {
            rustix::io::pwrite(&file, &mebibyte, at).unwrap();
        }
        let (metadata, _) = forged(&plane, vec![len]);
        let mut metadata = Metadata::decode(&metadata).unwrap();
        metadata.regions = vec![Place { arena: Some(0), start: 0, len: registered }];
        let wanted = if accepted {
            None
        } else {
            Some(Refusal::Memory { got: registered, allocated: filled, max: bound })
        };
        let lent = vec![memory_file(4096, SealFlags::SHRINK), rustix::io::dup(&file).unwrap()];
        assert_eq!(Lent::check(lent, &metadata, bound).err(), wanted);
        let metadata = metadata.encode().unwrap();
        let mut client = dial_raw(&plane);
        greet(&client, &hello_for(&plane, &metadata), &[&file]);
        poll_at(&mut plane, Duration::ZERO);
        assert_eq!(is_closed(&mut client), !accepted, "{len} {filled} {registered}");
        assert_eq!(plane.unclaimed.len(), usize::from(accepted));
        assert_eq!(allocated(&file), filled);
    }
}

/// Descriptors of this process that are memory files of this test.
fn open_files(name: &str) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains(name)).count()
}

#[test]
fn strangers_lend_no_descriptors_and_token_holders_few() {
    let (mut plane, arena) = plane();
    let name = "kv-test-lent";
    let file = memfd_create(name, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    assert_eq!(open_files(name), 1);
    let (_, hello) = forged(&plane, Vec::new());
    let mut wrong = hello.clone();
    wrong[20] ^= 1;
    let pieces: [&[u8]; 5] = [&hello[..1], &hello[..10], &hello[..30], &hello, &wrong];
    let clients: Vec<UnixStream> = (0..60).map(|_| dial_raw(&plane)).collect();
    for (client, piece) in clients.iter().zip(pieces.iter().cycle()) {
        // With the hello or a part of it.
        send_with_fds(client, piece, &[&file; 64]);
        poll_at(&mut plane, Duration::ZERO);
        assert_eq!(open_files(name), 1);
    }
    drop(clients);
    poll_at(&mut plane, Duration::ZERO);

    let too_many = dial_raw(&plane);
    (&too_many).write_all(&hello).unwrap();
    for _ in 0..2 {
        send_with_fds(&too_many, &message(4, b"")[..1], &[&file; 50]);
        poll_at(&mut plane, Duration::ZERO);
        assert!(open_files(name) <= 66, "{}", open_files(name));
    }
    drop(too_many);
    poll_at(&mut plane, Duration::ZERO);
    assert_eq!(open_files(name), 1);

    // Who knows the token may lend, but all together only so many.
    let clients: Vec<UnixStream> = (0..20)
        .map(|_| {
            let (_, hello) = forged(&plane, vec![4096; 64]);
            let client = dial_raw(&plane);
            greet(&client, &hello, &[&file; 64]);
            poll_at(&mut plane, Duration::ZERO);
            assert!(open_files(name) <= 1 + plane.config.max_lent, "{}", open_files(name));
            client
        })
        .collect();
    assert_eq!(plane.unclaimed.len(), plane.config.max_lent / 65);
    drop(clients);
    poll_at(&mut plane, Duration::ZERO);
    assert_eq!(open_files(name), 1);
    assert_serves(&mut plane, &arena);
}

#[test]
fn an_unclaimed_connection_stays_while_its_peer_copies_without_a_word() {
    for op in [Op::Write, Op::Read] {
        let (mut us, _arena) = plane();
        let (mut them, _source) = plane();
        befriend(&mut them, PeerId(1), &us.metadata().unwrap()).unwrap();
        let mut events = Vec::new();
        for minute in 0..10 {
            let now = Duration::from_secs(59 * minute);
            them.post(PeerId(1), Post { op, ..write_post(minute, 4096) }).unwrap();
            for _ in 0..20 {
                us.poll(Time::ZERO + now, &mut Vec::new());
                them.poll(Time::ZERO + now, &mut events);
            }
            // The moment before it would be closed for its silence.
            poll_at(&mut us, now + Duration::from_secs(2));
            let done = PlaneEvent::Posted { post: PostId(minute), result: Ok(()) };
            assert_eq!(mem::take(&mut events), [done], "{op:?}, after {now:?}");
            assert_eq!(us.unclaimed.len(), 1);
        }
        let now = Duration::from_secs(59 * 9 + 2 + 60);
        poll_at(&mut us, now);
        poll_at(&mut us, now + Duration::from_secs(60));
        assert_eq!(us.unclaimed.len(), 0, "one that is idle leaves");
    }
}

#[test]
fn a_peer_with_marked_rights_costs_a_bounded_number_of_pages() {
    let (mut plane, arena) = plane();
    for _ in 0..50 {
        let (metadata, hello) = forged(&plane, Vec::new());
        let client = dial_raw(&plane);
        greet(&client, &hello, &[]);
        poll_at(&mut plane, Duration::ZERO);
        // It marks its right, for ever, and hangs up.
        let token = Metadata::decode(&metadata).unwrap().token;
        if let Some(link) = plane.links.values().find(|link| link.token() == Some(token)) {
            assert!(link.granted.as_ref().unwrap().mark());
        }
        drop(client);
        poll_at(&mut plane, Duration::ZERO);
        assert!(plane.lost.len() <= 9, "{}", plane.lost.len());
    }
    // Those that are marked are remembered: a revocation would wait for them.
    assert_eq!(plane.lost.len(), 9);
    assert!(plane.links.is_empty());
    plane.lost.clear();
    assert_serves(&mut plane, &arena);
}

#[test]
fn a_lost_way_is_told_and_its_right_can_be_revoked_afterwards() {
    let (mut us, _arena) = plane();
    let (metadata, hello) = forged(&us, vec![8 << 20]);
    let file = memory_file(8 << 20, SealFlags::SHRINK);
    let client = dial_raw(&us);
    greet(&client, &hello, &[&file]);
    poll_at(&mut us, Duration::ZERO);
    us.connect(PeerId(1), &metadata).unwrap();
    let copier = us.links.values().next().unwrap().granted.as_ref().unwrap();
    assert!(copier.mark());
    drop(client);
    let lost = PlaneEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
    assert_eq!(poll_at(&mut us, Duration::ZERO), []);
    assert_eq!(poll_at(&mut us, DYING), [lost]);
    assert_eq!(us.write_fence(PeerId(1)), kv_core::WriteFence::Revocable);
    us.revoke(PeerId(1));
    // The peer connects again, under the same id: the new right is not the old one.
    let client = dial_raw(&us);
    greet(&client, &hello, &[&file]);
    assert_eq!(poll_at(&mut us, Duration::from_secs(1)), []);
    us.connect(PeerId(1), &metadata).unwrap();
    assert_eq!(poll_at(&mut us, Duration::from_secs(2)), []);
    let again = us.links.values().next().unwrap().granted.as_ref().unwrap();
    assert!(again.mark());
    again.clear();
    us.lost.values().next().unwrap().granted.as_ref().unwrap().clear();
    assert_eq!(poll_at(&mut us, Duration::from_secs(3)), [PlaneEvent::Revoked { peer: PeerId(1) }]);
    assert!(us.lost.is_empty() && us.revoking.is_empty());
    drop(client);
    poll_at(&mut us, Duration::from_secs(4));
    us.disconnect(PeerId(1));
    assert!(us.lost.is_empty() && us.links.is_empty());
}
