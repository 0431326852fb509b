//! Attempts of receivers at the sending half: registered, served, aborted, forgotten.

use std::time::Duration;

use super::{ATTEMPT, Alone, Out, PAGE, SESSION, list, tells};
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, Room};
use crate::lease::{Lease, TransferMode};
use crate::poll::KvPoll;
use crate::proto::conversation::Incoming;
use crate::proto::timer::Timer;
use crate::transport::{Descriptor, TransportError};
use crate::wire::{
    Abort, AbortAck, Body, Delivery, Destination, Failed, Progress, Register, Registered, Release, Released,
};

const NEVER: Lease = Lease::Fixed(Duration::from_secs(9));

/// Wants pages 8 and 10 of the receiver's written.
pub(super) fn register(attempt: Attempt, low_watermark: u64) -> Register {
    register_for(&[8, 10], 2, attempt, low_watermark)
}

fn register_for(pages: &[u32], total_pages: u32, attempt: Attempt, low_watermark: u64) -> Register {
    let (low_watermark, room) = (Attempt(low_watermark), Room::Number(9));
    let to = Destination { pages: list(pages), total_pages, aux_here: true, ..Destination::default() };
    Register { attempt, low_watermark, room, ranks: 1, ttl_ms: 60_000, delivery: Delivery::Write(to) }
}

fn abort(alone: &mut Alone, attempt: Attempt) {
    let abort = Abort {
        failed_ms_ago: None,
        low_watermark: Attempt(0),
        attempt,
        room: Room::Number(9),
        lease_id: None,
        cause: PeerCause::DeadlineExceeded,
    };
    alone.sending.on_abort(&mut alone.cx, alone.peer, abort);
}

fn registered(attempt: Attempt) -> Out {
    tells(Body::Registered(Registered { attempt }))
}

fn aborted(attempt: Attempt) -> Out {
    tells(Body::AbortAck(AbortAck { attempt }))
}

fn incoming(alone: &Alone, attempt: Attempt) -> Option<&Incoming> {
    alone.cx.peers.get(alone.peer).unwrap().incoming().get(attempt)
}

/// Pages 1 and 4 here go to pages 8 and 10 there.
fn pieces() -> Vec<Descriptor> {
    let piece = |local: u64, remote: u64| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: local * PAGE,
        remote_offset: remote * PAGE,
        len: PAGE,
    };
    vec![piece(1, 8), piece(4, 10)]
}

/// A session with a post in flight to its receiver.
fn posted() -> Alone {
    let mut alone = Alone::new();
    alone.sending.on_register(&mut alone.cx, alone.peer, register(ATTEMPT, 0));
    assert_eq!(alone.outputs(), [registered(ATTEMPT)]);
    assert!(matches!(incoming(&alone, ATTEMPT), Some(Incoming::Waiting(_))));
    assert_eq!((alone.cx.rendezvous.registrations(), alone.cx.rendezvous.waiting_runs()), (1, 2));
    alone.open(TransferMode::Push, NEVER);
    assert!(matches!(incoming(&alone, ATTEMPT), Some(Incoming::Active(SESSION, 0))));
    assert_eq!((alone.cx.rendezvous.registrations(), alone.cx.rendezvous.waiting_runs()), (0, 0));
    alone.give(&[1, 4]);
    alone.outputs();
    alone.sending.post_next(&mut alone.cx, SESSION, 0);
    assert_eq!(alone.outputs(), [Out::Posts(pieces())]);
    alone
}

/// The post that is in flight ends.
pub(super) fn end_post(alone: &mut Alone, result: Result<(), TransportError>) {
    let [post] = alone.cx.posts.of(SESSION).try_into().unwrap();
    let post = alone.cx.posts.end(post, alone.cx.fx.now()).unwrap();
    alone.sending.on_written(&mut alone.cx, &post, result);
}

#[test]
fn a_registration_waits_for_its_sender_and_is_served_until_everything_is_in_place() {
    let mut alone = posted();
    end_post(&mut alone, Ok(()));
    assert_eq!(alone.outputs(), [Out::Says(KvPoll::Success), Out::Back(vec![1, 4])]);
    alone.assert_over();
    // The notice may be lost: the result is kept for a receiver that asks.
    alone.sending.tell_about(&mut alone.cx, alone.peer, ATTEMPT);
    let all = Progress { attempt: ATTEMPT, done: vec![(0, 1)], total: Some(1), skipped: vec![] };
    assert_eq!(alone.told(), [Body::Progress(all)]);
    alone.sending.on_low_watermark(&mut alone.cx, alone.peer, Attempt(2));
    assert!(incoming(&alone, ATTEMPT).is_none(), "over for the receiver, too");
}

