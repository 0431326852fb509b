//! A worker drains: what is open ends as ever, and what comes too late is refused at once.

use std::time::Duration;

use kv_core::proto::{Command, Spoken};
use kv_core::wire::{Body, VERSIONS, Versions};
use kv_core::{Cause, KvPoll, PeerCause, Room, SessionId, SessionOptions, TransferMode};

use crate::pair::{D, P, Pair, list};

const OPEN: Room = Room::Number(1);
const LATE: Room = Room::Number(2);

fn drain(pair: &mut Pair, node: usize) {
    pair.command(node, Command::Drain);
}

fn mode(mode: TransferMode) -> SessionOptions {
    SessionOptions::default().with(|options| options.mode = Some(mode))
}

#[test]
fn sessions_that_are_open_when_a_worker_drains_end_as_ever_on_either_side_in_push_and_pull() {
    for node in [P, D] {
        for moves in [TransferMode::Push, TransferMode::Pull] {
            let mut pair = Pair::new();
            let sender = pair.open_sender_with(OPEN, 1, mode(moves));
            pair.init_sender(sender, 2, None);
            let receiver = pair.open_receiver_with(OPEN, mode(moves));
            drain(&mut pair, node);
            // Both sides are given their pages after the drain has begun.
            pair.send(sender, &[3, 4]);
            pair.init_receiver(receiver, &[0, 1], None);
            pair.complete_posts();
            pair.run_for(Duration::from_secs(1));
            assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
            assert_eq!(pair.released(P, sender), [list(&[3, 4])]);
            assert_eq!(pair.released(D, receiver), [list(&[0, 1])]);
            pair.assert_empty();
        }
    }
}

#[test]
fn a_sender_that_waits_when_its_worker_drains_is_met_by_a_receiver_that_comes_later() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(OPEN, 1);
    drain(&mut pair, P);
    assert!(pair.node(P).awaits_peers(), "its receiver must find the worker");
    let receiver = pair.open_receiver(OPEN);
    assert!(pair.node(P).awaits_peers(), "and has not registered");
    pair.init_receiver(receiver, &[0], None);
    assert!(!pair.node(P).awaits_peers());
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[5]);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
}

#[test]
fn receivers_without_a_sender_are_refused_at_once_whether_they_waited_or_come_later() {
    for moves in [TransferMode::Push, TransferMode::Pull] {
        let mut pair = Pair::new();
        let waiting = pair.open_receiver_with(OPEN, mode(moves));
        pair.init_receiver(waiting, &[0, 1], None);
        assert_eq!(pair.node(P).gauges().registrations, 1);
        drain(&mut pair, P);
        let late = pair.open_receiver_with(LATE, mode(moves));
        pair.init_receiver(late, &[2], None);
        // No time has passed.
        for (receiver, pages) in [(waiting, list(&[0, 1])), (late, list(&[2]))] {
            assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::WorkerStopped));
            assert_eq!(pair.released(D, receiver), [pages]);
        }
        assert_eq!(pair.node(P).gauges().registrations, 0);
        pair.run_for(Duration::from_secs(3));
        pair.assert_empty();
    }
}

#[test]
fn a_session_that_is_opened_after_the_drain_fails_and_gives_its_pages_back() {
    for node in [P, D] {
        let mut pair = Pair::new();
        drain(&mut pair, node);
        let (session, given) = match node {
            P => {
                let sender = pair.open_sender(LATE, 1);
                pair.init_sender(sender, 1, None);
                pair.send(sender, &[3]);
                (sender, list(&[3]))
            }
            _ => {
                let receiver = pair.open_receiver(LATE);
                pair.init_receiver(receiver, &[2], None);
                (receiver, list(&[2]))
            }
        };
        assert_eq!(pair.failure(node, session), Cause::Draining);
        assert_eq!(pair.released(node, session), [given]);
        pair.assert_empty();
    }
}

#[test]
fn a_peer_that_was_refused_asks_the_bootstrap_server_anew_for_each_later_request() {
    let mut pair = Pair::new();
    let (first, second) = (pair.open_receiver(OPEN), pair.open_receiver(LATE));
    for (receiver, page) in [(first, 0), (second, 1)] {
        pair.init_receiver(receiver, &[page], None);
    }
    assert_eq!(pair.node(D).gauges().addresses, 1, "one answer serves all requests");
    drain(&mut pair, P);
    assert_eq!(pair.failure(D, first), Cause::ByPeer(PeerCause::WorkerStopped));
    assert_eq!(pair.node(D).gauges().addresses, 0);
    let third = pair.open_receiver(Room::Number(3));
    pair.init_receiver(third, &[2], None);
    assert_eq!(pair.failure(D, third), Cause::ByPeer(PeerCause::WorkerStopped));
    assert_eq!(pair.node(D).gauges().addresses, 0, "an answer that names the worker is used once");
}

