//! What every plane must do, whatever moves its bytes. Each check makes its own pair of workers.
//!
//! Knows `kv_core` only, so that it can run against any plane: give it a function that makes a pair
//! of [`Side`]s of planes that have not met.

#![allow(dead_code)] // Each test binary uses a part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use kv_core::{Desc, MAX_FRAME, Op, PeerId, Plane, PlaneError, PlaneEvent, PlaneWait, Post, PostId, Time};

/// The memory of one worker, as its server sees it.
pub trait Regions {
    /// Copies out of a region.
    fn read(&self, region: usize, offset: usize, out: &mut [u8]);
    /// Copies into a region.
    fn write(&self, region: usize, offset: usize, bytes: &[u8]);
}

/// A plane and the regions that are registered with it.
pub struct Side<P> {
    /// The plane.
    pub plane: P,
    /// Length of each region.
    pub lens: Vec<usize>,
    /// Its memory.
    pub memory: Box<dyn Regions>,
}

/// Lengths that make every check meaningful: several regions, one of them of an odd length.
pub const LENS: [usize; 3] = [1 << 20, 64 << 10, (256 << 10) + 13];

const PATIENCE: Duration = Duration::from_secs(60);
const A_KNOWS_B: PeerId = PeerId(11);
const B_KNOWS_A: PeerId = PeerId(22);

/// Runs all checks.
pub fn all<P: Plane>(mut make: impl FnMut() -> (Side<P>, Side<P>)) {
    posts_move_exactly_the_described_bytes(&mut make);
    descriptors_out_of_bounds_are_refused_and_touch_nothing(&mut make);
    the_notify_frame_comes_after_the_bytes(&mut make);
    frames_arrive_whole_in_both_directions(&mut make);
    the_first_frame_arrives_before_the_receiver_connects(&mut make);
    both_sides_may_connect_at_once(&mut make);
    every_post_ends_exactly_once_also_when_cancelled(&mut make);
    disconnect_ends_the_posts(&mut make);
    strangers_are_refused(&mut make);
}

/// A small generator, so that a seed replays.
pub struct Random(u64);

impl Random {
    /// Prints its seed, which the variable `SEED` overrides.
    pub fn new(what: &str) -> Random {
        let fresh = || {
            let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            clock.map_or(1, |time| time.as_nanos() as u64)
        };
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: SEED={seed}");
        Random(seed.wrapping_mul(2) | 1)
    }

    /// 0 to `below` - 1.
    pub fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % below as u64) as usize
    }

    /// Random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

/// Two workers and what was reported to each.
pub struct Pair<P> {
    /// One.
    pub a: Side<P>,
    /// The other.
    pub b: Side<P>,
    /// Events of each, oldest first.
    pub a_events: Vec<PlaneEvent>,
    /// Events of each, oldest first.
    pub b_events: Vec<PlaneEvent>,
    start: Instant,
}

impl<P: Plane> Pair<P> {
    /// A pair whose sides do not know each other.
    pub fn strangers(make: &mut impl FnMut() -> (Side<P>, Side<P>)) -> Pair<P> {
        let (a, b) = make();
        Pair { a, b, a_events: Vec::new(), b_events: Vec::new(), start: Instant::now() }
    }

    /// A pair of which each has connected to the other, one after the other.
    pub fn connected(make: &mut impl FnMut() -> (Side<P>, Side<P>)) -> Pair<P> {
        let mut pair = Pair::strangers(make);
        let metadata = pair.b.plane.metadata().unwrap();
        pair.a.plane.connect(A_KNOWS_B, &metadata).unwrap();
        pair.send_until_heard(b"hello");
        let metadata = pair.a.plane.metadata().unwrap();
        pair.b.plane.connect(B_KNOWS_A, &metadata).unwrap();
        pair.a_events.clear();
        pair.b_events.clear();
        pair
    }

    /// Polls both sides once.
    pub fn turn(&mut self) {
        let now = Time::from_nanos(self.start.elapsed().as_nanos() as u64);
        self.a.plane.poll(now, &mut self.a_events);
        self.b.plane.poll(now, &mut self.b_events);
    }

