//! Peers in processes of their own that are stopped or killed, beside peers that are not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::time::{Duration, Instant};

use kv_conformance::process::{self, Process};
use kv_conformance::{Harness, Job, Other, Side, boottime, connect, pattern, rest, snapshot};
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Transport, TransportError, TransportEvent, WayEnd};
use kv_tcp::TcpTransport;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use workers::{Kind, worker};

const LEN: usize = Kind::FAR_LEN;

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[LEN]));
}

fn other(job: Job, peer: &mut Side<TcpTransport>) -> Process {
    Process::start("Usual", job, &peer.transport.metadata().unwrap())
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

fn whole(id: u64, op: Op) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None }
}

/// Polls until all these posts have ended with `result`; no other post may end.
fn all_end(here: &mut Side<TcpTransport>, posts: std::ops::Range<u64>, result: Result<(), TransportError>) {
    let (mut events, mut left) = (Vec::new(), posts.clone().collect::<Vec<u64>>());
    let deadline = Instant::now() + Duration::from_secs(120);
    while !left.is_empty() {
        assert!(Instant::now() < deadline, "{left:?}");
        here.transport.poll(boottime(), &mut events);
        for event in events.drain(..) {
            let TransportEvent::Posted { post, result: got } = event else { panic!("{event:?}") };
            let at = left.iter().position(|id| *id == post.0);
            left.remove(at.unwrap_or_else(|| panic!("{post} has ended: {got:?}")));
            assert_eq!(got, result, "{post}");
        }
        rest(&here.transport, Duration::from_millis(2));
    }
}

#[test]
fn a_stopped_peer_slows_nobody_and_its_cancelled_posts_end_without_it() {
    let (stuck, well) = (PeerId(1), PeerId(2));
    // On a busy machine the peer may be stopped for longer than the usual time of silence.
    let config = Kind::Usual.config().with(|config| config.silence = Duration::from_secs(3600));
    let mut here = worker(config, &[LEN]);
    let (stopped, healthy) = (other(Job::Serve, &mut here), other(Job::Serve, &mut here));
    connect(&mut here.transport, stuck, stopped.metadata()).unwrap();
    connect(&mut here.transport, well, healthy.metadata()).unwrap();
    here.transport.post(stuck, whole(1, Op::Read)).unwrap();
    all_end(&mut here, 1..2, Ok(()));
    assert!(snapshot(&here)[0] == pattern(LEN));

    signal(&stopped, Signal::STOP);
    for id in 10..18 {
        here.transport.post(stuck, whole(id, if id % 2 == 0 { Op::Write } else { Op::Read })).unwrap();
    }
    // All of these end, and none of those to the stopped peer.
    for id in 20..40 {
        here.transport.post(well, whole(id, Op::Write)).unwrap();
    }
    all_end(&mut here, 20..40, Ok(()));
    for id in 14..18 {
        here.transport.cancel(PostId(id));
    }
    all_end(&mut here, 14..18, Err(TransportError::Cancelled));
    signal(&stopped, Signal::CONT);
    // The others have only waited.
    all_end(&mut here, 10..14, Ok(()));
    here.memory.write(0, 0, &vec![0; LEN]);
    here.transport.post(stuck, whole(50, Op::Read)).unwrap();
    all_end(&mut here, 50..51, Ok(()));
    assert!(snapshot(&here)[0] == pattern(LEN));
}

