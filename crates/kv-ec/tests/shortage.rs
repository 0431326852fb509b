//! Requests in caches whose regions have less room than when the requests were made, or less than the regions' sizes
//! tell.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_ec::{EcError, RequestPoll};
use support::requests::{hurried, missing, until_ready};
use support::{BLOCK, Host, Server, hash, until};

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
