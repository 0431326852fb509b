//! Meeting peers, keeping in touch, losing them.

use std::time::Duration;

use kv_core::proto::{Command, Input, Output, Spoken};
use kv_core::trace::{Dropped, DroppedFrames};
use kv_core::wire::{
    Abort, AbortAck, Body, Codec, ConversationId, Failed, Frame, Heartbeat, Hello, Refused, Register,
    VERSIONS, Versions, Welcome,
};
use kv_core::{
    Attempt, Cause, Incarnation, KvArgs, KvPoll, LookupId, Origin, PeerCause, PeerId, Region, RegionRole,
    Room, TransportError, WayEnd,
};

use crate::solo::{
    Solo, US, abort, asks_about, done, heartbeat, hello, list, permits, record, register, sign_of_life, with,
};

const ROOM: Room = Room::Number(7);
const SECOND: Duration = Duration::from_secs(1);

fn first_hello() -> Hello {
    hello(1, ConversationId::new(1, 1))
}

fn refused(solo: &Solo) -> PeerCause {
    match solo.answer() {
        Body::Refused(Refused { nonce: 1, cause, .. }) => cause,
        body => panic!("not refused: {body:?}"),
    }
}

/// The number in a frame that the node sends.
fn conversation_of(output: &Output) -> Option<ConversationId> {
    match output {
        Output::Send { frame, .. } => Some(Frame::decode(frame).unwrap().conversation),
        _ => None,
    }
}

#[test]
fn a_hello_with_an_unsuitable_cache_is_refused_with_the_reason() {
    let mut other_transport = first_hello();
    other_transport.transport = "another".to_owned();
    let mut other_pages = first_hello();
    other_pages.geometry.as_mut().unwrap().page_size = 32;
    let not_understood = Hello { geometry: None, ..first_hello() };
    let versions = format!("version {VERSIONS} of the wire");
    let former = Hello { to: Incarnation::from_random(5), ..first_hello() };
    for (hello, fields) in [
        (other_transport, Some(("transport", "test", "another"))),
        (other_pages, Some(("page_size", "16", "32"))),
        (not_understood, Some(("geometry", &*versions, "something that is newer"))),
        (former, None),
    ] {
        let mut solo = Solo::new(|_| {});
        solo.hello(hello);
        match (refused(&solo), fields) {
            (PeerCause::Incompatible(mismatch), Some(fields)) => {
                assert_eq!((&*mismatch.field, &*mismatch.ours, &*mismatch.theirs), fields);
            }
            (PeerCause::Unknown, None) => {}
            (cause, _) => panic!("{cause}"),
        }
        solo.run_for(SECOND * 2);
        assert_eq!(solo.node().gauges().timers, 0);
    }
    let mut solo = Solo::new(|_| {});
    solo.input(Input::Command(Command::Shutdown));
    solo.hello(first_hello());
    assert_eq!(refused(&solo), PeerCause::WorkerStopped);
}

#[test]
fn a_hello_without_a_common_version_is_refused_for_any_content() {
    let theirs = Versions { min: VERSIONS.max + 1, max: 127 };
    let mut impossible = Hello { versions: theirs, transport: "another".to_owned(), ..first_hello() };
    impossible.geometry.as_mut().unwrap().regions.clear();
    for hello in [impossible, Hello { versions: theirs, geometry: None, ..first_hello() }] {
        let mut solo = Solo::new(|_| {});
        solo.greet_with(hello);
        assert_eq!(refused(&solo), PeerCause::Versions { ours: VERSIONS, theirs });
        // Whoever goes on nevertheless gets no page.
        let Body::Refused(Refused { conversation, .. }) = solo.answer() else { panic!("not refused") };
        let sender = solo.open_sender(ROOM, 1);
        solo.frame_from(1, Frame { conversation, body: Body::Register(register(1, ROOM, &[5])) });
        solo.send(sender, 1, &[&[3]]);
        assert!(solo.take_posts().is_empty());
    }
}

#[test]
fn a_welcome_without_a_common_version_fails_the_receiver_at_once() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    let (theirs, nonce) = (Versions { min: VERSIONS.max + 1, max: 127 }, solo.last_hello(1).nonce);
    solo.says(
        1,
        Body::Welcome(Welcome { versions: theirs, nonce, conversation: ConversationId::new(1, 1), ask: 1 }),
    );
    assert_eq!(solo.cause(session), Cause::Versions { ours: VERSIONS, theirs });
}

