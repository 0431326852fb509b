//! Two processes: bytes, and what is seen when one of them is killed.
//!
//! The other process is this test binary again, running only `child` with a variable set.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod conformance;
mod workers;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use conformance::{Random, Side, snapshot};
use kv_core::{Desc, Op, PeerId, Plane, PlaneError, PlaneEvent, PlaneWait, Post, PostId, Time};
use kv_local::LocalPlane;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use workers::{PLACES, Place, worker};

const LEN: usize = 32 << 20;
const ROLE: &str = "KV_LOCAL_TEST_CHILD";
const MARK: &str = "metadata:";
const PEER: PeerId = PeerId(1);
const PATIENCE: Duration = Duration::from_secs(60);

/// A process with a plane of its own; killed with its handle.
struct Other {
    process: Child,
    metadata: Vec<u8>,
}

impl Other {
    fn start(place: Place, job: &str, ours: &LocalPlane) -> Other {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{place:?} {job} {}", to_hex(&ours.metadata().unwrap())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = lines.map(Result::unwrap).find(|line| line.contains(MARK)).unwrap();
        let hex = line.split(MARK).nth(1).unwrap();
        Other { process, metadata: from_hex(hex) }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let mut words = role.split(' ');
    let place = if words.next() == Some("Arena") { Place::Arena } else { Place::Adopted };
    let job = words.next().unwrap().to_owned();
    let parent = from_hex(words.next().unwrap());
    let mut side = worker(place, &[LEN]);
    for at in (0..LEN).step_by(8) {
        side.memory.write(0, at, &(at as u64).to_le_bytes());
    }
    // If the parent dies, so does this.
    std::thread::spawn(|| {
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        std::process::exit(0);
    });
    println!("{MARK}{}", to_hex(&side.plane.metadata().unwrap()));
    std::io::stdout().flush().unwrap();
    if job == "write" {
        side.plane.connect(PEER, &parent).unwrap();
    }
    let mut next = 0;
    let mut events = Vec::new();
    loop {
        side.plane.poll(Time::ZERO, &mut events);
        for event in events.drain(..) {
            match event {
                // Every frame comes back.
                PlaneEvent::Frame(frame) => {
                    let _ = side.plane.connect(PEER, &parent);
                    let _ = side.plane.send(PEER, frame);
                }
                PlaneEvent::Posted { .. } | PlaneEvent::PeerGone { .. } => {}
            }
        }
        if job == "write" {
            while side.plane.post(PEER, whole(next, Op::Write)).is_ok() && next % 8 != 7 {
                next += 1;
            }
            next += 1;
        }
        sleep(&side.plane);
    }
}

fn sleep(plane: &LocalPlane) {
    let (fds, most) = match plane.wait() {
        PlaneWait::Now => return,
        PlaneWait::Readable(fds) => (fds, Duration::from_secs(1)),
        PlaneWait::ReadableOrAfter(fds, after) => (fds, after),
    };
    // SAFETY: the plane keeps its descriptors open while it is borrowed.
    let fds: Vec<_> = fds.iter().map(|fd| unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
}

fn whole(id: u64, op: Op) -> Post {
    let desc = Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    Post { id: PostId(id), op, descs: vec![desc], notify: None }
}

fn until(
    side: &mut Side<LocalPlane>,
    events: &mut Vec<PlaneEvent>,
    what: &str,
    done: impl Fn(&[PlaneEvent]) -> bool,
) {
    let deadline = Instant::now() + PATIENCE;
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {} events", events.len());
        side.plane.poll(Time::ZERO, events);
        if !done(events) {
            sleep(&side.plane);
        }
    }
}

fn gone() -> PlaneEvent {
    PlaneEvent::PeerGone { peer: PEER, quiet_after: Duration::ZERO }
}

#[test]
fn pages_move_between_processes_in_both_directions() {
    let mut random = Random::new("pages_move_between_processes_in_both_directions");
    for (here, there) in PLACES {
        let mut side = worker(here, &[LEN]);
        let other = Other::start(there, "serve", &side.plane);
        side.plane.connect(PEER, &other.metadata).unwrap();
        let mut events = Vec::new();
        let mut run = |side: &mut Side<LocalPlane>, post: Post| {
            let id = post.id;
            side.plane.post(PEER, post).unwrap();
            events.clear();
            until(side, &mut events, "a post", |events| !events.is_empty());
            assert_eq!(events, [PlaneEvent::Posted { post: id, result: Ok(()) }], "{here:?} {there:?}");
        };
        run(&mut side, whole(1, Op::Read));
        let pattern: Vec<u8> = (0..LEN).step_by(8).flat_map(|at| (at as u64).to_le_bytes()).collect();
        assert!(snapshot(&side)[0] == pattern, "{here:?} {there:?}: READ");

        // Pages at random places, written there and read back to other places.
        let page = 64 << 10;
        let pages = LEN / page;
        let mut order: Vec<usize> = (0..pages).collect();
        for index in (1..pages).rev() {
            order.swap(index, random.below(index + 1));
        }
        let descs = |swap: bool| -> Vec<Desc> {
            let pairs = order.iter().enumerate();
            pairs
                .map(|(index, target)| Desc {
                    local_region: 0,
                    remote_region: 0,
                    local_offset: (if swap { *target } else { index } * page) as u64,
                    remote_offset: (if swap { index } else { *target } * page) as u64,
                    len: page as u64,
                })
                .collect()
        };
        run(&mut side, Post { id: PostId(2), op: Op::Write, descs: descs(false), notify: None });
        side.memory.write(0, 0, &vec![0; LEN]);
        run(&mut side, whole(3, Op::Read));
        let mut wanted = vec![0; LEN];
        for (index, target) in order.iter().enumerate() {
            wanted[target * page..(target + 1) * page]
                .copy_from_slice(&pattern[index * page..(index + 1) * page]);
        }
        assert!(snapshot(&side)[0] == wanted, "{here:?} {there:?}: WRITE");
        run(&mut side, Post { id: PostId(4), op: Op::Write, descs: descs(true), notify: None });

        side.plane.send(PEER, Bytes::from_static(b"echo")).unwrap();
        let mut events = Vec::new();
        until(&mut side, &mut events, "an echo", |events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::Frame(Bytes::from_static(b"echo"))]);
    }
}

