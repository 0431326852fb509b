//! Tests that strangers and floods of connections cost little.

use kv_core::TransportWait;
use kv_host::clock;

use super::*;
use crate::links::reading::{MESSAGE_BUDGET, MESSAGE_SHARE};

#[test]
fn garbage_oversized_and_early_messages_are_dropped_and_harm_nobody() {
    let (mut transport, arena) = transport();
    let mut clients: Vec<UnixStream> = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 1000],
        vec![0xff; 100_000],
        message(2, b"a frame before the hello"),
        message(3, b""),
        message(1, b"not a hello"),
        message(1, b"KVH\x02too short"),
        [
            message(
                1,
                &[b"KVH\x02".as_slice(), &transport.given.token().to_bytes(), b"no metadata"].concat(),
            ),
            message(4, b""),
        ]
        .concat(),
        [&u32::MAX.to_le_bytes()[..], &[1]].concat(),
    ]
    .into_iter()
    .map(|bytes| {
        let mut client = dial_raw(&transport);
        client.write_all(&bytes).unwrap();
        client
    })
    .collect();
    assert_eq!(poll_at(&mut transport, Duration::ZERO), []);
    for (number, client) in clients.iter_mut().enumerate() {
        assert!(is_closed(client), "client {number}");
    }
    assert!(transport.links.is_empty());
    assert!(matches!(transport.wait(), TransportWait::Readable(_)));
    assert_serves(&mut transport, &arena);
}

#[test]
fn silent_and_slow_clients_are_few_and_leave_after_the_timeout() {
    let config = LocalConfig { max_strangers: 8, ..LocalConfig::default() };
    let (mut transport, arena) = transport_with(config, random_socket_name().unwrap());
    let (_, hello) = forged(&transport, Vec::new());
    let mut slow: Vec<UnixStream> = (0..40).map(|_| dial_raw(&transport)).collect();
    for client in &mut slow {
        let _ = client.write_all(&hello[..20]);
    }
    poll_at(&mut transport, Duration::from_secs(1));
    assert_eq!(transport.links.len(), 8);
    assert!(
        matches!(transport.wait(), TransportWait::ReadableOrAfter(_, after) if after <= Duration::from_secs(5))
    );
    assert_serves(&mut transport, &arena);
    // A byte now and then does not keep the connections.
    for client in &mut slow {
        let _ = client.write_all(&hello[20..21]);
    }
    poll_at(&mut transport, Duration::from_secs(5));
    assert!(!transport.links.is_empty());
    poll_at(&mut transport, Duration::from_millis(6001));
    assert!(transport.links.is_empty() && transport.links.strangers().is_empty());
    assert!(slow.iter_mut().all(is_closed));
    assert!(matches!(transport.wait(), TransportWait::Readable(_)));
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
        let (mut transport, arena) = transport();
        let (_, hello) = forged(&transport, vec![8192]);
        let mut client = dial_raw(&transport);
        greet(&client, &hello, &fds);
        poll_at(&mut transport, Duration::ZERO);
        assert_eq!(transport.links.unclaimed().len(), usize::from(accepted), "{name}");
        assert_eq!(is_closed(&mut client), !accepted, "{name}");
        assert_serves(&mut transport, &arena);
    }
}

