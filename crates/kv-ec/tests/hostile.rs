//! What hostile peers say to a producer, frame by frame: nothing of it keeps entries pinned, or keeps answers from
//! other peers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::NodeConfig;
use kv_core::wire::{
    Abort, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Hello, Release, VERSIONS,
    XferReq,
};
use kv_core::{
    Attempt, ContentHash, Incarnation, KvArgs, Origin, PageList, PeerCause, Room, SessionId, Time,
};
use kv_ec::{Command, EC_SERVICE, EcMachine, EcRegion, EncoderCache, Eviction, MachineConfig, SharedStore};

const US: Incarnation = Incarnation::from_random(9);
const BLOCK: u32 = 4096;
const MODEL: &str = "one model";

/// A producer, and peers of it whose every frame is in the test's hand.
struct Producer {
    machine: EcMachine,
    store: SharedStore,
    args: KvArgs,
    now: Time,
    conversations: BTreeMap<u64, ConversationId>,
    /// What the producer said to its last input.
    said: Vec<Body>,
}

impl Producer {
    fn start(change: impl FnOnce(&mut MachineConfig)) -> Producer {
        let region = EcRegion::create(16, BLOCK).unwrap();
        let args = region.args("encoder", 0).build().unwrap();
        let store = SharedStore::new(EncoderCache::new(16, BLOCK, Eviction::Lru));
        let node = NodeConfig::new(args.clone(), US, "test", Bytes::from_static(b"us"));
        let machine = EcMachine::new(MachineConfig::new(MODEL).with(change), node, store.clone());
        let now = Time::from_nanos(1_000_000_000);
        Producer { machine, store, args, now, conversations: BTreeMap::new(), said: Vec::new() }
    }

    fn save(&self, name: &str, blocks: u32) -> ContentHash {
        let hash = ContentHash::new(name).unwrap();
        let reservation = self.store.reserve(&hash, u64::from(blocks) * u64::from(BLOCK)).unwrap();
        self.store.commit(reservation).unwrap();
        hash
    }

    fn input(&mut self, input: Input<Command>) {
        self.machine.handle(self.now, input);
        self.said.clear();
        while let Some(output) = self.machine.poll_output() {
            if let Output::Send { frame, .. } = output {
                self.said.push(Frame::decode(&frame).unwrap().body);
            }
        }
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.machine.next_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.input(Input::Timeout);
        }
        self.now = end;
    }

    fn frame(&mut self, peer: u64, conversation: ConversationId, body: Body) {
        let frame = Frame { conversation, body }.encode().unwrap();
        self.input(Input::Frame { from: Origin(peer), frame });
    }

    fn greet(&mut self, peer: u64) {
        self.greet_as(peer, false);
    }

    fn greet_as(&mut self, peer: u64, suffixed: bool) {
        let args = EcRegion::create(16, BLOCK).unwrap().args(&format!("peer-{peer}"), 0).build().unwrap();
        let hello = Hello {
            versions: VERSIONS,
            to: US,
            worker: args.worker().clone(),
            incarnation: Incarnation::from_random(peer),
            conversation: ConversationId::new(1, peer as u32),
            nonce: 1,
            transport: "test".to_owned(),
            metadata: Bytes::from_static(b"peer"),
            geometry: Some(Box::new(self.args.geometry().clone())),
            suffixed,
            service: EC_SERVICE.to_owned(),
        };
        self.frame(peer, ConversationId::NONE, Body::Hello(hello));
        let welcomed = self.said.iter().find_map(|body| match body {
            Body::Welcome(welcome) => Some(welcome.conversation),
            _ => None,
        });
        self.conversations.insert(peer, welcomed.expect("a welcome"));
    }

    fn says(&mut self, peer: u64, body: Body) {
        self.frame(peer, self.conversations[&peer], body);
    }

    /// A peer asks for an entry of one block, to read the entry under a lease.
    fn asks(&mut self, peer: u64, attempt: u64, hash: &ContentHash, change: impl FnOnce(&mut XferReq)) {
        let mut request = XferReq {
            attempt: Attempt(attempt),
            low_watermark: Attempt(0),
            hash: hash.clone(),
            compatibility: MODEL.to_owned(),
            bytes: BLOCK.into(),
            ttl_ms: 60_000,
            delivery: Delivery::Read(Acquire { lease_id: None, number: 0 }),
        };
        change(&mut request);
        self.says(peer, Body::XferReq(request));
    }

    fn refusals(&self) -> Vec<PeerCause> {
        let refusal = |body: &Body| match body {
            Body::Failed(Failed { cause, .. }) => Some(cause.clone()),
            _ => None,
        };
        self.said.iter().filter_map(refusal).collect()
    }

    fn answers(&self) -> usize {
        self.machine.gauges().answers
    }

    fn pinned(&self) -> u32 {
        self.store.gauges().pinned
    }
}

