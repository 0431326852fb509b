//! An encoder cache over NIXL: entries go from one process to another, byte for byte, and both sides' blocks are
//! accounted for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../../kv-ec/tests/support/mod.rs"]
mod support;
mod workers;

use std::time::Duration;

use kv_core::TransferMode;
use kv_ec::{EcError, EcPoll, EcRegion, FetchFailure};
use kv_nixl::{NixlConfig, NixlTransport};
use support::process::{self, BUDGET, Process, ended};
use support::{BLOCK, Host, Server, content, hash, until};
use workers::nixl;

fn transport(region: &EcRegion) -> NixlTransport {
    let mut transport = NixlTransport::new(nixl().unwrap(), NixlConfig::default()).unwrap();
    transport.add_memory(region.memory()).unwrap();
    transport
}

/// The entry point of the other processes. In the test's own process it does nothing.
#[test]
fn child() {
    process::child(transport);
}

fn consumer(blocks: u64) -> Host {
    let region = EcRegion::create(blocks as u32, BLOCK as u32).unwrap();
    let transport = transport(&region);
    Host::over("prefill", region, transport, |_| ())
}

#[test]
fn entries_arrive_byte_for_byte_by_writes_and_by_reads_and_no_pin_waits_for_a_caller() {
    if nixl().is_none() {
        return;
    }
    let server = Server::start();
    let mut producer = Process::producer(&server.addr, 64);
    let consumer = consumer(64);
    let modes = [TransferMode::Push, TransferMode::Pull, TransferMode::Auto];
    for (seed, mode) in (1..).zip(modes) {
        assert_eq!(producer.does(&format!("save {seed} 7")), "saved");
        let want = server.want(seed, 7 * BLOCK).with(|want| want.mode = Some(mode));
        let mut fetch = consumer.deferred(want);
        // The cache is looked at; nobody asks the worker for anything.
        until("the commit", || consumer.connector.store().contains(&hash(seed)) == Some(true));
        assert_eq!(ended(&consumer, &mut fetch, seed, 7 * BLOCK), "right", "{mode}");
        until("the end of the producer's pin", || producer.does("books") == format!("{} 0", 7 * seed));
    }
    consumer.until_cached(21);
    assert_eq!(consumer.connector.gauges().traffic.fetched_bytes, 21 * BLOCK);
}

#[test]
fn a_producer_that_is_killed_in_the_middle_ends_the_fetch_and_its_successor_serves() {
    if nixl().is_none() {
        return;
    }
    const LARGE: u64 = 8192;
    let consumer = consumer(2 * LARGE);
    for (round, mode) in [TransferMode::Push, TransferMode::Pull].into_iter().cycle().take(4).enumerate() {
        let (server, other) = (Server::start(), Server::start());
        let mut producer = Process::producer(&server.addr, LARGE);
        assert_eq!(producer.does(&format!("save 1 {LARGE}")), "saved");
        let want = |server: &Server| {
            server.want(1, LARGE * BLOCK).with(|want| (want.mode, want.budget) = (Some(mode), Some(BUDGET)))
        };
        let mut fetch = consumer.deferred(want(&server));
        until("the first bytes", || fetch.poll() != EcPoll::Waiting);
        std::thread::sleep(Duration::from_millis(2 * round as u64));
        producer.kill();
        until("the end", || matches!(fetch.poll(), EcPoll::Failed | EcPoll::Ready));
        match fetch.failure() {
            None => assert!(consumer.bytes(&fetch.entry().unwrap()) == content(1, LARGE * BLOCK), "{mode}"),
            Some(FetchFailure::Machine(error)) => {
                assert!(matches!(*error, EcError::Transfer(_) | EcError::Budget { .. }), "{error}");
                println!("{mode}: {error}");
            }
            Some(other) => panic!("{other}"),
        }
        drop(fetch);
        until("the end of the pins", || consumer.connector.gauges().cache.pinned == 0);
        consumer.connector.store().remove(&hash(1));
        consumer.until_cached(0);
        let mut producer = Process::producer(&other.addr, LARGE);
        assert_eq!(producer.does(&format!("save 1 {LARGE}")), "saved");
        assert!(consumer.bytes(&consumer.fetched(want(&other))) == content(1, LARGE * BLOCK), "{mode}");
        until("the books", || consumer.connector.store().remove(&hash(1)));
        consumer.until_cached(0);
    }
}