#[test]
fn file_descriptors_that_were_not_asked_for_are_closed() {
    let (mut transport, _arena) = transport();
    let (_, hello) = forged(&transport, Vec::new());
    let client = dial_raw(&transport);
    greet(&client, &hello, &[]);
    poll_at(&mut transport, Duration::ZERO);
    let name = "kv-test-unasked";
    let file = memfd_create(name, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    for _ in 0..20 {
        send_with_fds(&client, &message(2, b"frame"), &[&file; 20]);
        assert_eq!(poll_at(&mut transport, Duration::ZERO).len(), 1);
        assert_eq!(open_files(name), 1);
    }
}

#[test]
fn a_flood_of_tiny_frames_is_served_a_bounded_number_at_a_time() {
    let (mut transport, _arena) = transport();
    let (_, hello) = forged(&transport, Vec::new());
    let mut client = dial_raw(&transport);
    greet(&client, &hello, &[]);
    poll_at(&mut transport, Duration::ZERO);
    client.set_nonblocking(true).unwrap();
    let flood = message(2, b"").repeat(40_000);
    let written = client.write(&flood).unwrap();
    let mut frames = 0;
    let mut polls = 0;
    while frames < written / 5 {
        let mut events = Vec::new();
        transport.poll(Time::ZERO, &mut events);
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
    let (mut transport, arena) = transport_with(config, random_socket_name().unwrap());
    let mut clients: Vec<UnixStream> = (0..10)
        .map(|_| {
            let (_, hello) = forged(&transport, Vec::new());
            let client = dial_raw(&transport);
            greet(&client, &hello, &[]);
            poll_at(&mut transport, Duration::ZERO);
            client
        })
        .collect();
    assert_eq!(transport.links.unclaimed().len(), 4);
    assert_eq!(clients.iter_mut().filter_map(|client| is_closed(client).then_some(())).count(), 6);
    clients[9].set_nonblocking(false).unwrap();
    poll_at(&mut transport, Duration::from_secs(30));
    clients[9].write_all(&message(2, b"still here")).unwrap();
    assert_eq!(poll_at(&mut transport, Duration::from_secs(30)).len(), 1);
    poll_at(&mut transport, Duration::from_secs(61));
    assert_eq!(transport.links.unclaimed().len(), 1);
    poll_at(&mut transport, Duration::from_secs(91));
    assert!(transport.links.is_empty());
    assert_serves(&mut transport, &arena);
}

#[test]
fn frames_of_a_flooding_peer_do_not_delay_other_peers() {
    let (mut transport, _arena) = transport();
    let mut clients: Vec<UnixStream> = (0..20)
        .map(|_| {
            let (_, hello) = forged(&transport, Vec::new());
            let client = dial_raw(&transport);
            greet(&client, &hello, &[]);
            client.set_nonblocking(true).unwrap();
            client
        })
        .collect();
    poll_at(&mut transport, Duration::ZERO);
    let flood = message(2, b"").repeat(20_000);
    for client in &mut clients[..19] {
        client.write_all(&flood).unwrap();
    }
    transport.poll(Time::ZERO, &mut Vec::new());
    clients[19].write_all(&message(2, b"urgent")).unwrap();
    let mut before = Vec::new();
    let mut polls = 0;
    while !heard(&before, b"urgent") {
        transport.poll(Time::ZERO, &mut before);
        polls += 1;
        assert!(polls < 50, "{} frames came first", before.len());
    }
}

/// Spends much processor time.
fn work() {
    let begun = clock::thread_time();
    while clock::thread_time() - begun < Duration::from_millis(10) {
        std::hint::spin_loop();
    }
}

/// Polls the transport, and spends much processor time on the events.
fn handle_slowly(transport: &mut LocalTransport) -> usize {
    let mut events = Vec::new();
    transport.poll(Time::ZERO, &mut events);
    work();
    // The call of `wait` ends the time that the owner spends on the frames.
    assert_eq!(transport.wait(), TransportWait::Now, "there are others in the buffer");
    events.len()
}

#[test]
fn a_peer_that_uses_up_its_time_waits_while_other_peers_are_heard() {
    let (mut transport, arena) = transport();
    let mut greeted = || {
        let (_, hello) = forged(&transport, Vec::new());
        let client = dial_raw(&transport);
        greet(&client, &hello, &[]);
        poll_at(&mut transport, Duration::ZERO);
        client
    };
    let (mut costly, mut other) = (greeted(), greeted());
    let flood = message(2, b"garbage").repeat(2 * MESSAGE_SHARE);
    costly.write_all(&flood).unwrap();
    assert_eq!(handle_slowly(&mut transport), MESSAGE_SHARE);
    other.write_all(&message(2, b"urgent")).unwrap();
    let mut events = Vec::new();
    transport.poll(Time::ZERO, &mut events);
    assert!(events.len() == 1 && heard(&events, b"urgent"), "{} frames came", events.len());
    assert!(matches!(transport.wait(), TransportWait::ReadableOrAfter(..)), "nobody is there to be heard");

    // The frames that the peer has sent are in the buffer, and are read although nothing more comes.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    events.clear();
    while events.len() < MESSAGE_SHARE {
        transport.poll(Time::ZERO, &mut events);
        assert!(std::time::Instant::now() < deadline, "{} frames came", events.len());
    }
    assert_eq!(transport.pacing.next(), None);

    // Frames that the peer sends while its connection rests do not wake the owner, and its end is noticed.
    costly.write_all(&flood).unwrap();
    assert!(handle_slowly(&mut transport) > 0);
    transport.poll(Time::ZERO, &mut events);
    assert!(transport.pacing.next().is_some());
    costly.write_all(&flood).unwrap();
    assert!(transport.watch.woken().is_empty(), "a rest must not burn a core");
    drop(costly);
    while transport.links.len() > 1 {
        transport.poll(Time::ZERO, &mut events);
        assert!(std::time::Instant::now() < deadline);
    }
    assert_eq!(transport.pacing.next(), None);
    assert_serves(&mut transport, &arena);
}

#[test]
fn work_that_the_owner_does_before_it_handles_the_events_is_charged_to_no_peer() {
    let (mut transport, _arena) = transport();
    let mut clients = [(); 2].map(|()| {
        let (_, hello) = forged(&transport, Vec::new());
        let client = dial_raw(&transport);
        greet(&client, &hello, &[]);
        poll_at(&mut transport, Duration::ZERO);
        client
    });
    let mut rests = |owner_is_busy: bool| {
        clients[0].write_all(&message(2, b"one frame")).unwrap();
        let mut events = Vec::new();
        transport.poll(Time::ZERO, &mut events);
        assert!(heard(&events, b"one frame"));
        work();
        if owner_is_busy {
            transport.begin_handling();
        }
        let _ = transport.wait();
        transport.poll(Time::ZERO, &mut events);
        transport.pacing.next().is_some()
    };
    assert!(!rests(true));
    assert!(rests(false));
}

/// Descriptors of this process that are memory files of this test.
fn open_files(name: &str) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains(name)).count()
}

