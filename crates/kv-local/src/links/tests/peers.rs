//! Peers that come, go, are lost and return.

use std::mem;

use kv_core::TransportWait;
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, connect, listen};

use super::*;
use crate::handshake::{Lent, Refusal};
use crate::links::opening::DIAL_AGAIN;
use crate::remote::PeerRegion;
use crate::watch::new_socket;

#[test]
fn the_end_of_the_stream_alone_is_no_proof_but_a_goodbye_is() {
    for goodbye in [false, true] {
        let (mut us, _arena) = transport();
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
            // The peer's process may be dying.
            assert_eq!(poll_at(&mut us, DYING - Duration::from_millis(1)), []);
        }
        events.extend(poll_at(&mut us, DYING));
        let end = if goodbye { DEAD } else { WayEnd::Lost };
        let gone = TransportEvent::PeerGone { peer: PeerId(1), end };
        assert_eq!(
            events[0],
            TransportEvent::Posted { post: PostId(1), result: Err(TransportError::Cancelled) }
        );
        assert_eq!(
            events[1],
            TransportEvent::Posted { post: PostId(2), result: Err(TransportError::PeerGone) }
        );
        assert_eq!(events[2..], [gone]);
        assert_eq!(us.post(PeerId(1), write_post(3, 1)), Err(TransportError::PeerGone));
        assert!(matches!(us.wait(), TransportWait::Readable(_)), "a lost stream must not keep us busy");
        assert_eq!(us.revoking.lost(), usize::from(!goodbye));
    }
}

#[test]
fn a_peer_whose_backlog_is_full_is_dialed_again() {
    let (mut us, _source) = transport();
    let (them, _arena) = transport();
    let mut metadata = Metadata::decode(&them.metadata().unwrap()).unwrap();
    metadata.socket = random_socket_name().unwrap();
    let address = SocketAddrUnix::new_abstract_name(metadata.socket.as_bytes()).unwrap();
    let listener = new_socket().unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let filler = new_socket().unwrap();
    connect(&filler, &address).unwrap();

    befriend(&mut us, PeerId(1), &metadata.encode().unwrap()).unwrap();
    assert_eq!(us.send(PeerId(1), Bytes::from_static(b"waits")), Ok(()));
    let noted = Post { notify: Some(Bytes::from_static(b"there")), ..write_post(1, 256 << 10) };
    us.post(PeerId(1), noted).unwrap();
    assert_eq!(poll_at(&mut us, Duration::from_millis(20)), []);
    assert!(us.links.has_to_dial());
    assert!(matches!(us.wait(), TransportWait::ReadableOrAfter(_, after) if after <= DIAL_AGAIN));
    accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
    assert_eq!(poll_at(&mut us, Duration::from_millis(40)), []);
    assert!(!us.links.has_to_dial());
    // What was sent and posted before goes behind the hello.
    let client = UnixStream::from(accept_with(&listener, SocketFlags::CLOEXEC).unwrap());
    client.set_nonblocking(true).unwrap();
    let (mut heard, mut reader) = (Vec::new(), &client);
    let _ = reader.read_to_end(&mut heard);
    assert_eq!(heard.get(4), Some(&1), "the first message is the hello: {heard:?}");
    assert_eq!(heard.last_chunk(), Some(&[0, 0, 0, 0, 4]), "the last one has the descriptors");
    // The peer hangs up before its hello: it never had this side's memory.
    drop((client, listener));
    let mut events = poll_at(&mut us, Duration::from_millis(60));
    events.extend(poll_at(&mut us, Duration::from_millis(60) + DYING));
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(matches!(events[1], TransportEvent::PeerGone { peer: PeerId(1), .. }));
}

