//! Hostile bytes: whatever a peer sends, decoding and the node neither panic nor grow without bound.
//!
//! `KV_FUZZ_CASES` sets the number of cases (default 20 000), `KV_FUZZ_SEED` the seed.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use bytes::Bytes;
use kv_core::proto::{Command, Input, Limits, Node, NodeConfig, Output};
use kv_core::random::SplitMix64;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, VERSIONS, Versions,
    Welcome, hello_transport,
};
use kv_core::{
    Attempt, AuxIndex, CacheGroup, CacheGroupItems, CacheGroupList, CacheGroupLists, Descriptor, Incarnation,
    KvArgs, Layout, Mismatch, Origin, PageList, Pages, PeerCause, Region, RegionRole, RequestCacheGroups,
    Room, SessionId, SessionOptions, Time, TransferMode, TransportOffer, meter,
};

struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(SplitMix64::new(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.bits()
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// How many of something: few mostly, and at times as many as a frame holds.
    fn size(&mut self, most: u64) -> u64 {
        match self.below(300) {
            0 => most - self.below(most / 2),
            1..=4 => self.below(most / 30),
            5..=20 => self.below(most.min(300)),
            _ => self.below(5),
        }
    }

    /// A number that is interesting more often than not.
    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => self.next(),
            1 => u64::MAX - self.below(3),
            2 => u64::from(u32::MAX) + self.below(3) - 1,
            _ => self.below(8),
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn cases() -> (u64, u64) {
    let (cases, seed) = (setting("KV_FUZZ_CASES", 20_000), setting("KV_FUZZ_SEED", 0x5eed));
    println!("replay with KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    (cases, seed)
}

fn args(engine: &str) -> KvArgs {
    KvArgs::builder(engine, 0)
        .pages(32, 16)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64))
        .region(Region::dram(RegionRole::Aux, 0x3_0000, 4 * 16, 16))
        .region(Region::dram(RegionRole::State, 0x4_0000, 8 * 32, 32))
        .region(Region::dram(RegionRole::State, 0x5_0000, 12 * 48, 48).group(1))
        .region(Region::dram(RegionRole::State, 0x6_0000, 6 * 16, 16).group(2))
        .layout(Layout::default().with(|layout| {
            layout.groups = vec![
                CacheGroup::slots(1, 1),
                CacheGroup::pages(4, 1, 1),
                CacheGroup::pages(16, 1, 1).optional(),
            ]
        }))
        .build()
        .unwrap()
}

/// Versions that overlap with this worker's more often than not.
fn versions(random: &mut Random) -> Versions {
    match random.below(6) {
        0 => Versions { min: random.next() as u8, max: random.next() as u8 },
        1 => Versions { min: 1, max: 127 },
        _ => VERSIONS,
    }
}

fn hello(to: Incarnation, incarnation: u64, conversation: ConversationId, versions: Versions) -> Hello {
    let args = args("decode");
    Hello {
        versions,
        to,
        worker: args.worker().clone(),
        incarnation: Incarnation::from_random(incarnation),
        conversation,
        nonce: 1,
        transport: "test".to_owned(),
        metadata: Bytes::from_static(b"memory"),
        geometry: Some(Box::new(args.geometry().clone())),
        suffixed: false,
        service: "kv".to_owned(),
    }
}

fn room(random: &mut Random) -> Room {
    match random.below(3) {
        0 => Room::Number(random.below(4)),
        1 => Room::request(&format!("request-{}-0000000{}", random.below(2), random.below(4))).unwrap(),
        _ => Room::Number(random.next()),
    }
}

/// Few pages that fit mostly; at times many, and then rising, falling, scattered, or named twice.
fn pages(random: &mut Random) -> PageList {
    let (count, shape, start) = (random.size(150_000) as u32, random.below(6), random.below(40) as u32);
    let runs = (0..count).map(|at| match shape {
        0 => (start.wrapping_add(2 * at), 1),
        1 => (start, 1),
        2 => (1_000_000 - 2 * at, 1),
        3 => (random.next() as u32 >> 2, random.below(6) as u32),
        _ => (random.below(40) as u32, random.below(6) as u32),
    });
    PageList::try_from(runs.collect::<Vec<_>>()).unwrap_or_default()
}

fn cause(random: &mut Random) -> PeerCause {
    let mut text = || "x".repeat(random.size(300_000) as usize);
    match text().len() {
        0 | 1 => PeerCause::Aborted,
        2 => PeerCause::Unknown,
        3 => PeerCause::Versions { ours: Versions { min: 9, max: 12 }, theirs: VERSIONS },
        _ => PeerCause::Incompatible(Mismatch { field: text(), ours: text(), theirs: text() }),
    }
}

fn groups(random: &mut Random) -> CacheGroupLists {
    let numbers = (0..4).filter(|_| random.below(4) == 0).collect::<Vec<u16>>();
    let list = |group| CacheGroupList { group, first: random.below(3) as u32, items: pages(random) };
    CacheGroupLists::try_from(numbers.into_iter().map(list).collect::<Vec<_>>()).unwrap()
}

fn skipped(random: &mut Random) -> Vec<u16> {
    let count = random.size(250_000);
    (0..count).map(|_| random.below(4) as u16).collect()
}

fn body(random: &mut Random, us: Incarnation) -> Body {
    let attempt = Attempt(random.number());
    let low_watermark = Attempt(random.number());
    let cause = cause(random);
    let total = (random.below(2) == 0).then(|| random.number() as u32);
    match random.below(17) {
        0 => {
            let conversation = ConversationId(random.number());
            Body::Hello(hello(
                if random.below(4) == 0 { Incarnation::from_random(5) } else { us },
                random.below(4),
                conversation,
                versions(random),
            ))
        }
        1 => Body::Welcome(Welcome {
            versions: versions(random),
            nonce: random.number(),
            conversation: ConversationId(random.number()),
            ask: random.number(),
        }),
        2 => Body::Refused(Refused {
            versions: versions(random),
            nonce: random.number(),
            cause,
            conversation: ConversationId(random.number()),
        }),
        3..=6 => Body::Register(Register {
            attempt,
            low_watermark: Attempt(random.below(4)),
            room: room(random),
            ranks: random.number() as u32,
            ttl_ms: random.number(),
            delivery: delivery(random),
        }),
        7 => Body::Registered(Registered { attempt }),
        8 | 9 => {
            let runs = if random.below(2) == 0 { 1 } else { random.size(100_000) };
            let done = (0..runs).map(|_| (random.number() as u32, random.number() as u32)).collect();
            Body::Progress(Progress { attempt, done, total, skipped: skipped(random) })
        }
        10 => Body::Failed(Failed { attempt, cause, quiet: random.below(2) == 0 }),
        11 => {
            let lease_id = (random.below(2) == 0).then(|| SessionId(random.number()));
            Body::Abort(Abort {
                failed_ms_ago: (random.below(2) == 0).then(|| random.number()),
                low_watermark: attempt,
                attempt,
                room: room(random),
                lease_id,
                cause,
            })
        }
        12 => Body::AbortAck(AbortAck { attempt }),
        13 => Body::Granted(Granted {
            attempt,
            number: random.number(),
            lease_id: SessionId(random.number()),
            pages: pages(random),
            aux: (random.below(2) == 0).then(|| AuxIndex(random.below(6) as u32)),
            lease_ms: random.number(),
            interval_ms: random.number(),
            groups: groups(random),
        }),
        14 => {
            let (number, leases, asked) = (random.number(), runs(random), runs(random));
            Body::Heartbeat(Heartbeat { number, low_watermark, leases, asked, writes: random.below(2) == 0 })
        }
        15 => {
            let (number, lease_ms, permit_ms) = (random.number(), random.number(), random.number());
            Body::HeartbeatAck(HeartbeatAck {
                number,
                low_watermark,
                lease_ms,
                leases: runs(random),
                permit_ms,
            })
        }
        _ => match random.below(3) {
            0 => Body::Released(Released { attempts: runs(random) }),
            answer => Body::Release(Release { low_watermark, attempts: runs(random), answer: answer == 1 }),
        },
    }
}

fn delivery(random: &mut Random) -> Delivery {
    if random.below(2) == 0 {
        let lease_id = (random.below(2) == 0).then(|| SessionId(random.number()));
        return Delivery::Read(Acquire { lease_id, number: random.number() });
    }
    Delivery::Write(Destination {
        pages: pages(random),
        first_page: if random.below(2) == 0 { 0 } else { random.number() as u32 },
        total_pages: if random.below(2) == 0 { random.below(8) as u32 } else { random.number() as u32 },
        aux: (random.below(2) == 0).then(|| AuxIndex(random.below(6) as u32)),
        aux_here: random.below(2) == 0,
        groups: groups(random),
        ask: random.number(),
        permit_ms: random.number(),
    })
}

/// A frame that is short enough to be said, and its bytes.
fn frame(random: &mut Random, conversation: ConversationId, us: Incarnation) -> (Frame, Bytes) {
    loop {
        let frame = Frame { conversation, body: body(random, us) };
        if let Ok(bytes) = frame.encode() {
            return (frame, bytes);
        }
    }
}

/// Runs of attempts: rising as they must be, or in any order.
fn runs(random: &mut Random) -> Vec<(u64, u32)> {
    let (count, rising, mut next) = (random.size(60_000), random.below(2) == 0, random.number());
    let run = |_| match rising {
        true => {
            next = next.wrapping_add(1 + random.below(3));
            (next, 1)
        }
        false => (random.number(), random.number() as u32),
    };
    (0..count).map(run).collect()
}

fn options(random: &mut Random) -> Box<SessionOptions> {
    let mode = [None, Some(TransferMode::Pull), Some(TransferMode::Auto)][random.below(3) as usize];
    Box::new(SessionOptions::default().with(|options| options.mode = mode))
}

fn damage(random: &mut Random, frame: &[u8]) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at.max(1)),
            3 => bytes.insert(at, random.next() as u8),
            // Length prefixes of arrays, strings and maps that promise more than there is.
            _ => bytes.splice(at..at, [0xdd, 0xff, 0xff, 0xff, 0xff]).for_each(drop),
        }
    }
    bytes
}

