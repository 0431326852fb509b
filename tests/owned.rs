//! Regions in memory that the server owns, by raw address and length: the tensors of two processes exchange pages over
//! kv-local and over NIXL, and what cannot be a region is refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient};
use kv_transfer::local::{LocalConfig, LocalError, LocalTransport, MemoryError};
use kv_transfer::prelude::*;
use kv_transfer::{ArgsError, MemoryKind, Transport};
use support::{ended, reclaimed, server};

const PAGES: usize = 8;
/// No multiple of anything that a transport could need.
const PAGE: usize = 4099;
const ROOM: u64 = 7;

/// What the other process is told: the transport, and the bootstrap server.
const OTHER: &str = "KV_OWNED_OTHER";

/// Two tensors of a server, each between bytes that nothing may touch. Only their addresses are used.
struct Tensors {
    bytes: [Vec<u8>; 2],
}

impl Tensors {
    fn new(fill: u8) -> Tensors {
        Tensors { bytes: [0, 1].map(|_| vec![fill; PAGE + PAGES * PAGE + PAGE]) }
    }

    fn addr(&self, tensor: usize) -> u64 {
        self.bytes[tensor].as_ptr() as u64 + PAGE as u64
    }

    fn args(&self, engine: &str) -> KvArgs {
        let region =
            |tensor| Region::dram(RegionRole::Kv, self.addr(tensor), (PAGES * PAGE) as u64, PAGE as u64);
        KvArgs::builder(engine, 0)
            .pages(PAGES as u32, 16)
            .region(region(0))
            .region(region(1))
            .build()
            .unwrap()
    }

    /// The bytes of a page: between transfers only.
    fn page(&mut self, tensor: usize, page: usize) -> &mut [u8] {
        &mut self.bytes[tensor][PAGE + page * PAGE..][..PAGE]
    }
}

fn content(tensor: usize, page: usize) -> Vec<u8> {
    (0..PAGE).map(|at| (at * 7 + page * 31 + tensor * 101) as u8).collect()
}

fn worker<T: Transport + Send + 'static>(args: KvArgs, role: WorkerRole, addr: &str, transport: T) -> Worker {
    let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.to_owned()));
    let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
    Worker::start(config, transport, Box::new(client)).unwrap()
}

/// A worker over tensors, which outlive it.
fn start(transport: &str, tensors: &Tensors, engine: &str, role: WorkerRole, addr: &str) -> Worker {
    let args = tensors.args(engine);
    match transport {
        "local" => {
            let config = LocalConfig::default().with(|config| config.permit_tracing = true);
            let mut local = LocalTransport::new(config).unwrap();
            // SAFETY: the tensors are dropped after the worker has stopped, and are referred to before its sessions
            // begin and after they have ended.
            unsafe { local.adopt_regions(args.regions()) }.unwrap();
            worker(args, role, addr, local)
        }
        #[cfg(feature = "nixl")]
        "nixl" => {
            use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
            let nixl = Nixl::load(&Search::default()).unwrap();
            let mut transport = NixlTransport::new(&nixl, NixlConfig::default()).unwrap();
            // SAFETY: as above.
            unsafe { transport.adopt_regions(args.regions()) }.unwrap();
            worker(args, role, addr, transport)
        }
        other => panic!("no transport {other}"),
    }
}

fn pages(pool: &PagePool, pages: [u32; 3]) -> Pages {
    pool.adopt(PageList::from_pages(pages).unwrap()).unwrap()
}

/// The entry point of the other process, the prefill worker. In the test's own process it does nothing.
#[test]
fn other() {
    let Ok(told) = std::env::var(OTHER) else { return };
    let (transport, addr) = told.split_once(' ').unwrap();
    let mut tensors = Tensors::new(0xee);
    for (tensor, page) in [0, 1].into_iter().flat_map(|tensor| (0..PAGES).map(move |page| (tensor, page))) {
        tensors.page(tensor, page).copy_from_slice(&content(tensor, page));
    }
    let prefill = start(transport, &tensors, "prefill", WorkerRole::Prefill, addr);
    let pool = PagePool::new(PAGES as u32);
    let mut sender =
        prefill.manager().sender(addr, Room::Number(ROOM), &[], SessionOptions::default()).unwrap();
    sender.init(3, None).unwrap();
    sender.send(pages(&pool, [6, 1, 2])).unwrap();
    assert_eq!(ended(&sender), KvPoll::Success);
    pool.release(reclaimed(sender)).unwrap();
    assert_eq!(pool.num_out(), 0);
    // The decode process closes the input once it has compared the bytes.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let report = prefill.stop(Duration::from_secs(2));
    assert_eq!((report.pages_quarantined, report.panicked), (0, false));
    drop(tensors);
}

