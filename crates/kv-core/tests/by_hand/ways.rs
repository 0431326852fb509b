//! Workers with several transports: which one a conversation goes by, and that it keeps it.

use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Input, Output};
use kv_core::trace::{KvWhat, WayFault};
use kv_core::wire::{AbortAck, Body, ConversationId, Frame, Hello};
use kv_core::{
    Attempt, BootstrapError, Cause, Directions, Geometry, KvPoll, LookupId, Mismatch, PeerCause, PeerId,
    RankRecord, Room, SessionId, SessionOptions, TransportError, TransportOffer, WayEnd, WriteFence,
};

use crate::solo::{Solo, args, hello, list, record, record_with, register, sign_of_life};

pub const SECOND: Duration = Duration::from_secs(1);
pub const ROOM: Room = Room::Number(1);

fn ours(name: &str) -> TransportOffer {
    TransportOffer::new(name, Bytes::from(format!("us by {name}")))
}

fn theirs(name: &str) -> TransportOffer {
    TransportOffer::new(name, Bytes::from(format!("peer by {name}")))
}

/// A node that prefers `near` to `far`.
pub fn solo() -> Solo {
    Solo::new(|config| config.transports = vec![ours("near"), ours("far")])
}

/// Peer 1, reached by these.
fn reached_by(names: &[&str]) -> RankRecord {
    RankRecord { transports: names.iter().copied().map(theirs).collect(), ..record(1) }
}

/// A session of a node that has found peer 1.
pub fn meets(solo: &mut Solo, names: &[&str]) -> SessionId {
    let session = solo.open_receiver(ROOM, None);
    solo.found(solo.lookups()[0].0, vec![reached_by(names)]);
    session
}

/// Peer 1 greets by this transport, in its conversation with this number.
fn comes_by(solo: &mut Solo, name: &str, number: u32) {
    let conversation = ConversationId::new(number, 1);
    let TransportOffer { metadata, .. } = theirs(name);
    solo.greet_with(Hello { transport: name.to_owned(), metadata, ..hello(1, conversation) });
}

/// By which transports ways are asked for in the last outputs.
fn connects(solo: &Solo) -> Vec<(PeerId, TransportOffer)> {
    let connect = |output: &Output| match output {
        Output::Connect { peer, transport } => Some((*peer, transport.clone())),
        _ => None,
    };
    solo.said.iter().filter_map(connect).collect()
}

/// The transports in whose name the node has greeted in the last outputs.
fn greets(solo: &Solo) -> Vec<TransportOffer> {
    let greeted = |body| match body {
        Body::Hello(Hello { transport, metadata, .. }) => Some(TransportOffer::new(&transport, metadata)),
        _ => None,
    };
    solo.frames().into_iter().filter_map(greeted).collect()
}

fn refused(solo: &mut Solo, peer: PeerId) {
    solo.input(Input::ConnectFailed { peer, error: TransportError::Metadata("of another host") });
}

pub fn refused_for_now(solo: &mut Solo, peer: PeerId) {
    solo.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
}

pub fn connected(solo: &mut Solo, peer: PeerId) {
    let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
    solo.input(Input::Connected { peer, directions, fence });
}

/// Until the node tries `far`, because nobody answers by `near`.
fn until_far_is_tried(solo: &mut Solo) {
    let begun = solo.now;
    while connects(solo).iter().all(|(_, by)| *by != theirs("far")) {
        solo.run_until_said(SECOND * 3);
        assert!(solo.now - begun < SECOND * 5);
    }
}

/// A session of a node that has met peer 1 over `near`, and could go by `far`.
fn met_over_near(solo: &mut Solo) -> SessionId {
    let session = meets(solo, &["near", "far"]);
    connected(solo, PeerId(0));
    solo.welcome(1, 1);
    session
}

/// A session of a node that has tried `near` in vain, and has met peer 1 over `far`.
pub fn met_over_far(solo: &mut Solo) -> SessionId {
    let session = meets(solo, &["near", "far"]);
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    connected(solo, PeerId(0));
    solo.welcome(1, 1);
    session
}

#[test]
fn the_first_common_transport_in_local_order_is_used() {
    for (has, chosen) in
        [(&["far", "near"][..], "near"), (&["elsewhere", "far"][..], "far"), (&["near"][..], "near")]
    {
        let mut solo = solo();
        meets(&mut solo, has);
        assert_eq!(connects(&solo), [(PeerId(0), theirs(chosen))]);
        assert_eq!(greets(&solo), [ours(chosen)], "the peer is to answer by the same");
    }
}

#[test]
fn a_transport_that_leads_nowhere_makes_way_for_the_next_and_the_last_ends_the_sessions() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    refused(&mut solo, PeerId(0));
    assert_eq!((connects(&solo), greets(&solo)), (vec![(PeerId(0), theirs("far"))], vec![ours("far")]));
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    refused(&mut solo, PeerId(0));
    assert_eq!(solo.cause(session), Cause::Connect(TransportError::Metadata("of another host")));
    assert_eq!((connects(&solo), solo.node().gauges().peers), (vec![], 0));
    // The other one serves.
    let session = meets(&mut solo, &["near", "far"]);
    refused(&mut solo, PeerId(1));
    connected(&mut solo, PeerId(1));
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn a_lost_way_is_reopened_only_by_the_same_transport() {
    let mut solo = solo();
    let session = met_over_near(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    for _ in 0..3 {
        solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Lost });
        let mut opened = Vec::new();
        for _ in 0..40 {
            solo.run_for(SECOND / 4);
            opened.extend(connects(&solo));
            if !connects(&solo).is_empty() {
                refused(&mut solo, PeerId(0));
                opened.extend(connects(&solo));
            }
        }
        assert!(opened.len() > 1, "{opened:?}");
        assert!(opened.iter().all(|(peer, by)| (*peer, by) == (PeerId(0), &theirs("near"))), "{opened:?}");
    }
    assert_eq!(solo.released(session), [], "nothing was proven");
}

