//! Who connects to a transport: peers on several addresses, peers that have restarted, and strangers who send
//! what they like.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{Side, boottime, connect, heard};
use kv_core::{Op, PeerId, PostId, Time, Transport, TransportError, TransportEvent, WayEnd};
use kv_tcp::{TcpConfig, TcpError, TcpTransport};
use workers::{ended, loopback, post, until, worker};

const PEER: PeerId = PeerId(1);
const LEN: usize = 1 << 20;

/// Shows that the first worker can write to the second and read from it.
fn exchange(from: &mut Side<TcpTransport>, to: &mut Side<TcpTransport>) {
    from.memory.write(0, 0, &[7; LEN]);
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    let mut events = Vec::new();
    until("a write", &mut [&mut *from, &mut *to], &mut events, |events| ended(&events[0], 1).is_some());
    assert_eq!(ended(&events[0], 1), Some(Ok(())));
    let mut bytes = vec![0; LEN];
    to.memory.read(0, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 7));
    to.memory.write(0, 0, &[9; LEN]);
    from.transport.post(PEER, post(2, Op::Read, LEN)).unwrap();
    until("a read", &mut [&mut *from, to], &mut events, |events| ended(&events[0], 2).is_some());
    from.memory.read(0, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 9));
}

#[test]
fn workers_on_ipv4_and_ipv6_exchange_pages() {
    let (mut four, mut six) = (
        worker(TcpConfig::new(loopback()), &[LEN]),
        worker(TcpConfig::new("[::1]:0".parse().unwrap()), &[LEN]),
    );
    exchange(&mut four, &mut six);
    exchange(&mut six, &mut four);
}

#[test]
fn advertised_addresses_are_tried_in_their_order_whatever_the_bound_one() {
    // The first address refuses connections, the second answers as somebody else, the third is the worker's.
    let closed = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let mut other = worker(TcpConfig::new(loopback()), &[LEN]);
    let other_addr = other.transport.local_addr();
    let config = TcpConfig::new("0.0.0.0:0".parse().unwrap());
    let config = config.with(|config| config.advertise = vec![closed, other_addr, loopback()]);
    let mut to = worker(config, &[LEN]);
    let port = to.transport.local_addr().port();
    assert_eq!(to.transport.addresses(), [closed, other_addr, SocketAddr::new(loopback().ip(), port)]);
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"hello")).unwrap();
    let mut events = Vec::new();
    until("a frame", &mut [&mut from, &mut to, &mut other], &mut events, |events| {
        heard(&events[1], b"hello")
    });
    assert!(events[2].is_empty() && events[0].is_empty(), "{events:?}");
    assert_eq!(other.transport.stats().refused, 1);
}

#[test]
fn an_address_that_is_silent_leaves_time_for_those_after_it() {
    // The kernel opens connections there, and nobody ever says a word on them.
    let silent = TcpListener::bind(loopback()).unwrap();
    let config = TcpConfig::new(loopback());
    let config = config.with(|config| config.advertise = vec![silent.local_addr().unwrap(), loopback()]);
    let mut to = worker(config, &[LEN]);
    let config = TcpConfig::new(loopback());
    let config = config.with(|config| config.handshake_timeout = Duration::from_secs(2));
    exchange(&mut worker(config, &[LEN]), &mut to);
}

#[test]
fn addresses_that_no_peer_could_connect_to_are_refused_by_name() {
    let any: SocketAddr = "0.0.0.0:0".parse().unwrap();
    match TcpTransport::new(TcpConfig::new(any)) {
        Err(TcpError::Advertise { address }) => assert!(address.ip().is_unspecified()),
        other => panic!("{other:?}"),
    }
    let other = TcpListener::bind(loopback()).unwrap();
    let taken = other.local_addr().unwrap();
    match TcpTransport::new(TcpConfig::new(taken)) {
        Err(TcpError::Bind { address, .. }) => assert_eq!(address, taken),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_transport_that_restarts_on_the_same_port_is_another_peer() {
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    let mut first = worker(TcpConfig::new(loopback()), &[LEN]);
    let (old, addr) = (first.transport.metadata().unwrap(), first.transport.local_addr());
    exchange(&mut from, &mut first);
    drop(first);
    let mut second = worker(TcpConfig::new(addr), &[LEN]);
    let dead = |events: &[TransportEvent]| {
        let dead = WayEnd::Dead { quiet_after: Duration::ZERO };
        events.contains(&TransportEvent::PeerGone { peer: PEER, end: dead })
    };
    let mut events = Vec::new();
    until("the end of the first", &mut [&mut from, &mut second], &mut events, |events| dead(&events[0]));
    // What was meant for the first life never reaches the second.
    events.clear();
    connect(&mut from.transport, PEER, &old).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"for the first")).unwrap();
    from.transport.post(PEER, post(3, Op::Write, LEN)).unwrap();
    until("the end of the first", &mut [&mut from, &mut second], &mut events, |events| dead(&events[0]));
    assert_eq!(ended(&events[0], 3), Some(Err(TransportError::PeerGone)));
    assert!(events[1].is_empty());
    let mut bytes = vec![1; LEN];
    second.memory.read(0, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0));
    exchange(&mut from, &mut second);
}

