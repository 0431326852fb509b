//! The push protocol between two nodes.

use std::time::Duration;

use kv_core::proto::{Input, Timing};
use kv_core::wire::Body;
use kv_core::{AuxIndex, Cause, KvPoll, PeerCause, PlaneError, Room, SessionOptions, TransferMode};

use crate::pair::{D, P, Pair, list, pages};

const ROOM: Room = Room::Number(42);

#[test]
fn a_request_goes_from_rendezvous_to_success_and_both_sides_get_their_pages_back() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    assert_eq!(pair.poll(D, receiver), KvPoll::WaitingForInput);
    assert_eq!(pair.poll(P, sender), KvPoll::Bootstrapping);

    pair.init_receiver(receiver, &[7, 8, 1], Some(2));
    assert_eq!(pair.poll(P, sender), KvPoll::WaitingForInput);
    pair.init_sender(sender, 3, Some(0));
    pair.send(sender, &[4, 5, 6]);
    assert_eq!(pair.poll(P, sender), KvPoll::Transferring);

    // Two KV regions: one descriptor for pages 4,5 → 7,8 and one for 6 → 1 in each; one aux row.
    let post = pair.only_post();
    let moved: Vec<_> =
        post.descs.iter().map(|d| (d.local_region, d.local_offset, d.remote_offset, d.len)).collect();
    assert_eq!(
        moved,
        [
            (0, 4 * 64, 7 * 64, 128),
            (0, 6 * 64, 64, 64),
            (1, 4 * 64, 7 * 64, 128),
            (1, 6 * 64, 64, 64),
            (2, 0, 2 * 16, 16),
        ]
    );
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(P, sender), [list(&[4, 5, 6])]);
    assert_eq!(pair.released(D, receiver), [list(&[7, 8, 1])]);
    pair.assert_empty();
}

#[test]
fn pages_may_be_sent_before_the_destination_registers() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[1]);
    pair.send(sender, &[3]);
    assert_eq!(pair.poll(P, sender), KvPoll::Bootstrapping);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[5, 6], None);
    assert_eq!(pair.poll(P, sender), KvPoll::Transferring);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    assert_eq!(pair.released(P, sender), [list(&[1]), list(&[3])]);
    pair.assert_empty();
}

#[test]
fn the_destination_may_register_before_the_sender_opens() {
    let mut pair = Pair::new();
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[5, 6], None);
    assert_eq!(pair.node(P).gauges().registrations, 1);
    let sender = pair.open_sender(ROOM, 1);
    assert_eq!(pair.poll(P, sender), KvPoll::WaitingForInput);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[1, 2]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn request_ids_match_without_their_engine_suffix_and_exact_ids_first() {
    let mut pair = Pair::new();
    let stranger = pair.open_sender(Room::request("cmpl-1-0-aaaaaaaa").unwrap(), 1);
    let exact = pair.open_sender(Room::request("cmpl-1-0-bbbbbbbb").unwrap(), 1);
    let receiver = pair.open_receiver(Room::request("cmpl-1-0-bbbbbbbb").unwrap());
    pair.init_receiver(receiver, &[0], None);
    assert_eq!(pair.poll(P, exact), KvPoll::WaitingForInput);
    let receiver = pair.open_receiver(Room::request("cmpl-1-0-cccccccc").unwrap());
    pair.init_receiver(receiver, &[1], None);
    assert_eq!(pair.poll(P, stranger), KvPoll::WaitingForInput);
    let other = pair.open_receiver(Room::request("cmpl-2-0-cccccccc").unwrap());
    pair.init_receiver(other, &[2], None);
    assert_eq!(pair.node(P).gauges().registrations, 1);
}

