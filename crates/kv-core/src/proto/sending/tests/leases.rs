//! Leases of the sending half: granted, extended, run out, released, fenced.

use std::time::Duration;

use super::attempts::{end_post, register};
use super::{ATTEMPT, Alone, Out, SESSION, list, tells};
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, Room, SessionId};
use crate::lease::{Lease, TransferMode};
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::proto::conversation::{Extended, Incoming};
use crate::proto::ending::Ending;
use crate::transport::TransportError;
use crate::wire::{
    Abort, AbortAck, Acquire, Body, Delivery, Failed, Granted, Register, Registered, Release, Released,
};

const LEASE: Lease = Lease::Renewable(Duration::from_secs(30));

fn acquire(attempt: Attempt, lease_id: Option<SessionId>) -> Register {
    let (low_watermark, room, delivery) =
        (Attempt(0), Room::Number(9), Delivery::Read(Acquire { lease_id, number: 3 }));
    Register { attempt, low_watermark, room, ranks: 1, ttl_ms: 60_000, delivery }
}

fn failed(attempt: Attempt, cause: PeerCause, quiet: bool) -> Body {
    Body::Failed(Failed { attempt, cause, quiet })
}

/// A session whose reader has been granted pages 2, 3 and 5.
fn granted(lease: Lease) -> Alone {
    let mut alone = Alone::new();
    alone.open(TransferMode::Pull, lease);
    alone.sending.on_register(&mut alone.cx, alone.peer, acquire(ATTEMPT, Some(SESSION)));
    assert_eq!(alone.told(), [Body::Registered(Registered { attempt: ATTEMPT })], "nothing is complete yet");
    assert_eq!(alone.sending.pages_leased(), 0);
    alone.give(&[2, 3, 5]);
    let interval_ms = if lease == LEASE { 5_000 } else { 0 };
    let granted = Granted {
        attempt: ATTEMPT,
        number: 3,
        lease_id: SESSION,
        pages: list(&[2, 3, 5]),
        aux: None,
        lease_ms: 30_000,
        interval_ms,
        groups: Default::default(),
    };
    assert_eq!(alone.told(), [Body::Granted(granted)]);
    assert_eq!(alone.sending.pages_leased(), 3);
    alone
}

/// A heartbeat: for how many milliseconds the lease holds, if it does, and what is said of it otherwise.
fn number(alone: &mut Alone) -> (Option<u64>, Vec<Body>) {
    let (extended, others) = alone.sending.extend_leases(&mut alone.cx, alone.peer, &[(ATTEMPT.0, 1)]);
    for attempt in others {
        alone.sending.tell_about(&mut alone.cx, alone.peer, attempt);
    }
    (extended.leases.contains(&(ATTEMPT.0, 1)).then_some(extended.lease_ms), alone.told())
}

fn lease_timer(alone: &mut Alone, seconds: u64) {
    alone.at(seconds);
    alone.sending.on_lease(&mut alone.cx, SESSION);
}

#[test]
fn a_heartbeat_extends_a_renewable_lease_whose_end_frees_the_pages() {
    let mut alone = granted(LEASE);
    alone.at(25);
    // Two thirds of thirty seconds from now.
    assert_eq!(number(&mut alone), (Some(20_000), vec![]));
    lease_timer(&mut alone, 44);
    assert_eq!((alone.outputs(), alone.sending.pages_leased()), (vec![], 3));
    lease_timer(&mut alone, 45);
    let told = tells(failed(ATTEMPT, PeerCause::LeaseExpired, false));
    let quiet = tells(failed(ATTEMPT, PeerCause::LeaseExpired, true));
    let expected = [Out::Fails(Cause::LeaseExpired), told, quiet, Out::Back(vec![2, 3, 5])];
    assert_eq!(alone.outputs(), expected);
    alone.assert_over();
}

#[test]
fn a_heartbeat_does_not_extend_a_fixed_lease() {
    let mut alone = granted(Lease::Fixed(Duration::from_secs(30)));
    alone.at(25);
    assert_eq!(number(&mut alone), (Some(5_000), vec![]));
    lease_timer(&mut alone, 30);
    assert_eq!(alone.ends(), [Out::Fails(Cause::LeaseExpired), Out::Back(vec![2, 3, 5])]);
    alone.assert_over();
}

#[test]
fn a_release_ends_the_sender_with_success_and_refuses_later_acquires() {
    let mut alone = granted(LEASE);
    let release = Release { low_watermark: Attempt(0), attempts: vec![(ATTEMPT.0, 1)], answer: true };
    alone.sending.on_release(&mut alone.cx, alone.peer, release.clone());
    let released = tells(Body::Released(Released { attempts: vec![(1, 1)] }));
    assert_eq!(alone.outputs(), [Out::Says(KvPoll::Success), Out::Back(vec![2, 3, 5]), released]);
    alone.assert_over();
    alone.sending.on_release(&mut alone.cx, alone.peer, release);
    assert_eq!(alone.told(), [Body::Released(Released { attempts: vec![(1, 1)] })], "its answer was lost");
    for (attempt, lease_id, cause) in [
        (2, SESSION, PeerCause::LeaseConsumed { lease_id: 1 }),
        (3, SessionId(4), PeerCause::UnknownLease { lease_id: 4 }),
    ] {
        let attempt = Attempt(attempt);
        alone.sending.on_register(&mut alone.cx, alone.peer, acquire(attempt, Some(lease_id)));
        assert_eq!(alone.told(), [failed(attempt, cause, true)]);
    }
}

