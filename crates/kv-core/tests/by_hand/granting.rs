//! The granting half of pull: acquire messages, leases, heartbeats, releases, frame by frame.

use std::time::Duration;

use kv_core::proto::{Command, Input};
use kv_core::wire::{
    AbortAck, Body, Failed, Granted, Heartbeat, HeartbeatAck, Register, Registered, Release, Released,
};
use kv_core::{
    Attempt, Cause, KvPoll, Lease, PageList, PeerCause, Room, SessionId, SessionOptions, TransferMode,
    TransportError, WayEnd,
};

use crate::solo::{Solo, abort, ack, list, record, register};

const ROOM: Room = Room::Number(7);
const LEASE: Duration = Duration::from_secs(6);
const MS: Duration = Duration::from_millis(1);

fn acquire(attempt: u64, lease_id: Option<SessionId>, number: u64) -> Register {
    crate::solo::acquire(attempt, ROOM, lease_id, number)
}

fn heartbeat(number: u64, attempts: &[(u64, u32)]) -> Body {
    Body::Heartbeat(Heartbeat { number, leases: attempts.to_vec(), ..crate::solo::heartbeat() })
}

fn renewed(number: u64, lease_ms: u64, attempts: &[(u64, u32)]) -> Body {
    Body::HeartbeatAck(HeartbeatAck {
        number,
        low_watermark: Attempt(1),
        lease_ms,
        leases: attempts.to_vec(),
        ..ack()
    })
}

fn release(attempts: &[(u64, u32)]) -> Body {
    Body::Release(Release { low_watermark: Attempt(0), attempts: attempts.to_vec(), answer: true })
}

fn failed(attempt: u64, cause: PeerCause, quiet: bool) -> Body {
    Body::Failed(Failed { attempt: Attempt(attempt), cause, quiet })
}

/// A node that keepalives do not disturb.
fn quiet_node() -> Solo {
    Solo::serving(|config| config.timing.peer_timeout = Duration::from_secs(3600))
}

fn sender(solo: &mut Solo, receivers: u32, lease: Lease) -> SessionId {
    let options = SessionOptions::default().with(|options| {
        options.mode = Some(TransferMode::Pull);
        options.lease = Some(lease);
        options.deadline = Some(Duration::from_secs(1000));
    });
    solo.open_sender_with(ROOM, receivers, options)
}

/// A sender whose pages are complete.
fn granting(solo: &mut Solo, pages: &[u32]) -> SessionId {
    let session = sender(solo, 1, Lease::Renewable(LEASE));
    solo.send(session, pages.len(), &[pages]);
    session
}

fn granted(solo: &Solo) -> Granted {
    match solo.answer() {
        Body::Granted(granted) => granted,
        other => panic!("{other:?} is no lease"),
    }
}

#[test]
fn a_granted_message_has_the_remaining_lease_and_the_latest_acquire_number() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4, 5]);
    for (number, left) in [(3, 6000), (4, 5000), (9, 4000)] {
        solo.says(1, Body::Register(acquire(1, Some(session), number)));
        let expected = Granted {
            attempt: Attempt(1),
            number,
            lease_id: session,
            pages: list(&[4, 5]),
            aux: None,
            lease_ms: left,
            interval_ms: 1000,
            groups: Default::default(),
        };
        assert_eq!(granted(&solo), expected);
        solo.now = solo.now + Duration::from_secs(1);
    }
}

#[test]
fn a_lease_is_rounded_down_to_whole_milliseconds() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.now = solo.now + Duration::from_nanos(1);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    assert_eq!(granted(&solo).lease_ms, 5999);
    let short = sender(&mut solo, 1, Lease::Renewable(Duration::from_micros(10)));
    solo.send(short, 1, &[&[5]]);
    solo.says(1, Body::Register(acquire(2, Some(short), 1)));
    assert_eq!(granted(&solo).interval_ms, 1, "0 would mean that no heartbeats are wanted");
}

