//! Checks of frames: they arrive whole, and never before the bytes that they announce.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MAX_FRAME, Op, Post, PostId, Transport, TransportError, TransportEvent};

use crate::pair::{descriptor, ended};
use crate::sys::{Sleep, sleep_until_one_wakes};
use crate::{A_KNOWS_B, B_KNOWS_A, Harness, LENS, Pair, Random, boottime, connect, heard, snapshot};

pub(crate) fn the_notify_frame_comes_after_the_bytes<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
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
                descriptors: vec![descriptor((0, at), (0, at), len as u64)],
                notify: Some(Bytes::copy_from_slice(&posted.to_le_bytes())),
            };
            match pair.a.transport.post(A_KNOWS_B, post) {
                Ok(()) => posted += 1,
                Err(error) => assert_eq!(error, TransportError::WouldBlock),
            }
        }
        for event in pair.b_events.drain(..) {
            let TransportEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
            let number = u64::from_le_bytes(frame[..].try_into().unwrap());
            let mut bytes = vec![0; len];
            pair.b.memory.read(0, number as usize * len, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == number as u8 + 1), "post {number} was told too early");
            seen.insert(number);
        }
        for event in pair.a_events.drain(..) {
            assert!(matches!(event, TransportEvent::Posted { result: Ok(()), .. }), "{event:?}");
            ended += 1;
        }
        ended == posts && seen.len() as u64 == posts
    });
}

/// Each worker sleeps on what its own transport names, and is polled only when that has come, as by the thread of a real
/// worker: polled whenever the other worker wakes, it would hide that it sleeps too long. The second worker sleeps already
/// when the first one sends.
pub(crate) fn workers_that_sleep_wake_for_frames_and_for_the_ends_of_posts<H: Harness>(harness: &H) {
    const TOO_LONG: Duration = Duration::from_secs(5);
    let mut pair = Pair::connected(harness, &LENS);
    let mut b_sleeps = Sleep::of(&pair.b.transport);
    for round in 0..20u64 {
        let frame = Bytes::copy_from_slice(&round.to_le_bytes());
        let descriptors = vec![descriptor((0, 0), (0, 0), LENS[0] as u64)];
        let post = Post { id: PostId(round), op: Op::Write, descriptors, notify: None };
        pair.a.transport.post(A_KNOWS_B, post).unwrap();
        pair.a.transport.send(A_KNOWS_B, frame.clone()).unwrap();
        let mut a_sleeps = Sleep::of(&pair.a.transport);
        let begun = Instant::now();
        loop {
            let heard = heard(&pair.b_events, &frame);
            let ended = ended(&pair.a_events, PostId(round)).is_some();
            if heard && ended {
                break;
            }
            assert!(
                begun.elapsed() < TOO_LONG,
                "round {round}: a worker sleeps on; frame heard: {heard}, post ended: {ended}"
            );
            let [a_is_awake, b_is_awake] = sleep_until_one_wakes([&a_sleeps, &b_sleeps], TOO_LONG);
            if a_is_awake {
                pair.a.transport.poll(boottime(), &mut pair.a_events);
                a_sleeps = Sleep::of(&pair.a.transport);
            }
            if b_is_awake {
                pair.b.transport.poll(boottime(), &mut pair.b_events);
                b_sleeps = Sleep::of(&pair.b.transport);
            }
        }
        pair.a_events.clear();
        pair.b_events.clear();
    }
}

/// A post that a transport moves in many parts: the frame comes after the last of them.
pub(crate) fn the_notify_frame_of_a_large_post_comes_after_all_its_bytes<H: Harness>(harness: &H) {
    let (len, piece) = (16 << 20, 64 << 10);
    let mut pair = Pair::connected(harness, &[len]);
    let mut random = Random::new("the_notify_frame_of_a_large_post_comes_after_all_its_bytes");
    let pieces = (0..len as u64).step_by(piece);
    let descriptors: Vec<_> = pieces.map(|at| descriptor((0, at), (0, at), piece as u64)).collect();
    for round in 0..4 {
        let content = random.bytes(len);
        pair.a.memory.write(0, 0, &content);
        let notify = Some(Bytes::from_static(b"all is there"));
        let (id, descriptors) = (PostId(round), descriptors.clone());
        pair.a.transport.post(A_KNOWS_B, Post { id, op: Op::Write, descriptors, notify }).unwrap();
        pair.until("the frame", |pair| heard(&pair.b_events, b"all is there"));
        let there = snapshot(&pair.b).remove(0);
        let wrong = there.iter().zip(&content).filter(|(is, must)| is != must).count();
        assert_eq!(wrong, 0, "bytes of post {round} that were not there when it was told");
        assert_eq!(pair.await_post(id), Ok(()));
        pair.a_events.clear();
        pair.b_events.clear();
    }
}

