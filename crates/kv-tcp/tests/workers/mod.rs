//! Workers with a TCP transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::net::SocketAddr;

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Regions, Side};
use kv_core::{Region, RegionRole, Transport};
use kv_tcp::{HostMemory, TcpConfig, TcpTransport};

/// How the workers of a check are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As they come.
    Usual,
    /// Pages and frames share one connection.
    One,
    /// Three connections for pages, small slices and a small window.
    Many,
    /// IPv6.
    Six,
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        let all = [Kind::Usual, Kind::One, Kind::Many, Kind::Six];
        all.into_iter().find(|kind| format!("{kind:?}") == name).unwrap()
    }

    pub fn config(self) -> TcpConfig {
        let config = TcpConfig::new(loopback());
        match self {
            Kind::Usual => config,
            Kind::One => config.with(|config| config.data_connections = 0),
            Kind::Many => config.with(|config| {
                config.data_connections = 3;
                (config.slice_bytes, config.window_bytes) = (10_000, 70_000);
                (config.send_buffer, config.receive_buffer) = (Some(16 << 10), Some(16 << 10));
            }),
            Kind::Six => TcpConfig::new("[::1]:0".parse().unwrap()),
        }
    }
}

impl Harness for Kind {
    type Transport = TcpTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<TcpTransport> {
        worker(self.config(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{self:?}"), job, peer)
    }
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(config: TcpConfig, lens: &[usize]) -> Side<TcpTransport> {
    let mut transport = TcpTransport::new(config).unwrap();
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
