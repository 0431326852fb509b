//! Ranks that are hostile, slow or mistaken, against a server that the test turns itself.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kv_core::{ContentHash, PageList};
use kv_host::{Limit, descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::message::{Answer, Ask, MAX_REPLY, MAX_REQUEST, Reply, Request, decode, decode_greeting, encode};
use super::*;
use crate::{Absent, EcRegion, EncoderCache, Eviction, ReserveError, SharedStore};

const BLOCKS: u32 = 64;
const BLOCK: u32 = 16;
const LONG: Duration = Duration::from_secs(20);
const NOW: Option<Duration> = Some(Duration::ZERO);

fn hash(number: usize) -> ContentHash {
    ContentHash::new(&format!("image-{number}")).unwrap()
}

/// An address that no other test has.
fn address() -> HostAddress {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("@kv-ec-unit-{}-{next}", std::process::id()).parse().unwrap()
}

fn store(blocks: u32) -> SharedStore {
    SharedStore::new(EncoderCache::new(blocks, BLOCK, Eviction::Lru))
}

/// A server, its store, and its address.
fn server(config: HostConfig) -> (HostServer, SharedStore, HostAddress) {
    let (region, store, address) = (EcRegion::create(BLOCKS, BLOCK).unwrap(), store(BLOCKS), address());
    (HostServer::bind(&address, &region, &store, config).unwrap(), store, address)
}

fn limited(max_connections: u32, max_held: u32) -> HostConfig {
    HostConfig { max_connections, max_held, ..HostConfig::default() }
}

fn save(store: &SharedStore, number: usize, blocks: u32) {
    let reservation = store.reserve(&hash(number), u64::from(blocks * BLOCK)).unwrap();
    store.commit(reservation).unwrap();
}

/// Turns the server until the call on another thread has returned.
fn beside<T: Send>(server: &mut HostServer, call: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let call = scope.spawn(call);
        while !call.is_finished() {
            server.turn(Some(Duration::from_millis(1))).unwrap();
        }
        call.join().unwrap()
    })
}

fn connect(server: &mut HostServer, address: &HostAddress) -> Result<HostClient, HostError> {
    beside(server, || HostClient::connect(address, "", LONG))
}

/// A rank that writes its own messages, after the server's greeting.
fn raw(server: &mut HostServer, address: &HostAddress) -> OwnedFd {
    let socket = address.dial(LONG).unwrap();
    server.turn(NOW).unwrap();
    let (mut buffer, mut passed) = ([0; 4096], Vec::new());
    let len = descriptors::receive(socket.as_fd(), &mut buffer, &mut passed, 1).unwrap();
    assert!(matches!(decode_greeting(&buffer[..len]), Ok(message::Greeting::Welcome(_))));
    assert_eq!(passed.len(), 1);
    socket
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> bool {
    descriptors::send(socket.as_fd(), &[IoSlice::new(bytes)], &[]).is_ok()
}

fn ask(socket: &OwnedFd, number: u64, ask: Ask) -> bool {
    send(socket, &encode(&Request { number, ask }).unwrap())
}

fn reply(socket: &OwnedFd) -> Option<Reply> {
    let mut buffer = vec![0; MAX_REPLY];
    let len = descriptors::receive(socket.as_fd(), &mut buffer, &mut Vec::new(), 0).ok()?;
    Some(decode(&buffer[..len]).unwrap())
}

#[test]
fn messages_that_are_no_requests_end_the_connection_and_no_other() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let honest = connect(&mut server, &address).unwrap();
    let pin = beside(&mut server, || honest.pin(&hash(1))).unwrap();
    let request = encode(&Request { number: 1, ask: Ask::Pin(hash(1)) }).unwrap();
    let long = encode(&(1, "x".repeat(MAX_REQUEST))).unwrap();
    let padded = [&request[..], &[0; MAX_REQUEST]].concat();
    let deep = [0x91; MAX_REQUEST];
    let bad_hash =
        encode(&(1, [("Pin", "")].into_iter().collect::<std::collections::BTreeMap<_, _>>())).unwrap();
    for (count, bytes) in
        [&[0xff][..], &request[..5], &long, &padded, &deep, &bad_hash].into_iter().enumerate()
    {
        let rank = raw(&mut server, &address);
        assert!(ask(&rank, 1, Ask::Pin(hash(1))) && send(&rank, bytes));
        server.turn(NOW).unwrap();
        assert_eq!(server.gauges().violations, 1 + count as u64);
        assert_eq!((server.gauges().connections, server.gauges().pins), (1, 1));
    }
    // A descriptor from a rank is closed, and the rank's connection with it.
    let rank = raw(&mut server, &address);
    let sent = descriptors::send(rank.as_fd(), &[IoSlice::new(&request)], &[rank.as_fd()]);
    sent.unwrap();
    server.turn(NOW).unwrap();
    assert_eq!((server.gauges().violations, server.gauges().connections), (7, 1));
    let reservation = beside(&mut server, || honest.reserve(&hash(2), 1)).unwrap();
    beside(&mut server, || reservation.commit()).unwrap();
    drop(pin);
}

