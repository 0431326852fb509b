//! Workers with their threads: ends for which nobody asks, two workers of one host, and numbers.

use kv_bootstrap::KvBootstrapServer;
use kv_core::{Cause, PeerCause, TransferMode};
use kv_ec::{Availability, EcError, EcPoll, Traffic, Want};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::{BLOCK, Host, PATIENCE, Server, content, hash, until};

/// Defect 4: a transfer ended only when somebody asked for the next one.
#[test]
fn a_fetch_ends_at_both_sides_while_nobody_calls_anything() {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let server = Server::start();
        let (producer, consumer) = (Host::producer(&server, "encoder", 16), Host::consumer("prefill", 16));
        producer.save(1, 4 * BLOCK);
        let mut fetch = consumer.deferred(server.want(1, 4 * BLOCK).with(|want| want.mode = Some(mode)));
        // The caches are looked at; the connectors and the session's handle are not touched.
        until("the commit", || consumer.connector.store().contains(&hash(1)) == Some(true));
        until("the end of the pin", || producer.connector.store().gauges().cached == 4);
        until("the entry", || fetch.poll() == EcPoll::Ready);
    }
}

/// Defect 4, for a scheduler that sleeps: the end of a fetch wakes it.
#[test]
fn a_scheduler_that_sleeps_on_the_descriptor_is_woken_by_the_end_of_its_fetch() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 16), Host::consumer("prefill", 16));
    let set = consumer.connector.poll_set();
    for seed in 0..50 {
        let bytes = (seed % 3 + 1) * BLOCK;
        producer.save(seed, bytes);
        let mut fetch = consumer.deferred(server.want(seed, bytes));
        let mut ended = None;
        while ended.is_none() {
            let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            let woken = poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&limit)).unwrap();
            assert_eq!(woken, 1, "nothing has woken the scheduler");
            set.drain(|change| {
                assert_eq!(change.session, fetch.id());
                if change.reclaimable {
                    ended = Some(change.poll);
                }
            });
        }
        assert_eq!(
            (ended, consumer.bytes(&fetch.entry().unwrap())),
            (Some(EcPoll::Ready), content(seed, bytes))
        );
        for host in [&producer, &consumer] {
            until("the end of the pins", || host.connector.store().remove(&hash(seed)));
        }
    }
}

/// Defect 7: the address to bind was the address to tell, and two workers of one host wanted one port.
#[test]
fn two_encoders_of_one_engine_on_one_host_are_told_apart() {
    let bound = KvBootstrapServer::start("0.0.0.0:0").unwrap();
    assert!(bound.local_addr().ip().is_unspecified());
    let told = format!("127.0.0.1:{}", bound.local_addr().port());
    let encoder = |replica| {
        Host::start("encoder", 16, |config| {
            config.publish = Some(told.clone());
            (config.replica, config.replicas) = (replica, 2);
        })
    };
    let (one, two, consumer) = (encoder(0), encoder(1), Host::consumer("prefill", 16));
    one.save(1, 2 * BLOCK);
    two.save(2, 3 * BLOCK);
    let want = |seed, blocks: u64, replica| {
        Want::new(hash(seed), blocks * BLOCK, &*told).with(|want| want.replica = Some(replica))
    };
    for (seed, blocks, replica) in [(1, 2, 0), (2, 3, 1)] {
        let elsewhere = consumer.refused(want(seed, blocks, 1 - replica));
        let EcError::Transfer(error) = &elsewhere else { panic!("{elsewhere}") };
        assert_eq!(error.cause, Cause::ByPeer(PeerCause::EntryMissing));
        let entry = consumer.fetched(want(seed, blocks, replica));
        assert_eq!(consumer.bytes(&entry), content(seed, blocks * BLOCK));
    }
    consumer.until_cached(5);
}

/// Defect 9: there were no numbers.
#[test]
fn gauges_count_blocks_by_state_and_what_was_found_fetched_and_evicted() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 16), Host::consumer("prefill", 8));
    for seed in 1..=3 {
        producer.save(seed, 4 * BLOCK);
    }
    let filling = producer.connector.reserve(&hash(4), BLOCK + 1).unwrap();
    let pinned = producer.connector.local(&hash(1)).unwrap();
    let cache = producer.connector.gauges().cache;
    let blocks = (cache.blocks, cache.free, cache.filling, cache.cached, cache.pinned, cache.lost);
    assert_eq!((blocks, cache.entries), ((16, 2, 2, 8, 4, 0), 4));
    drop(pinned);
    producer.connector.discard(filling);

    drop(consumer.fetched(server.want(1, 4 * BLOCK)));
    drop(consumer.fetched(server.want(2, 4 * BLOCK)));
    let here = consumer.connector.ensure_cache_available(server.want(1, 4 * BLOCK)).unwrap();
    assert!(matches!(here, Availability::Here(_)));
    // The first entry is in use: the second makes room.
    let third = consumer.fetched(server.want(3, 4 * BLOCK));
    let cache = consumer.connector.gauges().cache;
    let blocks = (cache.free, cache.filling, cache.cached, cache.pinned, cache.lost);
    assert_eq!((blocks, cache.evictions, cache.evicted_blocks), ((0, 0, 0, 8, 0), 1, 4));
    drop((here, third));
    consumer.refused(server.want(9, BLOCK));

    until("the producer's pins", || producer.connector.gauges().cache.cached == 12);
    let (ours, theirs) = (consumer.connector.gauges(), producer.connector.gauges());
    let ours = (ours.traffic, ours.saving, ours.failed_saves, ours.cache.lost_pins);
    let wanted = |traffic: &Traffic| (traffic.here, traffic.deferred, traffic.failed, traffic.failed_tries);
    assert_eq!((wanted(&ours.0), ours.1, ours.2, ours.3), ((1, 4, 1, 1), 0, 0, 0));
    assert_eq!((ours.0.fetched, ours.0.fetched_bytes, ours.0.served, ours.0.refused), (3, 12 * BLOCK, 0, 0));
    assert_eq!((theirs.traffic.served, theirs.traffic.refused, theirs.traffic.fetched), (3, 1, 0));

    let (ours, theirs) = (consumer.connector.port().gauges(), producer.connector.port().gauges());
    assert_eq!(
        (ours.sessions_open, ours.sessions_lost, ours.posts_in_flight, ours.posts_failed),
        (0, 0, 0, 0)
    );
    assert!(ours.posts + theirs.posts >= 3 && ours.frames_received > 0 && theirs.frames_sent > 0);
    assert!(consumer.connector.port().quarantine().is_empty());
}
