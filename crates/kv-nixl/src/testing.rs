//! Transports for tests that look inside.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kv_core::{Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportEvent};

use crate::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};

pub(crate) const PEER: PeerId = PeerId(1);
pub(crate) const LEN: usize = 8 << 20;

/// NIXL, if NIXL is installed; otherwise there is nothing to test.
pub(crate) fn nixl() -> Option<&'static Nixl> {
    static NIXL: OnceLock<Option<Nixl>> = OnceLock::new();
    NIXL.get_or_init(|| kv_conformance::needed("NIXL", Nixl::load(&Search::default()))).as_ref()
}

/// A worker is reached over TCP, where a peer that is not polled keeps everything on its way.
pub(crate) fn config() -> NixlConfig {
    NixlConfig {
        backend_params: vec![("engine_config".to_owned(), "TLS=tcp".to_owned())],
        reads_over_tcp: true,
        slice_bytes: 1 << 20,
        settle: Duration::from_secs(1),
        ..NixlConfig::default()
    }
}

pub(crate) fn worker(nixl: &Nixl) -> (NixlTransport, HostMemory) {
    worker_with(nixl, config())
}

pub(crate) fn worker_with(nixl: &Nixl, config: NixlConfig) -> (NixlTransport, HostMemory) {
    let pool = HostMemory::new(LEN).unwrap();
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    transport.add_memory(&pool).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, pool.addr(), LEN as u64, 4096)).unwrap();
    (transport, pool)
}

/// A post of the whole region.
pub(crate) fn whole(id: u64, op: Op) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None }
}

/// Polls transports, of which the first one reports, until `done`; fails after a minute.
pub(crate) fn until(
    transports: &mut [&mut NixlTransport],
    what: &str,
    done: impl Fn(&NixlTransport, &[TransportEvent]) -> bool,
) -> Vec<TransportEvent> {
    let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
    while !done(&*transports[0], &events) {
        assert!(Instant::now() < deadline, "{what}: {events:?}");
        for (index, transport) in transports.iter_mut().enumerate() {
            let mut others = Vec::new();
            transport.poll(Time::ZERO, if index == 0 { &mut events } else { &mut others });
        }
    }
    events
}

/// Polls transports for a while; what the first one reports.
pub(crate) fn pass(transports: &mut [&mut NixlTransport], span: Duration) -> Vec<TransportEvent> {
    let end = Instant::now() + span;
    until(transports, "time passes", |_, _| Instant::now() >= end)
}

/// How many bytes of the memory are not this one.
pub(crate) fn others(pool: &HostMemory, byte: u8) -> usize {
    let mut bytes = vec![0; LEN];
    pool.read(0, &mut bytes).unwrap();
    bytes.iter().filter(|other| **other != byte).count()
}