/// What the receiver had registered is registered at nobody: the sender has forgotten it, and takes no new one.
#[test]
fn open_sessions_fail_when_a_forgetful_source_has_no_common_version() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    solo.run_for(SECOND * 4);
    let (theirs, nonce) = (Versions { min: VERSIONS.max + 1, max: 127 }, solo.last_hello(1).nonce);
    solo.says(
        1,
        Body::Welcome(Welcome { versions: theirs, nonce, conversation: ConversationId::new(9, 9), ask: 1 }),
    );
    assert_eq!(solo.cause(session), Cause::Versions { ours: VERSIONS, theirs });
    assert_eq!(solo.released(session), [list(&[3])], "who forgot the conversation has nothing in flight");
}

/// A peer whose cache was not understood at first has one when it says so in words that are.
#[test]
fn a_refused_peer_may_return_with_another_cache() {
    let mut solo = Solo::new(|_| {});
    solo.greet_with(Hello { geometry: None, ..first_hello() });
    assert!(matches!(refused(&solo), PeerCause::Incompatible(_)));
    solo.greet(1);
    assert!(matches!(solo.answer(), Body::Welcome(_)));
    // The peer has 16 pages, and this worker 32.
    for (attempt, page) in [(1, 16), (2, 15)] {
        solo.says(1, Body::Register(register(attempt, Room::Number(attempt), &[page])));
        let registered = matches!(solo.frames()[0], Body::Registered(_));
        assert_eq!(registered, page < 16, "page {page}");
    }
}

#[test]
fn a_rank_of_another_version_whose_cache_cannot_be_read_fails_with_both_ranges() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let mut newer = record(1);
    let theirs = Versions { min: VERSIONS.max + 1, max: VERSIONS.max + 2 };
    (newer.offers[0].min, newer.offers[0].max) = (theirs.min.into(), theirs.max.into());
    newer.offers[0].data = bytes::Bytes::from_static(b"of another kind");
    solo.found(LookupId(0), vec![newer]);
    assert_eq!(solo.cause(session), Cause::Versions { ours: VERSIONS, theirs });
}

#[test]
fn of_two_offers_the_offer_with_a_common_version_is_taken() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let mut rank = record(1);
    let mut older = rank.offers[0].clone();
    (older.min, older.max) = (1, u16::from(VERSIONS.min) - 1);
    rank.offers.insert(0, older);
    solo.found(LookupId(0), vec![rank]);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn a_hello_with_impossible_fields_is_dropped() {
    let mut impossible = first_hello();
    impossible.geometry.as_mut().unwrap().regions.clear();
    let ourselves = Hello { incarnation: US, ..first_hello() };
    for hello in [impossible, ourselves] {
        let mut solo = Solo::new(|_| {});
        solo.hello(hello);
        assert_eq!((solo.frames(), solo.node().gauges().peers), (vec![], 0));
        assert_eq!(solo.node().gauges().dropped.total(), 1);
    }
}

#[test]
fn frames_of_another_than_the_agreed_version_are_only_counted() {
    let (this, next) = (VERSIONS.max, VERSIONS.max + 1);
    let only = |version| Versions { min: version, max: version };
    for (agreed, other) in [(this, next), (next, this)] {
        let mut solo = Solo::new(|config| {
            config.versions = Spoken::of_another_library(Versions { min: this, max: next })
        });
        solo.greet_with(Hello { versions: only(agreed), ..first_hello() });
        let registers = |solo: &mut Solo, version| {
            let codec = Codec::between(only(version), only(version)).unwrap();
            let body = Body::Register(register(1, ROOM, &[5]));
            let frame = codec.encode(solo.conversation(1), &body).unwrap();
            solo.input(Input::Frame { from: Origin(1), frame });
        };
        let before = solo.node().gauges();
        registers(&mut solo, other);
        let mut dropped = DroppedFrames::default();
        dropped.count(Dropped::OtherVersion);
        let mut expected = before;
        expected.dropped = dropped;
        assert_eq!((&solo.said[..], solo.node().gauges()), (&[][..], expected), "agreed upon {agreed}");
        registers(&mut solo, agreed);
        let gauges = solo.node().gauges();
        assert_eq!((gauges.registrations, gauges.dropped), (1, dropped), "agreed upon {agreed}");
        // Somebody else is told apart by the number of the conversation.
        solo.frame_from(
            2,
            Frame { conversation: ConversationId(77), body: Body::Register(register(1, ROOM, &[5])) },
        );
        dropped.count(Dropped::UnknownConversation);
        assert_eq!(solo.node().gauges().dropped, dropped);
    }
}

