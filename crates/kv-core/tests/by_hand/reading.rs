//! The reading half of pull: leases, proofs, heartbeats, releases, frame by frame.

use std::time::Duration;

use kv_core::proto::Input;
use kv_core::wire::{
    Abort, AbortAck, Body, Delivery, Failed, Granted, Heartbeat, HeartbeatAck, Registered, Release, Released,
};
use kv_core::{
    Attempt, AuxIndex, Cause, Incarnation, KvPoll, LeaseRef, PageList, PeerCause, PeerId, Post, Room,
    SessionId, SessionOptions, TransferMode, TransportError, WayEnd,
};

use crate::solo::{Solo, list, record};

const ROOM: Room = Room::Number(7);
const NONCE: SessionId = SessionId(55);
const NS: Duration = Duration::from_nanos(1);
/// A lease of six seconds, less the margin for clocks.
const PROVEN: Duration = Duration::from_micros(5_812_500);

fn pull() -> SessionOptions {
    let lease_id = LeaseRef::new(Incarnation::from_random(1), NONCE);
    let deadline = Some(Duration::from_secs(1000));
    SessionOptions::default().with(|options| {
        options.mode = Some(TransferMode::Pull);
        options.lease_refs = vec![lease_id];
        options.deadline = deadline;
    })
}

/// A registration that asks for a lease.
struct Acquire {
    attempt: Attempt,
    room: Room,
    lease_id: Option<SessionId>,
    number: u64,
}

/// A receiver that has met peer 1, and its acquire message.
fn acquiring(options: SessionOptions) -> (Solo, SessionId, Acquire) {
    let mut solo = Solo::new(|config| config.timing.peer_timeout = Duration::from_secs(3600));
    let session = solo.open_receiver_with(ROOM, options);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    let acquire = acquires(&solo).remove(0);
    (solo, session, acquire)
}

fn acquires(solo: &Solo) -> Vec<Acquire> {
    solo.frames().iter().filter_map(acquire).collect()
}

fn acquire(body: &Body) -> Option<Acquire> {
    let Body::Register(register) = body else { return None };
    let Delivery::Read(acquire) = &register.delivery else { return None };
    let room = register.room.clone();
    Some(Acquire { attempt: register.attempt, room, lease_id: acquire.lease_id, number: acquire.number })
}

fn heartbeats(said: impl IntoIterator<Item = Body>) -> Vec<Heartbeat> {
    let heartbeat = |body| match body {
        Body::Heartbeat(heartbeat) => Some(heartbeat).filter(|asks| !asks.leases.is_empty()),
        _ => None,
    };
    said.into_iter().filter_map(heartbeat).collect()
}

fn granting(number: u64) -> Granted {
    Granted {
        attempt: Attempt(1),
        number,
        lease_id: NONCE,
        pages: list(&[4, 5]),
        aux: None,
        lease_ms: 6000,
        interval_ms: 60_000,
        groups: Default::default(),
    }
}

fn ack(number: u64, lease_ms: u64) -> HeartbeatAck {
    HeartbeatAck { number, lease_ms, leases: vec![(1, 1)], ..crate::solo::ack() }
}

/// A receiver whose one read is in flight, granted in answer to its acquire message.
fn reading() -> (Solo, SessionId, kv_core::PostId) {
    let (mut solo, session, acquire) = acquiring(pull());
    solo.says(1, Body::Granted(granting(acquire.number)));
    solo.init_receiver(session, &[7, 8], None);
    let post = solo.take_posts().remove(0).id;
    (solo, session, post)
}

#[test]
fn an_acquire_names_its_lease_and_is_repeated_until_acknowledged() {
    let (mut solo, _, first) = acquiring(pull());
    assert_eq!((first.attempt, first.lease_id, &first.room), (Attempt(1), Some(NONCE), &ROOM));
    let again = solo.run_for(Duration::from_secs(1));
    let again: Vec<u64> = again.iter().filter_map(|(_, body)| Some(acquire(body)?.number)).collect();
    assert!(again.len() >= 2 && again[0] > first.number && again[1] > again[0], "{again:?}");
    solo.says(1, Body::Registered(Registered { attempt: Attempt(1) }));
    let more = solo.run_for(Duration::from_secs(10));
    assert!(more.iter().all(|(_, body)| acquire(body).is_none()), "{more:?}");
}

