//! Requests whose entries do not fit the cache: one request that is too large, and several that are so together.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::Duration;

use kv_ec::{EcError, Request, RequestPoll, ReserveError, Want};
use support::requests::{MANY_TRIES, hurried, missing, pinned, until_ready, wants};
use support::{BLOCK, Host, Server, content, until};

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

#[test]
fn requests_that_do_not_fit_together_have_their_entries_one_after_the_other() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    // Each request could have its first entry at once, and then no room would be left for the second ones.
    let [second, fourth] = [producer.written(2, 8 * BLOCK), producer.written(4, 8 * BLOCK)];
    producer.save(1, 8 * BLOCK);
    producer.save(3, 8 * BLOCK);
    let request = |entries| consumer.connector.request(hurried(&server, entries)).unwrap();
    let (mut one, mut other) = (request(&[(1, 8), (2, 8)]), request(&[(3, 8), (4, 8)]));
    until("the first entry", || one.poll() == RequestPoll::Deferred && one.entries().count() == 1);
    std::thread::sleep(MANY_TRIES);
    assert_eq!((other.poll(), other.entries().count()), (RequestPoll::Deferred, 0));
    producer.connector.save(second).unwrap();
    producer.connector.save(fourth).unwrap();
    until_ready(&consumer, &mut one, &[(1, 8), (2, 8)]);
    assert_eq!((other.poll(), consumer.connector.gauges().cache.pinned), (RequestPoll::Deferred, 16));
    drop(one);
    until_ready(&consumer, &mut other, &[(3, 8), (4, 8)]);
    let gauges = consumer.connector.gauges();
    assert_eq!((gauges.cache.evictions, gauges.traffic.fetched_bytes), (2, 32 * BLOCK));
    drop(other);
    consumer.until_cached(16);
}

#[test]
fn a_request_that_waits_holds_no_entry_that_was_here_or_came_for_another() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    for (seed, blocks) in [(1, 4), (3, 4), (4, 12)] {
        producer.save(seed, blocks * BLOCK);
    }
    let written = producer.written(2, 12 * BLOCK);
    drop(consumer.fetched(server.want(3, 4 * BLOCK)));
    let request = |entries| consumer.connector.request(hurried(&server, entries)).unwrap();
    let mut one = request(&[(1, 4), (2, 12)]);
    let mut other = request(&[(1, 4), (3, 4), (4, 8)]);
    until("an entry that both want", || one.poll() == RequestPoll::Deferred && one.entries().count() == 1);
    std::thread::sleep(MANY_TRIES);
    assert_eq!((other.poll(), other.entries().count()), (RequestPoll::Deferred, 0));
    assert_eq!(consumer.connector.gauges().cache.pinned, 4);
    // The entry that was here makes room.
    producer.connector.save(written).unwrap();
    until_ready(&consumer, &mut one, &[(1, 4), (2, 12)]);
    assert_eq!(consumer.connector.gauges().cache.evictions, 1);
    drop((one, other));
    consumer.until_cached(16);
}

#[test]
fn the_oldest_request_is_next_also_if_a_younger_one_would_fit() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 64), Host::consumer("prefill", 16));
    let entries = [(1, 12), (2, 16), (3, 4)];
    for (seed, blocks) in entries {
        producer.save(seed, blocks * BLOCK);
    }
    let request = |entry| consumer.connector.request(wants(&server, &[entry])).unwrap();
    let [mut first, mut second, mut third] = entries.map(request);
    until_ready(&consumer, &mut first, &entries[..1]);
    std::thread::sleep(MANY_TRIES);
    assert_eq!((second.poll(), third.poll()), (RequestPoll::Deferred, RequestPoll::Deferred));
    drop(first);
    until_ready(&consumer, &mut second, &entries[1..2]);
    assert_eq!(third.poll(), RequestPoll::Deferred);
    drop(second);
    until_ready(&consumer, &mut third, &entries[2..]);
    // One that is dropped while it waits lets the next one go: 1 and 3 fit together.
    drop(third);
    let [mut first, second, mut third] = entries.map(request);
    drop(second);
    until_ready(&consumer, &mut first, &entries[..1]);
    until_ready(&consumer, &mut third, &entries[2..]);
    drop((first, third));
    consumer.until_cached(16);
}

