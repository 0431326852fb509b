//! A transport over several keeps the contract of transports, in one process and with processes that are killed:
//! over two that both sides have, and over one that both sides have beside one that leads nowhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use kv_conformance::process::{self, Process};
use kv_conformance::{Harness, Job, Pages, Side};
use kv_local::{Arena, LocalConfig, LocalTransport, Memory};
use kv_ways::{Member, Ways};

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
    let member = |name: &&'static str, arena: &Arena| {
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(arena).unwrap();
        Member::named(name, Box::new(transport))
    };
    let mut members = Vec::new();
    let make = |room| {
        let arena = Arena::new(room).unwrap();
        members.extend(names.iter().map(|name| member(name, &arena)));
        (arena.addr(), Memory::clone(&arena))
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(Ways::new(members).unwrap())
}
