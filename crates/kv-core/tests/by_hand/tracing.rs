//! What whoever listens to a node is told, and what it costs if nobody fetches it.

use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::Input;
use kv_core::trace::{Dropped, KvWhat, MAX_EVENTS, Message};
use kv_core::wire::{Body, ConversationId, Frame, Heartbeat, HeartbeatAck, Release, Released};
use kv_core::{Attempt, Cause, Origin, PeerCause, PeerId, QuarantineReason, Room, SessionId, TransportError};

use crate::solo::{Solo, abort, register};

const ROOM: Room = Room::Number(7);

/// Whatever was told of a session, without messages.
fn story(solo: &mut Solo, session: SessionId) -> Vec<KvWhat> {
    let of = solo.told().into_iter().filter(|event| event.who.session == Some(session));
    of.map(|event| event.what).filter(|what| !matches!(what, KvWhat::Said(_) | KvWhat::Heard(_))).collect()
}

/// Why frames were ignored, and whose they were.
fn dropped(solo: &mut Solo) -> Vec<(Option<PeerId>, Dropped)> {
    let dropped = solo.told().into_iter().filter_map(|event| match event.what {
        KvWhat::Dropped(why) => Some((event.who.peer, why)),
        _ => None,
    });
    dropped.collect()
}

#[test]
fn the_trace_reports_each_ignored_frame_with_reason_and_author() {
    let mut solo = Solo::serving(|_| {});
    solo.listen();
    let conversation = solo.conversation(1);
    let answer =
        HeartbeatAck { number: 0, low_watermark: Attempt(0), lease_ms: 0, leases: vec![], permit_ms: 0 };
    let acked = Frame { conversation, body: Body::HeartbeatAck(answer.clone()) }.encode().unwrap();
    let spoilt = |place: usize, byte: u8| {
        let mut bytes = acked.to_vec();
        bytes[place] = byte;
        Input::Frame { from: Origin(1), frame: Bytes::from(bytes) }
    };
    let peer = Some(PeerId(0));
    for (input, why) in [
        (spoilt(0, 0x93), (None, Dropped::Damaged)),
        (spoilt(1, 99), (peer, Dropped::OtherVersion)),
        (spoilt(2, 77), (peer, Dropped::UnknownKind)),
        (Input::Frame { from: Origin(2), frame: acked.clone() }, (peer, Dropped::WrongOrigin)),
    ] {
        solo.input(input);
        assert_eq!(dropped(&mut solo), [why]);
    }
    let unknown = Frame { conversation: ConversationId::new(9, 9), body: Body::HeartbeatAck(answer.clone()) };
    solo.frame_from(1, unknown);
    assert_eq!(dropped(&mut solo), [(None, Dropped::UnknownConversation)]);
    let falling = vec![(5, 1), (3, 1)];
    let (quiet, low_watermark) = (
        Heartbeat { number: 1, low_watermark: Attempt(0), leases: vec![], asked: vec![], writes: false },
        Attempt(0),
    );
    solo.says(1, Body::Heartbeat(Heartbeat { leases: falling.clone(), ..quiet.clone() }));
    solo.says(1, Body::Heartbeat(Heartbeat { asked: falling.clone(), ..quiet }));
    solo.says(1, Body::HeartbeatAck(HeartbeatAck { leases: falling.clone(), ..answer }));
    solo.says(1, Body::Release(Release { low_watermark, attempts: falling, answer: true }));
    solo.says(1, Body::Released(Released { attempts: vec![(5, 1), (3, 1)] }));
    solo.says(1, Body::Register(register(u64::MAX, ROOM, &[0])));
    let (disordered, far) = ((peer, Dropped::Disordered), (peer, Dropped::NoSuchAttempt));
    assert_eq!(dropped(&mut solo), [disordered, disordered, disordered, disordered, disordered, far]);
    let gauges = solo.node().gauges();
    let counted = Dropped::ALL.iter().map(|&why| gauges.dropped.of(why)).collect::<Vec<_>>();
    assert_eq!((counted, gauges.dropped.total()), (vec![1, 1, 1, 1, 1, 0, 0, 1, 5], 11));
}

