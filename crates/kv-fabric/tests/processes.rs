//! Peers in processes of their own that are stopped or killed, and what the receiver counts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::process::{self, Process};
use kv_conformance::{
    A_KNOWS_B, Harness, Job, Other, Pair, Side, boottime, connect, heard, pattern, rest, snapshot,
};
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Transport, TransportEvent, WayEnd};
use kv_fabric::FabricTransport;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use workers::{Kind, worker};

const LEN: usize = Kind::FAR_LEN;
/// How many readers are killed: `KV_KILLS`, or a few.
const KILLS: u64 = 8;

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[LEN]));
}

/// Workers with one device and with two.
const KINDS: [Kind; 2] = [Kind::Usual, Kind::Two];

fn other(kind: Kind, job: Job, peer: &Side<FabricTransport>) -> Process {
    kind.other(job, &peer.transport.metadata().unwrap())
}

/// Sends a signal, and waits until a process that is to stop has stopped.
fn signal(process: &Process, signal: Signal) {
    let pid = Pid::from_raw(process.child().id() as i32).unwrap();
    kill_process(pid, signal).unwrap();
    if signal == Signal::STOP {
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }
}

fn whole(id: u64, op: Op, len: usize, notify: Option<&'static [u8]>) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: notify.map(Bytes::from_static) }
}

/// Polls until a post has ended, and returns how.
fn end_of(here: &mut Side<FabricTransport>, id: u64) -> Result<(), kv_core::TransportError> {
    let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(120));
    loop {
        assert!(Instant::now() < deadline, "post {id} does not end");
        here.transport.poll(boottime(), &mut events);
        for event in events.drain(..) {
            if let TransportEvent::Posted { post: PostId(post), result } = event
                && post == id
            {
                return result;
            }
        }
        rest(&here.transport, Duration::from_millis(2));
    }
}

#[test]
fn killed_readers_leave_their_source_in_service() {
    KINDS.into_iter().for_each(kill_readers);
}

fn kill_readers(kind: Kind) {
    let kills = std::env::var("KV_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    let mut here = worker(kind.config(), &[LEN]);
    // The source is another process, because its crash would end this test, too.
    let mut source = other(kind, Job::Serve, &here);
    for round in 0..kills {
        let mut reader = kind.other(Job::Read, source.metadata());
        // Killed at one of many moments of its reads.
        std::thread::sleep(Duration::from_millis(20 + 7 * (round % 20)));
        assert!(reader.is_alive());
        reader.kill();
        assert!(source.is_alive(), "round {round}: the source died with its reader");
    }
    connect(&mut here.transport, PeerId(1), source.metadata()).unwrap();
    here.transport.post(PeerId(1), whole(1, Op::Read, LEN, None)).unwrap();
    assert_eq!(end_of(&mut here, 1), Ok(()));
    assert!(snapshot(&here)[0] == pattern(LEN));
    println!("{kind:?}: {kills} readers killed");
}

#[test]
fn the_receiver_counts_the_writes_of_posts_with_a_frame_and_no_others() {
    let len = 8 << 20;
    let mut pair = Pair::connected(&Kind::Usual, &[len]);
    assert!(pair.a.transport.counts_writes());
    pair.a.transport.post(A_KNOWS_B, whole(1, Op::Write, len, None)).unwrap();
    let ended = |id| TransportEvent::Posted { post: PostId(id), result: Ok(()) };
    pair.until("a post without a frame", |pair| pair.a_events.contains(&ended(1)));
    assert_eq!(pair.b.transport.stats().counted, 0);
    pair.a.memory.write(0, 0, &vec![7; len]);
    pair.a.transport.post(A_KNOWS_B, whole(2, Op::Write, len, Some(b"written"))).unwrap();
    pair.until("a post with a frame", |pair| heard(&pair.b_events, b"written"));
    assert!(snapshot(&pair.b)[0].iter().all(|byte| *byte == 7), "told before the bytes were there");
    // Slices of 640 KiB.
    assert_eq!(pair.b.transport.stats().counted, 13);
    pair.until("its end", |pair| pair.a_events.contains(&ended(2)));
    assert_eq!(pair.b.transport.stats().stray, 0);
}

#[test]
fn the_frame_of_a_cancelled_post_is_never_given_out() {
    KINDS.into_iter().for_each(cancel_posts);
}

fn cancel_posts(kind: Kind) {
    let len = 8 << 20;
    let mut pair = Pair::connected(&kind, &[len]);
    for id in 0..20 {
        pair.a.transport.post(A_KNOWS_B, whole(id, Op::Write, len, Some(b"void"))).unwrap();
    }
    for _ in 0..3 {
        pair.turn();
    }
    for id in 0..20 {
        pair.a.transport.cancel(PostId(id));
    }
    pair.until("all ends", |pair| pair.a_events.len() == 20);
    let good = |event: &&TransportEvent| matches!(event, TransportEvent::Posted { result: Ok(()), .. });
    let succeeded = pair.a_events.iter().filter(good).count();
    pair.a.transport.post(A_KNOWS_B, whole(100, Op::Write, len, Some(b"last"))).unwrap();
    pair.until("the last frame", |pair| heard(&pair.b_events, b"last"));
    assert_eq!(pair.b_events.len(), succeeded + 1, "{:?}", pair.b_events);
}

#[test]
fn a_stopped_peer_slows_nobody_and_goes_on_afterwards() {
    KINDS.into_iter().for_each(stop_one_of_two);
}

fn stop_one_of_two(kind: Kind) {
    let (stuck, well) = (PeerId(1), PeerId(2));
    let config = kind.config().with(|config| config.silence = Duration::from_secs(3600));
    let mut here = worker(config, &[LEN]);
    let (stopped, healthy) = (other(kind, Job::Serve, &here), other(kind, Job::Serve, &here));
    connect(&mut here.transport, stuck, stopped.metadata()).unwrap();
    connect(&mut here.transport, well, healthy.metadata()).unwrap();
    here.transport.post(stuck, whole(1, Op::Read, LEN, None)).unwrap();
    assert_eq!(end_of(&mut here, 1), Ok(()));
    signal(&stopped, Signal::STOP);
    for id in 10..14 {
        here.transport.post(stuck, whole(id, Op::Write, LEN, None)).unwrap();
    }
    for id in 20..30 {
        here.transport.post(well, whole(id, Op::Write, LEN, None)).unwrap();
        assert_eq!(end_of(&mut here, id), Ok(()));
    }
    here.transport.cancel(PostId(13));
    signal(&stopped, Signal::CONT);
    assert_eq!(end_of(&mut here, 12), Ok(()));
}

#[test]
fn a_silent_peer_is_lost_and_its_posts_end_once_it_moves_again() {
    KINDS.into_iter().for_each(fall_silent);
}

fn fall_silent(kind: Kind) {
    let config = kind.config().with(|config| config.silence = Duration::from_secs(1));
    let mut here = worker(config, &[LEN]);
    let peer = other(kind, Job::Serve, &here);
    connect(&mut here.transport, PeerId(1), peer.metadata()).unwrap();
    here.transport.post(PeerId(1), whole(1, Op::Write, LEN, None)).unwrap();
    assert_eq!(end_of(&mut here, 1), Ok(()));
    signal(&peer, Signal::STOP);
    here.transport.post(PeerId(1), whole(2, Op::Write, LEN, None)).unwrap();
    let (mut events, begun) = (Vec::new(), Instant::now());
    while here.transport.send(PeerId(1), Bytes::new()).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the silence is not noticed");
        here.transport.poll(boottime(), &mut events);
        events.retain(|event| !matches!(event, TransportEvent::Frame { .. }));
        rest(&here.transport, Duration::from_millis(5));
    }
    // A stopped process may go on: nothing has ended until then.
    assert_eq!(events, []);
    signal(&peer, Signal::CONT);
    while events.len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(120), "{events:?}");
        here.transport.poll(boottime(), &mut events);
        events.retain(|event| !matches!(event, TransportEvent::Frame { .. }));
        rest(&here.transport, Duration::from_millis(5));
    }
    assert!(matches!(events[0], TransportEvent::Posted { post: PostId(2), .. }), "{events:?}");
    let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
    assert_eq!(events[1], lost);
}

