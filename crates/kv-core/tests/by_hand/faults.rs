//! What counts against a transport, for how long the transport is then left alone, and what of it is told.

use std::time::Duration;

use kv_core::proto::Input;
use kv_core::trace::{KvWhat, WayFault};
use kv_core::{PeerId, TransportError, WayEnd};

use crate::solo::{Solo, asks_to_write};
use crate::ways::*;

const FIRST: PeerId = PeerId(0);

/// A node that tells what happens. It has looked for peer 1, which is reached by these transports, and the way to it by
/// `near` is open.
fn looking(names: &[&str]) -> Solo {
    let mut solo = solo();
    solo.listen();
    meets(&mut solo, names);
    connected(&mut solo, FIRST);
    solo
}

/// The same with a peer that has answered, and a session that has given it pages to write.
fn registered() -> Solo {
    let mut solo = looking(&["near", "far"]);
    solo.welcome(1, 1);
    let (session, _) = meets_again(&mut solo);
    solo.init_receiver(session, &[1, 2], None);
    solo.says(1, asks_to_write(1));
    solo
}

#[test]
fn every_failure_of_a_way_is_told_once_with_its_transport_and_its_cause() {
    let refused = || WayFault::Refused(TransportError::PeerGone);
    let dead = WayEnd::Dead { quiet_after: Duration::ZERO };
    type Row = (&'static str, fn() -> Solo, Box<dyn Fn(&mut Solo)>, WayFault);
    let gone = |end| -> Box<dyn Fn(&mut Solo)> {
        Box::new(move |solo: &mut Solo| solo.input(Input::PeerGone { peer: FIRST, end }))
    };
    let passes = |seconds| -> Box<dyn Fn(&mut Solo)> {
        Box::new(move |solo: &mut Solo| _ = solo.run_for(SECOND * seconds))
    };
    let rows: [Row; 8] = [
        ("no answer, another way", || looking(&["near", "far"]), passes(4), WayFault::Silent),
        ("no answer, no other way", || looking(&["near"]), passes(6), WayFault::Silent),
        (
            "lost before an answer, another way",
            || looking(&["near", "far"]),
            gone(WayEnd::Lost),
            WayFault::Lost,
        ),
        ("lost before an answer, no other way", || looking(&["near"]), gone(WayEnd::Lost), WayFault::Lost),
        ("dead before an answer", || looking(&["near"]), gone(dead), WayFault::Lost),
        ("refused", || looking(&["near"]), Box::new(|solo| refused_for_now(solo, FIRST)), refused()),
        ("lost after an answer", registered, gone(WayEnd::Lost), WayFault::Lost),
        ("silent after an answer", registered, passes(6), WayFault::Silent),
    ];
    for (name, begin, happens, fault) in rows {
        let mut solo = begin();
        assert_eq!(faults_of_near(&mut solo), [], "{name}");
        happens(&mut solo);
        assert_eq!(faults_of_near(&mut solo), [(fault, SECOND)], "{name}");
        assert_eq!(solo.node().gauges().failed_ways, 1, "{name}");
    }
}

#[test]
fn a_way_that_has_worked_for_longer_than_its_pause_is_left_alone_as_for_the_first_time() {
    for (works_for, pause) in [(0, 2), (5, 1)] {
        let mut solo = solo();
        solo.listen();
        met_over_far(&mut solo);
        solo.run_for(SECOND);
        assert!(meets_again(&mut solo).1, "near is due");
        let near = PeerId(1);
        connected(&mut solo, near);
        solo.welcome(1, 2);
        pass(&mut solo, works_for);
        faults_of_near(&mut solo);
        lost(&mut solo, near);
        assert_eq!(faults_of_near(&mut solo), [(WayFault::Lost, SECOND * pause)], "{works_for} s");
    }
}

#[test]
fn the_transport_that_is_told_is_the_one_by_which_the_peer_is_reached() {
    let mut solo = solo();
    solo.listen();
    met_over_far(&mut solo);
    let chosen = |what| match what {
        KvWhat::WayChosen { transport } => Some(transport),
        _ => None,
    };
    let told: Vec<String> = solo.told().into_iter().filter_map(|event| chosen(event.what)).collect();
    assert_eq!(told, ["near", "far"]);
}