/// A request that is served while P drains; the messages for which `lose` says true are lost. Returns the receiver.
fn served_unheard(pair: &mut Pair, lose: impl FnMut(&Body) -> bool + 'static) -> SessionId {
    let (sender, receiver) = pair.transferring(OPEN, &[3], &[0]);
    drain(pair, P);
    pair.lose(lose);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Transferring));
    receiver
}

/// Nothing is lost any more: the receiver hears of its success, and P owes nothing then.
fn is_told(pair: &mut Pair, receiver: SessionId) {
    assert!(pair.node(P).owes_answers(), "stopping it now would fail the receiver");
    pair.lose(|_| false);
    pair.run_for(Duration::from_secs(3));
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    assert!(!pair.node(P).owes_answers());
    pair.assert_empty();
}

#[test]
fn a_served_request_is_owed_until_its_peer_has_heard_of_it() {
    let mut pair = Pair::new();
    let receiver = served_unheard(&mut pair, |body| matches!(body, Body::Progress(_)));
    is_told(&mut pair, receiver);
}

/// The last message is lost with the way: the next way brings it, unless the worker is stopped before.
#[test]
fn a_served_request_is_owed_also_while_the_way_to_its_peer_is_lost() {
    let mut pair = Pair::new();
    let receiver = served_unheard(&mut pair, |_| true);
    pair.lose_way(P);
    is_told(&mut pair, receiver);
}

#[test]
fn a_peer_that_cannot_be_reached_any_more_is_owed_nothing_after_a_while() {
    let mut pair = Pair::new();
    served_unheard(&mut pair, |_| true);
    pair.unreachable = true;
    pair.lose_way(P);
    pair.pass_without(D, Duration::from_secs(1));
    assert!(pair.node(P).owes_answers());
    pair.pass_without(D, Duration::from_secs(30));
    assert!(!pair.node(P).owes_answers(), "a drain does not wait for it");
    assert_eq!(pair.node(P).gauges().owed, 0);
}

#[test]
fn a_peer_that_was_restarted_is_owed_nothing_once_its_next_life_has_answered() {
    let mut pair = Pair::new();
    served_unheard(&mut pair, |_| true);
    pair.restart(D);
    pair.lose(|_| false);
    pair.lose_way(P);
    pair.run_for(Duration::from_secs(1));
    assert!(!pair.node(P).owes_answers(), "no receiver of the former life waits");
    pair.assert_empty();
}

/// The receiver was given no pages, so that nothing but the acknowledgement keeps its worker.
#[test]
fn an_abort_is_owed_until_the_sender_that_waits_in_vain_has_acknowledged_it() {
    let mut pair = Pair::new();
    pair.transferring(OPEN, &[3], &[0]);
    pair.complete_posts();
    let sender = pair.open_sender(LATE, 1);
    let receiver = pair.open_receiver(LATE);
    drain(&mut pair, D);
    pair.lose(|body| matches!(body, Body::Abort(_)));
    pair.abort(D, receiver);
    assert_eq!(pair.failure(D, receiver), Cause::Aborted);
    assert!(pair.node(D).owes_answers() && !pair.poll(P, sender).is_terminal());
    pair.lose(|_| false);
    pair.run_for(Duration::from_secs(3));
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted));
    assert!(!pair.node(D).owes_answers());
}

/// The refusal is the one that every release of this version of the wire has told when it was stopping.
#[test]
fn a_worker_that_drains_serves_and_refuses_peers_of_the_versions_before_and_after() {
    let before = Versions { min: VERSIONS.min - 1, max: VERSIONS.max };
    let after = Versions { min: VERSIONS.max, max: VERSIONS.max + 2 };
    for (prefill, decode) in [(VERSIONS, before), (before, VERSIONS), (VERSIONS, after), (after, VERSIONS)] {
        let mut pair = Pair::with(|config| {
            let is_prefill = config.args.worker().engine.as_str() == "prefill";
            config.versions = Spoken::of_another_library(if is_prefill { prefill } else { decode });
        });
        let (sender, receiver) = pair.transferring(OPEN, &[3, 4], &[0, 1]);
        drain(&mut pair, P);
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        let late = pair.open_receiver(LATE);
        pair.init_receiver(late, &[2], None);
        assert_eq!(pair.failure(D, late), Cause::ByPeer(PeerCause::WorkerStopped), "{prefill} {decode}");
        for node in [P, D] {
            assert_eq!(pair.node(node).gauges().dropped.total(), 0);
        }
    }
}

#[test]
fn a_sender_whose_receiver_never_comes_is_awaited_until_its_deadline_and_no_longer() {
    let mut pair = Pair::new();
    let deadline = Duration::from_secs(7);
    let sender = pair.open_sender_with(
        OPEN,
        1,
        SessionOptions::default().with(|options| options.deadline = Some(deadline)),
    );
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[4]);
    drain(&mut pair, P);
    pair.run_for(deadline - Duration::from_millis(100));
    assert!(pair.node(P).awaits_peers());
    assert!(!pair.poll(P, sender).is_terminal());
    pair.run_for(Duration::from_millis(200));
    assert!(matches!(pair.failure(P, sender), Cause::DeadlineExceeded { .. }));
    assert_eq!(pair.released(P, sender), [list(&[4])]);
    assert!(!pair.node(P).awaits_peers() && !pair.node(P).owes_answers());
}

