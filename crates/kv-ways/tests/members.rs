//! What a transport over several makes of what its members report, told by members that say what a test wants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod told;

use std::time::Duration;

use bytes::Bytes;
use kv_core::{
    Descriptor, Directions, Op, Origin, PeerId, Post, PostId, Region, RegionRole, TRANSPORT_VERSION, Time,
    Transport, TransportError, TransportEvent, TransportOffer, TransportWait, WayEnd, WriteFence,
};
use kv_ways::{MAX_MEMBERS, Member, Ways, WaysError};
use told::{Told, Wire};

const PEER: PeerId = PeerId(7);
const OTHER: PeerId = PeerId(8);
const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::ZERO };

fn pair() -> (Ways, [Wire; 2]) {
    let wires = [Wire::named("a"), Wire::named("b")];
    (Ways::new(vec![member("a", &wires[0]), member("b", &wires[1])]).unwrap(), wires)
}

fn member(name: &'static str, wire: &Wire) -> Member {
    Member::named(name, Box::new(Told(wire.clone())))
}

fn by(name: &str) -> TransportOffer {
    TransportOffer::new(name, Bytes::from(format!("memory by {name}")))
}

fn gone(end: WayEnd) -> TransportEvent {
    TransportEvent::PeerGone { peer: PEER, end }
}

fn write(id: u64) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 1 };
    Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify: None }
}

/// One turn for each member.
fn round(ways: &mut Ways) -> Vec<TransportEvent> {
    let mut events = Vec::new();
    for _ in 0..2 {
        ways.poll(Time::ZERO, &mut events);
    }
    events
}

#[test]
fn every_call_about_a_peer_goes_to_the_one_member_of_its_way() {
    let (mut ways, [a, b]) = pair();
    ways.connect_by(PEER, &by("b")).unwrap();
    b.set_fence(WriteFence::Revocable);
    b.set_directions(Directions::READ);
    ways.send(PEER, Bytes::from_static(b"word")).unwrap();
    ways.post(PEER, write(1)).unwrap();
    ways.permit(PEER, Time::MAX);
    ways.rouse(PEER, 9);
    ways.cancel(PostId(1));
    assert_eq!(ways.write_fence(PEER), WriteFence::Revocable);
    assert_eq!(ways.directions(Some(PEER)), Directions::READ);
    ways.revoke(PEER);
    ways.disconnect(PEER);
    assert_eq!(a.calls(), [""; 0]);
    let calls =
        ["connect memory by b", "send", "post 1", "permit", "rouse 9", "cancel 1", "revoke", "disconnect"];
    assert_eq!(b.calls(), calls);
    assert_eq!(ways.write_fence(PEER), WriteFence::AtDeath);
    assert_eq!(ways.send(PEER, Bytes::new()), Err(TransportError::PeerGone));
}

#[test]
fn the_member_that_was_polled_last_is_told_that_its_events_are_handled() {
    let (mut ways, [a, b]) = pair();
    ways.begin_handling();
    assert_eq!((a.calls(), b.calls()), (vec![], vec![]), "none was polled");
    ways.poll(Time::ZERO, &mut Vec::new());
    ways.begin_handling();
    assert_eq!((a.calls(), b.calls()), (vec!["begin handling".to_owned()], vec![]));
    ways.poll(Time::ZERO, &mut Vec::new());
    ways.begin_handling();
    assert_eq!(b.calls(), ["begin handling"]);
}

#[test]
fn a_lost_way_with_possible_writes_is_not_replaced_by_another_member() {
    let (mut ways, [a, b]) = pair();
    let other = TransportError::Unsupported("a second member to a peer before the first has ended");
    ways.connect_by(PEER, &by("a")).unwrap();
    assert_eq!(ways.connect_by(PEER, &by("b")), Err(other.clone()));
    a.report(gone(WayEnd::Lost));
    assert_eq!(round(&mut ways), [gone(WayEnd::Lost)]);
    assert_eq!(ways.connect_by(PEER, &by("b")), Err(other));
    assert_eq!(b.calls(), [""; 0]);
    // What the peer may still write is the business of the member that has lost it.
    a.set_fence(WriteFence::Revocable);
    assert_eq!(ways.write_fence(PEER), WriteFence::Revocable);
    ways.revoke(PEER);
    assert_eq!(a.calls().last().map(String::as_str), Some("revoke"));
    assert_eq!(b.calls(), [""; 0]);
    // The same member opens it again, and once more when the peer writes no more.
    ways.connect_by(PEER, &by("a")).unwrap();
    a.report(gone(WayEnd::Lost));
    a.report(TransportEvent::Revoked { peer: PEER });
    assert_eq!(round(&mut ways).len(), 2);
    ways.connect_by(PEER, &by("b")).unwrap();
    assert_eq!(a.calls().last().map(String::as_str), Some("disconnect"));
    assert_eq!(b.calls(), ["connect memory by b"]);
}