#[test]
fn a_waiting_acquire_is_acknowledged_each_time_and_granted_with_its_latest_number() {
    let mut solo = quiet_node();
    for number in [1, 2] {
        solo.says(1, Body::Register(acquire(1, None, number)));
        assert_eq!(solo.answer(), Body::Registered(Registered { attempt: Attempt(1) }));
    }
    let session = sender(&mut solo, 1, Lease::Renewable(LEASE));
    solo.says(1, Body::Register(acquire(1, None, 3)));
    assert_eq!(solo.answer(), Body::Registered(Registered { attempt: Attempt(1) }), "no pages yet");
    solo.send(session, 1, &[&[4]]);
    assert_eq!(granted(&solo).number, 3);

    let mut solo = quiet_node();
    solo.says(1, Body::Register(acquire(1, None, 1)));
    solo.says(1, Body::Register(acquire(1, None, 2)));
    granting(&mut solo, &[4]);
    assert_eq!(granted(&solo).number, 2, "the acquire that was repeated while it waited");
}

#[test]
fn a_acquire_raises_the_low_watermark_and_a_closed_or_far_attempt_is_dropped() {
    let mut solo = Solo::serving(|config| config.limits.max_attempts = 4);
    solo.says(1, Body::Register(register(1, Room::Number(8), &[77])));
    assert_eq!(solo.node().gauges().incoming, 1);
    solo.says(1, Body::Register(Register { low_watermark: Attempt(2), ..acquire(2, None, 1) }));
    assert_eq!(solo.node().gauges().incoming, 1, "the first is forgotten, the acquire waits");
    solo.says(1, Body::Register(Register { low_watermark: Attempt(2), ..acquire(5, None, 1) }));
    assert_eq!(solo.node().gauges().incoming, 2);
    for attempt in [1, 6] {
        let dropped = solo.node().gauges().dropped.total();
        solo.says(1, Body::Register(acquire(attempt, None, 1)));
        assert_eq!((solo.frames(), solo.node().gauges().dropped.total()), (vec![], dropped + 1));
    }
}

#[test]
fn a_repeated_acquire_of_a_failed_attempt_gets_the_reason_again() {
    let mut solo = quiet_node();
    let unknown = failed(1, PeerCause::UnknownLease { lease_id: 99 }, true);
    for _ in 0..3 {
        solo.says(1, Body::Register(acquire(1, Some(SessionId(99)), 1)));
        assert_eq!(solo.answer(), unknown);
    }
}

#[test]
fn a_lease_id_of_another_request_or_a_stopping_worker_is_refused() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(Register { room: Room::Number(8), ..acquire(1, Some(session), 1) }));
    assert_eq!(solo.answer(), failed(1, PeerCause::UnknownLease { lease_id: session.0 }, true));
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    solo.input(Input::Command(Command::Shutdown));
    solo.says(1, Body::Register(acquire(2, Some(session), 1)));
    assert_eq!(solo.answer(), failed(2, PeerCause::WorkerStopped, true));
}

#[test]
fn a_late_acquire_learns_how_its_lease_ended_while_that_is_remembered() {
    let mut solo = Solo::serving(|config| {
        config.timing.peer_timeout = Duration::from_secs(3600);
        config.limits.max_ended_leases = 2;
    });
    let ended: Vec<SessionId> = (0..3).map(|_| granting(&mut solo, &[4])).collect();
    for &session in &ended {
        solo.abort(session);
    }
    for (attempt, &session) in ended.iter().enumerate() {
        let attempt = attempt as u64 + 1;
        solo.says(1, Body::Register(acquire(attempt, Some(session), 1)));
        let unknown = PeerCause::UnknownLease { lease_id: session.0 };
        let cause = if attempt == 1 { unknown } else { PeerCause::Aborted };
        assert_eq!(solo.answer(), failed(attempt, cause, true));
    }
    assert_eq!(solo.node().gauges().ended_leases, 2);
}

