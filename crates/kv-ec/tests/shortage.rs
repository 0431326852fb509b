//! Requests in caches whose regions have less room than when the requests were made, or less than the regions' sizes
//! tell.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_ec::{EcError, FillError, Request, RequestPoll};
use support::requests::{MANY_TRIES, hurried, missing, until_ready};
use support::{BLOCK, Host, Server, hash, until};

/// The entries of two requests, of which the second ones come to the producer only after a while.
const ENTRIES: [[(u64, u64); 2]; 2] = [[(1, 4), (2, 4)], [(3, 4), (4, 4)]];

/// Two requests for which a cache of 16 blocks has room together, if 5 of the blocks were not gone.
fn one_after_the_other(server: &Server, consumer: &Host) {
    let producer = Host::producer(server, "encoder", 32);
    let late = [2, 4].map(|seed| producer.written(seed, 4 * BLOCK));
    [1, 3].iter().for_each(|seed| producer.save(*seed, 4 * BLOCK));
    let [mut one, mut other] =
        ENTRIES.map(|entries| consumer.connector.request(hurried(server, &entries)).unwrap());
    until("the first entry", || one.poll() == RequestPoll::Deferred && one.entries().count() == 1);
    std::thread::sleep(MANY_TRIES);
    assert_eq!((other.poll(), other.entries().count()), (RequestPoll::Deferred, 0));
    late.into_iter().for_each(|entry| producer.connector.save(entry).unwrap());
    until_ready(consumer, &mut one, &ENTRIES[0]);
    assert_eq!(other.poll(), RequestPoll::Deferred);
    drop(one);
    until_ready(consumer, &mut other, &ENTRIES[1]);
}

#[test]
fn requests_do_not_wait_for_each_other_where_a_transfer_keeps_blocks() {
    let (server, consumer) = (Server::start(), Host::consumer("prefill", 16));
    let mut reservation = consumer.connector.reserve(&hash(9), 5 * BLOCK).unwrap();
    let pages = reservation.take_pages();
    consumer.connector.discard(reservation);
    one_after_the_other(&server, &consumer);
    // The blocks come back, so a request that needs them waits.
    let producer = Host::producer(&server, "encoder-1", 32);
    producer.save(5, 16 * BLOCK);
    let mut large = consumer.connector.request(hurried(&server, &[(5, 16)])).unwrap();
    std::thread::sleep(MANY_TRIES);
    assert_eq!(large.poll(), RequestPoll::Deferred, "{:?}", missing(&large));
    consumer.connector.store().give_back(pages).unwrap();
    until_ready(&consumer, &mut large, &[(5, 16)]);
}

#[test]
fn requests_do_not_wait_for_each_other_where_an_entry_is_pinned_for_good() {
    let (server, consumer) = (Server::start(), Host::consumer("prefill", 16));
    consumer.save(9, 5 * BLOCK);
    drop(consumer.connector.store().pin(&hash(9)).unwrap());
    one_after_the_other(&server, &consumer);
    // That entry itself is here for every request.
    let request = |entries: &[(u64, u64)]| consumer.connector.request(hurried(&server, entries)).unwrap();
    assert_eq!(missing(&request(&[(9, 5), (5, 11)])), []);
    let too_large = EcError::TooLargeTogether { blocks: 12, region: 11 };
    assert_eq!(missing(&request(&[(5, 11), (6, 1)])), [(1, too_large)]);
}

/// Two requests that both have one of their entries.
fn both_half(
    server: &Server,
    producer: &Host,
    consumer: &Host,
    entries: [[(u64, u64); 2]; 2],
) -> [Request; 2] {
    entries.iter().for_each(|[(seed, blocks), _]| producer.save(*seed, blocks * BLOCK));
    let mut both = entries.map(|entries| consumer.connector.request(hurried(server, &entries)).unwrap());
    for request in &mut both {
        until("a first entry", || request.poll() == RequestPoll::Deferred && request.entries().count() == 1);
    }
    both
}

#[test]
fn the_younger_of_two_requests_gives_its_entries_back_if_blocks_are_lost() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let late = [2, 4].map(|seed| producer.written(seed, 4 * BLOCK));
    let [mut one, mut other] = both_half(&server, &producer, &consumer, ENTRIES);
    // Until no try has the blocks.
    until("the loss", || consumer.connector.reserve(&hash(9), 5 * BLOCK).map(drop).is_ok());
    until("the end of the younger", || other.poll() == RequestPoll::EncodeLocally);
    let lost = EcError::RoomLost { blocks: 8, region: 11 };
    assert_eq!(missing(&other), [(0, lost.clone()), (1, lost)]);
    late.into_iter().for_each(|entry| producer.connector.save(entry).unwrap());
    until_ready(&consumer, &mut one, &ENTRIES[0]);
    let mut again = consumer.connector.request(hurried(&server, &ENTRIES[1])).unwrap();
    assert_eq!(again.poll(), RequestPoll::Deferred);
    drop(one);
    until_ready(&consumer, &mut again, &ENTRIES[1]);
}

/// The younger request does not fit the region any more, and the older one needs the blocks of its entry.
#[test]
fn a_request_with_a_part_that_no_longer_fits_the_region_gives_its_entries_back() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let entries = [[(1, 1), (2, 4)], [(3, 2), (4, 6)]];
    let late = [(2, 4), (4, 6)].map(|(seed, blocks)| producer.written(seed, blocks * BLOCK));
    let [mut one, mut other] = both_half(&server, &producer, &consumer, entries);
    // Until no try has the blocks.
    until("the loss", || consumer.connector.reserve(&hash(9), 10 * BLOCK).map(drop).is_ok());
    until("the end of the younger", || other.poll() == RequestPoll::EncodeLocally);
    let too_large = EcError::TooLargeTogether { blocks: 8, region: 6 };
    assert_eq!(missing(&other), [(0, too_large.clone()), (1, too_large)]);
    late.into_iter().for_each(|entry| producer.connector.save(entry).unwrap());
    until_ready(&consumer, &mut one, &entries[0]);
}