#[test]
fn a_peer_that_is_connected_is_connected_again_by_its_member_only() {
    let (mut ways, [a, b]) = pair();
    let standing = ways.standing();
    let metadata = ways.metadata().unwrap();
    ways.connect_by(PEER, &by("b")).unwrap();
    ways.connect(PEER, &metadata).unwrap();
    assert_eq!((a.calls(), b.calls()), (vec![], vec!["connect memory by b".to_owned(); 2]));
    assert_eq!(standing.peers(), [("a", 0), ("b", 1)]);
    b.refuse_connects(TransportError::PeerGone);
    assert_eq!(ways.connect(PEER, &metadata), Err(TransportError::PeerGone), "nothing is said of the other");
    ways.send(PEER, Bytes::new()).unwrap();
}

#[test]
fn a_transport_of_another_name_or_version_is_refused_before_any_member_is_asked() {
    let (mut ways, [a, b]) = pair();
    let later = TransportOffer { version: TRANSPORT_VERSION + 1, ..by("a") };
    for (offer, problem) in [
        (later, "the peer's transport has another version"),
        (by("c"), "this worker does not have the peer's transport"),
        (by(""), "this worker does not have the peer's transport"),
    ] {
        assert_eq!(ways.connect_by(PEER, &offer), Err(TransportError::Metadata(problem)));
        assert_eq!(ways.send(PEER, Bytes::new()), Err(TransportError::PeerGone));
    }
    assert_eq!((a.calls(), b.calls()), (vec![], vec![]));
}

#[test]
fn a_way_whose_writes_are_revoked_is_not_replaced_while_frames_pass() {
    let (mut ways, [a, b]) = pair();
    ways.connect_by(PEER, &by("a")).unwrap();
    a.report(TransportEvent::Revoked { peer: PEER });
    assert_eq!(round(&mut ways), [TransportEvent::Revoked { peer: PEER }]);
    let other = TransportError::Unsupported("a second member to a peer before the first has ended");
    assert_eq!(ways.connect_by(PEER, &by("b")), Err(other));
    ways.send(PEER, Bytes::new()).unwrap();
    assert_eq!(a.calls().last().map(String::as_str), Some("send"));
    a.report(gone(WayEnd::Lost));
    assert_eq!(round(&mut ways), [gone(WayEnd::Lost)]);
    ways.connect_by(PEER, &by("b")).unwrap();
    assert_eq!(b.calls(), ["connect memory by b"]);
}

#[test]
fn the_end_of_a_way_of_one_member_ends_no_other_way() {
    let (mut ways, [a, b]) = pair();
    ways.connect_by(PEER, &by("a")).unwrap();
    ways.connect_by(OTHER, &by("b")).unwrap();
    ways.post(OTHER, write(2)).unwrap();
    // Late words of a member about a peer and a post that are another's.
    b.report(gone(DEAD));
    b.report(TransportEvent::Revoked { peer: PEER });
    a.report(TransportEvent::PeerGone { peer: OTHER, end: WayEnd::Lost });
    a.report(TransportEvent::Posted { post: PostId(2), result: Ok(()) });
    assert_eq!(round(&mut ways), []);
    ways.send(PEER, Bytes::new()).unwrap();
    ways.send(OTHER, Bytes::new()).unwrap();
    a.report(gone(DEAD));
    b.report(TransportEvent::Posted { post: PostId(2), result: Ok(()) });
    let ended = TransportEvent::Posted { post: PostId(2), result: Ok(()) };
    assert_eq!(round(&mut ways), [gone(DEAD), ended]);
    // Nobody hears of a peer that was disconnected, nor twice of a post.
    ways.disconnect(PEER);
    a.report(gone(DEAD));
    b.report(TransportEvent::Posted { post: PostId(2), result: Ok(()) });
    assert_eq!(round(&mut ways), []);
}

