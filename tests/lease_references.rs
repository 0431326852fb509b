//! Lease ids that a router got wrong, kept too long, or used twice, between real processes: each fails by its
//! name, and wrong bytes are never taken for right ones.
//!
//! The cases are those that a live deployment of other software answered with HTTP 200 and garbage, or with
//! the answer to another prompt.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use kv_transfer::params::{Leg, TransferParams};
use kv_transfer::prelude::*;
use kv_transfer::{Cause, Lease, PagesError, PeerCause};
use rustix::process::Signal;
use serde_json::{Value, json};
use support::host::Host;
use support::process::{Process, keep, reader, setup};
use support::{ended, failed, reclaimed, server};

/// Most of the 256 pages of a cache, so that the next prompt has to reuse some of them.
const MANY: usize = 200;
/// A lease that does not expire here.
const LONG: u64 = 60_000;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// Lets the other process keep a prompt, and returns what a router would be told.
fn granted(prefill: &mut Process, room: u64, pages: usize, content: u64, lease_ms: u64) -> TransferParams {
    prefill.tell(&format!("keep {room} {pages} {content} {lease_ms}"));
    TransferParams::parse(&prefill.expect("kept")[0]).unwrap()
}

/// The parameters with another value at a place.
fn altered(params: &TransferParams, changes: &[(&str, Value)]) -> TransferParams {
    let mut value = params.to_value();
    for (place, new) in changes {
        *value.pointer_mut(place).unwrap() = new.clone();
    }
    TransferParams::from_value(&value).unwrap()
}

fn blocks(params: &TransferParams) -> Vec<u32> {
    params.remote().unwrap().pages().unwrap().iter().collect()
}

/// A reference that must be good: every byte of the prompt is there.
fn read(decode: &mut Host, params: &TransferParams, content: u64) {
    let (_, mut receiver) = reader(decode, params);
    receiver.init(decode.room_for(blocks(params).len()), None).unwrap();
    assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
    let pages = reclaimed(receiver);
    decode.arrived(pages.list(), content, &"a good reference");
    decode.free(pages);
}

/// Why a bad lease id is refused. Checks that no byte was moved for it.
fn refused(decode: &mut Host, params: &TransferParams) -> Cause {
    let posts = decode.gauges().posts;
    let (_, mut receiver) = reader(decode, params);
    receiver.init(decode.room_for(blocks(params).len()), None).unwrap();
    let cause = failed(&receiver);
    let pages = reclaimed(receiver);
    for page in pages.list().iter() {
        decode.memory.check_page(page, &format!("{cause:?}"));
    }
    assert_eq!(decode.gauges().posts, posts, "{cause:?}: nothing was to be read");
    decode.free(pages);
    cause
}

#[test]
fn a_bad_lease_id_fails_by_its_name_and_moves_no_byte() {
    let (_server, addr) = server();
    let mut decode = setup(WorkerRole::Decode, &addr).start();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    let mut named = 0;
    let mut expect = |what: &str, cause: Cause, expected: &dyn Fn(&Cause) -> bool| {
        assert!(expected(&cause), "{what}: {cause:?}");
        println!("{what}: {cause}");
        named += 1;
    };

    // 1. A request that the holder does not know; the right one is none the worse for it.
    let first = granted(&mut prefill, 1, 20, 10, LONG);
    let unknown = |cause: &Cause| matches!(cause, Cause::ByPeer(PeerCause::UnknownLease { .. }));
    let other_room = [("/remote_request_id", json!("999")), ("/kv_leases/bootstrap_room", json!(999))];
    expect("unknown id", refused(&mut decode, &altered(&first, &other_room)), &unknown);
    let other_nonce = [("/kv_leases/ranks/0/lease_id", json!("00000000deadbeef"))];
    assert!(unknown(&refused(&mut decode, &altered(&first, &other_nonce))));
    read(&mut decode, &first, 10);
    assert_eq!(prefill.end_of(1), "Success");

    // 2. Pages out of range; and pages of the cache, only not of this request.
    let second = granted(&mut prefill, 2, 20, 20, LONG);
    let outside = PagesError::OutOfRange { page: 9_999, num_pages: 256 };
    let params = altered(&second, &[("/remote_block_ids/0/7", json!(9_999))]);
    expect("out of range", refused(&mut decode, &params), &|cause| {
        *cause == Cause::LeaseOutOfRange(outside.clone())
    });
    let second = granted(&mut prefill, 3, 20, 30, LONG);
    let held = blocks(&second)[7];
    let free = (0..256).find(|page| !blocks(&second).contains(page)).unwrap();
    let params = altered(&second, &[("/remote_block_ids/0/7", json!(free))]);
    let strange = Cause::LeasePages { position: 7, referenced: Some(free), held: Some(held) };
    assert_eq!(refused(&mut decode, &params), strange);
    // A reader that knows better than its holder which pages are meant ends the request.
    assert!(prefill.end_of(3).contains("BadArguments"));

    // 3. A reference that has served.
    let third = granted(&mut prefill, 4, MANY, 40, LONG);
    read(&mut decode, &third, 40);
    assert_eq!(prefill.end_of(4), "Success");
    let consumed = |cause: &Cause| matches!(cause, Cause::ByPeer(PeerCause::LeaseConsumed { .. }));
    expect("consumed", refused(&mut decode, &third), &consumed);

    // 4. The same, now that its pages are those of another request that is being kept.
    let fourth = granted(&mut prefill, 5, MANY, 50, LONG);
    let (before, now): (BTreeSet<u32>, BTreeSet<u32>) =
        (blocks(&third).into_iter().collect(), blocks(&fourth).into_iter().collect());
    assert!(before.intersection(&now).count() > MANY / 2, "the pages were to be reused");
    expect("reused pages", refused(&mut decode, &third), &consumed);
    read(&mut decode, &fourth, 50);
    assert_eq!(prefill.end_of(5), "Success");

    // 5. A lease that has run out; its pages are another request's meanwhile.
    let fifth = granted(&mut prefill, 6, MANY, 60, 300);
    assert_eq!(prefill.end_of(6), "LeaseExpired");
    let next = granted(&mut prefill, 7, MANY, 70, LONG);
    expect("expired lease", refused(&mut decode, &fifth), &|cause| *cause == Cause::LeaseExpired);
    read(&mut decode, &next, 70);
    assert_eq!(prefill.end_of(7), "Success");
    assert_eq!(named, 5);

    // And one of a worker's former life, whose pages hold something else now.
    let old = granted(&mut prefill, 8, MANY, 80, LONG);
    prefill.kill();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    let new = granted(&mut prefill, 8, MANY, 81, LONG);
    let cause = refused(&mut decode, &old);
    assert!(matches!(cause, Cause::StaleLease { .. }), "{cause:?}");
    read(&mut decode, &new, 81);
    assert_eq!(prefill.end_of(8), "Success");
    prefill.close();
    decode.check_idle("at the end");
    decode.close("decode");
}