#[test]
fn both_of_two_requests_go_on_when_blocks_that_were_away_come_back() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let late = [2, 4].map(|seed| producer.written(seed, 4 * BLOCK));
    let [mut one, mut other] = both_half(&server, &producer, &consumer, ENTRIES);
    let mut away = None;
    until("the transfer", || {
        away = consumer.connector.reserve(&hash(9), 5 * BLOCK).ok();
        away.is_some()
    });
    let mut reservation = away.unwrap();
    let pages = reservation.take_pages();
    consumer.connector.discard(reservation);
    late.into_iter().for_each(|entry| producer.connector.save(entry).unwrap());
    std::thread::sleep(MANY_TRIES);
    assert_eq!([one.poll(), other.poll()], [RequestPoll::Deferred; 2]);
    consumer.connector.store().give_back(pages).unwrap();
    until_ready(&consumer, &mut one, &ENTRIES[0]);
    until_ready(&consumer, &mut other, &ENTRIES[1]);
}

#[test]
fn a_request_that_no_longer_fits_the_region_ends_and_lets_the_next_one_go() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 64), Host::consumer("prefill", 16));
    let entries = [(1, 8), (2, 16), (3, 4)];
    for (seed, blocks) in entries {
        producer.save(seed, blocks * BLOCK);
    }
    let request = |entry| consumer.connector.request(hurried(&server, &[entry])).unwrap();
    let mut first = request(entries[0]);
    until_ready(&consumer, &mut first, &entries[..1]);
    let mut second = request(entries[1]);
    drop(consumer.connector.reserve(&hash(9), 5 * BLOCK).unwrap());
    let mut third = request(entries[2]);
    until("the end of the second", || second.poll() == RequestPoll::EncodeLocally);
    assert_eq!(missing(&second), [(0, EcError::TooLargeTogether { blocks: 16, region: 11 })]);
    drop(first);
    until_ready(&consumer, &mut third, &entries[2..]);
    assert_eq!(consumer.connector.gauges().cache.pinned, 4);
}

#[test]
fn a_request_that_waits_takes_no_entry_that_was_encoded_here_before_its_turn() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let late = producer.written(2, 8 * BLOCK);
    producer.save(1, 8 * BLOCK);
    producer.save(3, 9 * BLOCK);
    let request = |entries: &[(u64, u64)]| consumer.connector.request(hurried(&server, entries)).unwrap();
    let mut one = request(&[(1, 8), (2, 8)]);
    until("the first entry", || one.poll() == RequestPoll::Deferred && one.entries().count() == 1);
    let mut other = request(&[(3, 9), (4, 8)]);
    assert_eq!(missing(&other), [(1, EcError::TooLargeTogether { blocks: 17, region: 16 })]);

    until("the encoding", || {
        consumer
            .connector
            .reserve(&hash(4), 8 * BLOCK)
            .is_ok_and(|place| consumer.connector.save(place).is_ok())
    });
    let refused = other.fill(1, consumer.connector.local(&hash(4)).unwrap()).unwrap_err();
    let why = EcError::NotInTurn { blocks: 9, claimed: 16, region: 16 };
    assert_eq!(refused.why, FillError::NotInTurn(Box::new(why)));
    assert_eq!(refused.entry.hash(), &hash(4));
    drop(refused);
    producer.connector.save(late).unwrap();
    until_ready(&consumer, &mut one, &[(1, 8), (2, 8)]);
    drop(one);
    until("the other", || other.poll() == RequestPoll::EncodeLocally);
    assert_eq!(other.entries().count(), 1);
}

#[test]
fn a_request_takes_what_was_encoded_here_beyond_its_room_after_its_fetches() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 32), Host::consumer("prefill", 16));
    let late = producer.written(1, 8 * BLOCK);
    let mut request = consumer.connector.request(hurried(&server, &[(1, 8), (2, 9), (3, 4)])).unwrap();
    consumer.save(2, 4 * BLOCK);
    let local = |seed| consumer.connector.local(&hash(seed)).unwrap();
    // The second one is encoded here, shorter than was wanted, while the first one is to come.
    let why = |index, seed, request: &mut Request| request.fill(index, local(seed)).unwrap_err().why;
    assert_eq!(why(0, 2, &mut request), FillError::NotMissing { index: 0 });
    assert!(matches!(why(1, 2, &mut request), FillError::NoRoom { blocks: 8 | 12 }));
    producer.connector.save(late).unwrap();
    until("the end of the fetches", || request.poll() == RequestPoll::EncodeLocally);
    request.fill(1, local(2)).unwrap();
    assert_eq!(missing(&request).len(), 1);
}

/// The cache has the entry with another length, so nothing comes, and the request has nothing to wait for.
#[test]
fn a_request_whose_fetches_have_ended_takes_what_was_encoded_locally() {
    let (server, consumer) = (Server::start(), Host::consumer("prefill", 16));
    consumer.save(9, 3 * BLOCK);
    let local = || consumer.connector.store().pin_guard(&hash(9)).unwrap();
    let mut request = consumer.connector.request(hurried(&server, &[(9, 4)])).unwrap();
    until("the end of the fetch", || request.poll() == RequestPoll::EncodeLocally);
    let other_length = EcError::OtherLength { held: 3 * BLOCK, asked: 4 * BLOCK };
    assert_eq!(missing(&request), [(0, other_length)]);
    request.fill(0, local()).unwrap();
    assert_eq!(request.poll(), RequestPoll::Ready);
}
