//! A decode worker of the next version. Over kv-local it sends fields and messages that this version does not
//! know, and is served. If it speaks no version of this worker's, both sides are told.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_transfer::Spoken;
use kv_transfer::prelude::*;
use kv_transfer::unstable::wire::{
    Abort, Body, ConversationId, Delivery, Destination, Frame, Hello, Refused, Register, Release, VERSIONS,
    Versions, Welcome,
};
use kv_transfer::unstable::{
    BootstrapClient, BootstrapEvent, RankQuery, RankRecord, Replica, Transport, TransportEvent,
};
use kv_transfer::{Attempt, AuxIndex, Cause, Incarnation, LookupId, PeerCause, PeerId, Sender, Time};

use support::host::{Host, Setup};
use support::memory::{Memory, Shape, page_content};
use support::store::{Store, TransportKind};
use support::{PATIENCE, ended, failed, reclaimed, server};

const WORKER: PeerId = PeerId(1);
const NEXT: u8 = VERSIONS.max + 1;

/// The record of the serving host at the bootstrap server.
fn find(addr: &str) -> RankRecord {
    let mut client = HttpBootstrapClient::new(Default::default()).unwrap();
    let start = Instant::now();
    let now = || Time::from_nanos(start.elapsed().as_nanos() as u64);
    let query = RankQuery {
        role: WorkerRole::Prefill,
        service: kv_transfer::unstable::KV_SERVICE.to_owned(),
        replica: Replica::Rank(0),
    };
    client.lookup(now(), LookupId(0), addr, &query);
    loop {
        assert!(start.elapsed() < PATIENCE, "the host is not found");
        match client.poll(now()) {
            Some(BootstrapEvent::Found { mut ranks, .. }) => return ranks.remove(0),
            Some(BootstrapEvent::Failed { error, .. }) => panic!("{error}"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The offset of a frame's array of fields, after the outer array, the version, the kind, and the
/// conversation, whose first byte gives its length.
fn fields_at(frame: &[u8]) -> usize {
    4 + match frame[3] {
        0xcc => 1,
        0xcd => 2,
        0xce => 4,
        0xcf => 8,
        _ => 0,
    }
}

/// The message as the next version encodes it: with two more fields.
fn with_new_fields(frame: &[u8]) -> Bytes {
    let mut bytes = frame.to_vec();
    bytes[fields_at(frame)] += 2;
    // `{"hint": [7, nil]}` and a text.
    bytes.extend([0x81, 0xa4, b'h', b'i', b'n', b't', 0x92, 0x07, 0xc0, 0xa3, b'n', b'e', b'w']);
    bytes.into()
}

/// A message of a kind that only the next version knows.
fn of_new_kind(conversation: ConversationId) -> Bytes {
    [
        &[0x94, VERSIONS.max, 99, 0xcf][..],
        &conversation.0.to_be_bytes(),
        &[0x92, 0xc3, 0xa3, b'n', b'e', b'w'],
    ]
    .concat()
    .into()
}

/// A decode worker of the next version, by hand.
struct Newer {
    transport: LocalTransport,
    memory: Memory,
    to: RankRecord,
    heard: VecDeque<Body>,
    /// The number by which the host wants to be addressed.
    conversation: ConversationId,
}

impl Newer {
    fn meet(addr: &str, shape: Shape, versions: Versions) -> (Newer, Body) {
        let memory = Memory::new(shape, TransportKind::Local);
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        match &memory.store {
            Store::Local(arena) => transport.add_arena(arena).unwrap(),
            _ => panic!("memory of another transport"),
        }
        let mut args = KvArgs::builder("newer", 0).pages(shape.pages, 16);
        for region in memory.regions() {
            transport.register(&region).unwrap();
            args = args.region(region);
        }
        let args = args.build().unwrap();
        let to = find(addr);
        transport.connect(WORKER, &to.transports[0].metadata).unwrap();
        let hello = Hello {
            versions,
            metadata: transport.metadata().unwrap(),
            transport: transport.name().to_owned(),
            to: to.incarnation,
            incarnation: Incarnation::from_random(77),
            conversation: ConversationId::new(1, 7),
            nonce: 5,
            worker: args.worker().clone(),
            geometry: Some(Box::new(args.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        let mut newer =
            Newer { transport, memory, to, heard: VecDeque::new(), conversation: ConversationId::NONE };
        newer.say(Body::Hello(hello));
        let answer = newer.hear(|body| matches!(body, Body::Welcome(_) | Body::Refused(_)));
        if let Body::Welcome(Welcome { conversation, .. }) | Body::Refused(Refused { conversation, .. }) =
            answer
        {
            newer.conversation = conversation;
        }
        (newer, answer)
    }

    /// Sends a message with new fields, between messages that this version does not know.
    fn say(&mut self, body: Body) {
        let frame = Frame { conversation: self.conversation, body }.encode().unwrap();
        self.say_bytes(with_new_fields(&frame));
    }

    fn say_bytes(&mut self, frame: Bytes) {
        for frame in [of_new_kind(self.conversation), frame, of_new_kind(self.conversation)] {
            self.transport.send(WORKER, frame).unwrap();
        }
    }

    /// The next message for which `wanted` is true.
    fn hear(&mut self, wanted: impl Fn(&Body) -> bool) -> Body {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "{} says nothing", self.to.worker);
            match self.heard.pop_front() {
                Some(body) if wanted(&body) => return body,
                Some(_) => continue,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            let mut events = Vec::new();
            self.transport.poll(Time::from_nanos(1), &mut events);
            self.heard.extend(events.into_iter().map(|event| match event {
                TransportEvent::Frame { frame, .. } => Frame::decode(&frame).unwrap().body,
                event => panic!("{event:?}"),
            }));
        }
    }
}

/// A sender that has all its pages, in a room of its own.
fn sender(host: &mut Host, room: u64, pages: usize) -> Sender {
    let mut sender = host.sender(room, SessionOptions::default());
    let row = host.prompt_row(room);
    sender.init(pages, Some(row)).unwrap();
    sender.send(host.prompt(pages, room)).unwrap();
    sender
}

#[test]
fn a_peer_of_the_next_version_is_served_with_the_right_bytes() {
    let (_server, addr) = server();
    let shape = Shape::layer_major(16, 4, 64);
    let mut host = Setup::prefill(&addr, shape).start();
    let (mut newer, answer) = Newer::meet(&addr, shape, Versions { min: VERSIONS.max, max: NEXT });
    let Body::Welcome(Welcome { versions: VERSIONS, ask, .. }) = answer else { panic!("{answer:?}") };

    let sender_one = sender(&mut host, 1, 3);
    let pages = PageList::from_pages([9, 2, 14]).unwrap();
    let (attempt, aux) = (Attempt(1), AuxIndex(5));
    let to = Destination {
        pages: pages.clone(),
        first_page: 0,
        total_pages: 3,
        aux: Some(aux),
        aux_here: true,
        groups: Default::default(),
        ask,
        permit_ms: 60_000,
    };
    newer.say(Body::Register(Register {
        attempt,
        low_watermark: attempt,
        room: Room::Number(1),
        ranks: 1,
        ttl_ms: 60_000,
        delivery: Delivery::Write(to),
    }));
    let mut parts = 0;
    loop {
        let done = newer.hear(|body| matches!(body, Body::Progress(_)));
        let Body::Progress(done) = done else { panic!("{done:?}") };
        parts += 1;
        if done.total.is_some_and(|total| total == parts) {
            break;
        }
    }
    newer.say(Body::Release(Release { low_watermark: Attempt(2), attempts: vec![(1, 1)], answer: false }));
    assert_eq!(ended(&sender_one), KvPoll::Success);
    for (position, page) in pages.iter().enumerate() {
        newer.memory.page_arrived(page, &page_content(1, position, shape.page_len()), &"the request");
    }
    let row = support::memory::row_content(1, shape.row_len());
    newer.memory.row_arrived(aux.0, &row, &"the request");
    // Nothing else was touched.
    newer.memory.check_all("the newer worker");
    host.free(reclaimed(sender_one));

    // A failure that only the next version knows has its name here.
    let evicted = sender(&mut host, 2, 1);
    let (attempt, cause) = (Attempt(2), PeerCause::Aborted);
    let abort = Body::Abort(Abort {
        failed_ms_ago: None,
        low_watermark: Attempt(0),
        attempt,
        room: Room::Number(2),
        lease_id: None,
        cause,
    });
    let frame = Frame { conversation: newer.conversation, body: abort }.encode().unwrap();
    let mut bytes = with_new_fields(&frame).to_vec();
    let at = bytes.windows(7).position(|bytes| bytes == b"Aborted").unwrap();
    bytes[at..at + 7].copy_from_slice(b"Evicted");
    newer.say_bytes(bytes.into());
    assert!(matches!(newer.hear(|body| matches!(body, Body::AbortAck(_))), Body::AbortAck(_)));
    assert_eq!(failed(&evicted), Cause::ByPeer(PeerCause::Other { name: "Evicted".to_owned() }));
    host.free(reclaimed(evicted));
}

#[test]
fn a_peer_without_a_common_version_is_refused_and_both_sides_know_both_ranges() {
    let (_server, addr) = server();
    let shape = Shape::layer_major(16, 4, 64);
    let mut host = Setup::prefill(&addr, shape).start();
    let sender = sender(&mut host, 1, 3);
    let theirs = Versions { min: NEXT, max: NEXT };
    let (mut newer, answer) = Newer::meet(&addr, shape, theirs);
    let Body::Refused(Refused { versions: VERSIONS, cause, .. }) = answer else { panic!("{answer:?}") };
    assert_eq!(cause, PeerCause::Versions { ours: VERSIONS, theirs });
    let (room, cause) = (Room::Number(1), PeerCause::Versions { ours: theirs, theirs: VERSIONS });
    newer.say(Body::Abort(Abort {
        failed_ms_ago: None,
        low_watermark: Attempt(0),
        attempt: Attempt(1),
        room,
        lease_id: None,
        cause: cause.clone(),
    }));
    newer.hear(|body| matches!(body, Body::AbortAck(_)));
    assert_eq!(failed(&sender), Cause::ByPeer(cause));
    host.free(reclaimed(sender));
    newer.memory.check_all("the newer worker");
}

#[test]
fn a_worker_offers_and_speaks_only_the_versions_that_it_is_configured_with() {
    let (_server, addr) = server();
    let shape = Shape::layer_major(16, 4, 64);
    let ours = Versions { min: NEXT, max: NEXT + 1 };
    let _host = Setup { versions: Spoken::of_another_library(ours), ..Setup::prefill(&addr, shape) }.start();
    let offer = find(&addr).offers.remove(0);
    assert_eq!((offer.min, offer.max), (ours.min.into(), ours.max.into()));
    let (_newer, answer) = Newer::meet(&addr, shape, VERSIONS);
    let Body::Refused(Refused { versions, cause, .. }) = answer else { panic!("{answer:?}") };
    assert_eq!((versions, cause), (ours, PeerCause::Versions { ours, theirs: VERSIONS }));
}
