//! The right to write: permissions that begin and end, and rights that are revoked.

use std::time::Duration;

use kv_core::{Op, Post, PostId, Time, Transport, TransportError, TransportEvent, WayEnd, WriteFence};

use crate::other::whole;
use crate::pair::descriptor;
use crate::{A_KNOWS_B, B_KNOWS_A, Harness, LENS, Pair, snapshot};

/// Posts that are made at the same time.
const POSTS: u64 = 12;
/// Most posts that are under way at the same time.
const MOST: u64 = 1000;
/// How often a check is repeated that has shown nothing because the machine was too slow.
const ATTEMPTS: usize = 50;
/// How long a transport that copies with the processor may take for the slices that it has begun.
const LAST_SLICES: Duration = Duration::from_millis(100);

fn write_all<P: Transport>(pair: &mut Pair<P>, ids: std::ops::Range<u64>) {
    for id in ids {
        let descriptors = vec![descriptor((0, 0), (0, 0), LENS[0] as u64)];
        pair.a
            .transport
            .post(A_KNOWS_B, Post { id: PostId(id), op: Op::Write, descriptors, notify: None })
            .unwrap();
    }
}

/// Polls both sides until `until`, in the transports' time, and at least 20 times.
fn pass<H: Harness>(harness: &H, pair: &mut Pair<H::Transport>, until: Time) {
    let mut turns = 0;
    while turns < 20 || harness.now() < until {
        pair.turn_and_rest();
        turns += 1;
    }
}

fn holds_only(pair: &Pair<impl Transport>, byte: u8) -> bool {
    snapshot(&pair.b)[0].iter().all(|other| *other == byte)
}

pub(crate) fn a_write_waits_for_its_permission_and_moves_nothing_before<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    pair.a.memory.write(0, 0, &vec![1; LENS[0]]);
    pair.a.transport.permit(A_KNOWS_B, Time::ZERO);
    write_all(&mut pair, 0..POSTS);
    let until = harness.now() + Duration::from_millis(50);
    pass(harness, &mut pair, until);
    assert!(holds_only(&pair, 0), "bytes moved before they were allowed to");
    assert_eq!(pair.a_events, []);
    // Reads need no permission, and do not permit writes.
    if harness.reads() {
        let descriptors = vec![descriptor((1, 0), (1, 0), LENS[1] as u64)];
        let read = Post { id: PostId(POSTS), op: Op::Read, descriptors, notify: None };
        pair.a.transport.post(A_KNOWS_B, read).unwrap();
        assert_eq!(pair.await_post(PostId(POSTS)), Ok(()));
        assert_eq!(pair.a_events.len(), 1);
        assert!(holds_only(&pair, 0), "bytes moved with a read");
    }
    pair.a.transport.permit(A_KNOWS_B, harness.now() + Duration::from_secs(3600));
    for id in 0..POSTS {
        assert_eq!(pair.await_post(PostId(id)), Ok(()));
    }
    assert!(holds_only(&pair, 1));
}

pub(crate) fn no_byte_of_a_write_moves_after_its_permission_has_ended<H: Harness>(harness: &H) {
    for span in [1, 12, 20].map(Duration::from_millis) {
        assert!(
            (0..ATTEMPTS).any(|_| is_cut_off(harness, span)),
            "no permission of {span:?} has cut a write off"
        );
    }
}

/// Writes for longer than a permission lasts; true if the end of the permission kept some writes waiting.
fn is_cut_off<H: Harness>(harness: &H, span: Duration) -> bool {
    let mut pair = Pair::connected(harness, &LENS);
    pair.a.memory.write(0, 0, &vec![1; LENS[0]]);
    let until = harness.now() + span;
    pair.a.transport.permit(A_KNOWS_B, until);
    // More bytes than can be moved in that time.
    let mut posted = 0;
    while harness.now() < until {
        if posted - (pair.a_events.len() as u64) < MOST {
            write_all(&mut pair, posted..posted + POSTS);
            posted += POSTS;
        }
        pair.turn_and_rest();
    }
    await_quiet(harness, &mut pair, until);
    let ended = pair.a_events.len() as u64;
    // The other writes have only waited: a new permission lets them end.
    pair.a.transport.permit(A_KNOWS_B, Time::MAX);
    pair.until("all posts end", |pair| pair.a_events.len() as u64 == posted);
    let good = |event: &TransportEvent| matches!(event, TransportEvent::Posted { result: Ok(()), .. });
    assert!(pair.a_events.iter().all(good), "{:?}", pair.a_events);
    write_all(&mut pair, posted..posted + 1);
    assert_eq!(pair.await_post(PostId(posted)), Ok(()));
    assert!(holds_only(&pair, 1));
    ended < posted
}

/// Waits for the end of the slices that were begun before `until`, and checks that no byte moves any more.
fn await_quiet<H: Harness>(harness: &H, pair: &mut Pair<H::Transport>, until: Time) {
    let settle = match pair.b.transport.write_fence(B_KNOWS_A) {
        WriteFence::Revocable => Duration::ZERO,
        WriteFence::Within(bound) => bound,
        WriteFence::AtDeath => LAST_SLICES,
    };
    pass(harness, pair, until + settle);
    let may_be_late = pair.b.transport.write_fence(B_KNOWS_A) == WriteFence::AtDeath;
    for attempt in 0.. {
        pair.b.memory.write(0, 0, &vec![4; LENS[0]]);
        let quiet = harness.now() + Duration::from_millis(50);
        pass(harness, pair, quiet);
        if holds_only(pair, 4) {
            return;
        }
        // The thread that copies for such a transport may have been stopped in the middle of a slice.
        assert!(may_be_late && attempt < ATTEMPTS, "bytes moved after the end of the permission");
    }
}

