//! Entries go from a producer to consumers over kv-local: real workers, real threads, real
//! bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::{Cause, PeerCause, ReadyEventError, TransferMode};
use kv_ec::{Availability, EcError, EcPoll, Eviction, FetchFailure, RequestPoll, ReserveError};
use support::{BLOCK, Host, Server, content, hash, until};

#[test]
fn an_entry_arrives_byte_for_byte_by_writes_and_by_reads() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let consumer = Host::consumer("prefill", 64);
    for (seed, mode, bytes) in [
        (1, TransferMode::Push, 5 * BLOCK),
        (2, TransferMode::Pull, 5 * BLOCK),
        (3, TransferMode::Auto, 7 * BLOCK - 100),
        (4, TransferMode::Pull, 1),
    ] {
        producer.save(seed, bytes);
        let want = server.want(seed, bytes).with(|want| want.mode = Some(mode));
        let entry = consumer.fetched(want);
        assert_eq!(consumer.bytes(&entry), content(seed, bytes), "{mode}");
    }
    let blocks = 5 + 5 + 7 + 1;
    consumer.until_cached(blocks);
    producer.until_cached(blocks);
}

#[test]
fn many_sessions_that_want_one_entry_make_one_transfer() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let consumer = Host::consumer("prefill", 64);
    producer.save(1, 9 * BLOCK);
    let (mut fetches, mut entries) = (Vec::new(), Vec::new());
    for _ in 0..50 {
        match consumer.connector.ensure_cache_available(server.want(1, 9 * BLOCK)).unwrap() {
            Availability::Deferred(fetch) => fetches.push(fetch),
            // The transfer was faster than the sessions were opened.
            Availability::Here(entry) => entries.push(entry),
        }
    }
    until("all sessions", || fetches.iter_mut().all(|fetch| fetch.poll() == EcPoll::Ready));
    entries.extend(fetches.iter_mut().map(|fetch| fetch.entry().unwrap()));
    assert_eq!(entries.len(), 50);
    for entry in &entries {
        assert_eq!(consumer.bytes(entry), content(1, 9 * BLOCK));
    }
    assert_eq!(producer.answers(), 1);
    // The next one needs no producer.
    drop(entries);
    drop(producer);
    assert!(matches!(
        consumer.connector.ensure_cache_available(server.want(1, 9 * BLOCK)).unwrap(),
        Availability::Here(_)
    ));
    consumer.until_cached(9);
}

#[test]
fn an_entry_that_is_saved_after_its_event_is_had_once_the_event_has_passed() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    let passed = Arc::new(AtomicBool::new(false));
    let event = Arc::clone(&passed);
    let reservation = producer.written(1, 3 * BLOCK);
    producer.connector.save_after(reservation, move || Ok(event.load(Ordering::SeqCst))).unwrap();
    let mut fetch = consumer.deferred(server.want(1, 3 * BLOCK));
    until("a refusal", || consumer.failures(PeerCause::EntryNotReady) > 0);
    assert_eq!((fetch.poll() > EcPoll::Failed, producer.connector.gauges().saving), (true, 1));
    passed.store(true, Ordering::SeqCst);
    until("the entry", || fetch.poll() == EcPoll::Ready);
    assert_eq!(consumer.bytes(&fetch.entry().unwrap()), content(1, 3 * BLOCK));
    until("the save", || producer.connector.gauges().saving == 0);
    // An event that fails gives the entry up, and its blocks are free.
    let reservation = producer.written(2, 3 * BLOCK);
    producer.connector.save_after(reservation, || Err(ReadyEventError::Device { code: 700 })).unwrap();
    until("the failed save", || producer.connector.gauges().failed_saves == 1);
    let cache = producer.connector.gauges().cache;
    assert_eq!((cache.cached + cache.pinned, cache.filling, cache.lost), (3, 0, 0));
}

