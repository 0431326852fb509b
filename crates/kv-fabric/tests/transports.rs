//! The libfabric transport keeps the contract of transports, with processes that are killed.
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
fn sockets_under_messages_keep_the_contract() {
    kv_conformance::all(|| Kind::Usual);
}

#[test]
fn small_slices_in_a_small_window_keep_the_contract() {
    kv_conformance::alive(|| Kind::Narrow);
}

#[test]
fn two_devices_keep_the_contract() {
    kv_conformance::alive(|| Kind::Two);
}

#[test]
fn two_devices_and_three_of_the_peers_keep_the_contract() {
    kv_conformance::all(|| Kind::Uneven);
}

#[test]
fn small_slices_in_the_small_windows_of_two_devices_keep_the_contract() {
    kv_conformance::all(|| Kind::NarrowTwo);
}

#[test]
fn endpoints_over_ipv6_keep_the_contract() {
    kv_conformance::alive(|| Kind::Six);
}
