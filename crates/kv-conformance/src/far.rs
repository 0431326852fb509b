//! Checks with workers elsewhere: pages move to and from them, and their frames have distinct origins.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{Descriptor, Op, Origin, PeerId, Post, PostId, Transport, TransportEvent};

use crate::here::Here;
use crate::other::whole;
use crate::pair::{descriptor, ended};
use crate::{Harness, Job, Other, Random, connect, heard, pattern, snapshot};

const PEER: PeerId = PeerId(1);
const PAGE: usize = 64 << 10;

/// Pages are written to random places of a worker elsewhere, and read back.
pub(crate) fn pages_move_to_and_from_a_worker_elsewhere<H: Harness>(harness: &H) {
    if !harness.reads() {
        return;
    }
    let mut random = Random::new("pages_move_to_and_from_a_worker_elsewhere");
    let mut here = Here::new(harness);
    let mut other = here.other(Job::Serve);
    connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
    here.run(&mut [&mut other], PEER, 1, Op::Read);
    let pattern = pattern(H::FAR_LEN);
    assert!(snapshot(&here.side)[0] == pattern, "READ");

    let order = random.order(H::FAR_LEN / PAGE);
    let pairs = order.iter().enumerate();
    let descriptors: Vec<Descriptor> = pairs
        .map(|(at, target)| descriptor((0, (at * PAGE) as u64), (0, (target * PAGE) as u64), PAGE as u64))
        .collect();
    let id = PostId(2);
    here.side.transport.post(PEER, Post { id, op: Op::Write, descriptors, notify: None }).unwrap();
    here.until(&mut [&mut other], "a post", |events, _| ended(events, id).is_some());
    assert_eq!(ended(&here.events, id), Some(Ok(())));
    here.side.memory.write(0, 0, &vec![0; H::FAR_LEN]);
    let back = whole(3, Op::Read, H::FAR_LEN);
    here.side.transport.post(PEER, back).unwrap();
    here.until(&mut [&mut other], "a post", |events, _| ended(events, PostId(3)).is_some());
    let mut wanted = vec![0; H::FAR_LEN];
    for (at, target) in order.iter().enumerate() {
        wanted[target * PAGE..][..PAGE].copy_from_slice(&pattern[at * PAGE..][..PAGE]);
    }
    assert!(snapshot(&here.side)[0] == wanted, "WRITE");

    here.side.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
    here.until(&mut [&mut other], "an echo", |events, _| heard(events, b"echo"));
}

/// Two workers elsewhere send frames back: the frames of each have an origin of their own.
pub(crate) fn frames_of_a_peer_have_its_origin_and_no_others<H: Harness>(harness: &H) {
    let words: [&[u8]; 2] = [b"the one", b"the other"];
    let mut here = Here::new(harness);
    let mut others = [here.other(Job::Serve), here.other(Job::Serve)];
    for (id, other) in others.iter().enumerate() {
        connect(&mut here.side.transport, PeerId(id as u64), other.metadata()).unwrap();
    }
    let [one, another] = &mut others;
    let origins = |events: &[TransportEvent], word: &[u8]| -> Vec<Origin> {
        let origin = |event: &TransportEvent| match event {
            TransportEvent::Frame { from, frame } if frame[..] == *word => Some(*from),
            _ => None,
        };
        events.iter().filter_map(origin).collect()
    };
    for round in 1..=3 {
        // Frames may be lost: what was not sent back is sent again.
        let mut heard = false;
        for _ in 0..100 {
            for (id, word) in words.iter().enumerate() {
                let _ = here.side.transport.send(PeerId(id as u64), Bytes::copy_from_slice(word));
            }
            here.pass(&mut [&mut *one, &mut *another], Duration::from_millis(100));
            heard = words.iter().all(|word| origins(&here.events, word).len() >= round);
            if heard {
                break;
            }
        }
        assert!(heard, "round {round}: {:?}", here.events);
    }
    let [mut first, mut second] = words.map(|word| origins(&here.events, word));
    first.dedup();
    second.dedup();
    assert!(first.len() == 1 && second.len() == 1, "{first:?} {second:?}");
    assert_ne!(first, second);
}