#[test]
fn the_trace_reports_quarantine_from_failure_to_the_last_post() {
    let mut solo = Solo::serving(|_| {});
    solo.listen();
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0).id;
    let begun = story(&mut solo, sender);
    assert_eq!(
        begun.last(),
        Some(&KvWhat::PostStarted { post, op: kv_core::Op::Write, bytes: 64, descriptors: 1 })
    );

    solo.says(1, abort(1, ROOM));
    let told = story(&mut solo, sender);
    let [KvWhat::Failed(failure), KvWhat::QuarantineBegan { reason, pages: 1, items: 0 }] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(failure.cause, Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(*reason, QuarantineReason::OwnPosts);

    // What is given now comes back at once, and is not what the quarantine is about.
    solo.input(Input::Command(kv_core::proto::Command::Send {
        session: sender,
        chunk: kv_core::Pages::unpooled(crate::solo::list(&[6, 7])).unwrap(),
    }));
    assert_eq!(story(&mut solo, sender), [KvWhat::PagesBack { pages: 2 }]);

    let span = Duration::from_secs(3);
    solo.sleep(span);
    solo.posted(post, Err(TransportError::Cancelled));
    let error = Some(TransportError::Cancelled);
    assert_eq!(
        story(&mut solo, sender),
        [
            KvWhat::PostEnded { post, bytes: 64, took: span, error },
            KvWhat::PagesBack { pages: 1 },
            KvWhat::QuarantineEnded { reason: QuarantineReason::OwnPosts, lasted: span },
            KvWhat::Closed,
        ]
    );
}

#[test]
fn a_session_whose_pages_come_back_with_its_failure_was_never_in_quarantine() {
    let mut solo = Solo::serving(|_| {});
    solo.listen();
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 2, &[&[5, 6]]);
    solo.abort(sender);
    let told = story(&mut solo, sender);
    assert!(
        matches!(told[..], [.., KvWhat::Failed(_), KvWhat::PagesBack { pages: 2 }, KvWhat::Closed]),
        "{told:?}"
    );
    assert!(!told.iter().any(|what| matches!(what, KvWhat::QuarantineBegan { .. })));
}

#[test]
fn a_listener_that_never_fetches_costs_no_more_than_the_last_events() {
    let mut solo = Solo::serving(|_| {});
    let garbage = || Input::Frame { from: Origin(1), frame: Bytes::from_static(b"garbage") };
    solo.input(garbage());
    assert!(solo.told().is_empty(), "nobody listens yet");
    solo.listen();
    for _ in 0..2 * MAX_EVENTS {
        solo.input(garbage());
    }
    let told = solo.told();
    assert_eq!((told.len(), told[0].missed), (MAX_EVENTS, MAX_EVENTS as u64));
    assert!(told[1..].iter().all(|event| event.missed == 0));
    assert!(solo.told().is_empty());
}

#[test]
fn the_trace_reports_messages_with_session_and_numbers() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.listen();
    let unpermitted = crate::solo::with(register(1, ROOM, &[0]), |to| (to.ask, to.permit_ms) = (0, 0));
    solo.says(1, Body::Register(unpermitted.clone()));
    solo.says(1, Body::Register(unpermitted));
    let (number, low_watermark) = (6, Attempt(0));
    solo.says(
        1,
        Body::HeartbeatAck(HeartbeatAck {
            number,
            low_watermark,
            lease_ms: 3,
            leases: vec![(9, 2)],
            permit_ms: 5,
        }),
    );
    let told: Vec<_> = solo
        .told()
        .into_iter()
        .filter_map(|event| match event.what {
            KvWhat::Said(message) | KvWhat::Heard(message) => Some((event.who.session, message)),
            _ => None,
        })
        .collect();
    let register = || Message::Register { room: ROOM, pages: 1, permission: None };
    let asks = Message::Heartbeat { number: 1, leases: 0, asked: 0, writes: true };
    let millis = Duration::from_millis;
    let answer = Message::HeartbeatAnswered { number, leases: 2, lease: millis(3), permission: millis(5) };
    assert_eq!(
        told,
        [
            (None, register()),
            (None, asks),
            (Some(sender), Message::Registered),
            (Some(sender), register()),
            (Some(sender), Message::Registered),
            (None, answer),
        ]
    );
}
