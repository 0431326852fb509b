//! Two transports in one process, for tests.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Transport, TransportEvent};
use kv_host::{HostMemory, clock};

use crate::config::{FabricConfig, FabricDevice};
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// More than the sockets of a connection hold.
pub(crate) const LEN: usize = 64 << 20;
pub(crate) const PEER: PeerId = PeerId(1);
pub(crate) fn worker() -> (FabricTransport, HostMemory) {
    worker_with(config(1))
}

/// A configuration with so many devices.
pub(crate) fn config(devices: u8) -> FabricConfig {
    let at = |number| FabricDevice::at([127, 0, 0, number].into());
    FabricConfig::default().with(|config| config.devices = (1..=devices).map(at).collect())
}

pub(crate) fn worker_with(config: FabricConfig) -> (FabricTransport, HostMemory) {
    let memory = HostMemory::new(LEN).unwrap();
    let mut transport = FabricTransport::new(config).unwrap();
    transport.add_memory(&memory).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, memory.addr(), LEN as u64, 4096)).unwrap();
    (transport, memory)
}

/// A worker with an open way to another one, and both workers' memory.
pub(crate) fn connected() -> (WayId, [(FabricTransport, HostMemory); 2]) {
    connected_with([config(1), config(1)])
}

/// The same with these configurations. Each lane of the way has been heard.
pub(crate) fn connected_with(configs: [FabricConfig; 2]) -> (WayId, [(FabricTransport, HostMemory); 2]) {
    let [(mut here, ours), (mut there, theirs)] = configs.map(worker_with);
    here.connect(PEER, &there.metadata().unwrap()).unwrap();
    let begun = Instant::now();
    let id = *here.peers.get(&PEER).unwrap();
    let is_open = |way: &Way| {
        way.stage == Stage::Open
            && way.asks == 0
            && way.lanes.iter().skip(1).all(|lane| lane.is_fresh(clock::now()))
    };
    while !is_open(here.ways.get(&id).unwrap()) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the way does not open");
        assert_eq!(poll([&mut here, &mut there]), []);
    }
    (id, [(here, ours), (there, theirs)])
}

/// Opens the way of the second worker to the first, too.
pub(crate) fn connect_back(here: &mut FabricTransport, there: &mut FabricTransport) {
    there.connect(PEER, &here.metadata().unwrap()).unwrap();
    let begun = Instant::now();
    while there.ways.values().any(|way| way.stage != Stage::Open) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the way back does not open");
        assert_eq!(poll([&mut *here, &mut *there]), []);
    }
}

pub(crate) fn post(op: Op, len: usize, notify: Option<&'static [u8]>) -> Post {
    let len = len as u64;
    let page = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
    Post { id: PostId(1), op, descriptors: vec![page], notify: notify.map(Bytes::from_static) }
}

/// The frames of events that are nothing else.
pub(crate) fn frames_of(events: &[TransportEvent]) -> Vec<Bytes> {
    let frame = |event: &TransportEvent| match event {
        TransportEvent::Frame { frame, .. } => frame.clone(),
        other => panic!("{other:?}"),
    };
    events.iter().map(frame).collect()
}

pub(crate) fn poll(transports: [&mut FabricTransport; 2]) -> Vec<TransportEvent> {
    let [mut first, mut second] = [Vec::new(), Vec::new()];
    for (transport, events) in transports.into_iter().zip([&mut first, &mut second]) {
        transport.poll(clock::now(), events);
    }
    assert_eq!(second, [], "the other end has nothing to tell");
    first
}

/// Polls one worker until `done`; what it has told.
pub(crate) fn until(
    transport: &mut FabricTransport,
    what: &str,
    done: impl Fn(&[TransportEvent]) -> bool,
) -> Vec<TransportEvent> {
    let (mut events, begun) = (Vec::new(), Instant::now());
    while !done(&events) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {events:?}");
        transport.poll(clock::now(), &mut events);
    }
    events
}

/// Polls both until `done`, which looks at both; what the first one has told. The second has nothing to tell.
pub(crate) fn both_until(
    [here, there]: [&mut FabricTransport; 2],
    what: &str,
    mut done: impl FnMut(&FabricTransport, &FabricTransport, &[TransportEvent]) -> bool,
) -> Vec<TransportEvent> {
    let (mut events, begun) = (Vec::new(), Instant::now());
    while !done(here, there, &events) {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}: {events:?}");
        events.extend(poll([&mut *here, &mut *there]));
    }
    events
}
