//! Checks of how posts end: each exactly once, and no byte of its memory moves afterwards.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use kv_core::{
    Descriptor, Op, PeerId, Post, PostId, Transport, TransportError, TransportEvent, TransportWait,
};

use crate::pair::descriptor;
use crate::{A_KNOWS_B, Harness, LENS, Pair, Random, boottime, connect, snapshot};

pub(crate) fn every_post_ends_exactly_once_also_when_cancelled<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    let mut random = Random::new("every_post_ends_exactly_once_also_when_cancelled");
    let mut ends: BTreeMap<PostId, u32> = BTreeMap::new();
    let mut accepted = 0;
    for number in 0..300 {
        let op = if harness.reads() && random.below(2) == 0 { Op::Read } else { Op::Write };
        let post = Post {
            id: PostId(number),
            op,
            descriptors: vec![descriptor((0, 0), (0, 0), 1 + random.below(LENS[0]) as u64)],
            notify: (random.below(2) == 0).then(|| Bytes::from_static(b"notify")),
        };
        match pair.a.transport.post(A_KNOWS_B, post) {
            Ok(()) => accepted += 1,
            Err(error) => assert_eq!(error, TransportError::WouldBlock),
        }
        if random.below(3) == 0 {
            pair.a.transport.cancel(PostId(random.below(number as usize + 1) as u64));
        }
        if random.below(3) == 0 {
            pair.turn();
        }
    }
    pair.until("all posts end", |pair| {
        for event in pair.a_events.drain(..) {
            match event {
                TransportEvent::Posted { post, result: Ok(()) | Err(TransportError::Cancelled) } => {
                    *ends.entry(post).or_default() += 1;
                }
                event => panic!("{event:?}"),
            }
        }
        ends.len() == accepted
    });
    pair.a.transport.cancel(PostId(0));
    for _ in 0..500 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!(ends.values().all(|count| *count == 1), "{ends:?}");
}

/// Posts many writes to a peer that permits none, one byte each, and cancels each at once. Such posts have ended, so that
/// no limit of posts bounds what a transport keeps of them: how much that is, the tests of each transport see.
pub fn cancel_many<T: Transport>(transport: &mut T, peer: PeerId) {
    let byte = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 1 };
    let mut events = Vec::new();
    for id in (0..10_000).map(PostId) {
        let post = Post { id, op: Op::Write, descriptors: vec![byte], notify: None };
        transport.post(peer, post).unwrap();
        transport.cancel(id);
        transport.poll(boottime(), &mut events);
        let ended = TransportEvent::Posted { post: id, result: Err(TransportError::Cancelled) };
        assert_eq!(std::mem::take(&mut events), [ended]);
    }
}

/// Posts that `give_up` ends early: after their events, neither side's memory changes any more.
fn quiet_after_the_events<H: Harness>(harness: &H, op: Op, give_up: impl Fn(&mut H::Transport, PostId)) {
    let posts = 12;
    let len = LENS[0] as u64;
    for turns in [0, 1, 2, 4] {
        let mut pair = Pair::connected(harness, &LENS);
        pair.a.memory.write(0, 0, &vec![1; LENS[0]]);
        pair.b.memory.write(0, 0, &vec![2; LENS[0]]);
        for id in 0..posts {
            let descriptors = vec![descriptor((0, 0), (0, 0), len)];
            pair.a.transport.post(A_KNOWS_B, Post { id: PostId(id), op, descriptors, notify: None }).unwrap();
        }
        for _ in 0..turns {
            pair.turn();
        }
        for id in 0..posts {
            give_up(&mut pair.a.transport, PostId(id));
        }
        pair.until("posts end", |pair| pair.a_events.len() as u64 >= posts);
        // The memory is used for other data now.
        pair.a.memory.write(0, 0, &vec![3; LENS[0]]);
        pair.b.memory.write(0, 0, &vec![4; LENS[0]]);
        for _ in 0..500 {
            pair.turn();
        }
        let (ours, theirs) = (snapshot(&pair.a), snapshot(&pair.b));
        assert!(ours[0].iter().all(|byte| *byte == 3), "{op:?}: the poster's memory, after the events");
        assert!(theirs[0].iter().all(|byte| *byte == 4), "{op:?}: the peer's memory, after the events");
        assert_eq!(pair.a_events.len() as u64, posts);
    }
}