#[test]
fn a_post_ends_after_disconnecting_its_peer_and_frees_its_id() {
    let (mut ways, [a, _]) = pair();
    ways.connect_by(PEER, &by("a")).unwrap();
    ways.connect_by(OTHER, &by("b")).unwrap();
    ways.post(PEER, write(3)).unwrap();
    assert!(matches!(ways.post(OTHER, write(3)), Err(TransportError::Unsupported(_))), "an id in use");
    ways.disconnect(PEER);
    let ended = TransportEvent::Posted { post: PostId(3), result: Err(TransportError::Cancelled) };
    a.report(ended.clone());
    assert_eq!(round(&mut ways), [ended]);
    ways.post(OTHER, write(3)).unwrap();
}

#[test]
fn a_post_that_its_member_refuses_leaves_its_id_free() {
    let (mut ways, [a, _]) = pair();
    ways.connect_by(PEER, &by("a")).unwrap();
    a.refuse_posts(Some(TransportError::WouldBlock));
    assert_eq!(ways.post(PEER, write(4)), Err(TransportError::WouldBlock));
    // As the owner tries again: no event follows a refused post.
    a.refuse_posts(None);
    ways.post(PEER, write(4)).unwrap();
    assert_eq!(a.calls().last().map(String::as_str), Some("post 4"));
}

#[test]
fn frames_speak_for_a_peer_only_by_the_member_on_which_they_came() {
    let (mut ways, [a, b]) = pair();
    for wire in [&a, &b] {
        wire.report(TransportEvent::Frame { from: Origin(3), frame: Bytes::from_static(b"hello") });
    }
    let from: Vec<Origin> = round(&mut ways)
        .into_iter()
        .map(|event| match event {
            TransportEvent::Frame { from, .. } => from,
            event => panic!("{event:?}"),
        })
        .collect();
    assert_ne!(from[0], from[1], "one number, two connections");
    // Both members would believe it of their own third connection.
    assert!(ways.may_speak_by(from[0], &by("a")) && ways.may_speak_by(from[1], &by("b")));
    assert!(!ways.may_speak_by(from[0], &by("b")) && !ways.may_speak_by(from[1], &by("a")));
    assert!(!ways.may_speak_by(Origin(4 * 16), &by("a")), "a connection that is not its");
}

#[test]
fn a_frame_by_any_member_speaks_for_the_metadata_of_all() {
    let (mut ways, [_, b]) = pair();
    let metadata = ways.metadata().unwrap();
    b.report(TransportEvent::Frame { from: Origin(3), frame: Bytes::new() });
    let events = round(&mut ways);
    let [TransportEvent::Frame { from, .. }] = events[..] else { panic!("{events:?}") };
    assert!(ways.may_speak_for(from, &metadata));
    assert!(!ways.may_speak_for(from, b"nonsense"));
}

#[test]
fn a_member_that_refuses_a_region_is_left_out_and_named() {
    let (mut ways, [a, b]) = pair();
    let standing = ways.standing();
    let region = Region::dram(RegionRole::Kv, 4096, 64, 64);
    ways.register(&region).unwrap();
    assert_eq!(ways.offers().unwrap(), [by("a"), by("b")]);
    a.refuse_regions(TransportError::Unsupported("device memory"));
    ways.register(&region).unwrap();
    let out = ("a", TransportError::Unsupported("device memory"));
    assert_eq!(standing.refusals(), std::slice::from_ref(&out));
    assert_eq!(ways.offers().unwrap(), [by("b")]);
    assert!(matches!(ways.connect_by(PEER, &by("a")), Err(TransportError::Metadata(_))));
    let unknown = TransportError::UnknownMemory { region: 2, addr: 4096, len: 64 };
    b.refuse_regions(unknown.clone());
    let all = TransportError::NoTransport { ways: vec![out, ("b", unknown)] };
    assert_eq!(ways.register(&region), Err(all.clone()));
    let words = "no transport can do it: a: not supported by this transport: device memory; \
                 b: region 2: 0x1000+64 is not in memory given to the transport";
    assert_eq!(all.to_string(), words);
}

