//! Requests by content, frame by frame: what a service is told of them, and what becomes of each.

use std::time::Duration;

use kv_core::trace::Dropped;
use kv_core::wire::{
    AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Granted, Refused, Registered,
    XferReq,
};
use kv_core::{
    Asked, Attempt, ContentHash, KvPoll, Mismatch, PeerCause, Room, Service, SessionId, SessionOptions,
    TransferMode,
};

use crate::solo::{Solo, abort, destination, hello, list, register};

const SECOND: Duration = Duration::from_secs(1);

fn hash() -> ContentHash {
    ContentHash::new("image-1").unwrap()
}

/// A request for the entry of two pages, to be written into the pages 5 and 6.
fn request(attempt: u64) -> XferReq {
    let to = destination(&register(attempt, Room::Number(0), &[5, 6]));
    delivering(attempt, Delivery::Write(Destination { ..to }))
}

/// A request for the entry of two pages by a peer that reads the pages.
fn reading(attempt: u64, lease_id: Option<SessionId>) -> XferReq {
    delivering(attempt, Delivery::Read(Acquire { lease_id, number: 1 }))
}

fn delivering(attempt: u64, delivery: Delivery) -> XferReq {
    XferReq {
        attempt: Attempt(attempt),
        low_watermark: Attempt(0),
        hash: hash(),
        compatibility: "one model".to_owned(),
        bytes: 100,
        ttl_ms: 60_000,
        delivery,
    }
}

fn failed(attempt: u64, cause: PeerCause) -> Body {
    Body::Failed(Failed { attempt: Attempt(attempt), cause, quiet: true })
}

/// A node of a service that is asked by content, which peer 1 has greeted.
fn by_content() -> Solo {
    let mut solo = Solo::new(|config| {
        config.service = Service::by_content("ec", "one model");
        config.timing.peer_timeout = Duration::from_secs(3600);
    });
    let mut theirs = hello(1, ConversationId::new(1, 1));
    theirs.service = "ec".to_owned();
    solo.greet_with(theirs);
    solo
}

/// The one request that the service sees.
fn asked(solo: &mut Solo) -> Asked {
    let asked = solo.asked().expect("a request");
    assert_eq!(solo.asked(), None);
    asked
}

/// Serves the request in this room with these pages, as the service would.
fn serve(solo: &mut Solo, room: &Room, pages: &[u32]) -> SessionId {
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Auto));
    let sender = solo.open_sender_with(room.clone(), 1, options);
    solo.send_list(sender, list(pages));
    sender
}

#[test]
fn a_worker_of_the_kv_service_refuses_a_request_by_content_as_missing() {
    let mut solo = Solo::serving(|_| {});
    for request in [request(1), reading(2, None), reading(3, Some(SessionId(1)))] {
        let attempt = request.attempt.0;
        // The answer is the same each time, and no sender of a room is concerned.
        for _ in 0..2 {
            solo.says(1, Body::XferReq(request.clone()));
            assert_eq!(solo.answer(), failed(attempt, PeerCause::EntryMissing));
            assert_eq!((solo.asked(), solo.node().gauges().registrations), (None, 0));
        }
    }
    assert_eq!(solo.node().gauges().failed_rooms, 0);
}

#[test]
fn a_registration_for_a_room_at_a_worker_by_content_is_dropped_and_counted() {
    let mut solo = by_content();
    let room = Room::Number(7);
    let sender = solo.open_sender(room.clone(), 1);
    solo.send(sender, 1, &[&[3]]);
    let dropped = |solo: &Solo| solo.node().gauges().dropped.of(Dropped::NoSuchAttempt);
    for (count, registration) in
        [(1, register(1, room.clone(), &[5])), (2, crate::solo::acquire(2, room, Some(sender), 1))]
    {
        solo.says(1, Body::Register(registration));
        assert_eq!((solo.frames(), dropped(&solo), solo.asked()), (vec![], count, None));
    }
    let gauges = solo.node().gauges();
    assert_eq!((gauges.registrations, gauges.incoming, gauges.targets), (0, 0, 0));
    assert!(solo.take_posts().is_empty());
}

#[test]
fn a_hello_of_another_service_is_refused_with_the_names_of_both() {
    for (mut solo, ours, theirs) in [(by_content(), "ec", "kv"), (Solo::serving(|_| {}), "kv", "ec")] {
        let mut stranger = hello(2, ConversationId::new(1, 2));
        stranger.service = theirs.to_owned();
        solo.hello(stranger);
        let Body::Refused(Refused { cause, .. }) = solo.answer() else { panic!("not refused") };
        let (field, ours, theirs) = ("service".to_owned(), ours.to_owned(), theirs.to_owned());
        assert_eq!(cause, PeerCause::Incompatible(Mismatch { field, ours, theirs }));
    }
}