#[test]
fn a_request_whose_entries_are_all_here_or_claimed_already_waits_for_no_room() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    for (seed, blocks) in [(1, 4), (2, 12), (3, 12), (4, 4)] {
        producer.save(seed, blocks * BLOCK);
    }
    let entry = consumer.fetched(server.want(1, 4 * BLOCK));
    let request = |entries| consumer.connector.request(hurried(&server, entries)).unwrap();
    let (mut first, mut same) = (request(&[(2, 12)]), request(&[(2, 12)]));
    let mut waiting = request(&[(3, 12), (4, 4)]);
    let mut here = request(&[(1, 4)]);
    assert_eq!(here.poll(), RequestPoll::Ready);
    assert!(pinned(&consumer, &here) == [(0, content(1, 4 * BLOCK))]);
    drop(entry);
    until_ready(&consumer, &mut first, &[(2, 12)]);
    until_ready(&consumer, &mut same, &[(2, 12)]);
    drop((first, same));
    // What is pinned out of turn takes room as well.
    std::thread::sleep(MANY_TRIES);
    assert_eq!((waiting.poll(), waiting.entries().count()), (RequestPoll::Deferred, 0));
    assert_eq!(consumer.connector.gauges().cache.pinned, 4);
    drop(here);
    until_ready(&consumer, &mut waiting, &[(3, 12), (4, 4)]);
    assert_eq!(consumer.connector.gauges().traffic.fetched, 4);
}

#[test]
fn a_request_that_is_not_in_turn_ends_within_its_budget_and_says_so() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    producer.save(1, 12 * BLOCK);
    producer.save(2, 5 * BLOCK);
    let mut first = consumer.connector.request(wants(&server, &[(1, 12)])).unwrap();
    let budget = Duration::from_millis(300);
    let want = server.want(2, 5 * BLOCK).with(|want| want.budget = Some(budget));
    let mut second = consumer.connector.request([want]).unwrap();
    until("the end", || second.poll() == RequestPoll::EncodeLocally);
    let last = EcError::NotInTurn { blocks: 5, claimed: 12, region: 16 };
    let expected = EcError::Budget { after: budget, last: Some(Box::new(last.clone())) };
    assert_eq!(missing(&second), [(0, expected)]);
    let text = last.to_string();
    assert!(text.contains("need 5 blocks") && text.contains("claimed 12 of 16"), "{text}");
    until_ready(&consumer, &mut first, &[(1, 12)]);
    drop((first, second));
    consumer.until_cached(12);
}

#[test]
fn a_request_that_has_ended_in_the_queue_lets_the_next_one_go() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 64), Host::consumer("prefill", 16));
    for (seed, blocks) in [(1, 8), (2, 12), (3, 4), (4, 8)] {
        producer.save(seed, blocks * BLOCK);
    }
    let mut first = consumer.connector.request(wants(&server, &[(1, 8)])).unwrap();
    until_ready(&consumer, &mut first, &[(1, 8)]);
    let short = |want: Want| want.with(|want| want.budget = Some(Duration::from_millis(100)));
    let mut second = consumer.connector.request([short(server.want(2, 12 * BLOCK))]).unwrap();
    let mut third = consumer.connector.request(hurried(&server, &[(3, 4)])).unwrap();
    until("the end of the second", || second.poll() == RequestPoll::EncodeLocally);
    // The second waits for nothing any more, and its items are being encoded here.
    until_ready(&consumer, &mut third, &[(3, 4)]);
    drop((second, third));
}

#[test]
fn an_entry_that_will_not_come_takes_no_room_from_the_others_of_a_request_that_waits() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 64), Host::consumer("prefill", 16));
    for (seed, blocks) in [(1, 8), (2, 4), (3, 8)] {
        producer.save(seed, blocks * BLOCK);
    }
    let mut first = consumer.connector.request(wants(&server, &[(1, 8)])).unwrap();
    until_ready(&consumer, &mut first, &[(1, 8)]);
    let [mut short, long] = [(2, 4), (3, 8)].map(|entry| hurried(&server, &[entry]).remove(0));
    short.budget = Some(Duration::from_millis(100));
    let mut second = consumer.connector.request([short, long]).unwrap();
    until("the end of the second", || second.poll() == RequestPoll::EncodeLocally);
    assert!(pinned(&consumer, &second) == [(1, content(3, 8 * BLOCK))], "{:?}", missing(&second));
}