/// The transport takes the right to write from the connection that it knows.
#[test]
fn a_lost_way_is_left_as_it_is_while_the_right_to_write_is_revoked() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    let (peer, fence) = (PeerId(0), WriteFence::Revocable);
    solo.input(Input::Connected { peer, directions: Directions::BOTH, fence });
    solo.welcome(1, 1);
    solo.init_receiver(session, &[1, 2], None);
    lost(&mut solo, peer);
    let is_revoke = |output: &Output| matches!(output, Output::Revoke { peer: PeerId(0) });
    assert!(solo.said.iter().any(is_revoke));
    for _ in 0..240 {
        solo.run_for(SECOND / 4);
        let leaves = |output: &Output| matches!(output, Output::Disconnect { .. } | Output::Connect { .. });
        assert!(!solo.said.iter().any(leaves), "{:?}", solo.said);
    }
    assert_eq!(solo.released(session), [], "nothing was proven");
    solo.input(Input::Revoked { peer });
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

/// Losses of long ago would make each later pause longer, up to the longest one.
#[test]
fn the_pause_before_a_lost_way_is_reopened_starts_anew_with_every_answer() {
    let mut solo = solo();
    let session = meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    solo.welcome(1, 1);
    solo.init_receiver(session, &[1], None);
    for round in 0..10 {
        lost(&mut solo, PeerId(0));
        let begun = solo.now;
        while connects(&solo).is_empty() {
            solo.run_until_said(SECOND * 10);
        }
        let pause = solo.now - begun;
        assert!(pause < SECOND / 2, "round {round}: {pause:?}");
        connected(&mut solo, PeerId(0));
        solo.welcome(1, 1);
    }
}

#[test]
fn a_peer_that_has_come_by_another_transport_is_met_there() {
    let mut solo = solo();
    comes_by(&mut solo, "far", 1);
    assert_eq!(connects(&solo), [(PeerId(0), theirs("far"))]);
    let session = meets(&mut solo, &["near", "far"]);
    assert_eq!((connects(&solo), greets(&solo)), (vec![], vec![ours("far")]), "one conversation, one way");
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

pub fn lost(solo: &mut Solo, peer: PeerId) {
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
}

/// A further session: answers its lookup, if it asks. True if it has asked.
pub fn meets_again(solo: &mut Solo) -> (SessionId, bool) {
    meets_within(solo, ROOM, None)
}

/// The same for a session of this room with a deadline of its own.
fn meets_within(solo: &mut Solo, room: Room, deadline: Option<Duration>) -> (SessionId, bool) {
    let options = SessionOptions::default().with(|options| options.deadline = deadline);
    let session = solo.open_receiver_with(room, options);
    let lookup = solo.lookups().first().map(|(lookup, _)| *lookup);
    if let Some(lookup) = lookup {
        solo.found(lookup, vec![reached_by(&["near", "far"])]);
    }
    (session, lookup.is_some())
}

/// Seconds in which peer 1 is heard.
pub fn pass(solo: &mut Solo, seconds: u32) {
    for _ in 0..2 * seconds {
        solo.run_for(SECOND / 2);
        solo.says(1, sign_of_life());
    }
}

#[test]
fn a_way_that_ends_before_the_peer_has_answered_makes_way_for_the_next() {
    for end in [WayEnd::Lost, WayEnd::Dead { quiet_after: Duration::ZERO }] {
        let mut solo = solo();
        let session = meets(&mut solo, &["near", "far"]);
        connected(&mut solo, PeerId(0));
        let (first, nonce) = (solo.last_hello(1).conversation, solo.last_hello(1).nonce);
        solo.input(Input::PeerGone { peer: PeerId(0), end });
        assert_eq!(solo.disconnected(), [PeerId(0)], "the transport has to forget the first way");
        assert_eq!((connects(&solo), greets(&solo)), (vec![(PeerId(0), theirs("far"))], vec![ours("far")]));
        let second = solo.last_hello(1);
        assert!(second.conversation != first && second.nonce != nonce, "a late welcome is not for this one");
        assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
        connected(&mut solo, PeerId(0));
        solo.welcome(1, 1);
        assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
        // From now on the way is the conversation's.
        lost(&mut solo, PeerId(0));
        assert_eq!(connects(&solo), []);
    }
}

#[test]
fn a_hello_that_brings_no_answer_is_said_over_the_next_transport_in_time() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    connected(&mut solo, PeerId(0));
    let mut opened = Vec::new();
    for _ in 0..40 {
        solo.run_for(SECOND / 10);
        opened.extend(connects(&solo));
    }
    opened.dedup();
    assert_eq!(opened, [(PeerId(0), theirs("far"))]);
    connected(&mut solo, PeerId(0));
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn after_a_loss_only_the_sessions_under_way_fail_and_new_ones_take_the_other_transport() {
    let mut solo = solo();
    let session = met_over_near(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    lost(&mut solo, PeerId(0));
    assert_eq!(solo.cause(session), Cause::WayLost);
    let (second, _) = meets_again(&mut solo);
    assert_eq!((connects(&solo), greets(&solo)), (vec![(PeerId(1), theirs("far"))], vec![ours("far")]));
    connected(&mut solo, PeerId(1));
    solo.welcome(1, 2);
    assert_eq!(solo.poll(second), KvPoll::WaitingForInput);
    // The pages of the first still wait for the peer's word over the way that is lost.
    assert_eq!(solo.released(session), []);
    let (third, _) = meets_again(&mut solo);
    assert_eq!((solo.poll(third), connects(&solo)), (KvPoll::WaitingForInput, vec![]));
}

/// How `near` has failed, and for how long it was left alone, since the last time.
pub fn faults_of_near(solo: &mut Solo) -> Vec<(WayFault, Duration)> {
    let of_near = |what| match what {
        KvWhat::WayFailed { transport, fault, pause: Some(pause) } if transport == "near" => {
            Some((fault, pause))
        }
        _ => None,
    };
    solo.told().into_iter().filter_map(|event| of_near(event.what)).collect()
}

#[test]
fn a_failed_transport_is_tried_again_after_pauses_that_double_and_never_by_a_session() {
    let mut solo = solo();
    solo.listen();
    met_over_far(&mut solo);
    for (pause, next) in [(1, 1), (2, 2), (4, 3)] {
        let (session, asked) = meets_again(&mut solo);
        assert_eq!((solo.poll(session), asked), (KvPoll::WaitingForInput, false), "left alone");
        pass(&mut solo, pause);
        let (session, asked) = meets_again(&mut solo);
        assert_eq!((solo.poll(session), asked), (KvPoll::WaitingForInput, true), "it waits for nothing");
        assert_eq!(connects(&solo), [(PeerId(next), theirs("near"))]);
        solo.input(Input::ConnectFailed { peer: PeerId(next), error: TransportError::PeerGone });
    }
    let refused = || WayFault::Refused(TransportError::PeerGone);
    assert_eq!(faults_of_near(&mut solo), [1, 2, 4, 8].map(|pause| (refused(), SECOND * pause)));
    assert_eq!(solo.node().gauges().failed_ways, 1);
}

#[test]
fn a_preferred_transport_that_works_again_is_taken_by_the_next_session() {
    let mut solo = solo();
    met_over_far(&mut solo);
    solo.run_for(SECOND);
    let (_, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo) == [(PeerId(1), theirs("near"))]);
    connected(&mut solo, PeerId(1));
    solo.welcome(1, 2);
    let (session, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo).is_empty());
    solo.init_receiver(session, &[3], None);
    let to: Vec<PeerId> = solo.frames_to().into_iter().map(|(peer, _)| peer).collect();
    assert_eq!(to, [PeerId(1)], "the registration goes by the preferred transport");
    assert!(!meets_again(&mut solo).1, "nothing is left to be found out");
}

