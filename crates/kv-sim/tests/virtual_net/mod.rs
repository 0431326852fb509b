//! Workers of a virtual network, for the conformance suite.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::time::Duration;

use bytes::Bytes;
use kv_conformance::{Harness, Job, Other, Pair, Puppet, Regions, Side};
use kv_core::{Region, RegionRole, Time, Transport};
use kv_sim::{VirtualNet, VirtualTransport};

/// Makes workers whose transports are wrapped by `wrap`.
pub struct Virtual<W> {
    pub net: VirtualNet,
    pub wrap: W,
    pub patience: Duration,
}

/// A virtual transport, or a faulty one around it.
pub trait Wrapped: Transport {
    fn bare(&self) -> &VirtualTransport;

    fn crash(&self, net: &VirtualNet) {
        net.crash(&self.metadata().unwrap());
    }
}

impl Wrapped for VirtualTransport {
    fn bare(&self) -> &VirtualTransport {
        self
    }
}

impl<P: Wrapped, W: Fn(VirtualTransport) -> P> Virtual<W> {
    fn make(&self, lens: &[usize]) -> Side<P> {
        let mut transport = (self.wrap)(self.net.transport().expect("room for another transport"));
        for len in lens {
            transport.register(&Region::dram(RegionRole::Kv, 0, *len as u64, 1)).unwrap();
        }
        let memory = Memory { net: self.net.clone(), metadata: transport.metadata().unwrap() };
        Side { transport, lens: lens.to_vec(), memory: Box::new(memory) }
    }
}

impl<P: Wrapped, W: Fn(VirtualTransport) -> P> Harness for Virtual<W> {
    type Transport = P;
    type Other = Elsewhere<P>;
    const FAR_LEN: usize = 1 << 20;

    fn worker(&self, lens: &[usize]) -> Side<P> {
        self.make(lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Elsewhere<P> {
        let side = self.make(&[Self::FAR_LEN]);
        let metadata = side.transport.metadata().unwrap();
        let puppet = Puppet::new(side, job, peer);
        Elsewhere { puppet, metadata, net: self.net.clone() }
    }

    fn cut(&self, pair: &mut Pair<P>) -> bool {
        let [from, to] = [&pair.b, &pair.a].map(|side| side.transport.metadata().unwrap());
        self.net.cut(&from, &to);
        true
    }

    fn now(&self) -> Time {
        self.net.now()
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}

/// A worker on another virtual host.
pub struct Elsewhere<P: Wrapped> {
    puppet: Puppet<P>,
    metadata: Bytes,
    net: VirtualNet,
}

impl<P: Wrapped> Other for Elsewhere<P> {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    fn turn(&mut self) {
        if self.is_alive() {
            self.puppet.turn(self.net.now());
        }
    }

    fn kill(&mut self) {
        self.puppet.side.transport.crash(&self.net);
    }

    fn is_alive(&mut self) -> bool {
        self.puppet.side.transport.bare().is_alive()
    }
}

impl<P: Wrapped> Drop for Elsewhere<P> {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Memory {
    net: VirtualNet,
    metadata: Bytes,
}

impl Regions for Memory {
    fn read(&self, region: usize, offset: usize, out: &mut [u8]) {
        assert!(self.net.read(&self.metadata, region as u32, offset, out));
    }

    fn write(&self, region: usize, offset: usize, bytes: &[u8]) {
        assert!(self.net.write(&self.metadata, region as u32, offset, bytes));
    }
}