    /// Polls both sides until `done` says so.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Pair<P>) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
            self.turn();
        }
    }

    fn send_until_heard(&mut self, frame: &'static [u8]) {
        let mut next = Instant::now();
        self.until("a frame is heard", |pair| {
            if Instant::now() >= next {
                let _ = pair.a.plane.send(A_KNOWS_B, Bytes::from_static(frame));
                next = Instant::now() + Duration::from_millis(200);
            }
            pair.b_events.contains(&PlaneEvent::Frame(Bytes::from_static(frame)))
        });
    }

    fn await_post(&mut self, post: PostId) -> Result<(), PlaneError> {
        let find = |events: &[PlaneEvent]| {
            events.iter().find_map(|event| match event {
                PlaneEvent::Posted { post: id, result } if *id == post => Some(result.clone()),
                _ => None,
            })
        };
        self.until("a post ends", |pair| find(&pair.a_events).is_some());
        find(&self.a_events).unwrap()
    }
}

/// All bytes of a side.
pub fn snapshot<P>(side: &Side<P>) -> Vec<Vec<u8>> {
    let regions = side.lens.iter().enumerate();
    regions
        .map(|(region, len)| {
            let mut bytes = vec![0; *len];
            side.memory.read(region, 0, &mut bytes);
            bytes
        })
        .collect()
}

fn scramble<P>(side: &Side<P>, random: &mut Random) {
    for (region, len) in side.lens.iter().enumerate() {
        side.memory.write(region, 0, &random.bytes(*len));
    }
}

/// Descriptors whose targets do not overlap: the order of copies within a post is not promised.
fn random_descs(random: &mut Random, lens: &[usize], op: Op) -> Vec<Desc> {
    let count = 1 + random.below(60);
    let mut taken: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    let mut descs = Vec::new();
    while descs.len() < count {
        let (target, source) = (random.below(lens.len()), random.below(lens.len()));
        let longest = lens[target].min(lens[source]);
        let most = if random.below(4) == 0 { 100_000 } else { 3000 };
        let len = 1 + random.below(longest.min(most));
        let target_at = random.below(lens[target] - len + 1);
        let source_at = random.below(lens[source] - len + 1);
        let ranges = taken.entry(target).or_default();
        if ranges.iter().any(|(at, size)| target_at < at + size && *at < target_at + len) {
            if random.below(20) == 0 {
                break;
            }
            continue;
        }
        ranges.push((target_at, len));
        let (local, remote) = match op {
            Op::Write => ((source, source_at), (target, target_at)),
            Op::Read => ((target, target_at), (source, source_at)),
        };
        descs.push(Desc {
            local_region: local.0 as u32,
            local_offset: local.1 as u64,
            remote_region: remote.0 as u32,
            remote_offset: remote.1 as u64,
            len: len as u64,
        });
    }
    assert!(!descs.is_empty());
    descs
}

/// What the two memories must be after a post of `a`.
fn apply(op: Op, descs: &[Desc], ours: &mut [Vec<u8>], theirs: &mut [Vec<u8>]) {
    for desc in descs {
        let here = desc.local_offset as usize..(desc.local_offset + desc.len) as usize;
        let there = desc.remote_offset as usize..(desc.remote_offset + desc.len) as usize;
        let (local, remote) = (desc.local_region as usize, desc.remote_region as usize);
        match op {
            Op::Write => theirs[remote][there].copy_from_slice(&ours[local][here]),
            Op::Read => ours[local][here].copy_from_slice(&theirs[remote][there]),
        }
    }
}

fn desc(local: (u32, u64), remote: (u32, u64), len: u64) -> Desc {
    Desc {
        local_region: local.0,
        local_offset: local.1,
        remote_region: remote.0,
        remote_offset: remote.1,
        len,
    }
}

fn posts_move_exactly_the_described_bytes<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::connected(make);
    let mut random = Random::new("posts_move_exactly_the_described_bytes");
    scramble(&pair.a, &mut random);
    scramble(&pair.b, &mut random);
    for round in 0..30 {
        let op = if random.below(2) == 0 { Op::Write } else { Op::Read };
        let descs = random_descs(&mut random, &pair.a.lens, op);
        let (mut ours, mut theirs) = (snapshot(&pair.a), snapshot(&pair.b));
        apply(op, &descs, &mut ours, &mut theirs);
        let id = PostId(round);
        pair.a.plane.post(A_KNOWS_B, Post { id, op, descs: descs.clone(), notify: None }).unwrap();
        assert_eq!(pair.await_post(id), Ok(()));
        assert!(snapshot(&pair.a) == ours, "round {round}: {op:?} {descs:?}: the poster's memory");
        assert!(snapshot(&pair.b) == theirs, "round {round}: {op:?} {descs:?}: the peer's memory");
    }
}