#[test]
fn a_request_in_turn_begins_soon_however_long_tries_at_peers_are_apart() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let consumer = Host::start("prefill", 16, |config| {
        config.machine.retry_first = Duration::from_secs(50);
        config.machine.retry_max = Duration::from_secs(50);
    });
    for (seed, blocks) in [(1, 12), (2, 8), (3, 2)] {
        producer.save(seed, blocks * BLOCK);
    }
    let mut first = consumer.connector.request(wants(&server, &[(1, 12)])).unwrap();
    until_ready(&consumer, &mut first, &[(1, 12)]);
    let mut second = consumer.connector.request(hurried(&server, &[(2, 8)])).unwrap();
    assert_eq!(second.poll(), RequestPoll::Deferred);
    std::thread::sleep(MANY_TRIES);
    drop(first);
    until_ready(&consumer, &mut second, &[(2, 8)]);
    assert_eq!(consumer.connector.gauges().traffic.failed_tries, 0);
}

#[test]
fn a_single_fetch_takes_no_turn_also_if_a_request_waits_for_the_same_entry() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 64);
    let consumer = Host::start("prefill", 16, |config| {
        config.machine.retry_first = Duration::from_secs(50);
        config.machine.retry_max = Duration::from_secs(50);
    });
    for (seed, blocks) in [(1, 12), (2, 4), (3, 4)] {
        producer.save(seed, blocks * BLOCK);
    }
    let mut first = consumer.connector.request(wants(&server, &[(1, 12)])).unwrap();
    until_ready(&consumer, &mut first, &[(1, 12)]);
    let mut second = consumer.connector.request(hurried(&server, &[(2, 4), (3, 4)])).unwrap();
    std::thread::sleep(MANY_TRIES);
    let want = server.want(2, 4 * BLOCK).with(|want| want.budget = Some(Duration::from_secs(10)));
    let entry = consumer.fetched(want);
    assert_eq!((second.poll(), second.entries().count()), (RequestPoll::Deferred, 0));
    drop((entry, first));
    until_ready(&consumer, &mut second, &[(2, 4), (3, 4)]);
}

#[test]
fn many_requests_of_any_sizes_all_have_their_entries_in_the_end() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 256), Host::consumer("prefill", 16));
    for seed in 0..40 {
        producer.save(seed, (1 + seed % 7) * BLOCK);
    }
    let entries = |number: u64| -> Vec<(u64, u64)> {
        // The entries of neighbours overlap.
        (0..1 + number % 4)
            .map(|at| (number * 3 + at * at * 5) % 40)
            .map(|seed| (seed, 1 + seed % 7))
            .collect()
    };
    let mut requests: Vec<(u64, Request)> = (0..60)
        .map(|number| (number, consumer.connector.request(hurried(&server, &entries(number))).unwrap()))
        .collect();
    let mut seen = 0;
    until("all requests", || {
        requests.retain_mut(|(number, request)| {
            let poll = request.poll();
            if poll == RequestPoll::EncodeLocally {
                let never = |(_, why): &(usize, EcError)| matches!(why, EcError::TooLargeTogether { .. });
                assert!(missing(request).iter().all(never), "{number}: {:?}", missing(request));
            } else if poll == RequestPoll::Deferred {
                return true;
            }
            for (index, bytes) in pinned(&consumer, request) {
                let (seed, blocks) = entries(*number)[index];
                assert!(bytes == content(seed, blocks * BLOCK), "request {number}");
            }
            seen += 1;
            false
        });
        requests.is_empty()
    });
    assert_eq!(seen, 60);
    let cache = consumer.connector.gauges().cache;
    assert_eq!((cache.pinned, cache.filling, cache.lost, cache.lost_pins), (0, 0, 0, 0));
}

#[test]
fn requests_do_not_wait_for_each_other_where_blocks_are_lost() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let late = [2, 4].map(|seed| producer.written(seed, 4 * BLOCK));
    [1, 3].iter().for_each(|seed| producer.save(*seed, 4 * BLOCK));
    drop(consumer.connector.reserve(&support::hash(9), 5 * BLOCK).unwrap());
    assert_eq!(consumer.connector.gauges().cache.lost, 5);

    let request = |entries: [(u64, u64); 2]| consumer.connector.request(wants(&server, &entries)).unwrap();
    let entries = [[(1, 4), (2, 4)], [(3, 4), (4, 4)]];
    let [mut one, mut other] = entries.map(request);
    until("the first entry", || {
        one.poll();
        one.entries().count() == 1
    });
    other.poll();
    assert_eq!(other.entries().count(), 0, "the second request holds room that the first one needs");
    late.into_iter().for_each(|entry| producer.connector.save(entry).unwrap());
    until_ready(&consumer, &mut one, &entries[0]);
    drop(one);
    until_ready(&consumer, &mut other, &entries[1]);

    let large = request([(5, 8), (6, 4)]);
    assert_eq!(missing(&large), [(1, EcError::TooLargeTogether { blocks: 12, region: 11 })]);
}
