//! A transport, and NIXL agents that are none of ours.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Descriptor, MAX_FRAME, MemoryKind, Op, PeerId, Post, PostId, Time, Transport, TransportError,
    TransportEvent, WayEnd,
};
use kv_host::HostMemory;

use crate::agent::engine::Engine;
use crate::agent::name::FORM;
use crate::config::NixlConfig;
use crate::ffi::memory::Memory;
use crate::foreign::agent_metadata::AgentMetadata;
use crate::foreign::error::ForeignError;
use crate::foreign::region::ForeignRegion;
use crate::foreign::sample::sample;
use crate::notifications::envelope::{Kind, Notification};
use crate::testing::{LEN, PEER, nixl, others, until, whole, worker_with};
use crate::transport::NixlTransport;

/// An agent of somebody else, as plain as NIXL has it.
struct Stranger {
    engine: Engine,
    pool: HostMemory,
    heard: Vec<Bytes>,
}

impl Stranger {
    fn new(name: &str) -> Option<Stranger> {
        Stranger::with(name, HostMemory::new(LEN).unwrap())
    }

    fn with(name: &str, pool: HostMemory) -> Option<Stranger> {
        let mut engine = Engine::new(nixl()?, name, &config()).unwrap();
        engine.register(&Memory::whole(&pool)).unwrap();
        Some(Stranger { engine, pool, heard: Vec::new() })
    }

    fn metadata(&self) -> Vec<u8> {
        self.engine.metadata().unwrap()
    }

    fn region(&self) -> ForeignRegion {
        let (addr, len) = (self.pool.addr(), LEN as u64);
        ForeignRegion { addr, len, item_len: 4096, memory: MemoryKind::Dram, device: 0 }
    }

    fn listen(&mut self) {
        self.engine.receive(|_, message| self.heard.push(message)).unwrap();
    }
}

fn config() -> NixlConfig {
    NixlConfig { foreign_bytes: 16 << 20, ..crate::testing::config() }
}

fn transport() -> Option<(NixlTransport, HostMemory)> {
    Some(worker_with(nixl()?, config()))
}

/// Polls both for this long.
fn both(transport: &mut NixlTransport, stranger: &mut Stranger, span: Duration) -> Vec<TransportEvent> {
    let (end, mut events) = (Instant::now() + span, Vec::new());
    while Instant::now() < end {
        transport.poll(Time::ZERO, &mut events);
        stranger.listen();
    }
    events
}

fn until_both(
    transport: &mut NixlTransport,
    stranger: &mut Stranger,
    done: impl Fn(&NixlTransport, &Stranger, &[TransportEvent]) -> bool,
) -> Vec<TransportEvent> {
    let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
    while !done(transport, stranger, &events) {
        assert!(Instant::now() < deadline, "{events:?}");
        events.extend(both(transport, stranger, Duration::from_millis(1)));
    }
    events
}

fn posted(post: u64) -> TransportEvent {
    TransportEvent::Posted { post: PostId(post), result: Ok(()) }
}