fn tensors_of_two_processes_exchange_pages(transport: &str) {
    let (_server, addr) = server();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "other", "--nocapture"]).env(OTHER, format!("{transport} {addr}"));
    let mut other = other.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();

    let mut tensors = Tensors::new(0x11);
    let decode = start(transport, &tensors, "decode", WorkerRole::Decode, &addr);
    let pool = PagePool::new(PAGES as u32);
    let mut receiver =
        decode.manager().receiver(&addr, Room::Number(ROOM), SessionOptions::default()).unwrap();
    receiver.init(pages(&pool, [0, 7, 3]), None).unwrap();
    assert_eq!(ended(&receiver), KvPoll::Success);
    pool.release(reclaimed(receiver)).unwrap();
    assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));

    for tensor in [0, 1] {
        for (page, from) in [(0, Some(6)), (1, None), (2, None), (3, Some(2)), (4, None), (7, Some(1))] {
            let expected = from.map_or_else(|| vec![0x11; PAGE], |from| content(tensor, from));
            assert!(tensors.page(tensor, page) == expected, "page {page} of tensor {tensor}");
        }
        let (before, after) = (&tensors.bytes[tensor][..PAGE], &tensors.bytes[tensor][PAGE + PAGES * PAGE..]);
        assert!(before.iter().chain(after).all(|byte| *byte == 0x11), "bytes beside tensor {tensor}");
    }
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    assert_eq!(decode.stop(Duration::from_secs(2)).pages_quarantined, 0);
    drop(tensors);
}

#[test]
fn tensors_of_two_processes_exchange_pages_over_kv_local() {
    tensors_of_two_processes_exchange_pages("local");
}

#[cfg(feature = "nixl")]
#[test]
fn tensors_of_two_processes_exchange_pages_over_nixl() {
    use kv_transfer::nixl::{Nixl, Search};
    if kv_conformance::needed("NIXL", Nixl::load(&Search::default())).is_some() {
        tensors_of_two_processes_exchange_pages("nixl");
    }
}

#[test]
fn what_cannot_be_a_region_is_refused_and_the_error_names_the_values() {
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    for (addr, len) in [(0, 4096), (4096, 0), (u64::MAX - 10, 4096)] {
        let region = Region::dram(RegionRole::Kv, addr, len, 4096);
        // SAFETY: no byte of the range is ever touched, because the transport refuses it.
        let refused = unsafe { transport.adopt_regions([&region]) };
        assert_eq!(refused, Err(LocalError::Memory(MemoryError::Range { addr, len })));
    }
    let device = Region::dram(RegionRole::Kv, 4096, 4096, 4096).memory(MemoryKind::Vram, 3);
    // SAFETY: as above.
    let refused = unsafe { transport.adopt_regions([&device]) };
    assert_eq!(refused, Err(LocalError::Kind { region: 0, memory: MemoryKind::Vram, device: 3 }));

    let built = |regions: [Region; 2]| {
        let [first, second] = regions;
        KvArgs::builder("engine", 0).pages(4, 16).region(first).region(second).build().map(|_| ())
    };
    let region = |addr, len, item_len| Region::dram(RegionRole::Kv, addr, len, item_len);
    let good = region(1 << 20, 4 << 10, 1 << 10);
    let overlap = built([good.clone(), region((1 << 20) + 4095, 4 << 10, 1 << 10)]);
    assert_eq!(overlap, Err(ArgsError::RegionOverlap { first: 0, second: 1 }));
    assert!(built([good.clone(), region((1 << 20) + 4096, 4 << 10, 1 << 10)]).is_ok());
    let text = |refused: Result<(), ArgsError>| refused.unwrap_err().to_string();
    let unaligned = text(built([good.clone(), region(2 << 20, 4 << 10, 1000)]));
    assert_eq!(unaligned, "regions[1] (kv): len 4096 is not 4 items of item_len 1000");
    let empty = text(built([good.clone(), region(2 << 20, 4 << 10, 0)]));
    assert!(empty.starts_with("regions[1].item_len is 0; it must be 1 to"), "{empty}");
    // Elements of two bytes, 16 tokens and 3 heads do not make 1 KiB.
    let heads = good.layer(0).holds(kv_transfer::layout::Holds::Key);
    let pieces = KvArgs::builder("engine", 0).pages(4, 16).heads(3, 8).region(heads).build();
    let pieces = text(pieces.map(|_| ()));
    assert!(pieces.contains("item_len 1024 is not a multiple of 48"), "{pieces}");
}
