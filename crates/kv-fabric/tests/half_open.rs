//! A connection that has ended at one end only, as when a link is cut and one kernel gives up: the other end must end
//! too, or libfabric refuses every new one. The test runs itself in a network namespace of its own, where it may take
//! the loopback down; where no such namespace is permitted, the test says so and shows nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kv_conformance::{A_KNOWS_B, Pair, Random, boottime, connect, rest, snapshot};
use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportEvent, WayEnd};
use kv_fabric::FabricTransport;
use workers::{Kind, worker};

const INSIDE: &str = "KV_FABRIC_OWN_NETWORK";
const LEN: usize = 16 << 20;
const SILENCE: Duration = Duration::from_secs(2);
/// The last connections were opened a second ago; then half of the silence passes, and somebody has to try again.
const LATEST: Duration = Duration::from_secs(3 * SILENCE.as_secs() + 5);

/// Starts a test of this program again, in a network namespace of its own, if that is permitted. False in there.
fn started_inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        loopback_is("up");
        // A kernel gives up what it has sent after a second or two; it has no such end for an idle connection.
        std::fs::write("/proc/sys/net/ipv4/tcp_retries2", "3").unwrap();
        return false;
    }
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "--"]);
        command
    };
    let may = unshare().args(["ip", "link", "set", "lo", "up"]).stderr(Stdio::null()).status();
    if !may.is_ok_and(|status| status.success()) {
        println!("NOT TESTED: half-open connections. This needs unshare and ip, and a network namespace");
        return true;
    }
    let status = unshare()
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .status();
    assert!(status.unwrap().success(), "{test} has failed in its namespace");
    true
}

fn loopback_is(state: &str) {
    assert!(Command::new("ip").args(["link", "set", "lo", state]).status().unwrap().success());
}

/// How many ends of connections over TCP are open in this namespace.
fn ends() -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    // 01 is ESTABLISHED.
    table.lines().filter(|line| line.split_whitespace().nth(3) == Some("01")).count()
}

fn post(id: u64, op: Op) -> Post {
    let len = LEN as u64;
    let all = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
    Post { id: PostId(id), op, descriptors: vec![all], notify: None }
}

/// The first worker writes into the second one's memory. Its kernel gives the connection up while the link is cut: in the
/// middle of a write if bytes are `moving`. Then the link is cut until the other kernel has missed the answers to its
/// keepalive; otherwise it is mended before, and the other kernel knows of nothing.
fn serves_again(moving: bool) {
    let mut random = Random::new("half open");
    let config = || Kind::Usual.config().with(|config| config.silence = SILENCE);
    let mut pair: Pair<FabricTransport> = Pair::new(worker(config(), &[LEN]), worker(config(), &[LEN]));
    let metadata = pair.b.transport.metadata().unwrap();
    // Only the first one connects, and greets: the second has nothing to say by itself.
    connect(&mut pair.a.transport, A_KNOWS_B, &metadata).unwrap();
    pair.scramble(&mut random);
    pair.a.transport.post(A_KNOWS_B, post(0, Op::Write)).unwrap();
    pair.until("a write", |pair| !pair.a_events.is_empty());
    // In use for long enough to have been noticed.
    let used = Instant::now();
    pair.until("time passes", |_| used.elapsed() > Duration::from_millis(1500));
    assert_eq!(ends(), 2, "one connection");
    if moving {
        pair.scramble(&mut random);
        let notify = Some("never told".into());
        pair.a.transport.post(A_KNOWS_B, Post { notify, ..post(9, Op::Write) }).unwrap();
        let come = 1 + random.below(LEN / 2);
        let same = |pair: &Pair<FabricTransport>| snapshot(&pair.a)[0][come] == snapshot(&pair.b)[0][come];
        pair.until("a part of the write", |pair| same(pair));
    }
    loopback_is("down");
    let lost = TransportEvent::PeerGone { peer: A_KNOWS_B, end: WayEnd::Lost };
    let left = if moving { 0 } else { 1 };
    pair.until("the loss, and the end of the connection", |pair| {
        pair.a_events.contains(&lost) && ends() <= left
    });
    println!("{} of two ends left", ends());
    assert_eq!(pair.b_events, [], "nothing has arrived in whole");
    loopback_is("up");
    let mended = Instant::now();

    // As the protocol does it: again and again.
    let mut attempts = 0;
    let done = |events: &[TransportEvent]| {
        events.contains(&TransportEvent::Posted { post: PostId(1), result: Ok(()) })
    };
    pair.scramble(&mut random);
    while !done(&pair.a_events) {
        assert!(mended.elapsed() < LATEST, "after {attempts} attempts: {:?}", pair.a_events);
        if attempts == 0 || pair.a_events.contains(&lost) {
            attempts += 1;
            pair.a_events.clear();
            connect(&mut pair.a.transport, A_KNOWS_B, &metadata).unwrap();
            pair.a.transport.post(A_KNOWS_B, post(1, Op::Write)).unwrap();
        }
        pair.a.transport.poll(boottime(), &mut pair.a_events);
        pair.b.transport.poll(boottime(), &mut pair.b_events);
        rest(&pair.a.transport, Duration::from_micros(100));
    }
    assert!(snapshot(&pair.a) == snapshot(&pair.b));
    println!("served after {:?} and {attempts} attempts", mended.elapsed());
}

#[test]
fn a_peer_is_served_again_after_one_end_of_an_idle_connection_has_ended() {
    if !started_inside("a_peer_is_served_again_after_one_end_of_an_idle_connection_has_ended") {
        serves_again(false);
    }
}

#[test]
fn a_peer_is_served_again_after_both_ends_have_ended_in_the_middle_of_a_write() {
    if !started_inside("a_peer_is_served_again_after_both_ends_have_ended_in_the_middle_of_a_write") {
        serves_again(true);
    }
}
