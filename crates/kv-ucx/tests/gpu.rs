//! Workers in the memory of a GPU keep the contract of transports, among themselves and with workers in host memory,
//! where there is a GPU; a reason why not elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::sync::{Mutex, PoisonError};

use kv_conformance::process::{self, Process};
use kv_conformance::{Gpu, Harness, Job, Other, boottime, connect};
use kv_core::{Descriptor, Directions, MemoryKind, Op, PeerId, Post, PostId, Transport, TransportError};
use kv_ucx::{UcxConfig, UcxError, UcxTransport};
use workers::{Kind, ucx, vram, worker_of};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker_of(Kind::named(kind), &[Kind::FAR_LEN]));
}

/// One test at a time: a GPU takes turns between the programs that use it, and each turn is long.
static ALONE: Mutex<()> = Mutex::new(());

fn keeps_the_contract(kind: Kind, wanted: impl Fn(&str) -> bool) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_some() && kv_conformance::needed("GPU", Gpu::first()).is_some() {
        kv_conformance::some(|| kind, wanted);
    }
}

/// Over TCP, a killed writer may take down the process whose GPU memory it writes, or that it writes from its own.
fn kills_no_writer(check: &str) -> bool {
    !kv_conformance::KILLED_WRITERS.contains(&check)
}

#[test]
fn pages_go_between_gpu_memory_of_two_processes() {
    keeps_the_contract(Kind::Vram, |_| true);
}

#[test]
fn pages_go_between_gpu_memory_and_host_memory_of_another_process_if_the_owners_allow_that() {
    keeps_the_contract(Kind::VramToHost, kills_no_writer);
}

#[test]
fn pages_go_between_host_memory_and_gpu_memory_of_another_process_if_the_owners_allow_that() {
    keeps_the_contract(Kind::HostToVram, kills_no_writer);
}

#[test]
fn pages_between_gpu_memory_and_host_memory_are_refused_before_any_byte_moves() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_none() || kv_conformance::needed("GPU", Gpu::first()).is_none() {
        return;
    }
    for (here, there) in [(Kind::Vram, Kind::All), (Kind::All, Kind::Vram)] {
        let (mut here, mut there) = (worker_of(here, &[4096]), worker_of(there, &[4096]));
        here.memory.write(0, 0, b"bytes");
        connect(&mut here.transport, PeerId(1), &there.transport.metadata().unwrap()).unwrap();
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 5 };
        for (op, setting) in [(Op::Write, "gpu_over_tcp"), (Op::Read, "reads_over_tcp")] {
            let post = Post { id: PostId(1), op, descriptors: vec![descriptor], notify: None };
            let Err(TransportError::Unsupported(why)) = here.transport.post(PeerId(1), post) else {
                panic!("from {:?}", here.transport.lanes(PeerId(1)))
            };
            assert!(why.contains("GPU memory") && why.contains(setting), "{why}");
        }
        assert_eq!(here.transport.directions(Some(PeerId(1))), Directions::WRITE);
        let mut events = Vec::new();
        for _ in 0..100 {
            here.transport.poll(boottime(), &mut events);
            there.transport.poll(boottime(), &mut Vec::new());
        }
        let mut bytes = [1; 5];
        there.memory.read(0, 0, &mut bytes);
        assert_eq!((events, bytes), (vec![], [0; 5]));
    }
}

#[test]
fn the_way_between_gpu_memory_of_two_processes_has_ucxs_transport_of_the_gpu() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_none() || kv_conformance::needed("GPU", Gpu::first()).is_none() {
        return;
    }
    let mut here = worker_of(Kind::Vram, &[Kind::FAR_LEN]);
    let other = Process::start("Vram", Job::Serve, &here.transport.metadata().unwrap());
    connect(&mut here.transport, PeerId(1), other.metadata()).unwrap();
    let lanes = here.transport.lanes(PeerId(1));
    println!("{lanes:?}");
    assert!(lanes.iter().any(|(transport, _)| transport == "cuda_ipc"), "{lanes:?}");
}

#[test]
fn ucx_knows_the_settings_for_a_peers_gpu_memory() {
    let (Some(ucx), Some(_)) = (ucx(), kv_conformance::needed("GPU", Gpu::first())) else { return };
    let settings = [("CUDA_IPC_CACHE", "n"), ("CUDA_IPC_ENABLE_GET_ZCOPY", "on")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    UcxTransport::new(ucx, UcxConfig::default().with(|config| config.settings = settings)).unwrap();
}

/// Over TCP, the process that is read from would have to answer.
#[test]
fn a_gpu_reads_the_gpu_memory_of_a_process_that_stands_still() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_some() && kv_conformance::needed("GPU", Gpu::first()).is_some() {
        process::pages_are_read_from_a_process_that_stands_still(&Kind::Vram);
    }
}

#[test]
fn a_read_between_gpu_memory_is_refused_where_no_gpu_would_copy_it() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if ucx().is_none() || kv_conformance::needed("GPU", Gpu::first()).is_none() {
        return;
    }
    let other = Process::start("Vram", Job::Serve, &[]);
    let told_off = UcxConfig::default().with(|config| {
        config.settings = vec![("CUDA_IPC_ENABLE_GET_ZCOPY".to_owned(), "off".to_owned())];
    });
    let without = UcxConfig::default().with(|config| {
        config.transports = ["tcp", "cuda_copy"].map(str::to_owned).to_vec();
    });
    for config in [told_off, without] {
        let mut here = vram(config, &[4096]);
        connect(&mut here.transport, PeerId(1), other.metadata()).unwrap();
        assert_eq!(here.transport.directions(Some(PeerId(1))), Directions::WRITE);
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 5 };
        let post = Post { id: PostId(1), op: Op::Read, descriptors: vec![descriptor], notify: None };
        let refused = here.transport.post(PeerId(1), post);
        assert!(matches!(refused, Err(TransportError::Unsupported(_))), "{refused:?}");
    }
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