#[test]
fn a_transport_to_another_host_is_never_tried_again() {
    let mut solo = solo();
    meets(&mut solo, &["near", "far"]);
    refused(&mut solo, PeerId(0));
    connected(&mut solo, PeerId(0));
    solo.welcome(1, 1);
    pass(&mut solo, 90);
    let (_, asked) = meets_again(&mut solo);
    assert!(!asked && connects(&solo).is_empty());
}

/// A node whose preferred transport does not lead to peer 1, and which has lost touch with the peer over the other
/// one: `far`, of peer 0. A session there has pages that wait for the peer's word.
fn out_of_touch() -> Solo {
    let mut solo = solo();
    let session = met_over_far(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    let begun = solo.now;
    while solo.poll(session) != KvPoll::Failed {
        solo.run_for(SECOND / 10);
        assert!(solo.now - begun < SECOND * 60);
    }
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    assert_eq!(solo.released(session), []);
    solo
}

#[test]
fn a_session_whose_transport_leads_nowhere_goes_on_where_the_peer_is_known() {
    let mut solo = out_of_touch();
    // `near` is due, and `far` was given up just now.
    let (session, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo) == [(PeerId(1), theirs("near"))]);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    assert_eq!((solo.poll(session), connects(&solo)), (KvPoll::Bootstrapping, vec![]));
    assert_eq!((greets(&solo), solo.disconnected()), (vec![ours("far")], vec![PeerId(1)]));
    assert_eq!(solo.node().gauges().peers, 1);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.init_receiver(session, &[3], None);
    let to: Vec<PeerId> = solo.frames_to().into_iter().map(|(peer, _)| peer).collect();
    assert_eq!(to, [PeerId(0)], "the registration goes to the peer that was known");
}