#[test]
fn a_peer_that_vanished_without_acknowledging_a_release_costs_nothing_for_ever() {
    for is_lost in [true, false] {
        let mut solo = Solo::new(|config| config.timing.session_deadline = Duration::from_secs(60));
        let session = solo.open_receiver_with(ROOM, pull());
        solo.found(solo.lookups()[0].0, vec![record(1)]);
        solo.welcome(1, 1);
        let acquire = acquires(&solo).remove(0);
        solo.says(1, Body::Granted(granting(acquire.number)));
        solo.init_receiver(session, &[7, 8], None);
        let post = solo.take_posts().remove(0).id;
        solo.posted(post, Ok(()));
        assert_eq!((solo.poll(session), solo.released(session).len()), (KvPoll::Success, 1));
        if is_lost {
            solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Lost });
        }
        solo.run_for(Duration::from_secs(50));
        assert_eq!(solo.node().gauges().timers, 1, "it may come back, and hear of the release");
        solo.run_for(Duration::from_secs(20));
        let gauges = solo.node().gauges();
        assert_eq!((gauges.peers, gauges.timers), (usize::from(!is_lost), 0), "lost: {is_lost}");
    }
}

#[test]
fn a_granted_message_acknowledges_the_acquire_it_answers() {
    let (mut solo, _, first) = acquiring(pull());
    solo.says(1, Body::Granted(granting(first.number)));
    let more = solo.run_for(Duration::from_secs(10));
    assert!(more.iter().all(|(_, body)| acquire(body).is_none()), "{more:?}");
}

#[test]
fn a_lease_counts_from_the_acquire_and_a_timely_read_needs_no_check() {
    for (late, proven) in [(Duration::ZERO, false), (NS, true)] {
        let (mut solo, session, acquire) = acquiring(pull());
        let acquired_at = solo.now;
        solo.now = acquired_at + Duration::from_secs(3);
        solo.says(1, Body::Granted(granting(acquire.number)));
        assert_eq!(heartbeats(solo.frames()), [], "the acquire is proof enough");
        solo.init_receiver(session, &[7, 8], None);
        let post = solo.take_posts().remove(0).id;
        solo.now = acquired_at + (PROVEN - late);
        solo.posted(post, Ok(()));
        let expected = if proven { KvPoll::Success } else { KvPoll::Transferring };
        assert_eq!(solo.poll(session), expected, "{late:?} before the end");
        assert_eq!(heartbeats(solo.frames()).len(), usize::from(!proven), "otherwise it asks");
        assert_eq!(solo.released(session).len(), usize::from(proven));
    }
}

#[test]
fn a_late_read_is_proven_only_by_a_heartbeat_sent_after_its_end() {
    let (mut solo, session, post) = reading();
    solo.now = solo.now + Duration::from_secs(10);
    solo.posted(post, Ok(()));
    let asked = heartbeats(solo.frames()).remove(0);
    assert_eq!(asked.leases, [(1, 1)]);
    for wrong in [
        ack(asked.number + 1, 6000),
        // The acquire message: its six seconds are over.
        ack(1, 6000),
        HeartbeatAck { leases: vec![(2, 5)], ..ack(asked.number, 6000) },
        HeartbeatAck { leases: vec![(1, 1), (1, 1)], ..ack(asked.number, 6000) },
    ] {
        solo.says(1, Body::HeartbeatAck(wrong.clone()));
        assert_eq!(solo.poll(session), KvPoll::Transferring, "{wrong:?}");
    }
    // No time was left: it says nothing about the moment at which it was sent, when the read ended.
    solo.says(1, Body::HeartbeatAck(ack(asked.number, 0)));
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    let again = solo.run_for(Duration::from_millis(500));
    let again = heartbeats(again.into_iter().map(|(_, body)| body)).remove(0);
    solo.says(1, Body::HeartbeatAck(ack(again.number, 0)));
    assert_eq!(solo.poll(session), KvPoll::Success, "the pages were held after its end");
    let release = Body::Release(Release { low_watermark: Attempt(1), attempts: vec![(1, 1)], answer: true });
    assert_eq!(solo.answer(), release);
}

