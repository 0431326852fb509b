//! Networks that cut connections, and that lead elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::time::{Duration, Instant};

use kv_conformance::{Side, boottime, connect, pattern};
use kv_core::{Op, PeerId, Transport, TransportError, TransportEvent, WayEnd};
use kv_tcp::{TcpConfig, TcpTransport};
use workers::wire::Wire;
use workers::{ended, loopback, post, until, worker};

const PEER: PeerId = PeerId(1);
const LEN: usize = 16 << 20;

#[test]
fn every_connection_of_a_way_is_asked_which_life_of_the_peer_it_leads_to() {
    let wire = Wire::new();
    let mut to = worker(wire.config(), &[LEN]);
    let mut other = worker(TcpConfig::new(loopback()), &[LEN]);
    other.transport.metadata().unwrap();
    let mut from = worker(TcpConfig::new(loopback()), &[LEN]);
    from.memory.write(0, 0, &pattern(LEN));
    // The connection for frames leads to the peer, the one for pages to another transport; later ones to the
    // peer, as after an address has moved.
    let addr = to.transport.local_addr();
    wire.lead(&[addr, other.transport.local_addr(), addr]);
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    let mut events = Vec::new();
    let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
    until("the end of the way", &mut [&mut from, &mut to, &mut other], &mut events, |events| {
        events[0].contains(&lost)
    });
    assert_eq!(ended(&events[0], 1), Some(Err(TransportError::PeerGone)));
    assert_eq!((other.transport.stats().refused, &events[2][..]), (1, &[][..]));
    for side in [&other, &to] {
        let mut bytes = vec![1; LEN];
        side.memory.read(0, 0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "a page has come by the wrong connection");
    }
    exchange_again(&mut from, &mut to);
}

/// Connects the first worker to the second once more, and shows that bytes go both ways.
fn exchange_again(from: &mut Side<TcpTransport>, to: &mut Side<TcpTransport>) {
    from.memory.write(0, 0, &vec![7; LEN]);
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    let mut bytes = vec![0; LEN];
    for (id, op) in [(90, Op::Write), (91, Op::Read)] {
        from.transport.post(PEER, post(id, op, LEN)).unwrap();
        let mut events = Vec::new();
        until("a post", &mut [&mut *from, &mut *to], &mut events, |events| ended(&events[0], id).is_some());
        assert_eq!(ended(&events[0], id), Some(Ok(())));
        let side = if op == Op::Write { &mut *to } else { &mut *from };
        side.memory.read(0, 0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == if op == Op::Write { 7 } else { 9 }));
        to.memory.write(0, 0, &vec![9; LEN]);
    }
}

#[test]
fn a_connection_that_is_cut_in_either_direction_ends_the_way_and_all_posts_but_not_the_peer() {
    cut_in_every_way(|config| config);
}

/// Without a last word: a stream that was cut by somebody else on the way looks like that.
#[cfg(feature = "tls")]
#[test]
fn an_encrypted_connection_that_is_cut_ends_the_way_and_all_posts_but_not_the_peer() {
    let tls = workers::authority::Authority::new().tls();
    cut_in_every_way(|config| config.with(|config| config.tls = Some(tls.clone())));
}

fn cut_in_every_way(change: impl Fn(TcpConfig) -> TcpConfig) {
    for (connection, to_dialer, to_other) in
        [(0, true, false), (0, false, true), (1, true, false), (1, false, true), (1, true, true)]
    {
        let wire = Wire::new();
        let config = change(TcpConfig::new(loopback()));
        let (mut from, mut to) = (worker(config, &[LEN]), worker(change(wire.config()), &[LEN]));
        connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
        // Slow enough that the posts are under way for long.
        wire.slow(1 << 20);
        for id in 0..4 {
            from.transport.post(PEER, post(id, if id % 2 == 0 { Op::Write } else { Op::Read }, LEN)).unwrap();
        }
        let mut events = Vec::new();
        let begun = Instant::now();
        until("both connections", &mut [&mut from, &mut to], &mut events, |_| {
            wire.connections() == 2 && begun.elapsed() > Duration::from_millis(300)
        });
        wire.cut(connection, to_dialer, to_other);
        // A wire that is cut to one side only is known to both sides once the bytes before have come.
        wire.slow(0);
        let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
        until("the end of the way", &mut [&mut from, &mut to], &mut events, |events| {
            events[0].contains(&lost)
        });
        let what = format!("connection {connection}, {to_dialer}, {to_other}");
        for id in 0..4 {
            let end = ended(&events[0], id);
            assert!(matches!(end, Some(Ok(()) | Err(TransportError::PeerGone))), "{what}: {end:?}");
        }
        assert_eq!(events[0].last(), Some(&lost), "{what}");
        assert_eq!(events[0].len(), 5, "{what}");
        exchange_again(&mut from, &mut to);
    }
}

