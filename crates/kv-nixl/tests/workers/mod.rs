//! Workers with a NIXL transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::sync::OnceLock;

use kv_conformance::process::{self, Process};
use kv_conformance::{Gpu, Harness, Job, Pages, Side, Vram};
use kv_nixl::{HostMemory, Memory, Nixl, NixlConfig, NixlTransport, Search};

/// NIXL, if it is installed. Without it there is nothing to test; says why and how to get it.
pub fn nixl() -> Option<&'static Nixl> {
    static NIXL: OnceLock<Option<Nixl>> = OnceLock::new();
    NIXL.get_or_init(|| kv_conformance::needed("NIXL", Nixl::load(&Search::default()))).as_ref()
}

/// Workers of one kind.
pub struct Workers {
    pub nixl: &'static Nixl,
    /// How the workers here are ([`worker_of`]).
    pub kind: &'static str,
    /// How the workers of other processes are.
    pub others: &'static str,
    pub reads: bool,
}

impl Workers {
    /// Workers that are all of one kind, and may read.
    pub fn alike(nixl: &'static Nixl, kind: &'static str) -> Workers {
        Workers { nixl, kind, others: kind, reads: true }
    }
}

/// The configuration of a kind of workers.
pub fn configured(kind: &str) -> NixlConfig {
    match kind {
        "default" | "vram" => NixlConfig::default(),
        "gpu-over-tcp" | "vram-over-tcp" => NixlConfig::default().with(|config| config.gpu_over_tcp = true),
        "reads-over-tcp" => NixlConfig::default().with(|config| config.reads_over_tcp = true),
        backend => NixlConfig::default().with(|config| config.backend = backend.to_owned()),
    }
}

/// A worker of a kind: in the memory of a GPU if that is "vram" or "vram-over-tcp", else in host memory.
pub fn worker_of(kind: &str, nixl: &Nixl, lens: &[usize]) -> Side<NixlTransport> {
    let worker = if is_vram(kind) { vram } else { worker_with };
    worker(nixl, lens, configured(kind))
}

fn is_vram(kind: &str) -> bool {
    kind.starts_with("vram")
}

/// The other process of [`Workers`].
pub fn child(nixl: impl FnOnce() -> Option<&'static Nixl>) {
    process::child(|kind| worker_of(kind, nixl().unwrap(), &[Workers::FAR_LEN]));
}

impl Harness for Workers {
    type Transport = NixlTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<NixlTransport> {
        worker_of(self.kind, self.nixl, lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<NixlTransport> {
        worker_of(self.others, self.nixl, lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(self.others, job, peer)
    }

    fn reads(&self) -> bool {
        self.reads
    }

    fn most_descriptors(&self) -> usize {
        if [self.kind, self.others].into_iter().any(is_vram) { 20_000 } else { 1_000_000 }
    }
}

/// A worker with regions of these lengths.
pub fn worker(nixl: &Nixl, lens: &[usize]) -> Side<NixlTransport> {
    worker_with(nixl, lens, NixlConfig::default())
}

/// The same with another configuration.
pub fn worker_with(nixl: &Nixl, lens: &[usize], config: NixlConfig) -> Side<NixlTransport> {
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    let make = |room| {
        let memory = HostMemory::new(room).unwrap();
        transport.add_memory(&memory).unwrap();
        (memory.addr(), Memory::clone(&memory))
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(transport)
}

/// The same in memory of the first GPU.
fn vram(nixl: &Nixl, lens: &[usize], config: NixlConfig) -> Side<NixlTransport> {
    let gpu = Gpu::first().unwrap();
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    // SAFETY: the memory is freed with the worker, after its transport.
    let pages = Vram::pages(gpu, lens, |addr, len| unsafe { transport.adopt_device(0, addr, len) }.unwrap());
    pages.side(transport)
}