#[test]
fn strangers_lend_no_descriptors_and_token_holders_few() {
    let (mut transport, arena) = transport();
    let name = "kv-test-lent";
    let file = memfd_create(name, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    assert_eq!(open_files(name), 1);
    let (_, hello) = forged(&transport, Vec::new());
    let mut wrong = hello.clone();
    wrong[20] ^= 1;
    let pieces: [&[u8]; 5] = [&hello[..1], &hello[..10], &hello[..30], &hello, &wrong];
    let clients: Vec<UnixStream> = (0..60).map(|_| dial_raw(&transport)).collect();
    for (client, piece) in clients.iter().zip(pieces.iter().cycle()) {
        // Descriptors that come with the hello, or with a part of it.
        send_with_fds(client, piece, &[&file; 64]);
        poll_at(&mut transport, Duration::ZERO);
        assert_eq!(open_files(name), 1);
    }
    drop(clients);
    poll_at(&mut transport, Duration::ZERO);

    let too_many = dial_raw(&transport);
    (&too_many).write_all(&hello).unwrap();
    for _ in 0..2 {
        send_with_fds(&too_many, &message(4, b"")[..1], &[&file; 50]);
        poll_at(&mut transport, Duration::ZERO);
        assert!(open_files(name) <= 66, "{}", open_files(name));
    }
    drop(too_many);
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(open_files(name), 1);

    // Peers that know the token may send descriptors, but all of them together only so many.
    let clients: Vec<UnixStream> = (0..20)
        .map(|_| {
            let (_, hello) = forged(&transport, vec![4096; 64]);
            let client = dial_raw(&transport);
            greet(&client, &hello, &[&file; 64]);
            poll_at(&mut transport, Duration::ZERO);
            assert!(open_files(name) <= 1 + transport.config.max_lent, "{}", open_files(name));
            client
        })
        .collect();
    assert_eq!(transport.links.unclaimed().len(), transport.config.max_lent / 65);
    drop(clients);
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(open_files(name), 1);
    assert_serves(&mut transport, &arena);
}
