//! Requests whose ids are alike.

use kv_core::{KvPoll, Room};

use crate::pair::{D, P, Pair};

#[test]
fn two_requests_whose_ids_differ_by_their_last_digits_are_two_requests() {
    let mut pair = Pair::new();
    let rooms = ["batch-00000001", "batch-00000002"].map(|id| Room::request(id).unwrap());
    let [one, two] = rooms.clone();
    let sender_one = pair.open_sender(one.clone(), 1);
    pair.init_sender(sender_one, 2, None);
    pair.send(sender_one, &[10, 11]);
    let receiver_two = pair.open_receiver(two.clone());
    pair.init_receiver(receiver_two, &[20, 21], None);
    assert_eq!(pair.posts(), 0, "one request is written into the pages of the other");
    let sender_two = pair.open_sender(two, 1);
    pair.init_sender(sender_two, 2, None);
    pair.send(sender_two, &[12, 13]);
    let receiver_one = pair.open_receiver(one);
    pair.init_receiver(receiver_one, &[22, 23], None);
    // Whatever is written goes from a request's pages to the same request's.
    while let Some((node, post)) = pair.take_first() {
        for descriptor in &post.descriptors {
            let (from, to) = (descriptor.local_offset / 64, descriptor.remote_offset / 64);
            assert_eq!((10..12).contains(&from), (22..24).contains(&to), "page {from} is written to {to}");
        }
        pair.complete(node, post, Ok(()));
    }
    for (node, session) in [(P, sender_one), (P, sender_two), (D, receiver_one), (D, receiver_two)] {
        assert_eq!(pair.poll(node, session), KvPoll::Success);
    }
}
