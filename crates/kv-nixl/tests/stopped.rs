//! A peer that is stopped, over TCP: what is on its way stays on its way, for as long as it takes.
//! Another transport than in the other tests, so another process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::time::{Duration, Instant};

use kv_conformance::process::{Process, child as work};
use kv_conformance::{Harness, Job, Other, Side, pattern, rest, snapshot};
use kv_core::{Desc, Op, PeerId, Plane, PlaneError, PlaneEvent, Post, PostId, Time};
use kv_nixl::{Nixl, NixlPlane};
use rustix::process::{Pid, Signal, kill_process};
use workers::Workers;

const PEER: PeerId = PeerId(1);
const LEN: usize = Workers::FAR_LEN;

fn tcp() -> Option<&'static Nixl> {
    // SAFETY: the only test of this process, besides the child's, which does nothing then; both set
    // the same value before UCX starts.
    unsafe { std::env::set_var("UCX_TLS", "tcp") };
    workers::nixl()
}

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    work(|_| workers::worker(tcp().unwrap(), &[LEN]));
}

fn signal(other: &Process, signal: Signal) {
    kill_process(Pid::from_child(other.child()), signal).unwrap();
}

fn sleep(plane: &NixlPlane) {
    rest(plane, Duration::from_millis(10));
}

fn until(
    side: &mut Side<NixlPlane>,
    events: &mut Vec<PlaneEvent>,
    what: &str,
    done: impl Fn(&[PlaneEvent]) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {} events, {:?}", events.len(), side.plane);
        side.plane.poll(Time::ZERO, events);
        sleep(&side.plane);
    }
}

#[test]
fn a_cancelled_post_is_not_over_before_its_bytes_are() {
    let Some(nixl) = tcp() else { return };
    let mut side = workers::worker(nixl, &[LEN]);
    let other = Process::start("default", Job::Serve, &side.plane.metadata().unwrap());
    side.plane.connect(PEER, other.metadata()).unwrap();
    let whole = |id| {
        let desc =
            Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
        Post { id: PostId(id), op: Op::Read, descs: vec![desc], notify: None }
    };
    let mut events = Vec::new();
    let begun = Instant::now();
    side.plane.post(PEER, whole(1)).unwrap();
    until(&mut side, &mut events, "a post", |events| !events.is_empty());
    println!("READ over TCP: {:.2} GB/s", LEN as f64 / begun.elapsed().as_secs_f64() / 1e9);
    events.clear();

    signal(&other, Signal::STOP);
    side.plane.post(PEER, whole(2)).unwrap();
    side.plane.post(PEER, whole(3)).unwrap();
    // A third one that never gets a request on its way: the window is full.
    side.plane.post(PEER, whole(4)).unwrap();
    for _ in 0..100 {
        side.plane.poll(Time::ZERO, &mut events);
    }
    for id in 2..=4 {
        side.plane.cancel(PostId(id));
    }
    side.plane.disconnect(PEER);
    let silence = Instant::now() + Duration::from_millis(700);
    while Instant::now() < silence {
        side.plane.poll(Time::ZERO, &mut events);
        sleep(&side.plane);
    }
    let cancelled = |id| PlaneEvent::Posted { post: PostId(id), result: Err(PlaneError::Cancelled) };
    assert!(events.iter().all(|event| *event != cancelled(2)), "the first is on its way: {events:?}");
    assert!(side.plane.stats().unquiet >= 1);
    assert!(!side.plane.shutdown(Duration::from_millis(50)), "it cannot be quiet yet");

    // Now it goes on; the bytes come, then the events, and after them nothing.
    signal(&other, Signal::CONT);
    until(&mut side, &mut events, "the ends", |events| (2..=4).all(|id| events.contains(&cancelled(id))));
    assert_eq!(events.len(), 3);
    assert_eq!(side.plane.stats().unquiet, 0);
    side.memory.write(0, 0, &vec![0xee; LEN]);
    let later = Instant::now() + Duration::from_millis(300);
    while Instant::now() < later {
        side.plane.poll(Time::ZERO, &mut events);
        sleep(&side.plane);
    }
    assert!(snapshot(&side)[0].iter().all(|byte| *byte == 0xee), "written after the event");
    assert!(side.plane.shutdown(Duration::from_secs(1)));
    let again = PeerId(2);
    side.plane.connect(again, other.metadata()).unwrap();
    let post = Post { id: PostId(9), ..whole(9) };
    events.clear();
    side.plane.post(again, post).unwrap();
    until(&mut side, &mut events, "a post", |events| !events.is_empty());
    assert!(snapshot(&side)[0] == pattern(LEN));
}
