//! The permission to write, and how pages come back from a peer that says nothing more.

use std::time::Duration;

use kv_core::wire::Body;
use kv_core::{Cause, KvPoll, Room, SessionId, WriteFence};

use crate::pair::*;

const SECOND: Duration = Duration::from_secs(1);
/// How long a permission lasts.
const PERMISSION: Duration = Duration::from_secs(10);
const ROOM: Room = Room::Number(5);

/// A request of four pages of which the first two are written.
fn half_written(pair: &mut Pair) -> (SessionId, SessionId) {
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[20, 21, 22, 23], None);
    pair.init_sender(sender, 4, None);
    pair.send(sender, &[1, 2]);
    pair.complete_posts();
    (sender, receiver)
}

fn with_fence(fence: WriteFence) -> Pair {
    let mut pair = Pair::new();
    pair.fence = fence;
    pair
}

#[test]
fn a_write_waits_for_the_permission_of_the_pages_owner() {
    let mut pair = Pair::new();
    // The first permission ends while nothing is to be written.
    let (sender, receiver) = half_written(&mut pair);
    pair.send(sender, &[3, 4]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.run_for(PERMISSION * 2);
    pair.hold(|body| matches!(body, Body::HeartbeatAck(answer) if answer.permit_ms > 0));
    let room = Room::Number(6);
    let receiver = pair.open_receiver(room.clone());
    pair.init_receiver(receiver, &[20], None);
    let sender = pair.open_sender(room, 1);
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[7]);
    assert_eq!((pair.poll(P, sender), pair.posts()), (KvPoll::Transferring, 0));
    pair.deliver_held();
    assert_eq!(pair.posts(), 1);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn minutes_of_chunked_prefill_cost_a_question_every_third_of_a_permission() {
    let mut pair = Pair::new();
    let asked = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = std::rc::Rc::clone(&asked);
    pair.lose(move |body| {
        count.set(count.get() + usize::from(matches!(body, Body::Heartbeat(asks) if asks.writes)));
        false
    });
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &(0..8).collect::<Vec<_>>(), None);
    pair.init_sender(sender, 8, None);
    for page in 0..8 {
        pair.send(sender, &[page]);
        assert_eq!(pair.posts(), 1, "nothing waits: the permission was renewed");
        pair.complete_posts();
        pair.run_for(SECOND * 20);
    }
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    let questions = 140 * 3 / 10;
    assert!((questions - 4..=questions + 4).contains(&asked.get()), "{} questions", asked.get());
    pair.assert_empty();
}

#[test]
fn a_permission_counts_from_the_question_however_late_its_answer_comes() {
    let mut pair = Pair::new();
    half_written(&mut pair);
    // One question comes through, and its answer takes six seconds.
    let asked = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = std::rc::Rc::clone(&asked);
    pair.lose(move |body| {
        count.set(count.get() + usize::from(matches!(body, Body::Heartbeat(asks) if asks.writes)));
        matches!(body, Body::Heartbeat(asks) if asks.writes) && count.get() > 1
    });
    pair.hold(|body| matches!(body, Body::HeartbeatAck(answer) if answer.permit_ms > 0));
    let step = SECOND / 10;
    while asked.get() == 0 {
        pair.run_for(step);
    }
    let before = pair.now();
    pair.run_for(SECOND * 6);
    pair.deliver_held();
    let (until, length) = (pair.permit(P).unwrap(), PERMISSION - PERMISSION / 32);
    assert!(until <= before + length && until + step >= before + length, "{before:?} {until:?}");
}

#[test]
fn a_lost_way_gives_no_page_back_where_only_death_ends_writes() {
    let mut pair = with_fence(WriteFence::AtDeath);
    let (sender, receiver) = half_written(&mut pair);
    pair.send(sender, &[3]);
    // P's write is in flight when D loses its way; a new one cannot be opened for a while.
    pair.unreachable = true;
    pair.lose_way(D);
    assert_eq!(pair.failure(D, receiver), Cause::WayLost);
    pair.run_for(SECOND * 300);
    assert!(pair.released(D, receiver).is_empty(), "the peer may be writing still");
    assert!(pair.posts() > 0);
    // Over a new way the peer says when it has stopped.
    pair.unreachable = false;
    pair.run_for(SECOND * 5);
    assert!(pair.released(D, receiver).is_empty());
    pair.complete_posts();
    pair.run_for(SECOND * 5);
    assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed);
    pair.assert_empty();
}

