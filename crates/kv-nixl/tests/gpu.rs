//! Workers in the memory of a GPU keep the contract of transports, among themselves and with workers in host memory,
//! where there is a GPU; a reason why not elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::sync::{Mutex, PoisonError};

use kv_conformance::{A_KNOWS_B, Gpu, LENS, Pair, process};
use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportError};
use kv_nixl::{MemoryError, Nixl, NixlConfig, NixlError, NixlTransport};
use workers::{Workers, nixl};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(nixl);
}

/// One test at a time: a GPU takes turns between the programs that use it, and each turn is long.
static ALONE: Mutex<()> = Mutex::new(());

/// NIXL, if this host has a GPU, too.
fn with_gpu() -> Option<&'static Nixl> {
    nixl().filter(|_| kv_conformance::needed("GPU", Gpu::first()).is_some())
}

fn keeps_the_contract(here: &'static str, elsewhere: &'static str, wanted: impl Fn(&str) -> bool) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(nixl) = with_gpu() else { return };
    // UCX reads between GPU memory and host memory over TCP, where a killed reader may take down the other process.
    let reads = (here, elsewhere) == ("vram", "vram");
    kv_conformance::some(|| Workers { kind: here, reads, ..Workers::alike(nixl, elsewhere) }, wanted);
}

/// Over TCP, a killed writer may take down the process whose GPU memory it writes, or that it writes from its own.
fn kills_no_writer(check: &str) -> bool {
    !kv_conformance::KILLED_WRITERS.contains(&check)
}

#[test]
fn pages_go_between_gpu_memory_of_two_processes() {
    keeps_the_contract("vram", "vram", |_| true);
}

#[test]
fn pages_go_between_gpu_memory_and_host_memory_of_another_process_if_the_owners_allow_that() {
    keeps_the_contract("vram-over-tcp", "gpu-over-tcp", kills_no_writer);
}

#[test]
fn pages_go_between_host_memory_and_gpu_memory_of_another_process_if_the_owners_allow_that() {
    keeps_the_contract("gpu-over-tcp", "vram-over-tcp", kills_no_writer);
}

#[test]
fn pages_between_gpu_memory_and_host_memory_are_refused_before_any_byte_moves() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(nixl) = with_gpu() else { return };
    for (here, there) in [("vram", "default"), ("default", "vram")] {
        let mut pair = Pair::connected(&Workers { kind: here, ..Workers::alike(nixl, there) }, &LENS);
        pair.a.memory.write(0, 0, b"bytes");
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 5 };
        for (op, setting) in [(Op::Write, "gpu_over_tcp"), (Op::Read, "reads_over_tcp")] {
            let post = Post { id: PostId(1), op, descriptors: vec![descriptor], notify: None };
            let Err(TransportError::Unsupported(why)) = pair.a.transport.post(A_KNOWS_B, post) else {
                panic!("{op:?} from {here} to {there}")
            };
            assert!(why.contains("GPU memory") && why.contains(setting), "{why}");
        }
        (0..100).for_each(|_| pair.turn());
        let mut bytes = [1; 5];
        pair.b.memory.read(0, 0, &mut bytes);
        assert_eq!((pair.a_events, bytes), (vec![], [0; 5]));
    }
}

/// Over TCP, the process that is read from would have to answer.
#[test]
fn a_gpu_reads_the_gpu_memory_of_a_process_that_stands_still() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(nixl) = with_gpu() else { return };
    process::pages_are_read_from_a_process_that_stands_still(&Workers::alike(nixl, "vram"));
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
