//! Rest over NIXL, which has no descriptor to wait on: a worker with nothing to do polls so seldom that it uses hardly any of a
//! processor, and often enough to serve the next request.
#![cfg(feature = "nixl")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::time::{Duration, Instant};

use kv_transfer::nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::prelude::*;

const PAGE: usize = 16 << 10;
const PAGES: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(60);

fn nixl() -> Option<Nixl> {
    kv_conformance::needed("NIXL", Nixl::load(&Search::default()))
}

fn start(nixl: &Nixl, role: WorkerRole, addr: &str) -> (Worker, HostMemory) {
    let pool = HostMemory::new(PAGE * PAGES as usize).unwrap();
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    transport.add_memory(&pool).unwrap();
    let region = Region::dram(RegionRole::Kv, pool.addr(), pool.len() as u64, PAGE as u64);
    let args = KvArgs::builder(&format!("{role:?}"), 0).pages(PAGES, 16).region(region).build().unwrap();
    let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
    let config = WorkerConfig::new(args, role).with(|config| config.bootstrap = Some(addr.to_owned()));
    (Worker::start(config, transport, Box::new(client)).unwrap(), pool)
}

/// Processor time of all workers' threads so far.
fn worked() -> Duration {
    let mut sum = Duration::ZERO;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        if read("comm").starts_with("kv-worker") {
            let nanos = read("schedstat").split(' ').next().and_then(|first| first.parse().ok());
            sum += Duration::from_nanos(nanos.unwrap_or(0));
        }
    }
    sum
}

fn serve(prefill: &(Worker, HostMemory), decode: &(Worker, HostMemory), addr: &str, room: u64) {
    let bytes: Vec<u8> = (0..2 * PAGE).map(|at| (at as u64 * 31 + room) as u8).collect();
    prefill.1.write(PAGE, &bytes).unwrap();
    let mint = |pages: [u32; 2]| PagePool::new(PAGES).adopt(PageList::from_pages(pages).unwrap()).unwrap();
    let options = SessionOptions::default;
    let mut sender = prefill.0.manager().sender(addr, Room::Number(room), &[], options()).unwrap();
    sender.init(2, None).unwrap();
    sender.send(mint([1, 2])).unwrap();
    let mut receiver = decode.0.manager().receiver(addr, Room::Number(room), options()).unwrap();
    receiver.init(mint([5, 6]), None).unwrap();
    let begun = Instant::now();
    while !receiver.poll().is_terminal() || !sender.poll().is_terminal() {
        assert!(begun.elapsed() < PATIENCE, "{:?} {:?}", sender.poll(), receiver.poll());
        std::thread::sleep(Duration::from_micros(100));
    }
    assert_eq!(receiver.poll(), KvPoll::Success, "{:?}", receiver.failure());
    let mut arrived = vec![0; 2 * PAGE];
    decode.1.read(5 * PAGE, &mut arrived).unwrap();
    assert!(arrived == bytes, "room {room}");
}

#[test]
fn connected_workers_without_sessions_look_fifty_times_a_second_at_most_and_hardly_use_a_processor() {
    let Some(nixl) = nixl() else { return };
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let prefill = start(&nixl, WorkerRole::Prefill, &addr);
    let decode = start(&nixl, WorkerRole::Decode, &addr);
    for room in 0..2 {
        serve(&prefill, &decode, &addr, room);
        // Waits for a second in which both together stay below both limits. Optimised, on an idle machine, a look costs 20 us.
        let deadline = Instant::now() + PATIENCE;
        loop {
            let gauges = || prefill.0.manager().gauges().turns + decode.0.manager().gauges().turns;
            let (begun, before, turns) = (Instant::now(), worked(), gauges());
            std::thread::sleep(Duration::from_secs(1));
            let seconds = begun.elapsed().as_secs_f64();
            let part = (worked() - before).as_secs_f64() / seconds;
            let looks = (gauges() - turns) as f64 / seconds;
            println!("{:.3} % of a processor for two, {looks:.0} turns a second", part * 100.0);
            if looks < 110.0 && part < 0.05 {
                break;
            }
            assert!(Instant::now() < deadline, "they do not come to rest");
        }
    }
    prefill.0.stop(PATIENCE);
    decode.0.stop(PATIENCE);
    server.stop();
}
