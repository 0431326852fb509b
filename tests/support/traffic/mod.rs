//! Random traffic between hosts, checked to the byte.
//!
//! Each half of a request goes its own way at its own pace: it is random which side opens first, when pages
//! are given, how they are cut into chunks, and whether and when a side aborts. When a half has ended, its
//! pages are compared with the oracle and given back, and other requests use them soon.

mod receiving;
mod sending;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{Cause, PeerCause};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::PATIENCE;
use super::host::Host;
use receiving::Receiving;
use sending::Sending;

/// How long a half may go on when the other half has failed: far less than its deadline.
const TOLD: Duration = Duration::from_secs(30);
/// The deadline of every session.
const DEADLINE: Duration = Duration::from_secs(240);

/// The traffic of a run.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub requests: usize,
    /// Requests at once; the caches must hold that many of the largest.
    pub at_once: usize,
    pub max_pages: usize,
    /// How many of 100 halves give up at some random moment.
    pub give_up: usize,
}

/// What has become of the halves of all requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    pub sent: usize,
    pub received: usize,
    /// The number of pages that have arrived.
    pub pages: usize,
    /// Failed because their own scheduler gave up.
    pub aborted: usize,
    /// The number of senders that were told of an abort of the receiver.
    pub senders_told: usize,
    /// The number of receivers that were told of an abort of the sender.
    pub receivers_told: usize,
    pub dropped: usize,
    /// Calls that met a full ring.
    pub backpressure: usize,
    pub sender_first: usize,
    pub receiver_first: usize,
    pub pages_before_peer: usize,
}

/// How a half has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Success,
    Failed(Cause),
    Dropped,
}

/// What both halves of a request know.
#[derive(Debug, Clone, Copy)]
struct Job {
    number: usize,
    /// Positions among the prefill and the decode hosts.
    prefill: usize,
    decode: usize,
    pages: usize,
    content: u64,
    with_row: bool,
    /// `None` lets the receiver follow the room.
    replica: Option<u32>,
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Job { number, prefill, decode, pages, .. } = self;
        write!(f, "request {number} ({pages} pages from prefill {prefill} to decode {decode})")
    }
}

struct Request {
    job: Job,
    sending: Sending,
    receiving: Receiving,
    first_failure: Option<Instant>,
}

/// After how many steps a scheduler gives a session up, and how.
#[derive(Debug, Clone, Copy)]
struct Patience {
    left: Option<usize>,
    drops: bool,
    gave_up: bool,
}

impl Patience {
    fn draw(random: &mut Random, load: Load, pages: usize) -> Patience {
        let left = random.chance(load.give_up).then(|| random.below(pages + 6));
        Patience { left, drops: random.chance(30), gave_up: false }
    }

    /// Counts down one step. True once, when the half gives up.
    fn lost(&mut self) -> bool {
        let over = self.left == Some(0) && !self.gave_up;
        self.left = self.left.map(|left| left.saturating_sub(1));
        self.gave_up |= over;
        over
    }
}

/// Serves `load` on these hosts, and checks every byte and every page of it.
///
/// If halves abort, the decode hosts must have met the prefill hosts before: a receiver that knows no peer
/// yet can tell none.
pub fn run(random: &mut Random, prefills: &mut [Host], decodes: &mut [Host], load: Load) -> Tally {
    let mut tally = Tally::default();
    let mut active: VecDeque<Request> = VecDeque::new();
    let mut next = 0;
    let mut last_end = Instant::now();
    while next < load.requests || !active.is_empty() {
        while next < load.requests && active.len() < load.at_once {
            active.push_back(draw(random, prefills, decodes, next, load));
            next += 1;
        }
        let mut moved = false;
        for _ in 0..active.len() {
            let Some(mut request) = active.pop_front() else { break };
            moved |= request.step(random, prefills, decodes, &mut tally);
            match (&request.sending.end, &request.receiving.end) {
                (Some(sender), Some(receiver)) => {
                    request.conclude(sender, receiver);
                    last_end = Instant::now();
                }
                _ => active.push_back(request),
            }
        }
        for host in prefills.iter_mut().chain(decodes.iter_mut()) {
            host.take_orphans();
        }
        assert!(last_end.elapsed() < PATIENCE, "nothing ends: {}", describe(&active));
        if !moved {
            wait(prefills.iter().chain(decodes.iter()));
        }
    }
    for host in prefills.iter_mut().chain(decodes.iter_mut()) {
        host.settle();
    }
    tally
}

