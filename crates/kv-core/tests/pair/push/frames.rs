//! Frames that are lost, repeated, or arrive too late to count.

use std::time::Duration;

use kv_core::wire::Body;
use kv_core::{KvPoll, TransportError};

use super::ROOM;
use crate::pair::{D, P, Pair, list};

#[test]
fn lost_frames_are_made_up_for() {
    // Every frame of one kind is lost once.
    for lost in ["hello", "welcome", "register", "registered", "progress", "release"] {
        let mut pair = Pair::new();
        let mut left = 1;
        pair.lose(move |body| {
            let hit = match body {
                Body::Hello(_) => lost == "hello",
                Body::Welcome(_) => lost == "welcome",
                Body::Register(_) => lost == "register",
                Body::Registered(_) => lost == "registered",
                Body::Progress(_) => lost == "progress",
                Body::Release(_) => lost == "release",
                _ => false,
            };
            hit && std::mem::take(&mut left) == 1
        });
        let sender = pair.open_sender(ROOM, 1);
        let receiver = pair.open_receiver(ROOM);
        pair.run_for(Duration::from_secs(1));
        pair.init_receiver(receiver, &[5, 6], None);
        pair.run_for(Duration::from_secs(1));
        pair.init_sender(sender, 2, None);
        pair.send(sender, &[1, 2]);
        pair.complete_posts();
        pair.run_for(Duration::from_secs(4));
        assert_eq!((lost, pair.poll(D, receiver)), (lost, KvPoll::Success));
        assert_eq!((lost, pair.poll(P, sender)), (lost, KvPoll::Success));
        pair.assert_empty();
    }
}

#[test]
fn a_lost_failure_or_abort_or_acknowledgement_is_made_up_for() {
    for lost in ["failed", "abort", "ack"] {
        let mut pair = Pair::new();
        let mut left = 2;
        pair.lose(move |body| {
            let hit = match body {
                Body::Failed(_) => lost == "failed",
                Body::Abort(_) => lost == "abort",
                Body::AbortAck(_) => lost == "ack",
                _ => false,
            };
            hit && {
                left -= 1;
                left >= 0
            }
        });
        let (sender, receiver) = pair.transferring(ROOM, &[0], &[1]);
        let post = pair.take_posts().remove(0);
        pair.abort(if lost == "failed" { P } else { D }, if lost == "failed" { sender } else { receiver });
        pair.complete(post.0, post.1, Err(TransportError::Cancelled));
        pair.run_for(Duration::from_secs(4));
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "{lost}");
        assert_eq!(pair.released(D, receiver), [list(&[1])], "{lost}");
        assert_eq!(pair.released(P, sender), [list(&[0])], "{lost}");
        pair.assert_empty();
    }
}

#[test]
fn every_frame_may_arrive_twice_without_a_further_effect() {
    let mut pair = Pair::new();
    pair.duplicate_frames(3);
    let (sender, receiver) = pair.transferring(ROOM, &[0, 4], &[1, 2]);
    assert_eq!(pair.posts(), 1, "a repeated registration posts nothing twice");
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn a_registration_that_arrives_after_its_abort_is_never_served() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[0]);
    let receiver = pair.open_receiver(ROOM);
    pair.hold(|body| matches!(body, Body::Register(_)));
    pair.init_receiver(receiver, &[1], None);
    pair.abort(D, receiver);
    assert_eq!(pair.released(D, receiver), [list(&[1])], "the abort was acknowledged");
    // The same room is tried again, so that there is something to serve.
    let retry = pair.open_sender(ROOM, 1);
    pair.init_sender(retry, 1, None);
    pair.send(retry, &[3]);
    pair.deliver_held();
    assert!(pair.take_posts().is_empty(), "page 1 belongs to someone else by now");
    assert_eq!(pair.poll(P, retry), KvPoll::Bootstrapping);
}

#[test]
fn a_completion_of_an_old_attempt_does_not_count_for_the_next() {
    let mut pair = Pair::new();
    let (_, receiver) = pair.transferring(ROOM, &[0], &[1]);
    pair.hold(|body| matches!(body, Body::Progress(_)));
    pair.complete_posts();
    pair.abort(D, receiver);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    let (_, again) = pair.transferring(ROOM, &[2], &[1]);
    pair.deliver_held();
    assert_eq!(pair.poll(D, again), KvPoll::Transferring, "nothing was written for this attempt");
}
