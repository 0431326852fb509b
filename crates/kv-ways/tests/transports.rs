//! A transport over several keeps the contract of transports, in one process and with processes that are killed:
//! over two that both sides have, and over one that both sides have beside one that leads nowhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use kv_conformance::process::{self, Process};
use kv_conformance::{Harness, Job, Regions, Side};
use kv_core::{Region, RegionRole, Transport};
use kv_local::{Arena, LocalConfig, LocalTransport};
use kv_ways::{Member, Ways};

/// Between regions, and around them: nothing may touch it.
const GAP: usize = 4096 + 64;

/// The names of the members of the workers here, and of their partners.
struct Names(&'static [&'static str], &'static [&'static str]);

/// Two ways to the peer, which the two sides prefer alike.
const BOTH: Names = Names(&["first", "second"], &["first", "second"]);
/// A preferred member that no peer has, and one that the peer has.
const ALONE: Names = Names(&["elsewhere", "first"], &["first"]);

impl Harness for Names {
    type Transport = Ways;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<Ways> {
        worker(self.0, lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<Ways> {
        worker(self.1, lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&self.1.join(","), job, peer)
    }
}

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|names| {
        let named = |name| ["first", "second"].into_iter().find(|known| *known == name).unwrap();
        worker(&names.split(',').map(named).collect::<Vec<_>>(), &[Names::FAR_LEN])
    });
}

#[test]
fn two_transports_as_one_pass_the_conformance_suite() {
    kv_conformance::all(|| BOTH);
}

#[test]
fn a_transport_beside_an_unusable_transport_passes_the_conformance_suite() {
    kv_conformance::all(|| ALONE);
}

/// A worker with regions of these lengths over local transports of these names.
fn worker(names: &[&'static str], lens: &[usize]) -> Side<Ways> {
    let arena = Arena::new(lens.iter().sum::<usize>() + GAP * (lens.len() + 1)).unwrap();
    let member = |name: &&'static str| {
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        Member::named(name, Box::new(transport))
    };
    let mut transport = Ways::new(names.iter().map(member).collect()).unwrap();
    let (mut at, mut offsets) = (GAP, Vec::new());
    for len in lens {
        let region = Region::dram(RegionRole::Kv, arena.addr() + at as u64, *len as u64, 1);
        transport.register(&region).unwrap();
        offsets.push(at);
        at += len + GAP;
    }
    Side { transport, lens: lens.to_vec(), memory: Box::new(Pages { arena, offsets, len: at }) }
}

struct Pages {
    arena: Arena,
    offsets: Vec<usize>,
    /// Up to the end of the last gap.
    len: usize,
}

impl Regions for Pages {
    fn read(&self, region: usize, offset: usize, out: &mut [u8]) {
        for gap in self.offsets.iter().copied().chain([self.len]) {
            let mut bytes = [0; GAP];
            self.arena.read(gap - GAP, &mut bytes).unwrap();
            assert!(bytes == [0; GAP], "a write outside of all regions");
        }
        self.arena.read(self.offsets[region] + offset, out).unwrap();
    }

    fn write(&self, region: usize, offset: usize, bytes: &[u8]) {
        self.arena.write(self.offsets[region] + offset, bytes).unwrap();
    }
}