#[test]
fn refusals_are_typed_and_only_the_passing_ones_are_tried_again() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    producer.save(1, 3 * BLOCK);
    let missing = consumer.refused(server.want(9, BLOCK));
    assert!(
        matches!(&missing, EcError::Transfer(error) if error.cause == Cause::ByPeer(PeerCause::EntryMissing)),
        "{missing}"
    );
    let size = consumer.refused(server.want(1, 2 * BLOCK));
    let held = PeerCause::EntrySize { held: 3 * BLOCK, asked: 2 * BLOCK };
    assert!(
        matches!(&size, EcError::Transfer(error) if error.cause == Cause::ByPeer(held.clone())),
        "{size}"
    );
    // A length that takes as many blocks is another length all the same.
    let longer = consumer.refused(server.want(1, 3 * BLOCK - 1));
    let held = PeerCause::EntrySize { held: 3 * BLOCK, asked: 3 * BLOCK - 1 };
    assert!(
        matches!(&longer, EcError::Transfer(error) if error.cause == Cause::ByPeer(held.clone())),
        "{longer}"
    );
    let large = consumer.refused(server.want(1, 17 * BLOCK));
    assert_eq!(large, EcError::Room(ReserveError::TooLarge { blocks: 17, region: 16 }));
    let stranger = Host::with_compatibility("stranger", 16, "another model");
    let other = stranger.refused(server.want(1, 3 * BLOCK));
    let EcError::Transfer(error) = &other else { panic!("{other}") };
    let Cause::Incompatible(mismatch) = &error.cause else { panic!("{other}") };
    assert_eq!((mismatch.field.as_str(), mismatch.ours.as_str()), ("compatibility", "\"another model\""));
    // Not one block is out anywhere.
    consumer.until_cached(0);
    stranger.until_cached(0);
    producer.until_cached(3);
}

#[test]
fn a_session_ends_within_its_budget_and_names_the_last_reason() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    let reservation = producer.written(1, 3 * BLOCK);
    let budget = Duration::from_millis(300);
    let mut fetch = consumer.deferred(server.want(1, 3 * BLOCK).with(|want| want.budget = Some(budget)));
    until("the end", || fetch.poll() == EcPoll::Failed);
    let failure = fetch.failure().unwrap();
    let FetchFailure::Machine(failure) = failure else { panic!("{failure}") };
    let EcError::Budget { after, last: Some(last) } = *failure else { panic!("{failure}") };
    assert_eq!(after, budget);
    let why =
        matches!(&*last, EcError::Transfer(error) if error.cause == Cause::ByPeer(PeerCause::EntryNotReady));
    assert!(why, "{last}");
    producer.connector.discard(reservation);
    consumer.until_cached(0);
}

#[test]
fn entries_that_a_step_uses_are_not_evicted_and_others_make_room() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let consumer = Host::evicting("prefill", 8, Eviction::Fifo);
    for seed in 1..=4 {
        producer.save(seed, 4 * BLOCK);
    }
    let first = consumer.fetched(server.want(1, 4 * BLOCK));
    drop(consumer.fetched(server.want(2, 4 * BLOCK)));
    let third = consumer.fetched(server.want(3, 4 * BLOCK));
    assert_eq!(consumer.bytes(&first), content(1, 4 * BLOCK));
    assert_eq!(consumer.bytes(&third), content(3, 4 * BLOCK));
    // Both entries are in use: the fourth waits, and comes when one of them is let go.
    let mut fourth = consumer.deferred(server.want(4, 4 * BLOCK));
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(fourth.poll(), EcPoll::Waiting);
    drop(first);
    until("the fourth entry", || fourth.poll() == EcPoll::Ready);
    assert_eq!(consumer.bytes(&fourth.entry().unwrap()), content(4, 4 * BLOCK));
    assert_eq!(consumer.bytes(&third), content(3, 4 * BLOCK));
    assert_eq!(consumer.connector.gauges().cache.evictions, 2);
}

