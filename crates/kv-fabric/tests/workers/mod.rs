//! Workers with a libfabric transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Regions, Side};
use kv_core::{Region, RegionRole, Transport};
use kv_fabric::{FabricConfig, FabricTransport, HostMemory};

/// How the workers of a check are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As they come.
    Usual,
    /// Small slices and a small window.
    Narrow,
    /// IPv6.
    Six,
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        let all = [Kind::Usual, Kind::Narrow, Kind::Six];
        all.into_iter().find(|kind| format!("{kind:?}") == name).unwrap()
    }

    pub fn config(self) -> FabricConfig {
        let address = if self == Kind::Six { "::1" } else { "127.0.0.1" };
        let config = FabricConfig::new(address.parse().unwrap());
        match self {
            Kind::Usual | Kind::Six => config,
            Kind::Narrow => {
                config.with(|config| (config.slice_bytes, config.window_bytes) = (10_000, 70_000))
            }
        }
    }
}

impl Harness for Kind {
    type Transport = FabricTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<FabricTransport> {
        worker(self.config(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{self:?}"), job, peer)
    }
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(config: FabricConfig, lens: &[usize]) -> Side<FabricTransport> {
    let mut transport = FabricTransport::new(config).unwrap();
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
