//! Two transports in one process, for tests.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Transport, TransportEvent};
use kv_host::{HostMemory, clock};

use crate::config::FabricConfig;
use crate::transport::FabricTransport;
use crate::way::{Stage, WayId};

/// More than the sockets of a connection hold.
pub(crate) const LEN: usize = 64 << 20;
pub(crate) const PEER: PeerId = PeerId(1);
pub(crate) fn worker() -> (FabricTransport, HostMemory) {
    let memory = HostMemory::new(LEN).unwrap();
    let mut transport = FabricTransport::new(FabricConfig::new("127.0.0.1".parse().unwrap())).unwrap();
    transport.add_memory(&memory).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, memory.addr(), LEN as u64, 4096)).unwrap();
    (transport, memory)
}

/// A worker with an open way to another one, and both workers' memory.
pub(crate) fn connected() -> (WayId, [(FabricTransport, HostMemory); 2]) {
    let ((mut here, ours), (mut there, theirs)) = (worker(), worker());
    here.connect(PEER, &there.metadata().unwrap()).unwrap();
    let begun = Instant::now();
    let id = *here.peers.get(&PEER).unwrap();
    while here.ways.get(&id).unwrap().stage != Stage::Open {
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
