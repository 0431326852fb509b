//! The bytes of every message, and what becomes of the bytes of a version that is not known yet.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, Codec, ConversationId, Delivery, Destination, Failed, Frame, Granted,
    Heartbeat, HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, Unreadable,
    Unspeakable, VERSIONS, Versions, Welcome, XferReq, hello_transport,
};
use kv_core::{
    Attempt, CacheGroupList, ContentHash, Incarnation, KvArgs, MAX_FRAME, PageList, PeerCause, Region,
    RegionRole, Room, SessionId, TransportOffer, WorkerId,
};

const CONVERSATION: ConversationId = ConversationId(1 << 32 | 2);

fn hello() -> Hello {
    let args = KvArgs::builder("decode", 0)
        .pages(32, 16)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64))
        .build()
        .unwrap();
    Hello {
        versions: VERSIONS,
        metadata: Bytes::from_static(b"memory"),
        transport: "test".to_owned(),
        to: Incarnation::from_random(9),
        incarnation: Incarnation::from_random(5),
        conversation: ConversationId(9),
        nonce: 7,
        worker: args.worker().clone(),
        geometry: Some(Box::new(args.geometry().clone())),
        suffixed: true,
        service: "kv".to_owned(),
    }
}

fn register(delivery: Delivery) -> Body {
    let (attempt, low_watermark, room) = (Attempt(1), Attempt(1), Room::Number(7));
    Body::Register(Register { attempt, low_watermark, room, ranks: 2, ttl_ms: 1000, delivery })
}

fn destination() -> Destination {
    Destination {
        pages: PageList::from_pages([4, 5, 9]).unwrap(),
        first_page: 8,
        total_pages: 13,
        aux: None,
        aux_here: true,
        groups: vec![CacheGroupList { group: 1, first: 6, items: PageList::from_pages([2, 3]).unwrap() }]
            .try_into()
            .unwrap(),
        ask: 4,
        permit_ms: 10_000,
    }
}

fn granted() -> Granted {
    Granted {
        attempt: Attempt(3),
        number: 6,
        lease_id: SessionId(5),
        pages: PageList::from_pages([4, 5, 9]).unwrap(),
        aux: None,
        lease_ms: 30_000,
        interval_ms: 5000,
        groups: Default::default(),
    }
}

