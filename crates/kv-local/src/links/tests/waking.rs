//! A short write that is all there is to do wakes its peer before the first byte is copied, and the peer stays awake for the
//! frame that follows.

use kv_core::TransportWait;

use super::*;
use crate::metadata::{Metadata, Place};

const PEER: PeerId = PeerId(3);
/// Bytes of the memory of the hand-made peer.
const THEIRS: u64 = 4 << 20;

/// A transport that knows a hand-made peer and has written nothing yet, and the peer's end of the connection.
fn pair() -> (LocalTransport, Arena, UnixStream) {
    let (mut transport, arena) = transport_with(LocalConfig::default(), random_socket_name().unwrap());
    let (metadata, _) = forged(&transport, vec![THEIRS]);
    let mut metadata = Metadata::decode(&metadata).unwrap();
    metadata.regions = vec![Place { arena: Some(0), start: 0, len: THEIRS }];
    let metadata = metadata.encode().unwrap();
    let stream = dial_raw(&transport);
    greet(&stream, &hello_for(&transport, &metadata), &[&memory_file(THEIRS, SealFlags::SHRINK)]);
    poll_at(&mut transport, Duration::ZERO);
    befriend(&mut transport, PEER, &metadata).unwrap();
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(kinds(&stream), [1, 4], "the greeting");
    (transport, arena, stream)
}

/// The kinds of the messages that have come.
fn kinds(mut stream: &UnixStream) -> Vec<u8> {
    stream.set_nonblocking(true).unwrap();
    let (mut bytes, mut kinds) = (Vec::new(), Vec::new());
    let _ = stream.read_to_end(&mut bytes);
    let mut rest = &bytes[..];
    while let Some((&[a, b, c, d, kind], body)) = rest.split_first_chunk() {
        kinds.push(kind);
        rest = &body[u32::from_le_bytes([a, b, c, d]) as usize..];
    }
    kinds
}

fn noted(id: u64, len: usize) -> Post {
    Post { notify: Some(Bytes::from_static(b"there")), ..write_post(id, len) }
}

#[test]
fn a_short_write_alone_wakes_its_peer_before_its_frame() {
    let (mut transport, _arena, stream) = pair();
    let mut wrote = |posts: &[Post]| {
        for post in posts {
            transport.post(PEER, post.clone()).unwrap();
        }
        let ended = |events: &[TransportEvent]| events.len() == posts.len();
        let mut events = Vec::new();
        while !ended(&events) {
            transport.poll(Time::ZERO, &mut events);
        }
        poll_at(&mut transport, Duration::ZERO);
        kinds(&stream)
    };
    assert_eq!(wrote(&[noted(1, 256 << 10)]), [5, 2]);
    assert_eq!(wrote(&[noted(2, 64 << 10)]), [5, 2]);
    assert_eq!(wrote(&[noted(3, (64 << 10) - 1)]), [2], "copied sooner than a message is written");
    assert_eq!(wrote(&[noted(4, 128 << 10), noted(5, 128 << 10)]), [2, 2], "there is more to do");
}

#[test]
fn a_write_wakes_nobody_while_it_may_not_begin() {
    let (mut transport, _arena, stream) = pair();
    transport.permit(PEER, Time::ZERO);
    transport.post(PEER, noted(1, 256 << 10)).unwrap();
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(kinds(&stream), []);
}

#[test]
fn messages_that_wait_go_before_the_bytes_and_wake_the_peer_themselves() {
    let (mut transport, _arena, stream) = pair();
    transport.post(PEER, noted(1, 256 << 10)).unwrap();
    transport.send(PEER, Bytes::from_static(b"before")).unwrap();
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(kinds(&stream), [2, 2]);
}

#[test]
fn a_woken_worker_stays_awake_for_a_moment_or_until_its_frame() {
    let (mut transport, _arena, mut stream) = pair();
    while transport.wait() == TransportWait::Now {
        poll_at(&mut transport, Duration::from_secs(1));
    }
    let second = Duration::from_secs(2);
    stream.set_nonblocking(false).unwrap();
    stream.write_all(&message(5, b"")).unwrap();
    assert_eq!(poll_at(&mut transport, second), []);
    assert_eq!(transport.wait(), TransportWait::Now);
    assert_eq!(poll_at(&mut transport, second + Duration::from_millis(1)), []);
    assert_ne!(transport.wait(), TransportWait::Now, "nothing came");
    stream.write_all(&[message(5, b""), message(2, b"there")].concat()).unwrap();
    assert_eq!(poll_at(&mut transport, 2 * second).len(), 1);
    assert_ne!(transport.wait(), TransportWait::Now, "the frame has come");
    stream.write_all(&message(5, b"more")).unwrap();
    poll_at(&mut transport, 2 * second);
    assert_eq!(transport.stats().broken, 1, "a wake has no body");
}
