//! The local transport keeps the contract of transports, wherever the pages are: in one process, and with
//! processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use kv_conformance::{Harness, process};
use workers::{PLACES, Place, Places, place, worker};

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
fn mixed_and_adopted_memory_keeps_the_contract() {
    for (a, b) in &PLACES[1..] {
        kv_conformance::all(|| Places(*a, *b));
    }
}