#[test]
fn every_frame_survives_the_wire() {
    let (cases, seed) = cases();
    let mut random = Random::new(seed);
    let us = Incarnation::from_random(9);
    for _ in 0..cases {
        let conversation = ConversationId(random.number());
        let (frame, bytes) = frame(&mut random, conversation, us);
        let read = Frame::decode(&bytes).unwrap();
        assert_eq!(Frame::decode(&read.encode().unwrap()).as_ref(), Ok(&read));
        // Texts of a peer are cut where they are read.
        assert!(read == frame || bytes.len() > 512, "{read:?} was {frame:?}");
    }
}

#[test]
fn damaged_frames_are_errors_and_never_panics() {
    let (cases, seed) = cases();
    let mut random = Random::new(seed);
    let us = Incarnation::from_random(9);
    for _ in 0..cases {
        let conversation = ConversationId(random.number());
        let (_, frame) = frame(&mut random, conversation, us);
        let bytes = damage(&mut random, &frame);
        if let Ok(frame) = Frame::decode(&bytes) {
            if let Body::Hello(hello) = &frame.body {
                let said = TransportOffer::new(&hello.transport, hello.metadata.clone());
                assert_eq!(hello_transport(&bytes), Some(said));
            }
            // What still decodes is a valid frame, and encodes again.
            assert!(frame.encode().is_ok());
        }
    }
}