fn descriptors_out_of_bounds_are_refused_and_touch_nothing<P: Plane>(
    make: &mut impl FnMut() -> (Side<P>, Side<P>),
) {
    let mut pair = Pair::connected(make);
    let mut random = Random::new("descriptors_out_of_bounds_are_refused_and_touch_nothing");
    scramble(&pair.a, &mut random);
    scramble(&pair.b, &mut random);
    let before = (snapshot(&pair.a), snapshot(&pair.b));
    let good = desc((0, 0), (0, 0), 4096);
    let end = LENS[1] as u64;
    let bad = [
        ("remote", desc((0, 0), (1, end), 1)),
        ("remote", desc((0, 0), (1, end - 4095), 4096)),
        ("remote", desc((0, 0), (1, u64::MAX), 2)),
        ("remote", desc((0, 0), (1, u64::MAX - 4095), 4096)),
        ("remote", desc((0, 0), (3, 0), 1)),
        ("remote", desc((0, 0), (u32::MAX, 0), 1)),
        ("local", desc((1, end), (0, 0), 1)),
        ("local", desc((1, end - 1), (0, 0), 2)),
        ("local", desc((1, u64::MAX), (0, 0), 2)),
        ("local", desc((3, 0), (0, 0), 1)),
        ("local", desc((0, 0), (0, 0), u64::MAX)),
    ];
    for (number, (wanted_side, bad)) in bad.into_iter().enumerate() {
        for op in [Op::Write, Op::Read] {
            let descs = vec![good, good, bad, good];
            let post = Post { id: PostId(number as u64), op, descs, notify: None };
            match pair.a.plane.post(A_KNOWS_B, post) {
                Err(PlaneError::OutOfBounds { desc: 2, side, .. }) => {
                    assert_eq!(side, wanted_side, "{bad:?}")
                }
                other => panic!("{op:?} {bad:?}: {other:?}"),
            }
        }
    }
    for descs in [vec![], vec![good, desc((0, 0), (0, 0), 0)]] {
        let post = Post { id: PostId(99), op: Op::Write, descs, notify: None };
        assert!(matches!(pair.a.plane.post(A_KNOWS_B, post), Err(PlaneError::Size { .. })));
    }
    for _ in 0..100 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!((snapshot(&pair.a), snapshot(&pair.b)) == before);
}

fn the_notify_frame_comes_after_the_bytes<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::connected(make);
    let posts = 200u64;
    let len = 4000usize;
    let mut posted = 0;
    let mut seen = BTreeSet::new();
    let mut ended = 0;
    pair.until("all posts are told", |pair| {
        if posted < posts {
            pair.a.memory.write(0, posted as usize * len, &vec![posted as u8 + 1; len]);
            let at = posted * len as u64;
            let post = Post {
                id: PostId(posted),
                op: Op::Write,
                descs: vec![desc((0, at), (0, at), len as u64)],
                notify: Some(Bytes::copy_from_slice(&posted.to_le_bytes())),
            };
            match pair.a.plane.post(A_KNOWS_B, post) {
                Ok(()) => posted += 1,
                Err(error) => assert_eq!(error, PlaneError::WouldBlock),
            }
        }
        for event in pair.b_events.drain(..) {
            let PlaneEvent::Frame(frame) = event else { panic!("{event:?}") };
            let number = u64::from_le_bytes(frame[..].try_into().unwrap());
            let mut bytes = vec![0; len];
            pair.b.memory.read(0, number as usize * len, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == number as u8 + 1), "post {number} was told too early");
            seen.insert(number);
        }
        for event in pair.a_events.drain(..) {
            assert!(matches!(event, PlaneEvent::Posted { result: Ok(()), .. }), "{event:?}");
            ended += 1;
        }
        ended == posts && seen.len() as u64 == posts
    });
}