#[test]
fn the_standing_counts_peers_by_member_and_says_why_a_member_was_not_taken() {
    let (mut ways, [a, b]) = pair();
    let standing = ways.standing();
    let [ours, other] = ["a", "b"].map(|name| {
        move |standing: &kv_ways::Standing| {
            let member = standing.members().into_iter().find(|member| member.name == name).unwrap();
            (member.peers, member.connected, member.refused, member.lost, member.last_refusal)
        }
    });
    a.refuse_connects(TransportError::PeerGone);
    ways.connect_by(PEER, &by("a")).unwrap_err();
    ways.connect_by(PEER, &by("b")).unwrap();
    ways.connect_by(OTHER, &by("b")).unwrap();
    assert_eq!(ours(&standing), (0, 0, 1, 0, Some(TransportError::PeerGone)));
    assert_eq!(other(&standing), (2, 2, 0, 0, None));
    assert_eq!(standing.peers(), [("a", 0), ("b", 2)]);
    // The way to one is lost and opened again; the other one is disconnected, and then says that it is dead.
    b.report(gone(WayEnd::Lost));
    round(&mut ways);
    assert_eq!(other(&standing), (1, 2, 0, 1, None));
    // What is told of it while it is lost counts nobody else.
    b.report(gone(WayEnd::Lost));
    b.report(gone(DEAD));
    round(&mut ways);
    assert_eq!(other(&standing), (1, 2, 0, 1, None));
    ways.connect_by(PEER, &by("b")).unwrap();
    ways.disconnect(OTHER);
    b.report(TransportEvent::PeerGone { peer: OTHER, end: DEAD });
    b.report(gone(DEAD));
    b.report(gone(DEAD));
    round(&mut ways);
    assert_eq!(other(&standing), (0, 3, 0, 1, None));
    ways.disconnect(PEER);
    assert_eq!(other(&standing), (0, 3, 0, 1, None));
}

#[test]
fn a_busy_member_takes_only_every_second_turn() {
    let (mut ways, [a, b]) = pair();
    a.set_wait(TransportWait::Now);
    b.set_wait(TransportWait::ReadableOrAfter(vec![5], Duration::from_millis(3)));
    let mut events = Vec::new();
    for _ in 0..10 {
        ways.poll(Time::ZERO, &mut events);
        assert_eq!(ways.wait(), TransportWait::Now);
    }
    assert_eq!((a.polls(), b.polls()), (5, 5));
    a.set_wait(TransportWait::Readable(vec![4]));
    let both = TransportWait::ReadableOrAfter(vec![4, 5], Duration::from_millis(3));
    assert_eq!(ways.wait(), both);
    // Whoever is woken looks at all.
    ways.poll(Time::ZERO, &mut events);
    assert_eq!(ways.wait(), TransportWait::Now);
    ways.poll(Time::ZERO, &mut events);
    assert_eq!(ways.wait(), both);
}

#[test]
fn the_member_that_was_polled_last_is_asked_how_long_to_wait() {
    let (mut ways, [a, b]) = pair();
    assert_eq!((ways.wait(), a.waits(), b.waits()), (TransportWait::Now, 0, 0), "none was polled");
    ways.poll(Time::ZERO, &mut Vec::new());
    assert_eq!((ways.wait(), a.waits(), b.waits()), (TransportWait::Now, 1, 0), "the other was not polled");
    b.set_wait(TransportWait::Now);
    ways.poll(Time::ZERO, &mut Vec::new());
    assert_eq!((ways.wait(), a.waits(), b.waits()), (TransportWait::Now, 1, 1));
}

#[test]
fn the_owner_sleeps_no_longer_than_the_most_impatient_member() {
    let (mut ways, [a, b]) = pair();
    let (soon, late) = (Duration::from_millis(3), Duration::from_secs(60));
    for [first, second] in [[soon, late], [late, soon]] {
        a.set_wait(TransportWait::ReadableOrAfter(vec![4], first));
        b.set_wait(TransportWait::ReadableOrAfter(vec![5], second));
        round(&mut ways);
        assert_eq!(ways.wait(), TransportWait::ReadableOrAfter(vec![4, 5], soon));
    }
}