#[test]
fn a_session_waits_where_the_peer_has_answered_before_it_tries_what_has_never_led_there() {
    let mut solo = out_of_touch();
    let (_, _) = meets_again(&mut solo);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    // Both ways are left alone.
    let (session, _) = meets_again(&mut solo);
    assert_eq!((solo.poll(session), connects(&solo)), (KvPoll::Bootstrapping, vec![]));
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn failed_ways_of_ever_new_peers_are_bounded_by_the_limit_of_peers() {
    let mut solo = Solo::new(|config| {
        config.transports = vec![ours("near"), ours("far")];
        config.limits.max_peers = 8;
    });
    for peer in 1..100 {
        let session = solo.open_receiver(ROOM, None);
        let transports = ["near", "far"].map(theirs).to_vec();
        solo.found(solo.lookups()[0].0, vec![RankRecord { transports, ..record(peer) }]);
        for _ in 0..2 {
            let (peer, _) = connects(&solo)[0];
            solo.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
        }
        assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
        assert!(solo.node().gauges().failed_ways <= 8);
    }
}

/// A scheduler that opens and aborts requests for a dead prefill worker would fill the memory.
#[test]
fn ends_of_sessions_for_a_peer_that_never_answers_are_bounded() {
    let mut solo = solo();
    meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    for _ in 0..5000 {
        let (session, _) = meets_again(&mut solo);
        solo.abort(session);
    }
    let draining = solo.node().gauges().draining;
    assert!(draining > 0 && draining <= 4096, "{draining}");
}

#[test]
fn without_a_common_transport_both_errors_name_all_transports() {
    let mut solo = solo();
    let session = meets(&mut solo, &["elsewhere", "nowhere"]);
    let mismatch = |field: &str, ours: &str, theirs: &str| Mismatch {
        field: field.to_owned(),
        ours: ours.to_owned(),
        theirs: theirs.to_owned(),
    };
    let (here, there) = ("near version 1, far version 1", "elsewhere version 1, nowhere version 1");
    assert_eq!(solo.cause(session), Cause::Incompatible(mismatch("transport", here, there)));
    solo.hello(Hello { transport: "elsewhere".to_owned(), ..hello(2, ConversationId::new(1, 2)) });
    let Body::Refused(refused) = solo.answer() else { panic!("{:?}", solo.answer()) };
    let mismatch = mismatch("transport", "near, far", "elsewhere");
    assert_eq!(refused.cause, PeerCause::Incompatible(mismatch));
    // A name that no record can hold is not even kept.
    let dropped = solo.node().gauges().dropped.total();
    solo.hello(Hello { transport: "x".repeat(513), ..hello(3, ConversationId::new(1, 3)) });
    assert_eq!((solo.frames(), solo.node().gauges().dropped.total()), (vec![], dropped + 1));
    assert_eq!(solo.lookups(), [] as [(LookupId, _); 0]);
}

/// Both transports of peer 1 fail; then the peer is met over `far`, which is lost while pages of a session wait
/// for the peer's word.
fn lost_over_far(prefers: [&str; 2]) -> Solo {
    let mut solo = Solo::new(|config| config.transports = prefers.map(ours).to_vec());
    meets(&mut solo, &["near", "far"]);
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    if prefers[0] == "far" {
        solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
        solo.run_for(SECOND * 2);
        let (_, asked) = meets_again(&mut solo);
        assert!(asked && connects(&solo) == [(PeerId(1), theirs("far"))]);
    }
    let id = PeerId(u64::from(prefers[0] == "far"));
    connected(&mut solo, id);
    solo.welcome(1, 1);
    let (session, _) = meets_again(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    lost(&mut solo, id);
    assert_eq!(solo.cause(session), Cause::WayLost);
    solo
}

#[test]
fn after_a_session_has_waited_in_vain_for_a_lost_way_the_next_one_tries_the_other() {
    let mut solo = solo();
    solo.listen();
    let session = met_over_near(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    lost(&mut solo, PeerId(0));
    assert_eq!(solo.cause(session), Cause::WayLost);
    let (waiting, _) = meets_again(&mut solo);
    assert_eq!(connects(&solo), [(PeerId(1), theirs("far"))]);
    refused_for_now(&mut solo, PeerId(1));
    assert_eq!(solo.poll(waiting), KvPoll::Bootstrapping, "the session waits where the peer is known");
    while solo.poll(waiting) != KvPoll::Failed {
        solo.run_for(SECOND / 10);
        for (peer, by) in connects(&solo) {
            assert_eq!((peer, by), (PeerId(0), theirs("near")), "the lost way is opened anew");
        }
    }
    let faults = [(WayFault::Lost, SECOND), (WayFault::Silent, SECOND * 2)];
    assert_eq!(faults_of_near(&mut solo), faults, "a wait in vain counts against the way");
    let (_session, _) = meets_again(&mut solo);
    assert!(connects(&solo).iter().any(|(_, by)| *by == theirs("far")), "{:?}", connects(&solo));
}

/// `far` stays lost; `near` would connect and be answered. Sessions come every `apart`.
fn finds_near(mut solo: Solo, apart: Duration) -> Option<u32> {
    for tries in 0..20 {
        let begun = solo.now;
        let (_session, _) = meets_again(&mut solo);
        loop {
            if connects(&solo).iter().any(|(_, by)| *by == theirs("near")) {
                return Some(tries);
            }
            if solo.now - begun >= apart {
                break;
            }
            for (peer, by) in connects(&solo) {
                if by == theirs("far") {
                    solo.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
                }
            }
            solo.run_for(SECOND / 10);
        }
    }
    None
}

#[test]
fn a_transport_that_works_again_is_found_beside_one_that_was_lost_for_either_preference() {
    for prefers in [["near", "far"], ["far", "near"]] {
        for apart in [1, 7, 30, 70, 200] {
            let mut solo = lost_over_far(prefers);
            solo.run_for(SECOND * 3);
            let found = finds_near(solo, SECOND * apart);
            println!("{prefers:?} {apart}: {found:?}");
            assert!(found.is_some_and(|tries| tries <= 3), "{prefers:?} {apart}: {found:?}");
        }
    }
}

#[test]
fn a_session_that_joins_a_second_try_goes_on_where_the_peer_is_known() {
    let mut solo = solo();
    let session = met_over_far(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    solo.run_for(SECOND);
    solo.says(1, sign_of_life());
    let (_, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo) == [(PeerId(1), theirs("near"))]);
    lost(&mut solo, PeerId(0));
    let (session, _) = meets_again(&mut solo);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping, "far may be open again soon");
}

#[test]
fn a_sender_is_told_of_a_failed_session_whose_transport_led_nowhere() {
    let mut solo = out_of_touch();
    let (aborted, _) = meets_again(&mut solo);
    let (_, _) = meets_again(&mut solo);
    solo.abort(aborted);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    solo.welcome(1, 1);
    let ends = solo.frames().into_iter().any(|body| matches!(body, Body::Release(_) | Body::Abort(_)));
    assert!(ends, "{:?}", solo.frames());
}

/// The first abort may get lost like any other message. The sender would keep the pages of the request.
#[test]
fn an_abort_that_moves_to_another_way_is_said_more_than_once() {
    let mut solo = solo();
    let aborted = meets(&mut solo, &["near", "far"]);
    comes_by(&mut solo, "far", 1);
    let other = solo.open_receiver(Room::Number(2), Some(1));
    solo.found(solo.lookups()[0].0, vec![reached_by(&["near", "far"])]);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(other), KvPoll::WaitingForInput);
    solo.abort(other);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.run_for(SECOND * 2);
    solo.abort(aborted);
    refused_for_now(&mut solo, PeerId(0));
    let aborts = |said: Vec<Body>| said.iter().filter(|body| matches!(body, Body::Abort(_))).count();
    let (first, later) = (aborts(solo.frames()), aborts(said_in(&mut solo, SECOND * 4)));
    assert!(first >= 1 && later >= 1, "{first} at once, {later} later");
}

#[test]
fn a_peer_that_never_answered_is_forgotten_after_its_way_was_lost() {
    let mut solo = solo();
    let session = meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    lost(&mut solo, PeerId(0));
    assert_eq!(solo.cause(session), Cause::WayLost);
    assert_eq!(solo.node().gauges().peers, 1, "its sender is yet to be told");
    for _ in 0..600 {
        solo.run_for(SECOND / 10);
        for (peer, _) in connects(&solo) {
            solo.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
        }
    }
    let gauges = solo.node().gauges();
    assert_eq!((gauges.peers, gauges.timers), (0, 0));
}

#[test]
fn a_session_comes_back_to_a_slow_transport_if_the_others_lead_nowhere() {
    let ends = [None, Some(WayEnd::Lost), Some(WayEnd::Dead { quiet_after: Duration::ZERO })];
    for (end, answers) in ends.into_iter().flat_map(|end| [(end, true), (end, false)]) {
        let mut solo = solo();
        let session = meets(&mut solo, &["near", "far"]);
        connected(&mut solo, PeerId(0));
        until_far_is_tried(&mut solo);
        match end {
            None => refused(&mut solo, PeerId(0)),
            Some(end) => solo.input(Input::PeerGone { peer: PeerId(0), end }),
        }
        assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
        assert_eq!((connects(&solo), greets(&solo)), (vec![(PeerId(0), theirs("near"))], vec![ours("near")]));
        connected(&mut solo, PeerId(0));
        if answers {
            solo.welcome(1, 1);
            assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
            continue;
        }
        // Once more, and not for ever.
        let begun = solo.now;
        while solo.poll(session) == KvPoll::Bootstrapping {
            solo.run_until_said(SECOND * 3);
            assert_eq!(connects(&solo), []);
            assert!(solo.now - begun < SECOND * 6);
        }
        assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    }
}

#[test]
fn sessions_that_wait_for_a_silent_way_go_on_by_one_that_is_answered() {
    let mut solo = lost_over_far(["far", "near"]);
    solo.run_for(SECOND * 3);
    let (session, _) = meets_again(&mut solo);
    let (beside, _) = connects(&solo).into_iter().find(|(_, by)| *by == theirs("near")).unwrap();
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    connected(&mut solo, beside);
    solo.welcome(1, 2);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.init_receiver(session, &[3], None);
    let to: Vec<PeerId> = solo.frames_to().into_iter().map(|(peer, _)| peer).collect();
    assert_eq!(to, [beside], "the registration goes by the transport that is answered");
    assert_eq!(solo.released(SessionId(3)), [], "nothing was proven about the other");
    pass(&mut solo, 20);
    assert!(!solo.poll(session).is_terminal(), "the silent way ends no session that has left it");
}

#[test]
fn two_ranks_that_turn_out_to_be_one_worker_are_no_sources() {
    let mut solo = solo();
    let session = solo.open_receiver(ROOM, None);
    let ranks = [0, 1].map(|rank| {
        let args = with_rank(rank);
        let name = ["near", "other"][rank as usize];
        let transports =
            vec![TransportOffer::new("near", Bytes::from(format!("peer by {name}"))), theirs("far")];
        RankRecord { transports, ..record_with(1, &args) }
    });
    solo.found(solo.lookups()[0].0, ranks.to_vec());
    assert_eq!(connects(&solo).len(), 2);
    for peer in [PeerId(0), PeerId(1)] {
        solo.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
    }
    assert!(matches!(solo.cause(session), Cause::Bootstrap(BootstrapError::Malformed(_))));
}

/// The geometry of one of two ranks that hold the same pages.
fn with_rank(rank: u32) -> Geometry {
    let mut geometry = args("peer-1", 16).geometry().clone();
    (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (2, rank);
    geometry
}

#[test]
fn a_peer_that_never_answered_is_forgotten_even_if_its_transport_says_nothing() {
    let mut solo = solo();
    meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    lost(&mut solo, PeerId(0));
    solo.run_for(SECOND * 20);
    let gauges = solo.node().gauges();
    assert_eq!((gauges.peers, gauges.timers), (0, 0));
}

#[test]
fn a_way_that_was_lost_before_an_answer_and_is_refused_makes_way_for_the_next() {
    let mut solo = solo();
    meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    lost(&mut solo, PeerId(0));
    let (session, _) = meets_again(&mut solo);
    assert_eq!(connects(&solo), [(PeerId(1), theirs("near"))]);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping, "it waits for `far`");
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
    assert_eq!(solo.node().gauges().peers, 0);
}

/// A firewall that lets only the peer open connections: the node went by `near` for ever, because the peer was heard there.
#[test]
fn a_preferred_way_by_which_the_peer_comes_but_does_not_answer_is_left_until_it_does() {
    let mut solo = solo();
    comes_by(&mut solo, "near", 1);
    let (first, _) = connects(&solo)[0];
    let session = meets(&mut solo, &["near", "far"]);
    assert_eq!(greets(&solo), [ours("near")], "nothing speaks against it yet");
    refused_for_now(&mut solo, first);
    assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
    comes_by(&mut solo, "near", 2);
    let (near, _) = connects(&solo)[0];
    let of_near = solo.conversation(1);

    let (session, _) = meets_again(&mut solo);
    let (far, _) = connects(&solo).into_iter().find(|(_, by)| *by == theirs("far")).expect("the other way");
    connected(&mut solo, far);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    // Once the pause is over, the next session asks the peer over `near`, and does not wait for its answer.
    let mut later = (0..100).map(|_| {
        pass(&mut solo, 1);
        let (next, asked) = meets_again(&mut solo);
        assert_eq!(solo.poll(next), KvPoll::WaitingForInput, "it goes by `far`");
        assert!(connects(&solo).is_empty(), "both ways are known");
        let tries = greets(&solo) == [ours("near")];
        assert_eq!(asked, tries, "the bootstrap server is asked once the pause is over");
        tries.then_some(next)
    });
    let next = later.find_map(|next| next).expect("the preferred way is tried again");
    let (later, _) = meets_again(&mut solo);
    assert_eq!((greets(&solo), solo.poll(later)), (vec![], KvPoll::WaitingForInput), "it is asked once");
    // The way is open in both directions now.
    connected(&mut solo, near);
    solo.welcome(1, 2);
    assert_eq!(solo.conversation(1), of_near, "the conversation in which the peer came goes on");
    let (session, _) = meets_again(&mut solo);
    solo.init_receiver(session, &[3], None);
    let to = |solo: &Solo| solo.frames_to().into_iter().map(|(peer, _)| peer).collect::<Vec<_>>();
    assert_eq!(to(&solo), [near], "the preferred way is regained");
    solo.init_receiver(next, &[4], None);
    assert_eq!(to(&solo), [far], "pages of one session never travel over two");
}

/// The hellos among these messages, by this transport.
fn hellos(said: &[Body], name: &str) -> Vec<Hello> {
    let by = |body: &Body| match body {
        Body::Hello(hello) if hello.transport == name => Some(hello.clone()),
        _ => None,
    };
    said.iter().filter_map(by).collect()
}

/// What the node says in this time.
fn said_in(solo: &mut Solo, time: Duration) -> Vec<Body> {
    solo.run_for(time).into_iter().map(|(_, body)| body).collect()
}

/// A firewall that drops what this side says, while the peer comes every two seconds: the node remembered that the peer was to
/// be met there, and session after session waited in vain.
#[test]
fn a_preferred_way_on_which_hellos_get_lost_costs_one_session_and_no_later_one() {
    let mut solo = solo();
    comes_by(&mut solo, "near", 1);
    let near = connects(&solo)[0].0;
    connected(&mut solo, near);
    let first = meets(&mut solo, &["near", "far"]);
    for _ in 0..10 {
        solo.run_for(SECOND * 2);
        comes_by(&mut solo, "near", 1);
    }
    assert!(matches!(solo.cause(first), Cause::PeerUnresponsive { .. }));
    let (second, asked) = meets_again(&mut solo);
    let said = hellos(&solo.frames(), "far");
    assert!(asked && said.len() == 1, "it goes by the other way at once");
    solo.welcome_to(&said[0], 1, 2);
    assert_eq!(solo.poll(second), KvPoll::WaitingForInput);
}

/// Sessions that open and end within the time for which a way may be silent: each said its hello as if for the first time, and
/// none was ever taken for the answer that does not come.
#[test]
fn sessions_shorter_than_the_patience_with_a_silent_way_cost_only_those_under_way() {
    for is_aborted in [false, true] {
        let mut solo = solo();
        solo.listen();
        let deadline = (!is_aborted).then_some(SECOND);
        let first = [1, 2, 3].map(|room| meets_within(&mut solo, Room::Number(room), deadline).0);
        connected(&mut solo, PeerId(0));
        solo.run_for(SECOND);
        for session in first.into_iter().filter(|_| is_aborted) {
            solo.abort(session);
        }
        let failed = first.map(|session| solo.failure_count(session));
        assert_eq!((failed, solo.node().gauges().failed_ways), ([1; 3], 1), "aborted: {is_aborted}");
        assert_eq!(
            faults_of_near(&mut solo),
            [(WayFault::Silent, SECOND)],
            "of three sessions, one has said so"
        );
        let (later, asked) = meets_again(&mut solo);
        let said = hellos(&solo.frames(), "far");
        assert!(asked && said.len() == 1, "the next goes by the other way at once");
        solo.welcome_to(&said[0], 1, 2);
        assert_eq!(solo.poll(later), KvPoll::WaitingForInput);
    }
}

/// A session that ends within the time in which the peer can answer says nothing: the scheduler has changed its mind, the
/// bootstrap server was slow, this process was stopped, or another way was tried before.
#[test]
fn sessions_that_end_before_an_answer_can_have_come_speak_against_no_way() {
    let until = |deadline| SessionOptions::default().with(|options| options.deadline = deadline);
    let begins = |deadline, lookup_takes| {
        let mut solo = solo();
        solo.listen();
        let session = solo.open_receiver_with(ROOM, until(deadline));
        let (lookup, _) = solo.lookups()[0];
        solo.sleep(lookup_takes);
        solo.found(lookup, vec![reached_by(&["near", "far"])]);
        connected(&mut solo, PeerId(0));
        (solo, session)
    };
    let (mut aborted, session) = begins(None, Duration::ZERO);
    aborted.run_for(SECOND / 4);
    aborted.abort(session);
    let (mut late, _) = begins(Some(SECOND), SECOND - SECOND / 1000);
    late.run_for(SECOND / 100);
    let (mut stopped, _) = begins(Some(SECOND * 10), Duration::ZERO);
    stopped.sleep(SECOND * 30);
    stopped.input(Input::Timeout);
    for (solo, case) in [(aborted, "aborted"), (late, "late"), (stopped, "stopped")] {
        assert_eq!(solo.node().gauges().failed_ways, 0, "{case}");
    }
    let (mut solo, session) = begins(Some(SECOND * 7 / 2), Duration::ZERO);
    until_far_is_tried(&mut solo);
    solo.run_for(SECOND / 2);
    assert_eq!(
        (solo.failure_count(session), solo.node().gauges().failed_ways),
        (1, 1),
        "only `near` has failed"
    );
    meets_again(&mut solo);
    assert_eq!(hellos(&solo.frames(), "near").len(), 0, "the next does not go back to it");
}

/// Pauses are shorter than the sessions: every way that has failed may be tried by each. The first of the list took them all.
#[test]
fn sessions_take_turns_with_ways_that_have_failed_and_whose_pauses_are_over() {
    let mut solo = Solo::new(|config| {
        config.transports = vec![ours("near"), ours("far")];
        config.timing.way_retry_first = Duration::from_millis(2);
        config.timing.way_retry_max = Duration::from_millis(2);
    });
    let mut chosen = Vec::new();
    for room in 1..=4 {
        meets_within(&mut solo, Room::Number(room), Some(SECOND));
        // A way that is tried beside is greeted after the chosen one.
        chosen.push(greets(&solo)[0].name.clone());
        for (peer, _) in connects(&solo) {
            connected(&mut solo, peer);
        }
        solo.run_for(SECOND + SECOND / 10);
    }
    assert_eq!(chosen, ["near", "far", "near", "far"]);
}

#[test]
fn one_silence_is_one_fault_of_a_way_however_many_notice_it() {
    for ways in [&["near", "far"][..], &["near"]] {
        let mut solo = solo();
        solo.listen();
        let session = meets(&mut solo, ways);
        connected(&mut solo, PeerId(0));
        solo.run_for(SECOND * 2);
        solo.abort(session);
        solo.run_for(SECOND * 6);
        assert_eq!(faults_of_near(&mut solo), [(WayFault::Silent, SECOND)], "{ways:?}");
    }
}

/// Strangers would fill the table of failed ways, and keep sessions away from ways that work.
#[test]
fn a_way_that_no_session_has_chosen_is_not_remembered_as_failed() {
    let mut solo = solo();
    comes_by(&mut solo, "near", 1);
    let near = connects(&solo)[0].0;
    refused_for_now(&mut solo, near);
    assert_eq!(solo.node().gauges().failed_ways, 0);
}

/// The peer's hellos put off what the node does next about the peer: repeating its own hello, and giving up.
#[test]
fn a_peer_that_greets_all_the_time_and_never_answers_holds_a_session_up_no_longer() {
    let mut solo = solo();
    comes_by(&mut solo, "near", 1);
    let session = meets(&mut solo, &["near", "far"]);
    let (mut waited, mut greeted) = (Duration::ZERO, 0);
    while solo.failure_count(session) == 0 && waited < SECOND * 100 {
        greeted += hellos(&said_in(&mut solo, SECOND * 9 / 10), "near").len();
        waited += SECOND * 9 / 10;
        comes_by(&mut solo, "near", 1);
    }
    assert!(waited < SECOND * 8 && greeted > 3, "it waited for {waited:?}, and {greeted} hellos were said");
}

#[test]
fn a_way_that_leads_to_another_incarnation_costs_one_session_and_no_later_one() {
    for comes in [false, true] {
        let mut solo = solo();
        if comes {
            comes_by(&mut solo, "near", 1);
            solo.says(1, Body::Register(register(1, Room::Number(77), &[1])));
        }
        let first = meets(&mut solo, &["near", "far"]);
        let hello = hellos(&solo.frames(), "near").remove(0);
        solo.another_life_answers(&hello);
        assert_eq!(solo.cause(first), Cause::PeerRestarted, "the peer comes itself: {comes}");
        let (second, asked) = meets_again(&mut solo);
        assert!(asked && hellos(&solo.frames(), "far").len() == 1, "the peer comes itself: {comes}");
        solo.welcome(1, 1);
        assert_eq!(solo.poll(second), KvPoll::WaitingForInput);
    }
}

/// The peer was met before over the way, and what this worker asked it to write waits in quarantine.
#[test]
fn a_way_on_which_another_incarnation_follows_a_met_peer_costs_one_session_and_no_later_one() {
    let mut solo = solo();
    let first = met_over_near(&mut solo);
    solo.init_receiver(first, &[1], None);
    let said = said_in(&mut solo, SECOND * 7 / 2);
    solo.another_life_answers(&hellos(&said, "near")[0]);
    assert_eq!(solo.cause(first), Cause::PeerRestarted);
    assert_eq!(solo.released(first), [], "nothing was proven about the peer");
    let (second, asked) = meets_again(&mut solo);
    let said = hellos(&solo.frames(), "far");
    assert!(asked && said.len() == 1, "it goes by the other way at once");
    solo.welcome_to(&said[0], 1, 2);
    assert_eq!(solo.poll(second), KvPoll::WaitingForInput);
    // The peer lives, and says on its own connection that it writes nothing more.
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(first), [list(&[1])]);
}