pub(crate) fn a_cancelled_post_is_quiet_once_it_has_ended<H: Harness>(harness: &H) {
    quiet_after_the_events(harness, Op::Write, |transport, post| transport.cancel(post));
    if harness.reads() {
        quiet_after_the_events(harness, Op::Read, |transport, post| transport.cancel(post));
    }
}

pub(crate) fn disconnected_posts_are_quiet_once_they_have_ended<H: Harness>(harness: &H) {
    quiet_after_the_events(harness, Op::Write, |transport, _| transport.disconnect(A_KNOWS_B));
    if harness.reads() {
        quiet_after_the_events(harness, Op::Read, |transport, _| transport.disconnect(A_KNOWS_B));
    }
}

pub(crate) fn disconnect_ends_the_posts<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    for id in 0..50 {
        let descriptors = vec![descriptor((0, 0), (0, 0), LENS[0] as u64)];
        pair.a
            .transport
            .post(A_KNOWS_B, Post { id: PostId(id), op: Op::Write, descriptors, notify: None })
            .unwrap();
    }
    pair.turn();
    pair.a.transport.disconnect(A_KNOWS_B);
    let descriptors = vec![descriptor((0, 0), (0, 0), 1)];
    let late = Post { id: PostId(50), op: Op::Write, descriptors, notify: None };
    assert_eq!(pair.a.transport.post(A_KNOWS_B, late), Err(TransportError::PeerGone));
    assert_eq!(pair.a.transport.send(A_KNOWS_B, Bytes::new()), Err(TransportError::PeerGone));
    pair.until("posts end", |pair| pair.a_events.len() >= 50);
    let posts: BTreeSet<_> = pair
        .a_events
        .iter()
        .map(|event| match event {
            TransportEvent::Posted { post, .. } => *post,
            event => panic!("{event:?}"),
        })
        .collect();
    assert_eq!(posts.len(), 50);
    // The peer can be connected again, under another id.
    let metadata = pair.b.transport.metadata().unwrap();
    connect(&mut pair.a.transport, PeerId(12), &metadata).unwrap();
    let post = Post {
        id: PostId(60),
        op: Op::Write,
        descriptors: vec![descriptor((0, 0), (0, 0), 1)],
        notify: None,
    };
    pair.a.transport.post(PeerId(12), post).unwrap();
    assert_eq!(pair.await_post(PostId(60)), Ok(()));
}

pub(crate) fn strangers_are_refused<H: Harness>(harness: &H) {
    let mut pair = Pair::strangers(harness, &LENS);
    let nobody = PeerId(77);
    let post =
        Post { id: PostId(1), op: Op::Read, descriptors: vec![descriptor((0, 0), (0, 0), 1)], notify: None };
    assert_eq!(pair.a.transport.post(nobody, post), Err(TransportError::PeerGone));
    assert_eq!(pair.a.transport.send(nobody, Bytes::new()), Err(TransportError::PeerGone));
    pair.a.transport.disconnect(nobody);
    pair.a.transport.cancel(PostId(1));
    for metadata in [&b""[..], b"nonsense", &[0xff; 100], &vec![0; 1 << 20]] {
        let refused = pair.a.transport.connect(nobody, metadata);
        assert!(matches!(refused, Err(TransportError::Metadata(_))), "{} bytes: {refused:?}", metadata.len());
    }
    for _ in 0..10 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!(!matches!(pair.a.transport.wait(), TransportWait::Now));
}