/// The request is over before the service has seen it: there is nobody to answer.
#[test]
fn a_request_without_patience_pins_nothing_and_takes_no_place_among_answers() {
    let mut producer = Producer::start(|config| config.max_answers = 4);
    let hash = producer.save("a", 1);
    producer.greet(1);
    producer.greet(2);
    for attempt in 0..20 {
        producer.asks(1, attempt, &hash, |request| request.ttl_ms = 0);
        assert_eq!(producer.refusals(), [PeerCause::DeadlineExceeded]);
        assert_eq!((producer.answers(), producer.pinned()), (0, 0), "attempt {attempt}");
    }
    producer.asks(2, 0, &hash, |_| ());
    assert_eq!((producer.refusals(), producer.answers(), producer.pinned()), (vec![], 1, 1));
}

/// No session of the producer's worker stands for what a peer reads.
#[test]
fn a_producer_that_drains_is_busy_until_its_reader_has_released_and_refuses_later_requests() {
    let mut producer = Producer::start(|_| ());
    let hash = producer.save("a", 1);
    producer.greet(1);
    assert!(!producer.machine.is_busy());
    producer.asks(1, 1, &hash, |_| ());
    producer.input(Input::Command(Command::Drain));
    assert!(producer.machine.is_busy() && producer.pinned() == 1);
    producer.asks(1, 2, &hash, |_| ());
    assert_eq!((producer.refusals(), producer.answers()), (vec![PeerCause::WorkerStopped], 1));
    let released = Release { low_watermark: Attempt(0), attempts: vec![(1, 1)], answer: true };
    producer.says(1, Body::Release(released));
    assert_eq!((producer.machine.is_busy(), producer.pinned()), (false, 0));
}

/// One peer that asks for more and more, and reads nothing.
#[test]
fn a_greedy_peer_leaves_answers_for_others() {
    let mut producer = Producer::start(|config| config.max_answers = 8);
    let hash = producer.save("a", 1);
    producer.greet(1);
    producer.greet(2);
    for attempt in 0..40 {
        producer.asks(1, attempt, &hash, |_| ());
    }
    producer.asks(2, 0, &hash, |_| ());
    assert_eq!(producer.refusals(), []);
}

