//! What each half of a request is told of the other half over ways that are lost.

use std::time::Duration;

use kv_core::proto::Input;
use kv_core::wire::Body;
use kv_core::{Cause, KvPoll, PeerCause, Room, SessionId, TransportError, WriteFence};

use crate::pair::*;

const SECOND: Duration = Duration::from_secs(1);
const ROOM: Room = Room::Number(5);

/// P3: the prefill worker loses its way to the decode worker, and fails the request. The other one greets it
/// anew, registers again, and waits for a sender that has failed.
#[test]
fn a_receiver_is_told_when_its_sender_has_lost_the_way_to_it() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[1, 2], &[20, 21]);
    for (node, post) in pair.take_posts() {
        pair.complete(node, post, gone());
    }
    // The same without a post that fails.
    let other = Room::Number(6);
    let (waiting, left) = (pair.open_sender(other.clone(), 1), pair.open_receiver(other));
    pair.init_receiver(left, &[22], None);
    pair.lose_way(P);
    assert_eq!(pair.failure(P, waiting), Cause::WayLost);
    pair.run_for(SECOND * 60);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed);
    let ended = [receiver, left].map(|session| pair.poll(D, session));
    assert_eq!(ended, [KvPoll::Failed; 2], "its sender has failed a minute ago");
}

/// The same at once: what was in flight is failed by the lost way.
#[test]
fn a_receiver_is_told_in_mid_transfer_that_its_sender_lost_the_way() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[20, 21], None);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[1]);
    pair.complete_posts();
    pair.lose_way(P);
    assert_eq!(pair.failure(P, sender), Cause::WayLost);
    pair.run_for(SECOND * 60);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "its sender has failed a minute ago");
}

fn gone() -> Result<(), TransportError> {
    Err(TransportError::PeerGone)
}

/// A request whose sender fails in mid-write, because the way is broken: the messages for which `lose` says true are lost.
/// Returns the receiver.
fn failed_by_a_post(pair: &mut Pair, lose: impl FnMut(&Body) -> bool + 'static) -> SessionId {
    let (sender, receiver) = pair.transferring(ROOM, &[1, 2], &[20, 21]);
    pair.lose(lose);
    for (node, post) in pair.take_posts() {
        pair.complete(node, post, gone());
    }
    assert_eq!(pair.failure(P, sender), Cause::Post(TransportError::PeerGone));
    pair.lose(|_| false);
    receiver
}

/// The same room once more, first at the receiver.
fn serves_again(pair: &mut Pair) {
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[24, 25], None);
    pair.run_for(SECOND * 5);
    let sender = pair.open_sender(ROOM, 1);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[3, 4]);
    both_succeed(pair, sender, receiver);
}

fn both_succeed(pair: &mut Pair, sender: SessionId, receiver: SessionId) {
    for _ in 0..20 {
        pair.complete_posts();
        pair.run_for(SECOND / 2);
    }
    assert_eq!([pair.poll(P, sender), pair.poll(D, receiver)], [KvPoll::Success; 2]);
}

#[test]
fn a_receiver_is_told_of_a_sender_that_failed_by_a_post_when_the_way_was_already_broken() {
    let mut pair = Pair::new();
    let receiver = failed_by_a_post(&mut pair, |_| true);
    pair.lose_way(P);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "its sender has failed ten seconds ago");
    serves_again(&mut pair);
    pair.assert_empty();
}

#[test]
fn a_receiver_is_told_of_the_failure_although_the_way_is_lost_again_and_again() {
    let mut pair = Pair::new();
    let receiver = failed_by_a_post(&mut pair, |_| true);
    pair.lose(|body| matches!(body, Body::Failed(_)));
    for _ in 0..3 {
        pair.lose_way(P);
        pair.run_for(SECOND * 4);
    }
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring, "it has heard nothing");
    pair.lose(|_| false);
    pair.lose_way(P);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    serves_again(&mut pair);
    pair.assert_empty();
}

#[test]
fn a_receiver_succeeds_whose_last_part_was_announced_on_a_way_that_broke() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[1, 2], &[20, 21]);
    pair.lose(|_| true);
    pair.complete_posts();
    assert_eq!(pair.poll(P, sender), KvPoll::Success);
    pair.lose(|_| false);
    pair.lose_way(P);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.poll(D, receiver), KvPoll::Success, "all its bytes are in place");
    pair.assert_empty();
}

/// A failure that the receiver has heard is not remembered: a request of the same room is not refused.
#[test]
fn a_request_is_served_in_a_room_whose_failure_was_heard_before_the_way_was_lost() {
    for lost in [&[P][..], &[D, P], &[P, D]] {
        let mut pair = Pair::new();
        let receiver = failed_by_a_post(&mut pair, |body| !matches!(body, Body::Failed(_)));
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "heard");
        lost.iter().for_each(|&node| pair.lose_way(node));
        serves_again(&mut pair);
        pair.assert_empty();
    }
}

