//! Pages that move to and from a worker elsewhere.

use bytes::Bytes;
use kv_core::{Desc, Op, PeerId, Plane, Post, PostId};

use crate::here::Here;
use crate::other::whole;
use crate::pair::{desc, ended};
use crate::{Harness, Job, Other, Random, connect, heard, pattern, snapshot};

const PEER: PeerId = PeerId(1);
const PAGE: usize = 64 << 10;

/// Written there at random places, and read back from there.
pub(crate) fn pages_move_to_and_from_a_worker_elsewhere<H: Harness>(harness: &H) {
    if !harness.reads() {
        return;
    }
    let mut random = Random::new("pages_move_to_and_from_a_worker_elsewhere");
    let mut here = Here::new(harness);
    let mut other = here.other(Job::Serve);
    connect(&mut here.side.plane, PEER, other.metadata()).unwrap();
    here.run(&mut [&mut other], PEER, 1, Op::Read);
    let pattern = pattern(H::FAR_LEN);
    assert!(snapshot(&here.side)[0] == pattern, "READ");

    let order = random.order(H::FAR_LEN / PAGE);
    let pairs = order.iter().enumerate();
    let descs: Vec<Desc> = pairs
        .map(|(at, target)| desc((0, (at * PAGE) as u64), (0, (target * PAGE) as u64), PAGE as u64))
        .collect();
    let id = PostId(2);
    here.side.plane.post(PEER, Post { id, op: Op::Write, descs, notify: None }).unwrap();
    here.until(&mut [&mut other], "a post", |events, _| ended(events, id).is_some());
    assert_eq!(ended(&here.events, id), Some(Ok(())));
    here.side.memory.write(0, 0, &vec![0; H::FAR_LEN]);
    let back = whole(3, Op::Read, H::FAR_LEN);
    here.side.plane.post(PEER, back).unwrap();
    here.until(&mut [&mut other], "a post", |events, _| ended(events, PostId(3)).is_some());
    let mut wanted = vec![0; H::FAR_LEN];
    for (at, target) in order.iter().enumerate() {
        wanted[target * PAGE..][..PAGE].copy_from_slice(&pattern[at * PAGE..][..PAGE]);
    }
    assert!(snapshot(&here.side)[0] == wanted, "WRITE");

    here.side.plane.send(PEER, Bytes::from_static(b"echo")).unwrap();
    here.until(&mut [&mut other], "an echo", |events, _| heard(events, b"echo"));
}