/// The table of peers is full but for one place, and nobody in it is idle. The second try took the place of the peer that the
/// session had just met, so that the session waited for nobody.
#[test]
fn a_second_try_takes_no_place_from_the_way_that_a_session_has_chosen() {
    let mut solo = Solo::new(|config| {
        config.transports = vec![ours("near"), ours("far")];
        config.limits.max_peers = 2;
    });
    let first = meets(&mut solo, &["near"]);
    refused_for_now(&mut solo, PeerId(0));
    assert_eq!(solo.poll(first), KvPoll::Failed);
    solo.greet_with(Hello { transport: "far".to_owned(), ..hello(2, ConversationId::new(1, 2)) });
    solo.says(2, Body::Register(register(1, Room::Number(77), &[1])));
    solo.run_for(SECOND * 2);
    let session = meets(&mut solo, &["near", "far"]);
    assert_eq!(connects(&solo).into_iter().map(|(_, by)| by).collect::<Vec<_>>(), [theirs("far")]);
    assert_eq!(solo.disconnected(), []);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

/// The peer has registered something here, so that it is not forgotten, and nothing of this worker makes it be asked.
#[test]
fn a_preferred_way_over_which_the_peer_was_given_up_is_tried_again_by_later_sessions() {
    let mut solo = solo();
    let session = met_over_near(&mut solo);
    solo.abort(session);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.says(1, Body::Register(register(1, Room::Number(77), &[1])));
    solo.run_for(SECOND * 60);
    let (session, _) = meets_again(&mut solo);
    let said = solo.frames();
    let [far] = &hellos(&said, "far")[..] else { panic!("the other way is not taken") };
    assert_eq!(hellos(&said, "near").len(), 1, "the pause is over");
    solo.welcome_to(far, 1, 2);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    // Tries that nobody answers become rarer, and go on.
    let mut tries = Vec::new();
    for _ in 0..400 {
        let (session, _) = meets_again(&mut solo);
        tries.push(hellos(&solo.frames(), "near").len() + hellos(&said_in(&mut solo, SECOND), "near").len());
        solo.frame_from(1, Frame { conversation: far.conversation, body: sign_of_life() });
        assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
        solo.abort(session);
    }
    let [early, late] = [&tries[..200], &tries[200..]].map(|tries| tries.iter().sum::<usize>());
    assert!(early >= late && late > 0, "{early} hellos in the first half, {late} in the second");
}

#[test]
fn a_hello_of_long_ago_that_was_not_answered_speaks_against_no_way() {
    let mut solo = solo();
    let session = met_over_near(&mut solo);
    solo.init_receiver(session, &[1], None);
    // A hiccup, in which the hello is lost or its answer. Then the peer goes on.
    let said = said_in(&mut solo, SECOND * 7 / 2);
    assert!(!hellos(&said, "near").is_empty(), "the peer is greeted in its silence");
    solo.says(1, sign_of_life());
    solo.abort(session);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.run_for(SECOND * 20);
    comes_by(&mut solo, "near", 9);
    solo.run_for(SECOND * 2);
    assert_eq!(solo.node().gauges().failed_ways, 0);
    meets_again(&mut solo);
    assert_eq!(greets(&solo), [ours("near")], "the way has always worked");
}

/// A process that was suspended has received nothing. The request would fail as soon as it goes on.
#[test]
fn a_node_that_was_stopped_while_it_greeted_blames_only_later_silence() {
    let mut solo = solo();
    let session = meets(&mut solo, &["far"]);
    connected(&mut solo, PeerId(0));
    solo.run_for(SECOND);
    solo.sleep(SECOND * 30);
    solo.input(Input::Timeout);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.run_for(SECOND * 2);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.run_for(SECOND * 7);
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
}

#[test]
fn a_session_goes_on_where_the_peer_has_come_itself_and_a_better_way_is_tried_later() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    comes_by(&mut solo, "far", 1);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    solo.welcome(1, 1);
    assert_eq!((solo.poll(session), solo.node().gauges().peers), (KvPoll::WaitingForInput, 1));
    assert!(meets_again(&mut solo).1);
    pass(&mut solo, 2);
    let (_, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo) == [(PeerId(2), theirs("near"))]);
}

