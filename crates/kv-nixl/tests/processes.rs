//! Two processes: bytes, and what is seen when one of them is killed or comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../../kv-local/tests/conformance/mod.rs"]
mod conformance;
mod workers;

use std::time::{Duration, Instant};

use bytes::Bytes;
use conformance::{Random, Side, snapshot};
use kv_core::{Desc, Op, PeerId, Plane, PlaneError, PlaneEvent, Post, PostId, Time};
use kv_nixl::{Nixl, NixlPlane};
use workers::nixl;
use workers::other::{LEN, Other, PEER, pattern, until};

fn worker(nixl: &Nixl) -> Side<NixlPlane> {
    workers::worker(nixl, &[LEN])
}

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    let mut next = 0;
    workers::other::child(nixl(), |job, side, parent, events| {
        for event in events {
            // Every frame comes back.
            if let PlaneEvent::Frame(frame) = event {
                let _ = side.plane.connect(PEER, parent);
                let _ = side.plane.send(PEER, frame);
            }
        }
        if job == "write" {
            side.plane.connect(PEER, parent).unwrap();
            while side.plane.post(PEER, whole(next, Op::Write)).is_ok() && next % 8 != 7 {
                next += 1;
            }
            next += 1;
        }
    });
}

fn whole(id: u64, op: Op) -> Post {
    let desc = Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    Post { id: PostId(id), op, descs: vec![desc], notify: None }
}

fn gone(peer: PeerId) -> PlaneEvent {
    PlaneEvent::PeerGone { peer, quiet_after: Duration::ZERO }
}

#[test]
fn pages_move_between_processes_in_both_directions() {
    let Some(nixl) = nixl() else { return };
    let mut random = Random::new("pages_move_between_processes_in_both_directions");
    let mut side = worker(nixl);
    let other = Other::start("serve", &side.plane);
    side.plane.connect(PEER, &other.metadata).unwrap();
    let run = |side: &mut Side<NixlPlane>, post: Post| {
        let (id, begun) = (post.id, Instant::now());
        let what = format!("{} {:?}", post.descs.len(), post.op);
        side.plane.post(PEER, post).unwrap();
        let mut events = Vec::new();
        until(side, &mut events, "a post", |events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::Posted { post: id, result: Ok(()) }]);
        let took = begun.elapsed();
        println!("{what}: {took:?}, {:.2} GB/s", LEN as f64 / took.as_secs_f64() / 1e9);
    };
    run(&mut side, whole(1, Op::Read));
    let pattern = pattern();
    assert!(snapshot(&side)[0] == pattern, "READ");

    // Pages at random places, written there and read back to other places.
    let page = 64 << 10;
    let pages = LEN / page;
    let mut order: Vec<usize> = (0..pages).collect();
    for index in (1..pages).rev() {
        order.swap(index, random.below(index + 1));
    }
    let descs: Vec<Desc> = order
        .iter()
        .enumerate()
        .map(|(index, target)| Desc {
            local_region: 0,
            remote_region: 0,
            local_offset: (index * page) as u64,
            remote_offset: (target * page) as u64,
            len: page as u64,
        })
        .collect();
    for round in 0..3 {
        let post = Post { id: PostId(10 + round), op: Op::Write, descs: descs.clone(), notify: None };
        run(&mut side, post);
    }
    side.memory.write(0, 0, &vec![0; LEN]);
    run(&mut side, whole(3, Op::Read));
    let mut wanted = vec![0; LEN];
    for (index, target) in order.iter().enumerate() {
        wanted[target * page..][..page].copy_from_slice(&pattern[index * page..][..page]);
    }
    assert!(snapshot(&side)[0] == wanted, "WRITE");

    let mut events = Vec::new();
    for round in 0..5 {
        let begun = Instant::now();
        side.plane.send(PEER, Bytes::from_static(b"echo")).unwrap();
        events.clear();
        until(&mut side, &mut events, "an echo", |events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::Frame(Bytes::from_static(b"echo"))]);
        println!("echo {round}: {:?}", begun.elapsed());
    }
    println!("{:?}", side.plane.stats());
    assert!(side.plane.stats().longest_poll < Duration::from_millis(500));
}

