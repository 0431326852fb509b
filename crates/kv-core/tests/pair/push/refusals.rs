//! Requests that do not fit the peer, the cache or the limits, and what the two sides are told.

use kv_core::proto::{Command, Input};
use kv_core::{AuxIndex, Cause, KvPoll, PeerCause, Room, SessionId};

use super::ROOM;
use crate::pair::{D, P, Pair, list, pages};

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
fn registrations_are_bounded_and_the_excess_is_told() {
    let mut pair =
        Pair::with(|config| (config.limits.max_registrations, config.limits.connections_share) = (2, 1));
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
fn pages_given_a_second_time_fail_an_open_receiver_and_change_nothing_of_one_that_has_succeeded() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(Room::Number(1), &[1], &[2]);
    pair.init_receiver(receiver, &[9], None);
    assert_eq!(pair.failure(D, receiver), Cause::InitOrder);
    assert_eq!(pair.released(D, receiver), [list(&[9])], "a write into the first pages is in flight");
    pair.complete_posts();
    assert_eq!(pair.released(D, receiver), [list(&[9]), list(&[2])]);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed);
    let (sender, receiver) = pair.transferring(Room::Number(2), &[1], &[2]);
    pair.complete_posts();
    pair.init_receiver(receiver, &[9], None);
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(D, receiver), [list(&[2]), list(&[9])]);
    pair.assert_empty();
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
fn unknown_sessions_get_their_pages_straight_back() {
    let mut pair = Pair::new();
    let ghost = SessionId(999);
    pair.command(P, Command::Send { session: ghost, chunk: pages(&[1]) });
    let init = Command::InitReceiver { session: ghost, pages: pages(&[2]), aux: Some(AuxIndex(0)) };
    pair.command(D, init);
    assert_eq!(pair.released(P, ghost), [list(&[1])]);
    assert_eq!(pair.released(D, ghost), [list(&[2])]);
    pair.input(P, Input::Timeout);
}