#[test]
fn a_hello_in_the_name_of_a_speaking_peer_changes_nothing() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[5])));
    // Whoever knows the incarnation can say it, with a number of any height.
    let forged = |solo: &mut Solo| {
        let body = Body::Hello(hello(1, ConversationId::new(9, 9)));
        let frame = Frame { conversation: ConversationId::NONE, body }.encode().unwrap();
        solo.input(Input::Frame { from: Origin(66), frame });
    };
    let dropped = solo.node().gauges().dropped.total();
    forged(&mut solo);
    assert_eq!((&solo.said[..], solo.node().gauges().dropped.total()), (&[][..], dropped + 1));
    solo.send(sender, 1, &[&[3]]);
    let post = solo.take_posts().remove(0);
    assert_eq!(post.descriptors[0].remote_offset, 5 * 64);
    let notify = Frame::decode(post.notify.as_ref().unwrap()).unwrap();
    assert_eq!(notify.conversation, ConversationId::new(1, 1), "the number that the peer itself wants");
    solo.posted(post.id, Ok(()));
    assert_eq!(solo.poll(sender), KvPoll::Success);
    // A peer that has fallen silent may have lost its way: then it may come on another one.
    solo.run_for(SECOND * 4);
    forged(&mut solo);
    assert!(solo.frames().iter().any(|body| matches!(body, Body::Welcome(_))), "{:?}", solo.said);
}

#[test]
fn a_hello_for_a_former_incarnation_does_not_outdate_later_hellos() {
    let mut solo = Solo::new(|_| {});
    // The peer has drawn its numbers in the order in which it met both lives.
    let (this, former) = (ConversationId::new(1, 5), ConversationId::new(2, 6));
    solo.hello(Hello { to: Incarnation::from_random(5), ..hello(1, former) });
    assert_eq!(refused(&solo), PeerCause::Unknown);
    assert_eq!(solo.said.iter().find_map(conversation_of), Some(former));
    solo.hello(hello(1, this));
    assert!(matches!(solo.answer(), Body::Welcome(_)));
    assert_eq!(solo.said.iter().find_map(conversation_of), Some(this));
}

#[test]
fn a_hello_for_a_former_life_leaves_the_conversation_alone() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.hello(Hello { to: Incarnation::from_random(5), ..hello(1, ConversationId::new(2, 2)) });
    assert_eq!(refused(&solo), PeerCause::Unknown);
    assert_eq!(solo.poll(sender), KvPoll::WaitingForInput);
    solo.send(sender, 1, &[&[3]]);
    let post = solo.take_posts().remove(0);
    let notify = Frame::decode(&post.notify.unwrap()).unwrap();
    assert_eq!(
        notify.conversation,
        ConversationId::new(1, 1),
        "the number that the peer wants has not changed"
    );
}

