//! Encrypted connections: who is let in, and what is seen, changed or cut on the way.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{Side, boottime, connect, heard};
use kv_core::{Op, PeerId, Transport, TransportError, TransportEvent, WayEnd};
use kv_tcp::{TcpConfig, TcpTransport, Tls, TlsError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use workers::authority::{Authority, Signed};
use workers::wire::Wire;
use workers::{ended, loopback, post, until, worker};

const PEER: PeerId = PeerId(1);
const LEN: usize = 1 << 20;

fn over(tls: Tls) -> TcpConfig {
    TcpConfig::new(loopback()).with(|config| {
        config.tls = Some(tls);
        // No handshake ends by its time on a busy machine.
        config.handshake_timeout = Duration::from_secs(60);
    })
}

/// The same, for a way that a worker tries in vain until the time is over.
fn in_vain(tls: Tls) -> TcpConfig {
    over(tls).with(|config| config.handshake_timeout = Duration::from_secs(2))
}

/// A text that stands in a page from end to end.
fn page() -> Vec<u8> {
    b"what the user has said and nobody else may read ".iter().copied().cycle().take(LEN).collect()
}

/// Shows that the first worker can write to the second and read from it.
fn exchange(from: &mut Side<TcpTransport>, to: &mut Side<TcpTransport>) {
    from.memory.write(0, 0, &page());
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"a frame that nobody else may read")).unwrap();
    let mut events = Vec::new();
    until("a write", &mut [&mut *from, &mut *to], &mut events, |events| {
        ended(&events[0], 1).is_some() && heard(&events[1], b"a frame that nobody else may read")
    });
    assert_eq!(ended(&events[0], 1), Some(Ok(())));
    let mut bytes = vec![0; LEN];
    to.memory.read(0, 0, &mut bytes);
    assert!(bytes == page());
    to.memory.write(0, 0, &[9; LEN]);
    from.transport.post(PEER, post(2, Op::Read, LEN)).unwrap();
    until("a read", &mut [&mut *from, to], &mut events, |events| ended(&events[0], 2).is_some());
    assert_eq!(ended(&events[0], 2), Some(Ok(())));
    from.memory.read(0, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 9));
}

#[test]
fn a_plain_worker_and_an_encrypted_one_refuse_each_other_by_name() {
    let tls = Authority::new().tls();
    let (mut plain, mut secret) = (worker(TcpConfig::new(loopback()), &[LEN]), worker(over(tls), &[LEN]));
    let (of_plain, of_secret) = (plain.transport.metadata().unwrap(), secret.transport.metadata().unwrap());
    let refused = |text| Err(TransportError::Metadata(text));
    assert_eq!(plain.transport.connect(PEER, &of_secret), refused("tls is off here, and on at the peer"));
    assert_eq!(secret.transport.connect(PEER, &of_plain), refused("tls is on here, and off at the peer"));
}

/// Sends bytes to a worker until the worker closes the connection. Returns what the worker has sent.
fn answer(to: &mut Side<TcpTransport>, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(to.transport.local_addr()).unwrap();
    stream.write_all(bytes).unwrap();
    stream.set_nonblocking(true).unwrap();
    let (mut got, mut buffer) = (Vec::new(), [0; 4096]);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "the connection is kept");
        to.transport.poll(boottime(), &mut Vec::new());
        match stream.read(&mut buffer) {
            Ok(0) => return got,
            Ok(count) => got.extend(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return got,
        }
    }
}

#[test]
fn greetings_in_plain_text_and_of_tls_are_refused_by_who_awaits_the_other_and_counted() {
    let tls = Authority::new().tls();
    let (mut plain, mut secret) =
        (worker(TcpConfig::new(loopback()), &[LEN]), worker(over(tls.clone()), &[LEN]));
    plain.transport.metadata().unwrap();
    secret.transport.metadata().unwrap();
    let mut hello = b"KVt\x02".to_vec();
    hello.resize(120, 5);
    // Seven bytes: an alert of TLS, in plain text.
    assert!(answer(&mut secret, &hello).len() <= 7);
    assert_eq!((secret.transport.stats().refused, secret.transport.stats().untrusted), (1, 1));
    // The beginning of a client's hello of TLS.
    assert!(answer(&mut plain, &[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3]).is_empty());
    assert_eq!((plain.transport.stats().refused, plain.transport.stats().untrusted), (1, 0));
    // Half of one, and no more: nobody is distrusted, and the time is over.
    let hasty = over(tls).with(|config| config.handshake_timeout = Duration::from_millis(500));
    let mut hasty = worker(hasty, &[LEN]);
    hasty.transport.metadata().unwrap();
    assert!(answer(&mut hasty, &[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3]).len() <= 7);
    assert_eq!((hasty.transport.stats().refused, hasty.transport.stats().untrusted), (1, 0));
}