#[test]
fn a_dropped_fetch_ends_alone_and_leaves_nothing_pinned() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    for _ in 0..20 {
        let reservation = producer.written(1, 4 * BLOCK);
        let (one, mut other) =
            (consumer.deferred(server.want(1, 4 * BLOCK)), consumer.deferred(server.want(1, 4 * BLOCK)));
        producer.connector.save(reservation).unwrap();
        drop(one);
        until("the other session", || other.poll() == EcPoll::Ready);
        drop(other.entry().unwrap());
        consumer.until_cached(4);
        assert!(consumer.connector.store().remove(&hash(1)));
        producer.until_cached(4);
        assert!(producer.connector.store().remove(&hash(1)));
    }
}

#[test]
fn a_request_has_its_items_from_several_producers_or_says_which_to_encode() {
    let servers = [Server::start(), Server::start()];
    let producers =
        [Host::producer(&servers[0], "encoder-0", 16), Host::producer(&servers[1], "encoder-1", 16)];
    let consumer = Host::consumer("prefill", 32);
    producers[0].save(1, 3 * BLOCK);
    producers[1].save(2, 2 * BLOCK + 9);
    let wants = || [servers[0].want(1, 3 * BLOCK), servers[1].want(2, 2 * BLOCK + 9)];
    let mut request = consumer.connector.request(wants()).unwrap();
    until("both items", || request.poll() == RequestPoll::Ready);
    let bytes: Vec<_> = request.entries().map(|(_, entry)| consumer.bytes(entry)).collect();
    assert_eq!(bytes, [content(1, 3 * BLOCK), content(2, 2 * BLOCK + 9)]);
    // The same items again: nobody is asked.
    let mut again = consumer.connector.request(wants()).unwrap();
    assert_eq!((again.poll(), again.entries().count()), (RequestPoll::Ready, 2));
    drop((request, again));
    // One item is nowhere: the other one stays pinned, and the caller encodes the missing one.
    let mut request =
        consumer.connector.request([servers[0].want(1, 3 * BLOCK), servers[1].want(7, BLOCK)]).unwrap();
    until("the end", || request.poll() == RequestPoll::EncodeLocally);
    let missing: Vec<_> =
        request.missing().map(|(index, hash, why)| (index, hash.clone(), why.is_some())).collect();
    assert_eq!(missing, [(1, hash(7), true)]);
    consumer.save(7, BLOCK);
    request.fill(1, consumer.connector.local(&hash(7)).unwrap()).unwrap();
    assert_eq!(request.poll(), RequestPoll::Ready);
    drop(request);
    consumer.until_cached(6 + 1);
}

#[test]
fn an_entry_that_is_here_with_another_length_is_not_given() {
    let server = Server::start();
    let consumer = Host::consumer("prefill", 16);
    consumer.save(1, 3 * BLOCK);
    for asked in [3 * BLOCK - 1, 2 * BLOCK] {
        assert_eq!(consumer.refused(server.want(1, asked)), EcError::OtherLength { held: 3 * BLOCK, asked });
    }
    consumer.until_cached(3);
}

#[test]
fn a_request_that_lacks_one_item_waits_for_the_others_before_it_says_what_to_encode() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    let reservation = producer.written(2, BLOCK);
    let mut request = consumer.connector.request([server.want(1, BLOCK), server.want(2, BLOCK)]).unwrap();
    until("the missing item", || {
        assert_eq!(request.poll(), RequestPoll::Deferred);
        request.missing().count() == 1
    });
    producer.connector.save(reservation).unwrap();
    until("the other item", || request.poll() != RequestPoll::Deferred);
    assert_eq!((request.poll(), request.entries().count()), (RequestPoll::EncodeLocally, 1));
}

#[test]
fn a_fetch_that_is_dropped_after_its_entry_has_come_leaves_nothing_pinned() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 16);
    let consumer = Host::consumer("prefill", 16);
    producer.save(1, 4 * BLOCK);
    let fetch = consumer.deferred(server.want(1, 4 * BLOCK));
    until("the entry", || consumer.connector.store().gauges().pinned == 4);
    drop(fetch);
    consumer.until_cached(4);
}