#[test]
fn a_peer_that_lost_its_conversation_begins_anew_after_old_posts_end() {
    let mut solo = Solo::serving(|_| {});
    solo.says(1, abort(1, Room::Number(1)));
    solo.says(1, abort(5, Room::Number(5)));
    solo.says(1, Body::Register(Register { low_watermark: Attempt(3), ..register(4, ROOM, &[0]) }));
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 1, &[&[3]]);
    let post = solo.take_posts().remove(0);
    solo.hello(hello(1, ConversationId::new(2, 2)));
    assert_eq!(solo.cause(sender), Cause::PeerRestarted);
    let welcomed = |solo: &Solo| solo.frames().iter().any(|body| matches!(body, Body::Welcome(_)));
    assert!(!welcomed(&solo), "a welcome says that the old pages are quiet");
    solo.posted(post.id, Err(TransportError::Cancelled));
    let before = solo.node().gauges();
    solo.greet_again(1, ConversationId::new(2, 2));
    assert!(welcomed(&solo));
    assert_eq!(solo.node().gauges().incoming, 0);
    assert!(
        solo.conversation(1).sequence() > solo.former_conversation(1).sequence(),
        "so that the peer knows the later"
    );
    // Numbers begin anew, and nothing said under the old number of this side counts.
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    assert!(matches!(solo.answer(), Body::Registered(_)));
    solo.says(1, Body::Register(register(5, Room::Number(5), &[2])));
    assert!(matches!(solo.answer(), Body::Registered(_)), "attempt 5 of the old conversation is another");
    solo.says_under_old_conversation(1, Body::Register(register(2, ROOM, &[1])));
    assert_eq!(solo.frames(), []);
    assert_eq!(solo.node().gauges().dropped.total(), before.dropped.total() + 1);
    // A hello of the old conversation that comes late is one of the past.
    solo.hello(first_hello());
    assert_eq!((solo.frames(), solo.node().gauges().incoming), (vec![], 2));
}

#[test]
fn a_permission_of_a_former_conversation_permits_nothing_in_the_next() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0, 2])));
    solo.send(sender, 2, &[&[3]]);
    assert_eq!(solo.take_posts().len(), 1, "it is permitted for ten seconds");
    solo.abort(sender);
    let post = kv_core::PostId(0);
    solo.posted(post, Err(TransportError::Cancelled));
    // The peer has lost its side, and knows of no permission.
    solo.greet_again(1, ConversationId::new(2, 2));
    let revoked = |output: &Output| matches!(output, Output::Permit { until: kv_core::Time::ZERO, .. });
    assert!(solo.said.iter().any(revoked), "the transport is told: {:?}", solo.said);
    let asked = solo.frames().into_iter().find_map(|body| match body {
        Body::Welcome(welcome) => Some(welcome.ask),
        _ => None,
    });
    let sender = solo.open_sender(ROOM, 1);
    let unpermitted = with(register(1, ROOM, &[0, 2]), |to| (to.ask, to.permit_ms) = (0, 0));
    solo.says(1, Body::Register(unpermitted));
    solo.send(sender, 2, &[&[3, 5]]);
    assert_eq!(solo.take_posts(), [], "page 0 of the peer may be anybody's");
    solo.says(1, permits(asked.unwrap(), 10_000));
    let posts = solo.take_posts();
    let written: Vec<u64> = posts
        .iter()
        .flat_map(|post| &post.descriptors)
        .map(|descriptor| descriptor.remote_offset / 64)
        .collect();
    assert_eq!(written, [0, 2]);
}

/// The same where this worker learns it from the answer to its own hello. The peer counts no permission of the
/// conversation that it has forgotten when it takes pages back.
#[test]
fn a_permission_of_a_conversation_that_the_peer_forgot_permits_nothing_in_the_next() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    let asked = |frames: Vec<Body>| {
        frames.into_iter().find_map(|body| match body {
            Body::Heartbeat(asks) if asks.writes => Some(asks.number),
            _ => None,
        })
    };
    let unpermitted =
        |attempt, room| with(register(attempt, room, &[0]), |to| (to.ask, to.permit_ms) = (0, 0));
    solo.says(1, Body::Register(unpermitted(1, ROOM)));
    let ask = asked(solo.frames()).unwrap();
    solo.says(1, permits(ask, 10_000));
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0);
    solo.posted(post.id, Ok(()));
    // The peer has lost its side, answers nothing, and is greeted.
    solo.run_for(SECOND * 4);
    solo.welcome(1, 9);
    let revoked = |output: &Output| matches!(output, Output::Permit { until: kv_core::Time::ZERO, .. });
    assert!(solo.said.iter().any(revoked), "the transport is told: {:?}", solo.said);
    let other = Room::Number(8);
    let sender = solo.open_sender(other.clone(), 1);
    // An answer of before that comes late permits nothing either.
    solo.says(1, permits(ask, 10_000));
    solo.says(1, Body::Register(unpermitted(2, other)));
    let ask = asked(solo.frames());
    solo.send(sender, 1, &[&[6]]);
    assert_eq!(solo.take_posts(), [], "page 0 of the peer may be anybody's");
    let ask = ask.expect("the permission is asked for at once");
    solo.says(1, permits(ask, 10_000));
    assert_eq!(solo.take_posts().len(), 1);
}