#[test]
fn both_sides_find_the_same_way_and_the_next_where_it_leads_nowhere() {
    let (ours, [a, b]) = pair();
    let there = ["b", "c", "a"].map(Wire::named);
    let theirs = ["b", "c", "a"].into_iter().zip(&there).map(|(name, wire)| member(name, wire));
    let mut sides = [ours, Ways::new(theirs.collect()).unwrap()];
    let metadata = sides.each_ref().map(|side| side.metadata().unwrap());
    for (side, other) in sides.iter_mut().zip([1, 0]) {
        side.connect(PEER, &metadata[other]).unwrap();
    }
    // One has it second and the other first; the other one they have is first and last.
    assert_eq!((a.calls().len(), b.calls().len()), (0, 1), "{:?}", a.calls());
    assert_eq!([0, 1, 2].map(|at| there[at].calls().len()), [1, 0, 0]);
    for refused in [&a, &b] {
        refused.refuse_connects(TransportError::PeerGone);
    }
    assert_eq!(sides[0].connect(OTHER, &metadata[1]), Err(TransportError::PeerGone), "as all say");
    b.refuse_connects(TransportError::WouldBlock);
    let ways = vec![("b", TransportError::WouldBlock), ("a", TransportError::PeerGone)];
    assert_eq!(sides[0].connect(OTHER, &metadata[1]), Err(TransportError::NoTransport { ways }));
    assert_eq!(sides[0].send(OTHER, Bytes::new()), Err(TransportError::PeerGone));
}

#[test]
fn both_sides_find_the_same_way_among_those_that_rank_alike() {
    let (ours, [a, b]) = pair();
    let there = ["b", "a"].map(Wire::named);
    let theirs = ["b", "a"].into_iter().zip(&there).map(|(name, wire)| member(name, wire));
    let mut sides = [ours, Ways::new(theirs.collect()).unwrap()];
    let metadata = sides.each_ref().map(|side| side.metadata().unwrap());
    for (side, other) in sides.iter_mut().zip([1, 0]) {
        side.connect(PEER, &metadata[other]).unwrap();
    }
    assert_eq!((a.calls().len(), b.calls().len()), (there[1].calls().len(), there[0].calls().len()));
}

#[test]
fn the_preferred_transport_is_the_first_that_is_good_for_both_directions() {
    let (ways, [a, b]) = pair();
    assert_eq!(ways.offers().unwrap(), [by("a"), by("b")]);
    a.set_directions(Directions::WRITE);
    assert_eq!(ways.offers().unwrap(), [by("b"), by("a")]);
    assert_eq!(ways.directions(None), Directions::WRITE);
    b.set_directions(Directions::READ);
    assert_eq!(ways.offers().unwrap(), [by("a"), by("b")]);
    assert_eq!(ways.directions(None), Directions::WRITE, "the preferred one's, where nothing is common");
}

#[test]
fn directions_are_those_of_all_members_or_of_the_way_of_a_peer() {
    let (mut ways, [_, b]) = pair();
    b.set_directions(Directions::WRITE);
    assert_eq!(ways.directions(None), Directions::WRITE, "what all have in common");
    ways.connect_by(PEER, &by("a")).unwrap();
    assert_eq!(ways.directions(Some(PEER)), Directions::BOTH, "of its own way");
}

#[test]
fn members_are_one_to_sixteen_under_names_of_their_own() {
    let member = |name| member(name, &Wire::named(name));
    let refused = |members: Vec<Member>| Ways::new(members).unwrap_err();
    assert_eq!(refused(Vec::new()), WaysError::Members { got: 0, max: MAX_MEMBERS });
    let many = (0..17).map(|_| member("a")).collect();
    assert_eq!(refused(many), WaysError::Members { got: 17, max: 16 });
    let twice = vec![member("a"), member("b"), member("a")];
    assert_eq!(refused(twice), WaysError::SameName { name: "a", first: 0, second: 2 });
    assert_eq!(refused(vec![member("")]), WaysError::Name { member: 0, got: 0, max: 512 });
}