#[test]
fn an_earlier_heartbeat_proves_its_time_and_a_shorter_answer_revokes_nothing() {
    let (mut solo, session, post) = reading();
    let start = solo.now;
    solo.says(1, Body::HeartbeatAck(ack(1, 12_000)));
    solo.says(1, Body::HeartbeatAck(ack(1, 1000)));
    solo.says(1, Body::Granted(Granted { lease_ms: 500, ..granting(1) }));
    solo.now = start + (PROVEN * 2 - NS);
    solo.posted(post, Ok(()));
    assert_eq!(solo.poll(session), KvPoll::Success);
}

#[test]
fn a_repeated_lease_is_a_proof_too() {
    let (mut solo, session, post) = reading();
    solo.now = solo.now + Duration::from_secs(10);
    solo.posted(post, Ok(()));
    let number = heartbeats(solo.frames())[0].number;
    solo.says(1, Body::Granted(granting(number)));
    assert_eq!(solo.poll(session), KvPoll::Success);
}

#[test]
fn questions_for_a_proof_are_repeated_with_growing_pauses() {
    let (mut solo, _, post) = reading();
    solo.now = solo.now + Duration::from_secs(10);
    solo.posted(post, Ok(()));
    assert_eq!(heartbeats(solo.frames()).len(), 1);
    // An answer that proves nothing does not make it ask at once.
    solo.says(1, Body::HeartbeatAck(ack(1, 1)));
    assert_eq!(solo.frames(), []);
    let said = solo.run_for(Duration::from_secs(10));
    let asked = heartbeats(said.into_iter().map(|(_, body)| body)).len();
    assert!((4..=12).contains(&asked), "{asked} in ten seconds");
}

#[test]
fn a_lease_granted_without_an_acquire_is_checked_at_once() {
    let (mut solo, session, _) = acquiring(pull());
    solo.says(1, Body::Granted(granting(0)));
    let asked = heartbeats(solo.frames()).remove(0);
    assert_eq!(asked.leases, [(1, 1)]);
    solo.init_receiver(session, &[7, 8], None);
    let post = solo.take_posts().remove(0).id;
    solo.posted(post, Ok(()));
    assert_eq!(solo.poll(session), KvPoll::Transferring);
}

#[test]
fn leases_of_nonexistent_pages_and_second_leases_fail_the_session() {
    let none = "a lease of pages that do not exist";
    let cases = [
        (Granted { pages: list(&[15, 16]), ..granting(1) }, none),
        (Granted { pages: list(&[3, 4, 3]), ..granting(1) }, none),
        (Granted { aux: Some(AuxIndex(4)), ..granting(1) }, none),
        (Granted { lease_id: SessionId(56), ..granting(1) }, "a lease with another id"),
    ];
    for (granted, what) in cases {
        let (mut solo, session, _) = acquiring(pull());
        solo.says(1, Body::Granted(granted));
        assert_eq!(solo.cause(session), Cause::Protocol(what));
    }
    let (mut solo, session, _) = acquiring(pull().with(|options| options.lease_refs = Vec::new()));
    solo.says(1, Body::Granted(granting(1)));
    solo.says(1, Body::Granted(Granted { lease_id: SessionId(56), ..granting(1) }));
    assert_eq!(solo.cause(session), Cause::Protocol("two leases for one acquire message"));
}

#[test]
fn a_lease_means_nothing_to_a_session_that_is_written_to_or_that_has_failed() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[7, 8], None);
    solo.says(1, Body::Granted(granting(0)));
    assert_eq!((solo.frames(), solo.take_posts().len()), (vec![], 0));

    let (mut solo, session, acquire) = acquiring(pull());
    solo.abort(session);
    solo.says(1, Body::Granted(granting(acquire.number)));
    assert_eq!((solo.frames(), solo.node().gauges().receivers), (vec![], 0));
}

