//! Sessions that a scheduler or a worker ends early: who is told, and when the pages come back.

use std::time::Duration;

use kv_core::proto::Timing;
use kv_core::{Cause, KvPoll, PeerCause, Room, TransportError};

use super::ROOM;
use crate::pair::{D, P, Pair, list};

#[test]
fn an_aborted_receiver_keeps_its_pages_until_the_last_write_has_ended() {
    let mut pair = Pair::with(|config| config.limits.max_post_bytes = 64);
    let (sender, receiver) = pair.transferring(ROOM, &[0, 1], &[2, 3]);
    let mut posts = pair.take_posts();
    let last = posts.pop().unwrap();
    pair.abort(D, receiver);
    assert_eq!(pair.failure(D, receiver), Cause::Aborted);
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted));
    for (node, post) in posts {
        pair.complete(node, post, Err(TransportError::Cancelled));
    }
    assert!(pair.released(D, receiver).is_empty(), "a write is still in flight");
    assert!(pair.released(P, sender).is_empty(), "a read of the source is still in flight");
    pair.run_for(Duration::from_secs(30));
    assert!(pair.released(D, receiver).is_empty(), "time alone proves nothing");
    pair.complete(last.0, last.1, Ok(()));
    assert_eq!(pair.released(D, receiver), [list(&[2, 3])]);
    assert_eq!(pair.released(P, sender), [list(&[0, 1])]);
    pair.assert_empty();
}

#[test]
fn an_aborted_sender_tells_its_receiver() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[0, 1], &[2, 3]);
    let post = pair.take_posts().remove(0);
    pair.abort(P, sender);
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::Aborted));
    assert!(pair.released(D, receiver).is_empty());
    pair.complete(post.0, post.1, Err(TransportError::Cancelled));
    assert_eq!(pair.released(D, receiver), [list(&[2, 3])]);
    pair.assert_empty();
}

#[test]
fn a_sender_that_failed_before_the_registration_is_reported_to_the_latecomer() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    pair.abort(P, sender);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[1], None);
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
}

#[test]
fn a_receiver_that_gave_up_before_it_registered_is_reported_to_the_sender() {
    for sender_first in [true, false] {
        let mut pair = Pair::new();
        let early = sender_first.then(|| pair.open_sender(ROOM, 1));
        let receiver = pair.open_receiver(ROOM);
        pair.abort(D, receiver);
        let sender = early.unwrap_or_else(|| pair.open_sender(ROOM, 1));
        assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted));
    }
}

#[test]
fn a_failed_remembered_room_serves_one_latecomer_and_a_new_sender_clears_it() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    pair.abort(P, sender);
    let retry = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[1], None);
    assert_eq!(pair.poll(P, retry), KvPoll::WaitingForInput);
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring);
}

#[test]
fn deadlines_end_sessions_on_both_sides() {
    let mut pair = Pair::new();
    let lonely = pair.open_sender(Room::Number(1), 1);
    let receiver = pair.open_receiver(Room::Number(2));
    pair.init_receiver(receiver, &[3], None);
    pair.run_for(Duration::from_secs(299));
    assert_eq!(pair.poll(P, lonely), KvPoll::Bootstrapping);
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring);
    pair.run_for(Duration::from_secs(2));
    let expected = Cause::DeadlineExceeded { after: Timing::default().session_deadline, last: None };
    assert_eq!(pair.failure(P, lonely), expected);
    let failure = pair.failure(D, receiver);
    assert!(failure == expected || failure == Cause::ByPeer(PeerCause::DeadlineExceeded), "{failure}");
    assert_eq!(pair.released(D, receiver), [list(&[3])]);
}

#[test]
fn shutdown_ends_everything_and_tells_the_peer() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[0], &[1]);
    let post = pair.take_posts().remove(0);
    pair.shutdown(P);
    assert_eq!(pair.failure(P, sender), Cause::WorkerStopped);
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::WorkerStopped));
    pair.complete(post.0, post.1, Err(TransportError::Cancelled));
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
    assert_eq!(pair.released(P, sender), [list(&[0])]);
    let late = pair.open_sender(Room::Number(5), 1);
    assert_eq!(pair.failure(P, late), Cause::WorkerStopped);
}