#[test]
fn the_only_receiver_is_rousable_for_the_last_pages_if_it_permits_writes() {
    let mut alone = Alone::new();
    let rouses = |alone: &Alone, pages| alone.sending.addressee(&alone.cx, alone.cx.fx.now(), SESSION, pages);
    alone.sending.on_register(&mut alone.cx, alone.peer, register(ATTEMPT, 0));
    alone.open(TransferMode::Push, NEVER);
    let now = alone.cx.fx.now();
    let ask = alone.cx.peers.get_mut(alone.peer).unwrap().number(now);
    alone.sending.init_sender(&mut alone.cx, SESSION, 2, None);
    assert_eq!(rouses(&alone, 2), None, "nothing may be written yet");
    alone.cx.note_permission(alone.peer, ask, 10_000);
    assert_eq!(rouses(&alone, 2), Some((alone.peer, 2 * PAGE)));
    assert_eq!((rouses(&alone, 1), rouses(&alone, 3)), (None, None), "others follow, or none can be so many");
    abort(&mut alone, ATTEMPT);
    assert_eq!(rouses(&alone, 2), None, "the receiver has given up");
}

#[test]
fn an_abort_is_acknowledged_when_the_post_in_flight_has_ended_and_not_before() {
    let mut alone = posted();
    abort(&mut alone, ATTEMPT);
    let failed = Out::Fails(Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(alone.outputs(), [failed, Out::Cancels]);
    abort(&mut alone, ATTEMPT);
    assert_eq!(alone.outputs(), [], "the second of the same says nothing new");
    end_post(&mut alone, Err(TransportError::Cancelled));
    assert_eq!(alone.outputs(), [aborted(ATTEMPT), Out::Back(vec![1, 4])]);
    alone.assert_over();
    abort(&mut alone, ATTEMPT);
    assert_eq!(alone.outputs(), [aborted(ATTEMPT)], "its answer was lost");
}

#[test]
fn a_failed_post_is_reported_at_once_and_its_attempt_later_becomes_quiet() {
    let mut alone = posted();
    end_post(&mut alone, Err(TransportError::Cancelled));
    let [failed, told, back] = alone.outputs().try_into().unwrap();
    assert_eq!((failed, back), (Out::Fails(Cause::Post(TransportError::Cancelled)), Out::Back(vec![1, 4])));
    let Out::Tells(told) = told else { panic!("{told:?}") };
    assert!(matches!(*told, Body::Failed(Failed { attempt: ATTEMPT, quiet: true, .. })));
    assert!(matches!(incoming(&alone, ATTEMPT), Some(Incoming::Failed { .. })));
    alone.assert_over();
}

#[test]
fn an_attempt_that_was_aborted_before_its_sender_came_is_never_served() {
    let mut alone = Alone::new();
    alone.sending.on_register(&mut alone.cx, alone.peer, register(ATTEMPT, 0));
    abort(&mut alone, ATTEMPT);
    assert_eq!(alone.outputs(), [registered(ATTEMPT), aborted(ATTEMPT)]);
    alone.sending.on_register(&mut alone.cx, alone.peer, register(ATTEMPT, 0));
    assert_eq!((alone.outputs(), alone.cx.rendezvous.registrations()), (vec![], 0));
    // The sender that comes learns that its receiver will not.
    alone.open(TransferMode::Push, NEVER);
    let failed = Out::Fails(Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(alone.outputs(), [Out::Says(KvPoll::Bootstrapping), failed]);
    alone.give(&[1, 4]);
    assert_eq!(alone.outputs(), [Out::Back(vec![1, 4])]);
    alone.assert_over();
}

#[test]
fn attempts_below_the_low_watermark_are_forgotten_and_their_numbers_never_served_again() {
    let mut alone = Alone::new();
    for attempt in 1..=3 {
        alone.sending.on_register(&mut alone.cx, alone.peer, register(Attempt(attempt), 0));
    }
    assert_eq!((alone.outputs().len(), alone.cx.rendezvous.registrations()), (3, 3));
    alone.sending.on_low_watermark(&mut alone.cx, alone.peer, Attempt(3));
    assert_eq!((alone.outputs(), alone.cx.rendezvous.registrations()), (vec![], 1));
    let dropped = alone.cx.fx.dropped().total();
    for attempt in 1..=2 {
        alone.sending.on_register(&mut alone.cx, alone.peer, register(Attempt(attempt), 3));
    }
    assert_eq!((alone.outputs(), alone.cx.fx.dropped().total()), (vec![], dropped + 2));
    alone.open(TransferMode::Push, NEVER);
    assert!(matches!(incoming(&alone, Attempt(3)), Some(Incoming::Active(SESSION, 0))));
}

#[test]
fn a_registration_of_pages_that_the_receiver_does_not_have_fails_both_sides() {
    let mut alone = Alone::new();
    alone.open(TransferMode::Push, NEVER);
    alone.outputs();
    let beyond = register_for(&[15, 16], 2, ATTEMPT, 0);
    alone.sending.on_register(&mut alone.cx, alone.peer, beyond);
    let told = Failed { attempt: ATTEMPT, cause: PeerCause::OutOfRange, quiet: true };
    let failed = Out::Fails(Cause::ByPeer(PeerCause::OutOfRange));
    assert_eq!(alone.outputs(), [tells(Body::Failed(told)), failed]);
    alone.assert_over();
}

#[test]
fn an_attempt_without_bytes_reports_its_end_without_a_post() {
    let mut alone = Alone::new();
    alone.open(TransferMode::Push, NEVER);
    let none = register_for(&[], 0, ATTEMPT, 0);
    alone.sending.on_register(&mut alone.cx, alone.peer, none);
    alone.give(&[]);
    alone.outputs();
    alone.sending.post_next(&mut alone.cx, SESSION, 0);
    let done = Progress { attempt: ATTEMPT, done: vec![(0, 1)], total: Some(1), skipped: vec![] };
    let told = tells(Body::Progress(done));
    assert_eq!(alone.outputs(), [told, Out::Says(KvPoll::Success), Out::Back(vec![])]);
    alone.assert_over();
}

/// So many attempts of the peer, from number 1 on.
fn served(attempts: u64) -> Alone {
    let mut alone = Alone::new();
    for attempt in (1..=attempts).map(Attempt) {
        let incoming = alone.cx.peers.get_mut(alone.peer).unwrap().incoming_mut();
        incoming.insert(attempt, Incoming::Active(SESSION, 0));
    }
    alone
}

fn live(alone: &Alone) -> usize {
    alone.cx.peers.get(alone.peer).unwrap().incoming().live_len()
}

#[test]
fn a_release_acknowledges_only_runs_of_which_nothing_is_left() {
    let mut alone = served(5000);
    let runs = vec![(1, 4), (6, 4994)];
    let release = || Release { low_watermark: Attempt(0), attempts: runs.clone(), answer: true };
    alone.sending.on_release(&mut alone.cx, alone.peer, release());
    assert_eq!(live(&alone), 5000 - 4096);
    assert_eq!(alone.told(), [Body::Released(Released { attempts: vec![(1, 4)] })]);
    alone.sending.on_release(&mut alone.cx, alone.peer, release());
    assert_eq!(live(&alone), 2, "attempts 5 and 5000 are in no run");
    assert_eq!(alone.told(), [Body::Released(Released { attempts: runs.clone() })]);
}

#[test]
fn attempts_below_a_low_watermark_end_in_slices_until_none_is_left() {
    let mut alone = served(600);
    alone.sending.on_low_watermark(&mut alone.cx, alone.peer, Attempt(600));
    let mut slices = vec![live(&alone)];
    let sweep = Timer::Sweep(alone.peer);
    while let Some(due) = alone.cx.fx.due(sweep) {
        alone.cx.fx.advance(due);
        assert_eq!(alone.cx.fx.next_timer(), Some(sweep));
        alone.sending.sweep(&mut alone.cx, alone.peer);
        slices.push(live(&alone));
    }
    assert_eq!(slices, [344, 88, 1], "the low_watermark itself is open");
}
