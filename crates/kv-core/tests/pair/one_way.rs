//! Ways that break in one direction only, hosts that stop, and rooms that differ by a suffix.

use std::time::Duration;

use kv_core::proto::{Command, Input};
use kv_core::{KvPoll, PeerId, Room, SessionId, WayEnd};

use crate::pair::{D, P, Pair, pages};

const SECOND: Duration = Duration::from_secs(1);

/// A request of four pages, of which the first two are written. D's way to P is lost, and whatever either
/// says gets lost from now on; P has noticed nothing.
fn half_written(mut pair: Pair) -> (Pair, SessionId, SessionId) {
    let sender = pair.open_sender(Room::Number(5), 1);
    let receiver = pair.open_receiver(Room::Number(5));
    pair.init_receiver(receiver, &[20, 21, 22, 23], None);
    pair.init_sender(sender, 4, None);
    pair.send(sender, &[1, 2]);
    pair.complete_posts();
    pair.lose(|_| true);
    pair.input(D, Input::PeerGone { peer: PeerId(0), end: WayEnd::Lost });
    (pair, sender, receiver)
}

#[test]
fn pages_stay_while_the_way_is_lost_on_this_side_only_however_patient_the_peer_is() {
    for peer_timeout in [5, 60] {
        let pair = Pair::with(|config| config.timing.peer_timeout = Duration::from_secs(peer_timeout));
        let (mut pair, sender, receiver) = half_written(pair);
        for second in 0..90 {
            pair.run_for(SECOND);
            assert!(pair.released(D, receiver).is_empty(), "{second} s later, with nobody's word");
            if second == 30 && pair.poll(P, sender) != KvPoll::Failed {
                pair.send(sender, &[3, 4]);
            }
        }
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    }
}

#[test]
fn a_sender_that_was_stopped_writes_nothing_into_pages_that_were_given_back() {
    let (mut pair, sender, receiver) = half_written(Pair::new());
    for _ in 0..60 {
        pair.pass_without(P, SECOND);
    }
    let given_back = !pair.released(D, receiver).is_empty();
    let before = pair.posts();
    pair.input(P, Input::Command(Command::Send { session: sender, chunk: pages(&[3, 4]) }));
    assert!(!given_back || pair.posts() == before, "it posts into pages that were given back");
    assert_eq!(pair.posts(), before, "its permission has ended");
}

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
        for desc in &post.descs {
            let (from, to) = (desc.local_offset / 64, desc.remote_offset / 64);
            assert_eq!((10..12).contains(&from), (22..24).contains(&to), "page {from} is written to {to}");
        }
        pair.complete(node, post, Ok(()));
    }
    for (node, session) in [(P, sender_one), (P, sender_two), (D, receiver_one), (D, receiver_two)] {
        assert_eq!(pair.poll(node, session), KvPoll::Success);
    }
}
