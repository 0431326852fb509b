//! Producers and consumers in processes of their own, which are killed in the middle of a transfer: every session
//! ends in its budget with a named cause, every block is accounted for, and another process serves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use kv_core::TransferMode;
use kv_ec::host::{HostAddress, HostConfig, HostServer};
use kv_ec::{EcError, EcPoll, EcRegion, Fetch, FetchFailure, RequestPoll};
use kv_local::{LocalConfig, LocalTransport};
use support::process::{self, BUDGET, Process};
use support::{BLOCK, Host, Server, content, hash, until};

/// Blocks of an entry that takes some milliseconds: 32 MiB.
const LARGE: u64 = 8192;
/// So many blocks that an entry is pinned for longer than a busy machine keeps a thread from looking.
const LARGER: u64 = 4 * LARGE;

/// The entry point of the other processes. In the test's own process it does nothing.
#[test]
fn child() {
    process::child(|region: &EcRegion| {
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(region.arena().unwrap()).unwrap();
        transport
    });
}

fn is_over(fetch: &mut Fetch) -> bool {
    matches!(fetch.poll(), EcPoll::Failed | EcPoll::Ready)
}

#[test]
fn a_producer_that_is_killed_in_the_middle_costs_no_block_and_another_one_serves() {
    let (first, second) = (Server::start(), Server::start());
    let consumer = Host::consumer("prefill", 3 * LARGE as u32);
    let mut other = Process::producer(&second.addr, LARGE);
    assert_eq!(other.does(&format!("save 1 {LARGE}")), "saved");
    let mut cut_short = 0;
    // Eight rounds; and more, where this thread had its turn too late to kill in the middle.
    for (round, mode) in [TransferMode::Push, TransferMode::Pull].into_iter().cycle().take(80).enumerate() {
        if round >= 8 && cut_short > 0 {
            break;
        }
        let mut producer = Process::producer(&first.addr, LARGE);
        assert_eq!(producer.does(&format!("save 1 {LARGE}")), "saved");
        let memory = consumer.connector.region().memory();
        memory.write(0, &vec![0; memory.len()]).unwrap();
        let posts = consumer.connector.port().gauges().posts;
        let mut fetch = consumer.deferred(first.want(1, LARGE * BLOCK).with(|want| {
            (want.mode, want.budget) = (Some(mode), Some(BUDGET));
        }));
        let begun = Instant::now();
        until("the first bytes", || {
            let mut byte = [0];
            memory.read(1, &mut byte).unwrap();
            byte != [0] || consumer.connector.port().gauges().posts > posts || is_over(&mut fetch)
        });
        std::thread::sleep(Duration::from_micros(400 * (round as u64 % 8)));
        producer.kill();
        until("the end", || is_over(&mut fetch));
        assert!(begun.elapsed() < BUDGET, "{:?}", begun.elapsed());
        match fetch.failure() {
            None => assert!(consumer.bytes(&fetch.entry().unwrap()) == content(1, LARGE * BLOCK), "{mode}"),
            Some(FetchFailure::Machine(error)) => {
                assert!(matches!(*error, EcError::Transfer(_) | EcError::Budget { .. }), "{error}");
                println!("{mode}: {error}, after {:?}", begun.elapsed());
                cut_short += 1;
            }
            Some(other) => panic!("{other}"),
        }
        drop(fetch);
        let remains = consumer.connector.store().contains(&hash(1)) == Some(true);
        consumer.until_cached(if remains { LARGE as u32 } else { 0 });
        if !remains {
            let want = second.want(1, LARGE * BLOCK).with(|want| want.mode = Some(mode));
            assert!(consumer.bytes(&consumer.fetched(want)) == content(1, LARGE * BLOCK), "{mode}");
        }
        consumer.until_cached(LARGE as u32);
        assert!(consumer.connector.store().remove(&hash(1)));
    }
    assert!(cut_short > 0, "no transfer was cut short");
}