/// Shows that one worker does not reach another, for this reason, and that no byte has moved.
fn refused(what: &str, from: Tls, to: Tls, reason: &str) {
    let (mut from, mut to) = (worker(in_vain(from), &[LEN]), worker(in_vain(to), &[LEN]));
    from.memory.write(0, 0, &page());
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"hello")).unwrap();
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    let mut events = Vec::new();
    let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
    until(what, &mut [&mut from, &mut to], &mut events, |events| events[0].contains(&lost));
    match ended(&events[0], 1) {
        Some(Err(TransportError::Backend { call: "TLS", status, .. })) => {
            assert_eq!(status, reason, "{what}")
        }
        other => panic!("{what}: {other:?}"),
    }
    assert_eq!(events[1], [], "{what}");
    assert!(from.transport.stats().untrusted > 0, "{what}");
    let mut bytes = vec![1; LEN];
    to.memory.read(0, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0), "{what}");
}

#[test]
fn workers_without_a_certificate_of_the_service_reach_nobody_and_say_why() {
    let (ours, other) = (Authority::new(), Authority::new());
    let foreign = other.sign(&["127.0.0.1"]);
    let by_peer = "the peer has refused this side's certificate or settings";
    // Signed by another authority, on the side that dials and on the side that is dialed.
    refused("a foreign dialer", ours.trusted_by(&foreign), ours.tls(), by_peer);
    let unknown = "no authority of this side has signed the peer's certificate";
    refused("a foreign peer", ours.tls(), ours.trusted_by(&foreign), unknown);
    // Expired, on either side.
    let expired = ours.sign_until(2001, &["127.0.0.1"]);
    refused("an expired dialer", ours.trusted_by(&expired), ours.tls(), by_peer);
    let late = "the peer's certificate has expired";
    refused("an expired peer", ours.tls(), ours.trusted_by(&expired), late);
    // Of another address, and of another name than the one that is asked for.
    let elsewhere = ours.sign(&["10.0.0.1", "workers.example"]);
    let named = "the peer's certificate is of another address or name";
    refused("a peer elsewhere", ours.tls(), ours.trusted_by(&elsewhere), named);
    let wanted = ours.tls().peer_name("others.example").unwrap();
    refused("another name", wanted, ours.trusted_by(&elsewhere), named);
}

#[test]
fn a_name_that_all_workers_share_stands_for_their_addresses() {
    let ours = Authority::new();
    let signed = ours.sign(&["workers.example"]);
    let named = || over(ours.trusted_by(&signed).peer_name("workers.example").unwrap());
    exchange(&mut worker(named(), &[LEN]), &mut worker(named(), &[LEN]));
    let six = |tls| over(tls).with(|config| config.bind = "[::1]:0".parse().unwrap());
    exchange(&mut worker(six(ours.tls()), &[LEN]), &mut worker(six(ours.tls()), &[LEN]));
}

#[test]
fn frames_that_come_at_once_are_all_told_to_an_owner_that_takes_some_at_a_time() {
    // More than are told at once, and fewer bytes than are read at once.
    const FRAMES: usize = 1700;
    let ours = Authority::new();
    let (mut from, mut to) = (worker(over(ours.tls()), &[LEN]), worker(over(ours.tls()), &[LEN]));
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"first")).unwrap();
    let first = |events: &[Vec<TransportEvent>]| heard(&events[1], b"first");
    until("the first frame", &mut [&mut from, &mut to], &mut Vec::new(), first);
    for batch in 1..=3 {
        for _ in 0..FRAMES {
            from.transport.send(PEER, Bytes::from_static(b"1")).unwrap();
        }
        // They have all come when the other side begins to read.
        for _ in 0..100 {
            from.transport.poll(boottime(), &mut Vec::new());
        }
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while events.len() < FRAMES {
            assert!(Instant::now() < deadline, "{} of {FRAMES} frames of batch {batch}", events.len());
            to.transport.poll(boottime(), &mut events);
        }
        assert!(events.iter().all(|event| matches!(event, TransportEvent::Frame { .. })));
    }
}

#[test]
fn frames_that_are_read_together_with_the_last_word_of_a_peer_are_told() {
    let ours = Authority::new();
    let (mut from, mut to) = (worker(over(ours.tls()), &[LEN]), worker(over(ours.tls()), &[LEN]));
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.send(PEER, Bytes::from_static(b"first")).unwrap();
    let first = |events: &[Vec<TransportEvent>]| heard(&events[1], b"first");
    until("the first frame", &mut [&mut from, &mut to], &mut Vec::new(), first);
    from.transport.send(PEER, Bytes::from_static(b"last")).unwrap();
    drop(from);
    let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while !heard(&events, b"last") {
        assert!(Instant::now() < deadline, "{events:?}");
        to.transport.poll(boottime(), &mut events);
    }
}