#[test]
fn an_acquire_at_a_failed_sender_with_pages_gets_the_reason() {
    let mut solo = quiet_node();
    let session = sender(&mut solo, 2, Lease::Renewable(LEASE));
    solo.send(session, 1, &[&[4]]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.abort(session);
    assert_eq!((solo.answer(), solo.released(session)), (failed(1, PeerCause::Aborted, false), vec![]));
    solo.says(1, Body::Register(acquire(2, Some(session), 1)));
    assert_eq!(solo.answer(), failed(2, PeerCause::Aborted, true));
    // Nor is the first one's lease told again, or extended.
    solo.says(1, Body::Register(acquire(1, Some(session), 2)));
    assert_eq!(solo.frames(), vec![]);
    for _ in 0..2 {
        solo.says(1, heartbeat(1, &[(1, 1)]));
        assert_eq!(solo.frames(), [renewed(1, 0, &[]), failed(1, PeerCause::Aborted, false)]);
    }
    solo.run_for(LEASE - MS);
    assert_eq!(solo.released(session), vec![]);
    solo.run_for(MS);
    assert_eq!(solo.released(session), vec![list(&[4])]);
    solo.says(1, heartbeat(1, &[(1, 1)]));
    assert_eq!(solo.frames(), [renewed(1, 0, &[]), failed(1, PeerCause::Aborted, true)]);
}

#[test]
fn a_heartbeat_extends_to_two_thirds_and_never_shortens() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.says(1, heartbeat(2, &[(1, 1)]));
    assert_eq!(solo.answer(), renewed(2, 6000, &[(1, 1)]), "six seconds are left");
    solo.now = solo.now + Duration::from_secs(5);
    solo.says(1, heartbeat(3, &[(1, 1)]));
    assert_eq!(solo.answer(), renewed(3, 4000, &[(1, 1)]));
    solo.run_for(Duration::from_secs(4) - MS);
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    solo.run_for(MS);
    assert_eq!((solo.cause(session), solo.released(session)), (Cause::LeaseExpired, vec![list(&[4])]));
}

#[test]
fn a_lease_lasts_to_the_moment_and_not_longer() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    let said = solo.run_for(LEASE);
    assert_eq!(solo.cause(session), Cause::LeaseExpired);
    assert!(said.contains(&(LEASE, failed(1, PeerCause::LeaseExpired, true))), "{said:?}");
}

#[test]
fn a_heartbeat_answer_has_the_shortest_lease_and_other_attempts_get_their_own() {
    let mut solo = quiet_node();
    // 1 and 2: granted, 1 fixed with less time left. 3: waits for pages. 4: failed. 5: never heard of.
    let fixed = sender(&mut solo, 1, Lease::Fixed(Duration::from_secs(2)));
    solo.send(fixed, 1, &[&[4]]);
    let renewable = granting(&mut solo, &[5]);
    let empty = sender(&mut solo, 1, Lease::Renewable(LEASE));
    for (attempt, session) in [(1, fixed), (2, renewable), (3, empty), (4, SessionId(99))] {
        solo.says(1, Body::Register(acquire(attempt, Some(session), 1)));
    }
    solo.now = solo.now + Duration::from_secs(1);
    solo.says(1, heartbeat(2, &[(1, 2), (3, 3)]));
    let expected = [
        renewed(2, 1000, &[(1, 2)]),
        Body::Registered(Registered { attempt: Attempt(3) }),
        failed(4, PeerCause::UnknownLease { lease_id: 99 }, true),
        failed(5, PeerCause::Unknown, true),
    ];
    assert_eq!(solo.frames(), expected);
    solo.run_for(Duration::from_secs(1));
    assert_eq!(solo.cause(fixed), Cause::LeaseExpired, "no heartbeat extends a fixed lease");
}

#[test]
fn the_gaps_of_a_heartbeat_are_answered_for_and_their_number_is_bounded() {
    let mut solo = quiet_node();
    let sessions: Vec<SessionId> = (0..2).map(|_| granting(&mut solo, &[4])).collect();
    for (attempt, &session) in [2, 4].iter().zip(&sessions) {
        solo.says(1, Body::Register(acquire(*attempt, Some(session), 1)));
    }
    solo.says(1, heartbeat(2, &[(1, 5)]));
    let unknown = |attempt| failed(attempt, PeerCause::Unknown, true);
    assert_eq!(solo.frames(), [renewed(2, 6000, &[(2, 1), (4, 1)]), unknown(1), unknown(3), unknown(5)]);
    solo.says(1, heartbeat(2, &[(1, u32::MAX), (u64::MAX - 1, u32::MAX)]));
    assert_eq!(solo.frames().len(), 1 + 256);
}

#[test]
fn frames_with_overlapping_or_empty_runs_are_malformed() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    for runs in [&[(1, 2), (2, 1)][..], &[(3, 1), (1, 1)], &[(1, 0)], &[(1, 1), (1, 1)]] {
        for body in [heartbeat(2, runs), release(runs)] {
            let dropped = solo.node().gauges().dropped.total();
            solo.says(1, body.clone());
            assert_eq!(
                (solo.frames(), solo.node().gauges().dropped.total()),
                (vec![], dropped + 1),
                "{body:?}"
            );
        }
    }
    assert_eq!(solo.poll(session), KvPoll::Transferring);
}