fn frames_arrive_whole_in_both_directions<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::connected(make);
    let too_long = Bytes::from(vec![0; MAX_FRAME + 1]);
    assert!(matches!(
        pair.a.plane.send(A_KNOWS_B, too_long.clone()),
        Err(PlaneError::Size { got, max: MAX_FRAME, .. }) if got == MAX_FRAME + 1
    ));
    let post =
        Post { id: PostId(0), op: Op::Write, descs: vec![desc((0, 0), (0, 0), 1)], notify: Some(too_long) };
    assert!(matches!(pair.a.plane.post(A_KNOWS_B, post), Err(PlaneError::Size { .. })));

    let mut random = Random::new("frames_arrive_whole_in_both_directions");
    let mut lens = vec![MAX_FRAME, 4, 5, 4096, 4097, 65536, MAX_FRAME];
    lens.extend((0..500).map(|_| 4 + random.below(2000)));
    let frames: Vec<Bytes> = lens
        .iter()
        .enumerate()
        .map(|(number, len)| {
            let mut frame = (number as u32).to_le_bytes().to_vec();
            frame.resize(*len, number as u8);
            frame.into()
        })
        .collect();
    // Frames may be lost: what has not arrived is sent again.
    let mut missing = [frames.clone(), frames.clone()];
    let mut resend = Instant::now();
    pair.until("all frames arrive", |pair| {
        if Instant::now() >= resend {
            for frame in &missing[0] {
                let sent = pair.a.plane.send(A_KNOWS_B, frame.clone());
                assert!(matches!(sent, Ok(()) | Err(PlaneError::WouldBlock)), "{sent:?}");
            }
            for frame in &missing[1] {
                let sent = pair.b.plane.send(B_KNOWS_A, frame.clone());
                assert!(matches!(sent, Ok(()) | Err(PlaneError::WouldBlock)), "{sent:?}");
            }
            resend = Instant::now() + Duration::from_millis(300);
        }
        for (missing, events) in missing.iter_mut().zip([&mut pair.b_events, &mut pair.a_events]) {
            for event in events.drain(..) {
                let PlaneEvent::Frame(got) = event else { panic!("{event:?}") };
                let number = u32::from_le_bytes(got[..4].try_into().unwrap()) as usize;
                assert!(got == frames[number], "frame {number} is damaged");
                missing.retain(|frame| *frame != got);
            }
        }
        missing.iter().all(Vec::is_empty)
    });
}

fn the_first_frame_arrives_before_the_receiver_connects<P: Plane>(
    make: &mut impl FnMut() -> (Side<P>, Side<P>),
) {
    let mut pair = Pair::strangers(make);
    assert_eq!(pair.a.plane.name(), pair.b.plane.name());
    let metadata = pair.b.plane.metadata().unwrap();
    assert!(metadata.len() <= (64 << 10) + 64 * LENS.len());
    pair.a.plane.connect(A_KNOWS_B, &metadata).unwrap();
    pair.send_until_heard(b"who I am");
    // And a post needs nothing but the poster's connect.
    pair.a.memory.write(0, 0, b"early bytes");
    let post = Post { id: PostId(1), op: Op::Write, descs: vec![desc((0, 0), (0, 8192), 11)], notify: None };
    pair.a.plane.post(A_KNOWS_B, post).unwrap();
    assert_eq!(pair.await_post(PostId(1)), Ok(()));
    let mut bytes = [0; 11];
    pair.b.memory.read(0, 8192, &mut bytes);
    assert_eq!(&bytes, b"early bytes");
}

fn both_sides_may_connect_at_once<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::strangers(make);
    let (for_b, for_a) = (pair.a.plane.metadata().unwrap(), pair.b.plane.metadata().unwrap());
    pair.a.plane.connect(A_KNOWS_B, &for_a).unwrap();
    pair.b.plane.connect(B_KNOWS_A, &for_b).unwrap();
    pair.a.memory.write(0, 0, b"from a");
    pair.b.memory.write(0, 0, b"from b");
    let post = |id| Post {
        id: PostId(id),
        op: Op::Write,
        descs: vec![desc((0, 0), (1, 0), 6)],
        notify: Some(Bytes::from_static(b"done")),
    };
    pair.a.plane.post(A_KNOWS_B, post(1)).unwrap();
    pair.b.plane.post(B_KNOWS_A, post(2)).unwrap();
    pair.until("both posts end", |pair| {
        let ended = |events: &[PlaneEvent], post| {
            events.contains(&PlaneEvent::Posted { post, result: Ok(()) })
                && events.contains(&PlaneEvent::Frame(Bytes::from_static(b"done")))
        };
        ended(&pair.a_events, PostId(1)) && ended(&pair.b_events, PostId(2))
    });
    let mut bytes = [0; 6];
    pair.b.memory.read(1, 0, &mut bytes);
    assert_eq!(&bytes, b"from a");
    pair.a.memory.read(1, 0, &mut bytes);
    assert_eq!(&bytes, b"from b");
}

