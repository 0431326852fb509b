//! Workers with a UCX transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use kv_conformance::process::Process;
use kv_conformance::{Gpu, Harness, Job, Pages, Side, Vram};
use kv_ucx::{HostMemory, Memory, Ucx, UcxConfig, UcxTransport};

/// UCX; or `None` and the reason why nothing is tested.
pub fn ucx() -> Option<Ucx> {
    kv_conformance::needed("UCX", Ucx::load(None))
}

/// How the workers of a check are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// TCP over the loopback device.
    Usual,
    /// The same with small slices and a small window.
    Narrow,
    /// What UCX chooses, over all devices.
    All,
    /// TCP, and reads are allowed.
    Reads,
    /// In memory of a GPU, over what UCX chooses.
    Vram,
    /// In memory of a GPU, with partners in host memory, also over TCP.
    VramToHost,
    /// In host memory, with partners in memory of a GPU, also over TCP.
    HostToVram,
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        let all = [
            Kind::Usual,
            Kind::Narrow,
            Kind::All,
            Kind::Reads,
            Kind::Vram,
            Kind::VramToHost,
            Kind::HostToVram,
        ];
        all.into_iter().find(|kind| format!("{kind:?}") == name).unwrap()
    }

    pub fn config(self) -> UcxConfig {
        let lo = UcxConfig::default().with(|config| {
            config.devices = vec!["lo".to_owned()];
            config.transports = vec!["tcp".to_owned()];
        });
        match self {
            Kind::Usual => lo,
            Kind::Narrow => {
                lo.with(|config| (config.slice_bytes, config.window_bytes) = (64 << 10, 128 << 10))
            }
            Kind::All | Kind::Vram => UcxConfig::default(),
            Kind::VramToHost | Kind::HostToVram => {
                UcxConfig::default().with(|config| config.gpu_over_tcp = true)
            }
            Kind::Reads => lo.with(|config| config.reads_over_tcp = true),
        }
    }

    /// The kind of the partners of such workers.
    fn others(self) -> Kind {
        match self {
            Kind::VramToHost => Kind::HostToVram,
            Kind::HostToVram => Kind::VramToHost,
            alike => alike,
        }
    }
}

impl Harness for Kind {
    type Transport = UcxTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<UcxTransport> {
        worker_of(*self, lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<UcxTransport> {
        worker_of(self.others(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{:?}", self.others()), job, peer)
    }

    fn reads(&self) -> bool {
        [Kind::Reads, Kind::Vram].contains(self)
    }

    fn most_descriptors(&self) -> usize {
        match self {
            Kind::Usual => 1_000_000,
            Kind::Vram | Kind::VramToHost | Kind::HostToVram => 20_000,
            _ => 100_000,
        }
    }
}

/// A worker of a kind with regions of these lengths.
pub fn worker_of(kind: Kind, lens: &[usize]) -> Side<UcxTransport> {
    let make = if matches!(kind, Kind::Vram | Kind::VramToHost) { vram } else { worker };
    make(kind.config(), lens)
}

/// A worker with regions of these lengths in memory of the first GPU.
pub fn vram(config: UcxConfig, lens: &[usize]) -> Side<UcxTransport> {
    let gpu = Gpu::first().unwrap();
    let mut transport = UcxTransport::new(Ucx::load(None).unwrap(), config).unwrap();
    // SAFETY: the memory is freed with the worker, after its transport.
    let pages = Vram::pages(gpu, lens, |addr, len| unsafe { transport.adopt_device(0, addr, len) }.unwrap());
    pages.side(transport)
}

/// A worker with regions of these lengths in host memory.
pub fn worker(config: UcxConfig, lens: &[usize]) -> Side<UcxTransport> {
    let mut transport = UcxTransport::new(Ucx::load(None).unwrap(), config).unwrap();
    let make = |room| {
        let memory = HostMemory::new(room).unwrap();
        transport.add_memory(&memory).unwrap();
        (memory.addr(), Memory::clone(&memory))
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(transport)
}