/// The decode worker lives, and ends the way on which the prefill worker greets it, whether the prefill worker hears it over a
/// way of its own or not.
#[test]
fn a_way_that_is_lost_whenever_it_is_open_is_opened_ever_more_rarely() {
    for is_heard in [false, true] {
        let mut pair = Pair::new();
        let receiver = failed_by_a_post(&mut pair, |_| true);
        pair.lose(move |body| !(is_heard && matches!(body, Body::Heartbeat(_))));
        let mut opened = Vec::new();
        for _ in 0..10_000 {
            if pair.has_way(P) {
                opened.push(pair.now());
                pair.lose_way(P);
            }
            pair.run_for(SECOND / 1000);
        }
        assert!((6..=9).contains(&opened.len()), "{opened:?}");

        pair.lose(|_| false);
        pair.run_for(SECOND * 3);
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "told over the way that works");
        pair.transferring(Room::Number(6), &[3], &[22]);
        pair.lose_way(P);
        pair.run_for(SECOND / 4);
        assert!(pair.has_way(P), "the other worker has answered meanwhile");
    }
}

/// The decode worker is gone, and its death is not proven: the prefill worker stops trying to tell it anything.
#[test]
fn a_way_for_a_receiver_that_is_not_heard_is_opened_again_for_a_while_only() {
    let mut pair = Pair::new();
    failed_by_a_post(&mut pair, |_| true);
    pair.lose(|_| true);
    pair.lose_way(P);
    assert!(pair.node(P).gauges().timers > 0);
    pair.pass_without(D, SECOND * 120);
    assert_eq!(pair.node(P).gauges().timers, 0, "for no longer than a failed room is remembered");
}

/// The decode worker stands still, and the way to it breaks meanwhile.
#[test]
fn a_receiver_that_stood_still_while_the_way_broke_is_told_when_it_goes_on() {
    for still in [4, 8, 50] {
        let mut pair = Pair::new();
        let (sender, receiver) = pair.transferring(ROOM, &[1, 2], &[20, 21]);
        pair.pass_without(D, SECOND * 2);
        pair.lose(|_| true);
        for (node, post) in pair.take_posts() {
            pair.complete(node, post, gone());
        }
        assert_eq!(pair.poll(P, sender), KvPoll::Failed);
        pair.lose_way(P);
        pair.pass_without(D, SECOND * still);
        pair.lose(|_| false);
        pair.run_for(SECOND * 20);
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "still for {still} s");
        pair.assert_empty();
    }
}

/// The prefill worker has lost the way and has forgotten the conversation, in which the decode worker registers, and fails.
#[test]
fn a_sender_is_told_of_a_receiver_that_registered_and_failed_in_a_forgotten_conversation() {
    let mut pair = Pair::new();
    let warm = pair.transferring(Room::Number(4), &[1], &[20]);
    pair.complete_posts();
    assert_eq!([pair.poll(P, warm.0), pair.poll(D, warm.1)], [KvPoll::Success; 2]);
    pair.lose_way(P);
    assert_eq!(pair.node(P).gauges().peers, 0, "D is forgotten");
    let (sender, receiver) = (pair.open_sender(ROOM, 1), pair.open_receiver(ROOM));
    pair.init_receiver(receiver, &[21], None);
    pair.run_for(SECOND / 500);
    pair.abort(D, receiver);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted), "it waits for nobody");
    assert_eq!(pair.released(D, receiver), [list(&[21])]);
    pair.assert_empty();
}

/// The decode worker loses its way. A revocable fence ends the conversation here, one within a time when its timer is due,
/// and one at death not at all.
fn lose_way_and_conversation(pair: &mut Pair) {
    pair.lose(|_| true);
    pair.lose_way(D);
    pair.lose(|_| false);
    for (node, peer) in pair.take_revokes() {
        pair.input(node, Input::Revoked { peer });
    }
}

/// The decode worker loses its way while a receiver has yet to be given pages. Whether or not a fence ends the conversation,
/// the sender is told.
#[test]
fn a_sender_is_told_of_a_receiver_that_lost_the_way_before_it_registered() {
    for fence in [WriteFence::AtDeath, WriteFence::Within(SECOND), WriteFence::Revocable] {
        let mut pair = Pair::new();
        pair.fence = fence;
        let sender = failed_unanswered(&mut pair);
        pair.run_for(SECOND * 10);
        assert_eq!(pair.poll(P, sender), KvPoll::Failed, "{fence:?}: it waits for nobody");
        pair.assert_empty();
    }
}

