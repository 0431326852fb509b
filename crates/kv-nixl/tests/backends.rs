//! Backends and devices by name: what is chosen is used, and nothing else listens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use kv_core::Transport;
use kv_nixl::{NixlConfig, NixlError, NixlTransport};
use workers::{Workers, nixl};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(nixl);
}

/// Needs libfabric 2.7, libhwloc, and CUDA's libraries, which NIXL's package does not have.
#[test]
fn libfabric_keeps_the_contract_or_says_what_it_lacks() {
    let Some(nixl) = nixl() else { return };
    let config = NixlConfig::default().with(|config| config.backend = "LIBFABRIC".to_owned());
    let Some(reason) = nixl.why_not("LIBFABRIC") else {
        kv_conformance::all(|| Workers::alike(nixl, "LIBFABRIC"));
        return;
    };
    println!("SKIPPED: the contract over LIBFABRIC: {reason}");
    assert!(reason.contains(".so"), "{reason}");
    match NixlTransport::new(nixl, config) {
        Err(error @ NixlError::Backend { .. }) => {
            let text = error.to_string();
            assert!(text.contains("LIBFABRIC") && text.contains(&reason), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

/// In one test, because sockets are the process'.
#[test]
fn a_transport_listens_on_the_chosen_device_only() {
    let Some(nixl) = nixl() else { return };
    let before = listening();
    let config = NixlConfig::default().with(|config| config.devices = vec!["lo".to_owned()]);
    let transport = NixlTransport::new(nixl, config).unwrap();
    transport.metadata().unwrap();
    let chosen: BTreeSet<_> = listening().difference(&before).copied().collect();
    assert!(!chosen.is_empty(), "it listens nowhere");
    assert!(chosen.iter().all(|(addr, _)| addr.is_loopback()), "{chosen:?}");
    drop(transport);
}

/// Addresses and ports on which this process accepts TCP connections.
fn listening() -> BTreeSet<(Ipv4Addr, u16)> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links: BTreeSet<String> = entries
        .filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[3] == "0A" && links.contains(&format!("socket:[{}]", row[9])))
        .map(|row| {
            let (addr, port) = row[1].split_once(':').unwrap();
            let addr = u32::from_str_radix(addr, 16).unwrap();
            (Ipv4Addr::from(addr.to_le_bytes()), u16::from_str_radix(port, 16).unwrap())
        })
        .collect()
}