#[test]
fn a_write_whose_way_was_cut_changes_no_byte_at_the_peer_once_it_has_ended() {
    let wire = Wire::new();
    let (mut from, mut to) = (worker(TcpConfig::new(loopback()), &[LEN]), worker(wire.config(), &[LEN]));
    from.memory.write(0, 0, &pattern(LEN));
    connect(&mut from.transport, PEER, &to.transport.metadata().unwrap()).unwrap();
    wire.slow(4 << 20);
    from.transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    let bytes = |to: &Side<TcpTransport>| {
        let mut bytes = vec![0; LEN];
        to.memory.read(0, 0, &mut bytes);
        bytes
    };
    let mut events = Vec::new();
    until("both connections", &mut [&mut from, &mut to], &mut events, |_| wire.connections() == 2);
    let begun = Instant::now();
    while bytes(&to).iter().all(|byte| *byte == 0) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{events:?}");
        for side in [&mut from, &mut to] {
            side.transport.poll(boottime(), &mut events[0]);
        }
    }
    // From now on the peer takes nothing, and its kernel keeps what comes. Then the dialer sees the end.
    let begun = Instant::now();
    until("bytes in the kernel", &mut [&mut from], &mut events, |_| {
        begun.elapsed() > Duration::from_millis(300)
    });
    wire.cut(1, true, false);
    until("the end of the write", &mut [&mut from], &mut events, |events| ended(&events[0], 1).is_some());
    assert_eq!(ended(&events[0], 1), Some(Err(TransportError::PeerGone)));
    let before = bytes(&to);
    let ended_at = Instant::now();
    until("what may still come", &mut [&mut from, &mut to], &mut events, |_| {
        ended_at.elapsed() > Duration::from_millis(500)
    });
    assert!(bytes(&to) == before, "bytes have come after the write had ended");
    assert!(before != pattern(LEN) && before.iter().any(|byte| *byte != 0), "nothing was under way");
}

#[test]
fn nothing_that_a_dead_peer_has_left_in_the_kernel_is_put_in_place_after_its_death_was_told() {
    const BACK: PeerId = PeerId(2);
    let mut here = worker(TcpConfig::new(loopback()), &[LEN]);
    let mut peer = worker(TcpConfig::new(loopback()), &[LEN]);
    peer.memory.write(0, 0, &pattern(LEN));
    connect(&mut peer.transport, BACK, &here.transport.metadata().unwrap()).unwrap();
    connect(&mut here.transport, PEER, &peer.transport.metadata().unwrap()).unwrap();
    peer.transport.post(BACK, post(1, Op::Write, LEN)).unwrap();
    let bytes = |here: &Side<TcpTransport>| {
        let mut bytes = vec![0; LEN];
        here.memory.read(0, 0, &mut bytes);
        bytes
    };
    let (mut events, begun) = (Vec::new(), Instant::now());
    while bytes(&here).iter().all(|byte| *byte == 0) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{events:?}");
        for side in [&mut here, &mut peer] {
            side.transport.poll(boottime(), &mut events);
        }
    }
    // The peer goes on for a moment, into the kernel's buffers, and ends.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(200) {
        peer.transport.poll(boottime(), &mut events);
    }
    drop(peer);
    let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
    let mut events = Vec::new();
    until("the death", &mut [&mut here], &mut events, |events| events[0].contains(&dead));
    let before = bytes(&here);
    let told_at = Instant::now();
    until("what may still come", &mut [&mut here], &mut events, |_| {
        told_at.elapsed() > Duration::from_millis(300)
    });
    assert!(bytes(&here) == before, "bytes of a dead peer have come");
    assert!(before != pattern(LEN), "nothing was left");
}