/// The peer has taken its pages back, and may have given them to another request.
#[test]
fn what_a_peer_had_registered_is_not_written_once_the_peer_forgot_the_conversation() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    let waiting = Room::Number(8);
    solo.says(1, Body::Register(register(2, waiting.clone(), &[1])));
    let sender = solo.open_sender(ROOM, 1);
    solo.run_for(SECOND * 4);
    solo.welcome(1, 9);
    let late = solo.open_sender(waiting, 1);
    solo.says(1, Body::Register(register(3, Room::Number(9), &[2])));
    let ask = solo.frames().into_iter().find_map(|body| match body {
        Body::Heartbeat(asks) if asks.writes => Some(asks.number),
        _ => None,
    });
    solo.says(1, permits(ask.expect("a registration is open"), 10_000));
    solo.send(sender, 1, &[&[5]]);
    solo.send(late, 1, &[&[6]]);
    assert_eq!(solo.take_posts(), []);
    assert_eq!(solo.cause(sender), Cause::PeerRestarted);
}

#[test]
fn a_lost_peer_is_met_again_only_when_its_last_post_has_ended() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[3]]);
    let post = solo.take_posts().remove(0);
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    assert_eq!(solo.cause(sender), Cause::PeerLost);
    assert_eq!((solo.disconnected(), solo.node().gauges().timers), (vec![PeerId(0)], 0));
    solo.hello(hello(1, ConversationId::new(2, 1)));
    assert_eq!(solo.frames(), []);
    solo.posted(post.id, Err(TransportError::PeerGone));
    solo.hello(hello(1, ConversationId::new(2, 1)));
    assert!(matches!(solo.answer(), Body::Welcome(Welcome { nonce: 1, .. })));
}

#[test]
fn a_hello_of_a_given_up_peer_restores_the_conversation() {
    let (mut solo, session) = Solo::receiving();
    solo.run_for(SECOND * 7);
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    let next = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(next), KvPoll::Bootstrapping);
    solo.hello(first_hello());
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput);
    solo.run_for(SECOND * 3);
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput, "its silence before does not count");
}

/// A hello that was not answered when the peer was given up is not one that the next session has waited
/// for since.
#[test]
fn a_peer_given_up_long_ago_is_greeted_and_has_time_to_answer() {
    let (mut solo, session) = Solo::receiving();
    solo.run_for(SECOND * 7);
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    solo.run_for(SECOND * 60);
    let next = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.run_for(SECOND * 3);
    assert_eq!(solo.poll(next), KvPoll::Bootstrapping);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput);
    solo.run_for(SECOND * 3);
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput);
}

#[test]
fn any_frame_of_a_given_up_peer_restores_the_conversation() {
    let (mut solo, _) = Solo::receiving();
    solo.run_for(SECOND * 7);
    let next = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(next), KvPoll::Bootstrapping);
    solo.says(1, sign_of_life());
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput);
}

#[test]
fn a_refused_peer_may_greet_again_and_be_accepted() {
    let mut solo = Solo::new(|_| {});
    solo.hello(Hello { transport: "another".to_owned(), ..first_hello() });
    assert!(matches!(refused(&solo), PeerCause::Incompatible(_)));
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.hello(first_hello());
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping, "the peer may go on in an earlier conversation");
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.run_for(SECOND * 2);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn an_unanswered_hello_is_repeated_ever_more_slowly_until_its_sessions_fail() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    let said = solo.run_for(SECOND * 5 - Duration::from_millis(100));
    assert!((4..8).contains(&said.len()), "{} hellos in five seconds", said.len());
    let nonces = said.iter().filter_map(|(_, body)| match body {
        Body::Hello(hello) => Some(hello.nonce),
        _ => None,
    });
    assert_eq!(std::collections::BTreeSet::from_iter(nonces).len(), 1, "any answer to any of them will do");
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.run_for(SECOND * 3);
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    assert_eq!((solo.node().gauges().peers, solo.node().gauges().timers), (0, 0));
}