#[test]
fn the_second_link_of_a_connected_peer_is_never_evicted() {
    let config = LocalConfig { max_unclaimed: 1, ..LocalConfig::default() };
    let (mut us, _source) = transport_with(config, random_socket_name().unwrap());
    let (mut them, _arena) = transport();
    us.connect(PeerId(1), &them.metadata().unwrap()).unwrap();
    them.connect(PeerId(2), &us.metadata().unwrap()).unwrap();
    let mut events = Vec::new();
    let mut turn = |us: &mut LocalTransport, them: &mut LocalTransport, at: u64| {
        for _ in 0..20 {
            us.poll(Time::ZERO + Duration::from_secs(at), &mut events);
            them.poll(Time::ZERO + Duration::from_secs(at), &mut events);
        }
        mem::take(&mut events)
    };
    turn(&mut us, &mut them, 0);
    let second = *us.links.unclaimed().first().expect("their link is not our peer's");
    let mut clients: Vec<UnixStream> = Vec::new();
    for _ in 0..5 {
        let (_, hello) = forged(&us, Vec::new());
        let client = dial_raw(&us);
        greet(&client, &hello, &[]);
        clients.push(client);
        assert_eq!(turn(&mut us, &mut them, 0), []);
    }
    assert!(us.links.unclaimed().contains(&second));
    // The link is not closed for being silent, either.
    assert_eq!(turn(&mut us, &mut them, 61), []);
    assert_eq!(us.links.unclaimed().iter().collect::<Vec<_>>(), [&second]);
    // The link ends with the peer, and the peer is told.
    us.disconnect(PeerId(1));
    let gone = TransportEvent::PeerGone { peer: PeerId(2), end: DEAD };
    assert_eq!(turn(&mut us, &mut them, 62), [gone]);
    assert!(us.links.is_empty() && them.links.is_empty());
}

#[test]
fn cancelled_posts_leave_nothing_behind_while_a_peer_does_not_answer() {
    let (mut us, _source) = transport();
    let (them, _arena) = transport();
    befriend(&mut us, PeerId(1), &them.metadata().unwrap()).unwrap();
    for id in 0..1000 {
        us.post(PeerId(1), write_post(id, 4096)).unwrap();
        us.cancel(PostId(id));
        us.poll(Time::ZERO, &mut Vec::new());
    }
    assert!(us.posts.is_empty() && !us.posts.is_busy());
    assert!(us.links.iter().all(|(_, link)| link.waiting.is_empty()));
}

/// Bytes of a file that are allocated.
fn allocated(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512
}

fn mapped(transport: &LocalTransport, peer: PeerId) -> usize {
    let link = transport.links.id_of(peer).and_then(|id| transport.links.get(id)).unwrap();
    let (memory, _) = link.memory.as_ref().unwrap();
    memory.mapped()
}

#[test]
fn only_registered_memory_is_mapped_and_holes_stay_holes() {
    let (mut transport, arena) = transport();
    let len = 1_u64 << 30;
    let file = memory_file(len, SealFlags::SHRINK);
    // The peer has 1 MiB of 64 registered ones, and 1 MiB that is not registered.
    let (metadata, _) = forged(&transport, vec![len]);
    let mut metadata = Metadata::decode(&metadata).unwrap();
    let registered = Place { arena: Some(0), start: 128 << 20, len: 64 << 20 };
    metadata.regions = vec![registered, Place { start: 192 << 20, len: 4096, ..registered }];
    let metadata = metadata.encode().unwrap();
    for at in [0, 130 << 20] {
        rustix::io::pwrite(&file, &[1; 1 << 20], at).unwrap();
    }
    let before = allocated(&file);
    let client = dial_raw(&transport);
    greet(&client, &hello_for(&transport, &metadata), &[&file]);
    poll_at(&mut transport, Duration::ZERO);
    transport.connect(PeerId(9), &metadata).unwrap();
    assert_eq!(mapped(&transport, PeerId(9)), 66 << 20);
    let mut polls = 0;
    while transport.wait() == TransportWait::Now {
        transport.poll(Time::ZERO, &mut Vec::new());
        polls += 1;
        assert!(polls < 1000);
    }
    assert_eq!(allocated(&file), before, "pages were allocated in the peer's file");
    assert_serves(&mut transport, &arena);
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
        let (mut transport, _arena) = transport_with(config.clone(), random_socket_name().unwrap());
        let file = memory_file(len, SealFlags::SHRINK);
        let mebibyte = vec![1; 1 << 20];
        for at in (0..filled).step_by(1 << 20) {
            rustix::io::pwrite(&file, &mebibyte, at).unwrap();
        }
        let (metadata, _) = forged(&transport, vec![len]);
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
        let mut client = dial_raw(&transport);
        greet(&client, &hello_for(&transport, &metadata), &[&file]);
        poll_at(&mut transport, Duration::ZERO);
        assert_eq!(is_closed(&mut client), !accepted, "{len} {filled} {registered}");
        assert_eq!(transport.links.unclaimed().len(), usize::from(accepted));
        assert_eq!(allocated(&file), filled);
    }
}

