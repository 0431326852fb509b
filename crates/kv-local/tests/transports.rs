//! The local transport keeps the contract of transports, wherever the pages are: in one process, and with
//! processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use kv_conformance::{Harness, process};
use workers::{Place, Places, place, worker};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(place(kind), &[Places::FAR_LEN]));
}

#[test]
fn arena_to_arena_keeps_the_contract() {
    kv_conformance::all(|| Places(Place::Arena, Place::Arena));
}

#[test]
fn adopted_memory_keeps_the_contract() {
    kv_conformance::all(|| Places(Place::Adopted, Place::Adopted));
}

#[test]
fn memory_of_both_kinds_keeps_the_contract() {
    kv_conformance::alive(|| Places(Place::Arena, Place::Adopted));
    kv_conformance::alive(|| Places(Place::Adopted, Place::Arena));
}
