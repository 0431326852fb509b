//! A lost way that is opened again: what ends the last writes of the peer is what the transport declares of the new
//! connection, and nothing that it has declared of a former one.

use std::time::Duration;

use kv_core::proto::{Input, Output};
use kv_core::wire::{AbortAck, Body, ConversationId, Frame, Hello};
use kv_core::{Attempt, Cause, KvPoll, PeerId, Room, SessionId, WayEnd, WriteFence};

use crate::hostility::{connected, connects, from_elsewhere, receiving_over};
use crate::solo::*;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than a permission and its fence last.
const LONG: Duration = Duration::from_secs(12);

/// A node whose pages peer 1 may write for ten seconds. The way to the peer had the fence `before`, was lost, was
/// opened again with the fence `after`, and is lost once more.
fn lost_twice(before: WriteFence, after: WriteFence) -> (Solo, SessionId, PeerId) {
    let (mut solo, session, peer) = receiving_over(before);
    solo.init_receiver(session, &[1, 2], None);
    solo.says(1, asks_to_write(1));
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    while connects(&solo).is_empty() {
        solo.run_until_said(SECOND * 3);
    }
    connected(&mut solo, peer, after);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    (solo, session, peer)
}

#[test]
fn a_right_that_only_the_new_connection_can_take_back_is_revoked() {
    let (mut solo, session, peer) = lost_twice(WriteFence::AtDeath, WriteFence::Revocable);
    assert!(solo.said.iter().any(|output| matches!(output, Output::Revoke { .. })), "{:?}", solo.said);
    solo.run_for(LONG);
    assert_eq!(solo.released(session), [], "nothing was proven");
    solo.input(Input::Revoked { peer });
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

#[test]
fn pages_come_back_in_the_time_that_only_the_new_connection_has_declared() {
    let (mut solo, session, _) = lost_twice(WriteFence::AtDeath, WriteFence::Within(SECOND));
    solo.run_for(LONG - SECOND * 2);
    assert_eq!(solo.released(session), [], "the permission and its fence have not ended");
    solo.run_for(SECOND * 2);
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

/// The cause would be a way that is lost, and the user would look for a fault in the network.
#[test]
fn a_session_that_comes_during_the_fence_names_the_restart_of_its_peer() {
    let (mut solo, session, peer) = receiving_over(WriteFence::Within(SECOND));
    solo.init_receiver(session, &[1, 2], None);
    solo.says(1, asks_to_write(1));
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    solo.run_for(LONG - SECOND * 3);
    assert_eq!(solo.released(session), [], "the fence has not ended");
    let next = solo.open_receiver(Room::Number(2), None);
    solo.found(solo.lookups()[0].0, vec![record(1)]);
    let worker = record(1).worker;
    solo.hello(Hello { worker, ..hello(2, ConversationId::new(1, 2)) });
    assert_eq!(solo.poll(next), KvPoll::Bootstrapping);
    solo.run_for(SECOND * 3);
    assert_eq!(solo.released(session), [list(&[1, 2])]);
    assert_eq!(solo.cause(next), Cause::PeerRestarted);
}

#[test]
fn no_time_gives_pages_back_once_the_new_connection_has_declared_none() {
    let (mut solo, session, peer) = lost_twice(WriteFence::Within(SECOND), WriteFence::AtDeath);
    solo.run_for(LONG);
    assert_eq!(solo.released(session), [], "a process that was stopped may go on copying at any time");
    solo.input(Input::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

/// The peer may have lost its connection, too, and have opened another one.
#[test]
fn the_word_of_a_peer_whose_way_was_lost_may_come_on_another_connection() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    let ack = Body::AbortAck(AbortAck { attempt: Attempt(1) });
    let acknowledged = |solo: &mut Solo| {
        let frame = Frame { conversation: solo.conversation(1), body: ack.clone() };
        from_elsewhere(solo, 77, frame);
    };
    acknowledged(&mut solo);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    assert_eq!(solo.released(session), [], "nobody speaks for a peer beside the connection that it has");
    acknowledged(&mut solo);
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}