/// Whoever gives up before its source has answered leaves no sender waiting for it.
#[test]
fn an_abort_before_the_welcome_is_sent_after_the_welcome() {
    for answers in [true, false] {
        let mut solo = Solo::new(|_| {});
        let sessions = [ROOM, Room::Number(2)].map(|room| solo.open_receiver(room, Some(0)));
        solo.found(LookupId(0), vec![record(1)]);
        solo.init_receiver(sessions[0], &[3, 4], None);
        solo.abort(sessions[0]);
        assert_eq!(solo.released(sessions[0]), [list(&[3, 4])], "nobody can write these pages");
        if !answers {
            solo.abort(sessions[1]);
            assert_eq!(solo.node().gauges().draining, 2);
            solo.run_for(Duration::from_secs(60));
            assert_eq!((solo.node().gauges().draining, solo.node().gauges().peers), (0, 0));
            continue;
        }
        solo.welcome(1, 1);
        let Body::Abort(said) = abort(1, ROOM) else { panic!() };
        let said = Body::Abort(Abort { low_watermark: Attempt(1), ..said });
        assert_eq!(solo.frames(), std::slice::from_ref(&said));
        assert_eq!(solo.poll(sessions[1]), KvPoll::WaitingForInput);
        // Repeated until it is acknowledged, and then no more.
        let repeated = solo.run_for(Duration::from_secs(3));
        assert!(repeated.iter().any(|(_, body)| *body == said), "{repeated:?}");
        solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
        assert_eq!(solo.node().gauges().draining, 0);
        let repeated = solo.run_for(Duration::from_secs(3));
        assert!(!repeated.iter().any(|(_, body)| *body == said), "{repeated:?}");
    }
}

#[test]
fn an_answer_to_no_hello_of_ours_is_none() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    let hello = solo.last_hello(1);
    let nonce = hello.nonce ^ 1;
    solo.says(
        1,
        Body::Welcome(Welcome { versions: VERSIONS, nonce, conversation: ConversationId::new(1, 1), ask: 1 }),
    );
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.says(
        1,
        Body::Refused(Refused {
            versions: VERSIONS,
            nonce,
            cause: PeerCause::Unknown,
            conversation: ConversationId::new(1, 1),
        }),
    );
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    // Nothing is asked any more: neither answer counts.
    solo.says(
        1,
        Body::Welcome(Welcome {
            versions: VERSIONS,
            nonce: hello.nonce,
            conversation: ConversationId::new(5, 5),
            ask: 1,
        }),
    );
    solo.says(
        1,
        Body::Refused(Refused {
            versions: VERSIONS,
            nonce: hello.nonce,
            cause: PeerCause::Unknown,
            conversation: ConversationId::new(5, 5),
        }),
    );
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.init_receiver(session, &[0], None);
    let conversations: Vec<ConversationId> = solo.said.iter().filter_map(conversation_of).collect();
    assert_eq!(conversations, [ConversationId::new(1, 1)], "the number that it wants has not changed");
}

#[test]
fn a_full_peer_table_evicts_the_longest_silent_idle_peer_only() {
    let mut solo = Solo::new(|config| config.limits.max_peers = 3);
    for peer in 1..4 {
        solo.greet(peer);
        solo.run_for(SECOND / 100);
    }
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.says(2, asks_about(&[]));
    solo.greet(4);
    assert_eq!(solo.disconnected(), [PeerId(2)], "peer 1 is served, peer 2 has just spoken");
    for peer in [2, 4] {
        solo.says(peer, Body::Register(register(1, Room::Number(peer), &[0])));
    }
    let dropped = solo.node().gauges().dropped.total();
    solo.greet(5);
    assert_eq!((solo.frames(), solo.disconnected()), (vec![], vec![]), "nobody is idle");
    assert_eq!((solo.node().gauges().peers, solo.node().gauges().dropped.total()), (3, dropped + 1));
}

#[test]
fn a_receiver_that_cannot_meet_its_source_for_want_of_room_fails_at_once() {
    let mut solo = Solo::serving(|config| config.limits.max_peers = 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(2)]);
    assert_eq!(solo.cause(session), Cause::TooManyPeers { max: 1 });
}

