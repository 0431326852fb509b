//! Workers in the memory of a GPU keep the contract of transports, among themselves and with workers in host memory,
//! where there is a GPU; a reason why not elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::sync::{Mutex, PoisonError};

use kv_conformance::{Gpu, Harness, process};
use kv_core::MemoryKind;
use kv_ucx::{UcxConfig, UcxError, UcxTransport};
use workers::{Kind, ucx, worker_of};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker_of(Kind::named(kind), &[Kind::FAR_LEN]));
}

/// One test at a time: a GPU takes turns between the programs that use it, and each turn is long.
static ALONE: Mutex<()> = Mutex::new(());

fn keeps_the_contract(kind: Kind) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_some() && kv_conformance::needed("GPU", Gpu::first()).is_some() {
        kv_conformance::all(|| kind);
    }
}

#[test]
fn pages_go_between_gpu_memory_of_two_processes() {
    keeps_the_contract(Kind::Vram);
}

#[test]
fn pages_go_between_gpu_memory_and_host_memory_of_another_process() {
    keeps_the_contract(Kind::VramToHost);
}

#[test]
fn pages_go_between_host_memory_and_gpu_memory_of_another_process() {
    keeps_the_contract(Kind::HostToVram);
}

#[test]
fn ucx_knows_the_setting_for_mappings_of_a_peers_gpu_memory() {
    let (Some(ucx), Some(_)) = (ucx(), kv_conformance::needed("GPU", Gpu::first())) else { return };
    let setting = ("CUDA_IPC_CACHE".to_owned(), "n".to_owned());
    UcxTransport::new(ucx, UcxConfig::default().with(|config| config.settings = vec![setting])).unwrap();
}

#[test]
fn device_memory_is_refused_where_ucx_has_no_gpu() {
    let (Some(ucx), Err(reason)) = (ucx(), Gpu::first()) else { return };
    let mut transport = UcxTransport::new(ucx, UcxConfig::default()).unwrap();
    // SAFETY: the range is not taken.
    let refused = unsafe { transport.adopt_device(0, 4096, 4096) };
    let wanted = UcxError::Kind { region: 0, memory: MemoryKind::Vram, device: 0 };
    assert_eq!(refused, Err(wanted), "{reason}");
}