#[test]
fn a_stopped_peer_is_lost_after_the_time_of_silence_and_the_peer_beside_it_is_not() {
    let (stuck, well) = (PeerId(1), PeerId(2));
    let silence = Duration::from_secs(2);
    let mut here = worker(Kind::Usual.config().with(|config| config.silence = silence), &[LEN]);
    let (stopped, healthy) = (other(Job::Serve, &mut here), other(Job::Serve, &mut here));
    connect(&mut here.transport, stuck, stopped.metadata()).unwrap();
    connect(&mut here.transport, well, healthy.metadata()).unwrap();
    here.transport.post(stuck, whole(1, Op::Read)).unwrap();
    all_end(&mut here, 1..2, Ok(()));
    signal(&stopped, Signal::STOP);
    let begun = Instant::now();
    // Frames fill the buffers of both kernels; pages would stop at their window before.
    let frame = bytes::Bytes::from(vec![3; 256 << 10]);
    here.transport.post(stuck, whole(2, Op::Write)).unwrap();
    let (mut events, mut ends, mut writes) = (Vec::new(), Vec::new(), 0);
    while ends.len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{ends:?}");
        let _ = here.transport.send(stuck, frame.clone());
        if here.transport.post(well, whole(1000 + writes, Op::Write)).is_ok() {
            writes += 1;
        }
        here.transport.poll(boottime(), &mut events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { post, result } if post.0 >= 1000 => assert_eq!(result, Ok(())),
                event => ends.push(event),
            }
        }
    }
    let took = begun.elapsed();
    println!("lost after {took:?}");
    let lost = TransportEvent::PeerGone { peer: stuck, end: WayEnd::Lost };
    let failed = TransportEvent::Posted { post: PostId(2), result: Err(TransportError::PeerGone) };
    assert_eq!(ends, [failed, lost]);
    assert!(took >= silence && took < 10 * silence, "{took:?}");
    // A peer that goes on is connected again.
    signal(&stopped, Signal::CONT);
    let deadline = Instant::now() + Duration::from_secs(60);
    while connect(&mut here.transport, stuck, stopped.metadata()).is_err() {
        assert!(Instant::now() < deadline);
    }
    here.transport.post(stuck, whole(3, Op::Read)).unwrap();
    events.clear();
    while !events.iter().any(|event| matches!(event, TransportEvent::Posted { post: PostId(3), .. })) {
        assert!(Instant::now() < deadline, "{events:?}");
        here.transport.poll(boottime(), &mut events);
    }
    assert!(snapshot(&here)[0] == pattern(LEN));
}

#[test]
fn a_killed_peer_is_reported_dead_without_a_time_of_silence() {
    let config = Kind::Usual.config().with(|config| config.silence = Duration::from_secs(3600));
    let mut here = worker(config, &[LEN]);
    for round in 0..5 {
        let mut peer = other(Job::Serve, &mut here);
        connect(&mut here.transport, PeerId(1), peer.metadata()).unwrap();
        here.transport.post(PeerId(1), whole(round, Op::Read)).unwrap();
        all_end(&mut here, round..round + 1, Ok(()));
        let begun = Instant::now();
        peer.kill();
        let mut events = Vec::new();
        while events.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the death goes unnoticed");
            here.transport.poll(boottime(), &mut events);
            rest(&here.transport, Duration::from_millis(100));
        }
        let dead = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PeerId(1), end: dead }]);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_hundred_killed_readers_leave_their_source_in_service_and_nothing_behind() {
    let mut source = worker(Kind::Usual.config(), &[LEN]);
    source.memory.write(0, 0, &pattern(LEN));
    source.transport.metadata().unwrap();
    let (before, mut events) = (descriptors(), Vec::new());
    for round in 0..100_u64 {
        let accepted = source.transport.stats().accepted;
        let mut reader = other(Job::Read, &mut source);
        // Killed after its connections were accepted, at one of many moments of its reads.
        let mut turns = 0;
        while source.transport.stats().accepted < accepted + 2 || turns < 3 * round {
            source.transport.poll(boottime(), &mut events);
            turns += 1;
            rest(&source.transport, Duration::from_millis(1));
        }
        reader.kill();
        assert!(events.is_empty(), "{events:?}");
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while descriptors() > before {
        assert!(Instant::now() < deadline, "{} descriptors of {before}", descriptors());
        source.transport.poll(boottime(), &mut events);
    }
    let mut reader = worker(Kind::Usual.config(), &[LEN]);
    connect(&mut reader.transport, PeerId(1), &source.transport.metadata().unwrap()).unwrap();
    reader.transport.post(PeerId(1), whole(1, Op::Read)).unwrap();
    let mut read = Vec::new();
    while read.is_empty() {
        source.transport.poll(boottime(), &mut events);
        reader.transport.poll(boottime(), &mut read);
    }
    assert_eq!(read, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    assert!(snapshot(&reader)[0] == pattern(LEN));
}
