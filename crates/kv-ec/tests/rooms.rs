//! Requests whose entries do not fit the cache: one request that is too large, and several that are so together.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_ec::{EcError, FetchFailure, Request, RequestPoll, ReserveError, Want};
use support::{BLOCK, Host, Server, content, until};

/// The entries that will not come, with the machine's reasons.
fn missing(request: &Request) -> Vec<(usize, EcError)> {
    let why = |why: Option<&FetchFailure>| match why {
        Some(FetchFailure::Machine(error)) => (**error).clone(),
        other => panic!("{other:?}"),
    };
    request.missing().map(|(index, _, failure)| (index, why(failure))).collect()
}

/// The entries that are pinned, and their bytes.
fn pinned(host: &Host, request: &Request) -> Vec<(usize, Vec<u8>)> {
    request.entries().map(|(index, entry)| (index, host.bytes(entry))).collect()
}

/// Waits until all entries are here, and compares their bytes.
fn until_ready(host: &Host, request: &mut Request, entries: &[(u64, u64)]) {
    until("all entries", || {
        assert_ne!(request.poll(), RequestPoll::EncodeLocally, "{:?}", missing(request));
        request.poll() == RequestPoll::Ready
    });
    let expected: Vec<_> =
        entries.iter().map(|&(seed, blocks)| content(seed, blocks * BLOCK)).enumerate().collect();
    assert!(pinned(host, request) == expected, "other bytes");
}

fn wants(server: &Server, entries: &[(u64, u64)]) -> Vec<Want> {
    entries.iter().map(|&(seed, blocks)| server.want(seed, blocks * BLOCK)).collect()
}

#[test]
fn a_request_that_can_never_fit_is_told_so_at_once_with_both_sizes() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let entries = [(1, 6), (2, 11), (3, 10), (4, 1)];
    for (seed, blocks) in entries {
        producer.save(seed, blocks * BLOCK);
    }
    let mut request = consumer.connector.request(wants(&server, &entries)).unwrap();
    let too_large = EcError::TooLargeTogether { blocks: 28, region: 16 };
    assert_eq!(missing(&request), [(1, too_large.clone()), (3, too_large.clone())]);
    assert_eq!(
        too_large.to_string(),
        "the entries of the request need 28 blocks together, and the region has only 16"
    );
    // The entries that fit come as always, and nobody was asked for the others.
    until("the others", || request.poll() == RequestPoll::EncodeLocally);
    assert!(pinned(&consumer, &request) == [(0, content(1, 6 * BLOCK)), (2, content(3, 10 * BLOCK))]);
    assert_eq!((missing(&request).len(), producer.answers()), (2, 2));
    assert_eq!(consumer.connector.gauges().traffic.failed_tries, 0);
    drop(request);
    consumer.until_cached(16);
}

#[test]
fn an_entry_that_a_request_wants_twice_takes_its_room_once() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let entries = [(1, 9), (1, 9), (2, 7)];
    producer.save(1, 9 * BLOCK);
    producer.save(2, 7 * BLOCK);
    let mut request = consumer.connector.request(wants(&server, &entries)).unwrap();
    until_ready(&consumer, &mut request, &entries);
    assert_eq!((producer.answers(), consumer.connector.gauges().cache.pinned), (2, 16));
}

#[test]
fn an_entry_that_alone_is_too_large_takes_no_room_from_the_others() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    producer.save(1, 16 * BLOCK);
    let mut request = consumer.connector.request(wants(&server, &[(9, 17), (1, 16)])).unwrap();
    until("the end", || request.poll() == RequestPoll::EncodeLocally);
    let alone = EcError::Room(ReserveError::TooLarge { blocks: 17, region: 16 });
    assert_eq!(missing(&request), [(0, alone)]);
    assert!(pinned(&consumer, &request) == [(1, content(1, 16 * BLOCK))]);
}