#[test]
fn pages_of_a_lost_way_return_after_permission_and_hardware_bound() {
    let bound = SECOND * 3;
    // However long peers may be silent.
    for peer_timeout in [5, 60] {
        let mut pair = Pair::with(|config| config.timing.peer_timeout = SECOND * peer_timeout);
        pair.fence = WriteFence::Within(bound);
        let (sender, receiver) = half_written(&mut pair);
        let permitted = pair.permit(P).unwrap();
        pair.unreachable = true;
        pair.lose(|_| true);
        pair.lose_way(D);
        let mut released_at = None;
        for _ in 0..40 {
            pair.run_for(SECOND);
            if released_at.is_none() && !pair.released(D, receiver).is_empty() {
                released_at = Some(pair.now());
            }
            if pair.now() > permitted && pair.poll(P, sender) == KvPoll::Transferring {
                pair.send(sender, &[3]);
                assert_eq!(pair.posts(), 0, "no write begins after the permission");
            }
        }
        let released_at = released_at.expect("pages come back");
        assert!(released_at >= permitted + bound && released_at <= permitted + bound + SECOND * 3);
    }
}

#[test]
fn a_sender_heard_again_before_the_fence_keeps_what_later_requests_let_it_write() {
    let bound = SECOND * 30;
    let mut pair = with_fence(WriteFence::Within(bound));
    let (_, receiver) = half_written(&mut pair);
    pair.lose(|_| true);
    pair.run_for(SECOND * 7);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    assert_eq!(pair.released(D, receiver), [], "the permission has not ended");
    // P is heard again, and says that it has stopped.
    pair.lose(|_| false);
    pair.run_for(SECOND * 5);
    assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
    // It writes for the next request when the time of the first one's fence comes.
    let (_, later) = pair.transferring(Room::Number(6), &[1], &[20]);
    assert!(pair.posts() > 0);
    pair.run_for(bound * 2);
    assert_eq!(pair.released(D, later), [], "the peer is writing still");
    pair.complete_posts();
    assert_eq!(pair.poll(D, later), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn a_prefill_worker_resumed_after_its_permission_writes_nothing() {
    let mut pair = with_fence(WriteFence::Within(SECOND));
    let (sender, receiver) = half_written(&mut pair);
    pair.unreachable = true;
    pair.lose(|_| true);
    pair.lose_way(D);
    pair.pass_without(P, SECOND * 25);
    assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
    // Its silence is forgiven, its permission is not longer for that.
    pair.send(sender, &[3, 4]);
    assert_eq!(pair.posts(), 0, "D has given these pages back");
    pair.run_for(SECOND * 20);
    assert_eq!((pair.posts(), pair.poll(P, sender)), (0, KvPoll::Failed));
}

#[test]
fn a_silent_peer_is_revoked_and_its_pages_come_back_when_that_is_certain() {
    for lost in [true, false] {
        let mut pair = with_fence(WriteFence::Revocable);
        let (sender, receiver) = half_written(&mut pair);
        // P is stopped in the middle of a write.
        pair.send(sender, &[3]);
        if lost {
            pair.lose_way(D);
        }
        pair.pass_without(P, SECOND * 7);
        assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
        let revokes = pair.take_revokes();
        assert!(matches!(revokes[..], [(D, _)]), "{revokes:?}");
        pair.pass_without(P, SECOND * 60);
        assert!(pair.released(D, receiver).is_empty(), "the write may go on");
        assert_eq!(pair.take_revokes(), [], "once is enough");
        let (_, peer) = revokes[0];
        pair.input(D, kv_core::proto::Input::Revoked { peer });
        assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
        // P goes on, and its transport tells it that the right is gone.
        let (node, post) = pair.take_posts().remove(0);
        pair.complete(node, post, Err(kv_core::TransportError::Revoked));
        assert_eq!(pair.failure(P, sender), Cause::Post(kv_core::TransportError::Revoked));
        // They meet again, and the next request is served.
        pair.deliver_held();
        pair.run_for(SECOND * 10);
        let room = Room::Number(9);
        let receiver = pair.open_receiver(room.clone());
        pair.init_receiver(receiver, &[20], None);
        let sender = pair.open_sender(room, 1);
        pair.init_sender(sender, 1, None);
        pair.send(sender, &[7]);
        pair.run_for(SECOND);
        pair.complete_posts();
        assert_eq!(pair.poll(D, receiver), KvPoll::Success);
        pair.assert_empty();
    }
}

#[test]
fn a_later_permission_never_covers_pages_that_were_taken_back() {
    for fence in [WriteFence::Within(SECOND), WriteFence::Revocable] {
        let mut pair = with_fence(fence);
        let (sender, receiver) = half_written(&mut pair);
        // P is stopped, and nothing that D says meanwhile reaches it.
        pair.lose(|_| true);
        pair.pass_without(P, SECOND * 25);
        for (_, peer) in pair.take_revokes() {
            pair.input(D, kv_core::proto::Input::Revoked { peer });
        }
        assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])], "{fence:?}");
        pair.lose(|_| false);
        // D asks for another request, for which P is permitted to write again.
        let room = Room::Number(6);
        let other = pair.open_receiver(room.clone());
        pair.init_receiver(other, &[30], None);
        pair.run_for(SECOND * 5);
        let next = pair.open_sender(room, 1);
        pair.init_sender(next, 1, None);
        pair.send(next, &[7]);
        pair.run_for(SECOND * 5);
        pair.send(sender, &[3, 4]);
        let written = pair.take_posts();
        let there = |(_, post): &(usize, kv_core::Post)| {
            post.descriptors.iter().map(|descriptor| descriptor.remote_offset / 64).collect::<Vec<_>>()
        };
        assert_eq!(
            written.iter().map(there).collect::<Vec<_>>(),
            [[30, 30]],
            "{fence:?}: D gave back 22 and 23"
        );
        for (node, post) in written {
            pair.complete(node, post, Ok(()));
        }
        assert_eq!(pair.poll(D, other), KvPoll::Success);
        assert_eq!(pair.failure(P, sender), Cause::PeerRestarted);
        pair.assert_empty();
    }
}

