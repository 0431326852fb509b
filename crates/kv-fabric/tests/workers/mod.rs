//! Workers with a libfabric transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::net::Ipv4Addr;

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Pages, Side};
use kv_fabric::{FabricConfig, FabricDevice, FabricTransport, HostMemory, Memory};

/// How the workers of a check are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As they come.
    Usual,
    /// Small slices and a small window.
    Narrow,
    /// IPv6.
    Six,
    /// Two devices.
    Two,
    /// Two devices, while its partners have three.
    Uneven,
    Three,
    /// Two devices, small slices and a small window.
    NarrowTwo,
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        let all =
            [Kind::Usual, Kind::Narrow, Kind::Six, Kind::Two, Kind::Uneven, Kind::Three, Kind::NarrowTwo];
        all.into_iter().find(|kind| format!("{kind:?}") == name).unwrap()
    }

    pub fn config(self) -> FabricConfig {
        let address = if self == Kind::Six { "::1" } else { "127.0.0.1" };
        let config = FabricConfig::new(address.parse().unwrap());
        let devices = match self {
            Kind::Usual | Kind::Narrow | Kind::Six => 1,
            Kind::Two | Kind::NarrowTwo | Kind::Uneven => 2,
            Kind::Three => 3,
        };
        // Every address of this range is one of this host.
        let others = (2..=devices).map(|number| FabricDevice::at(Ipv4Addr::new(127, 0, 0, number).into()));
        let config = config.with(|config| config.devices.extend(others));
        match self {
            Kind::Usual | Kind::Six | Kind::Two | Kind::Uneven | Kind::Three => config,
            Kind::Narrow | Kind::NarrowTwo => {
                config.with(|config| (config.slice_bytes, config.window_bytes) = (10_000, 70_000))
            }
        }
    }
}

impl Kind {
    /// How the workers are configured that this one works with.
    fn others(self) -> Kind {
        if self == Kind::Uneven { Kind::Three } else { self }
    }
}

impl Harness for Kind {
    type Transport = FabricTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<FabricTransport> {
        worker(self.config(), lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<FabricTransport> {
        worker(self.others().config(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{:?}", self.others()), job, peer)
    }

    fn most_descriptors(&self) -> usize {
        if *self == Kind::Usual { 1_000_000 } else { 100_000 }
    }
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(config: FabricConfig, lens: &[usize]) -> Side<FabricTransport> {
    let mut transport = FabricTransport::new(config).unwrap();
    let make = |room| {
        let memory = HostMemory::new(room).unwrap();
        transport.add_memory(&memory).unwrap();
        (memory.addr(), Memory::clone(&memory))
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(transport)
}