/// What a receiver has already it may leave to be counted: by every source alike.
#[test]
fn sources_that_lease_other_numbers_of_pages_fail_the_session_with_both() {
    let rank = |rank: u32| {
        let mut record = record(u64::from(rank) + 1);
        (record.parallel.pcp_size, record.parallel.pcp_rank) = (2, rank);
        record
    };
    for (first, pages) in [([1, 2], &[4, 5][..]), ([2, 1], &[4, 5]), ([1, 2], &[4, 5, 6, 9])] {
        let mut solo = Solo::new(|_| {});
        let session = solo.open_receiver_with(ROOM, pull().with(|options| options.lease_refs = Vec::new()));
        let lookup = solo.lookups()[0].0;
        solo.found(lookup, vec![rank(0), rank(1)]);
        let mut numbers = Vec::new();
        for peer in [1, 2] {
            solo.welcome(peer, peer as u32);
            numbers.extend(acquires(&solo).into_iter().map(|acquire| acquire.number));
        }
        solo.init_receiver(session, &[7, 8], None);
        let lease_refs = [list(&[3, 4, 5]), list(pages)];
        for (peer, pages) in first.into_iter().zip(lease_refs) {
            solo.says(peer, Body::Granted(Granted { pages, ..granting(numbers[peer as usize - 1]) }));
        }
        let cause = Cause::PageCount { sent: pages.len(), registered: 3 };
        assert_eq!(solo.cause(session), cause, "{pages:?}");
    }
}

#[test]
fn an_aux_row_of_the_receiver_alone_fails_the_session() {
    let (mut solo, session, acquire) = acquiring(pull());
    solo.says(1, Body::Granted(granting(acquire.number)));
    solo.init_receiver(session, &[7, 8], Some(0));
    assert_eq!(solo.cause(session), Cause::AuxOneSided { sender: false, receiver: true });
    let (mut solo, session, acquire) = acquiring(pull());
    solo.says(1, Body::Granted(Granted { aux: Some(AuxIndex(1)), ..granting(acquire.number) }));
    solo.init_receiver(session, &[7, 8], None);
    assert_eq!(solo.take_posts().len(), 1, "a row that nobody wants is left alone");
}

/// Two receivers with leases, and how often they ask for heartbeats.
fn two(intervals: [u64; 2]) -> (Solo, [SessionId; 2]) {
    let (mut solo, first, acquire) = acquiring(pull());
    let second = solo.open_receiver_with(ROOM, pull());
    let number = acquires(&solo)[0].number;
    assert_eq!(number, acquire.number, "what is sent at one moment shares a number");
    for (attempt, interval_ms) in (1..).zip(intervals) {
        solo.says(1, Body::Granted(Granted { attempt: Attempt(attempt), interval_ms, ..granting(number) }));
    }
    (solo, [first, second])
}

#[test]
fn one_heartbeat_serves_all_leases_at_the_shortest_interval_while_sessions_last() {
    for intervals in [[1000, 2000], [2000, 1000]] {
        let (mut solo, sessions) = two(intervals);
        let mut attempts = vec![(1, 2)];
        for (session, next) in [(sessions[0], vec![(2, 1)]), (sessions[1], vec![])] {
            let start = solo.now;
            let said = heartbeats(solo.run_for(Duration::from_secs(6)).into_iter().map(|(_, body)| body));
            assert!((3..=6).contains(&said.len()), "{said:?} from {start:?}");
            assert!(said.iter().all(|heartbeat| heartbeat.leases == attempts), "{said:?}");
            solo.abort(session);
            attempts = next;
        }
        let said = solo.run_for(Duration::from_secs(6));
        assert_eq!(heartbeats(said.into_iter().map(|(_, body)| body)), []);
    }
}