/// Pairs of which one worker writes to the other, at moments from the beginning to the end of the writes; none if the
/// other cannot revoke the right to write.
fn amid_writes<H: Harness>(harness: &H) -> impl Iterator<Item = Pair<H::Transport>> {
    [0, 1, 2, 4].into_iter().map_while(|turns| {
        let mut pair = Pair::connected(harness, &LENS);
        if pair.b.transport.write_fence(B_KNOWS_A) != WriteFence::Revocable {
            return None;
        }
        pair.a.memory.write(0, 0, &vec![1; LENS[0]]);
        write_all(&mut pair, 0..POSTS);
        for _ in 0..turns {
            pair.turn();
        }
        Some(pair)
    })
}

pub(crate) fn after_a_right_is_revoked_no_byte_arrives<H: Harness>(harness: &H) {
    for mut pair in amid_writes(harness) {
        pair.b.transport.revoke(B_KNOWS_A);
        let revoked = TransportEvent::Revoked { peer: B_KNOWS_A };
        pair.until("a revocation", |pair| pair.b_events.contains(&revoked));
        pair.b.memory.write(0, 0, &vec![4; LENS[0]]);
        pair.until("all posts end", |pair| pair.a_events.len() as u64 == POSTS);
        for event in &pair.a_events {
            let TransportEvent::Posted { result, .. } = event else { panic!("{event:?}") };
            assert!(matches!(result, Ok(()) | Err(TransportError::Revoked)), "{result:?}");
        }
        write_all(&mut pair, 100..101);
        assert_eq!(pair.await_post(PostId(100)), Err(TransportError::Revoked));
        let until = harness.now() + Duration::from_millis(50);
        pass(harness, &mut pair, until);
        assert!(holds_only(&pair, 4), "bytes arrived after the right was revoked");
        assert_eq!(pair.b_events, [revoked]);
        if harness.reads() {
            let descriptors = vec![descriptor((0, 0), (0, 0), LENS[0] as u64)];
            let read = Post { id: PostId(101), op: Op::Read, descriptors, notify: None };
            pair.a.transport.post(A_KNOWS_B, read).unwrap();
            assert_eq!(pair.await_post(PostId(101)), Ok(()));
            assert!(snapshot(&pair.a)[0].iter().all(|byte| *byte == 4));
        }
    }
}

/// The steps in which a worker gets pages of failed sessions back from a peer of which it has lost sight, and in which
/// both meet again.
pub(crate) fn a_right_revoked_after_the_way_was_lost_is_gone_for_good_and_a_new_way_has_a_new_one<
    H: Harness,
>(
    harness: &H,
) {
    for mut pair in amid_writes(harness) {
        let mut posted = POSTS;
        if harness.cut(&mut pair) {
            let lost = TransportEvent::PeerGone { peer: B_KNOWS_A, end: WayEnd::Lost };
            pair.until("the loss of a way", |pair| pair.b_events.contains(&lost));
            assert_eq!(pair.b.transport.write_fence(B_KNOWS_A), WriteFence::Revocable, "of a lost way");
            // The peer may go on through a way of its own.
            let post = whole(POSTS, Op::Write, LENS[0]);
            posted += u64::from(pair.a.transport.post(A_KNOWS_B, post).is_ok());
        }
        pair.b.transport.revoke(B_KNOWS_A);
        let revoked = TransportEvent::Revoked { peer: B_KNOWS_A };
        pair.until("a revocation", |pair| pair.b_events.contains(&revoked));
        pair.b.memory.write(0, 0, &vec![4; LENS[0]]);
        let until = harness.now() + Duration::from_millis(50);
        pass(harness, &mut pair, until);
        assert!(holds_only(&pair, 4), "bytes arrived after the right was revoked");
        // The peer is told that its way is of no use any more.
        pair.b.transport.disconnect(B_KNOWS_A);
        let is_end =
            |event: &TransportEvent| matches!(event, TransportEvent::PeerGone { peer: A_KNOWS_B, .. });
        pair.until("the end of the peer's way", |pair| pair.a_events.iter().any(is_end));
        let is_post = |event: &&TransportEvent| matches!(event, TransportEvent::Posted { .. });
        pair.until("all posts end", |pair| pair.a_events.iter().filter(is_post).count() as u64 == posted);
        for event in pair.a_events.iter().filter(is_post) {
            let TransportEvent::Posted { result, .. } = event else { panic!("{event:?}") };
            let may_be = matches!(result, Ok(()) | Err(TransportError::Revoked | TransportError::PeerGone));
            assert!(may_be, "{result:?}");
        }
        let mut pair = pair.introduce();
        assert!(holds_only(&pair, 4), "bytes of the former way arrived over the new one");
        write_all(&mut pair, 1000..1001);
        assert_eq!(pair.await_post(PostId(1000)), Ok(()));
        assert!(holds_only(&pair, 1));
    }
}
