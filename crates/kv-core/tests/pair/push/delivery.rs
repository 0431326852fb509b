//! Pages on their way: rendezvous in any order, chunks, aux rows, several receivers.

use std::time::Duration;

use kv_core::{Cause, KvPoll, PeerCause, Room, SessionOptions, TransferMode};

use super::ROOM;
use crate::pair::{D, P, Pair, list};

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
        post.descriptors.iter().map(|d| (d.local_region, d.local_offset, d.remote_offset, d.len)).collect();
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
fn request_ids_match_without_the_suffixes_that_both_engines_say_they_add() {
    let mut pair = Pair::suffixing();
    let stranger = pair.open_sender(Room::request("cmpl-1-0-aaaaaaaa").unwrap(), 1);
    let exact = pair.open_sender(Room::request("cmpl-1-0-bbbbbbbb").unwrap(), 1);
    let receiver = pair.open_receiver(Room::request("cmpl-1-0-bbbbbbbb").unwrap());
    pair.init_receiver(receiver, &[0], None);
    assert_eq!(pair.poll(P, exact), KvPoll::WaitingForInput);
    pair.init_sender(exact, 1, None);
    pair.send(exact, &[7]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    let receiver = pair.open_receiver(Room::request("cmpl-1-0-cccccccc").unwrap());
    pair.init_receiver(receiver, &[1], None);
    assert_eq!(pair.poll(P, stranger), KvPoll::WaitingForInput);
    let other = pair.open_receiver(Room::request("cmpl-2-0-cccccccc").unwrap());
    pair.init_receiver(other, &[2], None);
    assert_eq!(pair.node(P).gauges().registrations, 1);
}

#[test]
fn two_requests_whose_ids_end_like_suffixes_never_get_each_others_pages() {
    let mut pair = Pair::new();
    let rooms = ["batch-00000001", "batch-00000002"].map(|id| Room::request(id).unwrap());
    // The prefill side has begun with one request, the decode side with the other.
    let sender_one = pair.open_sender(rooms[0].clone(), 1);
    pair.init_sender(sender_one, 2, None);
    pair.send(sender_one, &[10, 11]);
    let receiver_two = pair.open_receiver(rooms[1].clone());
    pair.init_receiver(receiver_two, &[20, 21], None);
    assert_eq!(pair.posts(), 0, "nothing is moved between two requests");
    let sender_two = pair.open_sender(rooms[1].clone(), 1);
    pair.init_sender(sender_two, 2, None);
    pair.send(sender_two, &[12, 13]);
    assert_eq!(pair.posts_touching(12), 1);
    let receiver_one = pair.open_receiver(rooms[0].clone());
    pair.init_receiver(receiver_one, &[22, 23], None);
    assert_eq!(pair.posts_touching(10), 1);
    pair.complete_posts();
    for (node, session) in [(P, sender_one), (P, sender_two), (D, receiver_one), (D, receiver_two)] {
        assert_eq!(pair.poll(node, session), KvPoll::Success);
    }
    pair.assert_empty();
}

#[test]
fn a_room_that_could_mean_two_requests_fails_all_three_with_both_ids_named() {
    let mut pair = Pair::suffixing();
    let rooms = ["r-aaaaaaaa", "r-bbbbbbbb", "r-cccccccc"].map(|id| Room::request(id).unwrap());
    let [one, other, _] = &rooms;
    let senders = [one, other].map(|room| pair.open_sender(room.clone(), 1));
    let receiver = pair.open_receiver(rooms[2].clone());
    pair.init_receiver(receiver, &[20], None);
    let told = PeerCause::AmbiguousRoom { room: one.clone(), other: other.clone() };
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(told));
    let cause = |room: &Room, other: &Room| Cause::AmbiguousRoom { room: room.clone(), other: other.clone() };
    assert_eq!(pair.failure(P, senders[0]), cause(one, other));
    assert_eq!(pair.failure(P, senders[1]), cause(other, one));

    // The same, where the receivers come first.
    let receivers = [one, other].map(|room| pair.open_receiver(room.clone()));
    assert_eq!(pair.failure(D, receivers[1]), cause(other, one), "two requests of one engine");
    pair.init_receiver(receivers[0], &[20], None);
    pair.abort(D, receivers[0]);
    pair.assert_empty();
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
    let mut moves: Vec<_> = posts
        .iter()
        .flat_map(|(_, post)| &post.descriptors)
        .filter(|descriptor| descriptor.local_region == 1)
        .collect();
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
fn a_request_of_no_pages_still_carries_its_aux_row() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[], Some(1));
    pair.init_sender(sender, 0, Some(3));
    assert_eq!(pair.posts(), 0, "the aux row is final only with the last chunk");
    pair.send(sender, &[]);
    let post = pair.only_post();
    assert_eq!(post.descriptors.len(), 1);
    assert_eq!((post.descriptors[0].local_offset, post.descriptors[0].remote_offset), (3 * 16, 16));
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn two_receivers_of_one_sender_both_get_all_pages() {
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
fn pushed_pages_are_under_no_lease_however_long_writes_take() {
    let mut pair = Pair::new();
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push));
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