/// The sender has heard that its receiver failed, and only the acknowledgement is lost with the way: what is said again is
/// not for the sender of the next request in the room, whether that sender is opened before or after the new conversation.
#[test]
fn a_failure_that_was_heard_is_not_taken_for_that_of_the_next_request_in_the_room() {
    for later in [false, true] {
        let mut pair = Pair::new();
        pair.fence = WriteFence::Revocable;
        let (first, receiver) = (pair.open_sender(ROOM, 1), pair.open_receiver(ROOM));
        pair.lose(|body| {
            !matches!(body, Body::Hello(_) | Body::Welcome(_) | Body::Register(_) | Body::Abort(_))
        });
        pair.init_receiver(receiver, &[20], None);
        pair.abort(D, receiver);
        assert_eq!(pair.failure(P, first), Cause::ByPeer(PeerCause::Aborted), "heard");
        pair.run_for(SECOND);
        if later {
            lose_way_and_conversation(&mut pair);
            pair.run_for(SECOND * 10);
        }
        let sender = pair.open_sender(ROOM, 1);
        if !later {
            lose_way_and_conversation(&mut pair);
            pair.run_for(SECOND * 10);
        }
        assert_eq!(pair.poll(P, sender), KvPoll::Bootstrapping, "later {later}");
        let receiver = pair.open_receiver(ROOM);
        pair.init_receiver(receiver, &[24], None);
        pair.init_sender(sender, 1, None);
        pair.send(sender, &[3]);
        both_succeed(&mut pair, sender, receiver);
        pair.assert_empty();
    }
}

/// The decode worker has lost its way, and is to tell the prefill worker again that the receiver has failed.
fn failed_unanswered(pair: &mut Pair) -> SessionId {
    let (sender, receiver) = (pair.open_sender(ROOM, 1), pair.open_receiver(ROOM));
    pair.run_for(SECOND / 500);
    lose_way_and_conversation(pair);
    assert_eq!(pair.failure(D, receiver), Cause::WayLost);
    sender
}

/// The same where a revocable fence has ended the conversation.
fn revoked_unanswered() -> (Pair, SessionId) {
    let mut pair = Pair::new();
    pair.fence = WriteFence::Revocable;
    let sender = failed_unanswered(&mut pair);
    (pair, sender)
}

#[test]
fn a_sender_is_told_of_a_failed_receiver_after_the_way_could_not_be_opened_for_a_while() {
    let (mut pair, sender) = revoked_unanswered();
    pair.unreachable = true;
    pair.run_for(SECOND * 20);
    assert_eq!(pair.poll(P, sender), KvPoll::Bootstrapping, "it cannot have heard");
    pair.unreachable = false;
    pair.run_for(SECOND * 5);
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(Cause::WayLost.for_peer()));
    pair.assert_empty();
}

#[test]
fn a_new_session_goes_at_once_to_a_peer_that_is_only_to_be_told_again_of_failures() {
    let (mut pair, sender) = revoked_unanswered();
    pair.unreachable = true;
    pair.run_for(SECOND * 5);
    pair.unreachable = false;
    let receiver = pair.open_receiver(Room::Number(6));
    pair.run_for(SECOND / 2);
    assert_eq!(pair.poll(D, receiver), KvPoll::WaitingForInput);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed, "the failure is told with it");
}

#[test]
fn a_session_that_fails_while_the_peer_is_only_to_be_told_of_others_is_told_too() {
    let (mut pair, _) = revoked_unanswered();
    let room = Room::Number(6);
    let (sender, receiver) = (pair.open_sender(room.clone(), 1), pair.open_receiver(room));
    pair.abort(D, receiver);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted));
    pair.assert_empty();
}

/// An incarnation that is gone has no senders: nobody is told for ever.
#[test]
fn a_peer_that_was_restarted_is_not_told_of_failures_of_before() {
    let (mut pair, _) = revoked_unanswered();
    pair.restart(P);
    pair.run_for(SECOND * 60);
    assert_eq!((pair.node(D).gauges().peers, pair.node(D).gauges().timers), (0, 0));
    // The same of a receiver that failed before the first answer.
    let mut pair = Pair::new();
    pair.lose(|_| true);
    let receiver = pair.open_receiver(ROOM);
    pair.abort(D, receiver);
    pair.restart(P);
    pair.lose(|_| false);
    pair.run_for(SECOND * 60);
    assert_eq!((pair.node(D).gauges().peers, pair.node(D).gauges().timers), (0, 0));
}

#[test]
fn a_peer_that_stays_unreachable_is_not_greeted_for_ever_to_be_told_of_failures() {
    let (mut pair, _) = revoked_unanswered();
    pair.unreachable = true;
    pair.run_for(SECOND * 400);
    assert_eq!((pair.node(D).gauges().peers, pair.node(D).gauges().timers), (0, 0));
}