#[test]
fn a_repeated_request_is_acknowledged_each_time_and_asked_once() {
    let mut solo = by_content();
    for request in [request(1), reading(2, None)] {
        let attempt = request.attempt;
        solo.says(1, Body::XferReq(request.clone()));
        let first = asked(&mut solo);
        assert_eq!((&first.content.hash, first.content.bytes, first.attempt), (&hash(), 100, attempt));
        assert_eq!(first.reads, matches!(request.delivery, Delivery::Read(_)));
        for _ in 0..3 {
            solo.says(1, Body::XferReq(request.clone()));
            assert_eq!(solo.answer(), Body::Registered(Registered { attempt }));
            assert_eq!(solo.asked(), None);
        }
        // An answer that was lost is repeated, and the request is not asked again.
        solo.refuse(&first, PeerCause::EntryNotReady);
        assert_eq!(solo.answer(), failed(attempt.0, PeerCause::EntryNotReady));
        solo.says(1, Body::XferReq(request));
        assert_eq!((solo.answer(), solo.asked()), (failed(attempt.0, PeerCause::EntryNotReady), None));
    }
}

#[test]
fn a_sender_in_the_room_of_a_request_serves_that_request_and_no_other() {
    let mut solo = by_content();
    solo.says(1, Body::XferReq(request(1)));
    let first = asked(&mut solo);
    solo.says(1, Body::XferReq(request(2)));
    let second = asked(&mut solo);
    assert_ne!(first.room, second.room);
    serve(&mut solo, &second.room, &[8, 9]);
    solo.says(1, crate::solo::permits(1, 10_000));
    let posts = solo.take_posts();
    assert!(!posts.is_empty());
    for post in posts {
        solo.posted(post.id, Ok(()));
    }
    let gauges = solo.node().gauges();
    assert_eq!((gauges.registrations, gauges.targets), (1, 0), "the first request waits");
    assert!(!solo.frames().iter().any(|body| matches!(body, Body::Failed(_))));
}

#[test]
fn a_refusal_after_an_abort_or_after_the_ttl_has_no_effect() {
    let mut solo = by_content();
    solo.says(1, Body::XferReq(request(1)));
    let gone = asked(&mut solo);
    solo.says(1, abort(1, Room::Number(0)));
    assert_eq!(solo.answer(), Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.refuse(&gone, PeerCause::EntryMissing);
    assert_eq!(solo.frames(), []);

    solo.says(1, Body::XferReq(XferReq { ttl_ms: 1000, ..request(2) }));
    let late = asked(&mut solo);
    let said = solo.run_for(2 * SECOND);
    assert!(said.iter().any(|(_, body)| *body == failed(2, PeerCause::DeadlineExceeded)), "{said:?}");
    solo.refuse(&late, PeerCause::EntryMissing);
    assert_eq!(solo.frames(), []);
}

#[test]
fn an_abort_of_a_waiting_request_leaves_no_failed_room_and_ends_no_other() {
    let mut solo = by_content();
    for request in [request(1), reading(2, None)] {
        let attempt = request.attempt;
        solo.says(1, Body::XferReq(request));
        let waiting = asked(&mut solo);
        // The abort names the room of another request, and of nobody.
        let other = serve(&mut solo, &Room::Number(40 + attempt.0), &[8, 9]);
        for room in [Room::Number(40 + attempt.0), waiting.room.clone()] {
            solo.says(1, abort(attempt.0, room));
            assert_eq!(solo.answer(), Body::AbortAck(AbortAck { attempt }));
        }
        let gauges = solo.node().gauges();
        assert_eq!((gauges.failed_rooms, gauges.registrations, gauges.incoming), (0, 0, 0));
        assert_ne!(solo.poll(other), KvPoll::Failed);
        // An abort that overtakes its request closes the attempt: the request is never asked.
        solo.says(1, abort(attempt.0 + 10, Room::Number(1)));
        solo.says(1, Body::XferReq(delivering(attempt.0 + 10, reading(1, None).delivery)));
        assert_eq!((solo.asked(), solo.node().gauges().failed_rooms), (None, 0));
    }
}

#[test]
fn a_lease_id_in_a_request_by_content_leads_to_no_other_entry() {
    let mut solo = by_content();
    solo.says(1, Body::XferReq(reading(1, None)));
    let first = asked(&mut solo);
    let secret = serve(&mut solo, &first.room, &[8, 9]);
    let Body::Granted(granted) = solo.answer() else { panic!("{:?}", solo.answer()) };
    assert_eq!((granted.lease_id, granted.pages), (secret, list(&[8, 9])));

    solo.says(1, Body::XferReq(reading(2, Some(secret))));
    assert_eq!(solo.answer(), Body::Registered(Registered { attempt: Attempt(2) }));
    let second = asked(&mut solo);
    assert!(second.reads && second.room != first.room);
    let session = serve(&mut solo, &second.room, &[3, 4]);
    let Body::Granted(Granted { attempt, lease_id, pages, .. }) = solo.answer() else { panic!() };
    assert_eq!((attempt, lease_id, pages), (Attempt(2), session, list(&[3, 4])));
}
