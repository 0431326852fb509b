//! The virtual transport keeps the contract of transports, whatever its network does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod virtual_net;

use std::time::Duration;

use kv_conformance::Random;
use kv_sim::VirtualNet;
use virtual_net::Virtual;

#[test]
fn the_virtual_transport_passes_the_conformance_suite() {
    let seed = Random::new("the_virtual_transport_passes_the_conformance_suite").below(1 << 30) as u64;
    kv_conformance::all(|| Virtual {
        net: VirtualNet::new(seed),
        wrap: |transport| transport,
        patience: Duration::from_secs(60),
    });
}