#[test]
fn a_heartbeat_asks_only_about_quiet_attempts() {
    let (mut solo, first) = Solo::receiving();
    solo.init_receiver(first, &[0], None);
    for page in 1..4 {
        let session = solo.open_receiver(Room::Number(1), None);
        solo.init_receiver(session, &[page], None);
    }
    for attempt in 1..5 {
        solo.says(1, Body::Registered(kv_core::wire::Registered { attempt: Attempt(attempt) }));
    }
    solo.says(1, done(2, 0, Some(1), Vec::new()));
    let said = solo.run_for(SECOND + SECOND / 10);
    let said: Vec<_> = said.into_iter().map(|(_, body)| body).collect();
    let low_watermark = Attempt(1);
    assert_eq!(
        said,
        [Body::Heartbeat(Heartbeat { low_watermark, asked: vec![(1, 1), (3, 2)], ..heartbeat() })]
    );
}

#[test]
fn peers_that_stop_serving_or_restart_are_reported_with_their_names() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[0], None);
    // Its successor says hello; then the transport notices.
    solo.hello(Hello { worker: record(1).worker, ..hello(2, ConversationId::new(1, 1)) });
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: SECOND } });
    assert_eq!(solo.cause(session), Cause::PeerRestarted);
    solo.run_for(SECOND / 2);
    assert!(solo.released(session).is_empty(), "its last writes may still arrive");
    solo.run_for(SECOND);
    assert_eq!(solo.released(session).len(), 1);
}

/// The bootstrap server may name the old incarnation while the way to it is lost. Once that was remembered, later
/// requests waited for the lost peer, and failed with it, although its successor had registered.
#[test]
fn a_lookup_answer_with_a_lost_peer_is_not_cached() {
    let (mut solo, first) = Solo::receiving();
    solo.init_receiver(first, &[0], None);
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Lost });
    assert_eq!(solo.cause(first), Cause::WayLost);

    let waits = solo.open_receiver(Room::Number(2), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(waits), KvPoll::Bootstrapping);

    let served = solo.open_receiver(Room::Number(3), None);
    let lookup = solo.lookups().first().expect("the server is asked anew").0;
    solo.found(lookup, vec![record(2)]);
    solo.welcome(2, 1);
    assert_eq!(solo.poll(served), KvPoll::WaitingForInput);
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    assert!(solo.poll(waits) == KvPoll::Failed && solo.poll(served) == KvPoll::WaitingForInput);
    assert_eq!(solo.released(first), [list(&[0])]);
    let later = solo.open_receiver(Room::Number(4), None);
    assert!(solo.lookups().is_empty(), "the answer that names the successor is remembered");
    assert_eq!(solo.poll(later), KvPoll::WaitingForInput);
}

#[test]
fn a_source_that_is_lost_before_it_could_write_gives_the_pages_back_at_once() {
    let lost = || Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: Duration::ZERO } };
    let (mut solo, session) = Solo::receiving();
    solo.input(lost());
    assert_eq!(solo.cause(session), Cause::PeerLost);

    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    solo.init_receiver(session, &[3], None);
    solo.found(kv_core::LookupId(0), vec![record(1)]);
    solo.input(lost());
    assert_eq!(solo.cause(session), Cause::PeerLost);
    assert_eq!(solo.released(session).len(), 1);

    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
    assert_eq!(solo.released(session).len(), 1, "where no way was opened, nobody writes");
    let dropped = solo.node().gauges().dropped.total();
    solo.says(1, asks_about(&[]));
    assert_eq!(solo.node().gauges().dropped.total(), dropped + 1, "it is a stranger now");
    solo.input(Input::Frame { from: Origin(1), frame: bytes::Bytes::from_static(b"noise") });
    assert_eq!(solo.node().gauges().dropped.total(), dropped + 2);
}

#[test]
fn a_source_that_a_receiver_waits_for_does_not_make_way() {
    let mut solo = Solo::new(|config| config.limits.max_peers = 1);
    let session = solo.open_receiver(ROOM, None);
    solo.found(kv_core::LookupId(0), vec![record(1)]);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.greet(2);
    assert_eq!((solo.frames(), solo.disconnected()), (vec![], vec![]));
}