#[test]
fn a_rank_that_reads_no_answers_delays_nobody_and_grows_nothing() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let honest = connect(&mut server, &address).unwrap();
    let flood = raw(&mut server, &address);
    let mut asked = 0;
    let mut idle = 0;
    // Until neither the rank nor the server has room for another message.
    while idle < 3 {
        match ask(&flood, asked, Ask::Unpin(7)) {
            true => (asked, idle) = (asked + 1, 0),
            false => idle += 1,
        }
        server.turn(NOW).unwrap();
        assert!(asked < 10_000, "the server takes requests without end");
    }
    for _ in 0..100 {
        let pin = beside(&mut server, || honest.pin(&hash(1))).unwrap();
        assert_eq!(pin.pages().len(), 4);
        drop(pin);
    }
    // Its requests are answered as soon as it reads: one after the other, none lost.
    for number in 0..asked {
        let reply = reply(&flood).unwrap();
        assert_eq!(reply, Reply { number, answer: Err(Refusal::NotHeld { handle: 7 }) });
        server.turn(NOW).unwrap();
    }
    assert!(reply(&flood).is_none());
    // Nothing is ready any more: the server sleeps.
    server.turn(NOW).unwrap();
    let mut fds = [PollFd::new(&server, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0));
}

#[test]
fn a_turn_serves_a_bounded_number_of_requests_of_one_rank() {
    let (mut server, _store, address) = server(HostConfig::default());
    let (one, other) = (raw(&mut server, &address), raw(&mut server, &address));
    for number in 0..100 {
        assert!(ask(&one, number, Ask::Unpin(0)) && ask(&other, number, Ask::Unpin(0)));
    }
    server.turn(NOW).unwrap();
    let count = |rank| std::iter::from_fn(|| reply(rank)).count();
    let (first, second) = (count(&one), count(&other));
    assert!(first == second && (1..20).contains(&first), "{first} and {second}");
}

#[test]
fn limits_refuse_in_words_and_the_connection_goes_on() {
    let (mut server, store, address) = server(limited(2, 3));
    save(&store, 1, 4);
    let one = connect(&mut server, &address).unwrap();
    let _two = connect(&mut server, &address).unwrap();
    let error = connect(&mut server, &address).unwrap_err();
    assert_eq!(error, HostError::Refused(Refusal::TooManyConnections { max: 2 }));
    assert_eq!((server.gauges().refused, server.gauges().connections), (1, 2));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(beside(&mut server, || one.pin(&hash(1))).unwrap());
    }
    let error = beside(&mut server, || one.reserve(&hash(2), 1)).unwrap_err();
    assert_eq!(error, HostError::Refused(Refusal::TooManyHeld { max: 3 }));
    assert_eq!(store.contains(&hash(2)), None);
    drop(held.pop());
    let reservation = beside(&mut server, || one.reserve(&hash(2), 1)).unwrap();
    let refused = |refusal| HostError::Refused(refusal);
    drop(held);
    for (number, bytes, error) in [
        (2, 1, ReserveError::Known { ready: false }),
        (3, 0, ReserveError::Empty),
        (3, 16 * 64 + 1, ReserveError::TooLarge { blocks: 65, region: 64 }),
        (3, 16 * 64, ReserveError::Full { blocks: 64, free: 59, evictable: 4 }),
    ] {
        let got = beside(&mut server, || one.reserve(&hash(number), bytes)).unwrap_err();
        assert_eq!(got, refused(Refusal::Reserve(error)));
    }
    for (number, absent) in [(2, Absent::NotReady), (3, Absent::Missing)] {
        let got = beside(&mut server, || one.pin(&hash(number))).unwrap_err();
        assert_eq!(got, refused(Refusal::Absent(absent)));
    }
    beside(&mut server, || reservation.discard()).unwrap();
    assert_eq!((store.contains(&hash(2)), store.gauges().filling), (None, 0));
}