/// A reader sleeps through the end of its lease. When it wakes up, it knows the pages and has room to read
/// them, but they belong to another request.
#[test]
fn a_reader_that_slept_through_the_end_of_its_lease_accepts_nothing() {
    let (_server, addr) = server();
    let mut prefill = setup(WorkerRole::Prefill, &addr).start();
    let mut decode = Process::start(WorkerRole::Decode, &addr);
    for round in 0..3 {
        let (room, lease) = (10 * round, Lease::Renewable(Duration::from_secs(1)));
        let (sender, params) = keep(&mut prefill, room, MANY, 100 + round, lease);
        decode.tell(&format!("acquire {} {}", 100 + round, params.to_json()));
        decode.expect("acquired");
        // It falls asleep before it does this, and does it first when it wakes up.
        decode.tell(&format!("read {room} {MANY} 3000"));
        decode.expect("asleep");
        decode.signal(Signal::STOP);
        let cause = failed(&sender);
        assert!(matches!(cause, Cause::LeaseExpired | Cause::PeerUnresponsive { .. }), "{cause:?}");
        let pages = reclaimed(sender);
        assert_eq!(pages.len(), MANY);
        prefill.free(pages);
        let lease = Lease::Renewable(Duration::from_millis(LONG));
        let (sender, next) = keep(&mut prefill, room + 1, MANY, 200 + round, lease);
        decode.signal(Signal::CONT);
        let end = decode.end_of(room);
        assert!(end.starts_with("LeaseExpired") || end.contains("PeerUnresponsive"), "{end}");

        // The same processes, and the right reference.
        decode.tell(&format!("acquire {} {}", 200 + round, next.to_json()));
        decode.expect("acquired");
        decode.tell(&format!("read {} {MANY} 0", room + 1));
        assert_eq!(decode.end_of(room + 1), "Success");
        assert_eq!(ended(&sender), KvPoll::Success);
        prefill.free(reclaimed(sender));
    }
    decode.close();
    prefill.close("prefill");
}

/// A full prefix hit: nothing is read, and the holder's pages are free at once.
#[test]
fn a_release_reads_nothing_and_frees_the_pages() {
    let (_server, addr) = server();
    let decode = setup(WorkerRole::Decode, &addr).start();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    let params = granted(&mut prefill, 1, MANY, 10, LONG);
    assert!(matches!(params.leg, Leg::Decode { .. }));
    let (_, mut receiver) = reader(&decode, &params);
    receiver.init(Pages::none(), None).unwrap();
    assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
    assert_eq!(prefill.end_of(1), "Success");
    assert!(reclaimed(receiver).is_empty());
    assert_eq!(decode.gauges().posts, 0);
    // Before there was room for its pages, a request is given up by its client.
    let params = granted(&mut prefill, 2, MANY, 20, LONG);
    let (_, mut receiver) = reader(&decode, &params);
    receiver.abort();
    assert!(prefill.end_of(2).contains("Aborted"));
    drop(reclaimed(receiver));
    prefill.close();
    decode.close("decode");
}
