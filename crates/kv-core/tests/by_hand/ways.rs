//! Workers with several transports: which one a conversation goes by, and that it keeps it.

use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Input, Output};
use kv_core::wire::{Body, ConversationId, Hello};
use kv_core::{
    Cause, Directions, KvPoll, LookupId, Mismatch, PeerCause, PeerId, RankRecord, Room, SessionId,
    TransportError, TransportOffer, WayEnd, WriteFence,
};

use crate::solo::{Solo, hello, record};

const SECOND: Duration = Duration::from_secs(1);
const ROOM: Room = Room::Number(1);

fn ours(name: &str) -> TransportOffer {
    TransportOffer::new(name, Bytes::from(format!("us by {name}")))
}

fn theirs(name: &str) -> TransportOffer {
    TransportOffer::new(name, Bytes::from(format!("peer by {name}")))
}

/// A node that prefers `near` to `far`.
fn solo() -> Solo {
    Solo::new(|config| config.transports = vec![ours("near"), ours("far")])
}

/// Peer 1, reached by these.
fn reached_by(names: &[&str]) -> RankRecord {
    RankRecord { transports: names.iter().copied().map(theirs).collect(), ..record(1) }
}

/// A session of a node that has found peer 1.
fn meets(solo: &mut Solo, names: &[&str]) -> SessionId {
    let session = solo.open_receiver(ROOM, None);
    solo.found(solo.lookups()[0].0, vec![reached_by(names)]);
    session
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

fn connected(solo: &mut Solo, peer: PeerId) {
    let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
    solo.input(Input::Connected { peer, directions, fence });
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
    let session = meets(&mut solo, &["near", "far"]);
    connected(&mut solo, PeerId(0));
    solo.welcome(1, 1);
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

#[test]
fn a_peer_that_has_come_by_another_transport_is_met_there() {
    let mut solo = solo();
    let came = Hello {
        transport: "far".to_owned(),
        metadata: theirs("far").metadata,
        ..hello(1, ConversationId::new(1, 1))
    };
    solo.greet_with(came);
    assert_eq!(connects(&solo), [(PeerId(0), theirs("far"))]);
    let session = meets(&mut solo, &["near", "far"]);
    assert_eq!((connects(&solo), greets(&solo)), (vec![], vec![]), "one conversation, one way");
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
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