/// Sends `bytes` to a worker; returns what the worker has sent back when it has closed the connection.
fn answer(to: &mut Side<TcpTransport>, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(to.transport.local_addr()).unwrap();
    stream.write_all(bytes).unwrap();
    stream.set_nonblocking(true).unwrap();
    let (mut got, mut buffer) = (Vec::new(), [0; 4096]);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "the connection is kept");
        let mut events = Vec::new();
        to.transport.poll(boottime(), &mut events);
        assert!(events.is_empty(), "{events:?}");
        match stream.read(&mut buffer) {
            Ok(0) => return got,
            Ok(count) => got.extend(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return got,
        }
    }
}

#[test]
fn strangers_with_garbage_or_half_a_hello_are_closed_and_learn_nothing() {
    let config = TcpConfig::new(loopback());
    let config = config.with(|config| config.handshake_timeout = Duration::from_millis(100));
    let mut to = worker(config, &[LEN]);
    to.transport.metadata().unwrap();
    assert!(answer(&mut to, b"GET / HTTP/1.1\r\n\r\n").is_empty());
    assert!(answer(&mut to, &[0; 10_000]).is_empty());
    assert!(answer(&mut to, &[0xff; 1]).is_empty());
    // Half a hello: closed when its time is over.
    assert!(answer(&mut to, b"KVt\x02\0\0\0\0").is_empty());
    assert!(answer(&mut to, b"").is_empty());
    // A hello for another life of the transport is told that this is not it, and not who it is.
    let mut hello = b"KVt\x02".to_vec();
    hello.resize(120, 5);
    let told = answer(&mut to, &hello);
    assert_eq!((told.len(), &told[..4]), (80, &b"KVw\x02"[..]));
    assert!(told[8..56].iter().all(|byte| *byte == 0), "{told:?}");
    assert_eq!((to.transport.stats().accepted, to.transport.stats().refused), (6, 6));
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    exchange(&mut from, &mut to);
}

#[test]
fn strangers_have_no_more_time_when_they_are_many_or_speak_slowly() {
    let config = TcpConfig::new(loopback());
    let mut to = worker(config.with(|config| config.handshake_timeout = Duration::from_millis(200)), &[LEN]);
    to.transport.metadata().unwrap();
    let mut strangers = [0; 5].map(|_| TcpStream::connect(to.transport.local_addr()).unwrap());
    let (mut said, mut next) = (0, Instant::now());
    while to.transport.stats().refused < 5 {
        assert!(said < 60, "{:?}", to.transport.stats());
        if next <= Instant::now() {
            // The beginning of a hello, which goes on.
            let _ = strangers[0].write(&[*b"KVt\x02".get(said).unwrap_or(&0)]);
            (said, next) = (said + 1, Instant::now() + Duration::from_millis(50));
        }
        to.transport.poll(boottime(), &mut Vec::new());
    }
}

#[test]
fn a_crowd_of_strangers_is_bounded_and_does_not_keep_peers_out() {
    let config = TcpConfig::new(loopback()).with(|config| config.max_strangers = 8);
    let mut to = worker(config, &[LEN]);
    let addr = to.transport.local_addr();
    let crowd: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(addr).unwrap()).collect();
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    exchange(&mut from, &mut to);
    assert!(to.transport.stats().refused >= 92, "{:?}", to.transport.stats());
    drop(crowd);
}