#[test]
fn a_heartbeat_or_release_raises_the_low_watermark() {
    for raises in [
        Body::Heartbeat(Heartbeat { low_watermark: Attempt(2), ..crate::solo::heartbeat() }),
        Body::Release(Release { low_watermark: Attempt(2), attempts: vec![], answer: true }),
    ] {
        let mut solo = quiet_node();
        let session = granting(&mut solo, &[4]);
        solo.says(1, Body::Register(acquire(1, Some(session), 1)));
        solo.says(1, raises);
        // A reader that has the pages says so by the number of its attempt, until it is heard.
        assert_eq!((solo.cause(session), solo.released(session)), (Cause::WayLost, vec![list(&[4])]));
        assert_eq!(solo.node().gauges().incoming, 0);
    }
}

#[test]
fn every_release_is_acknowledged_and_the_last_frees_the_pages() {
    let mut solo = quiet_node();
    let session = sender(&mut solo, 2, Lease::Renewable(LEASE));
    solo.send(session, 1, &[&[4]]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.says(1, Body::Register(acquire(2, Some(session), 1)));
    let released = |attempts: &[(u64, u32)]| Body::Released(Released { attempts: attempts.to_vec() });
    for _ in 0..2 {
        solo.says(1, release(&[(1, 1)]));
        assert_eq!((solo.answer(), solo.released(session)), (released(&[(1, 1)]), vec![]));
    }
    assert_eq!(solo.node().gauges().pages_leased, 1);
    solo.says(1, release(&[(2, 1)]));
    assert_eq!(solo.answer(), released(&[(2, 1)]));
    assert_eq!((solo.poll(session), solo.released(session)), (KvPoll::Success, vec![list(&[4])]));
    let gauges = solo.node().gauges();
    assert_eq!((gauges.pages_leased, gauges.incoming), (0, 0));
}

#[test]
fn a_release_before_the_lease_fails_the_sender() {
    let mut solo = quiet_node();
    let session = sender(&mut solo, 1, Lease::Renewable(LEASE));
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.says(1, release(&[(1, 1)]));
    assert_eq!(solo.cause(session), Cause::Protocol("the lease was released before it was granted"));
}

#[test]
fn a_failed_sender_keeps_its_pages_until_each_reader_releases_them() {
    let mut solo = quiet_node();
    let session = sender(&mut solo, 3, Lease::Renewable(LEASE));
    solo.send(session, 1, &[&[4]]);
    for attempt in 1..=3 {
        solo.says(1, Body::Register(acquire(attempt, Some(session), 1)));
    }
    solo.says(1, release(&[(1, 1)]));
    solo.now = solo.now + Duration::from_secs(5);
    solo.says(1, heartbeat(2, &[(2, 1)]));
    solo.abort(session);
    assert_eq!(solo.frames(), [failed(2, PeerCause::Aborted, false), failed(3, PeerCause::Aborted, false)]);
    assert_eq!(solo.node().gauges().pages_leased, 0, "in quarantine, not leased");
    // The lease of the third is over a second later, that of the second four.
    solo.run_for(Duration::from_secs(1));
    assert_eq!(solo.released(session), vec![]);
    solo.run_for(Duration::from_secs(3) - MS);
    assert_eq!(solo.released(session), vec![]);
    solo.says(1, release(&[(2, 1)]));
    assert_eq!(solo.released(session), vec![list(&[4])]);
}

#[test]
fn an_abort_of_a_reader_frees_the_pages_and_is_acknowledged_also_after_a_failure() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.abort(session);
    assert_eq!(solo.released(session), vec![]);
    for _ in 0..2 {
        solo.says(1, abort(1, ROOM));
        assert_eq!(solo.answer(), Body::AbortAck(AbortAck { attempt: Attempt(1) }));
        assert_eq!(solo.released(session), vec![list(&[4])]);
    }
    solo.run_for(Duration::from_secs(60));
    assert_eq!(solo.node().gauges().timers, 0, "nothing is left to wait for");
}