#[test]
fn the_number_of_an_acquire_survives_a_burst_of_other_acquires() {
    let (mut solo, _, acquire) = acquiring(pull());
    for _ in 0..200 {
        solo.open_receiver_with(ROOM, pull());
    }
    solo.says(1, Body::Granted(granting(acquire.number)));
    assert_eq!(heartbeats(solo.frames()), [], "the acquire is proof enough");
}

#[test]
fn numbers_are_remembered_for_a_minute_however_many_follow() {
    for (passed, forgotten) in [(Duration::from_secs(50), 0), (Duration::from_secs(61), 1)] {
        let (mut solo, _, acquire) =
            acquiring(pull().with(|options| options.deadline = Some(Duration::from_secs(1000))));
        for _ in 0..1000 {
            solo.now = solo.now + passed / 1000;
            solo.open_receiver_with(ROOM, pull());
        }
        let lease_ms = 100_000;
        solo.says(1, Body::Granted(Granted { lease_ms, ..granting(acquire.number) }));
        assert_eq!(heartbeats(solo.frames()).len(), forgotten, "a forgotten number proves nothing");
    }
}

#[test]
fn a_release_is_repeated_until_acknowledged_and_holds_the_low_watermark() {
    let (mut solo, session, post) = reading();
    solo.posted(post, Ok(()));
    assert_eq!(solo.poll(session), KvPoll::Success);
    let release = Body::Release(Release { low_watermark: Attempt(1), attempts: vec![(1, 1)], answer: true });
    assert_eq!(solo.answer(), release);
    solo.says(1, Body::Released(Released { attempts: vec![(1, 0)] }));
    let said = solo.run_for(Duration::from_secs(5));
    assert!(said.iter().filter(|(_, body)| *body == release).count() >= 3, "{said:?}");
    assert_eq!(solo.node().gauges().draining, 1);
    solo.says(1, Body::Released(Released { attempts: vec![(0, 9)] }));
    assert_eq!(solo.node().gauges().draining, 0);
    let said = solo.run_for(Duration::from_secs(60));
    assert!(said.iter().all(|(_, body)| !matches!(body, Body::Release(_))), "{said:?}");
}

#[test]
fn an_abort_names_its_lease_cancels_reads_and_is_repeated_until_acknowledged() {
    let (mut solo, session, post) = reading();
    solo.abort(session);
    assert_eq!((solo.cancelled(), solo.released(session)), (vec![post], vec![]));
    let (attempt, cause) = (Attempt(1), PeerCause::Aborted);
    let abort = Body::Abort(Abort {
        failed_ms_ago: None,
        low_watermark: attempt,
        attempt,
        room: ROOM,
        lease_id: Some(NONCE),
        cause,
    });
    assert_eq!(solo.answer(), abort);
    let said = solo.run_for(Duration::from_secs(5));
    assert!(said.iter().filter(|(_, body)| *body == abort).count() >= 3, "{said:?}");
    solo.says(1, Body::AbortAck(AbortAck { attempt }));
    assert_eq!((solo.node().gauges().draining, solo.released(session)), (0, vec![]));
    solo.posted(post, Err(TransportError::Cancelled));
    assert_eq!(solo.released(session), [list(&[7, 8])]);
    assert_eq!(solo.node().gauges().receivers, 0);
}

#[test]
fn an_expired_lease_is_named_as_such() {
    let (mut solo, session, post) = reading();
    let cause = PeerCause::LeaseExpired;
    solo.says(1, Body::Failed(Failed { attempt: Attempt(1), cause, quiet: true }));
    assert_eq!(solo.cause(session), Cause::LeaseExpired);
    solo.posted(post, Ok(()));
    assert_eq!((solo.poll(session), solo.released(session)), (KvPoll::Failed, vec![list(&[7, 8])]));
}

