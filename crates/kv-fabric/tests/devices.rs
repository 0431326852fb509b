//! Several devices: all of them carry bytes, and what does not fit together is not used.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::{A_KNOWS_B, Harness, Pair, Random, boottime, heard, snapshot};
use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportError, TransportEvent, TransportWait};
use kv_fabric::{DeviceStats, FabricDevice, FabricTransport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use workers::{Kind, worker};

const LEN: usize = 16 << 20;

fn post(id: u64, op: Op, (offset, len): (usize, usize), notify: Option<Vec<u8>>) -> Post {
    let (at, len) = (offset as u64, len as u64);
    let page = Descriptor { local_region: 0, remote_region: 0, local_offset: at, remote_offset: at, len };
    Post { id: PostId(id), op, descriptors: vec![page], notify: notify.map(Bytes::from) }
}

fn ended(id: u64) -> TransportEvent {
    TransportEvent::Posted { post: PostId(id), result: Ok(()) }
}

fn bytes_of(devices: &[DeviceStats]) -> Vec<u64> {
    devices.iter().map(|device| device.bytes).collect()
}

/// Posts of whole regions, until each device of the first worker has carried some in this direction. A device is used
/// once the peer has answered by it.
fn all_devices_carry(pair: &mut Pair<FabricTransport>, random: &mut Random, op: Op) {
    let before = bytes_of(&pair.a.transport.devices());
    let mut posted = 0;
    loop {
        pair.scramble(random);
        let id = pair.a.transport.stats().posts_completed;
        let notify = (op == Op::Write).then(|| format!("post {id}").into_bytes());
        pair.a.transport.post(A_KNOWS_B, post(id, op, (0, LEN), notify.clone())).unwrap();
        posted += LEN as u64;
        pair.until("the post's end", |pair| {
            let told = notify.as_ref().is_none_or(|notify| heard(&pair.b_events, notify));
            told && pair.a_events.contains(&ended(id))
        });
        assert!(snapshot(&pair.a)[0] == snapshot(&pair.b)[0], "{op:?} {id}");
        let moved: Vec<u64> =
            bytes_of(&pair.a.transport.devices()).iter().zip(&before).map(|(now, then)| now - then).collect();
        assert_eq!(moved.iter().sum::<u64>(), posted, "{op:?}: {moved:?}");
        if moved.iter().all(|bytes| *bytes > 0) {
            return println!("{op:?}: {moved:?} bytes");
        }
        assert!(posted < 100 * LEN as u64, "{op:?}: {moved:?}");
    }
}

#[test]
fn all_devices_carry_bytes_in_both_directions_whatever_their_numbers() {
    let mut random = Random::new("devices");
    for kind in [Kind::Two, Kind::Uneven, Kind::Three] {
        let mut pair = Pair::connected(&kind, &[LEN]);
        for op in [Op::Write, Op::Read, Op::Write] {
            all_devices_carry(&mut pair, &mut random, op);
        }
        let (here, there) = (pair.a.transport.devices(), pair.b.transport.devices());
        println!("{kind:?}: {here:?} {there:?}");
        // Each write was counted by the device where it has arrived.
        let counted: Vec<u64> = there.iter().map(|device| device.counted).collect();
        assert!(counted.iter().all(|writes| *writes > 0), "{counted:?}");
        assert_eq!(counted.iter().sum::<u64>(), pair.b.transport.stats().counted);
        assert_eq!(pair.b.transport.stats().stray, 0);
    }
}

#[test]
fn a_worker_with_one_device_is_served_by_all_devices_of_its_peer() {
    let mut random = Random::new("one and three");
    for (here, there) in [(Kind::Usual, Kind::Three), (Kind::Three, Kind::Usual)] {
        let sides = [here, there].map(|kind| worker(kind.config(), &[LEN]));
        let [a, b] = sides;
        let mut pair = Pair::new(a, b).introduce();
        all_devices_carry(&mut pair, &mut random, Op::Write);
        all_devices_carry(&mut pair, &mut random, Op::Read);
    }
}

#[test]
fn a_device_of_another_kind_of_network_is_left_out_and_the_others_carry_all() {
    let mut random = Random::new("families");
    let six = Kind::Two.config().with(|config| {
        config.devices[1] = FabricDevice::at("::1".parse().unwrap());
    });
    let mut pair = Pair::new(worker(Kind::Two.config(), &[LEN]), worker(six, &[LEN])).introduce();
    for (id, op) in (0..).zip([Op::Write, Op::Read, Op::Write]) {
        pair.scramble(&mut random);
        pair.a.transport.post(A_KNOWS_B, post(id, op, (0, LEN), None)).unwrap();
        pair.until("the post's end", |pair| pair.a_events.contains(&ended(id)));
        assert!(snapshot(&pair.a)[0] == snapshot(&pair.b)[0], "{op:?}");
    }
    assert_eq!(bytes_of(&pair.a.transport.devices()), [3 * LEN as u64, 0]);
    // Messages go over the first devices, which must be of one kind.
    let other = Kind::Six.worker(&[LEN]);
    let refused = pair.a.transport.connect(kv_core::PeerId(7), &other.transport.metadata().unwrap());
    assert!(matches!(refused, Err(TransportError::Metadata(_))), "{refused:?}");
}

/// Many more posts than a peer counts at once: frames go by one device, and most writes overtake them by another.
#[test]
fn thousands_of_small_posts_over_two_devices_are_each_told_once_and_not_before_their_bytes() {
    const POSTS: usize = 20_000;
    const PAGE: usize = 64;
    let mut random = Random::new("small posts");
    let mut pair = Pair::connected(&Kind::Two, &[POSTS * PAGE]);
    pair.scramble(&mut random);
    let bytes = snapshot(&pair.a).remove(0);
    for id in 0..POSTS {
        let notify = (id as u64).to_le_bytes().to_vec();
        pair.a
            .transport
            .post(A_KNOWS_B, post(id as u64, Op::Write, (id * PAGE, PAGE), Some(notify)))
            .unwrap();
    }
    let (mut told, mut cancelled) = (HashMap::new(), 0);
    pair.until("all posts end", |pair| {
        if random.below(50) == 0 {
            pair.a.transport.cancel(PostId(random.below(POSTS) as u64));
        }
        for event in pair.b_events.drain(..) {
            let TransportEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
            let id = u64::from_le_bytes(frame[..].try_into().unwrap());
            let mut page = [0; PAGE];
            pair.b.memory.read(0, id as usize * PAGE, &mut page);
            assert!(
                page == bytes[id as usize * PAGE..][..PAGE],
                "post {id} was told before its bytes were there"
            );
            *told.entry(id).or_insert(0) += 1;
        }
        pair.a_events.len() == POSTS
    });
    let results: HashMap<u64, bool> = (pair.a_events.iter())
        .map(|event| match event {
            TransportEvent::Posted { post, result: Ok(()) } => (post.0, true),
            TransportEvent::Posted { post, result: Err(TransportError::Cancelled) } => (post.0, false),
            other => panic!("{other:?}"),
        })
        .collect();
    cancelled += results.values().filter(|good| !**good).count();
    pair.a_events.clear();
    // What is left is on its way.
    let last = post(u64::MAX, Op::Write, (0, PAGE), Some(u64::MAX.to_le_bytes().to_vec()));
    pair.a.transport.post(A_KNOWS_B, last).unwrap();
    let good = POSTS - cancelled;
    pair.until("all frames", |pair| {
        for event in pair.b_events.drain(..) {
            let TransportEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
            *told.entry(u64::from_le_bytes(frame[..].try_into().unwrap())).or_insert(0) += 1;
        }
        told.len() == good + 1
    });
    for (id, good) in &results {
        assert_eq!(told.get(id).copied(), good.then_some(1), "post {id}");
    }
    let moved = bytes_of(&pair.a.transport.devices());
    println!("{cancelled} of {POSTS} cancelled; {moved:?} bytes");
    assert!(moved.iter().all(|bytes| *bytes > 0), "{moved:?}");
    pair.a.transport.poll(boottime(), &mut pair.a_events);
    assert_eq!(pair.b.transport.stats().stray, 0);
}

#[test]
fn a_way_serves_on_when_thousand_posts_were_cancelled_after_all_of_each_was_begun() {
    const POSTS: u64 = 1000;
    for kind in [Kind::Usual, Kind::Two] {
        let mut pair = Pair::connected(&kind, &[LEN]);
        let result_of = |events: &[TransportEvent], id: u64| {
            events.iter().find_map(|event| match event {
                TransportEvent::Posted { post, result } if post.0 == id => Some(result.is_ok()),
                _ => None,
            })
        };
        let mut good = 0;
        for id in 0..POSTS {
            let notify = Some(id.to_le_bytes().to_vec());
            pair.a.transport.post(A_KNOWS_B, post(id, Op::Write, (0, 4096), notify)).unwrap();
            pair.a.transport.poll(boottime(), &mut pair.a_events);
            pair.a.transport.cancel(PostId(id));
            pair.until("its end", |pair| result_of(&pair.a_events, id).is_some());
            good += usize::from(result_of(&pair.a_events, id) == Some(true));
            pair.a_events.clear();
        }
        println!("{kind:?}: {good} of {POSTS} were begun before they were cancelled");
        assert!(good > 300, "{good}");
        let last = post(POSTS, Op::Write, (0, 4096), Some(b"last".to_vec()));
        pair.a.transport.post(A_KNOWS_B, last).unwrap();
        pair.until("the last frame", |pair| heard(&pair.b_events, b"last"));
        assert_eq!(pair.b_events.len(), good + 1, "one frame for each post that has ended well");
    }
}

/// The second worker looks only when its descriptor says so.
#[test]
fn a_worker_that_sleeps_is_woken_by_what_arrives_on_any_device() {
    const POSTS: u64 = 200;
    let mut pair = Pair::connected(&Kind::Two, &[LEN]);
    let begun = Instant::now();
    // What it sleeps on. It asks only before it falls asleep.
    let mut asleep: Option<Vec<RawFd>> = None;
    let mut posted = 0;
    while pair.a_events.len() < POSTS as usize {
        let ended = pair.a_events.len() as u64;
        assert!(begun.elapsed() < Duration::from_secs(60), "{ended} posts of {POSTS}");
        // One after the other, each by the device that has carried less, and without a frame, which would go by the first.
        if posted == ended {
            pair.a.transport.post(A_KNOWS_B, post(posted, Op::Write, (0, 1 << 16), None)).unwrap();
            posted += 1;
        }
        pair.a.transport.poll(boottime(), &mut pair.a_events);
        if asleep.as_ref().is_some_and(|watched| !is_readable(watched)) {
            continue;
        }
        pair.b.transport.poll(boottime(), &mut pair.b_events);
        asleep = match pair.b.transport.wait() {
            TransportWait::Readable(watched) | TransportWait::ReadableOrAfter(watched, _) => Some(watched),
            TransportWait::Now => None,
        };
    }
    let slices: Vec<u64> = pair.a.transport.devices().iter().map(|device| device.slices).collect();
    assert!(slices.iter().all(|slices| *slices > POSTS / 4), "{slices:?}");
}

fn is_readable(watched: &[RawFd]) -> bool {
    // SAFETY: the transport, which is not dropped, keeps its descriptors open.
    let watched: Vec<_> = watched.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = watched.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    poll(&mut polls, Some(&Timespec::default())).unwrap() > 0
}
