//! Workers in the memory of a GPU keep the contract of transports, among themselves and with workers in host memory,
//! where there is a GPU; a reason why not elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::sync::{Mutex, PoisonError};

use kv_conformance::Gpu;
use kv_nixl::{MemoryError, NixlConfig, NixlError, NixlTransport};
use workers::{Workers, nixl};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(nixl);
}

/// One test at a time: a GPU takes turns between the programs that use it, and each turn is long.
static ALONE: Mutex<()> = Mutex::new(());

fn keeps_the_contract(here: &'static str, elsewhere: &'static str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (Some(nixl), Some(_)) = (nixl(), kv_conformance::needed("GPU", Gpu::first())) else { return };
    // UCX reads GPU memory of another process over TCP, where a killed reader may take down the other process.
    kv_conformance::all(|| Workers { kind: here, reads: false, ..Workers::alike(nixl, elsewhere) });
}

#[test]
fn pages_go_between_gpu_memory_of_two_processes() {
    keeps_the_contract("vram", "vram");
}

#[test]
fn pages_go_between_gpu_memory_and_host_memory_of_another_process() {
    keeps_the_contract("vram", "default");
}

#[test]
fn pages_go_between_host_memory_and_gpu_memory_of_another_process() {
    keeps_the_contract("default", "vram");
}

#[test]
fn device_memory_is_refused_where_it_cannot_be() {
    let Some(nixl) = nixl() else { return };
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    // SAFETY: none of these is taken.
    let refused = unsafe { [transport.adopt_device(0, 0, 10), transport.adopt_device(0, 4096, u64::MAX)] };
    assert!(
        refused.iter().all(|result| matches!(result, Err(NixlError::Memory(MemoryError::Range { .. })))),
        "{refused:?}"
    );
}