/// Most steps of an input, and for each of its bytes. The scheduler asks for little here.
const STEPS: u64 = 6000;
const STEPS_PER_BYTE: u64 = 24;
/// Most bytes that are said for an input, beside twice its own.
const SAID: u64 = 64 << 10;

/// A peer that has said hello, and then says anything: valid frames of every kind with any
/// numbers, and damaged ones.
#[test]
fn a_machine_survives_arbitrary_frames_and_stays_within_its_bounds() {
    let (cases, seed) = cases();
    println!("seed {seed}");
    let us = Incarnation::from_random(9);
    let limits = Limits::default().with(|limits| {
        limits.max_peers = 3;
        limits.max_registrations = 5;
        limits.max_waiting_runs = 12;
        limits.max_failed_rooms = 4;
        limits.max_attempts = 64;
        limits.max_ended_leases = 7;
        limits.connections_share = 2;
        limits.max_incarnations = 2;
        limits.max_addresses = 4;
    });
    for world in 0..cases.div_ceil(400) {
        let mut random = Random::new(seed ^ (world << 32));
        let mut node = Node::new(
            NodeConfig::new(args("prefill"), us, "test", Bytes::new()).with(|config| config.limits = limits),
        );
        let mut now = 0;
        let mut conversations = vec![ConversationId::NONE];
        let mut sessions = 0;
        for _ in 0..400 {
            now += random.below(400_000_000);
            let from = Origin(random.below(3));
            let input = match random.below(12) {
                0 => {
                    sessions += 1;
                    let (session, room) = (SessionId(sessions), room(&mut random));
                    Input::Command(Command::OpenSender {
                        session,
                        room,
                        receivers: 1 + random.below(2) as u32,
                        options: options(&mut random),
                    })
                }
                1 => {
                    let session = SessionId(random.below(sessions + 2));
                    Input::Command(Command::InitSender {
                        session,
                        num_pages: random.below(4) as usize,
                        aux: None,
                    })
                }
                2 => {
                    let chunk =
                        Pages::unpooled(PageList::from_pages(0..random.below(4) as u32).unwrap()).unwrap();
                    Input::Command(Command::Send { session: SessionId(random.below(sessions + 2)), chunk })
                }
                3 if random.below(2) == 0 => {
                    let mut groups = RequestCacheGroups::none();
                    for group in (0..4).filter(|_| random.below(2) == 0).collect::<Vec<_>>() {
                        let items = Pages::unpooled(PageList::from_pages(0..random.below(4) as u32).unwrap());
                        let first = random.below(3) as u32;
                        groups.push(CacheGroupItems::from_number(group, first, items.unwrap())).unwrap();
                    }
                    Input::Command(Command::RequestCacheGroups {
                        session: SessionId(random.below(sessions + 2)),
                        groups,
                    })
                }
                3 => Input::Timeout,
                4 => {
                    let (_, whole) = frame(&mut random, ConversationId::NONE, us);
                    Input::Frame { from, frame: damage(&mut random, &whole).into() }
                }
                _ => {
                    let conversation = conversations[random.below(conversations.len() as u64) as usize];
                    let (_, frame) = frame(&mut random, conversation, us);
                    Input::Frame { from, frame }
                }
            };
            let bytes = match &input {
                Input::Frame { frame, .. } => frame.len() as u64,
                _ => 0,
            };
            let steps = meter::steps();
            node.handle(Time::from_nanos(now), input);
            let steps = meter::steps() - steps;
            assert!(steps < STEPS + STEPS_PER_BYTE * bytes, "{steps} steps for an input of {bytes} bytes");
            let (mut outputs, mut said) = (0, 0);
            while let Some(output) = node.poll_output() {
                outputs += 1;
                match output {
                    // The peer learns our conversation from the welcome.
                    Output::Send { frame, .. } => {
                        said += frame.len() as u64;
                        if let Ok(Frame { body: Body::Welcome(welcome), .. }) = Frame::decode(&frame) {
                            conversations.push(welcome.conversation);
                        }
                    }
                    Output::Post { post, .. } => {
                        said += (post.descriptors.len() * size_of::<Descriptor>()) as u64;
                        for descriptor in &post.descriptors {
                            let len =
                                |region: u32| [32 * 64, 4 * 16, 8 * 32, 12 * 48, 6 * 16][region as usize];
                            assert!(
                                descriptor.local_offset + descriptor.len <= len(descriptor.local_region)
                                    && descriptor.remote_offset + descriptor.len
                                        <= len(descriptor.remote_region)
                            );
                        }
                    }
                    _ => {}
                }
            }
            assert!(outputs < 1000, "{outputs} outputs for one input");
            assert!(said < SAID + 2 * bytes, "{said} bytes are said for an input of {bytes}");
            let gauges = node.gauges();
            assert!(gauges.peers <= limits.max_peers, "{gauges:?}");
            assert!(gauges.registrations <= limits.max_registrations, "{gauges:?}");
            assert!(gauges.failed_rooms <= 2 * limits.max_failed_rooms, "{gauges:?}");
            assert!(gauges.incoming as u64 <= limits.max_peers as u64 * limits.max_attempts, "{gauges:?}");
            assert!(gauges.closed_runs as u64 <= limits.max_peers as u64 * limits.max_attempts, "{gauges:?}");
            assert!(gauges.waiting_runs <= limits.max_waiting_runs, "{gauges:?}");
            assert!(gauges.addresses <= limits.max_addresses, "{gauges:?}");
            assert!(gauges.targets <= sessions as usize * 2 + gauges.incoming, "{gauges:?}");
            assert!(gauges.sources <= gauges.receivers * limits.max_peers, "{gauges:?}");
            assert!(gauges.queued <= gauges.targets, "{gauges:?}");
            assert!(gauges.posts <= 64, "{gauges:?}");
            assert!(gauges.ended_leases <= limits.max_ended_leases, "{gauges:?}");
            if let Some(next) = node.next_timeout() {
                assert!(next > Time::from_nanos(now), "a timer that is due was not run");
            }
        }
    }
}
