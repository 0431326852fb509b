//! Workers with a NIXL transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::sync::OnceLock;

use kv_conformance::process::{self, Process};
use kv_conformance::{Harness, Job, Regions, Side};
use kv_core::{Region, RegionRole, Transport};
use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};

/// NIXL, if it is installed. Without it there is nothing to test; says why and how to get it.
pub fn nixl() -> Option<&'static Nixl> {
    static NIXL: OnceLock<Option<Nixl>> = OnceLock::new();
    NIXL.get_or_init(|| kv_conformance::needed("NIXL", Nixl::load(&Search::default()))).as_ref()
}

/// Workers of one kind: `kind` says to [`configured`] how they are.
pub struct Workers {
    pub nixl: &'static Nixl,
    pub kind: &'static str,
    pub reads: bool,
}

/// The configuration of a kind of workers.
pub fn configured(kind: &str) -> NixlConfig {
    match kind {
        "default" => NixlConfig::default(),
        "reads-over-tcp" => NixlConfig::default().with(|config| config.reads_over_tcp = true),
        backend => NixlConfig::default().with(|config| config.backend = backend.to_owned()),
    }
}

/// The other process of [`Workers`].
pub fn child(nixl: impl FnOnce() -> Option<&'static Nixl>) {
    process::child(|kind| worker_with(nixl().unwrap(), &[Workers::FAR_LEN], configured(kind)));
}

impl Harness for Workers {
    type Transport = NixlTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<NixlTransport> {
        worker_with(self.nixl, lens, configured(self.kind))
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(self.kind, job, peer)
    }

    fn reads(&self) -> bool {
        self.reads
    }
}

/// Space between regions, that nothing may touch.
const GAP: usize = 4096 + 64;

/// A worker with regions of these lengths.
pub fn worker(nixl: &Nixl, lens: &[usize]) -> Side<NixlTransport> {
    worker_with(nixl, lens, NixlConfig::default())
}

/// The same with another configuration.
pub fn worker_with(nixl: &Nixl, lens: &[usize], config: NixlConfig) -> Side<NixlTransport> {
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    let mut offsets = Vec::new();
    let mut at = GAP;
    for len in lens {
        offsets.push(at);
        at += len + GAP;
    }
    let pool = HostMemory::new(at).unwrap();
    transport.add_memory(&pool).unwrap();
    for (offset, len) in offsets.iter().zip(lens) {
        let region = Region::dram(RegionRole::Kv, pool.addr() + *offset as u64, *len as u64, 1);
        transport.register(&region).unwrap();
    }
    Side { transport, lens: lens.to_vec(), memory: Box::new(Pages { pool, offsets }) }
}

struct Pages {
    pool: HostMemory,
    offsets: Vec<usize>,
}

impl Regions for Pages {
    fn read(&self, region: usize, offset: usize, out: &mut [u8]) {
        let gaps = self.offsets.iter().map(|at| at - GAP).chain([self.pool.len() - GAP]);
        for start in gaps {
            let mut bytes = [0; GAP];
            self.pool.read(start, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "something wrote beside the regions");
        }
        self.pool.read(self.offsets[region] + offset, out).unwrap();
    }

    fn write(&self, region: usize, offset: usize, bytes: &[u8]) {
        self.pool.write(self.offsets[region] + offset, bytes).unwrap();
    }
}