#[test]
fn what_a_connection_does_not_hold_it_can_neither_commit_nor_unpin_nor_list() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let (owner, thief) = (raw(&mut server, &address), raw(&mut server, &address));
    assert!(ask(&owner, 1, Ask::Reserve { hash: hash(2), bytes: 16 }) && ask(&owner, 2, Ask::Pin(hash(1))));
    server.turn(NOW).unwrap();
    let held: Vec<Reply> = std::iter::from_fn(|| reply(&owner)).collect();
    let handles: Vec<u64> = held
        .iter()
        .map(|reply| match reply.answer {
            Ok(Answer::Held { handle, .. }) => handle,
            ref other => panic!("{other:?}"),
        })
        .collect();
    let [reserved, pinned] = handles[..] else { panic!("{held:?}") };
    let steal = [
        Ask::Commit(reserved),
        Ask::Discard(reserved),
        Ask::Unpin(pinned),
        Ask::Runs { handle: pinned, from: 0 },
    ];
    for ask_for in steal {
        assert!(ask(&thief, 1, ask_for));
    }
    // Nor is a pin a reservation.
    assert!(ask(&owner, 3, Ask::Commit(pinned)) && ask(&owner, 4, Ask::Unpin(reserved)));
    server.turn(NOW).unwrap();
    let refusals = std::iter::from_fn(|| reply(&thief)).chain(std::iter::from_fn(|| reply(&owner)));
    let refusals: Vec<_> = refusals.map(|reply| reply.answer).collect();
    assert_eq!(refusals.len(), 6);
    assert!(refusals.iter().all(|answer| matches!(answer, Err(Refusal::NotHeld { .. }))), "{refusals:?}");
    assert_eq!((store.gauges().filling, store.gauges().pinned), (1, 4));
    // Beyond the last run there are no runs.
    assert!(ask(&owner, 5, Ask::Runs { handle: pinned, from: 9 }));
    server.turn(NOW).unwrap();
    assert_eq!(reply(&owner).unwrap().answer, Ok(Answer::Runs(PageList::default())));
}

#[test]
fn a_list_of_many_runs_comes_whole_in_bounded_messages() {
    let region = EcRegion::create(30_000, BLOCK).unwrap();
    let (store, address) = (store(30_000), address());
    let mut server = HostServer::bind(&address, &region, &store, HostConfig::default()).unwrap();
    (0..30_000).for_each(|number| save(&store, number, 1));
    (0..30_000).step_by(2).for_each(|number| assert!(store.remove(&hash(number))));
    let rank = connect(&mut server, &address).unwrap();
    let bytes: Vec<u8> = (0..10_000 * BLOCK).map(|byte| (byte / 7) as u8).collect();
    let reservation = beside(&mut server, || rank.reserve(&hash(0), bytes.len() as u64)).unwrap();
    assert_eq!((reservation.pages().runs().len(), reservation.bytes()), (10_000, bytes.len() as u64));
    reservation.write(0, &bytes).unwrap();
    beside(&mut server, || reservation.commit()).unwrap();
    let pin = store.pin_guard(&hash(0)).unwrap();
    let mut out = vec![0; bytes.len()];
    region.read(pin.pages(), 0, &mut out).unwrap();
    assert!(out == bytes);
    let theirs = beside(&mut server, || rank.pin(&hash(0))).unwrap();
    assert_eq!(theirs.pages(), pin.pages());
    beside(&mut server, || drop(theirs));
}

#[test]
fn pins_that_are_dropped_faster_than_the_server_turns_are_all_given_back() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let rank = connect(&mut server, &address).unwrap();
    let pins: Vec<HostPin> = beside(&mut server, || (0..3000).map(|_| rank.pin(&hash(1)).unwrap()).collect());
    assert_eq!(server.gauges().pins, 3000);
    beside(&mut server, move || drop(pins));
    // The last requests may still be on their way.
    beside(&mut server, || rank.pin(&hash(9))).unwrap_err();
    assert_eq!((server.gauges().pins, store.gauges().pinned), (0, 0));
}

