//! Peers that die, restart, fall silent or forget, and posts that fail.

use std::time::Duration;

use kv_core::wire::Body;
use kv_core::{Cause, KvPoll, PeerCause, Room, SessionOptions, TransferMode, TransportError};

use super::ROOM;
use crate::pair::{D, P, Pair, list};

#[test]
fn a_restarted_sender_is_a_stranger_to_old_frames() {
    let mut pair = Pair::new();
    let (_, receiver) = pair.transferring(ROOM, &[0], &[1]);
    pair.take_posts();
    pair.restart(P);
    let again = pair.open_sender(ROOM, 1);
    pair.init_sender(again, 1, None);
    pair.send(again, &[5]);
    pair.run_for(Duration::from_secs(3));
    assert!(pair.take_posts().is_empty(), "the registration was made with the former incarnation");
    assert!(pair.node(P).gauges().dropped.total() > 0);
    // The successor says that it is not the one that was meant; the pages wait for proof.
    pair.run_for(Duration::from_secs(4));
    assert_eq!(pair.failure(D, receiver), Cause::PeerRestarted);
    assert!(pair.released(D, receiver).is_empty());
    pair.peer_gone(D, Duration::from_secs(2));
    pair.run_for(Duration::from_secs(1));
    assert!(pair.released(D, receiver).is_empty(), "its last writes may still arrive");
    pair.run_for(Duration::from_secs(2));
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
}

#[test]
fn both_sides_learn_of_a_dead_peer_at_once() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[0], &[1]);
    let post = pair.take_posts().remove(0);
    pair.lose(|_| true);
    pair.peer_gone(P, Duration::ZERO);
    assert_eq!(pair.failure(P, sender), Cause::PeerLost);
    assert!(pair.released(P, sender).is_empty(), "the post has not ended");
    pair.complete(post.0, post.1, Err(TransportError::PeerGone));
    assert_eq!(pair.released(P, sender), [list(&[0])]);

    pair.peer_gone(D, Duration::ZERO);
    assert_eq!(pair.failure(D, receiver), Cause::PeerLost);
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
    pair.assert_empty();
}

#[test]
fn a_silent_peer_is_given_up_but_its_pages_wait_until_it_answers() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[0], &[1]);
    let post = pair.take_posts().remove(0);
    pair.lose(|_| true);
    pair.run_for(Duration::from_secs(7));
    assert!(matches!(pair.failure(D, receiver), Cause::PeerUnresponsive { .. }));
    assert!(matches!(pair.failure(P, sender), Cause::PeerUnresponsive { .. }));
    pair.complete(post.0, post.1, Ok(()));
    pair.run_for(Duration::from_secs(600));
    assert!(pair.released(D, receiver).is_empty(), "silence proves nothing");
    pair.lose(|_| false);
    pair.run_for(Duration::from_secs(5));
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
    assert_eq!(pair.released(P, sender), [list(&[0])]);
    // And the conversation goes on.
    let (_, receiver) = pair.transferring(Room::Number(2), &[2], &[1]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn a_failed_post_fails_both_sides_and_names_the_cause() {
    let mut pair = Pair::with(|config| config.limits.max_post_bytes = 64);
    let (sender, receiver) = pair.transferring(ROOM, &[0, 4], &[1, 3]);
    let mut posts = pair.take_posts();
    let error = TransportError::Backend { call: "post", status: "BACKEND", code: Some(-2) };
    let (node, post) = posts.remove(0);
    pair.complete(node, post, Err(error.clone()));
    assert_eq!(pair.failure(P, sender), Cause::Post(error));
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::DataOperation));
    assert!(pair.released(D, receiver).is_empty(), "other posts are in flight");
    for (node, post) in posts {
        pair.complete(node, post, Ok(()));
    }
    assert_eq!(pair.released(D, receiver).len(), 1);
    pair.assert_empty();
}

#[test]
fn a_forgotten_conversation_is_taken_up_again() {
    let mut pair = Pair::new();
    let (_, receiver) = pair.transferring(ROOM, &[0], &[1]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    // P makes room for another peer and forgets D, which notices nothing.
    pair.make_forget(P);
    let (sender, receiver) = pair.transferring(Room::Number(2), &[2], &[3]);
    pair.run_for(Duration::from_secs(5));
    pair.complete_posts();
    pair.run_for(Duration::from_secs(2));
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn a_receiver_that_is_served_again_after_a_broken_connection_counts_once() {
    let mut pair = Pair::new();
    let auto = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Auto));
    let sender = pair.open_sender_with(ROOM, 2, auto);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[4]);
    let first = pair.open_receiver(ROOM);
    pair.init_receiver(first, &[7], None);
    // What the first would hear of its success is lost, and then the connection.
    pair.lose(|body| matches!(body, Body::Progress(_)));
    pair.complete_posts();
    pair.lose(|_| false);
    pair.peer_gone(P, Duration::ZERO);
    assert_eq!((pair.poll(P, sender), pair.poll(D, first)), (KvPoll::Transferring, KvPoll::Transferring));
    pair.run_for(Duration::from_secs(4));
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, first)), (KvPoll::Transferring, KvPoll::Success));
    let second = pair.open_receiver(ROOM);
    pair.init_receiver(second, &[8], None);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, second)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}