#[test]
fn an_unclaimed_connection_stays_while_its_peer_copies_without_a_word() {
    for op in [Op::Write, Op::Read] {
        let (mut us, _arena) = transport();
        let (mut them, _source) = transport();
        befriend(&mut them, PeerId(1), &us.metadata().unwrap()).unwrap();
        let mut events = Vec::new();
        for minute in 0..10 {
            let now = Duration::from_secs(59 * minute);
            them.post(PeerId(1), Post { op, ..write_post(minute, 4096) }).unwrap();
            for _ in 0..20 {
                us.poll(Time::ZERO + now, &mut Vec::new());
                them.poll(Time::ZERO + now, &mut events);
            }
            // The moment before the link would be closed for its silence.
            poll_at(&mut us, now + Duration::from_secs(2));
            let done = TransportEvent::Posted { post: PostId(minute), result: Ok(()) };
            assert_eq!(mem::take(&mut events), [done], "{op:?}, after {now:?}");
            assert_eq!(us.links.unclaimed().len(), 1);
        }
        let now = Duration::from_secs(59 * 9 + 2 + 60);
        poll_at(&mut us, now);
        poll_at(&mut us, now + Duration::from_secs(60));
        assert_eq!(us.links.unclaimed().len(), 0, "one that is idle leaves");
    }
}

#[test]
fn a_peer_with_marked_rights_costs_a_bounded_number_of_pages() {
    let (mut transport, arena) = transport();
    for _ in 0..50 {
        let (metadata, hello) = forged(&transport, Vec::new());
        let client = dial_raw(&transport);
        greet(&client, &hello, &[]);
        poll_at(&mut transport, Duration::ZERO);
        // The peer marks its right for ever, and hangs up.
        let token = Metadata::decode(&metadata).unwrap().token;
        if let Some((_, link)) = transport.links.iter().find(|(_, link)| link.token() == Some(token)) {
            assert!(link.granted.as_ref().unwrap().mark());
        }
        drop(client);
        poll_at(&mut transport, Duration::ZERO);
        assert!(transport.revoking.lost() <= 9, "{}", transport.revoking.lost());
    }
    // Ended links whose right is marked are remembered: a revocation would wait for them.
    assert_eq!(transport.revoking.lost(), 9);
    assert!(transport.links.is_empty());
    transport.revoking.clear_marks();
    assert_serves(&mut transport, &arena);
}

#[test]
fn a_lost_way_is_reported_and_its_right_can_still_be_revoked() {
    let (mut us, _arena) = transport();
    let (metadata, hello) = forged(&us, vec![8 << 20]);
    let file = memory_file(8 << 20, SealFlags::SHRINK);
    let client = dial_raw(&us);
    greet(&client, &hello, &[&file]);
    poll_at(&mut us, Duration::ZERO);
    us.connect(PeerId(1), &metadata).unwrap();
    let copier = us.links.iter().next().unwrap().1.granted.as_ref().unwrap();
    assert!(copier.mark());
    drop(client);
    let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
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
    let again = us.links.iter().next().unwrap().1.granted.as_ref().unwrap();
    assert!(again.mark());
    again.clear();
    us.revoking.clear_marks();
    assert_eq!(poll_at(&mut us, Duration::from_secs(3)), [TransportEvent::Revoked { peer: PeerId(1) }]);
    assert!(us.revoking.lost() == 0 && !us.revoking.is_asked());
    drop(client);
    poll_at(&mut us, Duration::from_secs(4));
    us.disconnect(PeerId(1));
    assert!(us.revoking.lost() == 0 && us.links.is_empty());
}

#[test]
fn a_link_whose_process_cannot_be_watched_is_dropped_completely() {
    let (mut us, _arena) = transport();
    let (them, _theirs) = transport();
    let metadata = them.metadata().unwrap();
    us.connect(PeerId(1), &metadata).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    us.links.of_peer(PeerId(1)).unwrap().1.interest = None;
    us.watch.exhaust();
    us.flush(0);
    assert_eq!(us.wait(), TransportWait::Now, "nothing else would wake the owner");
    let ended = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
    assert_eq!(poll_at(&mut us, Duration::ZERO), [ended]);
    assert_eq!((us.links.len(), us.links.peers()), (0, 0));
    assert_eq!(us.send(PeerId(1), Bytes::new()), Err(TransportError::PeerGone));
    let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
    assert_eq!(poll_at(&mut us, DYING), [lost]);
}