fn every_post_ends_exactly_once_also_when_cancelled<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::connected(make);
    let mut random = Random::new("every_post_ends_exactly_once_also_when_cancelled");
    let mut ends: BTreeMap<PostId, u32> = BTreeMap::new();
    let mut accepted = 0;
    for number in 0..300 {
        let op = if random.below(2) == 0 { Op::Write } else { Op::Read };
        let post = Post {
            id: PostId(number),
            op,
            descs: vec![desc((0, 0), (0, 0), 1 + random.below(LENS[0]) as u64)],
            notify: (random.below(2) == 0).then(|| Bytes::from_static(b"notify")),
        };
        match pair.a.plane.post(A_KNOWS_B, post) {
            Ok(()) => accepted += 1,
            Err(error) => assert_eq!(error, PlaneError::WouldBlock),
        }
        if random.below(3) == 0 {
            pair.a.plane.cancel(PostId(random.below(number as usize + 1) as u64));
        }
        if random.below(3) == 0 {
            pair.turn();
        }
    }
    pair.until("all posts end", |pair| {
        for event in pair.a_events.drain(..) {
            match event {
                PlaneEvent::Posted { post, result: Ok(()) | Err(PlaneError::Cancelled) } => {
                    *ends.entry(post).or_default() += 1;
                }
                event => panic!("{event:?}"),
            }
        }
        ends.len() == accepted
    });
    pair.a.plane.cancel(PostId(0));
    for _ in 0..100 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!(ends.values().all(|count| *count == 1));
}

fn disconnect_ends_the_posts<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::connected(make);
    for id in 0..50 {
        let descs = vec![desc((0, 0), (0, 0), LENS[0] as u64)];
        pair.a.plane.post(A_KNOWS_B, Post { id: PostId(id), op: Op::Write, descs, notify: None }).unwrap();
    }
    pair.turn();
    pair.a.plane.disconnect(A_KNOWS_B);
    let descs = vec![desc((0, 0), (0, 0), 1)];
    let late = Post { id: PostId(50), op: Op::Write, descs, notify: None };
    assert_eq!(pair.a.plane.post(A_KNOWS_B, late), Err(PlaneError::PeerGone));
    assert_eq!(pair.a.plane.send(A_KNOWS_B, Bytes::new()), Err(PlaneError::PeerGone));
    pair.until("posts end", |pair| pair.a_events.len() >= 50);
    let posts: BTreeSet<_> = pair
        .a_events
        .iter()
        .map(|event| match event {
            PlaneEvent::Posted { post, .. } => *post,
            event => panic!("{event:?}"),
        })
        .collect();
    assert_eq!(posts.len(), 50);
    // Forgetting is not for ever.
    let metadata = pair.b.plane.metadata().unwrap();
    pair.a.plane.connect(PeerId(12), &metadata).unwrap();
    let post = Post { id: PostId(60), op: Op::Read, descs: vec![desc((0, 0), (0, 0), 1)], notify: None };
    pair.a.plane.post(PeerId(12), post).unwrap();
    assert_eq!(pair.await_post(PostId(60)), Ok(()));
}

fn strangers_are_refused<P: Plane>(make: &mut impl FnMut() -> (Side<P>, Side<P>)) {
    let mut pair = Pair::strangers(make);
    let nobody = PeerId(77);
    let post = Post { id: PostId(1), op: Op::Read, descs: vec![desc((0, 0), (0, 0), 1)], notify: None };
    assert_eq!(pair.a.plane.post(nobody, post), Err(PlaneError::PeerGone));
    assert_eq!(pair.a.plane.send(nobody, Bytes::new()), Err(PlaneError::PeerGone));
    pair.a.plane.disconnect(nobody);
    pair.a.plane.cancel(PostId(1));
    for metadata in [&b""[..], b"nonsense", &[0xff; 100], &vec![0; 1 << 20]] {
        assert!(matches!(pair.a.plane.connect(nobody, metadata), Err(PlaneError::Metadata(_))));
    }
    for _ in 0..10 {
        pair.turn();
    }
    assert_eq!(pair.a_events, []);
    assert!(!matches!(pair.a.plane.wait(), PlaneWait::Now));
}
