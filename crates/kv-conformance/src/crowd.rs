//! A check of concurrency: three workers, each of which posts to both others at the same time.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use kv_core::{Op, PeerId, Post, PostId, Transport, TransportError, TransportEvent};

use crate::pair::descriptor;
use crate::{Harness, Random, Side, connect};

const PAGE: usize = 12_000;
/// Pages that each worker moves to each other worker, and reads from each other worker.
const PAGES: usize = 60;
const WORKERS: usize = 3;

/// Every page of a worker's first region is the target of one post at most. No page of a worker's second
/// region, from which others read and the worker writes, is a target.
pub(crate) fn three_workers_exchange_pages_at_once<H: Harness>(harness: &H) {
    let mut random = Random::new("three_workers_exchange_pages_at_once");
    let room = WORKERS * 2 * PAGES * PAGE;
    let given = PAGES * PAGE;
    let mut sides: Vec<Side<H::Transport>> = (0..WORKERS).map(|_| harness.worker(&[room, given])).collect();
    let content: Vec<Vec<u8>> = (0..WORKERS).map(|_| random.bytes(given)).collect();
    for (side, content) in sides.iter().zip(&content) {
        side.memory.write(1, 0, content);
    }
    let metadata: Vec<Bytes> = sides.iter().map(|side| side.transport.metadata().unwrap()).collect();
    for (us, side) in sides.iter_mut().enumerate() {
        for (them, metadata) in metadata.iter().enumerate().filter(|(them, _)| *them != us) {
            connect(&mut side.transport, PeerId(them as u64), metadata).unwrap();
        }
    }
    // The posts, in random order, and the place that each byte must come from.
    let mut wanted: Vec<BTreeMap<usize, (usize, usize)>> = vec![BTreeMap::new(); WORKERS];
    let mut to_post: Vec<Vec<(PeerId, Post)>> = vec![Vec::new(); WORKERS];
    for (us, to_post) in to_post.iter_mut().enumerate() {
        for them in (0..WORKERS).filter(|them| *them != us) {
            for page in 0..2 * PAGES {
                let read = harness.reads() && page % 2 == 1;
                // The slot in the target's room belongs to this worker and this page.
                let (owner, slot) = if read { (us, them) } else { (them, us) };
                let at = (slot * 2 * PAGES + page) * PAGE;
                let source = random.below(PAGES) * PAGE;
                let giver = if read { them } else { us };
                wanted[owner].insert(at, (giver, source));
                let (room, given) = ((0, at as u64), (1, source as u64));
                let (op, descriptor) = match read {
                    true => (Op::Read, descriptor(room, given, PAGE as u64)),
                    false => (Op::Write, descriptor(given, room, PAGE as u64)),
                };
                let id = PostId((them * 2 * PAGES + page) as u64);
                let notify = (!read).then(|| Bytes::copy_from_slice(&(at as u64).to_le_bytes()));
                to_post.push((PeerId(them as u64), Post { id, op, descriptors: vec![descriptor], notify }));
            }
        }
        for index in (1..to_post.len()).rev() {
            to_post.swap(index, random.below(index + 1));
        }
    }
    let posts = to_post[0].len();
    let mut ended = vec![BTreeMap::<PostId, u32>::new(); WORKERS];
    let deadline = Instant::now() + harness.patience();
    while ended.iter().any(|ended| ended.len() < posts) {
        assert!(Instant::now() < deadline, "{:?} of {posts}", ended.iter().map(BTreeMap::len));
        for us in 0..WORKERS {
            for _ in 0..random.below(40) {
                let Some((peer, post)) = to_post[us].pop() else { break };
                match sides[us].transport.post(peer, post.clone()) {
                    Ok(()) => {}
                    Err(error) => {
                        assert_eq!(error, TransportError::WouldBlock);
                        to_post[us].push((peer, post));
                    }
                }
            }
            let mut events = Vec::new();
            sides[us].transport.poll(harness.now(), &mut events);
            for event in events {
                match event {
                    TransportEvent::Posted { post, result } => {
                        assert_eq!(result, Ok(()), "worker {us}, {post}");
                        *ended[us].entry(post).or_default() += 1;
                    }
                    TransportEvent::Frame { frame, .. } => {
                        // The notify frame has come, so the page must be there already.
                        let at = u64::from_le_bytes(frame[..].try_into().unwrap()) as usize;
                        check_page(&sides[us], us, at, &wanted[us], &content);
                    }
                    event => panic!("{event:?}"),
                }
            }
        }
    }
    for (us, side) in sides.iter().enumerate() {
        assert!(ended[us].values().all(|count| *count == 1), "worker {us}: a post ended twice");
        for at in wanted[us].keys() {
            check_page(side, us, *at, &wanted[us], &content);
        }
        let mut kept = vec![0; given];
        side.memory.read(1, 0, &mut kept);
        assert!(kept == content[us], "worker {us}: what it gave away has changed");
    }
}

fn check_page<P>(
    side: &Side<P>,
    us: usize,
    at: usize,
    wanted: &BTreeMap<usize, (usize, usize)>,
    content: &[Vec<u8>],
) {
    let (giver, source) = wanted[&at];
    let mut page = vec![0; PAGE];
    side.memory.read(0, at, &mut page);
    assert!(page == content[giver][source..source + PAGE], "worker {us}: the page at {at} from {giver}");
}