#[test]
fn a_peer_that_is_killed_during_our_posts_ends_them_and_is_reported() {
    for (here, there) in PLACES {
        for op in [Op::Write, Op::Read] {
            let mut side = worker(here, &[LEN]);
            let mut other = Other::start(there, "serve", &side.plane);
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
            until(&mut side, &mut events, "the end", |events| events.contains(&gone()));
            assert!(died.elapsed() < Duration::from_secs(20));
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
            assert_eq!(ended, (0..=200).collect::<Vec<u64>>(), "{here:?} {there:?} {op:?}");
            assert_eq!(events.last(), Some(&gone()));
            assert!(failed > 0, "it was killed too late to show anything");
            assert_eq!(side.plane.send(PEER, Bytes::new()), Err(PlaneError::PeerGone));
        }
    }
}

#[test]
fn after_the_report_a_killed_peer_writes_no_more() {
    for place in [Place::Arena, Place::Adopted] {
        let mut side = worker(place, &[LEN]);
        let mut other = Other::start(Place::Arena, "write", &side.plane);
        let mut events = Vec::new();
        side.plane.connect(PEER, &other.metadata).unwrap();
        // It is in the middle of its writes once its pattern begins to show.
        let deadline = Instant::now() + PATIENCE;
        let mut word = [0; 8];
        while u64::from_le_bytes(word) != 8 {
            assert!(Instant::now() < deadline, "nothing is written");
            side.plane.poll(Time::ZERO, &mut events);
            side.memory.read(0, 8, &mut word);
        }
        other.process.kill().unwrap();
        until(&mut side, &mut events, "the end", |events| events.contains(&gone()));
        side.memory.write(0, 0, &vec![0xee; LEN]);
        other.process.wait().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(snapshot(&side)[0].iter().all(|byte| *byte == 0xee), "{place:?}: written after the report");
    }
}

#[test]
fn a_peer_that_died_before_the_connect_is_refused_at_once() {
    let mut side = worker(Place::Arena, &[4096]);
    let mut other = Other::start(Place::Arena, "serve", &side.plane);
    other.kill();
    assert_eq!(side.plane.connect(PEER, &other.metadata), Err(PlaneError::PeerGone));
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.trim().chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