/// Both sides have connected at once, and each serves the other by the link that it has dialed itself.
fn crossed() -> ((LocalTransport, Arena), (LocalTransport, Arena)) {
    let ((mut us, ours), (mut them, theirs)) = (transport(), transport());
    befriend(&mut us, PeerId(1), &them.metadata().unwrap()).unwrap();
    befriend(&mut them, PeerId(2), &us.metadata().unwrap()).unwrap();
    for _ in 0..20 {
        us.poll(Time::ZERO, &mut Vec::new());
        them.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!([us.links.unclaimed().len(), them.links.unclaimed().len()], [1, 1]);
    ((us, ours), (them, theirs))
}

#[test]
fn a_second_link_that_was_revoked_is_closed_and_both_sides_connect_anew() {
    for says_goodbye in [false, true] {
        let ((mut us, arena), (mut them, source)) = crossed();
        let (mut our_events, mut their_events) = (Vec::new(), Vec::new());
        let mut turn = |us: &mut LocalTransport, them: &mut LocalTransport, at: Duration| {
            for _ in 0..20 {
                us.poll(Time::ZERO + at, &mut our_events);
                them.poll(Time::ZERO + at, &mut their_events);
            }
            (mem::take(&mut our_events), mem::take(&mut their_events))
        };
        // This side alone loses its link, by an error of its own kernel.
        us.unwatched.push(us.links.id_of(PeerId(1)).unwrap());
        us.poll(Time::ZERO, &mut Vec::new());
        us.revoke(PeerId(1));
        let (ours, theirs) = turn(&mut us, &mut them, DYING);
        let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
        assert_eq!(ours, [TransportEvent::Revoked { peer: PeerId(1) }, lost]);
        assert_eq!(theirs, [], "the peer is served by its own link");

        let metadata = them.metadata().unwrap();
        if says_goodbye {
            us.disconnect(PeerId(1));
        }
        befriend(&mut us, PeerId(1), &metadata).unwrap();
        let (ours, theirs) = turn(&mut us, &mut them, DYING);
        let gone = TransportEvent::PeerGone { peer: PeerId(2), end: DEAD };
        assert_eq!((ours, theirs), (Vec::new(), vec![gone]));
        befriend(&mut them, PeerId(2), &us.metadata().unwrap()).unwrap();
        source.write(0, b"written anew").unwrap();
        them.post(PeerId(2), write_post(7, 4096)).unwrap();
        us.post(PeerId(1), Post { op: Op::Read, ..write_post(8, 4096) }).unwrap();
        let (ours, theirs) = turn(&mut us, &mut them, DYING);
        assert_eq!(ours, [TransportEvent::Posted { post: PostId(8), result: Ok(()) }]);
        assert_eq!(theirs, [TransportEvent::Posted { post: PostId(7), result: Ok(()) }]);
        let mut page = [0; 12];
        arena.read(0, &mut page).unwrap();
        assert_eq!(&page, b"written anew");
        assert_eq!((us.links.len(), them.links.len()), (1, 1));
    }
}

#[test]
fn a_second_link_that_keeps_its_right_is_used_after_the_first_is_lost() {
    let ((mut us, _arena), (mut them, _source)) = crossed();
    let second = *us.links.unclaimed().first().unwrap();
    us.unwatched.push(us.links.id_of(PeerId(1)).unwrap());
    us.poll(Time::ZERO, &mut Vec::new());
    us.disconnect(PeerId(1));
    assert_eq!(poll_at(&mut them, Duration::ZERO), []);
    us.connect(PeerId(1), &them.metadata().unwrap()).unwrap();
    assert_eq!(us.links.id_of(PeerId(1)), Some(second));
}

/// True if the mapping at this address is not given to children that this process forks.
fn is_kept_from_children(addr: u64) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines();
    let begins = |line: &&str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let hex = |digits| u64::from_str_radix(digits, 16);
        range.is_some_and(|(from, to)| {
            hex(from).is_ok_and(|at| at <= addr) && hex(to).is_ok_and(|at| addr < at)
        })
    };
    lines.find(begins).unwrap();
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    flags.split_ascii_whitespace().any(|flag| flag == "dc")
}

#[test]
fn a_forked_child_has_no_mapping_of_a_peers_memory_or_of_rights() {
    let ((us, ours), (them, _theirs)) = crossed();
    for (side, peer) in [(&us, PeerId(1)), (&them, PeerId(2))] {
        let link = side.links.id_of(peer).and_then(|id| side.links.get(id)).unwrap();
        let (memory, right) = link.memory.as_ref().unwrap();
        let Some(PeerRegion::Mapped { memory, .. }) = memory.region(0) else { panic!("{memory:?}") };
        assert!(is_kept_from_children(memory.addr()));
        assert!(is_kept_from_children(right.addr()));
        assert!(is_kept_from_children(link.granted.as_ref().unwrap().addr()));
    }
    assert!(!is_kept_from_children(ours.addr()), "a child may read what is this process's own");
}