pub(crate) fn frames_arrive_whole_in_both_directions<H: Harness>(harness: &H) {
    let mut pair = Pair::connected(harness, &LENS);
    let too_long = Bytes::from(vec![0; MAX_FRAME + 1]);
    assert!(matches!(
        pair.a.transport.send(A_KNOWS_B, too_long.clone()),
        Err(TransportError::Size { got, max: MAX_FRAME, .. }) if got == MAX_FRAME + 1
    ));
    let post = Post {
        id: PostId(0),
        op: Op::Write,
        descriptors: vec![descriptor((0, 0), (0, 0), 1)],
        notify: Some(too_long),
    };
    assert!(matches!(pair.a.transport.post(A_KNOWS_B, post), Err(TransportError::Size { .. })));

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
                let sent = pair.a.transport.send(A_KNOWS_B, frame.clone());
                assert!(matches!(sent, Ok(()) | Err(TransportError::WouldBlock)), "{sent:?}");
            }
            for frame in &missing[1] {
                let sent = pair.b.transport.send(B_KNOWS_A, frame.clone());
                assert!(matches!(sent, Ok(()) | Err(TransportError::WouldBlock)), "{sent:?}");
            }
            resend = Instant::now() + Duration::from_millis(300);
        }
        for (missing, events) in missing.iter_mut().zip([&mut pair.b_events, &mut pair.a_events]) {
            for event in events.drain(..) {
                let TransportEvent::Frame { frame: got, .. } = event else { panic!("{event:?}") };
                let number = got.get(..4).map(|head| u32::from_le_bytes(head.try_into().unwrap()));
                let sent = number.and_then(|number| frames.get(number as usize));
                assert!(sent == Some(&got), "frame {number:?} is damaged");
                missing.retain(|frame| *frame != got);
            }
        }
        missing.iter().all(Vec::is_empty)
    });
}

pub(crate) fn the_first_frame_arrives_before_the_receiver_connects<H: Harness>(harness: &H) {
    let mut pair = Pair::strangers(harness, &LENS);
    assert_eq!(pair.a.transport.name(), pair.b.transport.name());
    let metadata = pair.b.transport.metadata().unwrap();
    assert!(metadata.len() <= (64 << 10) + 64 * LENS.len());
    connect(&mut pair.a.transport, A_KNOWS_B, &metadata).unwrap();
    pair.send_until_heard(b"who I am");
    // A post, too, needs only the poster's connect.
    pair.a.memory.write(0, 0, b"early bytes");
    let post = Post {
        id: PostId(1),
        op: Op::Write,
        descriptors: vec![descriptor((0, 0), (0, 8192), 11)],
        notify: None,
    };
    pair.a.transport.post(A_KNOWS_B, post).unwrap();
    assert_eq!(pair.await_post(PostId(1)), Ok(()));
    let mut bytes = [0; 11];
    pair.b.memory.read(0, 8192, &mut bytes);
    assert_eq!(&bytes, b"early bytes");
}

pub(crate) fn both_sides_may_connect_at_once<H: Harness>(harness: &H) {
    let mut pair = Pair::strangers(harness, &LENS);
    let (for_b, for_a) = (pair.a.transport.metadata().unwrap(), pair.b.transport.metadata().unwrap());
    connect(&mut pair.a.transport, A_KNOWS_B, &for_a).unwrap();
    connect(&mut pair.b.transport, B_KNOWS_A, &for_b).unwrap();
    pair.a.memory.write(0, 0, b"from a");
    pair.b.memory.write(0, 0, b"from b");
    let post = |id| Post {
        id: PostId(id),
        op: Op::Write,
        descriptors: vec![descriptor((0, 0), (1, 0), 6)],
        notify: Some(Bytes::from_static(b"done")),
    };
    pair.a.transport.post(A_KNOWS_B, post(1)).unwrap();
    pair.b.transport.post(B_KNOWS_A, post(2)).unwrap();
    pair.until("both posts end", |pair| {
        let ended = |events: &[TransportEvent], post| {
            events.contains(&TransportEvent::Posted { post, result: Ok(()) }) && heard(events, b"done")
        };
        ended(&pair.a_events, PostId(1)) && ended(&pair.b_events, PostId(2))
    });
    let mut bytes = [0; 6];
    pair.b.memory.read(1, 0, &mut bytes);
    assert_eq!(&bytes, b"from a");
    pair.a.memory.read(1, 0, &mut bytes);
    assert_eq!(&bytes, b"from b");
}