#[test]
fn an_aborted_sender_keeps_its_pages_until_its_readers_lease_ends() {
    let mut alone = granted(LEASE);
    alone.at(25);
    number(&mut alone);
    alone.sending.fail(&mut alone.cx, SESSION, Cause::Aborted);
    let told = tells(failed(ATTEMPT, PeerCause::Aborted, false));
    assert_eq!(alone.outputs(), [Out::Fails(Cause::Aborted), told]);
    assert_eq!((alone.sending.pages_leased(), alone.sending.len()), (0, 1), "in quarantine, not leased");
    alone.at(26);
    let told = failed(ATTEMPT, PeerCause::Aborted, false);
    assert_eq!(number(&mut alone), (None, vec![told]), "nothing is extended");
    lease_timer(&mut alone, 44);
    assert_eq!(alone.outputs(), []);
    lease_timer(&mut alone, 45);
    let quiet = tells(failed(ATTEMPT, PeerCause::Aborted, true));
    assert_eq!(alone.outputs(), [quiet, Out::Back(vec![2, 3, 5])]);
    alone.assert_over();
}

#[test]
fn a_reader_that_aborts_releases_the_pages_at_once() {
    let mut alone = granted(LEASE);
    let abort = Abort {
        failed_ms_ago: None,
        low_watermark: Attempt(0),
        attempt: ATTEMPT,
        room: Room::Number(9),
        lease_id: Some(SESSION),
        cause: PeerCause::Aborted,
    };
    alone.sending.on_abort(&mut alone.cx, alone.peer, abort);
    let acknowledged = tells(Body::AbortAck(AbortAck { attempt: ATTEMPT }));
    let failed = Out::Fails(Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(alone.outputs(), [failed, acknowledged, Out::Back(vec![2, 3, 5])]);
    alone.assert_over();
    assert!(alone.cx.peers.get(alone.peer).unwrap().incoming().is_closed(ATTEMPT));
}

#[test]
fn a_release_before_the_grant_fails_the_session() {
    let mut alone = Alone::new();
    alone.open(TransferMode::Pull, LEASE);
    alone.sending.on_register(&mut alone.cx, alone.peer, acquire(ATTEMPT, None));
    let incoming = alone.cx.peers.get(alone.peer).unwrap().incoming().get(ATTEMPT);
    assert!(matches!(incoming, Some(Incoming::Reading { session: SESSION, intact: false, .. })));
    alone.outputs();
    let release = Release { low_watermark: Attempt(0), attempts: vec![(ATTEMPT.0, 1)], answer: true };
    alone.sending.on_release(&mut alone.cx, alone.peer, release);
    assert_eq!(alone.ends(), [Out::Fails(Cause::Protocol("the lease was released before it was granted"))]);
    alone.give(&[6]);
    assert_eq!(alone.outputs(), [Out::Back(vec![6])], "what comes too late was promised to nobody");
    alone.assert_over();
}

#[test]
fn a_read_whose_end_is_told_no_more_fails_before_and_after_the_grant() {
    for granted in [false, true] {
        let mut alone = Alone::new();
        alone.open(TransferMode::Pull, LEASE);
        alone.sending.on_register(&mut alone.cx, alone.peer, acquire(ATTEMPT, None));
        if granted {
            alone.give(&[6]);
        }
        alone.outputs();
        alone.sending.on_low_watermark(&mut alone.cx, alone.peer, Attempt(ATTEMPT.0 + 1));
        let said = alone.outputs();
        assert!(said.contains(&Out::Fails(Cause::WayLost)), "{said:?}");
        assert_eq!(said.contains(&Out::Back(vec![6])), granted, "nobody reads the pages any more: {said:?}");
        alone.assert_over();
    }
}

#[test]
fn a_session_that_fails_in_the_turn_that_completes_it_pins_nothing() {
    let mut alone = Alone::new();
    alone.open(TransferMode::Auto, LEASE);
    alone.sending.on_register(&mut alone.cx, alone.peer, register(ATTEMPT, 0));
    alone.sending.init_sender(&mut alone.cx, SESSION, 2, None);
    alone.sending.send_chunk(&mut alone.cx, SESSION, Pages::unpooled(list(&[1])).unwrap());
    alone.sending.post_next(&mut alone.cx, SESSION, 0);
    assert_eq!(alone.cx.posts.in_flight(), 1, "the failed session stays until it has ended");
    alone.sending.fail(&mut alone.cx, SESSION, Cause::Aborted);
    alone.sending.grant(&mut alone.cx, SESSION);
    assert_eq!((alone.sending.len(), alone.sending.pages_leased()), (1, 0));
    end_post(&mut alone, Err(TransportError::Cancelled));
    alone.assert_over();
}

#[test]
fn a_heartbeat_answer_too_long_for_one_frame_is_split_into_several() {
    let mut alone = Alone::new();
    let leases: Vec<(u64, u32)> = (0..70_000).map(|lease| (lease * 2, 1)).collect();
    alone.cx.say_heartbeat_ack(alone.peer, 3, Extended { leases: leases.clone(), lease_ms: 9 }, 4);
    let told = alone.told().into_iter().map(|body| match body {
        Body::HeartbeatAck(ack) => {
            assert_eq!((ack.number, ack.lease_ms, ack.permit_ms), (3, 9, 4));
            ack.leases
        }
        body => panic!("{body:?}"),
    });
    let told: Vec<Vec<(u64, u32)>> = told.collect();
    assert_eq!(told.iter().map(Vec::len).collect::<Vec<_>>(), [65_536, 4464]);
    assert_eq!(told.concat(), leases);
}