#[test]
fn bytes_move_to_and_from_a_foreign_agent_which_hears_only_what_it_is_sent() {
    let (Some((mut here, ours)), Some(mut there)) = (transport(), Stranger::new("a decode worker")) else {
        return;
    };
    here.connect_foreign(PEER, &there.metadata(), &[there.region()]).unwrap();
    assert_eq!(here.agent_of(PEER), Some("a decode worker"));
    there.pool.write(0, &vec![7; LEN]).unwrap();
    let read = Post { notify: Some(Bytes::from_static(b"req:1")), ..whole(1, Op::Read) };
    here.post(PEER, read).unwrap();
    let events = until_both(&mut here, &mut there, |_, _, events| !events.is_empty());
    assert_eq!((events, others(&ours, 7)), (vec![posted(1)], 0));

    // A write of items, which have numbers, waits for permission like any other.
    ours.write(0, &vec![9; LEN]).unwrap();
    let item = |at| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: at,
        remote_offset: 8192,
        len: 4096,
    };
    let write = Post { id: PostId(2), op: Op::Write, descriptors: vec![item(4096)], notify: None };
    here.post(PEER, write).unwrap();
    assert_eq!(both(&mut here, &mut there, Duration::from_millis(50)), []);
    here.permit(PEER, Time::MAX);
    let events = until_both(&mut here, &mut there, |_, _, events| !events.is_empty());
    assert_eq!((events, others(&there.pool, 7)), (vec![posted(2)], 4096));
    assert_eq!(here.stats().requests_by_number, 1);

    // It floods us, so that one of ours would be told of it; then there is silence, which would be
    // tried out; and then we end.
    there.engine.load(&here.agent_metadata().unwrap()).unwrap();
    for _ in 0..64 {
        there.engine.notify(&here.agent_name(), &[b'n'; 40_000]).unwrap();
    }
    both(&mut here, &mut there, Duration::from_millis(2500));
    here.send(PEER, Bytes::from_static(b"HB:1")).unwrap();
    until_both(&mut here, &mut there, |_, there, _| there.heard.len() >= 2);
    drop(here);
    let quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(300) {
        there.listen();
    }
    assert_eq!(there.heard, [&b"req:1"[..], b"HB:1"], "nothing of ours beside it");
}

