//! The local plane keeps the contract of planes, wherever the pages are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod conformance;
mod workers;

use workers::{PLACES, Place, worker};

#[test]
fn arena_to_arena_keeps_the_contract() {
    conformance::all(|| (worker(Place::Arena, &conformance::LENS), worker(Place::Arena, &conformance::LENS)));
}

#[test]
fn mixed_and_adopted_memory_keeps_the_contract() {
    for (a, b) in &PLACES[1..] {
        conformance::all(|| (worker(*a, &conformance::LENS), worker(*b, &conformance::LENS)));
    }
}