#[test]
fn an_abort_before_its_acquire_ends_only_the_lease_it_names() {
    let give_up = |attempt: u64, lease_id: SessionId, room: Room| {
        let (attempt, cause) = (Attempt(attempt), PeerCause::Aborted);
        Body::Abort(kv_core::wire::Abort {
            failed_ms_ago: None,
            low_watermark: Attempt(0),
            attempt,
            room,
            lease_id: Some(lease_id),
            cause,
        })
    };
    let mut solo = quiet_node();
    let (first, second) = (granting(&mut solo, &[4]), granting(&mut solo, &[5]));
    solo.says(1, give_up(1, second, Room::Number(8)));
    assert_eq!(solo.poll(second), KvPoll::Transferring, "another request");
    solo.says(1, give_up(2, second, ROOM));
    assert_eq!(solo.cause(second), Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(solo.released(second), vec![list(&[5])]);
    assert_eq!(solo.poll(first), KvPoll::Transferring);
    // Its one reader will not come: a later sender of the room does not suffer for it.
    let third = granting(&mut solo, &[6]);
    solo.says(1, Body::Register(acquire(3, Some(third), 1)));
    assert_eq!(granted(&solo).lease_id, third);
    solo.says(1, give_up(4, third, ROOM));
    assert_eq!(solo.poll(third), KvPoll::Transferring, "it has its reader");
    assert_eq!(solo.node().gauges().failed_rooms, 0);
}

#[test]
fn the_missing_reader_of_two_keeps_the_pages_no_longer_than_the_first_lease() {
    let mut solo = quiet_node();
    let session = sender(&mut solo, 2, Lease::Renewable(LEASE));
    solo.send(session, 1, &[&[4]]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.says(1, release(&[(1, 1)]));
    solo.run_for(LEASE - MS);
    assert_eq!(solo.poll(session), KvPoll::Transferring, "the second may come");
    solo.run_for(MS);
    assert_eq!((solo.cause(session), solo.released(session)), (Cause::LeaseExpired, vec![list(&[4])]));
}

#[test]
fn pages_too_scattered_for_a_frame_fail_the_sender() {
    let mut solo = Solo::serving_pages(400_000);
    let session = sender(&mut solo, 1, Lease::Renewable(LEASE));
    let scattered = PageList::from_pages((0..200_000).map(|page| page * 2)).unwrap();
    solo.send_list(session, scattered);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    assert_eq!(solo.cause(session), Cause::Protocol("pages too scattered for one frame"));
}

#[test]
fn the_lease_of_a_reader_whose_way_is_lost_runs_on() {
    for failed in [false, true] {
        let mut solo = quiet_node();
        let session = granting(&mut solo, &[4]);
        solo.says(1, Body::Register(acquire(1, Some(session), 1)));
        let peer = solo.frames_to()[0].0;
        solo.input(match failed {
            true => Input::ConnectFailed { peer, error: TransportError::PeerGone },
            false => Input::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } },
        });
        assert_eq!(solo.released(session), vec![], "it may go on reading through its own connection");
        solo.run_for(LEASE - Duration::from_millis(1));
        assert_eq!(solo.released(session), vec![]);
        solo.run_for(Duration::from_millis(1));
        assert_eq!(solo.released(session), vec![list(&[4])]);
    }
}

#[test]
fn a_reader_that_begins_anew_has_lost_its_lease() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.greet_again(1, kv_core::wire::ConversationId::new(2, 1));
    assert_eq!(solo.cause(session), Cause::PeerRestarted);
    assert_eq!(solo.released(session), vec![list(&[4])]);
}

/// The peer's answer to a hello shows that it has forgotten the conversation, and so that what read for it has
/// failed. The pages would be kept until the lease ends.
#[test]
fn a_reader_that_answers_in_a_new_conversation_has_lost_its_lease() {
    let mut solo = quiet_node();
    let session = granting(&mut solo, &[4]);
    solo.says(1, Body::Register(acquire(1, Some(session), 1)));
    solo.open_receiver(Room::Number(2), None);
    solo.found(solo.lookups()[0].0, vec![record(1)]);
    solo.welcome(1, 2);
    assert_eq!(solo.cause(session), Cause::PeerRestarted);
    assert_eq!(solo.released(session), vec![list(&[4])]);
}