#[test]
fn notifications_of_foreign_agents_are_raw_whatever_they_look_like() {
    let (Some((mut here, _)), Some(mut there)) = (transport(), Stranger::new("a prefill worker")) else {
        return;
    };
    there.engine.load(&here.agent_metadata().unwrap()).unwrap();
    let forged = Notification { to: here.token, connection: 3, kind: Kind::Frame(Bytes::from_static(b"x")) };
    let messages = [b"HB:a,b".to_vec(), Vec::new(), vec![0xff; 18], forged.encode()];
    let mut heard = Vec::new();
    // Unknown first, then connected: then nothing of it is taken for ours.
    for (known, messages) in [(false, &messages[..3]), (true, &messages[..])] {
        if known {
            here.connect_foreign(PEER, &there.metadata(), &[]).unwrap();
        }
        for message in messages {
            there.engine.notify(&here.agent_name(), message).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut came = Vec::new();
        while came.len() < messages.len() {
            assert!(Instant::now() < deadline, "{came:?}");
            assert_eq!(both(&mut here, &mut there, Duration::from_millis(1)), []);
            came.extend(std::iter::from_fn(|| here.next_notification()));
        }
        assert!(came.iter().all(|raw| &*raw.agent == "a prefill worker"));
        heard.extend(came.into_iter().map(|raw| raw.message.to_vec()));
    }
    assert_eq!(heard, [&messages[..3], &messages[..]].concat());
    assert_eq!((here.stats().strangers, here.stats().foreign_dropped), (0, 0));
}

#[test]
fn a_transport_that_asks_for_no_raw_notifications_keeps_none() {
    let Some(mut there) = Stranger::new("an agent") else { return };
    let (mut here, _pool) = worker_with(nixl().unwrap(), crate::testing::config());
    there.engine.load(&here.agent_metadata().unwrap()).unwrap();
    there.engine.notify(&here.agent_name(), b"HB:a").unwrap();
    until_both(&mut here, &mut there, |here, _, _| here.stats().strangers == 1);
    assert_eq!(here.next_notification(), None);
}

#[test]
fn what_a_silent_foreign_agent_is_sent_at_once_is_bounded() {
    let (Some((mut here, _)), Some(there)) = (transport(), Stranger::new("a stopped worker")) else { return };
    here.connect_foreign(PEER, &there.metadata(), &[]).unwrap();
    let (begun, message, most) =
        (Instant::now(), Bytes::from(vec![1; MAX_FRAME]), here.config.outbound_bytes);
    let sent = (0..100).take_while(|_| here.send(PEER, message.clone()).is_ok()).count();
    // The whole allowance, and what has come back meanwhile.
    let back = most as f64 * begun.elapsed().as_secs_f64() / 10.0;
    assert!(sent >= 3 && (sent * MAX_FRAME) as f64 <= most as f64 + back, "{sent}, {back}");
    assert_eq!(here.send(PEER, message), Err(TransportError::WouldBlock));
}

#[test]
fn the_end_of_a_foreign_agent_is_seen_and_its_successor_is_another() {
    let (Some((mut here, _)), Some(mut there)) = (transport(), Stranger::new("first life")) else { return };
    let metadata = there.metadata();
    here.connect_foreign(PEER, &metadata, &[there.region()]).unwrap();
    // The connection is made by the first word.
    here.send(PEER, Bytes::from_static(b"HB:1")).unwrap();
    until_both(&mut here, &mut there, |_, there, _| !there.heard.is_empty());
    assert_eq!(both(&mut here, &mut there, Duration::from_millis(600)), [], "it lives");
    drop(there);
    let events = until(&mut [&mut here], "the end", |_, events| !events.is_empty());
    assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    assert_eq!(here.send(PEER, Bytes::new()), Err(TransportError::PeerGone));
    let Some(mut next) = Stranger::new("second life") else { return };
    here.connect_foreign(PEER, &next.metadata(), &[next.region()]).unwrap();
    here.post(PEER, whole(1, Op::Read)).unwrap();
    let events = until_both(&mut here, &mut next, |_, _, events| !events.is_empty());
    assert_eq!(events, [posted(1)]);
}

#[test]
fn metadata_that_is_not_the_agents_is_refused_with_both_values() {
    let (Some((mut here, _)), Some(there)) = (transport(), Stranger::new("an agent")) else { return };
    let Some(other) = Stranger::new("another agent") else { return };
    let (metadata, region) = (there.metadata(), there.region());
    let mut connect = |bytes: &[u8], regions: &[ForeignRegion]| here.connect_foreign(PEER, bytes, regions);
    for len in 0..metadata.len() {
        let error = connect(&metadata[..len], &[]).unwrap_err();
        assert!(matches!(error, ForeignError::Damaged { len: of, .. } if of == len), "{error}");
    }
    let outside = [
        ForeignRegion { len: region.len + 1, ..region },
        ForeignRegion { addr: region.addr - 1, ..region },
        ForeignRegion { device: 1, ..region },
        ForeignRegion { len: 0, ..region },
        ForeignRegion { memory: MemoryKind::Vram, ..region },
    ];
    for wrong in outside {
        let ForeignRegion { addr, len, memory, device, .. } = wrong;
        let expected = ForeignError::Region { region: 1, memory, device, addr, len };
        assert_eq!(connect(&metadata, &[region, wrong]), Err(expected));
    }
    let mut backend = sample(b"an agent", &[[1, 2, 0]]);
    let at = backend.windows(3).position(|tag| tag == b"UCX").unwrap();
    backend[at] = b'X';
    let expected = ForeignError::Backend { ours: "UCX".to_owned(), theirs: vec!["XCX".to_owned()] };
    assert_eq!(connect(&backend, &[]), Err(expected));
    assert!(matches!(connect(&[], &[]), Err(ForeignError::Damaged { at: 0, .. })));

    connect(&metadata, &[region]).unwrap();
    connect(&metadata, &[region]).unwrap();
    let name = || "an agent".to_owned();
    let (connected, asked) = (Some(region), None);
    let fewer = ForeignError::Differs { name: name(), region: 0, connected, asked };
    assert_eq!(connect(&metadata, &[]), Err(fewer));
    let (connected, asked) = (None, Some(region));
    let more = ForeignError::Differs { name: name(), region: 1, connected, asked };
    assert_eq!(connect(&metadata, &[region, region]), Err(more));
    let (asked, found) = ("an agent".to_owned(), "another agent".to_owned());
    assert_eq!(connect(&other.metadata(), &[]), Err(ForeignError::Name { asked, found }));
    let own = here.agent_metadata().unwrap();
    let reserved = ForeignError::Reserved { found: here.agent_name(), reserved: FORM };
    assert_eq!(here.connect_foreign(PeerId(9), &own, &[]), Err(reserved));
}

/// The side channel of a stranger hands out the metadata of a transport: our way to that transport would be a
/// foreign agent's, and its frames raw notifications.
#[test]
fn a_transport_is_a_peer_of_ours_and_its_name_is_refused_to_foreign_agents() {
    let (Some((mut here, _)), Some((mut there, _))) = (transport(), transport()) else { return };
    let (raw, native) = (there.agent_metadata().unwrap(), there.metadata().unwrap());
    let reserved = |found: &str| Err(ForeignError::Reserved { found: found.to_owned(), reserved: FORM });
    let name = there.agent_name();
    assert_eq!(here.connect_foreign(PEER, &raw, &[]), reserved(&name));
    let forged = sample(b"kv-0123456789abcdef", &[[4096, 4096, 0]]);
    assert_eq!(here.connect_foreign(PEER, &forged, &[]), reserved("kv-0123456789abcdef"));
    here.connect(PEER, &native).unwrap();
    assert_eq!(here.connect_foreign(PEER, &raw, &[]), reserved(&name));
    there.connect(PEER, &here.metadata().unwrap()).unwrap();
    there.send(PEER, Bytes::from_static(b"frame")).unwrap();
    let events = until(&mut [&mut here, &mut there], "a frame", |_, events| !events.is_empty());
    assert!(matches!(&events[..], [TransportEvent::Frame { frame, .. }] if frame == "frame"), "{events:?}");
    assert_eq!(here.next_notification(), None);
}

#[test]
fn an_agent_that_was_started_again_is_not_taken_for_the_one_that_is_connected() {
    let (Some((mut here, ours)), Some(there)) = (transport(), Stranger::new("an agent")) else { return };
    let (metadata, region) = (there.metadata(), there.region());
    here.connect_foreign(PEER, &metadata, &[region]).unwrap();
    // The same life has other registrations: more of them.
    let mut grown = there;
    let more = HostMemory::new(LEN).unwrap();
    grown.engine.register(&Memory::whole(&more)).unwrap();
    let digests = |metadata: &[u8]| AgentMetadata::parse(metadata).unwrap().digests;
    let (first, second) = (digests(&metadata), digests(&grown.metadata()));
    let name = || "an agent".to_owned();
    let (connected, found) = (first.registrations, second.registrations);
    let reregistered = Err(ForeignError::Reregistered { name: name(), connected, found });
    assert_eq!(here.connect_foreign(PEER, &grown.metadata(), &[region]), reregistered);

    // Another life has the same name, and its memory at the same addresses.
    let Stranger { engine, pool, .. } = grown;
    drop(engine);
    let mut next = Stranger::with("an agent", pool).unwrap();
    assert_eq!(next.region(), region);
    let (connected, found) = (first.addresses, digests(&next.metadata()).addresses);
    for peer in [PEER, PeerId(2)] {
        let restarted = Err(ForeignError::Restarted { name: name(), connected, found });
        assert_eq!(here.connect_foreign(peer, &next.metadata(), &[region]), restarted);
    }
    here.disconnect(PEER);
    let events = until(&mut [&mut here], "the end", |here, _| here.remotes.is_empty());
    assert_eq!(events, []);
    next.pool.write(0, &vec![7; LEN]).unwrap();
    here.connect_foreign(PEER, &next.metadata(), &[region]).unwrap();
    here.post(PEER, whole(1, Op::Read)).unwrap();
    let events = until_both(&mut here, &mut next, |_, _, events| !events.is_empty());
    assert_eq!((events, others(&ours, 7)), (vec![posted(1)], 0));
}