#[test]
fn a_server_and_a_rank_that_do_not_fit_say_both_values() {
    let (region, address) = (EcRegion::create(BLOCKS, BLOCK).unwrap(), address());
    let bind = |store: &SharedStore, config| HostServer::bind(&address, &region, store, config).map(|_| ());
    let error = bind(&store(63), HostConfig::default()).unwrap_err();
    assert_eq!(error, HostError::Blocks { region: 64, cache: 63 });
    let other = SharedStore::new(EncoderCache::new(BLOCKS, 17, Eviction::Lru));
    let error = bind(&other, HostConfig::default()).unwrap_err();
    assert_eq!(error, HostError::BlockBytes { region: 16, cache: 17 });
    let limit = Limit { field: "max_connections", got: 0, min: 1, max: 4096 };
    assert_eq!(bind(&store(64), limited(0, 1)), Err(HostError::Limit(limit)));
    let limit = Limit { field: "max_held", got: 65537, min: 1, max: 65536 };
    assert_eq!(bind(&store(64), limited(1, 65537)), Err(HostError::Limit(limit)));
    let config = HostConfig { compatibility: "theirs".into(), ..HostConfig::default() };
    let mut server = HostServer::bind(&address, &region, &store(64), config).unwrap();
    let error = connect(&mut server, &address).unwrap_err();
    assert_eq!(error, HostError::Incompatible { ours: "".into(), theirs: "theirs".into() });
    let taken = bind(&store(64), HostConfig::default()).unwrap_err();
    assert!(matches!(taken, HostError::Os(error) if error.call == "bind"), "{taken}");
    drop(server);
    let gone = HostClient::connect(&address, "", LONG).unwrap_err();
    assert!(matches!(gone, HostError::Os(error) if error.kind == std::io::ErrorKind::ConnectionRefused));
}

#[test]
fn a_call_ends_in_time_whatever_the_server_does_and_the_connection_with_it() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let (start, short) = (Instant::now(), Duration::from_millis(50));
    let error = HostClient::connect(&address, "", short).unwrap_err();
    assert_eq!(error, HostError::TimedOut { after: short });
    let rank = beside(&mut server, || HostClient::connect(&address, "", short)).unwrap();
    assert_eq!(rank.pin(&hash(1)).unwrap_err(), HostError::TimedOut { after: short });
    assert!(start.elapsed() >= 2 * short && start.elapsed() < LONG);
    // The late answer would be a pin that nobody knows of: the connection is over, and so is the pin.
    assert_eq!(rank.pin(&hash(1)).unwrap_err(), HostError::Closed);
    server.turn(NOW).unwrap();
    server.turn(NOW).unwrap();
    assert_eq!((server.gauges().connections, store.gauges().pinned), (0, 0));
}

#[test]
fn a_server_that_is_dropped_gives_up_pins_and_never_reuses_what_a_live_rank_may_write() {
    let (mut server, store, address) = server(HostConfig::default());
    save(&store, 1, 4);
    let rank = connect(&mut server, &address).unwrap();
    let pin = beside(&mut server, || rank.pin(&hash(1))).unwrap();
    let reservation = beside(&mut server, || rank.reserve(&hash(2), 32)).unwrap();
    drop(server);
    let gauges = store.gauges();
    assert_eq!((gauges.pinned, gauges.cached, gauges.filling, gauges.lost), (0, 4, 0, 2));
    assert_eq!(reservation.commit().unwrap_err(), HostError::Closed);
    drop(pin);
}

#[test]
fn a_pin_whose_connection_is_over_says_so_before_anybody_takes_its_bytes_for_the_entrys() {
    let region = EcRegion::create(64, 16).unwrap();
    let (store, address) = (store(64), address());
    let mut server = HostServer::bind(&address, &region, &store, HostConfig::default()).unwrap();
    save(&store, 1, 64);
    let ranks = [0, 1].map(|_| connect(&mut server, &address).unwrap());
    let pins = ranks.each_ref().map(|rank| beside(&mut server, || rank.pin(&hash(1))).unwrap());
    let read = |pin: &HostPin| pin.read(0, &mut [0; 1024]);
    assert_eq!(pins.each_ref().map(read), [Ok(()), Ok(())]);
    // The rank ends the connection itself, because an answer did not come in time.
    let short = Duration::from_millis(50);
    let hasty = beside(&mut server, || HostClient::connect(&address, "", short)).unwrap();
    let pin = beside(&mut server, || hasty.pin(&hash(1))).unwrap();
    assert_eq!(hasty.pin(&hash(1)).unwrap_err(), HostError::TimedOut { after: short });
    assert_eq!(read(&pin), Err(HostError::Closed));
    assert_eq!(pins.each_ref().map(read), [Ok(()), Ok(())]);
    // The server goes, and somebody else gets the blocks.
    drop(server);
    let reservation = store.reserve(&hash(2), 64 * 16).unwrap();
    region.write(reservation.pages(), 0, &[7; 1024]).unwrap();
    store.commit(reservation).unwrap();
    assert_eq!(pins.each_ref().map(read), [Err(HostError::Closed), Err(HostError::Closed)]);
}
