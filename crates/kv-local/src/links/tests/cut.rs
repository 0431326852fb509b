//! Connections that are cut while both workers live on: the checks of the conformance suite that need that.

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Pages, Pair, Side};
use kv_host::Memory;
use rustix::net::{Shutdown, shutdown};

use super::*;

/// Workers whose connections the test can reach.
struct Cut;

impl Harness for Cut {
    type Transport = LocalTransport;
    type Other = Process;
    const FAR_LEN: usize = LEN;

    fn worker(&self, lens: &[usize]) -> Side<LocalTransport> {
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        let make = |room| {
            let arena = Arena::new(room).unwrap();
            transport.add_arena(&arena).unwrap();
            (arena.addr(), Memory::clone(&arena))
        };
        Pages::new(lens, make, Memory::read, Memory::write).side(transport)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start("", job, peer)
    }

    fn cut(&self, pair: &mut Pair<LocalTransport>) -> bool {
        for (_, link) in pair.b.transport.links.iter() {
            shutdown(link.connection.socket(), Shutdown::Both).unwrap();
        }
        true
    }
}

#[test]
fn a_right_is_revoked_for_good_also_after_the_connection_was_cut() {
    kv_conformance::some(|| Cut, |name| name.starts_with("a_right_revoked_after"));
}