/// A configuration that a careless author might give: neither side asks for certificates of clients.
fn careless(authority: &Authority) -> Tls {
    let Signed { certificate, key } = authority.sign(&["127.0.0.1"]);
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(Tls::provider());
    let client = ClientConfig::builder_with_provider(provider.clone());
    let client = client.with_safe_default_protocol_versions().unwrap();
    let server = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Tls::new(
        Arc::new(client.with_root_certificates(roots).with_no_client_auth()),
        Arc::new(server.with_no_client_auth().with_single_cert(chain, key).unwrap()),
    )
}

#[test]
fn a_dialer_without_a_certificate_is_refused_even_where_the_configuration_asks_for_none() {
    let ours = Authority::new();
    for to in [ours.tls(), careless(&ours)] {
        let (mut from, mut to) = (worker(in_vain(careless(&ours)), &[LEN]), worker(in_vain(to), &[LEN]));
        connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
        from.transport.send(PEER, Bytes::from_static(b"hello")).unwrap();
        let mut events = Vec::new();
        let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
        until("the end", &mut [&mut from, &mut to], &mut events, |events| events[0].contains(&lost));
        assert_eq!(events[1], []);
        assert!(to.transport.stats().untrusted > 0);
    }
}

#[test]
fn nothing_of_pages_frames_and_greetings_is_readable_on_the_wire() {
    let tells = |wire: &Wire| {
        let seen = wire.keep();
        assert!(seen.len() > 2 * LEN, "{} bytes were carried", seen.len());
        let finds = |text: &[u8]| seen.windows(text.len()).any(|window| window == text);
        [&b"nobody else may read"[..], b"a frame", b"KVt\x02\0\0\0\0", &[9; 32]].map(finds)
    };
    let plain = TcpConfig::new(loopback());
    let wire = Wire::new();
    wire.keep();
    exchange(&mut worker(plain, &[LEN]), &mut worker(wire.config(), &[LEN]));
    assert_eq!(tells(&wire), [true; 4], "this test sees nothing");
    let ours = Authority::new();
    let wire = Wire::new();
    wire.keep();
    let behind = wire.config().with(|config| config.tls = Some(ours.tls()));
    exchange(&mut worker(over(ours.tls()), &[LEN]), &mut worker(behind, &[LEN]));
    assert_eq!(tells(&wire), [false; 4]);
}

#[test]
fn a_byte_that_is_changed_on_the_wire_ends_the_way_and_never_arrives() {
    let ours = Authority::new();
    for op in [Op::Write, Op::Read] {
        let wire = Wire::new();
        let behind = wire.config().with(|config| config.tls = Some(ours.tls()));
        let (mut from, mut to) = (worker(over(ours.tls()), &[LEN]), worker(behind, &[LEN]));
        exchange(&mut from, &mut to);
        from.memory.write(0, 0, &[5; LEN]);
        to.memory.write(0, 0, &[5; LEN]);
        wire.damage();
        from.transport.post(PEER, post(3, op, LEN)).unwrap();
        let mut events = Vec::new();
        until("the end", &mut [&mut from, &mut to], &mut events, |events| {
            events[0].iter().any(|event| matches!(event, TransportEvent::PeerGone { end: WayEnd::Lost, .. }))
        });
        assert!(matches!(ended(&events[0], 3), Some(Err(_))), "{op:?}: {events:?}");
        assert!(from.transport.stats().untrusted + to.transport.stats().untrusted > 0, "{op:?}");
        for side in [&from, &to] {
            let mut bytes = vec![0; LEN];
            side.memory.read(0, 0, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == 5), "{op:?}");
        }
        exchange(&mut from, &mut to);
    }
}

#[test]
fn certificates_that_cannot_be_used_are_refused_with_the_reason() {
    let ours = Authority::new();
    let (one, two) = (ours.sign(&["127.0.0.1"]), ours.sign(&["127.0.0.1"]));
    let from = |certificate: &str, key: &str, authority: &str| {
        Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.as_bytes()).unwrap_err()
    };
    let pem = |what, problem| TlsError::Pem { what, problem };
    assert_eq!(from("", &one.key, &ours.pem()), pem("certificates", "none is there"));
    assert_eq!(from(&one.certificate, &one.certificate, &ours.pem()), pem("key", "none is there"));
    assert_eq!(from(&one.certificate, &one.key, "nonsense"), pem("authorities", "none is there"));
    let half = &one.certificate[..one.certificate.len() / 2];
    assert_eq!(from(half, &one.key, &ours.pem()), pem("certificates", "it is not PEM, or damaged"));
    let mixed = from(&one.certificate, &two.key, &ours.pem());
    assert!(matches!(mixed, TlsError::Refused(_)), "{mixed}");
    let missing = Tls::from_pem_files("no such file", "key", "authority").unwrap_err();
    assert!(missing.to_string().starts_with("no such file cannot be read: "), "{missing}");
    let name = ours.tls().peer_name("not a name").unwrap_err();
    assert_eq!(name, TlsError::Name { name: "not a name".to_owned() });
}