#[test]
fn a_receiver_that_is_aborted_while_the_sender_drains_frees_the_pages_of_both() {
    for (node, moves) in
        [(P, TransferMode::Push), (D, TransferMode::Push), (P, TransferMode::Pull), (D, TransferMode::Pull)]
    {
        let mut pair = Pair::new();
        let sender = pair.open_sender_with(OPEN, 1, mode(moves));
        pair.init_sender(sender, 2, None);
        let receiver = pair.open_receiver_with(OPEN, mode(moves));
        pair.init_receiver(receiver, &[0, 1], None);
        drain(&mut pair, node);
        pair.abort(D, receiver);
        pair.send(sender, &[3, 4]);
        pair.complete_posts();
        pair.run_for(Duration::from_secs(3));
        assert_eq!(pair.failure(D, receiver), Cause::Aborted);
        assert_eq!(pair.released(P, sender), [list(&[3, 4])]);
        assert_eq!(pair.released(D, receiver), [list(&[0, 1])]);
        assert!(!pair.node(node).owes_answers());
        pair.assert_empty();
    }
}

#[test]
fn a_peer_that_hangs_is_owed_nothing_once_it_does_not_answer_any_more() {
    let mut pair = Pair::new();
    served_unheard(&mut pair, |_| true);
    assert!(pair.node(P).owes_answers(), "it may be slow");
    pair.pass_without(D, Duration::from_secs(30));
    assert!(!pair.node(P).owes_answers(), "a drain does not wait for it");
}

#[test]
fn a_worker_that_is_started_anew_after_a_drain_is_asked_once_for_many_requests_again() {
    let mut pair = Pair::new();
    let refused = pair.open_receiver(OPEN);
    pair.init_receiver(refused, &[0], None);
    drain(&mut pair, P);
    assert_eq!(pair.failure(D, refused), Cause::ByPeer(PeerCause::WorkerStopped));
    pair.restart(P);
    let sender = pair.open_sender(LATE, 1);
    pair.init_sender(sender, 1, None);
    let receiver = pair.open_receiver(LATE);
    pair.init_receiver(receiver, &[1], None);
    pair.send(sender, &[3]);
    pair.complete_posts();
    pair.run_for(Duration::from_secs(3));
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.node(D).gauges().addresses, 1, "the next life is here to stay");
}

#[test]
fn peers_that_remember_a_worker_that_drains_find_its_successor_with_their_next_request() {
    for moves in [TransferMode::Push, TransferMode::Pull] {
        let mut pair = Pair::new();
        // The first room is served before the drain, the second by a sender that was open before the drain.
        let [first, second] = [OPEN, LATE].map(|room| pair.open_sender_with(room, 1, mode(moves)));
        for (room, sender, drains_before) in [(OPEN, first, false), (LATE, second, true)] {
            assert_eq!(pair.node(D).gauges().addresses, 0);
            let receiver = pair.open_receiver_with(room, mode(moves));
            pair.init_receiver(receiver, &[0], None);
            pair.init_sender(sender, 1, None);
            pair.send(sender, &[3]);
            pair.complete_posts();
            pair.run_for(Duration::from_secs(1));
            assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
            assert_eq!(pair.node(D).gauges().addresses, usize::from(!drains_before));
            drain(&mut pair, P);
        }
        // The peer has not heard that the worker is dead, and no request was refused.
        pair.restart(P);
        let room = Room::Number(3);
        let sender = pair.open_sender_with(room.clone(), 1, mode(moves));
        pair.init_sender(sender, 1, None);
        let receiver = pair.open_receiver_with(room, mode(moves));
        pair.init_receiver(receiver, &[1], None);
        pair.send(sender, &[4]);
        pair.complete_posts();
        pair.run_for(Duration::from_secs(1));
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        assert_eq!(pair.node(D).gauges().addresses, 1, "{moves}");
    }
}

#[test]
fn a_peer_that_meets_a_worker_while_it_drains_does_not_remember_it() {
    let mut pair = Pair::new();
    let (sender, other) = (pair.open_sender(OPEN, 1), pair.open_sender(LATE, 1));
    drain(&mut pair, P);
    for (room, sender, page) in [(OPEN, sender, 0), (LATE, other, 1)] {
        let receiver = pair.open_receiver(room);
        pair.init_receiver(receiver, &[page], None);
        pair.init_sender(sender, 1, None);
        pair.send(sender, &[page]);
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        assert_eq!(pair.node(D).gauges().addresses, 0);
    }
    pair.run_for(Duration::from_secs(3));
    pair.assert_empty();
}
