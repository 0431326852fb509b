//! Impostors: a process that pretends to be another one is never read from nor written to.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use kv_core::Origin;

use super::*;

const IMPOSTOR: &str = "KV_LOCAL_IMPOSTOR";

#[test]
fn a_restarted_peer_under_the_same_name_is_refused_and_never_written_to() {
    let name = random_socket_name().unwrap();
    let (mut us, source) = transport();
    source.write(0, &[7; 4096]).unwrap();
    let (first_life, _) = transport_with(LocalConfig::default(), name.clone());
    let metadata = first_life.metadata().unwrap();
    drop(first_life);
    us.connect(PeerId(1), &metadata).unwrap();
    assert_eq!(us.send(PeerId(1), Bytes::new()), Err(TransportError::PeerGone));
    let mut events = Vec::new();
    us.poll(Time::ZERO, &mut events);
    assert_eq!(events, [TransportEvent::PeerGone { peer: PeerId(1), end: DEAD }]);

    let (mut second_life, arena) = transport_with(LocalConfig::default(), name);
    befriend(&mut us, PeerId(2), &metadata).unwrap();
    us.post(PeerId(2), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..100 {
        us.poll(Time::ZERO, &mut events);
        assert_eq!(poll_at(&mut second_life, Duration::ZERO), []);
    }
    us.poll(Time::ZERO + DYING, &mut events);
    let gone = TransportEvent::PeerGone { peer: PeerId(2), end: WayEnd::Lost };
    assert_eq!(
        events,
        [TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) }, gone]
    );
    assert_eq!(second_life.stats().refused, 1);
    let mut page = [0; 4096];
    arena.read(0, &mut page).unwrap();
    assert_eq!(page, [0; 4096]);
    assert!(us.links.peers() == 0 && us.links.is_empty());
}

#[test]
fn metadata_that_was_changed_on_its_way_is_never_used() {
    let (mut us, _source) = transport();
    let (mut them, _arena) = transport();
    let mut changed = Metadata::decode(&them.metadata().unwrap()).unwrap();
    changed.regions[0] = Place { arena: None, start: 4096, len: 1 << 40 };
    befriend(&mut us, PeerId(1), &changed.encode().unwrap()).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..100 {
        us.poll(Time::ZERO, &mut events);
        them.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events[0], TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) });
    assert!(us.links.iter().all(|(_, link)| link.memory.is_none()));

    // The same checks at the side that was dialed.
    let (mut us, _source) = transport();
    us.connect(PeerId(1), &them.metadata().unwrap()).unwrap();
    for _ in 0..10 {
        us.poll(Time::ZERO, &mut Vec::new());
        them.poll(Time::ZERO, &mut Vec::new());
    }
    let mut changed = Metadata::decode(&us.metadata().unwrap()).unwrap();
    changed.regions[0].len += 1;
    assert!(matches!(them.connect(PeerId(2), &changed.encode().unwrap()), Err(TransportError::Metadata(_))));
    them.connect(PeerId(2), &us.metadata().unwrap()).unwrap();
}

#[test]
fn an_impostor_that_answers_is_never_written_to() {
    let (mut us, _source) = transport();
    let name = random_socket_name().unwrap();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let (victim, _arena) = transport_with(LocalConfig::default(), random_socket_name().unwrap());
    let mut metadata = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    metadata.socket = name;
    befriend(&mut us, PeerId(1), &metadata.encode().unwrap()).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let (_, answer) = forged(&us, vec![8192]);
    greet(&stream, &answer, &[&memory_file(8192, SealFlags::SHRINK)]);
    let mut events = poll_at(&mut us, Duration::ZERO);
    events.extend(poll_at(&mut us, DYING));
    // The impostor has this side's descriptors and lives, so it is not proven that it does not use them.
    let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
    assert_eq!(
        events,
        [TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) }, lost]
    );
    assert!(us.links.is_empty());
    us.disconnect(PeerId(1));
    assert!(us.revoking.lost() == 0 && us.links.peers() == 0);
}

#[test]
fn connections_of_one_transport_count_as_one_peer() {
    let (mut us, _source) = transport();
    let (them, _arena) = transport();
    let metadata = them.metadata().unwrap();
    us.connect(PeerId(1), &metadata).unwrap();
    assert!(us.connect(PeerId(1), &metadata).is_err());
    assert!(matches!(us.connect(PeerId(2), &metadata), Err(TransportError::Metadata(_))));
    let own = us.metadata().unwrap();
    assert!(matches!(us.connect(PeerId(3), &own), Err(TransportError::Metadata(_))));
    us.disconnect(PeerId(1));
    us.connect(PeerId(2), &metadata).unwrap();
}