fn draw(random: &mut Random, prefills: &[Host], decodes: &[Host], number: usize, load: Load) -> Request {
    let (prefill, decode) = (random.below(prefills.len()), random.below(decodes.len()));
    let replica = prefills[prefill].replica;
    // Numbers may name the replica by themselves, as SGLang's do.
    let (here, there, follows) = if random.chance(50) {
        let high = (random.bits() & 0xf_ffff) << 30 | number as u64;
        let room = Room::Number(high * prefills.len() as u64 + u64::from(replica));
        (room.clone(), room, random.chance(50))
    } else {
        let mut room = || Room::request(&format!("cmpl-{number}-0-{:08x}", random.bits() as u32)).unwrap();
        (room(), room(), false)
    };
    let pages = match random.below(10) {
        0 => random.below(2),
        1 => load.max_pages,
        _ => 1 + random.below(load.max_pages),
    };
    let job = Job {
        number,
        prefill,
        decode,
        pages,
        content: random.bits(),
        with_row: random.chance(70),
        replica: (!follows).then_some(replica),
    };
    let sending = Sending::new(here, Patience::draw(random, load, pages));
    let receiving = Receiving::new(there, Patience::draw(random, load, pages));
    Request { job, sending, receiving, first_failure: None }
}

impl Request {
    /// Advances each half by one step or by none, at random. True if something happened.
    fn step(
        &mut self,
        random: &mut Random,
        prefills: &mut [Host],
        decodes: &mut [Host],
        tally: &mut Tally,
    ) -> bool {
        let Request { job, sending, receiving, first_failure } = self;
        let mut moved = false;
        if sending.end.is_none() && random.chance(60) {
            let opened = sending.is_open();
            moved |= sending.step(job, &mut prefills[job.prefill], random, tally);
            tally.sender_first += usize::from(!opened && sending.is_open() && !receiving.is_open());
        }
        if receiving.end.is_none() && random.chance(60) {
            let opened = receiving.is_open();
            let addr = prefills[job.prefill].addr.clone();
            moved |= receiving.step(job, &mut decodes[job.decode], &addr, random, tally);
            tally.receiver_first += usize::from(!opened && receiving.is_open() && !sending.is_open());
        }
        if sending.has_failed() || receiving.has_failed() {
            let since = first_failure.get_or_insert_with(Instant::now).elapsed();
            let both = sending.has_failed() && receiving.has_failed();
            assert!(both || since < TOLD, "{job}: the other side was not told");
        }
        moved
    }

    /// Both halves have ended: do their ends agree, and are they true?
    fn conclude(&self, sender: &End, receiver: &End) {
        use End::{Dropped, Failed, Success};
        let told = Cause::ByPeer(PeerCause::Aborted);
        let (p_gave_up, d_gave_up) = (self.sending.gave_up(), self.receiving.gave_up());
        for (end, own, other) in [(sender, p_gave_up, d_gave_up), (receiver, d_gave_up, p_gave_up)] {
            let true_reason = match end {
                Success | Dropped => true,
                Failed(Cause::Aborted) => own,
                Failed(cause) => *cause == told && other,
            };
            assert!(true_reason, "{}: {end:?}, gave up {own}, the other {other}", self.job);
        }
        // Whoever was told was told by one that did not succeed.
        if *sender == Failed(told.clone()) {
            assert_ne!(*receiver, Success, "{}", self.job);
        }
        if *receiver == Failed(told) {
            assert_ne!(*sender, Success, "{}", self.job);
        }
        // A sender's success means that the bytes are in place; a receiver may then still give up.
        if *sender == Success && !d_gave_up {
            assert_eq!(*receiver, Success, "{}", self.job);
        }
    }
}

fn describe(active: &VecDeque<Request>) -> String {
    active
        .iter()
        .map(|request| format!("\n{}: {:?} {:?}", request.job, request.sending, request.receiving))
        .collect()
}

/// Sleeps until a session has changed, but not for long, because a full command ring does not wake when it
/// empties.
fn wait<'a>(hosts: impl Iterator<Item = &'a Host>) {
    let sets: Vec<_> = hosts.map(|host| host.manager.poll_set()).collect();
    let mut fds: Vec<_> =
        sets.iter().map(|set| PollFd::from_borrowed_fd(set.as_fd(), PollFlags::IN)).collect();
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 2_000_000 }));
    for set in sets {
        set.drain(|_| ());
    }
}
