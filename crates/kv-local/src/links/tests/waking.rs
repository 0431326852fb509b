//! A short write that is all there is to do wakes its peer before the first byte is copied, and the peer stays awake for the
//! frame that follows.

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
        let kinds = kinds(&stream);
        // The peer is woken again once it has said something.
        (&stream).write_all(&message(2, b"received")).unwrap();
        poll_at(&mut transport, Duration::ZERO);
        kinds
    };
    assert_eq!(wrote(&[noted(1, 256 << 10)]), [5, 2]);
    assert_eq!(wrote(&[noted(2, 64 << 10)]), [5, 2]);
    assert_eq!(wrote(&[noted(3, (64 << 10) - 1)]), [2], "copied sooner than a message is written");
    assert_eq!(wrote(&[noted(4, 128 << 10), noted(5, 128 << 10)]), [2, 2], "there is more to do");
    assert_eq!(wrote(&[noted(6, LEN)]), [5, 2]);
    assert_eq!(wrote(&[write_post(7, 256 << 10)]), [], "no frame follows");
}

#[test]
fn a_write_wakes_nobody_while_it_may_not_begin() {
    let (mut transport, _arena, stream) = pair();
    // No slice begins in the last 10 ms of a permission.
    for (id, until) in [(1, Time::ZERO), (2, kv_host::clock::now() + Duration::from_millis(9))] {
        transport.permit(PEER, until);
        transport.post(PEER, noted(id, 256 << 10)).unwrap();
        poll_at(&mut transport, Duration::ZERO);
        assert_eq!(kinds(&stream), [], "post {id}");
        transport.cancel(PostId(id));
    }
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
fn a_peer_is_roused_once_before_a_short_write_alone_or_a_message() {
    let (mut transport, _arena, mut stream) = pair();
    let mut roused = |bytes, post: Option<Post>| {
        if let Some(post) = post {
            transport.post(PEER, post).unwrap();
        }
        transport.rouse(PEER, bytes);
        let at_once = kinds(&stream);
        poll_at(&mut transport, Duration::ZERO);
        let later = kinds(&stream);
        stream.write_all(&message(2, b"received")).unwrap();
        poll_at(&mut transport, Duration::ZERO);
        (at_once, later)
    };
    assert_eq!(roused(0, None), (vec![5], vec![]));
    assert_eq!(roused(1 << 20, None), (vec![5], vec![]));
    assert_eq!(
        roused((1 << 20) + 1, None),
        (vec![], vec![]),
        "the copy takes longer than the peer stays awake"
    );
    assert_eq!(roused(0, Some(noted(1, 4096))), (vec![], vec![2]), "the peer is written to already");
    transport.rouse(PEER, 0);
    transport.post(PEER, noted(2, 256 << 10)).unwrap();
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(kinds(&stream), [5, 2], "woken once");
    transport.rouse(PeerId(77), 0);
}

#[test]
fn a_peer_that_says_nothing_is_woken_once() {
    let (mut transport, _arena, stream) = pair();
    for (id, wanted) in [(1, vec![5, 2]), (2, vec![2])] {
        transport.post(PEER, noted(id, 256 << 10)).unwrap();
        poll_at(&mut transport, Duration::ZERO);
        assert_eq!(kinds(&stream), wanted, "post {id}");
    }
}

#[test]
fn a_worker_is_woken_once_until_a_frame_comes() {
    let (mut transport, _arena, mut stream) = pair();
    let mut hears = |messages: &[u8]| {
        stream.write_all(messages).unwrap();
        let mut events = Vec::new();
        transport.poll(Time::ZERO, &mut events);
        // A busy host may take the processor away for the moment in which the frame is awaited.
        let is_awaited = transport.announced.is_awaited();
        let link = transport.links.iter().next().unwrap().1;
        (events.len(), is_awaited, link.may_be_woken)
    };
    let (wake, frame) = (message(5, b""), message(2, b"there"));
    let awake = (0..10_000).any(|_| {
        let (_, awake, again) = hears(&wake);
        assert!(!again, "a wake without a frame is the last one");
        hears(&frame);
        awake
    });
    assert!(awake);
    assert_eq!(hears(&[&wake[..], &frame].concat()), (1, false, true), "the frame has come with it");
    hears(&wake);
    std::thread::sleep(Duration::from_millis(1));
    let wakes: Vec<u8> = wake.repeat(1000);
    assert_eq!(hears(&wakes), (0, false, false), "it was woken, and nothing came");
}

#[test]
fn a_wake_with_a_body_breaks_the_connection() {
    let (mut transport, _arena, mut stream) = pair();
    stream.write_all(&message(5, b"more")).unwrap();
    poll_at(&mut transport, Duration::ZERO);
    assert_eq!(transport.stats().broken, 1);
}