#[test]
fn a_peer_is_connected_under_one_id_only_and_the_number_of_peers_is_bounded() {
    let config = TcpConfig::new(loopback()).with(|config| config.max_peers = 2);
    let mut from = worker(config, &[LEN]);
    let peers = [0; 3].map(|_| worker(TcpConfig::new(loopback()), &[LEN]));
    let [first, second, third] = peers.each_ref().map(|peer| peer.transport.metadata().unwrap());
    from.transport.connect(PEER, &first).unwrap();
    let refused = from.transport.connect(PeerId(2), &first);
    assert_eq!(refused, Err(TransportError::Metadata("the peer is connected already, under another id")));
    let refused = from.transport.connect(PEER, &second);
    assert!(matches!(refused, Err(TransportError::Unsupported(_))), "{refused:?}");
    from.transport.connect(PeerId(2), &second).unwrap();
    assert_eq!(from.transport.connect(PeerId(3), &third), Err(TransportError::WouldBlock));
    from.transport.disconnect(PEER);
    from.transport.connect(PeerId(3), &third).unwrap();
}

#[test]
fn a_worker_may_speak_only_for_the_metadata_of_its_hello() {
    let (mut one, mut two, mut to) = (
        worker(TcpConfig::new(loopback()), &[LEN]),
        worker(TcpConfig::new(loopback()), &[LEN]),
        worker(TcpConfig::new(loopback()), &[LEN]),
    );
    let metadata = to.transport.metadata().unwrap();
    for (side, word) in [(&mut one, &b"one"[..]), (&mut two, &b"two"[..])] {
        connect(&mut side.transport, PEER, &metadata).unwrap();
        side.transport.send(PEER, Bytes::copy_from_slice(word)).unwrap();
    }
    let mut events = Vec::new();
    let both = |events: &[Vec<TransportEvent>]| heard(&events[2], b"one") && heard(&events[2], b"two");
    until("two frames", &mut [&mut one, &mut two, &mut to], &mut events, both);
    let (mine, theirs) = (one.transport.metadata().unwrap(), two.transport.metadata().unwrap());
    for event in &events[2] {
        let TransportEvent::Frame { from, frame } = event else { panic!("{event:?}") };
        let is_one = &frame[..] == b"one";
        assert_eq!(to.transport.may_speak_for(*from, &mine), is_one);
        assert_eq!(to.transport.may_speak_for(*from, &theirs), !is_one);
        assert!(!to.transport.may_speak_for(*from, b"nonsense"));
    }
}

#[test]
fn a_crowd_of_peers_that_open_their_connections_at_once_loses_no_way() {
    // More peers than strangers are kept.
    const PEERS: usize = 40;
    let config = TcpConfig::new(loopback()).with(|config| config.max_strangers = 8);
    let mut to = worker(config, &[LEN]);
    let metadata = to.transport.metadata().unwrap();
    let mut peers: Vec<_> = (0..PEERS).map(|_| worker(TcpConfig::new(loopback()), &[LEN])).collect();
    for peer in &mut peers {
        peer.transport.connect(PEER, &metadata).unwrap();
        peer.transport.send(PEER, Bytes::from_static(b"here")).unwrap();
    }
    let mut events = Vec::new();
    let mut sides: Vec<_> = peers.iter_mut().chain([&mut to]).collect();
    until("a frame of each", &mut sides, &mut events, |events| events[PEERS].len() == PEERS);
    for (side, events) in sides.iter_mut().zip(&mut events).take(PEERS) {
        assert_eq!(*events, []);
        side.transport.permit(PEER, Time::MAX);
        side.transport.post(PEER, post(1, Op::Write, 4096)).unwrap();
    }
    until("a write of each", &mut sides, &mut events, |events| {
        events[..PEERS].iter().all(|events| !events.is_empty())
    });
    for events in &events[..PEERS] {
        assert_eq!(*events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    }
}

#[test]
fn metadata_with_another_table_of_regions_opens_no_way_and_is_refused_by_the_worker_itself() {
    let (mut from, mut to) =
        (worker(TcpConfig::new(loopback()), &[LEN]), worker(TcpConfig::new(loopback()), &[LEN]));
    let mut damaged = to.transport.metadata().unwrap().to_vec();
    // The length of the region, as msgpack has it.
    let at = damaged.windows(5).position(|bytes| bytes == [0xce, 0, 0x10, 0, 0]).unwrap();
    damaged[at + 2] = 0x20;
    connect(&mut from.transport, PEER, &damaged).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"here")).unwrap();
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    let mut events = Vec::new();
    let gone = |event: &TransportEvent| matches!(event, TransportEvent::PeerGone { peer: PEER, .. });
    until("the end of the way", &mut [&mut from, &mut to], &mut events, |events| events[0].iter().any(gone));
    assert_eq!(ended(&events[0], 1), Some(Err(TransportError::PeerGone)));
    assert_eq!((&events[1], to.transport.stats().refused), (&vec![], 1));
}