#[test]
fn other_hashes_leases_and_aborts_under_one_attempt_change_nothing_of_the_answer() {
    let mut producer = Producer::start(|_| ());
    let (hash, other) = (producer.save("a", 1), producer.save("b", 2));
    producer.greet(1);
    producer.greet(2);
    producer.asks(1, 0, &hash, |_| ());
    assert_eq!((producer.answers(), producer.pinned()), (1, 1));
    // The same attempt for another entry, by writes, with lease ids.
    producer.asks(1, 0, &other, |request| request.bytes = 2 * u64::from(BLOCK));
    let pages = PageList::from_pages([3]).unwrap();
    let to = Destination {
        pages,
        first_page: 0,
        total_pages: 1,
        aux: None,
        aux_here: true,
        groups: Default::default(),
        ask: 1,
        permit_ms: 10_000,
    };
    producer.asks(1, 0, &other, |request| request.delivery = Delivery::Write(to.clone()));
    let lease = |id| Delivery::Read(Acquire { lease_id: Some(SessionId(id)), number: 0 });
    for id in 0..4 {
        producer.asks(1, 0, &other, |request| request.delivery = lease(id));
        producer.asks(2, id, &other, |request| request.delivery = lease(id));
        assert_eq!(producer.refusals().len(), 1, "two blocks are not one");
    }
    assert_eq!((producer.answers(), producer.pinned()), (1, 1));
    // The rooms and leases of others, named in aborts.
    for (attempt, room) in [(10, "asked-1-0"), (11, "asked-0-0"), (12, "asked-2-0")] {
        for (lease_id, failed_ms_ago) in [(None, None), (None, Some(0)), (Some(SessionId(1)), None)] {
            let abort = Abort {
                low_watermark: Attempt(0),
                attempt: Attempt(attempt),
                room: Room::request(room).unwrap(),
                lease_id,
                cause: PeerCause::Aborted,
                failed_ms_ago,
            };
            producer.says(2, Body::Abort(abort));
        }
    }
    assert_eq!((producer.answers(), producer.pinned()), (1, 1));
    // The reader's own release ends the answer, and nothing else is left.
    let release = Release { low_watermark: Attempt(0), attempts: vec![(0, 1)], answer: false };
    producer.says(1, Body::Release(release));
    assert_eq!((producer.answers(), producer.pinned()), (0, 0));
    assert_eq!(producer.store.gauges().cached, 3);
}

/// Whatever a destination claims, the answer ends, and the entry is unpinned.
#[test]
fn destinations_that_do_not_fit_the_entry_end_the_answer_and_unpin() {
    let mut producer = Producer::start(|_| ());
    let hash = producer.save("a", 2);
    producer.greet(1);
    let cases: [(&[u32], u32, u32); 7] = [
        (&[3], 0, 1),
        (&[3, 4, 5], 0, 3),
        (&[3, 99], 0, 2),
        (&[3, 3], 0, 2),
        (&[3, 4], u32::MAX, 2),
        (&[3, 4], 0, u32::MAX),
        (&[], 0, 0),
    ];
    for (attempt, (pages, first_page, total_pages)) in (0..).zip(cases) {
        let pages = PageList::from_pages(pages.iter().copied()).unwrap();
        let to = Destination {
            pages,
            first_page,
            total_pages,
            aux: None,
            aux_here: true,
            groups: Default::default(),
            ask: 1,
            permit_ms: 10_000,
        };
        producer.asks(1, attempt, &hash, |request| {
            (request.bytes, request.delivery) = (2 * u64::from(BLOCK), Delivery::Write(to));
        });
        assert_eq!((producer.answers(), producer.pinned()), (0, 0), "case {attempt}");
    }
}

/// Suffixes that engines append to ids of requests look like the end of a long attempt's room.
#[test]
fn a_peer_whose_engine_appends_suffixes_is_answered_like_any_other() {
    let mut producer = Producer::start(|_| ());
    let hash = producer.save("a", 1);
    producer.greet_as(1, true);
    for attempt in [10_000_000, 10_000_001, 10_000_002] {
        producer.asks(1, attempt, &hash, |request| request.low_watermark = Attempt(10_000_000));
        assert_eq!(producer.refusals(), []);
    }
    assert_eq!(producer.answers(), 3);
    producer.run_for(Duration::from_secs(3600));
    assert_eq!((producer.answers(), producer.pinned()), (0, 0));
    let gauges = producer.machine.gauges().node;
    assert_eq!((gauges.senders, gauges.registrations, gauges.posts), (0, 0, 0));
}

#[test]
fn a_request_with_another_compatibility_text_is_refused_whatever_the_peer_said_when_it_was_met() {
    let mut producer = Producer::start(|_| ());
    let hash = producer.save("a", 1);
    producer.greet(1);
    producer.asks(1, 0, &hash, |request| request.compatibility = "another model".to_owned());
    let refusals = producer.refusals();
    assert!(
        matches!(&refusals[..], [PeerCause::Incompatible(mismatch)] if mismatch.theirs == "another model")
    );
    assert_eq!((producer.answers(), producer.pinned()), (0, 0));
}