#[test]
fn two_registrations_that_match_a_new_sender_fail_with_both_ids() {
    let mut solo = Solo::new(|config| {
        let args = KvArgs::builder("us", 0).pages(32, 16).suffixes_requests(true);
        let region = Region::dram(RegionRole::Kv, 0x100_0000, 32 * 64, 64);
        config.args = args.region(region).build().unwrap();
    });
    let plain = |incarnation: u64| {
        let geometry = KvArgs::builder("peer", 0).pages(16, 16);
        let region = Region::dram(RegionRole::Kv, 0x100_0000, 16 * 64, 64);
        let geometry = geometry.region(region).build().unwrap().geometry().clone();
        Hello {
            geometry: Some(Box::new(geometry)),
            suffixed: true,
            service: "kv".to_owned(),
            ..hello(incarnation, ConversationId::new(1, incarnation as u32))
        }
    };
    solo.greet_with(plain(1));
    let rooms = ["r-aaaaaaaa", "r-bbbbbbbb", "r-cccccccc"].map(|id| Room::request(id).unwrap());
    for (attempt, room) in (1..).zip(&rooms[..2]) {
        solo.says(1, Body::Register(register(attempt, room.clone(), &[0])));
    }
    let sender = solo.open_sender(rooms[2].clone(), 1);
    let (room, other) = (rooms[0].clone(), rooms[1].clone());
    assert_eq!(solo.cause(sender), Cause::AmbiguousRoom { room: room.clone(), other: other.clone() });
    let told = |attempt, room: &Room, other: &Room| {
        let cause = PeerCause::AmbiguousRoom { room: room.clone(), other: other.clone() };
        Body::Failed(Failed { attempt: Attempt(attempt), cause, quiet: true })
    };
    assert_eq!(solo.frames(), [told(1, &room, &other), told(2, &other, &room)]);
    assert_eq!(solo.node().gauges().registrations, 0);
    // The whole id is never ambiguous.
    for (attempt, room) in (3..).zip(&rooms[..2]) {
        solo.says(1, Body::Register(register(attempt, room.clone(), &[0])));
    }
    let sender = solo.open_sender(rooms[1].clone(), 1);
    assert_eq!(solo.poll(sender), KvPoll::WaitingForInput);
}

#[test]
fn every_quiet_attempt_is_asked_about_however_many_there_are() {
    let (mut solo, first) = Solo::receiving();
    solo.init_receiver(first, &[0], None);
    for _ in 1..600 {
        let session = solo.open_receiver(Room::Number(1), None);
        solo.init_receiver(session, &[0], None);
    }
    for attempt in 1..=600 {
        solo.says(1, Body::Registered(kv_core::wire::Registered { attempt: Attempt(attempt) }));
    }
    let said = solo.run_for(SECOND + SECOND / 10);
    let asked = said.into_iter().filter_map(|(_, body)| match body {
        Body::Heartbeat(heartbeat) => Some(heartbeat.asked),
        _ => None,
    });
    assert_eq!(asked.collect::<Vec<_>>(), [[(1, 256)], [(257, 256)], [(513, 88)]]);
}

#[test]
fn quiet_attempts_beyond_the_limit_are_asked_about_in_turn() {
    const MANY: u64 = 16 * 256 + 100;
    let (mut solo, first) = Solo::receiving();
    solo.init_receiver(first, &[0], None);
    for _ in 1..MANY {
        let session = solo.open_receiver(Room::Number(1), None);
        solo.init_receiver(session, &[0], None);
    }
    for attempt in 1..=MANY {
        solo.says(1, Body::Registered(kv_core::wire::Registered { attempt: Attempt(attempt) }));
    }
    let said = solo.run_for(3 * SECOND);
    let asked: Vec<(u64, u32)> = said
        .into_iter()
        .filter_map(|(_, body)| match body {
            Body::Heartbeat(heartbeat) => Some(heartbeat.asked),
            _ => None,
        })
        .flatten()
        .collect();
    let beyond = asked.iter().position(|run| *run == (4097, 100)).expect("those beyond are asked about");
    assert_eq!((asked[0], asked[15]), ((1, 256), (3841, 256)), "the first ones come first");
    assert!(asked[beyond..].iter().any(|run| run.0 == 1), "and have their turn again");
}