/// The variable with which the following test runs once more, where its packets are slow.
const SLOW: &str = "KV_FABRIC_TEST_SLOW";

/// The kernel goes on sending what a process has written when it is killed, over both devices, and one ends before the other.
#[test]
fn writers_with_two_devices_that_are_killed_leave_nothing_that_comes_late() {
    if std::env::var_os(SLOW).is_some() {
        return kill_writers();
    }
    let slow = "ip link set lo up && tc qdisc add dev lo root tbf rate 200mbit burst 256kb limit 16mb";
    let by = |line: String| {
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-c", &line, "sh"]);
        command
    };
    match by(slow.to_owned()).output() {
        Ok(tried) if tried.status.success() => {}
        tried => {
            println!(
                "SKIPPED on a slow network, which needs a network namespace and the program `tc`: {tried:?}"
            );
            return kill_writers();
        }
    }
    let test = "writers_with_two_devices_that_are_killed_leave_nothing_that_comes_late";
    let status = by(format!("{slow} && exec \"$@\""))
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(SLOW, "")
        .status()
        .unwrap();
    assert!(status.success(), "it has failed on the slow network");
}

fn kill_writers() {
    let kills = std::env::var("KV_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    for round in 0..kills {
        let mut here = worker(Kind::Two.config(), &[LEN]);
        let mut writer = other(Kind::Two, Job::Write, &here);
        connect(&mut here.transport, PeerId(1), writer.metadata()).unwrap();
        let (mut events, begun) = (Vec::new(), Instant::now());
        let mut word = [0; 8];
        while word == [0; 8] {
            assert!(begun.elapsed() < Duration::from_secs(60), "no byte comes");
            here.transport.poll(boottime(), &mut events);
            here.memory.read(0, 4 << 20, &mut word);
        }
        std::thread::sleep(Duration::from_millis(5 * (round % 8)));
        writer.kill();
        let dead = |event: &TransportEvent| {
            let quiet = WayEnd::Dead { quiet_after: Duration::ZERO };
            matches!(event, TransportEvent::PeerGone { end, .. } if *end == quiet)
        };
        while !events.iter().any(dead) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{events:?}");
            here.transport.poll(boottime(), &mut events);
        }
        here.memory.write(0, 0, &vec![0xee; LEN]);
        let quiet = Instant::now();
        while quiet.elapsed() < Duration::from_millis(500) {
            here.transport.poll(boottime(), &mut events);
        }
        assert!(
            snapshot(&here)[0].iter().all(|byte| *byte == 0xee),
            "round {round}: written after the peer's end"
        );
    }
    println!("{kills} writers killed");
}
