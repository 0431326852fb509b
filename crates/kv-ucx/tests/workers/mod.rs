//! Workers with a UCX transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Regions, Side};
use kv_core::{Region, RegionRole, Transport};
use kv_ucx::{HostMemory, Ucx, UcxConfig, UcxTransport};

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
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        let all = [Kind::Usual, Kind::Narrow, Kind::All, Kind::Reads];
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
            Kind::All => UcxConfig::default(),
            Kind::Reads => lo.with(|config| config.reads_over_tcp = true),
        }
    }
}

impl Harness for Kind {
    type Transport = UcxTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<UcxTransport> {
        worker(self.config(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{self:?}"), job, peer)
    }

    fn reads(&self) -> bool {
        *self == Kind::Reads
    }
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(config: UcxConfig, lens: &[usize]) -> Side<UcxTransport> {
    let mut transport = UcxTransport::new(Ucx::load(None).unwrap(), config).unwrap();
    let gap = 4096 + 64;
    let offsets: Vec<usize> = lens
        .iter()
        .scan(gap, |at, len| {
            let here = *at;
            *at += len + gap;
            Some(here)
        })
        .collect();
    let total = lens.iter().sum::<usize>() + gap * (lens.len() + 1);
    let memory = HostMemory::new(total).unwrap();
    transport.add_memory(&memory).unwrap();
    for (offset, len) in offsets.iter().zip(lens) {
        let region = Region::dram(RegionRole::Kv, memory.addr() + *offset as u64, *len as u64, 1);
        transport.register(&region).unwrap();
    }
    Side { transport, lens: lens.to_vec(), memory: Box::new(Pages { memory, offsets, total, gap }) }
}

struct Pages {
    memory: HostMemory,
    offsets: Vec<usize>,
    total: usize,
    gap: usize,
}

impl Regions for Pages {
    fn read(&self, region: usize, offset: usize, out: &mut [u8]) {
        self.check_gaps();
        self.memory.read(self.offsets[region] + offset, out).unwrap();
    }

    fn write(&self, region: usize, offset: usize, bytes: &[u8]) {
        self.memory.write(self.offsets[region] + offset, bytes).unwrap();
    }
}

impl Pages {
    /// Stray writes beside the regions would be seen here.
    fn check_gaps(&self) {
        let starts = self.offsets.iter().map(|at| at - self.gap).chain([self.total - self.gap]);
        for start in starts {
            let mut bytes = vec![0; self.gap];
            self.memory.read(start, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "a write outside of all regions");
        }
    }
}