#[test]
fn a_peer_that_is_killed_during_our_posts_ends_them_and_is_reported() {
    let Some(nixl) = nixl() else { return };
    for op in [Op::Write, Op::Read] {
        let mut side = worker(nixl);
        let mut other = Other::start("serve", &side.plane);
        side.plane.connect(PEER, &other.metadata).unwrap();
        let mut events = Vec::new();
        side.plane.post(PEER, whole(0, op)).unwrap();
        until(&mut side, &mut events, "the first post", |events| !events.is_empty());
        for id in 1..=200 {
            side.plane.post(PEER, whole(id, op)).unwrap();
        }
        for _ in 0..5 {
            side.plane.poll(Time::ZERO, &mut events);
        }
        other.kill();
        let died = Instant::now();
        until(&mut side, &mut events, "the end", |events| events.contains(&gone(PEER)));
        println!("{op:?}: reported {:?} after the death", died.elapsed());
        let mut failed = 0;
        let mut ended: Vec<u64> = Vec::new();
        for event in &events {
            match event {
                PlaneEvent::Posted { post, result } => {
                    ended.push(post.0);
                    failed += u32::from(*result == Err(PlaneError::PeerGone));
                    assert!(matches!(result, Ok(()) | Err(PlaneError::PeerGone)), "{result:?}");
                }
                PlaneEvent::PeerGone { .. } => {}
                PlaneEvent::Frame(_) => panic!("a frame"),
            }
        }
        ended.sort_unstable();
        assert_eq!(ended, (0..=200).collect::<Vec<u64>>(), "{op:?}");
        assert_eq!(events.last(), Some(&gone(PEER)));
        assert!(failed > 0, "it was killed too late to show anything");
        assert_eq!(side.plane.send(PEER, Bytes::new()), Err(PlaneError::PeerGone));
    }
}

#[test]
fn an_idle_peer_that_is_killed_is_reported() {
    let Some(nixl) = nixl() else { return };
    let mut side = worker(nixl);
    let mut other = Other::start("serve", &side.plane);
    side.plane.connect(PEER, &other.metadata).unwrap();
    other.kill();
    let mut events = Vec::new();
    until(&mut side, &mut events, "the end", |events| !events.is_empty());
    assert_eq!(events, [gone(PEER)]);
}

#[test]
fn after_the_report_a_killed_peer_writes_no_more() {
    let Some(nixl) = nixl() else { return };
    let mut side = worker(nixl);
    let mut other = Other::start("write", &side.plane);
    let mut events = Vec::new();
    side.plane.connect(PEER, &other.metadata).unwrap();
    // It is in the middle of its writes once its pattern begins to show.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut word = [0; 8];
    while u64::from_le_bytes(word) != 8 {
        assert!(Instant::now() < deadline, "nothing is written");
        side.plane.poll(Time::ZERO, &mut events);
        side.memory.read(0, 8, &mut word);
    }
    other.kill_soon();
    until(&mut side, &mut events, "the end", |events| events.contains(&gone(PEER)));
    side.memory.write(0, 0, &vec![0xee; LEN]);
    std::thread::sleep(Duration::from_millis(100));
    assert!(snapshot(&side)[0].iter().all(|byte| *byte == 0xee), "written after the report");
}

#[test]
fn a_peer_that_died_before_the_connect_is_refused_at_once() {
    let Some(nixl) = nixl() else { return };
    let mut side = worker(nixl);
    let mut other = Other::start("serve", &side.plane);
    other.kill();
    assert_eq!(side.plane.connect(PEER, &other.metadata), Err(PlaneError::PeerGone));
}

#[test]
fn a_peer_that_comes_back_is_another_and_serves() {
    let Some(nixl) = nixl() else { return };
    let mut side = worker(nixl);
    for life in 0..3 {
        let peer = PeerId(100 + life);
        let mut other = Other::start("serve", &side.plane);
        side.plane.connect(peer, &other.metadata).unwrap();
        side.memory.write(0, 0, &vec![0; LEN]);
        let mut events = Vec::new();
        side.plane.post(peer, whole(life, Op::Read)).unwrap();
        until(&mut side, &mut events, "a post", |events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::Posted { post: PostId(life), result: Ok(()) }]);
        assert!(snapshot(&side)[0] == pattern());
        side.plane.send(peer, Bytes::from_static(b"echo")).unwrap();
        until(&mut side, &mut events, "an echo", |events| events.len() == 2);
        other.kill();
        until(&mut side, &mut events, "the end", |events| events.contains(&gone(peer)));
    }
}
