//! The UCX transport keeps the contract of transports, with processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use kv_conformance::{Harness, process};
use workers::{Kind, ucx, worker};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[Kind::FAR_LEN]));
}

fn keeps_the_contract(kind: Kind) {
    if ucx().is_some() {
        kv_conformance::all(|| kind);
    }
}

fn keeps_the_contract_of_the_living(kind: Kind) {
    if ucx().is_some() {
        kv_conformance::alive(|| kind);
    }
}

#[test]
fn writes_over_tcp_keep_the_contract() {
    keeps_the_contract(Kind::Usual);
}

#[test]
fn small_slices_and_a_small_window_keep_the_contract() {
    keeps_the_contract_of_the_living(Kind::Narrow);
}

#[test]
fn what_ucx_chooses_among_all_devices_keeps_the_contract() {
    keeps_the_contract(Kind::All);
}