/// A request that has failed, whose abort does not reach the sender, and another one that is sent after the permission has
/// ended.
fn sent_after_an_unheard_abort(pair: &mut Pair) -> (SessionId, SessionId) {
    let (_, receiver) = half_written(pair);
    pair.lose(|body| matches!(body, Body::Abort(_)));
    pair.abort(D, receiver);
    let room = Room::Number(6);
    let other = pair.open_receiver(room.clone());
    pair.init_receiver(other, &[30], None);
    let sender = pair.open_sender(room, 1);
    pair.init_sender(sender, 1, None);
    pair.run_for(PERMISSION);
    pair.send(sender, &[7]);
    (receiver, other)
}

#[test]
fn a_peer_that_has_not_acknowledged_an_abort_gets_no_permission() {
    for fence in [WriteFence::Within(SECOND), WriteFence::Revocable] {
        let mut pair = with_fence(fence);
        let (receiver, other) = sent_after_an_unheard_abort(&mut pair);
        assert_eq!(pair.posts(), 0, "{fence:?}: an unacknowledged abort bars every renewal");
        // Once the abort has come through, the other request goes on.
        pair.lose(|_| false);
        pair.run_for(SECOND * 10);
        pair.complete_posts();
        assert_eq!(pair.poll(D, other), KvPoll::Success);
        assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
        pair.assert_empty();
    }
}

#[test]
fn other_requests_go_on_where_only_the_acknowledgement_of_an_abort_gives_pages_back() {
    let mut pair = with_fence(WriteFence::AtDeath);
    let (receiver, other) = sent_after_an_unheard_abort(&mut pair);
    assert_eq!(pair.posts(), 1);
    pair.complete_posts();
    assert_eq!(pair.poll(D, other), KvPoll::Success);
    assert_eq!(pair.released(D, receiver), [], "pages that the peer may still write have come back");
    pair.lose(|_| false);
    pair.run_for(SECOND * 10);
    assert_eq!(pair.released(D, receiver), [list(&[20, 21, 22, 23])]);
    pair.assert_empty();
}

#[test]
fn an_answer_to_a_question_of_a_conversation_that_is_over_permits_nothing() {
    let mut pair = with_fence(WriteFence::Within(SECOND));
    half_written(&mut pair);
    let asks = |body: &Body| matches!(body, Body::Heartbeat(asks) if asks.writes);
    let number = |body: &Body| if let Body::Heartbeat(asks) = body { asks.number } else { 0 };
    // The last questions of a conversation are long under way.
    let old = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = std::rc::Rc::clone(&old);
    pair.hold(move |body| {
        count.set(if asks(body) { number(body) } else { count.get() });
        asks(body)
    });
    pair.run_for(SECOND * 14);
    assert!(old.get() > 0);
    // The sender's side of the conversation is lost, and another one begins, whose questions are lost.
    let new = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = std::rc::Rc::clone(&new);
    pair.lose(move |body| {
        count.set(if asks(body) { number(body) } else { count.get() });
        asks(body)
    });
    pair.lose_way(P);
    pair.run_for(SECOND * 10);
    let room = Room::Number(6);
    let receiver = pair.open_receiver(room.clone());
    pair.init_receiver(receiver, &[10, 11], None);
    let sender = pair.open_sender(room, 1);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[7]);
    // The old questions arrive, and their answers are long under way.
    pair.deliver_held_and_hold(|body| matches!(body, Body::HeartbeatAck(answer) if answer.permit_ms > 0));
    pair.run_for(PERMISSION * 2);
    assert!(new.get() > old.get());
    // The receiver loses its way, and waits for what the hardware may still have under way by what it has permitted.
    pair.unreachable = true;
    pair.lose(|_| true);
    pair.lose_way(D);
    pair.run_for(SECOND);
    assert_eq!(pair.released(D, receiver), [list(&[10, 11])]);
    pair.deliver_held();
    let until = pair.permit(P).unwrap();
    assert!(until <= pair.now(), "the pages are back at {:?}, and are written until {until:?}", pair.now());
}
