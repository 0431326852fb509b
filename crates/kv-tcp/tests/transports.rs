//! The TCP transport keeps the contract of transports, with processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use kv_conformance::{Harness, process};
use workers::{Kind, worker};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[Kind::FAR_LEN]));
}

#[test]
fn the_usual_connections_keep_the_contract() {
    kv_conformance::all(|| Kind::Usual);
}

#[test]
fn one_connection_for_pages_and_frames_keeps_the_contract() {
    kv_conformance::all(|| Kind::One);
}

#[test]
fn several_narrow_connections_keep_the_contract() {
    kv_conformance::all(|| Kind::Many);
}

#[cfg(feature = "tls")]
#[test]
fn encrypted_connections_keep_the_contract() {
    let kind = Kind::Tls(std::process::id());
    kv_conformance::all(|| kind);
}

#[test]
fn connections_over_ipv6_keep_the_contract() {
    kv_conformance::all(|| Kind::Six);
}