#[test]
fn a_consumer_that_is_killed_while_it_is_served_leaves_no_pin_and_the_next_one_is_served() {
    let server = Server::start();
    let lease = Duration::from_secs(1);
    let producer = Host::start("encoder", LARGER as u32, |config| {
        config.publish = Some(server.addr.clone());
        config.machine.lease = lease;
    });
    producer.save(1, LARGER * BLOCK);
    for (round, mode) in [TransferMode::Push, TransferMode::Pull].into_iter().cycle().take(8).enumerate() {
        let order = format!("want 1 {LARGER} {} {mode}", server.addr);
        let mut consumer = Process::consumer(LARGER);
        consumer.tell(&order);
        until("the pin", || producer.connector.gauges().cache.pinned > 0);
        std::thread::sleep(Duration::from_micros(400 * (round as u64 % 8)));
        consumer.kill();
        // A dead reader's pin ends with its lease; a dead peer's writes end at once.
        let killed = Instant::now();
        producer.until_cached(LARGER as u32);
        assert!(killed.elapsed() < lease * 10, "{mode}: {:?}", killed.elapsed());
        until("the end of all writes", || producer.connector.port().gauges().posts_in_flight == 0);
        if round < 2 {
            let mut next = Process::consumer(LARGER);
            assert_eq!((next.does(&order), next.does("end 1")), ("wanted".to_owned(), "right".to_owned()));
        }
    }
    producer.until_cached(LARGER as u32);
    assert_eq!(producer.connector.port().gauges().sessions_open, 0);
}

#[test]
fn a_request_has_its_entries_from_several_processes_and_loses_only_those_of_the_dead() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let consumer = Host::consumer("prefill", 64);
    let mut producers: Vec<Process> =
        servers.iter().map(|server| Process::producer(&server.addr, 64)).collect();
    for (seed, producer) in (1..).zip(&mut producers) {
        assert_eq!(producer.does(&format!("save {seed} {seed}")), "saved");
        assert_eq!(producer.does(&format!("save {} 1", 10 + seed)), "saved");
    }
    let wants = |of: u64| (1..=3).map(move |seed| (of + seed, if of == 0 { seed } else { 1 }));
    let wanted = |of| {
        let wants = wants(of).zip(&servers).map(|((seed, blocks), server)| server.want(seed, blocks * BLOCK));
        consumer.connector.request(wants.collect::<Vec<_>>()).unwrap()
    };
    let mut request = wanted(0);
    until("the request", || request.poll() == RequestPoll::Ready);
    for (position, entry) in request.entries() {
        let seed = position as u64 + 1;
        assert_eq!(consumer.bytes(entry), content(seed, seed * BLOCK));
    }
    drop(request);
    producers.remove(1).kill();
    let mut request = wanted(10);
    until("the end of the request", || request.poll() == RequestPoll::EncodeLocally);
    let here: Vec<usize> = request.entries().map(|(position, _)| position).collect();
    assert_eq!(here, [0, 2]);
    drop(request);
    consumer.until_cached(1 + 2 + 3 + 1 + 1);
}

#[test]
fn entries_that_a_rank_saves_through_the_hosts_socket_reach_another_host() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let address: HostAddress = format!("@kv-ec-processes-{}", std::process::id()).parse().unwrap();
    let (region, store) = (producer.connector.region(), producer.connector.store());
    let socket = HostServer::bind(&address, region, store, HostConfig::default()).unwrap().spawn().unwrap();
    let rank = Process::rank(&address.to_string(), 1, 5);
    // The entry outlives the rank that has saved it.
    rank.kill();
    let mut consumer = Process::consumer(64);
    for mode in ["push", "pull"] {
        assert_eq!(consumer.does(&format!("want 1 5 {} {mode}", server.addr)), "wanted");
        assert_eq!(consumer.does("end 1"), "right");
        consumer.kill();
        consumer = Process::consumer(64);
    }
    producer.until_cached(5);
    drop(socket);
}