#[test]
fn an_impossible_lease_id_is_refused_before_any_frame_is_sent() {
    let reference = |incarnation: u64, pages: Option<PageList>| {
        let lease_ref = LeaseRef::new(Incarnation::from_random(incarnation), NONCE);
        let lease_ref = pages.map_or(lease_ref.clone(), |pages| lease_ref.of_pages(pages));
        pull().with(|options| options.lease_refs = vec![lease_ref])
    };
    for options in [reference(2, None), reference(1, Some(list(&[16])))] {
        let mut solo = Solo::new(|_| {});
        let session = solo.open_receiver_with(ROOM, options);
        let lookup = solo.lookups()[0].0;
        solo.found(lookup, vec![record(1)]);
        solo.welcome(1, 1);
        assert!(matches!(solo.cause(session), Cause::StaleLease { .. } | Cause::LeaseOutOfRange(_)));
        assert_eq!((solo.frames(), solo.node().gauges().receivers), (vec![], 0));
    }
}

#[test]
fn numbers_without_sense_are_survived() {
    let (mut solo, session, acquire) = acquiring(pull());
    let most = Granted { lease_ms: u64::MAX, interval_ms: u64::MAX, ..granting(acquire.number) };
    solo.says(1, Body::Granted(most));
    for attempts in [vec![(u64::MAX, u32::MAX)], vec![(0, u32::MAX), (1 << 40, u32::MAX)]] {
        solo.says(
            1,
            Body::HeartbeatAck(HeartbeatAck { leases: attempts.clone(), ..ack(acquire.number, u64::MAX) }),
        );
        solo.says(1, Body::Released(Released { attempts }));
    }
    solo.init_receiver(session, &[7, 8], None);
    let post = solo.take_posts().remove(0).id;
    solo.now = solo.now + Duration::from_secs(900);
    solo.posted(post, Ok(()));
    assert_eq!(solo.poll(session), KvPoll::Success, "that long is what the peer said");
}

#[test]
fn a_read_has_not_ended_while_some_of_its_posts_wait() {
    let mut solo = Solo::new(|config| config.limits.max_post_bytes = 64);
    let mut sessions = Vec::new();
    // One page a post: the first request fills the window of four.
    for (number, count) in [(0, 4_u32), (1, 2), (2, 2)] {
        let session = solo.open_receiver_with(Room::Number(number), pull());
        if number == 0 {
            let lookup = solo.lookups()[0].0;
            solo.found(lookup, vec![record(1)]);
            solo.welcome(1, 1);
        }
        let acquire = acquires(&solo).remove(0);
        let pages = |step| PageList::from_pages((0..count).map(|page| page * step)).unwrap();
        solo.says(
            1,
            Body::Granted(Granted { attempt: acquire.attempt, pages: pages(3), ..granting(acquire.number) }),
        );
        let first = 10 * number as u32;
        let own: Vec<u32> = pages(2).iter().map(|page| first + page).collect();
        solo.init_receiver(session, &own, None);
        sessions.push(session);
    }
    let page = |post: &Post| post.descriptors[0].local_offset / 64;
    let mut posts: std::collections::VecDeque<Post> = solo.take_posts().into();
    assert_eq!(posts.iter().map(page).collect::<Vec<_>>(), [0, 2, 4, 6]);
    let first = posts.pop_front().unwrap();
    solo.posted(first.id, Ok(()));
    let of_second = solo.take_posts().remove(0);
    assert_eq!(page(&of_second), 10);
    // None of its reads is in flight now, and its other page waits behind the third request.
    solo.posted(of_second.id, Ok(()));
    assert_eq!(solo.poll(sessions[1]), KvPoll::Transferring, "page 12 has not come");
    assert!(!solo.frames().iter().any(|body| matches!(body, Body::Release(_))), "{:?}", solo.said);
    posts.extend(solo.take_posts());
    let mut read = vec![0, 10];
    while let Some(post) = posts.pop_front() {
        read.push(page(&post));
        solo.posted(post.id, Ok(()));
        posts.extend(solo.take_posts());
    }
    read.sort_unstable();
    assert_eq!(read, [0, 2, 4, 6, 10, 12, 20, 22]);
    assert!(sessions.iter().all(|&session| solo.poll(session) == KvPoll::Success));
}
