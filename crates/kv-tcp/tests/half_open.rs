//! A host that vanishes without a word, as one does that loses its power or its cable: connections stay half open,
//! and only the time of silence ends them. The test runs itself in a network namespace of its own, where it may
//! take the loopback down; where no such namespace is permitted, the test says so and shows nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kv_conformance::{boottime, connect};
use kv_core::{Op, PeerId, Transport, TransportError, TransportEvent, WayEnd};
use kv_tcp::TcpConfig;
use workers::{ended, loopback, post, until, worker};

const INSIDE: &str = "KV_TCP_OWN_NETWORK";
const PEER: PeerId = PeerId(1);
const LEN: usize = 32 << 20;
const SILENCE: Duration = Duration::from_secs(2);
/// The kernel's timers for what is not acknowledged run at growing intervals.
const LATEST: Duration = Duration::from_secs(3 * SILENCE.as_secs() + 2);

/// Starts the test of this program again, in a network namespace of its own, if that is permitted.
fn again_inside() {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "--"]);
        command
    };
    let may = unshare().args(["ip", "link", "set", "lo", "up"]).stderr(Stdio::null()).status();
    if !may.is_ok_and(|status| status.success()) {
        println!("NOT TESTED: half-open connections. This needs unshare and ip, and a network namespace");
        return;
    }
    let status = unshare()
        .arg(std::env::current_exe().unwrap())
        .args(["--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .status();
    assert!(status.unwrap().success());
}

fn loopback_is(state: &str) {
    assert!(Command::new("ip").args(["link", "set", "lo", state]).status().unwrap().success());
}

#[test]
fn a_host_that_vanishes_is_lost_after_its_silence_whether_pages_are_under_way_or_none() {
    if std::env::var_os(INSIDE).is_none() {
        again_inside();
        return;
    }
    loopback_is("up");
    let config = TcpConfig::new(loopback()).with(|config| config.silence = SILENCE);
    let mut sides: Vec<_> = (0..4).map(|_| worker(config.clone(), &[LEN])).collect();
    let all: Vec<_> = sides.iter().map(|side| side.transport.metadata().unwrap()).collect();
    // One worker has posts under way, and the other has none.
    for (from, to) in [(2, 0), (3, 1)] {
        connect(&mut sides[from].transport, PEER, &all[to]).unwrap();
        sides[from].transport.post(PEER, post(1, Op::Write, LEN)).unwrap();
    }
    let mut events = Vec::new();
    until("two writes", &mut sides.iter_mut().collect::<Vec<_>>(), &mut events, |events| {
        ended(&events[2], 1).is_some() && ended(&events[3], 1).is_some()
    });
    for id in 2..6 {
        sides[2].transport.post(PEER, post(id, if id % 2 == 0 { Op::Write } else { Op::Read }, LEN)).unwrap();
    }
    // Some of their bytes are on their way.
    for _ in 0..3 {
        sides.iter_mut().for_each(|side| side.transport.poll(boottime(), &mut Vec::new()));
    }
    loopback_is("down");
    let begun = Instant::now();
    let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
    let mut took = [None; 2];
    until("the end of both ways", &mut sides.iter_mut().collect::<Vec<_>>(), &mut events, |events| {
        for (took, events) in took.iter_mut().zip(&events[2..]) {
            if took.is_none() && events.contains(&lost) {
                *took = Some(begun.elapsed());
            }
        }
        std::thread::sleep(Duration::from_millis(1));
        took.iter().all(Option::is_some)
    });
    println!("with posts under way, and with none: {took:?}");
    assert!(took.iter().all(|took| took.is_some_and(|took| took <= LATEST)), "{took:?}");
    for id in 2..6 {
        assert_eq!(ended(&events[2], id), Some(Err(TransportError::PeerGone)), "{id}");
    }

    loopback_is("up");
    for (from, to) in [(2, 0), (3, 1)] {
        connect(&mut sides[from].transport, PEER, &all[to]).unwrap();
        sides[from].transport.post(PEER, post(9, Op::Read, LEN)).unwrap();
    }
    until("two reads", &mut sides.iter_mut().collect::<Vec<_>>(), &mut events, |events| {
        ended(&events[2], 9).is_some() && ended(&events[3], 9).is_some()
    });
    assert!([2, 3].iter().all(|side| ended(&events[*side], 9) == Some(Ok(()))));
}