/// One message of each kind, without its outer array and conversation, as it is written.
fn samples() -> Vec<(Body, &'static str)> {
    let (attempt, low_watermark) = (Attempt(3), Attempt(2));
    let (versions, nonce, conversation) = (VERSIONS, 7, ConversationId(9));
    let (runs, room) = (vec![(4, 5)], Room::Number(7));
    let counts = PeerCause::PageCount { sent: 3, registered: 2 };
    vec![
        (
            Body::Hello(Hello { geometry: None, ..hello() }),
            "9b920505c4066d656d6f7279a4746573740905090792a66465636f646500c400c3a26b76",
        ),
        (Body::Welcome(Welcome { versions, nonce, conversation, ask: 4 }), "94920505070904"),
        (
            Body::Refused(Refused { versions, nonce, conversation, cause: PeerCause::Unknown }),
            "949205050709c408a7556e6b6e6f776e",
        ),
        (
            register(Delivery::Write(destination())),
            "9601010702cd03e8920098c41004000000020000000900000001000000080dc0c391930106c408020000000200000004cd2710",
        ),
        (
            register(Delivery::Read(Acquire { lease_id: Some(SessionId(5)), number: 6 })),
            "9601010702cd03e89201920506",
        ),
        (
            Body::XferReq(XferReq {
                attempt,
                low_watermark,
                hash: ContentHash::new("ab").unwrap(),
                compatibility: "cd".to_owned(),
                bytes: 4,
                ttl_ms: 1000,
                delivery: Delivery::Read(Acquire { lease_id: None, number: 6 }),
            }),
            "970302a26162a2636404cd03e8920192c006",
        ),
        (Body::Registered(Registered { attempt }), "9103"),
        (
            Body::Progress(Progress { attempt, done: vec![(1, 1)], total: Some(2), skipped: Vec::new() }),
            "9403c40801000000010000000290",
        ),
        (
            Body::Progress(Progress { attempt, done: vec![(1, 4)], total: None, skipped: vec![3] }),
            "9403c4080100000004000000c09103",
        ),
        (
            Body::Failed(Failed { attempt, cause: counts, quiet: true }),
            "9303c41e81a950616765436f756e7482a473656e7403aa7265676973746572656402c3",
        ),
        (
            Body::Abort(Abort {
                failed_ms_ago: None,
                low_watermark: Attempt(0),
                attempt,
                room: room.clone(),
                lease_id: None,
                cause: PeerCause::Aborted,
            }),
            "960307c0c408a741626f7274656400c0",
        ),
        (
            Body::Abort(Abort {
                failed_ms_ago: Some(7),
                low_watermark: Attempt(0),
                attempt,
                room,
                lease_id: None,
                cause: PeerCause::Aborted,
            }),
            "960307c0c408a741626f727465640007",
        ),
        (Body::AbortAck(AbortAck { attempt }), "9103"),
        (Body::Granted(granted()), "98030605c41004000000020000000900000001000000c0cd7530cd138890"),
        (
            Body::Heartbeat(Heartbeat {
                number: 1,
                low_watermark,
                leases: runs.clone(),
                asked: vec![(9, 1)],
                writes: true,
            }),
            "950102c40c040000000000000005000000c40c090000000000000001000000c3",
        ),
        (
            Body::HeartbeatAck(HeartbeatAck {
                number: 1,
                low_watermark,
                lease_ms: 20,
                leases: runs.clone(),
                permit_ms: 10_000,
            }),
            "95010214c40c040000000000000005000000cd2710",
        ),
        (
            Body::Release(Release { low_watermark, attempts: runs.clone(), answer: true }),
            "9302c40c040000000000000005000000c3",
        ),
        (Body::Released(Released { attempts: runs }), "91c40c040000000000000005000000"),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encoded(body: &Body) -> Vec<u8> {
    Frame { conversation: CONVERSATION, body: body.clone() }.encode().unwrap().to_vec()
}

/// Where the fields of a frame to [`CONVERSATION`] begin: after the outer array, version, kind and
/// conversation.
const FIELDS: usize = 12;

/// The frame with more fields, or with fewer: the last ones take up this many bytes.
fn resized(frame: &[u8], fields: i8, cut: usize, more: &[u8]) -> Vec<u8> {
    let mut bytes = frame[..frame.len() - cut].to_vec();
    bytes[FIELDS] = bytes[FIELDS].checked_add_signed(fields).unwrap();
    bytes.extend(more);
    bytes
}

#[test]
fn the_bytes_of_a_message_never_change_within_a_version() {
    for (body, golden) in samples() {
        let bytes = encoded(&body);
        let every = matches!(body.kind(), 1 | 2 | 3 | 9 | 10);
        let version = if every { 0 } else { 5 };
        assert_eq!(hex(&bytes[..FIELDS]), format!("94{version:02x}{:02x}cf0000000100000002", body.kind()));
        assert_eq!(hex(&bytes[FIELDS..]), golden, "{body:?}");
        assert_eq!(Frame::decode(&bytes), Ok(Frame { conversation: CONVERSATION, body }));
    }
}

#[test]
fn fields_that_a_newer_version_has_appended_are_skipped_in_every_message() {
    let long = [&[0xda, 0xff, 0xff][..], &[b'x'; 0xffff]].concat();
    let deep = [&[0x91; 13][..], &[0xc0]].concat();
    for (body, _) in samples() {
        let bytes = encoded(&body);
        let frame = Frame { conversation: CONVERSATION, body };
        for more in [&[0xc0][..], &[0x82, 0xa1, b'a', 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0x90], &long, &deep] {
            assert_eq!(Frame::decode(&resized(&bytes, 1, 0, more)).as_ref(), Ok(&frame), "{more:02x?}");
        }
        assert_eq!(Frame::decode(&resized(&bytes, 2, 0, &[0xc3, 0x07])).as_ref(), Ok(&frame));
        // What is longer than it says, deeper than any message, or promised and not there is no message.
        let kind = frame.body.kind();
        let deeper = [&[0x91; 20][..], &[0xc0]].concat();
        for (fields, more) in [(0, &[0xc0][..]), (1, &deeper), (1, &[]), (1, &[0xdd, 0xff, 0xff, 0xff, 0xff])]
        {
            let read = Frame::decode(&resized(&bytes, fields, 0, more));
            assert_eq!(read, Err(Unreadable::Malformed { kind }), "{more:02x?}");
        }
    }
}

#[test]
fn fields_that_an_older_version_does_not_have_get_their_defaults() {
    let attempt = Attempt(3);
    let cause = PeerCause::Aborted;
    for (body, fields, cut) in [
        (Body::Hello(Hello { suffixed: false, ..hello() }), 2, 4),
        (
            Body::Welcome(Welcome { versions: VERSIONS, nonce: 7, conversation: ConversationId(9), ask: 0 }),
            1,
            1,
        ),
        (Body::Progress(Progress { attempt, done: vec![(1, 4)], total: None, skipped: Vec::new() }), 2, 2),
        (Body::Failed(Failed { attempt, cause: cause.clone(), quiet: false }), 1, 1),
        (
            Body::Abort(Abort {
                failed_ms_ago: None,
                attempt,
                room: Room::Number(7),
                lease_id: None,
                cause,
                low_watermark: Attempt(0),
            }),
            2,
            2,
        ),
        (Body::Granted(granted()), 1, 1),
    ] {
        let bytes = encoded(&body);
        let kind = body.kind();
        assert_eq!(Frame::decode(&resized(&bytes, -fields, cut, &[])).map(|frame| frame.body), Ok(body));
        // What a message has always had must be there.
        let without = rmp_serde::to_vec(&(bytes[1], kind, CONVERSATION, [(); 0])).unwrap();
        assert_eq!(Frame::decode(&without), Err(Unreadable::Malformed { kind }));
    }
}

/// What stands before the number of a delivery: the time for which the registration is kept, and that a pair
/// comes.
const WISH: [u8; 4] = [0xcd, 0x03, 0xe8, 0x92];

/// The registration with another number of fields in its delivery: the last ones take up this many bytes.
fn with_delivery(delivery: &Delivery, fields: i8, cut: usize, more: &[u8]) -> Result<Frame, Unreadable> {
    let mut bytes = encoded(&register(delivery.clone()));
    let at = bytes.windows(WISH.len()).position(|bytes| bytes == WISH).unwrap() + WISH.len() + 1;
    bytes[at] = bytes[at].checked_add_signed(fields).unwrap();
    bytes.truncate(bytes.len() - cut);
    bytes.extend(more);
    Frame::decode(&bytes)
}

#[test]
fn newer_fields_of_a_delivery_are_skipped_and_unknown_deliveries_malformed() {
    let read = |delivery: Delivery| Ok(Frame { conversation: CONVERSATION, body: register(delivery) });
    for delivery in [Delivery::Write(destination()), Delivery::Read(Acquire { lease_id: None, number: 6 })] {
        assert_eq!(with_delivery(&delivery, 0, 0, &[]), read(delivery.clone()));
        assert_eq!(
            with_delivery(&delivery, 2, 0, &[0x82, 0xa1, b'a', 0xc0, 7, 0x90, 0xc3]),
            read(delivery.clone())
        );
        assert_eq!(with_delivery(&delivery, 0, 0, &[0xc0]), Err(Unreadable::Malformed { kind: 4 }));
    }
    let without = Destination { groups: Default::default(), ask: 0, permit_ms: 0, ..destination() };
    assert_eq!(with_delivery(&Delivery::Write(without.clone()), -3, 3, &[]), read(Delivery::Write(without)));
    let mut unknown = encoded(&register(Delivery::Read(Acquire { lease_id: None, number: 6 })));
    let at = unknown.windows(WISH.len()).position(|bytes| bytes == WISH).unwrap() + WISH.len();
    assert_eq!(std::mem::replace(&mut unknown[at], 2), 1);
    assert_eq!(Frame::decode(&unknown), Err(Unreadable::Malformed { kind: 4 }));
}

#[test]
fn an_unknown_cause_keeps_its_name_up_to_a_bound() {
    let read = |cause: &[u8]| {
        let cause = Bytes::copy_from_slice(cause);
        let bytes = rmp_serde::to_vec(&(VERSIONS.max, 8, CONVERSATION, (Attempt(3), cause, true))).unwrap();
        Frame::decode(&bytes).map(|frame| match frame.body {
            Body::Failed(Failed { cause, quiet: true, .. }) => cause,
            body => panic!("{body:?}"),
        })
    };
    let named = |value: serde_json::Value| rmp_serde::to_vec_named(&value).unwrap();
    let other = |name: &str| Ok(PeerCause::Other { name: name.to_owned() });
    assert_eq!(read(&named("Preempted".into())), other("Preempted"));
    assert_eq!(read(&named(serde_json::json!({"Preempted": {"by": [1, {"a": 2}]}}))), other("Preempted"));
    assert_eq!(read(&named(serde_json::json!({"Preempted": 7}))), other("Preempted"));
    let long = "ö".repeat(100_000);
    assert_eq!(read(&named(long.as_str().into())), other(&"ö".repeat(256)));
    assert_eq!(read(&named(serde_json::json!({ long: {} }))), other(&"ö".repeat(256)));
    // A cause that is known, with a field that is not, is what it was.
    let known = named(serde_json::json!({"PageCount": {"sent": 3, "registered": 2, "of": "a draft"}}));
    assert_eq!(read(&known), Ok(PeerCause::PageCount { sent: 3, registered: 2 }));
    for garbage in [&[][..], &[0xc0], &[0xc3], &[0x80], &[0x90], &[0xa9, b'x'], &[0x81, 0x01, 0xc0]] {
        assert_eq!(read(garbage), Err(Unreadable::Malformed { kind: 8 }), "{garbage:02x?}");
    }
}

#[test]
fn an_unreadable_geometry_leaves_the_rest_of_a_hello_readable() {
    let Hello {
        versions, metadata, transport, to, incarnation, conversation, nonce, worker, geometry, ..
    } = hello();
    let read = |cache: &[u8]| {
        let cache = Bytes::copy_from_slice(cache);
        let outer = (
            versions,
            &metadata,
            &transport,
            to,
            incarnation,
            conversation,
            nonce,
            &worker,
            cache,
            true,
            "kv",
            "new",
        );
        let bytes = rmp_serde::to_vec(&(0, 1, ConversationId::NONE, outer)).unwrap();
        assert_eq!(hello_transport(&bytes), Some(TransportOffer::new(&transport, metadata.clone())));
        match Frame::decode(&bytes).unwrap().body {
            Body::Hello(read) => {
                assert_eq!(Hello { geometry: None, ..read.clone() }, Hello { geometry: None, ..hello() });
                read.geometry
            }
            body => panic!("{body:?}"),
        }
    };
    let mut cache = serde_json::to_value(geometry.as_ref().unwrap()).unwrap();
    cache["experts"] = 8.into();
    cache["regions"][0]["tier"] = "host".into();
    assert_eq!(read(&rmp_serde::to_vec_named(&cache).unwrap()), geometry);
    // A default that is documented stands for a field that is not there.
    let layer = cache["regions"][0].as_object_mut().unwrap();
    assert!(layer.remove("holds").is_some() && layer.remove("group").is_some());
    assert_eq!(read(&rmp_serde::to_vec_named(&cache).unwrap()), geometry);
    cache["regions"][0]["memory"] = "Remote".into();
    assert_eq!(read(&rmp_serde::to_vec_named(&cache).unwrap()), None);
    for garbage in [&[][..], &[0xc0], &[0xdd, 0xff, 0xff, 0xff, 0xff], &[0x81, 0xa1]] {
        assert_eq!(read(garbage), None, "{garbage:02x?}");
    }
    // Without its outer form it is no hello, and nobody is asked whose metadata it brings.
    let short = (versions, &metadata, &transport, to, incarnation, conversation, nonce);
    let short = rmp_serde::to_vec(&(0, 1, ConversationId::NONE, short)).unwrap();
    assert_eq!(Frame::decode(&short), Err(Unreadable::Malformed { kind: 1 }));
    let worker = WorkerId { rank: 1, ..worker };
    let as_map = rmp_serde::to_vec_named(&serde_json::json!({"versions": [4, 4], "worker": worker})).unwrap();
    let as_map = [&[0x94, 0, 1, 0][..], &as_map].concat();
    assert_eq!(Frame::decode(&as_map), Err(Unreadable::Malformed { kind: 1 }));
    assert_eq!(hello_transport(&as_map), None);
}

#[test]
fn frames_use_the_newest_common_version_and_no_other_is_read() {
    let range = |min, max| Versions { min, max };
    for (ours, theirs, common) in [
        (range(4, 4), range(4, 4), Some(4)),
        (range(3, 6), range(1, 5), Some(5)),
        (range(5, 5), range(4, 9), Some(5)),
        (range(4, 5), range(6, 7), None),
        // A range that is none has no version in common with any.
        (range(4, 5), range(5, 4), None),
    ] {
        assert_eq!(Codec::between(ours, theirs).and_then(Codec::version), common);
        assert_eq!(Codec::between(theirs, ours).and_then(Codec::version), common);
    }
    let next = VERSIONS.max + 1;
    let newer = Codec::between(range(next, next), range(1, 127)).unwrap();
    let own = Codec::between(VERSIONS, VERSIONS).unwrap();
    for (body, _) in samples() {
        let (kind, conversation) = (body.kind(), CONVERSATION);
        let bytes = newer.encode(conversation, &body).unwrap();
        let frame = Frame { conversation, body: body.clone() };
        assert_eq!(Frame::conversation_of(&bytes), Some(conversation), "whatever the version is");
        assert_eq!(newer.decode(&bytes).as_ref(), Ok(&frame));
        if matches!(kind, 1 | 2 | 3 | 9 | 10) {
            // By which two workers meet and part.
            assert_eq!(bytes, Codec::MEETING.encode(conversation, &body).unwrap());
            assert_eq!(own.decode(&bytes).as_ref(), Ok(&frame));
        } else {
            assert_eq!(Codec::MEETING.encode(conversation, &body), Err(Unspeakable::NotMet { kind }));
            assert_eq!(Codec::MEETING.decode(&bytes), Err(Unreadable::NotMet { kind }));
            assert_eq!(own.decode(&bytes), Err(Unreadable::Version { got: next, spoken: VERSIONS }));
            assert_eq!(own.decode(&own.encode(conversation, &body).unwrap()).as_ref(), Ok(&frame));
        }
    }
}

#[test]
fn bytes_that_are_no_frame_get_a_named_error() {
    let frame = encoded(&Body::Registered(Registered { attempt: Attempt(1) }));
    let with = |at: usize, value: u8| {
        let mut bytes = frame.clone();
        bytes[at] = value;
        Frame::decode(&bytes)
    };
    let got = VERSIONS.max + 1;
    assert_eq!(with(1, got), Err(Unreadable::Version { got, spoken: VERSIONS }));
    assert_eq!(with(2, 99), Err(Unreadable::Kind { got: 99 }));
    // A kind in the form of the others.
    assert_eq!(with(1, 0), Err(Unreadable::Kind { got: 5 }));
    assert_eq!(with(2, 10), Err(Unreadable::Kind { got: 10 }));
    assert_eq!(with(0, 0x93), Err(Unreadable::Malformed { kind: 0 }));
    assert_eq!(Frame::decode(&[]), Err(Unreadable::Malformed { kind: 0 }));
    let mut longer = frame.clone();
    longer.push(0);
    assert_eq!(Frame::decode(&longer), Err(Unreadable::Malformed { kind: 5 }));
    let done = vec![(0, 1); MAX_FRAME / 3 + 1];
    let endless = Progress { attempt: Attempt(1), done, total: None, skipped: Vec::new() };
    let endless = Frame { conversation: ConversationId(1), body: Body::Progress(endless) };
    assert!(matches!(endless.encode(), Err(Unspeakable::TooLong { got }) if got > MAX_FRAME));
    assert_eq!(Frame::decode(&vec![0x94; MAX_FRAME + 1]), Err(Unreadable::TooLong { got: MAX_FRAME + 1 }));
}