#[test]
fn chunks_land_at_their_offset_whatever_order_their_posts_end_in() {
    let mut pair = Pair::with(|config| config.limits.max_post_bytes = 64);
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[9, 3, 7], None);
    pair.init_sender(sender, 3, None);
    pair.send(sender, &[0]);
    pair.send(sender, &[5, 4]);
    let posts = pair.take_posts();
    let mut moves: Vec<_> =
        posts.iter().flat_map(|(_, post)| &post.descs).filter(|desc| desc.local_region == 1).collect();
    moves.sort();
    let moves: Vec<_> = moves.iter().map(|d| (d.local_offset / 64, d.remote_offset / 64)).collect();
    assert_eq!(moves, [(0, 9), (4, 7), (5, 3)]);
    assert_eq!(posts.len(), 6, "one post for each page of each region");
    for (node, post) in posts.into_iter().rev() {
        assert_eq!(pair.poll(D, receiver), KvPoll::Transferring);
        pair.complete(node, post, Ok(()));
    }
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

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
        pair.complete(node, post, Err(PlaneError::Cancelled));
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
    pair.complete(post.0, post.1, Err(PlaneError::Cancelled));
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
fn lost_frames_are_made_up_for() {
    // Every frame of one kind is lost once.
    for lost in ["hello", "welcome", "register", "registered", "done", "finish"] {
        let mut pair = Pair::new();
        let mut left = 1;
        pair.lose(move |body| {
            let hit = match body {
                Body::Hello(_) => lost == "hello",
                Body::Welcome(_) => lost == "welcome",
                Body::Register(_) => lost == "register",
                Body::Registered(_) => lost == "registered",
                Body::Done(_) => lost == "done",
                Body::Finish(_) => lost == "finish",
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
        pair.complete(post.0, post.1, Err(PlaneError::Cancelled));
        pair.run_for(Duration::from_secs(4));
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "{lost}");
        assert_eq!(pair.released(D, receiver), [list(&[1])], "{lost}");
        assert_eq!(pair.released(P, sender), [list(&[0])], "{lost}");
        pair.assert_empty();
    }
}

#[test]
fn every_frame_is_idempotent() {
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
    pair.hold(|body| matches!(body, Body::Done(_)));
    pair.complete_posts();
    pair.abort(D, receiver);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    let (_, again) = pair.transferring(ROOM, &[2], &[1]);
    pair.deliver_held();
    assert_eq!(pair.poll(D, again), KvPoll::Transferring, "nothing was written for this attempt");
}

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
    assert!(pair.node(P).gauges().frames_dropped > 0);
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
    pair.complete(post.0, post.1, Err(PlaneError::PeerGone));
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
    let error = PlaneError::Backend { call: "post", status: "BACKEND" };
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
fn disagreements_name_both_values_on_both_sides() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[0, 1], None);
    pair.init_sender(sender, 3, None);
    assert_eq!(pair.failure(P, sender), Cause::PageCount { sent: 3, registered: 2 });
    let told = PeerCause::PageCount { sent: 3, registered: 2 };
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(told));
    assert_eq!(pair.released(D, receiver).len(), 1);

    let sender = pair.open_sender(Room::Number(2), 1);
    pair.init_sender(sender, 1, Some(0));
    let receiver = pair.open_receiver(Room::Number(2));
    pair.init_receiver(receiver, &[0], None);
    assert_eq!(pair.failure(P, sender), Cause::AuxOneSided { sender: true, receiver: false });

    let sender = pair.open_sender(Room::Number(3), 1);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[1, 2]);
    assert_eq!(pair.failure(P, sender), Cause::TooManyPages { sent: 2, announced: 1 });
    assert_eq!(pair.released(P, sender), [list(&[1, 2])]);

    let sender = pair.open_sender(Room::Number(4), 1);
    pair.init_sender(sender, 1, Some(9));
    assert_eq!(pair.failure(P, sender), Cause::BadAux { index: 9, rows: 4 });
    pair.assert_empty();
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
fn a_request_of_no_pages_still_carries_its_aux_row() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[], Some(1));
    pair.init_sender(sender, 0, Some(3));
    assert_eq!(pair.posts(), 0, "the aux row is final only with the last chunk");
    pair.send(sender, &[]);
    let post = pair.only_post();
    assert_eq!(post.descs.len(), 1);
    assert_eq!((post.descs[0].local_offset, post.descs[0].remote_offset), (3 * 16, 16));
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn two_receivers_of_one_sender_both_get_everything() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 2);
    let one = pair.open_receiver(ROOM);
    let two = pair.open_receiver(ROOM);
    pair.init_receiver(one, &[0], None);
    assert_eq!(pair.poll(P, sender), KvPoll::Bootstrapping);
    pair.init_receiver(two, &[1], None);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[5]);
    let posts = pair.take_posts();
    assert_eq!(posts.len(), 2);
    for (node, post) in posts {
        assert_eq!(pair.poll(P, sender), KvPoll::Transferring);
        pair.complete(node, post, Ok(()));
    }
    assert_eq!(pair.poll(P, sender), KvPoll::Success);
    assert_eq!((pair.poll(D, one), pair.poll(D, two)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn small_sessions_take_turns_with_a_large_one() {
    let mut pair = Pair::with(|config| config.limits.max_post_bytes = 64);
    let large: Vec<u32> = (0..15).map(|page| page * 2).collect();
    pair.transferring(Room::Number(1), &large, &large);
    pair.transferring(Room::Number(2), &[1], &[1]);
    // Eight posts are in flight at a time: the small session gets its two as soon as its turn comes.
    let mut ended = 0;
    while pair.posts_touching(1) < 2 {
        pair.complete_first();
        ended += 1;
        assert!(ended < 10, "the small session waits for the large one");
    }
}

#[test]
fn registrations_are_bounded_and_the_excess_is_told() {
    let mut pair = Pair::with(|config| config.limits.max_registrations = 2);
    let receivers: Vec<_> = (0..3).map(|number| pair.open_receiver(Room::Number(number))).collect();
    for (page, receiver) in (0..).zip(&receivers) {
        pair.init_receiver(*receiver, &[page], None);
    }
    assert_eq!(pair.poll(D, receivers[1]), KvPoll::Transferring);
    assert_eq!(pair.failure(D, receivers[2]), Cause::ByPeer(PeerCause::Overloaded));
    assert_eq!(pair.node(P).gauges().registrations, 2);
}

#[test]
fn pages_out_of_range_are_refused_here_and_there() {
    let mut pair = Pair::new();
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[32], None);
    assert!(matches!(pair.failure(D, receiver), Cause::BadPages(_)));
    assert_eq!(pair.released(D, receiver), [list(&[32])]);
    let sender = pair.open_sender(Room::Number(8), 1);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[32]);
    assert!(matches!(pair.failure(P, sender), Cause::BadPages(_)));
    assert_eq!(pair.released(P, sender), [list(&[32])]);
}