/// The ways that a session has learned count for the whole peer. Every session would go on by the slower
/// transport.
#[test]
fn a_preferred_way_is_tried_again_beside_a_peer_that_came_itself() {
    let mut solo = solo();
    let first = met_over_far(&mut solo);
    solo.abort(first);
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    comes_by(&mut solo, "far", 2);
    let (second, asked) = meets_again(&mut solo);
    assert!(asked);
    solo.welcome(1, 2);
    assert_eq!(solo.poll(second), KvPoll::WaitingForInput);
    pass(&mut solo, 3);
    let (_, asked) = meets_again(&mut solo);
    assert!(asked && connects(&solo).iter().any(|(_, by)| *by == theirs("near")), "{:?}", connects(&solo));
}

#[test]
fn a_greeting_that_came_back_to_a_slow_transport_ends_when_it_is_refused_there() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    connected(&mut solo, PeerId(0));
    until_far_is_tried(&mut solo);
    // The next session joins the greeting over `far`.
    let (joined, _) = meets_again(&mut solo);
    for (left, next) in [(1, "near"), (0, "")] {
        solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
        assert_eq!(connects(&solo).len(), left, "{next}");
    }
    for session in [session, joined] {
        assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
    }
}

/// The answer of the bootstrap server has the slow transport among the others. It would be tried twice, and
/// both sessions would wait for it.
#[test]
fn a_session_that_joins_a_greeting_waits_for_each_transport_only_once() {
    let mut solo = solo();
    let session = meets(&mut solo, &["near", "far"]);
    connected(&mut solo, PeerId(0));
    until_far_is_tried(&mut solo);
    // Another question: the answer is the same worker, which is being greeted over `far`.
    let joined = solo.open_receiver(ROOM, Some(1));
    solo.found(solo.lookups()[0].0, vec![reached_by(&["near", "far"])]);
    for _ in 0..2 {
        refused_for_now(&mut solo, PeerId(0));
    }
    for session in [session, joined] {
        assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
    }
}
