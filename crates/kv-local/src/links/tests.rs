//! What strangers, impostors and broken peers can do to a plane: nothing.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use kv_core::{Desc, Op, Plane, PlaneWait, Post, PostId, Region, RegionRole};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use std::mem;
use std::os::fd::AsFd;

use bytes::Bytes;
use kv_conformance::{connect as befriend, heard};
use kv_core::{PeerId, PlaneEvent, Time, WayEnd};
use rustix::net::{accept_with, connect};

use super::*;
use crate::arena::Arena;
use crate::config::LocalConfig;
use crate::handshake::Hello;
use crate::identity::ProcessIdentity;
use crate::metadata::{Host, Metadata, Place, Token, random_socket_name};
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
    let events = poll_at(&mut us, Duration::ZERO);
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
        let events = poll_at(&mut us, Duration::ZERO);
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
    let events = poll_at(&mut us, Duration::from_millis(60));
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