#[test]
fn a_connection_speaks_only_for_the_transport_that_opened_it() {
    let (mut us, _source) = transport();
    let (mut them, _arena) = transport();
    let (victim, _other) = transport();
    befriend(&mut them, PeerId(1), &us.metadata().unwrap()).unwrap();
    them.send(PeerId(1), Bytes::from_static(b"hello")).unwrap();
    let from = std::iter::from_fn(|| {
        poll_at(&mut them, Duration::ZERO);
        Some(poll_at(&mut us, Duration::ZERO))
    });
    let heard = |event: TransportEvent| match event {
        TransportEvent::Frame { from, .. } => Some(from),
        _ => None,
    };
    let from = from.take(100_000).flatten().find_map(heard).expect("a frame");
    assert!(us.may_speak_for(from, &them.metadata().unwrap()));
    assert!(!us.may_speak_for(from, &victim.metadata().unwrap()), "another's memory");
    assert!(!us.may_speak_for(Origin(from.0 + 1000), &them.metadata().unwrap()), "a connection that is gone");
}

/// Asserts that a page reaches the victim under its metadata, also after an impostor has used them.
fn assert_reaches(
    (us, source): (&mut LocalTransport, &Arena),
    (victim, arena): (&mut LocalTransport, &Arena),
    metadata: &[u8],
) {
    source.write(0, b"for the victim").unwrap();
    befriend(us, PeerId(1), metadata).unwrap();
    us.post(PeerId(1), write_post(1, 4096)).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        us.poll(Time::ZERO, &mut events);
        victim.poll(Time::ZERO, &mut Vec::new());
    }
    assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    let mut page = [0; 14];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"for the victim");
}

/// The impostor, in a process of its own. Without its environment variable, this test does nothing.
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

#[test]
fn an_impostor_with_the_victims_metadata_is_refused_and_the_victim_is_served() {
    let (mut us, source) = transport();
    let (mut victim, arena) = transport();
    let metadata = victim.metadata().unwrap();
    let hello: String = hello_for(&us, &metadata).iter().map(|byte| format!("{byte:02x}")).collect();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "links::tests::impostors::impostor", "--nocapture", "--test-threads=1"])
        .env(IMPOSTOR, format!("{} {hello}", us.given.socket_name()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("greeted")));
    poll_at(&mut us, Duration::ZERO);
    assert_eq!(us.stats().accepted, 1);
    assert_eq!((us.stats().refused, us.links.unclaimed().len()), (1, 0));

    assert_reaches((&mut us, &source), (&mut victim, &arena), &metadata);
    // The other way: the victim connects on its own.
    assert_serves(&mut us, &source);
    drop(process.stdin.take());
    process.wait().unwrap();
}

#[test]
fn an_unconfirmed_identity_is_not_used_although_its_address_is() {
    let (mut us, source) = transport();
    let (mut victim, arena) = transport();
    // The identity of a process in a PID namespace that this process cannot see, before Linux 6.9.
    let mut unseen = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    unseen.process = ProcessIdentity { inode: 0, namespace: 1, pid: 7, started: 7 };
    victim.given.pretend(unseen.encode().unwrap());
    let metadata = victim.metadata().unwrap();
    let client = dial_raw(&us);
    greet(&client, &hello_for(&us, &metadata), &[&memory_file(2 << 20, SealFlags::SHRINK)]);
    poll_at(&mut us, Duration::ZERO);
    assert_eq!(us.links.unclaimed().len(), 1);
    assert_reaches((&mut us, &source), (&mut victim, &arena), &metadata);
}

#[test]
fn another_process_at_the_address_of_a_peer_receives_nothing() {
    let (mut us, _source) = transport();
    let (victim, _arena) = transport();
    let mut metadata = Metadata::decode(&victim.metadata().unwrap()).unwrap();
    let mut sleep = Command::new("sleep").arg("60").spawn().unwrap();
    metadata.process.inode += 1;
    let refused = us.connect(PeerId(1), &metadata.encode().unwrap());
    assert!(matches!(refused, Err(TransportError::Metadata(_))), "{refused:?}");
    assert!(us.links.is_empty() && us.links.peers() == 0);
    metadata.process = ProcessIdentity { inode: 0, pid: sleep.id() as i32, ..metadata.process };
    assert!(us.connect(PeerId(1), &metadata.encode().unwrap()).is_err());
    sleep.kill().unwrap();
    sleep.wait().unwrap();
}
