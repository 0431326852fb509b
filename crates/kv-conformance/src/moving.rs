//! Checks of bytes: the described bytes arrive, and no others move.

use std::collections::BTreeMap;

use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportError};

use crate::pair::descriptor;
use crate::{A_KNOWS_B, Harness, LENS, Pair, Random, snapshot};

/// Descriptors whose targets do not overlap: the order of copies within a post is not promised.
fn random_descs(random: &mut Random, lens: &[usize], op: Op) -> Vec<Descriptor> {
    let count = 1 + random.below(60);
    let mut taken: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    let mut descriptors = Vec::new();
    while descriptors.len() < count {
        let (target, source) = (random.below(lens.len()), random.below(lens.len()));
        let longest = lens[target].min(lens[source]);
        let most = if random.below(4) == 0 { 100_000 } else { 3000 };
        let len = 1 + random.below(longest.min(most));
        let target_at = random.below(lens[target] - len + 1);
        let source_at = random.below(lens[source] - len + 1);
        let ranges = taken.entry(target).or_default();
        if ranges.iter().any(|(at, size)| target_at < at + size && *at < target_at + len) {
            if random.below(20) == 0 && !descriptors.is_empty() {
                break;
            }
            continue;
        }
        ranges.push((target_at, len));
        let (source, target) = ((source as u32, source_at as u64), (target as u32, target_at as u64));
        descriptors.push(match op {
            Op::Write => descriptor(source, target, len as u64),
            Op::Read => descriptor(target, source, len as u64),
        });
    }
    descriptors
}

/// Changes copies of both memories as a post of the first worker must change the memories.
fn apply(op: Op, descriptors: &[Descriptor], ours: &mut [Vec<u8>], theirs: &mut [Vec<u8>]) {
    for descriptor in descriptors {
        let here = descriptor.local_offset as usize..(descriptor.local_offset + descriptor.len) as usize;
        let there = descriptor.remote_offset as usize..(descriptor.remote_offset + descriptor.len) as usize;
        let (local, remote) = (descriptor.local_region as usize, descriptor.remote_region as usize);
        match op {
            Op::Write => theirs[remote][there].copy_from_slice(&ours[local][here]),
            Op::Read => ours[local][here].copy_from_slice(&theirs[remote][there]),
        }
    }
}

pub(crate) fn posts_move_exactly_the_described_bytes<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    let mut random = Random::new("posts_move_exactly_the_described_bytes");
    pair.scramble(&mut random);
    for round in 0..30 {
        let op = if harness.reads() && random.below(2) == 0 { Op::Read } else { Op::Write };
        let descriptors = random_descs(&mut random, &pair.a.lens, op);
        let (mut ours, mut theirs) = (snapshot(&pair.a), snapshot(&pair.b));
        apply(op, &descriptors, &mut ours, &mut theirs);
        let id = PostId(round);
        pair.a
            .transport
            .post(A_KNOWS_B, Post { id, op, descriptors: descriptors.clone(), notify: None })
            .unwrap();
        assert_eq!(pair.await_post(id), Ok(()));
        assert!(snapshot(&pair.a) == ours, "round {round}: {op:?} {descriptors:?}: the poster's memory");
        assert!(snapshot(&pair.b) == theirs, "round {round}: {op:?} {descriptors:?}: the peer's memory");
    }
}

pub(crate) fn descriptors_out_of_bounds_are_refused_and_touch_nothing<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    let mut random = Random::new("descriptors_out_of_bounds_are_refused_and_touch_nothing");
    pair.scramble(&mut random);
    let before = (snapshot(&pair.a), snapshot(&pair.b));
    let good = descriptor((0, 0), (0, 0), 4096);
    let end = LENS[1] as u64;
    let bad = [
        ("remote", descriptor((0, 0), (1, end), 1)),
        ("remote", descriptor((0, 0), (1, end - 4095), 4096)),
        ("remote", descriptor((0, 0), (1, u64::MAX), 2)),
        ("remote", descriptor((0, 0), (1, u64::MAX - 4095), 4096)),
        ("remote", descriptor((0, 0), (3, 0), 1)),
        ("remote", descriptor((0, 0), (u32::MAX, 0), 1)),
        ("local", descriptor((1, end), (0, 0), 1)),
        ("local", descriptor((1, end - 1), (0, 0), 2)),
        ("local", descriptor((1, u64::MAX), (0, 0), 2)),
        ("local", descriptor((3, 0), (0, 0), 1)),
        ("local", descriptor((0, 0), (0, 0), u64::MAX)),
    ];
    for (number, (wanted_side, bad)) in bad.into_iter().enumerate() {
        for op in [Op::Write, Op::Read] {
            let descriptors = vec![good, good, bad, good];
            let post = Post { id: PostId(number as u64), op, descriptors, notify: None };
            match pair.a.transport.post(A_KNOWS_B, post) {
                Err(TransportError::OutOfBounds { descriptor: 2, side, .. }) => {
                    assert_eq!(side, wanted_side, "{bad:?}")
                }
                other => panic!("{op:?} {bad:?}: {other:?}"),
            }
        }
    }
    for descriptors in [vec![], vec![good, descriptor((0, 0), (0, 0), 0)]] {
        let post = Post { id: PostId(99), op: Op::Write, descriptors, notify: None };
        assert!(matches!(pair.a.transport.post(A_KNOWS_B, post), Err(TransportError::Size { .. })));
    }
    for _ in 0..200 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!((snapshot(&pair.a), snapshot(&pair.b)) == before, "a refused post has touched memory");
}

/// Posts of one and of [very many](Harness::most_descriptors) descriptors, at random places: a transport that splits
/// a post must report its end only once, when all bytes have moved.
pub(crate) fn one_and_very_many_descriptors_move_their_bytes<H: Harness>(harness: &H) {
    let (item, most) = (8, harness.most_descriptors());
    let len = item * most;
    let mut pair = Pair::connected(harness, &[len]);
    let mut random = Random::new("one_and_very_many_descriptors_move_their_bytes");
    let ops = if harness.reads() { vec![Op::Write, Op::Read] } else { vec![Op::Write] };
    for (round, op) in ops.into_iter().enumerate() {
        for count in [1, most] {
            pair.scramble(&mut random);
            let order = random.order(most);
            let (mut ours, mut theirs) = (snapshot(&pair.a), snapshot(&pair.b));
            let pairs = order.iter().enumerate().take(count);
            let descriptors: Vec<Descriptor> = pairs
                .map(|(at, other)| {
                    descriptor((0, (at * item) as u64), (0, (other * item) as u64), item as u64)
                })
                .collect();
            apply(op, &descriptors, &mut ours, &mut theirs);
            let id = PostId((2 * round + usize::from(count > 1)) as u64);
            pair.a.transport.post(A_KNOWS_B, Post { id, op, descriptors, notify: None }).unwrap();
            assert_eq!(pair.await_post(id), Ok(()));
            let (here, there) = (snapshot(&pair.a), snapshot(&pair.b));
            let wrong = |left: &[u8], right: &[u8]| left.iter().zip(right).filter(|(l, r)| l != r).count();
            let wrong = (wrong(&here[0], &ours[0]), wrong(&there[0], &theirs[0]));
            assert_eq!(wrong, (0, 0), "{op:?} of {count}: wrong bytes here and there");
        }
    }
}