#[test]
fn another_geometry_is_refused_with_the_field_and_both_values() {
    let mut pair = Pair::with(|_| {});
    pair.replace_geometry(D, 32);
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    let Cause::Incompatible(mismatch) = pair.failure(D, receiver) else { panic!("not refused") };
    // The sender is told, although the two never came to an understanding.
    let Cause::ByPeer(PeerCause::Incompatible(_)) = pair.failure(P, sender) else { panic!("not told") };
    let again = pair.open_receiver(Room::Number(7));
    assert!(matches!(pair.failure(D, again), Cause::Incompatible(_)));
    assert_eq!(
        (mismatch.field.as_str(), mismatch.ours.as_str(), mismatch.theirs.as_str()),
        ("page_size", "32", "16")
    );
}

#[test]
fn shutdown_ends_everything_and_tells_the_peer() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[0], &[1]);
    let post = pair.take_posts().remove(0);
    pair.shutdown(P);
    assert_eq!(pair.failure(P, sender), Cause::WorkerStopped);
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::WorkerStopped));
    pair.complete(post.0, post.1, Err(PlaneError::Cancelled));
    assert_eq!(pair.released(D, receiver), [list(&[1])]);
    assert_eq!(pair.released(P, sender), [list(&[0])]);
    let late = pair.open_sender(Room::Number(5), 1);
    assert_eq!(pair.failure(P, late), Cause::WorkerStopped);
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
fn unknown_sessions_get_their_pages_straight_back() {
    let mut pair = Pair::new();
    let ghost = kv_core::SessionId(999);
    pair.command(P, kv_core::proto::Command::Send { session: ghost, chunk: pages(&[1]) });
    let init =
        kv_core::proto::Command::InitReceiver { session: ghost, pages: pages(&[2]), aux: Some(AuxIndex(0)) };
    pair.command(D, init);
    assert_eq!(pair.released(P, ghost), [list(&[1])]);
    assert_eq!(pair.released(D, ghost), [list(&[2])]);
    pair.input(P, Input::Timeout);
}

#[test]
fn a_receiver_that_is_served_again_after_a_broken_connection_counts_once() {
    let mut pair = Pair::new();
    let auto = SessionOptions { mode: Some(TransferMode::Auto), ..SessionOptions::default() };
    let sender = pair.open_sender_with(ROOM, 2, auto);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[4]);
    let first = pair.open_receiver(ROOM);
    pair.init_receiver(first, &[7], None);
    // What the first would hear of its success is lost, and then the connection.
    pair.lose(|body| matches!(body, Body::Done(_) | Body::Progress(_)));
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

#[test]
fn pages_that_are_written_are_under_no_lease_however_long_it_takes() {
    let mut pair = Pair::new();
    let options = SessionOptions { mode: Some(TransferMode::Push), ..SessionOptions::default() };
    let sender = pair.open_sender_with(ROOM, 1, options);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[1, 3]);
    assert_eq!(pair.node(P).gauges().pages_leased, 0);
    pair.run_for(Duration::from_secs(60));
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[7, 9], None);
    assert!(pair.posts() > 0);
    pair.run_for(Duration::from_secs(60));
    assert_eq!((pair.poll(P, sender), pair.released(P, sender)), (KvPoll::Transferring, vec![]));
    assert_eq!(pair.node(P).gauges().pages_leased, 0);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(P, sender), [list(&[1, 3])]);
    pair.assert_empty();
}
